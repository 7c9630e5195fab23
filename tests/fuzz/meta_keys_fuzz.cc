#include <cstddef>
#include <cstdint>
#include <string>

#include "storage/base/check.h"
#include "storage/meta/meta_keys.h"

namespace kvtrie {
namespace {

template <typename Key>
void TryKey(const std::string& bytes) {
  const auto key = Key::Decode(bytes);
  if (!key) return;
  KV_CHECK(key->Encode() == bytes);
  KV_CHECK(bytes.starts_with(TenantPrefix(key->tenant)));
}

}  // namespace
}  // namespace kvtrie

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  kvtrie::TryKey<kvtrie::ModelRowKey>(bytes);
  kvtrie::TryKey<kvtrie::NodeRowKey>(bytes);
  kvtrie::TryKey<kvtrie::PinRowKey>(bytes);
  kvtrie::TryKey<kvtrie::SessionRowKey>(bytes);
  return 0;
}
