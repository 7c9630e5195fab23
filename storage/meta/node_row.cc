// Stored forms, little-endian, all of them sealed (sealed_bytes.h) and of version 1. Between
// version byte and checksum:
//
//   NodeRow         u8 provenance | u8 priority | u8 rung_count | u32 depth | 16 model | 16 parent
//   |
//                   u64 path_hash | f32 surprisal_bits | i64 created | i64 expires |
//                   u16 salt_bytes | u16 extra_key_bytes | u16 token_count |
//                   salt | extra_key | tokens, u32 each |
//                   per rung: u8 rung | u8 quality | u32 segment | u32 offset_pages | u32
//                   record_bytes
//   NodeDescriptor  u32 tenant | 16 node | u8 rung | u8 quality | NodeRow, sealed, to the end
//   PinRow          16 node | i64 end
//   StoreConfig     u32 version | u64 path_hash_seed | 32 namespace_secret
#include "storage/meta/node_row.h"

#include <cmath>
#include <cstring>
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

absl::Status Invalid(const char* what) { return absl::InvalidArgumentError(what); }

// What a rung that has a record may be.
absl::Status CheckRung(Rung rung, Quality quality) {
  if (rung != Rung::kCoded && rung != Rung::kExact) return Invalid("rung");
  if (quality < Quality::kHigh || quality > Quality::kExact) return Invalid("quality");
  if (rung == Rung::kExact && quality != Quality::kExact) return Invalid("quality of exact rung");
  return absl::OkStatus();
}

absl::Status CheckRungs(const std::vector<RungRow>& rungs) {
  const RungRow* before = nullptr;
  for (const RungRow& rung : rungs) {
    KV_RETURN_IF_ERROR(CheckRung(rung.rung, rung.quality));
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
  KV_RETURN_IF_ERROR(CheckRung(descriptor.rung, descriptor.quality));
  if (!descriptor.row.rungs.empty()) return Invalid("rungs in a descriptor");
  return descriptor.row.Validate();
}

absl::Status CheckPin(const PinRow& pin) {
  if (pin.node.empty()) return Invalid("node");
  if (pin.end_unix_seconds < 0) return Invalid("end_unix_seconds");
  return absl::OkStatus();
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
  if (depth == 0) return Invalid("depth");
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
  return CheckRungs(rungs);
}

std::string NodeRow::Encode() const {
  KV_CHECK(Validate().ok());
  ByteWriter writer = StartSealed(kRowVersion);
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
    writer.Write(rung.offset_pages);
    writer.Write(rung.record_bytes);
  }
  return Seal(std::move(writer));
}

absl::StatusOr<NodeRow> NodeRow::Decode(std::string_view bytes) {
  KV_ASSIGN_OR_RETURN(ByteReader reader, Unseal("node row", kRowVersion, bytes));
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
    rung.offset_pages = reader.Read<std::uint32_t>();
    rung.record_bytes = reader.Read<std::uint32_t>();
  }
  KV_RETURN_IF_ERROR(CheckRead("node row", reader, row.Validate()));
  return row;
}

std::string NodeDescriptor::Encode() const {
  KV_CHECK(CheckDescriptor(*this).ok());
  ByteWriter writer = StartSealed(kRowVersion);
  writer.Write(tenant);
  writer.Write(node);
  writer.Write(rung);
  writer.Write(quality);
  writer.WriteText(row.Encode());
  return Seal(std::move(writer));
}

absl::StatusOr<NodeDescriptor> NodeDescriptor::Decode(std::string_view bytes) {
  KV_ASSIGN_OR_RETURN(ByteReader reader, Unseal("node descriptor", kRowVersion, bytes));
  NodeDescriptor descriptor;
  descriptor.tenant = reader.Read<TenantId>();
  descriptor.node = reader.Read<TrieNodeId>();
  descriptor.rung = reader.Read<Rung>();
  descriptor.quality = reader.Read<Quality>();
  KV_ASSIGN_OR_RETURN(descriptor.row, NodeRow::Decode(reader.ReadText(reader.remaining_bytes())));
  KV_RETURN_IF_ERROR(CheckRead("node descriptor", reader, CheckDescriptor(descriptor)));
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
