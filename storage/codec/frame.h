#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"
#include "storage/kv/quality.h"

namespace kvtrie {

// A run of body bytes with its own checksum. Sections follow one another and cover the body. In a
// raw frame no section spans two layers, so that a reader can take some layers and still check
// every byte; other codecs cut as they like.
struct FrameSection {
  std::uint32_t bytes = 0;  // 1 to kSectionBytesMax
  std::uint32_t crc32c = 0;
};
inline constexpr std::uint32_t kSectionBytesMax = 1u << 20;
static_assert(sizeof(FrameSection) == 8);  // an entry of the section table

// What the body of every codec but raw begins with: ties the frame to the place and the tokens that
// it was made for, since its numbers mean nothing elsewhere.
struct FrameBinding {
  std::uint32_t first_position = 0;  // in the session, of the block's first token
  std::uint32_t tokens_crc32c = 0;   // of the block's token ids as u32le
  ProfileId profile;                 // zero: none

  bool operator==(const FrameBinding&) const = default;
};
inline constexpr std::size_t kFrameBindingBytes = 24;

// REQUIRES: `to` has kFrameBindingBytes.
void WriteFrameBinding(const FrameBinding& binding, std::span<std::byte> to);
// REQUIRES: `body` has kFrameBindingBytes at least.
FrameBinding ReadFrameBinding(std::span<const std::byte> body);

// The encoded KV of one block: header, section table, body (FORMAT.md beside this file). A frame
// says what it is, so that a reader needs nothing but the model's geometry.
//
// A view into foreign or stored bytes that stay alive as long as the view. Immutable, thread-safe.
class FrameView {
 public:
  // Checks structure and the header's checksum, and the profile that a whole frame names; not the
  // body's checksums (VerifyBody does).
  // `bytes` is a whole frame, or the head of one with at least header and section table. Does not
  // allocate when the bytes are a frame. Errors: DataLoss when the bytes are not a frame;
  // Unimplemented for a version or codec that is newer.
  static absl::StatusOr<FrameView> Parse(std::span<const std::byte> bytes);

  CodecId codec() const;
  Rung rung() const;
  Quality quality() const;
  ModelId model() const;
  std::size_t raw_bytes() const;
  std::size_t body_bytes() const;
  std::size_t header_bytes() const;
  std::size_t frame_bytes() const { return header_bytes() + body_bytes(); }

  std::size_t section_count() const;
  FrameSection section(std::size_t index) const;

  // REQUIRES: Parse saw the whole frame.
  std::span<const std::byte> body() const;

  // REQUIRES: Parse saw the whole frame, and its codec is not raw.
  FrameBinding binding() const;
  std::uint32_t first_position() const { return binding().first_position; }
  std::uint32_t tokens_crc32c() const { return binding().tokens_crc32c; }
  ProfileId profile() const { return binding().profile; }

  // DataLoss names the first section whose bytes do not match. REQUIRES: Parse saw the whole frame.
  absl::Status VerifyBody() const;

  // DataLoss unless the frame decodes to a block of this geometry; a raw frame also has the
  // sections of RawSectionBytes. A frame that a client has made is checked with this one as well.
  absl::Status CheckGeometry(const KvGeometry& geometry) const;

 private:
  explicit FrameView(std::span<const std::byte> bytes) : bytes_(bytes) {}
  std::span<const std::byte> bytes_;
};

// Number of header bytes (a multiple of 64) of a frame with so many sections.
std::size_t FrameHeaderBytes(std::size_t section_count);

// The largest header that a well-formed frame may have; bounds what a parser must buffer.
inline constexpr std::size_t kFrameHeaderBytesMax = std::size_t{64} << 10;

// No codec makes a larger frame of a block of this geometry; bounds what is taken from others.
std::size_t FrameBytesMax(const KvGeometry& geometry);

// How raw KV of this geometry is cut into sections: per layer, pieces of at most kSectionBytesMax.
std::vector<std::uint32_t> RawSectionBytes(const KvGeometry& geometry);

// What a writer says of a frame; the rung follows from the codec.
struct FrameHeaderFields {
  CodecId codec = CodecId::kRaw;
  Quality quality = Quality::kExact;
  ModelId model;
  std::uint64_t raw_bytes = 0;
  std::span<const FrameSection> sections;  // for raw as RawSectionBytes says
};

// Writes the header of a frame in front of a body that is (or will be) behind it.
// REQUIRES: fields as Parse takes them; `to` has FrameHeaderBytes(sections.size()) bytes.
void WriteFrameHeader(const FrameHeaderFields& fields, std::span<std::byte> to);

}  // namespace kvtrie
