#include "storage/codec/frame.h"

#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "storage/base/byte_reader.h"
#include "storage/base/crc32c.h"
#include "tests/golden/golden_file.h"
#include "tests/storage/codec/counted_allocations.h"

namespace kvtrie {
namespace {

ModelId TestModel() {
  ModelId model;
  std::iota(model.bytes.begin(), model.bytes.end(), std::uint8_t{0x10});
  return model;
}

// A frame around `body`, cut into sections of these sizes.
std::string MakeFrame(const std::string& body, const std::vector<std::uint32_t>& section_bytes) {
  std::vector<FrameSection> sections;
  std::size_t at = 0;
  for (const std::uint32_t bytes : section_bytes) {
    sections.push_back({bytes, Crc32c(AsBytes(body).subspan(at, bytes))});
    at += bytes;
  }
  std::string frame(FrameHeaderBytes(sections.size()), '\xaa');
  WriteFrameHeader({.model = TestModel(), .raw_bytes = body.size(), .sections = sections},
                   std::as_writable_bytes(std::span(frame)));
  return frame + body;
}

// The frame of tests/golden: two layers of 96 and 32 bytes.
std::string GoldenBody() {
  std::string body(128, '\0');
  for (std::size_t i = 0; i < 96; ++i) body[i] = static_cast<char>(i * 7);
  for (std::size_t i = 0; i < 32; ++i) body[96 + i] = static_cast<char>(255 - i);
  return body;
}
std::string GoldenFrame() { return MakeFrame(GoldenBody(), {96, 32}); }

ModelSpec SpecOfLayers(std::vector<LayerRun> layer_runs) {
  ModelSpec spec;
  spec.name = "m";
  spec.weights_revision = "r";
  spec.tokenizer_digest = "t";
  spec.dtype = DType::kUint8;
  spec.kv_groups = {{.layer_runs = std::move(layer_runs), .window_tokens = 0}};
  spec.block_tokens = 1;
  return spec;
}

TEST(FrameTest, BytesAreTheGoldenOnes) { EXPECT_EQ(GoldenFrame(), ReadGolden("v1/frame_raw.bin")); }

TEST(FrameTest, SaysWhatItIs) {
  const std::string bytes = GoldenFrame();
  const auto frame = FrameView::Parse(AsBytes(bytes));
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ(frame->codec(), CodecId::kRaw);
  EXPECT_EQ(frame->rung(), Rung::kExact);
  EXPECT_EQ(frame->quality(), Quality::kExact);
  EXPECT_EQ(frame->model(), TestModel());
  EXPECT_EQ(frame->raw_bytes(), 128u);
  EXPECT_EQ(frame->body_bytes(), 128u);
  EXPECT_EQ(frame->header_bytes(), 128u);
  EXPECT_EQ(frame->frame_bytes(), bytes.size());
  ASSERT_EQ(frame->section_count(), 2u);
  EXPECT_EQ(frame->section(0).bytes, 96u);
  EXPECT_EQ(frame->section(1).bytes, 32u);
  EXPECT_EQ(AsText(frame->body()), GoldenBody());
  EXPECT_TRUE(frame->VerifyBody().ok());
}

TEST(FrameTest, HeaderIsTheSmallestMultipleOf64) {
  for (std::size_t count = 1; count <= 8184; ++count) {
    const std::size_t bytes = FrameHeaderBytes(count);
    EXPECT_EQ(bytes % 64, 0u);
    EXPECT_GE(bytes, 60 + 8 * count);
    EXPECT_LT(bytes, 60 + 8 * count + 64);
  }
  EXPECT_EQ(FrameHeaderBytes(8184), kFrameHeaderBytesMax);
}

TEST(FrameTest, TheBoundHasRoomForTwiceTheBlock) {
  for (const std::uint32_t head_dim : {1u, 1u << 16}) {
    const KvGeometry geometry(SpecOfLayers({{1, 1, head_dim, head_dim}}));
    EXPECT_GE(FrameBytesMax(geometry), FrameHeaderBytes(8184) + 2 * geometry.raw_block_bytes());
    EXPECT_LE(FrameBytesMax(geometry), 2 * geometry.raw_block_bytes() + (2u << 20));
  }
}

TEST(FrameTest, ParsesTheHeadAlone) {
  const std::string bytes = GoldenFrame();
  const std::size_t header_bytes = FrameHeaderBytes(2);
  for (std::size_t length = 0; length <= bytes.size(); ++length) {
    const auto frame = FrameView::Parse(AsBytes(bytes).first(length));
    EXPECT_EQ(frame.ok(), length >= header_bytes) << length;
    EXPECT_TRUE(frame.ok() || absl::IsDataLoss(frame.status())) << length;
  }
}

TEST(FrameTest, RefusesEveryBitFlipOfTheHeader) {
  const std::string bytes = GoldenFrame();
  for (std::size_t bit = 0; bit < FrameHeaderBytes(2) * 8; ++bit) {
    std::string damaged = bytes;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    const absl::Status status = FrameView::Parse(AsBytes(damaged)).status();
    const bool is_version = bit / 8 == 4 || bit / 8 == 5;
    EXPECT_EQ(status.code(), is_version && bit != 4 * 8 ? absl::StatusCode::kUnimplemented
                                                        : absl::StatusCode::kDataLoss)
        << bit << status;
  }
}

TEST(FrameTest, VerifyBodyFindsEveryBitFlip) {
  const std::string bytes = GoldenFrame();
  for (std::size_t bit = FrameHeaderBytes(2) * 8; bit < bytes.size() * 8; ++bit) {
    std::string damaged = bytes;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    const auto frame = FrameView::Parse(AsBytes(damaged));
    ASSERT_TRUE(frame.ok()) << frame.status();
    EXPECT_TRUE(absl::IsDataLoss(frame->VerifyBody())) << bit;
  }
}

TEST(FrameTest, RefusesTheCorruptFiles) {
  for (const auto& [name, bytes] : ReadCorrupt("frame_")) {
    const auto frame = FrameView::Parse(AsBytes(bytes));
    EXPECT_TRUE(absl::IsDataLoss(frame.ok() ? frame->VerifyBody() : frame.status())) << name;
  }
}

// A frame with one field changed and the header's checksum made right again.
template <typename T>
absl::Status ParseWith(std::size_t offset, T value) {
  std::string bytes = GoldenFrame();
  StoreLittle(bytes.data() + offset, value);
  StoreLittle(bytes.data() + 72, Crc32c(AsBytes(bytes).first(72)));
  return FrameView::Parse(AsBytes(bytes)).status();
}

TEST(FrameTest, NewerCodecAndVersionAreNotDamage) {
  EXPECT_TRUE(ParseWith<std::uint16_t>(6, 1).ok());
  EXPECT_TRUE(absl::IsUnimplemented(ParseWith<std::uint16_t>(6, 6)));
  EXPECT_TRUE(absl::IsUnimplemented(ParseWith<std::uint16_t>(6, 0xFFFF)));
  EXPECT_TRUE(absl::IsUnimplemented(ParseWith<std::uint16_t>(4, 2)));
}

TEST(FrameTest, RefusesLengthsThatCannotBe) {
  EXPECT_TRUE(absl::IsDataLoss(ParseWith<std::uint64_t>(24, 0)));
  EXPECT_TRUE(absl::IsDataLoss(ParseWith<std::uint64_t>(24, ~std::uint64_t{0})));
  EXPECT_TRUE(absl::IsDataLoss(ParseWith<std::uint64_t>(32, 0)));
  EXPECT_TRUE(absl::IsDataLoss(ParseWith<std::uint64_t>(32, ~std::uint64_t{0})));
  EXPECT_TRUE(absl::IsDataLoss(ParseWith<std::uint32_t>(56, 0)));
  EXPECT_TRUE(absl::IsDataLoss(ParseWith<std::uint32_t>(56, kSectionBytesMax + 1)));
  EXPECT_TRUE(absl::IsDataLoss(ParseWith<std::uint32_t>(56, 95)));
  // Sums that come out right only when they overflow.
  EXPECT_TRUE(absl::IsDataLoss(ParseWith<std::uint32_t>(56, 96u - 0x80000000u)));
}

TEST(FrameTest, ParsingDoesNotAllocate) {
  const std::string bytes = GoldenFrame();
  const std::size_t before = allocations.count;
  const auto frame = FrameView::Parse(AsBytes(bytes));
  const bool intact = frame.ok() && frame->VerifyBody().ok();
  EXPECT_EQ(allocations.count, before);
  EXPECT_TRUE(intact);
}

TEST(FrameTest, ManySectionsFitIntoTheLargestHeader) {
  constexpr std::size_t kCount = 8184;
  const std::string body(kCount, 'b');
  const std::string bytes = MakeFrame(body, std::vector<std::uint32_t>(kCount, 1));
  const auto frame = FrameView::Parse(AsBytes(bytes));
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ(frame->header_bytes(), kFrameHeaderBytesMax);
  EXPECT_TRUE(frame->VerifyBody().ok());
}

ProfileId TestProfile() {
  ProfileId profile;
  profile.bytes.fill(0x77);
  return profile;
}

constexpr FrameBinding kBinding{.first_position = 32, .tokens_crc32c = 0x12345678, .profile = {}};

// A frame of a codec with a binding, as one section; the header says these raw bytes.
std::string MakeCoded(CodecId codec, Quality quality, FrameBinding binding,
                      const std::string& rest = "coded bytes") {
  std::string body(kFrameBindingBytes, '\0');
  WriteFrameBinding(binding, std::as_writable_bytes(std::span(body)));
  body += rest;
  const FrameSection section{static_cast<std::uint32_t>(body.size()), Crc32c(AsBytes(body))};
  std::string frame(FrameHeaderBytes(1), '\xaa');
  WriteFrameHeader({.codec = codec,
                    .quality = quality,
                    .model = TestModel(),
                    .raw_bytes = 128,
                    .sections = {&section, 1}},
                   std::as_writable_bytes(std::span(frame)));
  return frame + body;
}

std::string MakeResidual(Quality quality = Quality::kHigh) {
  FrameBinding binding = kBinding;
  binding.profile = TestProfile();
  return MakeCoded(CodecId::kResidual, quality, binding);
}

TEST(CodedFrameTest, SaysWhatItIs) {
  for (const Quality quality : {Quality::kNearExact, Quality::kHigh, Quality::kSmall}) {
    const std::string bytes = MakeResidual(quality);
    const auto frame = FrameView::Parse(AsBytes(bytes));
    ASSERT_TRUE(frame.ok()) << frame.status();
    EXPECT_EQ(frame->codec(), CodecId::kResidual);
    EXPECT_EQ(frame->rung(), Rung::kCoded);
    EXPECT_EQ(frame->quality(), quality);
    EXPECT_EQ(frame->raw_bytes(), 128u);
    EXPECT_EQ(frame->first_position(), 32u);
    EXPECT_EQ(frame->tokens_crc32c(), 0x12345678u);
    EXPECT_EQ(frame->profile(), TestProfile());
    EXPECT_TRUE(frame->VerifyBody().ok());
  }
  const std::string rotated = MakeCoded(CodecId::kRotated, Quality::kUnrated, kBinding);
  EXPECT_EQ(FrameView::Parse(AsBytes(rotated)).value().rung(), Rung::kCoded);
  FrameBinding named = kBinding;
  named.profile = TestProfile();
  const std::string referenced = MakeCoded(CodecId::kReferenced, Quality::kHigh, named);
  EXPECT_EQ(FrameView::Parse(AsBytes(referenced)).value().rung(), Rung::kCoded);
  const std::string lossless = MakeCoded(CodecId::kLossless, Quality::kExact, kBinding);
  EXPECT_EQ(FrameView::Parse(AsBytes(lossless)).value().rung(), Rung::kExact);
}

// The bytes of the binding as FORMAT.md has them.
TEST(CodedFrameTest, BindingLiesAtTheStartOfTheBody) {
  const std::string bytes = MakeResidual();
  const std::string body(AsText(FrameView::Parse(AsBytes(bytes)).value().body()));
  EXPECT_EQ(body.substr(0, 8), std::string("\x20\0\0\0\x78\x56\x34\x12", 8));
  EXPECT_EQ(body.substr(8, 16), std::string(16, '\x77'));
  EXPECT_EQ(body.substr(24), "coded bytes");
}

// Header fields changed one by one in frames that are good otherwise.
absl::Status ParseChanged(std::string bytes, std::size_t offset, std::uint8_t value) {
  bytes[offset] = static_cast<char>(value);
  StoreLittle(bytes.data() + 64, Crc32c(AsBytes(bytes).first(64)));
  return FrameView::Parse(AsBytes(bytes)).status();
}

TEST(CodedFrameTest, RungAndQualityAreThoseOfTheCodec) {
  constexpr std::size_t kRung = 8;
  constexpr std::size_t kQuality = 9;
  const std::string residual = MakeResidual();
  FrameBinding named = kBinding;
  named.profile = TestProfile();
  const std::string referenced = MakeCoded(CodecId::kReferenced, Quality::kHigh, named);
  const std::string rotated = MakeCoded(CodecId::kRotated, Quality::kUnrated, kBinding);
  const std::string lossless = MakeCoded(CodecId::kLossless, Quality::kExact, kBinding);
  for (std::uint8_t value = 0; value < 8; ++value) {
    EXPECT_EQ(ParseChanged(residual, kRung, value).ok(), value == 2) << int{value};
    EXPECT_EQ(ParseChanged(referenced, kRung, value).ok(), value == 2) << int{value};
    EXPECT_EQ(ParseChanged(rotated, kRung, value).ok(), value == 2) << int{value};
    EXPECT_EQ(ParseChanged(lossless, kRung, value).ok(), value == 3) << int{value};
    EXPECT_EQ(ParseChanged(residual, kQuality, value).ok(), value == 1 || value == 2 || value == 4)
        << int{value};
    EXPECT_EQ(ParseChanged(referenced, kQuality, value).ok(),
              value == 1 || value == 2 || value == 4)
        << int{value};
    EXPECT_EQ(ParseChanged(rotated, kQuality, value).ok(), value == 5) << int{value};
    EXPECT_EQ(ParseChanged(lossless, kQuality, value).ok(), value == 3) << int{value};
  }
}

TEST(CodedFrameTest, ProfileIsThatOfTheCodec) {
  FrameBinding named = kBinding;
  named.profile = TestProfile();
  const auto parse = [](const std::string& bytes) {
    return FrameView::Parse(AsBytes(bytes)).status();
  };
  EXPECT_TRUE(absl::IsDataLoss(parse(MakeCoded(CodecId::kResidual, Quality::kHigh, kBinding))));
  EXPECT_TRUE(absl::IsDataLoss(parse(MakeCoded(CodecId::kReferenced, Quality::kHigh, kBinding))));
  EXPECT_TRUE(absl::IsDataLoss(parse(MakeCoded(CodecId::kRotated, Quality::kUnrated, named))));
  EXPECT_TRUE(parse(MakeCoded(CodecId::kLossless, Quality::kExact, named)).ok());
}

TEST(CodedFrameTest, BodyHoldsMoreThanTheBinding) {
  const std::string bytes = MakeCoded(CodecId::kRotated, Quality::kUnrated, kBinding, "");
  EXPECT_TRUE(absl::IsDataLoss(FrameView::Parse(AsBytes(bytes)).status()));
  const std::string more = MakeCoded(CodecId::kRotated, Quality::kUnrated, kBinding, "x");
  EXPECT_TRUE(FrameView::Parse(AsBytes(more)).ok());
}

TEST(CodedFrameTest, ParsesTheHeadAlone) {
  const std::string bytes = MakeResidual();
  for (std::size_t length = 0; length <= bytes.size(); ++length) {
    const auto frame = FrameView::Parse(AsBytes(bytes).first(length));
    EXPECT_EQ(frame.ok(), length >= FrameHeaderBytes(1)) << length;
  }
  EXPECT_TRUE(absl::IsDataLoss(FrameView::Parse(AsBytes(bytes + 'x')).status()));
}

TEST(CodedFrameTest, RefusesEveryBitFlip) {
  const std::string bytes = MakeResidual();
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::string damaged = bytes;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    const auto frame = FrameView::Parse(AsBytes(damaged));
    EXPECT_FALSE(frame.ok() && frame->VerifyBody().ok()) << bit;
  }
}

TEST(CodedFrameTest, GeometryIsThatOfTheDecodedBlock) {
  const std::string bytes = MakeResidual();
  const auto frame = FrameView::Parse(AsBytes(bytes)).value();
  EXPECT_TRUE(frame.CheckGeometry(KvGeometry(SpecOfLayers({{1, 1, 96, 32}}))).ok());
  EXPECT_TRUE(absl::IsDataLoss(frame.CheckGeometry(KvGeometry(SpecOfLayers({{1, 1, 96, 31}})))));
}

TEST(CodedFrameDeathTest, OnlyWholeFramesWithABindingTellIt) {
  const std::string coded = MakeResidual();
  const auto head = FrameView::Parse(AsBytes(coded).first(FrameHeaderBytes(1))).value();
  EXPECT_DEATH(head.profile(), "frame_bytes");
  const std::string raw = GoldenFrame();
  const auto raw_frame = FrameView::Parse(AsBytes(raw)).value();
  EXPECT_DEATH(raw_frame.profile(), "kRaw");
  EXPECT_DEATH(MakeCoded(CodecId::kRotated, Quality::kHigh, kBinding), "CheckKind");
}

TEST(RawSectionBytesTest, NoSectionSpansTwoLayers) {
  const std::vector<LayerRun> runs = {{2, 1, 100, 28}, {1, 700, 2048, 1024}};  // 128, 128, 2100 KiB
  const KvGeometry geometry(SpecOfLayers(runs));
  const std::vector<std::uint32_t> expected = {128, 128, kSectionBytesMax, kSectionBytesMax,
                                               700 * 3072 - 2 * kSectionBytesMax};
  EXPECT_EQ(RawSectionBytes(geometry), expected);
}

TEST(RawSectionBytesTest, LayerOfWholeSectionsHasNoEmptyOne) {
  const KvGeometry geometry(SpecOfLayers({{1, 512, 2048, 2048}}));
  EXPECT_EQ(RawSectionBytes(geometry), (std::vector<std::uint32_t>(2, kSectionBytesMax)));
}

TEST(RawSectionBytesTest, TheLargestBlockHasAFrame) {
  const KvGeometry most_layers(SpecOfLayers({{1024, 16, 2048, 2048}}));
  EXPECT_LE(FrameHeaderBytes(RawSectionBytes(most_layers).size()), kFrameHeaderBytesMax);
}

TEST(FrameTest, CheckGeometryComparesSizeAndSections) {
  const KvGeometry geometry(SpecOfLayers({{1, 1, 96, 0}, {1, 1, 32, 0}}));
  const auto check = [&geometry](const std::string& bytes) {
    return FrameView::Parse(AsBytes(bytes)).value().CheckGeometry(geometry);
  };
  EXPECT_TRUE(check(GoldenFrame()).ok());
  EXPECT_TRUE(absl::IsDataLoss(check(MakeFrame(GoldenBody(), {128}))));
  EXPECT_TRUE(absl::IsDataLoss(check(MakeFrame(GoldenBody(), {32, 96}))));
  EXPECT_TRUE(absl::IsDataLoss(check(MakeFrame(GoldenBody(), {96, 16, 16}))));
  EXPECT_TRUE(absl::IsDataLoss(check(MakeFrame(GoldenBody().substr(1), {95, 32}))));
}

TEST(FrameDeathTest, BodyOfAHeadIsABug) {
  const std::string bytes = GoldenFrame();
  const auto head = FrameView::Parse(AsBytes(bytes).first(FrameHeaderBytes(2))).value();
  EXPECT_DEATH(head.body(), "frame_bytes");
  EXPECT_DEATH(head.section(2), "section_count");
}

}  // namespace
}  // namespace kvtrie
