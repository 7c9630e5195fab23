#include "client/worker_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>

#include "tests/storage/base/fake_clock.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;
using Outcome = WorkerPool::Outcome;

WorkerOptions Options(std::vector<std::string> targets) {
  WorkerOptions options;
  options.targets = std::move(targets);
  options.pause = std::chrono::milliseconds(500);
  return options;
}

TEST(WorkerPoolTest, WorkGoesToWhoeverHasTheLeast) {
  FakeClock clock;
  WorkerPool pool(Options({"a:1", "b:1", "c:1"}), clock);
  std::set<std::string> taken;
  for (int i = 0; i < 3; ++i) taken.insert(pool.Take()->target);
  EXPECT_EQ(taken.size(), 3u);
  const auto fourth = pool.Take();
  pool.Done(fourth, Outcome::kWell);
  const auto least = pool.Take(fourth.get());
  EXPECT_NE(least, fourth);
}

TEST(WorkerPoolTest, AWorkerThatFailedIsLeftAloneLongerEachTime) {
  FakeClock clock;
  WorkerPool pool(Options({"a:1"}), clock);
  for (const int pause_ms : {500, 1000, 2000}) {
    const auto worker = pool.Take();
    ASSERT_NE(worker, nullptr);
    pool.Done(worker, Outcome::kFailed);
    EXPECT_EQ(pool.Take(), nullptr);
    EXPECT_EQ(pool.Workers().usable, 0u);
    clock.Advance(std::chrono::milliseconds(pause_ms - 1));
    EXPECT_EQ(pool.Take(), nullptr);
    clock.Advance(std::chrono::milliseconds(1));
    EXPECT_EQ(pool.Workers().usable, 1u);
  }
  const auto worker = pool.Take();
  // One at a time finds out whether it is well again.
  EXPECT_EQ(pool.Take(), nullptr);
  pool.Done(worker, Outcome::kWell);
  EXPECT_NE(pool.Take(), nullptr);
}

TEST(WorkerPoolTest, AWorkerThatCannotBeReachedIsNotAsked) {
  FakeClock clock;
  WorkerPool pool(Options({"127.0.0.1:1", "b:1"}), clock);
  std::shared_ptr<WorkerPool::Worker> worker = pool.Take();
  if (worker->target == "b:1") worker = pool.Take(worker.get());
  pool.Done(worker, Outcome::kUnreachable);
  EXPECT_EQ(pool.Workers().usable, 1u);
  clock.Advance(std::chrono::hours(1));
  for (int i = 0; i < 5; ++i) EXPECT_EQ(pool.Take()->target, "b:1");
}

TEST(WorkerPoolTest, AWorkerThatIsBusyIsLeftAloneForAsLongAsItSays) {
  using std::chrono::milliseconds;
  FakeClock clock;
  WorkerPool pool(Options({"a:1"}), clock);
  // It may say nothing, or too much.
  for (const auto& [said, pause] :
       {std::pair(milliseconds(40), 40), {milliseconds(0), 500}, {milliseconds(90'000), 2000}}) {
    const auto worker = pool.Take();
    const auto before = pool.Take();
    ASSERT_NE(worker, nullptr);
    pool.Done(worker, Outcome::kBusy, said);
    EXPECT_EQ(pool.Take(), nullptr);
    // What was under way already goes well.
    pool.Done(before, Outcome::kWell);
    clock.Advance(milliseconds(pause - 1));
    EXPECT_EQ(pool.Take(), nullptr);
    clock.Advance(milliseconds(1));
  }
  // It has not failed: all may ask it at once.
  EXPECT_NE(pool.Take(), nullptr);
  EXPECT_NE(pool.Take(), nullptr);
}

TEST(WorkerPoolTest, ThePauseHasABound) {
  FakeClock clock;
  WorkerPool pool(Options({"a:1"}), clock);
  for (int i = 0; i < 30; ++i) {
    const auto worker = pool.Take();
    ASSERT_NE(worker, nullptr);
    pool.Done(worker, Outcome::kFailed);
    clock.Advance(std::chrono::minutes(1));
  }
}

TEST(WorkerPoolTest, AWorkerThatIsNamedTwiceIsOne) {
  FakeClock clock;
  WorkerPool pool(Options({"a:1", "b:1", "a:1"}), clock);
  EXPECT_EQ(pool.Workers().all, 2u);
}

TEST(WorkerPoolTest, AnotherOneIsAskedInsteadOfTheLast) {
  FakeClock clock;
  WorkerPool pool(Options({"a:1", "b:1"}), clock);
  const auto first = pool.Take();
  const auto second = pool.Take(first.get());
  ASSERT_NE(second, nullptr);
  EXPECT_NE(first->target, second->target);
}

TEST(WorkerPoolTest, ANameStandsForAllOfItsAddresses) {
  WorkerOptions options = Options({"dns:///localhost:7777", "other:1"});
  WorkerPool pool(options, SystemClock());
  // The name is asked on a thread of the pool's; the others are there at once.
  EXPECT_GE(pool.Workers().all, 1u);
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (pool.Workers().all < 2 && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::yield();
  }
  std::set<std::string> targets;
  for (int i = 0; i < 6; ++i) targets.insert(pool.Take()->target);
  EXPECT_TRUE(targets.contains("127.0.0.1:7777") || targets.contains("[::1]:7777"));
  EXPECT_TRUE(targets.contains("other:1"));
}

TEST(WorkerOptionsTest, FaultsNameTheTarget) {
  EXPECT_THAT(std::string(Options({}).Validate().message()), HasSubstr("at least one"));
  for (const char* target : {"nothing", ":1", "host:", "dns:///name"}) {
    EXPECT_THAT(std::string(Options({target}).Validate().message()), HasSubstr(target));
  }
  for (const char* target : {"host:1", "[::1]:1", "unix:/a/b", "dns:///name:1"}) {
    EXPECT_TRUE(Options({target}).Validate().ok()) << target;
  }
  WorkerOptions options = Options({"a:1"});
  options.tenant = std::string(65, 't');
  EXPECT_FALSE(options.Validate().ok());
  options.tenant.clear();
  for (const auto timeout : {std::chrono::milliseconds(0), std::chrono::milliseconds(300'001)}) {
    options.timeout = timeout;
    EXPECT_THAT(std::string(options.Validate().message()), HasSubstr("timeout: "));
  }
  options.timeout = std::chrono::minutes(5);
  EXPECT_TRUE(options.Validate().ok());
}

}  // namespace
}  // namespace kvtrie
