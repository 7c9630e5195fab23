// REFERENCED.md has the layout.
#include "storage/codec/reference_table.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/kv/profile_digest.h"

namespace kvtrie {
namespace {

constexpr std::size_t kReferenceBytes =
    TrieNodeId::kBytes + KvDigest::kBytes + sizeof(std::uint32_t);
constexpr std::size_t kRunBytes = 4 * sizeof(std::uint16_t);

// In front of the layers of sections, behind the binding: flags, zero, count of exact tokens.
constexpr std::size_t kBeforeSectionCount = 4;

absl::Status Bad(const auto&... what) {
  return absl::InvalidArgumentError(absl::StrCat("references: ", what...));
}

absl::Status Damaged(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("referenced frame: ", what));
}

template <typename Id>
Id ReadId(ByteReader& reader) {
  Id id;
  const auto bytes = reader.ReadBytes(Id::kBytes);
  if (!bytes.empty()) std::memcpy(id.bytes.data(), bytes.data(), Id::kBytes);
  return id;
}

}  // namespace

KvDigest DigestOfKv(std::span<const std::byte> raw) {
  ProfileDigest digest;  // the same of any bytes
  digest.Add(raw);
  return {.bytes = digest.Finish().bytes};
}

absl::Status ReferenceTable::Check(std::size_t block_tokens) const {
  if (references.empty() || references.size() > kReferencesMax) {
    return Bad(references.size(), " blocks, must be 1 to ", kReferencesMax);
  }
  std::vector<bool> used(references.size());
  std::size_t next = 0;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const ReferenceRun& run = runs[i];
    if (run.reference >= references.size()) return Bad("run ", i, " names no block");
    if (run.token_count == 0) return Bad("run ", i, " has no token");
    if (run.first_token < next) return Bad("run ", i, " begins before the end of the one before");
    next = std::size_t{run.first_token} + run.token_count;
    if (next > block_tokens) return Bad("run ", i, " leaves the block");
    if (std::size_t{run.offset} + run.token_count > block_tokens) {
      return Bad("run ", i, " leaves the block of its reference");
    }
    used[run.reference] = true;
  }
  for (std::size_t i = 0; i < references.size(); ++i) {
    if (!used[i]) return Bad("block ", i, " is not used by a run");
    for (std::size_t other = 0; other < i; ++other) {
      if (references[other].node == references[i].node) {
        return Bad("block ", i, " is block ", other, " again");
      }
    }
  }
  return absl::OkStatus();
}

void ReferenceTable::Write(ByteWriter& writer) const {
  writer.Write(static_cast<std::uint16_t>(references.size()));
  writer.Write(static_cast<std::uint16_t>(runs.size()));
  for (const FrameReference& reference : references) {
    writer.WriteText(reference.node.view());
    writer.WriteText(reference.digest.view());
    writer.Write(reference.first_position);
  }
  for (const ReferenceRun& run : runs) {
    for (const std::uint16_t field :
         {run.first_token, run.token_count, run.reference, run.offset}) {
      writer.Write(field);
    }
  }
}

absl::StatusOr<ReferenceTable> ReferenceTable::Read(ByteReader& reader, std::size_t block_tokens) {
  const std::size_t reference_count = reader.Read<std::uint16_t>();
  const std::size_t run_count = reader.Read<std::uint16_t>();
  if (!reader.ok() || reference_count > kReferencesMax || run_count > block_tokens ||
      reader.remaining_bytes() < reference_count * kReferenceBytes + run_count * kRunBytes) {
    return Damaged("count of references or runs");
  }
  ReferenceTable table;
  for (std::size_t i = 0; i < reference_count; ++i) {
    FrameReference& reference = table.references.emplace_back();
    reference.node = ReadId<TrieNodeId>(reader);
    reference.digest = ReadId<KvDigest>(reader);
    reference.first_position = reader.Read<std::uint32_t>();
  }
  for (std::size_t i = 0; i < run_count; ++i) {
    ReferenceRun& run = table.runs.emplace_back();
    run.first_token = reader.Read<std::uint16_t>();
    run.token_count = reader.Read<std::uint16_t>();
    run.reference = reader.Read<std::uint16_t>();
    run.offset = reader.Read<std::uint16_t>();
  }
  if (const absl::Status status = table.Check(block_tokens); !status.ok()) {
    return Damaged(status.message());
  }
  return table;
}

absl::StatusOr<ReferenceTable> ReferencesOf(const FrameView& frame, std::size_t block_tokens) {
  if (frame.codec() != CodecId::kReferenced) return ReferenceTable{};
  const std::size_t first_bytes = frame.section(0).bytes;
  if (first_bytes < kFrameBindingBytes) return Damaged("too short");
  ByteReader reader(AsText(frame.body().first(first_bytes).subspan(kFrameBindingBytes)));
  reader.ReadBytes(kBeforeSectionCount);
  const std::size_t section_count = reader.Read<std::uint16_t>();
  if (section_count != frame.section_count()) return Damaged("sections");
  reader.ReadBytes(section_count * sizeof(std::uint16_t));
  return ReferenceTable::Read(reader, block_tokens);
}

}  // namespace kvtrie
