#include "storage/codec/lanes.h"

#include <vector>

#include "gtest/gtest.h"
#include "storage/codec/codec_kernels.h"
#include "storage/codec/rans.h"
#include "tests/storage/codec/lanes_check.h"
#include "tests/storage/codec/test_random.h"

namespace kvtrie {

namespace {

class LanesTest : public testing::TestWithParam<KernelSet> {
 protected:
  void SetUp() override {
    if (!HasKernelSet(GetParam())) GTEST_SKIP() << "this machine has no such registers";
  }
};

TEST_P(LanesTest, EveryOperationIsThatOfAPlainLoop) {
  RecordMixed* const record[] = {RecordMixedBaseline, RecordMixedAvx2, RecordMixedAvx512};
  CheckLanes* const check[] = {CheckLanesBaseline, CheckLanesAvx2, CheckLanesAvx512};
  const std::size_t which = static_cast<std::size_t>(GetParam()) - 1;

  RansTables tables(2);
  ASSERT_TRUE(tables.Set(0, std::vector<std::uint16_t>{1, 4000, 95}).ok());
  ASSERT_TRUE(tables.Set(1, std::vector<std::uint16_t>{2000, 96, 2000}).ok());
  TestRandom random(6);
  std::vector<MixedStep> steps(200);
  for (MixedStep& step : steps) {
    for (std::size_t i = 0; i < kLanes; ++i) {
      step.table[i] = random.Below(2);
      step.symbol[i] = random.Below(3);
      step.bit_count[i] = random.Below(13);
      step.bits[i] = random.Below(1u << step.bit_count[i]);
    }
    // Lanes that code nothing must not move, in either kind.
    step.symbols = static_cast<LaneMask>(random.Below(0x10000));
    step.raw = static_cast<LaneMask>(random.Below(0x10000));
  }
  steps.front().symbols = kAllLanes;
  RansEncoder encoder;
  record[which](tables.encode(), steps.data(), steps.size(), encoder.AddSteps(2 * steps.size()));
  std::vector<std::byte> bytes;
  ASSERT_TRUE(encoder.Finish(bytes).ok());

  const char* const failed =
      check[which](tables.decode(), steps.data(), steps.size(), bytes.data(), bytes.size());
  EXPECT_EQ(failed, nullptr) << failed;
}

INSTANTIATE_TEST_SUITE_P(EachKernelSet, LanesTest, testing::ValuesIn(kKernelSets),
                         [](const auto& set) { return KernelSetName(set.param); });

}  // namespace
}  // namespace kvtrie
