#include "server/worker/codec_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "tests/server/worker/worker_blocks.h"
#include "tests/storage/base/fake_clock.h"

namespace kvtrie {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::chrono::seconds kLong{100};

// What a test lets threads do: each batch waits until it may go on.
class Gate {
 public:
  void Open() {
    absl::MutexLock lock(&mutex_);
    open_ = true;
  }
  // Lets one batch pass.
  void PassOne() {
    absl::MutexLock lock(&mutex_);
    ++passes_;
  }
  void Wait() {
    absl::MutexLock lock(&mutex_);
    ++waiting_;
    mutex_.Await(absl::Condition(this, &Gate::MayPass));
    if (!open_) --passes_;
    --waiting_;
  }
  void AwaitWaiting(int count) {
    absl::MutexLock lock(&mutex_);
    awaited_ = count;
    mutex_.Await(absl::Condition(this, &Gate::IsAwaited));
  }

 private:
  bool MayPass() const { return open_ || passes_ > 0; }
  bool IsAwaited() const { return waiting_ == awaited_; }

  absl::Mutex mutex_;
  bool open_ = false;
  int passes_ = 0;
  int waiting_ = 0;
  int awaited_ = 0;
};

class CodecQueueTest : public testing::Test {
 protected:
  std::unique_ptr<CodecQueue> MakeQueue(CodecQueueOptions options) {
    options.speed_bytes = speed_bytes_;
    return std::make_unique<CodecQueue>(
        options,
        [this](std::span<const std::unique_ptr<CodecJob>> jobs) {
          {
            absl::MutexLock lock(&mutex_);
            std::string batch;
            for (const auto& job : jobs) batch += job->tenant;
            batches_.push_back(batch);
          }
          gate_.Wait();
          if (coding_takes_.count() > 0) clock_.Advance(coding_takes_);
          if (!coding_fails_) return;
          for (const auto& job : jobs) job->status = absl::InvalidArgumentError("it fails");
        },
        clock_);
  }

  // A job of a tenant named by one letter.
  std::unique_ptr<CodecJob> Job(const std::string& tenant, Clock::Duration timeout = kLong,
                                Quality quality = Quality::kHigh) {
    auto job = std::make_unique<CodecJob>();
    job->model = model_;
    job->tenant = tenant;
    job->quality = quality;
    job->tokens.resize(model_->geometry.block_tokens());
    job->deadline = clock_.Monotonic() + timeout;
    job->on_done = [this](std::unique_ptr<CodecJob> done) {
      absl::MutexLock lock(&mutex_);
      done_.push_back(std::move(done));
    };
    return job;
  }
  // From then on the speed is known, where that is enough for it.
  void CodeOneAndBeginAnother(CodecQueue& queue) {
    gate_.PassOne();
    queue.Submit(Job("a"));
    AwaitDone(1);
    queue.Submit(Job("a"));
    gate_.AwaitWaiting(1);
  }
  void AwaitDone(std::size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto reached = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return done_.size() >= count; };
    ASSERT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&reached), absl::Seconds(30)));
  }
  std::vector<std::string> batches() {
    absl::MutexLock lock(&mutex_);
    return batches_;
  }
  absl::Status StatusOf(std::size_t i) {
    absl::MutexLock lock(&mutex_);
    return done_.at(i)->status;
  }

  const std::shared_ptr<const CodecModel> model_ = std::make_shared<const CodecModel>(WorkerSpec());
  FakeClock clock_;
  Gate gate_;
  Clock::Duration coding_takes_{};
  bool coding_fails_ = false;
  std::size_t speed_bytes_ = 1;
  absl::Mutex mutex_;
  std::vector<std::string> batches_;
  std::vector<std::unique_ptr<CodecJob>> done_;
};

TEST_F(CodecQueueTest, JobsThatAgreeAreCodedTogether) {
  const auto queue = MakeQueue({.threads = 1, .batch_tokens = 3 * 16});
  queue->Submit(Job("a"));
  gate_.AwaitWaiting(1);
  for (int i = 0; i < 4; ++i) queue->Submit(Job("a"));
  queue->Submit(Job("a", kLong, Quality::kSmall));
  gate_.Open();
  AwaitDone(6);
  // No more tokens than that, and not those of another level.
  EXPECT_THAT(batches(), ElementsAre("a", "aaa", "a", "a"));
  EXPECT_EQ(queue->Stats().jobs_total, 6u);
  EXPECT_EQ(queue->Stats().batches_total, 4u);
}

TEST_F(CodecQueueTest, TenantsShareEvenlyHoweverMuchEachHasWaiting) {
  const auto queue = MakeQueue({.threads = 1, .batch_tokens = 1});
  queue->Submit(Job("x"));
  gate_.AwaitWaiting(1);
  for (int i = 0; i < 6; ++i) queue->Submit(Job("a"));
  for (int i = 0; i < 2; ++i) queue->Submit(Job("b"));
  gate_.Open();
  AwaitDone(9);
  const std::vector<std::string> order = batches();
  // Both of b's are among the first four, behind six of a's that came before them.
  EXPECT_EQ(std::count(order.begin() + 1, order.begin() + 5, "b"), 2);
}

TEST_F(CodecQueueTest, ATenantThatComesLateIsOwedNothing) {
  const auto queue = MakeQueue({.threads = 1, .batch_tokens = 1});
  for (int i = 0; i < 20; ++i) queue->Submit(Job("a"));
  for (int i = 0; i < 10; ++i) gate_.PassOne();
  AwaitDone(10);
  gate_.AwaitWaiting(1);
  for (int i = 0; i < 10; ++i) queue->Submit(Job("b"));
  gate_.Open();
  AwaitDone(30);
  const std::vector<std::string> order = batches();
  // From there on they take turns.
  EXPECT_EQ(std::count(order.begin() + 11, order.begin() + 19, "a"), 4);
}

TEST_F(CodecQueueTest, ABatchTakesJobsOfOtherTenantsToo) {
  const auto queue = MakeQueue({.threads = 1, .batch_tokens = 4 * 16});
  queue->Submit(Job("x"));
  gate_.AwaitWaiting(1);
  for (const char* tenant : {"a", "b", "a", "b"}) queue->Submit(Job(tenant));
  gate_.Open();
  AwaitDone(5);
  EXPECT_THAT(batches(), ElementsAre("x", "aabb"));
}

TEST_F(CodecQueueTest, WhatWaitsForTooLongEnds) {
  const auto queue = MakeQueue({.threads = 1, .batch_tokens = 1});
  queue->Submit(Job("a"));
  gate_.AwaitWaiting(1);
  queue->Submit(Job("a", std::chrono::seconds(5)));
  queue->Submit(Job("a", std::chrono::seconds(50)));
  clock_.Advance(std::chrono::seconds(6));
  // All threads are at work: it ends all the same.
  queue->Tick();
  AwaitDone(1);
  EXPECT_TRUE(absl::IsDeadlineExceeded(StatusOf(0)));
  EXPECT_EQ(queue->Stats().expired_total, 1u);
  gate_.Open();
  AwaitDone(3);
  EXPECT_TRUE(StatusOf(2).ok());
  // The one that expired was never coded.
  EXPECT_THAT(batches(), ElementsAre("a", "a"));
}

TEST_F(CodecQueueTest, WhatNobodyWaitsForIsNotCoded) {
  const auto queue = MakeQueue({.threads = 1, .batch_tokens = 1});
  queue->Submit(Job("a"));
  gate_.AwaitWaiting(1);
  const auto abandoned = std::make_shared<std::atomic<bool>>(false);
  for (int i = 0; i < 3; ++i) {
    auto job = Job("b");
    job->abandoned = abandoned;
    queue->Submit(std::move(job));
  }
  queue->Submit(Job("a"));
  *abandoned = true;
  gate_.Open();
  AwaitDone(5);
  EXPECT_THAT(batches(), ElementsAre("a", "a"));
  EXPECT_EQ(queue->Stats().expired_total, 0u);
}

TEST_F(CodecQueueTest, AFullQueueRefusesThoseWhoHaveMoreThanTheirShare) {
  const auto queue = MakeQueue({.threads = 1, .jobs_max = 4, .batch_tokens = 1});
  queue->Submit(Job("x"));
  gate_.AwaitWaiting(1);
  for (int i = 0; i < 4; ++i) queue->Submit(Job("a"));
  queue->Submit(Job("a"));
  AwaitDone(1);
  EXPECT_TRUE(absl::IsResourceExhausted(StatusOf(0)));
  {
    absl::MutexLock lock(&mutex_);
    EXPECT_GT(done_[0]->retry_after.count(), 0);
  }
  // Another one still gets in.
  queue->Submit(Job("b"));
  EXPECT_EQ(queue->Stats().waiting_jobs, 5u);
  EXPECT_TRUE(queue->Refuses(*Job("a")).has_value());
  EXPECT_FALSE(queue->Refuses(*Job("b")).has_value());
  EXPECT_FALSE(queue->Refuses(*Job("c")).has_value());
  gate_.Open();
  AwaitDone(7);
}

TEST_F(CodecQueueTest, ManyTenantsFillItTwiceAtMost) {
  const auto queue = MakeQueue({.threads = 1, .jobs_max = 8, .batch_tokens = 1});
  queue->Submit(Job("x"));
  gate_.AwaitWaiting(1);
  // Each as many as its share is when it comes: 8, 4, 2, 2.
  for (const char* tenant : {"aaaaaaaa", "bbbb", "cc", "dd"}) {
    for (const char* name = tenant; *name != 0; ++name) queue->Submit(Job({*name}));
  }
  EXPECT_EQ(queue->Stats().waiting_jobs, 16u);
  EXPECT_EQ(queue->Stats().refused_total, 0u);
  queue->Submit(Job("e"));
  EXPECT_EQ(queue->Stats().refused_total, 1u);
  gate_.Open();
  AwaitDone(18);
}

TEST_F(CodecQueueTest, WhatFailsTellsNothingOfTheSpeed) {
  coding_takes_ = std::chrono::milliseconds(1);
  coding_fails_ = true;
  const auto queue = MakeQueue({.threads = 1, .batch_tokens = 1});
  CodeOneAndBeginAnother(*queue);
  queue->Submit(Job("a"));
  EXPECT_EQ(queue->Stats().expected_wait.count(), 0);
  gate_.Open();
  AwaitDone(3);
}

TEST_F(CodecQueueTest, FewBytesTellNothingOfTheSpeed) {
  coding_takes_ = std::chrono::seconds(2);
  speed_bytes_ = 2 * model_->geometry.raw_block_bytes();
  const auto queue = MakeQueue({.threads = 1, .batch_tokens = 1});
  CodeOneAndBeginAnother(*queue);
  queue->Submit(Job("a"));
  EXPECT_EQ(queue->Stats().expected_wait.count(), 0);
  gate_.PassOne();
  AwaitDone(2);
  gate_.AwaitWaiting(1);
  queue->Submit(Job("a"));
  EXPECT_EQ(queue->Stats().expected_wait, std::chrono::seconds(2));
  gate_.Open();
  AwaitDone(4);
}

TEST_F(CodecQueueTest, ReferencesAreWorkToo) {
  coding_takes_ = std::chrono::seconds(2);
  const auto queue = MakeQueue({.threads = 1, .batch_tokens = 1});
  CodeOneAndBeginAnother(*queue);
  auto job = Job("a");
  job->references.resize(2);
  queue->Submit(std::move(job));
  EXPECT_EQ(queue->Stats().expected_wait, std::chrono::seconds(6));
  gate_.Open();
  AwaitDone(3);
}

TEST_F(CodecQueueTest, WhatWouldWaitForTooLongIsRefusedAtOnce) {
  coding_takes_ = std::chrono::seconds(2);
  const auto queue = MakeQueue({.threads = 1, .batch_tokens = 1});
  CodeOneAndBeginAnother(*queue);
  for (int i = 0; i < 3; ++i) queue->Submit(Job("a"));
  EXPECT_EQ(queue->Stats().expected_wait, std::chrono::seconds(6));
  const auto refusal = queue->Refuses(*Job("a", std::chrono::seconds(5)));
  ASSERT_TRUE(refusal.has_value());
  EXPECT_TRUE(absl::IsResourceExhausted(refusal->status));
  EXPECT_EQ(refusal->retry_after, std::chrono::seconds(6));
  EXPECT_FALSE(queue->Refuses(*Job("a", std::chrono::seconds(7))).has_value());
  // Another tenant waits for its share, and not for what all have.
  EXPECT_FALSE(queue->Refuses(*Job("b", std::chrono::seconds(3))).has_value());
  EXPECT_TRUE(queue->Refuses(*Job("b", std::chrono::seconds(1))).has_value());
  gate_.Open();
  AwaitDone(5);
}

TEST_F(CodecQueueTest, ADrainingQueueCodesWhatWaitsAndRefusesTheRest) {
  const auto queue = MakeQueue({.threads = 1, .batch_tokens = 1});
  queue->Submit(Job("a"));
  gate_.AwaitWaiting(1);
  queue->Submit(Job("a"));
  queue->Drain();
  queue->Submit(Job("a"));
  AwaitDone(1);
  EXPECT_TRUE(absl::IsUnavailable(StatusOf(0)));
  gate_.Open();
  AwaitDone(3);
  EXPECT_TRUE(StatusOf(1).ok());
  EXPECT_TRUE(StatusOf(2).ok());
}

TEST_F(CodecQueueTest, TheEndAnswersEveryJob) {
  auto queue = MakeQueue({.threads = 2, .batch_tokens = 1});
  for (int i = 0; i < 5; ++i) queue->Submit(Job("a"));
  gate_.AwaitWaiting(2);
  std::thread opener([&] {
    AwaitDone(3);  // those that waited are refused before those that run have ended
    gate_.Open();
  });
  queue.reset();
  opener.join();
  AwaitDone(5);
  int refused = 0;
  for (std::size_t i = 0; i < 5; ++i) refused += absl::IsUnavailable(StatusOf(i)) ? 1 : 0;
  EXPECT_EQ(refused, 3);
}

TEST_F(CodecQueueTest, TellsForHowLongTheOldestBatchHasBeenCoded) {
  const auto queue = MakeQueue({.threads = 2, .batch_tokens = 1});
  EXPECT_EQ(queue->LongestRunning(), Clock::Duration::zero());
  queue->Submit(Job("a"));
  gate_.AwaitWaiting(1);
  clock_.Advance(std::chrono::seconds(3));
  queue->Submit(Job("a"));
  gate_.AwaitWaiting(2);
  clock_.Advance(std::chrono::seconds(2));
  EXPECT_EQ(queue->LongestRunning(), std::chrono::seconds(5));
  gate_.Open();
  AwaitDone(2);
}

TEST_F(CodecQueueTest, JobsOfManyThreadsAreEachAnsweredOnce) {
  gate_.Open();
  auto queue = MakeQueue({.threads = 3, .batch_tokens = 64});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) queue->Submit(Job(std::string(1, static_cast<char>('a' + t))));
    });
  }
  for (std::thread& thread : threads) thread.join();
  AwaitDone(200);
  const CodecQueueStats stats = queue->Stats();
  EXPECT_EQ(stats.jobs_total, 200u);
  EXPECT_EQ(stats.waiting_jobs, 0u);
  EXPECT_EQ(stats.running_jobs, 0u);
  EXPECT_TRUE(stats.tenants.empty());
}

}  // namespace
}  // namespace kvtrie
