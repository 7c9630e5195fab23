#include "storage/codec/codec_kernels.h"

#include <cstddef>
#include <set>

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

TEST(CodecKernelsTest, EveryMachineHasTheBaseline) {
  EXPECT_TRUE(HasKernelSet(KernelSet::kBaseline));
}

TEST(CodecKernelsTest, ABetterSetImpliesTheOthers) {
  EXPECT_TRUE(!HasKernelSet(KernelSet::kAvx512) || HasKernelSet(KernelSet::kAvx2));
}

TEST(CodecKernelsTest, TheBestSetIsUsedUntilAnotherIsChosen) {
  const KernelSet best = UsedKernelSet();
  std::set<const CodecKernels*> tables;
  for (const KernelSet set : kKernelSets) {
    EXPECT_TRUE(!HasKernelSet(set) || set <= best) << KernelSetName(set);
    EXPECT_EQ(UseKernelSet(set).ok(), HasKernelSet(set)) << KernelSetName(set);
    if (!HasKernelSet(set)) {
      EXPECT_TRUE(absl::IsFailedPrecondition(UseKernelSet(set)));
      continue;
    }
    EXPECT_EQ(UsedKernelSet(), set);
    tables.insert(&Kernels());
  }
  EXPECT_EQ(tables.size(), static_cast<std::size_t>(best));
  EXPECT_TRUE(UseKernelSet(best).ok());
}

}  // namespace
}  // namespace kvtrie
