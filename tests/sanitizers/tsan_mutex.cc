// Tells the thread sanitizer what Abseil's locks order. Debian's libabsl is built without it, so
// that every field under an absl::Mutex would be reported. Linked with --wrap
// (tests/sanitizers/CMakeLists.txt): calls of Mutex, CondVar, BlockingCounter and Notification from
// our code come here, and go on to the library.

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

extern "C" {

void __tsan_acquire(void* address);
void __tsan_release(void* address);
// Conditions of waiting threads are evaluated by whoever unlocks, inside of the library.
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);

#define KV_LOCKS(symbol)              \
  void __real_##symbol(void* mutex);  \
  void __wrap_##symbol(void* mutex) { \
    __real_##symbol(mutex);           \
    __tsan_acquire(mutex);            \
  }
#define KV_UNLOCKS(symbol)                        \
  void __real_##symbol(void* mutex);              \
  void __wrap_##symbol(void* mutex) {             \
    __tsan_release(mutex);                        \
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__); \
    __real_##symbol(mutex);                       \
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);   \
  }
#define KV_LOCKS_WHEN(symbol)                                           \
  void __real_##symbol(void* mutex, const absl::Condition& condition);  \
  void __wrap_##symbol(void* mutex, const absl::Condition& condition) { \
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);                       \
    __real_##symbol(mutex, condition);                                  \
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);                         \
    __tsan_acquire(mutex);                                              \
  }

KV_LOCKS(_ZN4absl7debian35Mutex4LockEv)
KV_LOCKS(_ZN4absl7debian35Mutex10ReaderLockEv)
KV_UNLOCKS(_ZN4absl7debian35Mutex6UnlockEv)
KV_UNLOCKS(_ZN4absl7debian35Mutex12ReaderUnlockEv)
KV_LOCKS_WHEN(_ZN4absl7debian35Mutex8LockWhenERKNS0_9ConditionE)
KV_LOCKS_WHEN(_ZN4absl7debian35Mutex14ReaderLockWhenERKNS0_9ConditionE)

void __real__ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE(void*, const absl::Condition&);
void __wrap__ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE(void* mutex,
                                                           const absl::Condition& condition) {
  __tsan_release(mutex);
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  __real__ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE(mutex, condition);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  __tsan_acquire(mutex);
}

bool __real__ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE(
    void*, const absl::Condition&, absl::Duration);
bool __wrap__ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE(
    void* mutex, const absl::Condition& condition, absl::Duration timeout) {
  __tsan_release(mutex);
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  const bool held = __real__ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE(
      mutex, condition, timeout);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  __tsan_acquire(mutex);
  return held;
}

bool __real__ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE(
    void*, const absl::Condition&, absl::Time);
bool __wrap__ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE(
    void* mutex, const absl::Condition& condition, absl::Time deadline) {
  __tsan_release(mutex);
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  const bool held = __real__ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE(
      mutex, condition, deadline);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  __tsan_acquire(mutex);
  return held;
}

void __real__ZN4absl7debian37CondVar4WaitEPNS0_5MutexE(void*, void*);
void __wrap__ZN4absl7debian37CondVar4WaitEPNS0_5MutexE(void* condition, void* mutex) {
  __tsan_release(mutex);
  __real__ZN4absl7debian37CondVar4WaitEPNS0_5MutexE(condition, mutex);
  __tsan_acquire(mutex);
}

bool __real__ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE(void*, void*,
                                                                                 absl::Duration);
bool __wrap__ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE(
    void* condition, void* mutex, absl::Duration timeout) {
  __tsan_release(mutex);
  const bool timed_out =
      __real__ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE(condition, mutex,
                                                                                  timeout);
  __tsan_acquire(mutex);
  return timed_out;
}

bool __real__ZN4absl7debian315BlockingCounter14DecrementCountEv(void*);
bool __wrap__ZN4absl7debian315BlockingCounter14DecrementCountEv(void* counter) {
  __tsan_release(counter);
  return __real__ZN4absl7debian315BlockingCounter14DecrementCountEv(counter);
}

void __real__ZN4absl7debian315BlockingCounter4WaitEv(void*);
void __wrap__ZN4absl7debian315BlockingCounter4WaitEv(void* counter) {
  __real__ZN4absl7debian315BlockingCounter4WaitEv(counter);
  __tsan_acquire(counter);
}

void __real__ZN4absl7debian312Notification6NotifyEv(void*);
void __wrap__ZN4absl7debian312Notification6NotifyEv(void* notification) {
  __tsan_release(notification);
  __real__ZN4absl7debian312Notification6NotifyEv(notification);
}

void __real__ZNK4absl7debian312Notification19WaitForNotificationEv(void*);
void __wrap__ZNK4absl7debian312Notification19WaitForNotificationEv(void* notification) {
  __real__ZNK4absl7debian312Notification19WaitForNotificationEv(notification);
  __tsan_acquire(notification);
}

bool __real__ZNK4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE(
    void*, absl::Duration);
bool __wrap__ZNK4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE(
    void* notification, absl::Duration timeout) {
  const bool notified =
      __real__ZNK4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE(
          notification, timeout);
  __tsan_acquire(notification);
  return notified;
}

}  // extern "C"
