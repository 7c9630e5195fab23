#include "storage/meta/meta_keys.h"

#include "storage/base/byte_order.h"
#include "storage/kv/path.h"

namespace kvtrie {
namespace {

constexpr TenantId kStoreTenant{0};
constexpr std::size_t kTenantBytes = sizeof(std::uint32_t);

std::string EncodeKey(TenantId tenant, std::string_view rest) {
  std::string key = TenantPrefix(tenant);
  key.append(rest);
  return key;
}

struct SplitKey {
  TenantId tenant;
  std::string_view rest;
};

std::optional<SplitKey> Split(std::string_view bytes) {
  if (bytes.size() < kTenantBytes) return std::nullopt;
  const TenantId tenant{LoadBig32(bytes.data())};
  if (tenant == kStoreTenant) return std::nullopt;
  return SplitKey{tenant, bytes.substr(kTenantBytes)};
}

// Rows of one tenant and one 16-byte id.
template <typename Key, typename Id>
std::optional<Key> DecodeIdKey(std::string_view bytes) {
  const auto split = Split(bytes);
  if (!split) return std::nullopt;
  const auto id = Id::FromBytes(split->rest);
  if (!id || id->empty()) return std::nullopt;
  return Key{split->tenant, *id};
}

}  // namespace

std::string ModelRowKey::Encode() const { return EncodeKey(tenant, model.view()); }
std::optional<ModelRowKey> ModelRowKey::Decode(std::string_view bytes) {
  return DecodeIdKey<ModelRowKey, ModelId>(bytes);
}

std::string NodeRowKey::Encode() const { return EncodeKey(tenant, node.view()); }
std::optional<NodeRowKey> NodeRowKey::Decode(std::string_view bytes) {
  return DecodeIdKey<NodeRowKey, TrieNodeId>(bytes);
}

std::string PinRowKey::Encode() const { return EncodeKey(tenant, pin.view()); }
std::optional<PinRowKey> PinRowKey::Decode(std::string_view bytes) {
  return DecodeIdKey<PinRowKey, PinId>(bytes);
}

std::string SessionRowKey::Encode() const { return EncodeKey(tenant, session_id); }
std::optional<SessionRowKey> SessionRowKey::Decode(std::string_view bytes) {
  const auto split = Split(bytes);
  if (!split) return std::nullopt;
  if (split->rest.empty() || split->rest.size() > kSessionIdBytesMax) return std::nullopt;
  return SessionRowKey{split->tenant, std::string(split->rest)};
}

std::string StoreRowKey(std::string_view name) { return EncodeKey(kStoreTenant, name); }

std::string TenantPrefix(TenantId tenant) {
  std::string prefix(kTenantBytes, '\0');
  StoreBig32(prefix.data(), tenant.value);
  return prefix;
}

}  // namespace kvtrie
