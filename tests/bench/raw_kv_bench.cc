// GB/s of raw KV, to float32 rows and back, for each dtype and each kernel set that the machine
// has.
//
//   raw_kv_bench [--layers N]
//
// Blocks of 64 tokens, 3 KV heads of 64 dimensions, half-split RoPE; normal values (seed 1). The
// angles of the block are part of the time.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "storage/base/check.h"
#include "storage/codec/codec_kernels.h"
#include "storage/codec/raw_kv.h"
#include "tests/bench/bench_kv.h"
#include "tests/bench/best_cpu_seconds.h"

namespace kvtrie {
namespace {

void Run(DType dtype, const char* name, std::uint32_t layers) {
  ModelSpec spec = BenchSpec(dtype, {layers, 3, 64, 64}, 64);
  spec.rope = {.pairing = RopePairing::kHalfSplit, .theta = 10000, .rotary_dims = 0, .scaling = ""};
  KV_CHECK(spec.Validate().ok());
  const KvGeometry geometry(spec);
  const RawKv raw_kv(geometry, spec.rope);
  std::vector<float> rows(std::size_t{64} * 3 * 64);
  std::vector<std::byte> raw(geometry.raw_block_bytes());
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 3);
  ForEachKind(geometry, [&](std::uint32_t layer, KvKind kind) {
    for (float& value : rows) value = normal(random);
    raw_kv.WriteRows(rows, layer, kind, raw_kv.AnglesAt(0), raw);
  });

  for (const KernelSet set : kKernelSets) {
    if (!UseKernelSet(set).ok()) continue;
    const double read_seconds = BestCpuSeconds(15, [&] {
      const RopeAngles angles = raw_kv.AnglesAt(1000);
      ForEachKind(geometry, [&](std::uint32_t layer, KvKind kind) {
        raw_kv.ReadRows(raw, layer, kind, angles, rows);
      });
    });
    std::vector<std::byte> written(raw.size());
    const double write_seconds = BestCpuSeconds(15, [&] {
      const RopeAngles angles = raw_kv.AnglesAt(1000);
      ForEachKind(geometry, [&](std::uint32_t layer, KvKind kind) {
        std::fill(rows.begin(), rows.end(), 1.5f);
        raw_kv.WriteRows(rows, layer, kind, angles, written);
      });
    });
    std::size_t extreme = 0;
    const double scan_seconds = BestCpuSeconds(15, [&] {
      ForEachKind(geometry, [&](std::uint32_t layer, KvKind kind) {
        extreme += raw_kv.ExtremeTokens(raw, layer, kind).size();
      });
    });
    KV_CHECK(extreme == 0);
    const double gigabytes = static_cast<double>(raw.size()) / 1e9;
    std::printf("%-8s %-8s  read %5.2f GB/s  write %5.2f GB/s  scan for extremes %5.2f GB/s\n",
                KernelSetName(set), name, gigabytes / read_seconds, gigabytes / write_seconds,
                gigabytes / scan_seconds);
  }
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) {
  const int layer_argument =
      argc == 3 && std::string(argv[1]) == "--layers" ? std::atoi(argv[2]) : 30;
  const auto layers = static_cast<std::uint32_t>(layer_argument);
  using kvtrie::DType;
  const std::pair<DType, const char*> dtypes[] = {
      {DType::kBfloat16, "bf16"},      {DType::kFloat16, "fp16"},       {DType::kFloat32, "fp32"},
      {DType::kFloat8E4m3, "fp8e4m3"}, {DType::kFloat8E5m2, "fp8e5m2"}, {DType::kInt8, "int8"}};
  for (const auto& [dtype, name] : dtypes) kvtrie::Run(dtype, name, layers);
  return 0;
}
