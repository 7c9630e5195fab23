// FORMAT.md has the layout; the offsets here are its table.
#include "storage/codec/frame.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "storage/base/byte_order.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"

namespace kvtrie {
namespace {

constexpr std::string_view kMagic = "KVF1";
constexpr std::uint16_t kVersion = 1;

constexpr std::size_t kVersionOffset = 4;
constexpr std::size_t kCodecOffset = 6;
constexpr std::size_t kRungOffset = 8;
constexpr std::size_t kQualityOffset = 9;
constexpr std::size_t kReserved1Offset = 10;
constexpr std::size_t kSectionCountOffset = 12;
constexpr std::size_t kHeaderBytesOffset = 16;
constexpr std::size_t kReserved2Offset = 20;
constexpr std::size_t kRawBytesOffset = 24;
constexpr std::size_t kBodyBytesOffset = 32;
constexpr std::size_t kModelOffset = 40;
constexpr std::size_t kTableOffset = 56;

// Within the body of codecs that have a binding.
constexpr std::size_t kBoundTokensOffset = 4;
constexpr std::size_t kBoundProfileOffset = 8;
static_assert(kBoundProfileOffset + ProfileId::kBytes == kFrameBindingBytes);

constexpr std::size_t kSectionEntryBytes = 8;
constexpr std::size_t kChecksumBytes = 4;
constexpr std::size_t kAlignment = 64;
constexpr std::size_t kBodyBytesMax = kRawBlockBytesMax;

constexpr std::size_t kSectionCountMax =
    (kFrameHeaderBytesMax - kTableOffset - kChecksumBytes) / kSectionEntryBytes;

constexpr std::size_t ChecksumOffset(std::size_t section_count) {
  return kTableOffset + section_count * kSectionEntryBytes;
}

template <typename T>
T LoadField(std::span<const std::byte> bytes, std::size_t offset) {
  return LoadLittle<T>(bytes.data() + offset);
}

absl::Status Damaged(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("frame: ", what));
}

absl::Status Newer(const char* what, std::uint64_t value) {
  return absl::UnimplementedError(
      absl::StrCat("frame: ", what, " ", value, " was written by a newer release"));
}

// Which rung and quality frames of a codec have.
absl::Status CheckKind(CodecId codec, Rung rung, Quality quality) {
  if (codec == CodecId{0}) return Damaged("no codec");
  if (!IsCodec(codec)) return Newer("codec", static_cast<std::uint64_t>(codec));
  if (rung != RungOf(codec)) return Damaged("not on the rung of its codec");
  if (!IsQuality(quality)) return Damaged("no such quality");
  const bool rated = quality != Quality::kExact && quality != Quality::kUnrated;
  switch (codec) {
    case CodecId::kRaw:
    case CodecId::kLossless:
      return quality == Quality::kExact ? absl::OkStatus() : Damaged("exact at less quality");
    case CodecId::kResidual:
    case CodecId::kReferenced:
      return rated ? absl::OkStatus() : Damaged("residual, but of no rated quality");
    case CodecId::kRotated:
      return quality == Quality::kUnrated ? absl::OkStatus() : Damaged("rotated, but rated");
  }
  return absl::OkStatus();
}

// What a body that is there says of its profile.
absl::Status CheckProfile(const FrameView& frame) {
  const bool named = !frame.profile().empty();
  if ((frame.codec() == CodecId::kResidual || frame.codec() == CodecId::kReferenced) && !named) {
    return Damaged("residual without a profile");
  }
  if (frame.codec() == CodecId::kRotated && named) return Damaged("rotated with a profile");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<FrameView> FrameView::Parse(std::span<const std::byte> bytes) {
  if (bytes.size() < ChecksumOffset(1) + kChecksumBytes) return Damaged("too short");
  if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) return Damaged("no magic");
  const auto version = LoadField<std::uint16_t>(bytes, kVersionOffset);
  if (version > kVersion) return Newer("version", version);
  if (version != kVersion) return Damaged("no version");

  const std::size_t section_count = LoadField<std::uint32_t>(bytes, kSectionCountOffset);
  if (section_count < 1 || section_count > kSectionCountMax) return Damaged("section count");
  const std::size_t header_bytes = LoadField<std::uint32_t>(bytes, kHeaderBytesOffset);
  if (header_bytes != FrameHeaderBytes(section_count)) return Damaged("header size");
  if (bytes.size() < header_bytes) return Damaged("header is cut off");

  const std::size_t checksum_offset = ChecksumOffset(section_count);
  if (Crc32c(bytes.first(checksum_offset)) != LoadField<std::uint32_t>(bytes, checksum_offset)) {
    return Damaged("wrong checksum of the header");
  }
  const auto padding = bytes.first(header_bytes).subspan(checksum_offset + kChecksumBytes);
  if (std::any_of(padding.begin(), padding.end(),
                  [](std::byte byte) { return byte != std::byte{0}; }) ||
      LoadField<std::uint16_t>(bytes, kReserved1Offset) != 0 ||
      LoadField<std::uint32_t>(bytes, kReserved2Offset) != 0) {
    return Damaged("reserved bytes are not zero");
  }

  const FrameView frame(bytes);
  if (absl::Status status = CheckKind(frame.codec(), frame.rung(), frame.quality()); !status.ok()) {
    return status;
  }
  if (frame.model().empty()) return Damaged("no model");
  if (frame.raw_bytes() < 1 || frame.raw_bytes() > kRawBlockBytesMax) return Damaged("raw size");
  if (frame.body_bytes() < 1 || frame.body_bytes() > kBodyBytesMax) return Damaged("body size");
  std::size_t section_bytes = 0;
  for (std::size_t i = 0; i < section_count; ++i) {
    const std::uint32_t section = frame.section(i).bytes;
    if (section < 1 || section > kSectionBytesMax) return Damaged("section size");
    section_bytes += section;
  }
  if (section_bytes != frame.body_bytes()) return Damaged("sections do not cover the body");

  if (frame.codec() == CodecId::kRaw) {
    if (frame.raw_bytes() != frame.body_bytes()) return Damaged("raw, but of another size");
  } else if (frame.body_bytes() <= kFrameBindingBytes) {
    return Damaged("nothing in the body");
  }

  if (bytes.size() > frame.frame_bytes()) return Damaged("bytes behind the body");
  if (bytes.size() == frame.frame_bytes() && frame.codec() != CodecId::kRaw) {
    if (absl::Status status = CheckProfile(frame); !status.ok()) return status;
  }
  return frame;
}

CodecId FrameView::codec() const { return LoadField<CodecId>(bytes_, kCodecOffset); }
Rung FrameView::rung() const { return LoadField<Rung>(bytes_, kRungOffset); }
Quality FrameView::quality() const { return LoadField<Quality>(bytes_, kQualityOffset); }
ModelId FrameView::model() const { return LoadField<ModelId>(bytes_, kModelOffset); }

std::size_t FrameView::raw_bytes() const {
  return LoadField<std::uint64_t>(bytes_, kRawBytesOffset);
}
std::size_t FrameView::body_bytes() const {
  return LoadField<std::uint64_t>(bytes_, kBodyBytesOffset);
}
std::size_t FrameView::header_bytes() const {
  return LoadField<std::uint32_t>(bytes_, kHeaderBytesOffset);
}
std::size_t FrameView::section_count() const {
  return LoadField<std::uint32_t>(bytes_, kSectionCountOffset);
}

FrameSection FrameView::section(std::size_t index) const {
  KV_CHECK(index < section_count());
  return LoadField<FrameSection>(bytes_, kTableOffset + index * kSectionEntryBytes);
}

std::span<const std::byte> FrameView::body() const {
  KV_CHECK(bytes_.size() == frame_bytes());
  return bytes_.subspan(header_bytes());
}

FrameBinding FrameView::binding() const {
  KV_CHECK(codec() != CodecId::kRaw);
  return ReadFrameBinding(body());
}

FrameBinding ReadFrameBinding(std::span<const std::byte> from) {
  KV_CHECK(from.size() >= kFrameBindingBytes);
  const std::byte* const at = from.data();
  return {.first_position = LoadLittle<std::uint32_t>(at),
          .tokens_crc32c = LoadLittle<std::uint32_t>(at + kBoundTokensOffset),
          .profile = LoadLittle<ProfileId>(at + kBoundProfileOffset)};
}

absl::Status FrameView::VerifyBody() const {
  std::span<const std::byte> rest = body();
  for (std::size_t i = 0; i < section_count(); ++i) {
    const FrameSection expected = section(i);
    if (Crc32c(rest.first(expected.bytes)) != expected.crc32c) {
      return Damaged(absl::StrCat("wrong checksum of section ", i));
    }
    rest = rest.subspan(expected.bytes);
  }
  return absl::OkStatus();
}

absl::Status FrameView::CheckGeometry(const KvGeometry& geometry) const {
  if (raw_bytes() != geometry.raw_block_bytes()) {
    return Damaged(absl::StrCat("decodes to ", raw_bytes(), " bytes, a block of the model has ",
                                geometry.raw_block_bytes()));
  }
  if (codec() != CodecId::kRaw) return absl::OkStatus();
  const std::vector<std::uint32_t> expected = RawSectionBytes(geometry);
  bool same = section_count() == expected.size();
  for (std::size_t i = 0; same && i < expected.size(); ++i) {
    same = section(i).bytes == expected[i];
  }
  return same ? absl::OkStatus() : Damaged("sections do not follow the layers");
}

std::size_t FrameHeaderBytes(std::size_t section_count) {
  const std::size_t used = ChecksumOffset(section_count) + kChecksumBytes;
  return (used + kAlignment - 1) / kAlignment * kAlignment;
}

std::size_t FrameBytesMax(const KvGeometry& geometry) {
  return kFrameHeaderBytesMax + 2 * geometry.raw_block_bytes() + (std::size_t{1} << 20);
}

std::vector<std::uint32_t> RawSectionBytes(const KvGeometry& geometry) {
  std::vector<std::uint32_t> sections;
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    std::size_t rest = geometry.layer_end(layer) - geometry.layer_begin(layer);
    while (rest > 0) {
      const std::size_t bytes = std::min<std::size_t>(rest, kSectionBytesMax);
      sections.push_back(static_cast<std::uint32_t>(bytes));
      rest -= bytes;
    }
  }
  return sections;
}

void WriteFrameBinding(const FrameBinding& binding, std::span<std::byte> to) {
  KV_CHECK(to.size() == kFrameBindingBytes);
  StoreLittle(to.data(), binding.first_position);
  StoreLittle(to.data() + kBoundTokensOffset, binding.tokens_crc32c);
  StoreLittle(to.data() + kBoundProfileOffset, binding.profile);
}

void WriteFrameHeader(const FrameHeaderFields& fields, std::span<std::byte> to) {
  const std::span<const FrameSection> sections = fields.sections;
  KV_CHECK(!sections.empty());
  KV_CHECK(sections.size() <= kSectionCountMax);
  KV_CHECK(to.size() == FrameHeaderBytes(sections.size()));
  KV_CHECK(CheckKind(fields.codec, RungOf(fields.codec), fields.quality).ok());

  std::uint64_t body_bytes = 0;
  for (const FrameSection& section : sections) body_bytes += section.bytes;

  std::memset(to.data(), 0, to.size());
  std::byte* const at = to.data();
  std::memcpy(at, kMagic.data(), kMagic.size());
  StoreLittle(at + kVersionOffset, kVersion);
  StoreLittle(at + kCodecOffset, fields.codec);
  StoreLittle(at + kRungOffset, RungOf(fields.codec));
  StoreLittle(at + kQualityOffset, fields.quality);
  StoreLittle(at + kSectionCountOffset, static_cast<std::uint32_t>(sections.size()));
  StoreLittle(at + kHeaderBytesOffset, static_cast<std::uint32_t>(to.size()));
  StoreLittle(at + kRawBytesOffset, fields.raw_bytes);
  StoreLittle(at + kBodyBytesOffset, body_bytes);
  StoreLittle(at + kModelOffset, fields.model);
  for (std::size_t i = 0; i < sections.size(); ++i) {
    StoreLittle(at + kTableOffset + i * kSectionEntryBytes, sections[i]);
  }
  const std::size_t checksum_offset = ChecksumOffset(sections.size());
  StoreLittle(at + checksum_offset, Crc32c(to.first(checksum_offset)));
}

}  // namespace kvtrie
