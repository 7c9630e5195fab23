#include "server/stream_registry.h"

#include <gtest/gtest.h>

#include "tests/storage/base/fake_clock.h"

namespace kvtrie {
namespace {

class FakeStream final : public TrackedStream {
 public:
  using TrackedStream::ArmStall;
  using TrackedStream::DisarmStall;
  void Abort(const absl::Status& status) override { aborted = status; }
  void OnDrain() override { drained = true; }
  absl::Status aborted;
  bool drained = false;
};

class StreamRegistryTest : public ::testing::Test {
 protected:
  FakeClock clock_;
  StreamRegistry registry_{2, std::chrono::milliseconds(100), clock_};
};

TEST_F(StreamRegistryTest, EndsOnlyThoseThatOweProgressForTooLong) {
  const auto stalled = std::make_shared<FakeStream>();
  const auto waiting = std::make_shared<FakeStream>();
  ASSERT_TRUE(registry_.Add(stalled).ok());
  ASSERT_TRUE(registry_.Add(waiting).ok());
  stalled->ArmStall(clock_.Monotonic());
  clock_.Advance(std::chrono::milliseconds(99));
  registry_.Tick();
  EXPECT_TRUE(stalled->aborted.ok());
  clock_.Advance(std::chrono::milliseconds(1));
  registry_.Tick();
  EXPECT_TRUE(absl::IsDeadlineExceeded(stalled->aborted));
  EXPECT_TRUE(waiting->aborted.ok());
  EXPECT_EQ(registry_.stalled_total(), 1u);
}

TEST_F(StreamRegistryTest, ProgressDisarms) {
  const auto stream = std::make_shared<FakeStream>();
  ASSERT_TRUE(registry_.Add(stream).ok());
  stream->ArmStall(clock_.Monotonic());
  stream->DisarmStall();
  clock_.Advance(std::chrono::hours(1));
  registry_.Tick();
  EXPECT_TRUE(stream->aborted.ok());
}

TEST_F(StreamRegistryTest, StreamsAreBoundedAndRemovalMakesRoom) {
  const auto first = std::make_shared<FakeStream>();
  const auto second = std::make_shared<FakeStream>();
  const auto third = std::make_shared<FakeStream>();
  ASSERT_TRUE(registry_.Add(first).ok());
  ASSERT_TRUE(registry_.Add(second).ok());
  EXPECT_TRUE(absl::IsUnavailable(registry_.Add(third)));
  EXPECT_EQ(registry_.refused_total(), 1u);
  registry_.Remove(first.get());
  EXPECT_TRUE(registry_.Add(third).ok());
}

TEST_F(StreamRegistryTest, DrainTellsAllAndRefusesMore) {
  const auto stream = std::make_shared<FakeStream>();
  ASSERT_TRUE(registry_.Add(stream).ok());
  registry_.Drain();
  EXPECT_TRUE(stream->drained);
  EXPECT_TRUE(absl::IsUnavailable(registry_.Add(std::make_shared<FakeStream>())));
  registry_.AbortAll(absl::UnavailableError("end"));
  EXPECT_TRUE(absl::IsUnavailable(stream->aborted));
}

}  // namespace
}  // namespace kvtrie
