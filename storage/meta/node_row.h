#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/kv/ids.h"
#include "storage/kv/quality.h"
#include "storage/kv/rung_reference.h"
#include "storage/kv/trie_node_id.h"

namespace kvtrie {

// Rows as stored: Encode is canonical, Decode is strict. What Decode refuses is DataLoss, or
// Unimplemented when it is intact and a newer release wrote it. Layouts: node_row.cc.

inline constexpr std::uint8_t kPriorityMax = 15;

inline constexpr std::size_t kRungReferencesMax = 16;

// Where one rung of a node lies; mirrors PayloadLocation, which this folder may not include. Places
// of version 1, which counts pages, are read as units.
struct RungRow {
  Rung rung = Rung::kExact;
  // At which it may be served: that of the frame, or less where the KV was computed on top of a
  // lossy prefix.
  Quality quality = Quality::kExact;
  CodecId codec = CodecId::kRaw;
  ProfileId profile{};        // that the frame names; zero: none
  std::uint32_t segment = 0;  // never 0 in a row
  std::uint32_t offset_units = 0;
  std::uint32_t record_bytes = 0;
  std::vector<RungReference> references{};  // of codec kReferenced: 1 to kRungReferencesMax

  bool operator==(const RungRow&) const = default;
};

// What a trie node is.
struct NodeRow {
  ModelId model;
  TrieNodeId parent;        // zero: first block
  std::uint32_t depth = 0;  // 1 = first block, at most kPathTokensMax
  Provenance provenance = Provenance::kExact;
  std::uint64_t path_hash = 0;  // keyed hash that the index in memory walks by
  float surprisal_bits = 0;     // of this block given the path above; 0 = not known
  std::int64_t created_unix_seconds = 0;
  std::int64_t expires_unix_seconds = 0;  // 0 = never
  std::uint8_t priority = 0;              // 0 to kPriorityMax
  std::string salt;                       // depth 1 only
  std::string extra_key;
  std::vector<TokenId> tokens;
  std::vector<RungRow> rungs;  // ascending, at most one of a kind; none: tokens only

  const RungRow* FindRung(Rung rung) const;
  // Replaces the rung of its kind, or adds it in its place.
  void SetRung(const RungRow& rung);

  bool operator==(const NodeRow&) const = default;

  // InvalidArgument names the first field that is out of range.
  absl::Status Validate() const;

  // REQUIRES: Validate() is OK.
  std::string Encode() const;
  static absl::StatusOr<NodeRow> Decode(std::string_view bytes);
};

// Rebuilds a row when the metadata is lost: the descriptor of a payload record. The row in it has
// no rungs; the record's location and these fields are its rung. What a frame of codec kReferenced
// was coded against is in the frame.
struct NodeDescriptor {
  TenantId tenant;
  TrieNodeId node;
  Rung rung = Rung::kExact;
  Quality quality = Quality::kExact;
  CodecId codec = CodecId::kRaw;
  ProfileId profile;
  NodeRow row;

  bool operator==(const NodeDescriptor&) const = default;

  // REQUIRES: tenant and node are not zero, the row is valid and has no rungs.
  std::string Encode() const;
  static absl::StatusOr<NodeDescriptor> Decode(std::string_view bytes);
};

struct PinRow {
  TrieNodeId node;
  std::int64_t end_unix_seconds = 0;

  bool operator==(const PinRow&) const = default;

  // REQUIRES: node is not zero, end_unix_seconds not negative.
  std::string Encode() const;
  static absl::StatusOr<PinRow> Decode(std::string_view bytes);
};

// Settings that the stored bytes depend on, written at creation. A mismatch at start is
// FailedPrecondition.
struct StoreConfig {
  static constexpr std::uint32_t kVersion = 1;
  std::uint32_t version = kVersion;
  std::uint64_t path_hash_seed = 0;
  std::string namespace_secret;  // TrieNodeNamer::kSecretBytes, of the built-in tenant

  bool operator==(const StoreConfig&) const = default;

  // REQUIRES: version is kVersion, the secret has its size.
  std::string Encode() const;
  // FailedPrecondition: intact, and of another `version`.
  static absl::StatusOr<StoreConfig> Decode(std::string_view bytes);
};

}  // namespace kvtrie
