// Ratio and speed of the lossless codec on raw KV from a file, for each kernel set that the machine
// has.
//
//   lossless_bench [FILE --tokens N --layers N --heads N --head-dim N] [--dtype
//   bf16|fp16|fp32|fp8|int8]
//
// FILE holds raw blocks one after the other (tests/model/kv_blocks.py, pack_blocks). Without it,
// one block of 16 tokens of normal values, a scale per channel (seed 1), in the dtype.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "storage/base/check.h"
#include "storage/codec/codec_kernels.h"
#include "storage/codec/lossless.h"
#include "tests/bench/bench_kv.h"
#include "tests/bench/best_cpu_seconds.h"

namespace kvtrie {
namespace {

void Run(const KvGeometry& geometry, const std::vector<std::byte>& blocks) {
  const std::size_t block_bytes = geometry.raw_block_bytes();
  const std::size_t block_count = blocks.size() / block_bytes;
  KV_CHECK(block_count > 0);
  const auto block = [&](std::size_t index) {
    return std::span(blocks).subspan(index * block_bytes, block_bytes);
  };
  for (const KernelSet set : kKernelSets) {
    if (!UseKernelSet(set).ok()) continue;
    std::vector<CodedBody> bodies(block_count);
    const double encode_seconds = BestCpuSeconds(7, [&] {
      for (std::size_t i = 0; i < block_count; ++i)
        bodies[i] = EncodeLossless(geometry, block(i), {});
    });
    std::vector<std::byte> raw(block_bytes);
    const double decode_seconds = BestCpuSeconds(7, [&] {
      for (const CodedBody& body : bodies) KV_CHECK(DecodeLossless(geometry, body.bytes, raw).ok());
    });
    std::size_t coded_bytes = 0;
    for (std::size_t i = 0; i < block_count; ++i) {
      coded_bytes += bodies[i].bytes.size();
      KV_CHECK(DecodeLossless(geometry, bodies[i].bytes, raw).ok());
      KV_CHECK(std::equal(raw.begin(), raw.end(), block(i).begin()));
    }
    const auto raw_bytes = static_cast<double>(block_count * block_bytes);
    std::printf("%-8s %zu blocks of %.0f kB  ratio %.4f  encode %4.0f MB/s  decode %4.0f MB/s\n",
                KernelSetName(set), block_count, static_cast<double>(block_bytes) / 1e3,
                raw_bytes / static_cast<double>(coded_bytes), raw_bytes / encode_seconds / 1e6,
                raw_bytes / decode_seconds / 1e6);
  }
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) {
  using kvtrie::DType;
  std::map<std::string, std::string> options = {{"--tokens", "16"},
                                                {"--layers", "30"},
                                                {"--heads", "3"},
                                                {"--head-dim", "64"},
                                                {"--dtype", "bf16"}};
  const int first = argc % 2 == 0 ? 2 : 1;
  for (int i = first; i + 1 < argc; i += 2) options[argv[i]] = argv[i + 1];
  const auto number = [&](const char* name) {
    return static_cast<std::uint32_t>(std::strtoul(options[name].c_str(), nullptr, 10));
  };
  const std::map<std::string, DType> dtypes = {{"bf16", DType::kBfloat16},
                                               {"fp16", DType::kFloat16},
                                               {"fp32", DType::kFloat32},
                                               {"fp8", DType::kFloat8E4m3},
                                               {"int8", DType::kInt8}};
  const kvtrie::ModelSpec spec = kvtrie::BenchSpec(
      dtypes.at(options["--dtype"]),
      {number("--layers"), number("--heads"), number("--head-dim"), number("--head-dim")},
      number("--tokens"));
  const kvtrie::KvGeometry geometry(spec);
  const float scale = spec.dtype == DType::kInt8 ? 20 : 1;
  kvtrie::Run(geometry, first == 2 ? kvtrie::ReadFile(argv[1])
                                   : kvtrie::NormalBlock({geometry, {}}, scale, 0.5f));
  return 0;
}
