// Stored forms, little-endian, all of them sealed (sealed_bytes.h). Between version byte and
// checksum:
//
//   NodeRow         u8 provenance | u8 priority | u8 rung_count | u32 depth | 16 model |
//                   16 parent | u64 path_hash | f32 surprisal_bits | i64 created | i64 expires |
//                   u16 salt_bytes | u16 extra_key_bytes | u16 token_count |
//                   salt | extra_key | tokens, u32 each |
//                   per rung: u8 rung | u8 quality | u32 segment | u32 offset_units |
//                   u32 record_bytes | u16 codec | 16 profile | version 3: references
//                   (version 1: u32 offset_pages for offset_units, neither codec nor profile)
//   NodeDescriptor  u32 tenant | 16 node | u8 rung | u8 quality | version 2: u16 codec | 16 profile
//                   | NodeRow, sealed, to the end
//   references      u8 count | 16 node | u8 rung, each
//   PinRow          16 node | i64 end
//   StoreConfig     u32 version | u64 path_hash_seed | 32 namespace_secret
//
// PinRow and StoreConfig are of version 1. A NodeRow is of version 3 if a rung has references, else
// of version 2 if it has a rung, else of version 1. A NodeDescriptor is of version 3 if its rung
// has references, of version 1 while its rung has the codec that version 1 means (exact: raw,
// coded: residual) and no profile, else of version 2. Rows of version 1 with rungs, which such
// codecs have, are read.
#include "storage/meta/node_row.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/kv/model_spec.h"
#include "storage/kv/path.h"
#include "storage/kv/sealed_bytes.h"

namespace kvtrie {
namespace {

constexpr std::uint8_t kRowVersion = 1;
// With a codec and a profile for each rung, and places in units.
constexpr std::uint8_t kCodecRowVersion = 2;
// And with what each rung was coded against.
constexpr std::uint8_t kReferenceRowVersion = 3;
// What version 1 counts places in: pages of so many units.
constexpr std::uint32_t kUnitsPerPage = 8;

absl::Status Invalid(const char* what) { return absl::InvalidArgumentError(what); }

// What a rung of version 1 was made by.
constexpr CodecId ImpliedCodec(Rung rung) {
  return rung == Rung::kExact ? CodecId::kRaw : CodecId::kResidual;
}

bool IsImplied(Rung rung, CodecId codec, const ProfileId& profile) {
  return codec == ImpliedCodec(rung) && profile.empty();
}

// What a rung that has a record may be. What was computed on a lossy prefix may be served at less
// than its frame's own quality.
absl::Status CheckRung(Rung rung, Quality quality, CodecId codec, const ProfileId& profile,
                       Provenance provenance) {
  if (rung != Rung::kCoded && rung != Rung::kExact) return Invalid("rung");
  if (!IsQuality(quality)) return Invalid("quality");
  if (!IsCodec(codec) || RungOf(codec) != rung) return Invalid("codec");
  if (provenance == Provenance::kExact && (rung == Rung::kExact) != (quality == Quality::kExact)) {
    return Invalid(rung == Rung::kExact ? "quality of exact rung" : "quality of coded rung");
  }
  if ((codec == CodecId::kRaw || codec == CodecId::kRotated) && !profile.empty()) {
    return Invalid("profile");
  }
  return absl::OkStatus();
}

absl::Status CheckReferences(CodecId codec, std::span<const RungReference> references) {
  if (codec != CodecId::kReferenced) {
    return references.empty() ? absl::OkStatus() : Invalid("references");
  }
  if (references.empty() || references.size() > kRungReferencesMax) {
    return Invalid("count of references");
  }
  for (std::size_t i = 0; i < references.size(); ++i) {
    if (references[i].node.empty()) return Invalid("node of reference");
    if (references[i].rung != Rung::kCoded && references[i].rung != Rung::kExact) {
      return Invalid("rung of reference");
    }
    for (std::size_t other = 0; other < i; ++other) {
      if (references[other].node == references[i].node) return Invalid("references: one twice");
    }
  }
  return absl::OkStatus();
}

void WriteReferences(ByteWriter& writer, std::span<const RungReference> references) {
  writer.Write(static_cast<std::uint8_t>(references.size()));
  for (const RungReference& reference : references) {
    writer.Write(reference.node);
    writer.Write(reference.rung);
  }
}

// As many as are there; CheckReferences bounds them.
std::vector<RungReference> ReadReferences(ByteReader& reader) {
  std::vector<RungReference> references(reader.Read<std::uint8_t>());
  for (RungReference& reference : references) {
    reference.node = reader.Read<TrieNodeId>();
    reference.rung = reader.Read<Rung>();
  }
  return references;
}

absl::Status CheckRungs(const NodeRow& row) {
  const RungRow* before = nullptr;
  for (const RungRow& rung : row.rungs) {
    KV_RETURN_IF_ERROR(
        CheckRung(rung.rung, rung.quality, rung.codec, rung.profile, row.provenance));
    KV_RETURN_IF_ERROR(CheckReferences(rung.codec, rung.references));
    if (before != nullptr && before->rung >= rung.rung) return Invalid("order of rungs");
    if (rung.segment == 0) return Invalid("segment of rung");
    if (rung.record_bytes == 0) return Invalid("record_bytes of rung");
    before = &rung;
  }
  return absl::OkStatus();
}

absl::Status CheckDescriptor(const NodeDescriptor& descriptor) {
  if (descriptor.tenant == TenantId{}) return Invalid("tenant");
  if (descriptor.node.empty()) return Invalid("node");
  KV_RETURN_IF_ERROR(CheckRung(descriptor.rung, descriptor.quality, descriptor.codec,
                               descriptor.profile, descriptor.row.provenance));
  if (!descriptor.row.rungs.empty()) return Invalid("rungs in a descriptor");
  return descriptor.row.Validate();
}

absl::Status CheckPin(const PinRow& pin) {
  if (pin.node.empty()) return Invalid("node");
  if (pin.end_unix_seconds < 0) return Invalid("end_unix_seconds");
  return absl::OkStatus();
}

bool HasReferences(const NodeRow& row) {
  return std::any_of(row.rungs.begin(), row.rungs.end(),
                     [](const RungRow& rung) { return !rung.references.empty(); });
}

// A row that was read: complete, and `check` found its fields in range.
absl::Status CheckRead(const char* what, const ByteReader& reader, const absl::Status& check) {
  if (!reader.Done()) return absl::DataLossError(absl::StrCat(what, ": wrong length"));
  if (!check.ok()) return absl::DataLossError(absl::StrCat(what, ": ", check.message()));
  return absl::OkStatus();
}

}  // namespace

absl::Status NodeRow::Validate() const {
  if (model.empty()) return Invalid("model");
  if (depth == 0 || depth > kPathTokensMax) return Invalid("depth");
  if (parent.empty() != (depth == 1)) return Invalid("parent");
  if (provenance != Provenance::kExact && provenance != Provenance::kOnLossy) {
    return Invalid("provenance");
  }
  // Minus zero equals zero, but would be encoded differently.
  if (!std::isfinite(surprisal_bits) || std::signbit(surprisal_bits)) {
    return Invalid("surprisal_bits");
  }
  if (created_unix_seconds < 0) return Invalid("created_unix_seconds");
  if (expires_unix_seconds < 0) return Invalid("expires_unix_seconds");
  if (priority > kPriorityMax) return Invalid("priority");
  if (salt.size() > kSaltBytesMax || (depth != 1 && !salt.empty())) return Invalid("salt");
  if (extra_key.size() > kExtraKeyBytesMax) return Invalid("extra_key");
  if (tokens.empty() || tokens.size() > kBlockTokensMax) return Invalid("tokens");
  return CheckRungs(*this);
}

const RungRow* NodeRow::FindRung(Rung rung) const {
  for (const RungRow& row : rungs) {
    if (row.rung == rung) return &row;
  }
  return nullptr;
}

void NodeRow::SetRung(const RungRow& rung) {
  auto at = rungs.begin();
  while (at != rungs.end() && at->rung < rung.rung) ++at;
  if (at != rungs.end() && at->rung == rung.rung) {
    *at = rung;
  } else {
    rungs.insert(at, rung);
  }
}

std::string NodeRow::Encode() const {
  KV_CHECK(Validate().ok());
  const bool has_references = HasReferences(*this);
  ByteWriter writer = StartSealed(has_references  ? kReferenceRowVersion
                                  : rungs.empty() ? kRowVersion
                                                  : kCodecRowVersion);
  writer.Write(provenance);
  writer.Write(priority);
  writer.Write(static_cast<std::uint8_t>(rungs.size()));
  writer.Write(depth);
  writer.Write(model);
  writer.Write(parent);
  writer.Write(path_hash);
  writer.Write(surprisal_bits);
  writer.Write(created_unix_seconds);
  writer.Write(expires_unix_seconds);
  writer.Write(static_cast<std::uint16_t>(salt.size()));
  writer.Write(static_cast<std::uint16_t>(extra_key.size()));
  writer.Write(static_cast<std::uint16_t>(tokens.size()));
  writer.WriteText(salt);
  writer.WriteText(extra_key);
  writer.WriteText(AsText(std::as_bytes(std::span(tokens))));
  for (const RungRow& rung : rungs) {
    writer.Write(rung.rung);
    writer.Write(rung.quality);
    writer.Write(rung.segment);
    writer.Write(rung.offset_units);
    writer.Write(rung.record_bytes);
    writer.Write(rung.codec);
    writer.Write(rung.profile);
    if (has_references) WriteReferences(writer, rung.references);
  }
  return Seal(std::move(writer));
}

absl::StatusOr<NodeRow> NodeRow::Decode(std::string_view bytes) {
  KV_ASSIGN_OR_RETURN(UnsealedBytes unsealed, UnsealUpTo("node row", kReferenceRowVersion, bytes));
  ByteReader& reader = unsealed.reader;
  const bool in_pages = unsealed.version == kRowVersion;
  NodeRow row;
  row.provenance = reader.Read<Provenance>();
  row.priority = reader.Read<std::uint8_t>();
  row.rungs.resize(reader.Read<std::uint8_t>());
  row.depth = reader.Read<std::uint32_t>();
  row.model = reader.Read<ModelId>();
  row.parent = reader.Read<TrieNodeId>();
  row.path_hash = reader.Read<std::uint64_t>();
  row.surprisal_bits = reader.Read<float>();
  row.created_unix_seconds = reader.Read<std::int64_t>();
  row.expires_unix_seconds = reader.Read<std::int64_t>();
  const auto salt_bytes = reader.Read<std::uint16_t>();
  const auto extra_key_bytes = reader.Read<std::uint16_t>();
  const auto token_count = reader.Read<std::uint16_t>();
  row.salt = reader.ReadText(salt_bytes);
  row.extra_key = reader.ReadText(extra_key_bytes);
  const auto tokens = reader.ReadBytes(std::size_t{token_count} * sizeof(TokenId));
  row.tokens.resize(tokens.size() / sizeof(TokenId));
  if (!tokens.empty()) std::memcpy(row.tokens.data(), tokens.data(), tokens.size());
  for (RungRow& rung : row.rungs) {
    rung.rung = reader.Read<Rung>();
    rung.quality = reader.Read<Quality>();
    rung.segment = reader.Read<std::uint32_t>();
    rung.offset_units = reader.Read<std::uint32_t>();
    rung.record_bytes = reader.Read<std::uint32_t>();
    if (!in_pages) {
      rung.codec = reader.Read<CodecId>();
      rung.profile = reader.Read<ProfileId>();
      if (unsealed.version == kReferenceRowVersion) rung.references = ReadReferences(reader);
      continue;
    }
    rung.codec = ImpliedCodec(rung.rung);
    if (rung.offset_units > std::numeric_limits<std::uint32_t>::max() / kUnitsPerPage) {
      return absl::DataLossError("node row: offset_pages of rung");
    }
    rung.offset_units *= kUnitsPerPage;
  }
  KV_RETURN_IF_ERROR(CheckRead("node row", reader, row.Validate()));
  // One row has one form that is written.
  if (!in_pages && row.rungs.empty()) {
    return absl::DataLossError("node row: version 2 without need");
  }
  if (unsealed.version == kReferenceRowVersion && !HasReferences(row)) {
    return absl::DataLossError("node row: version 3 without need");
  }
  return row;
}

std::string NodeDescriptor::Encode() const {
  KV_CHECK(CheckDescriptor(*this).ok());
  const bool implied = IsImplied(rung, codec, profile);
  ByteWriter writer = StartSealed(implied ? kRowVersion : kCodecRowVersion);
  writer.Write(tenant);
  writer.Write(node);
  writer.Write(rung);
  writer.Write(quality);
  if (!implied) {
    writer.Write(codec);
    writer.Write(profile);
  }
  writer.WriteText(row.Encode());
  return Seal(std::move(writer));
}

absl::StatusOr<NodeDescriptor> NodeDescriptor::Decode(std::string_view bytes) {
  KV_ASSIGN_OR_RETURN(UnsealedBytes unsealed,
                      UnsealUpTo("node descriptor", kCodecRowVersion, bytes));
  ByteReader& reader = unsealed.reader;
  const bool implied = unsealed.version == kRowVersion;
  NodeDescriptor descriptor;
  descriptor.tenant = reader.Read<TenantId>();
  descriptor.node = reader.Read<TrieNodeId>();
  descriptor.rung = reader.Read<Rung>();
  descriptor.quality = reader.Read<Quality>();
  descriptor.codec = implied ? ImpliedCodec(descriptor.rung) : reader.Read<CodecId>();
  if (!implied) descriptor.profile = reader.Read<ProfileId>();
  KV_ASSIGN_OR_RETURN(descriptor.row, NodeRow::Decode(reader.ReadText(reader.remaining_bytes())));
  KV_RETURN_IF_ERROR(CheckRead("node descriptor", reader, CheckDescriptor(descriptor)));
  if (!implied && IsImplied(descriptor.rung, descriptor.codec, descriptor.profile)) {
    return absl::DataLossError("node descriptor: version 2 without need");
  }
  return descriptor;
}

std::string PinRow::Encode() const {
  KV_CHECK(CheckPin(*this).ok());
  ByteWriter writer = StartSealed(kRowVersion);
  writer.Write(node);
  writer.Write(end_unix_seconds);
  return Seal(std::move(writer));
}

absl::StatusOr<PinRow> PinRow::Decode(std::string_view bytes) {
  KV_ASSIGN_OR_RETURN(ByteReader reader, Unseal("pin row", kRowVersion, bytes));
  PinRow pin;
  pin.node = reader.Read<TrieNodeId>();
  pin.end_unix_seconds = reader.Read<std::int64_t>();
  KV_RETURN_IF_ERROR(CheckRead("pin row", reader, CheckPin(pin)));
  return pin;
}

std::string StoreConfig::Encode() const {
  KV_CHECK(version == kVersion);
  KV_CHECK(namespace_secret.size() == TrieNodeNamer::kSecretBytes);
  ByteWriter writer = StartSealed(kRowVersion);
  writer.Write(version);
  writer.Write(path_hash_seed);
  writer.WriteText(namespace_secret);
  return Seal(std::move(writer));
}

absl::StatusOr<StoreConfig> StoreConfig::Decode(std::string_view bytes) {
  KV_ASSIGN_OR_RETURN(ByteReader reader, Unseal("store configuration", kRowVersion, bytes));
  StoreConfig config;
  config.version = reader.Read<std::uint32_t>();
  if (reader.ok() && config.version != kVersion && config.version != 0) {
    return absl::FailedPreconditionError(absl::StrCat("the store has version ", config.version,
                                                      ", this release works on ", kVersion));
  }
  config.path_hash_seed = reader.Read<std::uint64_t>();
  config.namespace_secret = reader.ReadText(TrieNodeNamer::kSecretBytes);
  KV_RETURN_IF_ERROR(CheckRead("store configuration", reader,
                               config.version == kVersion ? absl::OkStatus() : Invalid("version")));
  return config;
}

}  // namespace kvtrie
