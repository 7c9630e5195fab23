#pragma once

#include <cstdint>

#include "storage/base/strong_id.h"

namespace kvtrie {

// One vocabulary index.
using TokenId = std::uint32_t;

// Who owns what is stored. In every row key.
using TenantId = StrongId<std::uint32_t, struct TenantIdTag>;

// The tenant of a server without tenants configured.
inline constexpr TenantId kBuiltInTenant{1};

// Digest of a ModelSpec.
using ModelId = Id128<struct ModelIdTag>;

// Digest of a path of the trie; the root of a model is all zero.
using TrieNodeId = Id128<struct TrieNodeIdTag>;

using LeaseId = Id128<struct LeaseIdTag>;
using PinId = Id128<struct PinIdTag>;

// First 128 bits of SHA-256 of a codec profile, all of it.
using ProfileId = Id128<struct ProfileIdTag>;

// Digest of what a codec sees of a model (ModelSpec::CodecKey).
using CodecKey = Id128<struct CodecKeyTag>;

}  // namespace kvtrie
