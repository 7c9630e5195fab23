// The first byte chooses the dtype, the others are a lossless body of the golden files' geometry.
#include <cstddef>
#include <cstdint>

#include "storage/codec/lossless.h"
#include "tests/fuzz/body_target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvtrie;
  if (size == 0) return 0;
  const KvGeometry geometry = LosslessGoldenGeometry(static_cast<DType>(1 + data[0] % 7));
  TryBody(geometry, ExactBytes(data + 1, size - 1), DecodeLossless, [&](const Bytes& raw) {
    Bytes again(raw.size());
    KV_CHECK(DecodeLossless(geometry, EncodeLossless(geometry, raw, {}).bytes, again).ok());
    KV_CHECK(again == raw);
  });
  return 0;
}
