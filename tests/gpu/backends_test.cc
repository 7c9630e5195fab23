#include "gpu/backends.h"

#include <string>

#include "gmock/gmock.h"
#include "gpu/cuda_device.h"
#include "gtest/gtest.h"

namespace kvtrie::gpu {
namespace {

TEST(BackendsTest, CpuIsTheProcessor) {
  const auto backend = MakeBackend("cpu");
  ASSERT_TRUE(backend.ok()) << backend.status();
  EXPECT_EQ((*backend)->name(), "cpu");
  EXPECT_TRUE((*backend)->Probe().ok());
}

TEST(BackendsTest, CudaIsADeviceOrSaysWhyThereIsNone) {
  const auto backend = MakeBackend("cuda");
  if (backend.ok()) {
    EXPECT_EQ((*backend)->name(), "cuda");
    EXPECT_TRUE((*backend)->Probe().ok());
    return;
  }
  EXPECT_TRUE(absl::IsUnavailable(backend.status())) << backend.status();
  EXPECT_THAT(std::string(backend.status().message()), testing::HasSubstr("CUDA"));
}

TEST(BackendsTest, AutoTakesWhatThereIs) {
  const auto backend = MakeBackend("auto");
  ASSERT_TRUE(backend.ok()) << backend.status();
  EXPECT_EQ((*backend)->name(), MakeBackend("cuda").ok() ? "cuda" : "cpu");
}

TEST(BackendsTest, OtherNamesAreRefused) {
  for (const char* const name : {"", "gpu", "CPU"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(MakeBackend(name).status())) << name;
  }
}

TEST(BackendsTest, ThereIsNoDeviceOfThatNumber) {
  EXPECT_TRUE(absl::IsUnavailable(MakeCudaDevice(1000).status()));
}

}  // namespace
}  // namespace kvtrie::gpu
