#include "storage/codec/frame.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "storage/base/byte_reader.h"
#include "storage/base/crc32c.h"
#include "tests/golden/golden_file.h"

namespace {
thread_local std::size_t allocation_count = 0;
}  // namespace

// Counts what the code under test allocates. Not inlined: GCC would take malloc and delete for a
// mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++allocation_count;
  if (void* memory = std::malloc(bytes)) return memory;
  std::abort();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

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
  WriteRawFrameHeader(TestModel(), sections, std::as_writable_bytes(std::span(frame)));
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
  EXPECT_TRUE(absl::IsUnimplemented(ParseWith<std::uint16_t>(6, 2)));
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
  const std::size_t before = allocation_count;
  const auto frame = FrameView::Parse(AsBytes(bytes));
  const bool intact = frame.ok() && frame->VerifyBody().ok();
  EXPECT_EQ(allocation_count, before);
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
