#include "gpu/cuda_device.h"

#include <utility>

#include "gtest/gtest.h"
#include "tests/gpu/device_checks.h"

namespace kvtrie::gpu {
namespace {

// Needs a device; elsewhere the host twin stands for it (device_coder_test).
TEST(CudaDeviceTest, CodesAsTheProcessorDoes) {
  for (std::uint64_t seed = 0; seed < 28; ++seed) {
    auto device = MakeCudaDevice(0);
    if (!device.ok()) GTEST_SKIP() << device.status();
    const Shape shape = RandomShape(seed);
    SCOPED_TRACE(shape.Text());
    const ResidualProfile profile = RandomProfile(shape, seed);
    const Twin twin(shape, profile, {.workspaces = 2}, *std::move(device));
    ASSERT_NE(twin.coder, nullptr);
    const Blocks blocks = RandomBlocks(shape, profile, 5, 77);
    ExpectSameDecoded(twin, blocks);
    ExpectLikeEncoded(twin, blocks);
  }
}

}  // namespace
}  // namespace kvtrie::gpu
