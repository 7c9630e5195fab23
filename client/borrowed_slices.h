#pragma once

#include <grpcpp/support/slice.h>

#include <cstddef>
#include <span>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace kvtrie {

// Lends the caller's memory to gRPC without a copy, and knows when gRPC has let go of all of it.
// Only then may the caller have it back: a cancelled call's bytes can still wait in a socket.
// Thread-safe.
class BorrowedSlices {
 public:
  ~BorrowedSlices() { WaitUntilReturned(); }

  grpc::Slice Lend(std::span<const std::byte> bytes);

  void WaitUntilReturned();

 private:
  static void Return(void* self);

  absl::Mutex mutex_;
  std::size_t lent_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvtrie
