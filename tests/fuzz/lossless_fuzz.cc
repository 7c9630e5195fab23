// The first byte chooses the dtype, the others are a lossless body of the golden files' geometry.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "storage/base/check.h"
#include "storage/codec/codec_kernels.h"
#include "storage/codec/lossless.h"

namespace kvtrie {
namespace {

void Try(const KvGeometry& geometry, std::span<const std::byte> body) {
  std::vector<std::byte> first(geometry.raw_block_bytes());
  std::vector<std::byte> raw(geometry.raw_block_bytes());
  KV_CHECK(UseKernelSet(KernelSet::kBaseline).ok());
  const absl::Status first_status = DecodeLossless(geometry, body, first);
  for (const KernelSet set : kKernelSets) {
    if (!UseKernelSet(set).ok()) continue;
    std::fill(raw.begin(), raw.end(), std::byte{0});
    const absl::Status status = DecodeLossless(geometry, body, raw);
    KV_CHECK(status == first_status);
    if (!status.ok()) {
      KV_CHECK(absl::IsDataLoss(status));
      continue;
    }
    KV_CHECK(raw == first);
    const CodedBody again = EncodeLossless(geometry, raw, {});
    std::vector<std::byte> raw_again(raw.size());
    KV_CHECK(DecodeLossless(geometry, again.bytes, raw_again).ok());
    KV_CHECK(raw_again == raw);
  }
}

}  // namespace
}  // namespace kvtrie

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  kvtrie::ModelSpec spec;
  spec.name = spec.weights_revision = spec.tokenizer_digest = "fuzz";
  spec.dtype = static_cast<kvtrie::DType>(1 + data[0] % 7);
  spec.kv_groups = {
      {.layer_runs = {{1, 2, 20, 7}, {1, 1, 33, 0}, {1, 1, 5, 16}}, .window_tokens = 0}};
  spec.block_tokens = 64;
  KV_CHECK(spec.Validate().ok());
  // A copy of exactly this size: the sanitizer sees what is read beyond.
  const auto exact = std::make_unique<std::byte[]>(size - 1);
  if (size > 1) std::memcpy(exact.get(), data + 1, size - 1);
  kvtrie::Try(kvtrie::KvGeometry(spec), {exact.get(), size - 1});
  return 0;
}
