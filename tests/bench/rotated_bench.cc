// Rate, error and speed of the rotated codec, for each kernel set that the machine has.
//
//   rotated_bench [FILE] [--tokens N --layers N --heads N --head-dim N]
//
// FILE holds raw bfloat16 blocks one after the other (tests/model/kv_blocks.py, pack_blocks).
// Without it, one block of normal values, a scale per channel (seed 1). The error is the mean
// squared error relative to the vector.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "storage/base/check.h"
#include "storage/codec/codec_kernels.h"
#include "storage/codec/raw_kv.h"
#include "storage/codec/rotated.h"
#include "tests/bench/bench_kv.h"
#include "tests/bench/best_cpu_seconds.h"

namespace kvtrie {
namespace {

// Mean over vectors of the squared error relative to the vector's square.
double RelativeError(const RawKv& raw_kv, std::span<const std::byte> raw,
                     std::span<const std::byte> decoded) {
  const KvGeometry& geometry = raw_kv.geometry();
  const RopeAngles angles = raw_kv.AnglesAt(0);
  double sum = 0;
  double count = 0;
  ForEachKind(geometry, [&](std::uint32_t layer, KvKind kind) {
    const std::size_t dim = geometry.head_dim(layer, kind);
    if (dim == 0) return;
    std::vector<float> a(std::size_t{geometry.block_tokens()} *
                         geometry.row_components(layer, kind));
    std::vector<float> b(a.size());
    raw_kv.ReadRows(raw, layer, kind, angles, a);
    raw_kv.ReadRows(decoded, layer, kind, angles, b);
    for (std::size_t begin = 0; begin < a.size(); begin += dim) {
      double error = 0;
      double square = 0;
      for (std::size_t i = begin; i < begin + dim; ++i) {
        error += std::pow(static_cast<double>(a[i]) - b[i], 2);
        square += std::pow(static_cast<double>(a[i]), 2);
      }
      sum += square > 0 ? error / square : 0;
      count += 1;
    }
  });
  return sum / count;
}

void Run(const RawKv& raw_kv, const std::vector<std::byte>& blocks, std::uint32_t bits) {
  const KvGeometry& geometry = raw_kv.geometry();
  const std::size_t block_bytes = geometry.raw_block_bytes();
  const std::size_t block_count = blocks.size() / block_bytes;
  KV_CHECK(block_count > 0);
  const auto block = [&](std::size_t index) {
    return std::span(blocks).subspan(index * block_bytes, block_bytes);
  };
  const RotatedOptions options = {.k_bits = bits, .v_bits = bits, .exact_session_tokens = 0};
  for (const KernelSet set : kKernelSets) {
    if (!UseKernelSet(set).ok()) continue;
    std::vector<RotatedBlock> coded(block_count);
    const double encode_seconds = BestCpuSeconds(5, [&] {
      for (std::size_t i = 0; i < block_count; ++i) {
        coded[i] = EncodeRotated(geometry, block(i), {}, options).value();
      }
    });
    std::vector<std::byte> raw(block_bytes);
    const double decode_seconds = BestCpuSeconds(5, [&] {
      for (const RotatedBlock& one : coded) {
        KV_CHECK(DecodeRotated(geometry, one.body.bytes, raw).ok());
      }
    });
    double coded_bytes = 0;
    double error = 0;
    for (std::size_t i = 0; i < block_count; ++i) {
      KV_CHECK(DecodeRotated(geometry, coded[i].body.bytes, raw).ok());
      coded_bytes += static_cast<double>(coded[i].body.bytes.size());
      error += RelativeError(raw_kv, block(i), raw) / static_cast<double>(block_count);
    }
    const auto raw_bytes = static_cast<double>(block_count * block_bytes);
    std::printf(
        "%-8s %u bits  %.3f bits per component  error %.5f  encode %4.0f MB/s  decode %4.0f "
        "MB/s of raw\n",
        KernelSetName(set), bits, 16 * coded_bytes / raw_bytes, error,
        raw_bytes / encode_seconds / 1e6, raw_bytes / decode_seconds / 1e6);
  }
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) {
  std::map<std::string, std::string> options = {
      {"--tokens", "16"}, {"--layers", "30"}, {"--heads", "3"}, {"--head-dim", "64"}};
  const int first = argc % 2 == 0 ? 2 : 1;
  for (int i = first; i + 1 < argc; i += 2) options[argv[i]] = argv[i + 1];
  const auto number = [&](const char* name) {
    return static_cast<std::uint32_t>(std::strtoul(options[name].c_str(), nullptr, 10));
  };
  const kvtrie::ModelSpec spec = kvtrie::BenchSpec(
      kvtrie::DType::kBfloat16,
      {number("--layers"), number("--heads"), number("--head-dim"), number("--head-dim")},
      number("--tokens"));
  const kvtrie::RawKv raw_kv{kvtrie::KvGeometry(spec), {}};
  const auto blocks = first == 2 ? kvtrie::ReadFile(argv[1]) : kvtrie::NormalBlock(raw_kv, 1, 1);
  for (const std::uint32_t bits : {2u, 3u, 4u, 5u}) kvtrie::Run(raw_kv, blocks, bits);
  return 0;
}
