// A rotated body of the golden files' geometry, from any bytes.
#include <cstddef>
#include <cstdint>

#include "storage/codec/rotated.h"
#include "tests/fuzz/body_target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvtrie;
  static const KvGeometry geometry = RotatedGoldenGeometry();
  TryBody(geometry, ExactBytes(data, size), DecodeRotated, [](const Bytes& raw) {
    Bytes again(raw.size());
    const RotatedBlock block = EncodeRotated(geometry, raw, {}, {}).value();
    KV_CHECK(DecodeRotated(geometry, block.body.bytes, again).ok());
  });
  return 0;
}
