#include "storage/engine/record_block_writer.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/base/byte_reader.h"
#include "storage/base/crc32c.h"

namespace kvtrie {
namespace {

// Layers of unequal size; the first ones span more than one section.
ModelSpec SpecOf(std::vector<LayerRun> layer_runs, std::uint32_t block_tokens) {
  ModelSpec spec;
  spec.name = "m";
  spec.weights_revision = "r";
  spec.tokenizer_digest = "t";
  spec.dtype = DType::kUint8;
  spec.kv_groups = {{.layer_runs = std::move(layer_runs)}};
  spec.rope.pairing = RopePairing::kHalfSplit;
  spec.rope.theta = 10000;
  spec.block_tokens = block_tokens;
  return spec;
}

const ModelSpec& Spec() {
  static const ModelSpec spec = SpecOf({{1, 8, 513, 512}, {3, 1, 80, 0}, {2, 2, 3, 5}}, 256);
  return spec;
}

std::vector<std::byte> RandomBytes(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// A raw frame as a client makes it.
std::vector<std::byte> FrameOf(const ModelSpec& spec, std::span<const std::byte> raw) {
  std::vector<FrameSection> sections;
  std::size_t begin = 0;
  for (const std::uint32_t bytes : RawSectionBytes(KvGeometry(spec))) {
    sections.push_back({bytes, Crc32c(raw.subspan(begin, bytes))});
    begin += bytes;
  }
  std::vector<std::byte> frame(FrameHeaderBytes(sections.size()));
  WriteFrameHeader({.model = spec.Digest(), .raw_bytes = raw.size(), .sections = sections}, frame);
  frame.insert(frame.end(), raw.begin(), raw.end());
  return frame;
}

// Block 5 of a path.
ExpectedBlock Expected() {
  ExpectedBlock expected;
  expected.block_index = 5;
  expected.descriptor.tenant = kBuiltInTenant;
  expected.descriptor.node.bytes.fill(7);
  NodeRow& row = expected.descriptor.row;
  row.model = Spec().Digest();
  row.parent.bytes.fill(6);
  row.depth = 6;
  row.tokens.resize(Spec().block_tokens);
  std::iota(row.tokens.begin(), row.tokens.end(), 100u);
  return expected;
}

class RecordBlockWriterTest : public testing::Test {
 protected:
  // For raw KV, or for a frame that begins as this one does.
  std::unique_ptr<RecordBlockWriter> StartRaw() {
    auto writer = RecordBlockWriter::CreateRaw(Expected(), raw_.size(), KvGeometry(Spec()));
    EXPECT_TRUE(writer.ok()) << writer.status();
    return writer.ok() ? *std::move(writer) : nullptr;
  }
  std::unique_ptr<RecordBlockWriter> StartFrame(std::span<const std::byte> frame,
                                                ExpectedBlock expected = Expected()) {
    auto writer = TryFrame(frame, std::move(expected));
    EXPECT_TRUE(writer.ok()) << writer.status();
    return writer.ok() ? *std::move(writer) : nullptr;
  }
  static absl::StatusOr<std::unique_ptr<RecordBlockWriter>> TryFrame(
      std::span<const std::byte> frame, ExpectedBlock expected = Expected(),
      const ModelSpec& spec = Spec()) {
    const auto head = FrameView::Parse(frame);
    if (!head.ok()) return head.status();
    return RecordBlockWriter::CreateFrame(std::move(expected), *head, spec, KvGeometry(spec));
  }

  static absl::Status Append(BlockWriter& writer, std::span<const std::byte> chunk) {
    return writer.AppendChunk({&chunk, 1}, Crc32c(chunk));
  }

  // What a writer holds when all is well: the frame of `raw_`.
  void ExpectFrame(RecordBlockWriter& writer) {
    ASSERT_TRUE(writer.complete());
    ASSERT_TRUE(writer.Seal().ok());
    const auto payload = writer.record().payload();
    EXPECT_EQ(writer.record().payload_crc32c(), Crc32c(payload));
    const auto view = FrameView::Parse(payload);
    ASSERT_TRUE(view.ok()) << view.status();
    EXPECT_TRUE(view->VerifyBody().ok()) << view->VerifyBody();
    EXPECT_TRUE(view->CheckGeometry(KvGeometry(Spec())).ok());
    EXPECT_EQ(view->model(), Spec().Digest());
    EXPECT_EQ(writer.rung().codec, CodecId::kRaw);
    EXPECT_EQ(writer.rung().rung, Rung::kExact);
    const auto descriptor = NodeDescriptor::Decode(AsText(writer.record().descriptor()));
    ASSERT_TRUE(descriptor.ok()) << descriptor.status();
    EXPECT_EQ(*descriptor, Expected().descriptor);
    const auto body = view->body();
    EXPECT_TRUE(std::equal(body.begin(), body.end(), raw_.begin(), raw_.end()));
    EXPECT_TRUE(std::equal(payload.begin(), payload.end(), frame_.begin(), frame_.end()));
  }

  const std::vector<std::byte> raw_ = RandomBytes(KvGeometry(Spec()).raw_block_bytes(), 1);
  const std::vector<std::byte> frame_ = FrameOf(Spec(), raw_);
};

TEST_F(RecordBlockWriterTest, RawBytesBecomeTheFrameThatAClientWouldMake) {
  const auto writer = StartRaw();
  EXPECT_EQ(writer->block_index(), 5u);
  EXPECT_EQ(writer->total_bytes(), raw_.size());
  ASSERT_TRUE(Append(*writer, raw_).ok());
  ExpectFrame(*writer);
}

TEST_F(RecordBlockWriterTest, FramesAreKeptAsTheyCome) {
  const auto writer = StartFrame(frame_);
  ASSERT_TRUE(Append(*writer, frame_).ok());
  ExpectFrame(*writer);
}

// Chunks that end everywhere: within sections, at their ends, within the header, cut into pieces of
// any size.
TEST_F(RecordBlockWriterTest, ChunksMayEndAnywhere) {
  const std::uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const std::vector<std::uint32_t> sections = RawSectionBytes(KvGeometry(Spec()));
  ASSERT_GT(sections.size(), 6u);
  for (const bool is_frame : {false, true}) {
    const auto& bytes = is_frame ? frame_ : raw_;
    const std::size_t body = is_frame ? frame_.size() - raw_.size() : 0;
    // Positions around the border of each section, then random ones.
    for (int round = 0; round < 12; ++round) {
      std::vector<std::size_t> ends;
      std::size_t border = body;
      if (round < 3) ends.push_back(body);
      for (const std::uint32_t section : sections) {
        border += section;
        if (round < 3) ends.push_back(border + static_cast<std::size_t>(round) - 1);
      }
      if (round >= 3) {
        for (int i = 0; i < 20; ++i) ends.push_back(random() % bytes.size());
        for (std::size_t i = 0; i < 40; ++i) ends.push_back(i);  // single bytes
      }
      ends.push_back(bytes.size());
      std::sort(ends.begin(), ends.end());
      const auto writer = is_frame ? StartFrame(frame_) : StartRaw();
      std::size_t at = 0;
      for (const std::size_t next : ends) {
        if (next > bytes.size() || next <= at) continue;
        const auto chunk = std::span(bytes).subspan(at, next - at);
        std::vector<std::span<const std::byte>> pieces;
        for (std::size_t cut = 0; cut < chunk.size();) {
          const std::size_t size = std::min<std::size_t>(chunk.size() - cut, 1 + random() % 70'000);
          pieces.push_back(chunk.subspan(cut, size));
          if (random() % 4 == 0) pieces.push_back({});
          cut += size;
        }
        ASSERT_TRUE(writer->AppendChunk(pieces, Crc32c(chunk)).ok());
        at = next;
        ASSERT_EQ(writer->received_bytes(), at);
        ASSERT_EQ(writer->complete(), at == bytes.size());
      }
      ExpectFrame(*writer);
    }
  }
}

TEST_F(RecordBlockWriterTest, EmptyChunksChangeNothing) {
  const auto writer = StartRaw();
  EXPECT_TRUE(writer->AppendChunk({}, 0).ok());
  ASSERT_TRUE(Append(*writer, std::span(raw_).first(100)).ok());
  EXPECT_TRUE(writer->AppendChunk({}, 0).ok());
  ASSERT_TRUE(Append(*writer, std::span(raw_).subspan(100)).ok());
  EXPECT_TRUE(writer->AppendChunk({}, 0).ok());
  ExpectFrame(*writer);
}

TEST_F(RecordBlockWriterTest, WrongChecksumsAreRefused) {
  const std::size_t first = RawSectionBytes(KvGeometry(Spec())).front();
  for (const std::size_t size : {std::size_t{1}, std::size_t{100}, first, first + 1, raw_.size()}) {
    const auto writer = StartRaw();
    const auto chunk = std::span(raw_).first(size);
    EXPECT_TRUE(absl::IsInvalidArgument(writer->AppendChunk({&chunk, 1}, Crc32c(chunk) ^ 1)));
  }
}

TEST_F(RecordBlockWriterTest, MoreBytesThanAnnouncedAreRefusedBeforeTheyAreCopied) {
  for (const bool is_frame : {false, true}) {
    const auto& bytes = is_frame ? frame_ : raw_;
    const auto writer = is_frame ? StartFrame(frame_) : StartRaw();
    ASSERT_TRUE(Append(*writer, std::span(bytes).first(10)).ok());
    EXPECT_TRUE(absl::IsInvalidArgument(Append(*writer, bytes)));
    EXPECT_EQ(writer->received_bytes(), 10u);
    EXPECT_FALSE(writer->complete());
  }
  const auto writer = StartRaw();
  ASSERT_TRUE(Append(*writer, raw_).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(Append(*writer, std::span(raw_).first(1))));
}

TEST_F(RecordBlockWriterTest, OnlyTheSizeOfABlockIsTaken) {
  const KvGeometry geometry(Spec());
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{1}, raw_.size() - 1,
                                    raw_.size() + 1, frame_.size(), std::uint64_t{1} << 40}) {
    const auto writer = RecordBlockWriter::CreateRaw(Expected(), bytes, geometry);
    EXPECT_TRUE(absl::IsInvalidArgument(writer.status())) << bytes;
  }
}

// Any damage to a client's frame is found when it is sealed, though each chunk's own checksum is
// right.
TEST_F(RecordBlockWriterTest, DamagedFramesAreRefused) {
  const std::uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const std::size_t header_bytes = frame_.size() - raw_.size();
  std::vector<std::size_t> places = {0, 4, 6, 8, 9, 12, 16, 24, 32, 40, 56, 60, header_bytes - 1};
  for (int i = 0; i < 20; ++i) places.push_back(header_bytes + random() % raw_.size());
  places.push_back(frame_.size() - 1);
  for (const std::size_t at : places) {
    auto damaged = frame_;
    damaged[at] ^= static_cast<std::byte>(1u << (random() % 8));
    const auto writer = StartFrame(frame_);
    ASSERT_TRUE(Append(*writer, damaged).ok());
    EXPECT_TRUE(absl::IsInvalidArgument(writer->Seal())) << "flip at " << at;
  }
}

TEST_F(RecordBlockWriterTest, FramesOfAnotherModelAreRefused) {
  // The same shape under another name.
  ModelSpec other = Spec();
  other.weights_revision = "r2";
  const auto foreign = FrameOf(other, raw_);
  EXPECT_TRUE(absl::IsInvalidArgument(TryFrame(foreign).status()));
  // Nor when it took the place of another one behind the writer's back.
  const auto writer = StartFrame(frame_);
  ASSERT_TRUE(Append(*writer, foreign).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(writer->Seal()));
}

// As many bytes, cut into layers at other places.
TEST_F(RecordBlockWriterTest, FramesWithOtherSectionsAreRefused) {
  std::vector<std::uint32_t> sizes = RawSectionBytes(KvGeometry(Spec()));
  std::swap(sizes.front(), sizes.back());
  std::vector<FrameSection> sections;
  std::size_t begin = 0;
  for (const std::uint32_t bytes : sizes) {
    sections.push_back({bytes, Crc32c(std::span(raw_).subspan(begin, bytes))});
    begin += bytes;
  }
  std::vector<std::byte> frame(FrameHeaderBytes(sections.size()));
  WriteFrameHeader({.model = Spec().Digest(), .raw_bytes = raw_.size(), .sections = sections},
                   frame);
  frame.insert(frame.end(), raw_.begin(), raw_.end());
  ASSERT_EQ(frame.size(), frame_.size());
  EXPECT_TRUE(absl::IsInvalidArgument(TryFrame(frame).status()));
  const auto writer = StartFrame(frame_);
  ASSERT_TRUE(Append(*writer, frame).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(writer->Seal()));
}

// Frames of other codecs, bound to block 5 unless a test says otherwise.
struct Coded {
  CodecId codec = CodecId::kResidual;
  Quality quality = Quality::kHigh;
  std::uint32_t first_position = 5 * Spec().block_tokens;
  std::vector<TokenId> tokens = Expected().descriptor.row.tokens;
  std::uint8_t profile = 9;
  std::size_t raw_bytes = KvGeometry(Spec()).raw_block_bytes();
  ModelId model = Spec().Digest();

  std::vector<std::byte> Frame() const {
    FrameBinding binding{first_position, Crc32c(std::as_bytes(std::span(tokens))), {}};
    binding.profile.bytes.fill(profile);
    std::vector<std::byte> body(kFrameBindingBytes);
    WriteFrameBinding(binding, body);
    const auto rest = RandomBytes(1000, 4);
    body.insert(body.end(), rest.begin(), rest.end());
    // Sections of any size, the first within the binding.
    std::vector<FrameSection> sections;
    for (std::size_t at = 0, next = 7; at < body.size(); at = next, next = at + 300) {
      const auto section = std::span(body).subspan(at, std::min(next, body.size()) - at);
      sections.push_back({static_cast<std::uint32_t>(section.size()), Crc32c(section)});
    }
    std::vector<std::byte> frame(FrameHeaderBytes(sections.size()));
    WriteFrameHeader({.codec = codec,
                      .quality = quality,
                      .model = model,
                      .raw_bytes = raw_bytes,
                      .sections = sections},
                     frame);
    frame.insert(frame.end(), body.begin(), body.end());
    return frame;
  }
};

ExpectedBlock ExpectedAtLeast(Quality quality) {
  ExpectedBlock expected = Expected();
  expected.frame_quality_min = quality;
  return expected;
}

TEST_F(RecordBlockWriterTest, CodedFramesAreKeptAsTheyCome) {
  const Coded cases[] = {{.codec = CodecId::kResidual, .quality = Quality::kHigh},
                         {.codec = CodecId::kResidual, .quality = Quality::kSmall},
                         {.codec = CodecId::kRotated, .quality = Quality::kUnrated, .profile = 0},
                         {.codec = CodecId::kLossless, .quality = Quality::kExact, .profile = 0},
                         {.codec = CodecId::kLossless, .quality = Quality::kExact, .profile = 3}};
  for (const Coded& coded : cases) {
    const auto frame = coded.Frame();
    const auto writer = StartFrame(frame, ExpectedAtLeast(Quality::kUnrated));
    EXPECT_EQ(writer->total_bytes(), frame.size());
    for (std::size_t at = 0; at < frame.size(); at += 137) {
      ASSERT_TRUE(Append(*writer, std::span(frame).subspan(
                                      at, std::min<std::size_t>(137, frame.size() - at)))
                      .ok());
    }
    ASSERT_TRUE(writer->complete());
    ASSERT_TRUE(writer->Seal().ok()) << writer->Seal();
    const auto payload = writer->record().payload();
    EXPECT_TRUE(std::equal(payload.begin(), payload.end(), frame.begin(), frame.end()));
    EXPECT_EQ(writer->record().payload_crc32c(), Crc32c(payload));
    EXPECT_EQ(writer->rung().codec, coded.codec);
    EXPECT_EQ(writer->rung().rung, RungOf(coded.codec));
    EXPECT_EQ(writer->rung().quality, coded.quality);
    EXPECT_EQ(writer->rung().profile.bytes[0], coded.profile);
    const auto descriptor = NodeDescriptor::Decode(AsText(writer->record().descriptor()));
    ASSERT_TRUE(descriptor.ok()) << descriptor.status();
    EXPECT_EQ(descriptor->codec, coded.codec);
    EXPECT_EQ(descriptor->quality, coded.quality);
    EXPECT_EQ(descriptor->profile, writer->rung().profile);
    EXPECT_EQ(descriptor->row, Expected().descriptor.row);
  }
}

// On a lossy prefix nothing is better than that prefix was.
TEST_F(RecordBlockWriterTest, QualityIsCappedByThatOfThePrefix) {
  ExpectedBlock expected = ExpectedAtLeast(Quality::kUnrated);
  expected.descriptor.row.provenance = Provenance::kOnLossy;
  expected.served_quality_max = Quality::kSmall;
  const auto frame = Coded{.quality = Quality::kHigh}.Frame();
  const auto coded = StartFrame(frame, expected);
  ASSERT_TRUE(Append(*coded, frame).ok());
  ASSERT_TRUE(coded->Seal().ok());
  EXPECT_EQ(coded->rung().quality, Quality::kSmall);
  EXPECT_EQ(coded->frame_quality(), Quality::kHigh);
  auto raw = RecordBlockWriter::CreateRaw(expected, raw_.size(), KvGeometry(Spec()));
  ASSERT_TRUE(raw.ok()) << raw.status();
  ASSERT_TRUE(Append(**raw, raw_).ok());
  ASSERT_TRUE((*raw)->Seal().ok());
  EXPECT_EQ((*raw)->rung().rung, Rung::kExact);
  EXPECT_EQ((*raw)->rung().quality, Quality::kSmall);
}

// Each with the word that tells what is wrong.
TEST_F(RecordBlockWriterTest, HeadsThatAreNotOfThePutAreRefused) {
  ModelId other;
  other.bytes.fill(1);
  const auto refused = [](const Coded& coded, ExpectedBlock expected, const ModelSpec& spec) {
    const absl::Status status = TryFrame(coded.Frame(), std::move(expected), spec).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refused({.model = other}, ExpectedAtLeast(Quality::kSmall), Spec()),
              testing::HasSubstr("another model"));
  EXPECT_THAT(refused({.raw_bytes = 1}, ExpectedAtLeast(Quality::kSmall), Spec()),
              testing::HasSubstr("decodes to 1 bytes"));
  EXPECT_THAT(refused({.quality = Quality::kSmall}, ExpectedAtLeast(Quality::kHigh), Spec()),
              testing::HasSubstr("small, and the put announced at least high"));
  EXPECT_THAT(refused({}, Expected(), Spec()), testing::HasSubstr("at least exact"));
  ModelSpec tagged = Spec();
  tagged.layout_tag = "paged";
  EXPECT_THAT(refused({}, ExpectedAtLeast(Quality::kSmall), tagged),
              testing::HasSubstr("layout_tag"));
}

TEST_F(RecordBlockWriterTest, FramesOfAnotherPlaceAreRefused) {
  const auto refused = [this](const Coded& coded) {
    const auto frame = coded.Frame();
    const auto writer = StartFrame(frame, ExpectedAtLeast(Quality::kSmall));
    EXPECT_TRUE(Append(*writer, frame).ok());
    const absl::Status status = writer->Seal();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refused({.first_position = 0}), testing::HasSubstr("first_position"));
  EXPECT_THAT(refused({.first_position = 5 * Spec().block_tokens + 1}),
              testing::HasSubstr("first_position"));
  Coded other;
  ++other.tokens.back();
  EXPECT_THAT(refused(other), testing::HasSubstr("tokens_crc32c"));
}

TEST_F(RecordBlockWriterTest, DamagedCodedFramesAreRefused) {
  const auto frame = Coded{}.Frame();
  for (std::size_t at = 0; at < frame.size(); at += 3) {
    auto damaged = frame;
    damaged[at] ^= std::byte{0x10};
    const auto writer = StartFrame(frame, ExpectedAtLeast(Quality::kSmall));
    ASSERT_TRUE(Append(*writer, damaged).ok());
    EXPECT_TRUE(absl::IsInvalidArgument(writer->Seal())) << "flip at " << at;
  }
}

// In shared memory, after the head was checked.
TEST_F(RecordBlockWriterTest, AFrameOfLessQualityCannotTakeThePlaceOfABetterOne) {
  const auto better = Coded{.quality = Quality::kHigh}.Frame();
  const auto worse = Coded{.quality = Quality::kSmall}.Frame();
  const auto writer = StartFrame(better, ExpectedAtLeast(Quality::kHigh));
  ASSERT_TRUE(Append(*writer, worse).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(writer->Seal()));
}

// Reports of others: head sizes that are no power of two, MLA latents, layers of unequal size.
TEST(RecordBlockWriterShapesTest, EveryShapeKeepsItsBytes) {
  std::vector<ModelSpec> specs;
  for (const std::uint32_t head : {1u, 40u, 80u, 96u, 112u, 132u, 192u, 576u}) {
    for (const std::uint32_t heads : {1u, 2u, 5u, 7u, 8u}) {
      specs.push_back(SpecOf({{2, heads, head, head}}, 16));
    }
    specs.push_back(SpecOf({{3, 1, head, 0}}, 16));
    specs.push_back(SpecOf({{1, 8, head, head}, {2, 1, 512, 0}, {1, 2, 3, 256}}, 7));
  }
  for (const ModelSpec& spec : specs) {
    ASSERT_TRUE(spec.Validate().ok()) << spec.Validate();
    const KvGeometry geometry(spec);
    const auto raw = RandomBytes(geometry.raw_block_bytes(), 3);
    ExpectedBlock expected = Expected();
    expected.descriptor.row.model = spec.Digest();
    auto writer = RecordBlockWriter::CreateRaw(expected, raw.size(), geometry);
    ASSERT_TRUE(writer.ok()) << writer.status();
    const std::span<const std::byte> chunk = raw;
    ASSERT_TRUE((*writer)->AppendChunk({&chunk, 1}, Crc32c(raw)).ok());
    ASSERT_TRUE((*writer)->Seal().ok());
    const auto view = FrameView::Parse((*writer)->record().payload());
    ASSERT_TRUE(view.ok()) << view.status();
    EXPECT_TRUE(view->VerifyBody().ok());
    EXPECT_TRUE(std::equal(view->body().begin(), view->body().end(), raw.begin(), raw.end()));
  }
}

}  // namespace
}  // namespace kvtrie
