#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "storage/kv/ids.h"

namespace kvtrie {

// All row keys. Integers are big-endian, so that byte order is numeric order; the tenant stands
// first, so that dropping a tenant is one range. Decode gives nullopt unless the bytes are exactly
// one encoded key; tenant 0 is the store itself, and no id is all zero. A session id has 1 to
// kSessionIdBytesMax bytes.
//
//   table     row key                         row value
//   kStore    tenant 0 | name                 stored configuration (StoreConfig, node_row.h)
//   kModels   tenant | model id               ModelSpec::Encode
//   kNodes    tenant | node id                NodeRow (node_row.h)
//   kSessions tenant | session id             node id of the deepest block
//   kPins     tenant | pin id                 PinRow (node_row.h)

struct ModelRowKey {
  TenantId tenant;
  ModelId model;
  std::string Encode() const;
  static std::optional<ModelRowKey> Decode(std::string_view bytes);
};

struct NodeRowKey {
  TenantId tenant;
  TrieNodeId node;
  std::string Encode() const;
  static std::optional<NodeRowKey> Decode(std::string_view bytes);
};

struct SessionRowKey {
  TenantId tenant;
  std::string session_id;
  std::string Encode() const;
  static std::optional<SessionRowKey> Decode(std::string_view bytes);
};

struct PinRowKey {
  TenantId tenant;
  PinId pin;
  std::string Encode() const;
  static std::optional<PinRowKey> Decode(std::string_view bytes);
};

// Row of the store itself.
std::string StoreRowKey(std::string_view name);

// Prefix of all rows of a tenant, in any table.
std::string TenantPrefix(TenantId tenant);

}  // namespace kvtrie
