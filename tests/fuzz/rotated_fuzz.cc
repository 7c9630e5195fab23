// A rotated body of the golden files' geometry, from any bytes.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "storage/base/check.h"
#include "storage/codec/codec_kernels.h"
#include "storage/codec/rotated.h"

namespace kvtrie {
namespace {

void Try(const KvGeometry& geometry, std::span<const std::byte> body) {
  std::vector<std::byte> first(geometry.raw_block_bytes());
  std::vector<std::byte> raw(geometry.raw_block_bytes());
  KV_CHECK(UseKernelSet(KernelSet::kBaseline).ok());
  const absl::Status first_status = DecodeRotated(geometry, body, first);
  for (const KernelSet set : kKernelSets) {
    if (!UseKernelSet(set).ok()) continue;
    const absl::Status status = DecodeRotated(geometry, body, raw);
    KV_CHECK(status == first_status);
    if (!status.ok()) {
      KV_CHECK(absl::IsDataLoss(status));
      continue;
    }
    KV_CHECK(raw == first);
    const auto again = EncodeRotated(geometry, raw, {}, {});
    KV_CHECK(DecodeRotated(geometry, again.value().body.bytes, raw).ok());
    raw = first;
  }
}

}  // namespace
}  // namespace kvtrie

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const kvtrie::KvGeometry* const geometry = [] {
    kvtrie::ModelSpec spec;
    spec.name = spec.weights_revision = spec.tokenizer_digest = "fuzz";
    spec.kv_groups = {{.layer_runs = {{1, 2, 16, 12}, {1, 1, 5, 0}}, .window_tokens = 0}};
    spec.block_tokens = 24;
    KV_CHECK(spec.Validate().ok());
    return new kvtrie::KvGeometry(spec);
  }();
  // A copy of exactly this size: the sanitizer sees what is read beyond.
  const auto exact = std::make_unique<std::byte[]>(size);
  if (size > 0) std::memcpy(exact.get(), data, size);
  kvtrie::Try(*geometry, {exact.get(), size});
  return 0;
}
