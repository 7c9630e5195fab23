#include <cstddef>
#include <cstdint>
#include <string>

#include "storage/base/check.h"
#include "storage/kv/model_spec.h"
#include "tests/fuzz/mend_seal.h"

namespace kvtrie {
namespace {

void TrySpec(const std::string& bytes) {
  const auto spec = ModelSpec::Decode(bytes);
  if (!spec.ok()) return;
  KV_CHECK(spec->Encode() == bytes);
  KV_CHECK(spec->Validate().ok());
  const KvGeometry geometry(*spec);
  KV_CHECK(geometry.layer_count() >= 1 && geometry.layer_count() <= kLayersMax);
  KV_CHECK(geometry.raw_block_bytes() >= 1 && geometry.raw_block_bytes() <= kRawBlockBytesMax);
}

}  // namespace
}  // namespace kvtrie

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  kvtrie::TrySpec(bytes);
  kvtrie::TrySpec(kvtrie::MendSeal(bytes));
  return 0;
}
