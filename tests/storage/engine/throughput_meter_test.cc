#include "storage/engine/throughput_meter.h"

#include <chrono>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/storage/base/fake_clock.h"

namespace kvtrie {
namespace {

using std::chrono::milliseconds;

class ThroughputMeterTest : public testing::Test {
 protected:
  void Work(milliseconds time, double amount) {
    meter_.Begin();
    clock_.Advance(time);
    meter_.End(amount);
  }

  FakeClock clock_;
  ThroughputMeter meter_{clock_};
};

TEST_F(ThroughputMeterTest, NothingIsKnownBeforeTheFirstWork) {
  EXPECT_EQ(meter_.SecondsPerUnit(), 0);
  meter_.Begin();
  clock_.Advance(milliseconds(10));
  EXPECT_EQ(meter_.SecondsPerUnit(), 0);
  meter_.End(0);  // it failed
  EXPECT_EQ(meter_.SecondsPerUnit(), 0);
}

TEST_F(ThroughputMeterTest, TimeWithoutWorkDoesNotCount) {
  Work(milliseconds(10), 100);
  clock_.Advance(std::chrono::seconds(20));
  Work(milliseconds(10), 100);
  EXPECT_DOUBLE_EQ(meter_.SecondsPerUnit(), 1e-4);
}

TEST_F(ThroughputMeterTest, WorkSideBySideSharesItsTime) {
  for (int round = 0; round < 3; ++round) {
    meter_.Begin();
    meter_.Begin();
    clock_.Advance(milliseconds(5));
    meter_.Begin();
    clock_.Advance(milliseconds(5));
    for (int i = 0; i < 3; ++i) meter_.End(100);
  }
  EXPECT_DOUBLE_EQ(meter_.SecondsPerUnit(), 0.010 / 300);
}

TEST_F(ThroughputMeterTest, WhatWasLongAgoIsForgotten) {
  for (int i = 0; i < 1000; ++i) Work(milliseconds(10), 1);
  EXPECT_NEAR(meter_.SecondsPerUnit(), 0.010, 1e-9);
  for (int i = 0; i < 2000; ++i) Work(milliseconds(10), 100);
  EXPECT_NEAR(meter_.SecondsPerUnit(), 1e-4, 1e-6);
}

TEST_F(ThroughputMeterTest, WhatWasNotTriedForLongIsNotKnown) {
  Work(milliseconds(10), 1);
  clock_.Advance(ThroughputMeter::kKnownFor);
  EXPECT_DOUBLE_EQ(meter_.SecondsPerUnit(), 0.010);
  clock_.Advance(milliseconds(1));
  EXPECT_EQ(meter_.SecondsPerUnit(), 0);
  Work(milliseconds(2), 1);
  EXPECT_DOUBLE_EQ(meter_.SecondsPerUnit(), 0.002);
}

TEST_F(ThroughputMeterTest, ACodecOfWhichNothingIsKnownIsAsSlowAsTheSlowest) {
  ThroughputMeters meters(clock_);
  EXPECT_EQ(meters.SecondsPerUnit(), ThroughputMeters::PerCodec{});
  for (const auto& [codec, time] : {std::pair{CodecId::kRaw, milliseconds(1)},
                                    std::pair{CodecId::kResidual, milliseconds(3)}}) {
    meters.Of(codec).Begin();
    clock_.Advance(time);
    meters.Of(codec).End(1);
  }
  const ThroughputMeters::PerCodec expected{0.001, 0.003, 0.003, 0.003, 0.003};
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_DOUBLE_EQ(meters.SecondsPerUnit()[i], expected[i]);
  }
}

TEST_F(ThroughputMeterTest, ThreadsMayMeasureTogether) {
  std::vector<std::thread> threads;
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([this] {
      for (int i = 0; i < 2000; ++i) Work(std::chrono::milliseconds(1), 10);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(meter_.SecondsPerUnit(), 0);
  EXPECT_LE(meter_.SecondsPerUnit(), 0.001);
}

}  // namespace
}  // namespace kvtrie
