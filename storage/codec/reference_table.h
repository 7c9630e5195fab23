#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/base/byte_reader.h"
#include "storage/base/strong_id.h"
#include "storage/codec/frame.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// First 128 bits of SHA-256 of a block's raw KV. A frame names what it was coded against by this,
// not by the frame that it came from: any frame that decodes to the same bytes will do, and no
// other.
using KvDigest = Id128<struct KvDigestTag>;
KvDigest DigestOfKv(std::span<const std::byte> raw);

// A stored block that a frame was coded against.
struct FrameReference {
  TrieNodeId node;  // opaque to the codec
  KvDigest digest;
  std::uint32_t first_position = 0;  // of its first token in its own session

  bool operator==(const FrameReference&) const = default;
};

// Tokens of a block that are those of a reference.
struct ReferenceRun {
  std::uint16_t first_token = 0;  // in the block
  std::uint16_t token_count = 0;  // at least 1
  std::uint16_t reference = 0;    // index among the references
  std::uint16_t offset = 0;       // of the first of them in the reference's block

  bool operator==(const ReferenceRun&) const = default;
};

// So many blocks at most have to be decoded before a frame can be.
inline constexpr std::size_t kReferencesMax = 16;

// What of a frame's body says what it was coded against (REFERENCED.md).
struct ReferenceTable {
  std::vector<FrameReference> references;
  std::vector<ReferenceRun> runs;

  // InvalidArgument names what is wrong: 1 to kReferencesMax references, each with a node of its
  // own and used by a run; runs ascending, apart from each other, within both blocks of so many
  // tokens.
  absl::Status Check(std::size_t block_tokens) const;

  // REQUIRES: Check() is OK.
  void Write(ByteWriter& writer) const;
  // DataLoss unless a table that passes Check() comes next. Memory is taken for what is there.
  static absl::StatusOr<ReferenceTable> Read(ByteReader& reader, std::size_t block_tokens);
};

// What a frame was coded against; none, unless its codec is kReferenced. A reader hands these
// blocks to the codec, decoded. DataLoss: the table is not one.
// REQUIRES: the whole frame is there, its first section intact; CheckGeometry passed.
absl::StatusOr<ReferenceTable> ReferencesOf(const FrameView& frame, std::size_t block_tokens);

}  // namespace kvtrie
