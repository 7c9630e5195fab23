#include "storage/engine/record_block_writer.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/base/crc32c.h"

namespace kvtrie {
namespace {

using Encoding = PutSession::Encoding;

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

class RecordBlockWriterTest : public testing::Test {
 protected:
  std::unique_ptr<RecordBlockWriter> Start(Encoding encoding, std::size_t bytes) {
    auto writer = RecordBlockWriter::Create(5, encoding, bytes, Spec().Digest(), KvGeometry(Spec()),
                                            "descriptor");
    EXPECT_TRUE(writer.ok()) << writer.status();
    return writer.ok() ? *std::move(writer) : nullptr;
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
    const auto body = view->body();
    EXPECT_TRUE(std::equal(body.begin(), body.end(), raw_.begin(), raw_.end()));
    EXPECT_TRUE(std::equal(payload.begin(), payload.end(), frame_.begin(), frame_.end()));
  }

  const std::vector<std::byte> raw_ = RandomBytes(KvGeometry(Spec()).raw_block_bytes(), 1);
  const std::vector<std::byte> frame_ = FrameOf(Spec(), raw_);
};

TEST_F(RecordBlockWriterTest, RawBytesBecomeTheFrameThatAClientWouldMake) {
  const auto writer = Start(Encoding::kRaw, raw_.size());
  EXPECT_EQ(writer->block_index(), 5u);
  EXPECT_EQ(writer->total_bytes(), raw_.size());
  ASSERT_TRUE(Append(*writer, raw_).ok());
  ExpectFrame(*writer);
}

TEST_F(RecordBlockWriterTest, FramesAreKeptAsTheyCome) {
  const auto writer = Start(Encoding::kFrame, frame_.size());
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
  for (const Encoding encoding : {Encoding::kRaw, Encoding::kFrame}) {
    const auto& bytes = encoding == Encoding::kRaw ? raw_ : frame_;
    const std::size_t body = encoding == Encoding::kRaw ? 0 : frame_.size() - raw_.size();
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
      const auto writer = Start(encoding, bytes.size());
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
  const auto writer = Start(Encoding::kRaw, raw_.size());
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
    const auto writer = Start(Encoding::kRaw, raw_.size());
    const auto chunk = std::span(raw_).first(size);
    EXPECT_TRUE(absl::IsInvalidArgument(writer->AppendChunk({&chunk, 1}, Crc32c(chunk) ^ 1)));
  }
}

TEST_F(RecordBlockWriterTest, MoreBytesThanAnnouncedAreRefusedBeforeTheyAreCopied) {
  for (const Encoding encoding : {Encoding::kRaw, Encoding::kFrame}) {
    const auto& bytes = encoding == Encoding::kRaw ? raw_ : frame_;
    const auto writer = Start(encoding, bytes.size());
    ASSERT_TRUE(Append(*writer, std::span(bytes).first(10)).ok());
    EXPECT_TRUE(absl::IsInvalidArgument(Append(*writer, bytes)));
    EXPECT_EQ(writer->received_bytes(), 10u);
    EXPECT_FALSE(writer->complete());
  }
  const auto writer = Start(Encoding::kRaw, raw_.size());
  ASSERT_TRUE(Append(*writer, raw_).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(Append(*writer, std::span(raw_).first(1))));
}

TEST_F(RecordBlockWriterTest, OnlyTheSizeOfABlockIsTaken) {
  const KvGeometry geometry(Spec());
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{1}, raw_.size() - 1,
                                    raw_.size() + 1, frame_.size(), std::uint64_t{1} << 40}) {
    const auto writer =
        RecordBlockWriter::Create(0, Encoding::kRaw, bytes, Spec().Digest(), geometry, "d");
    EXPECT_TRUE(absl::IsInvalidArgument(writer.status())) << bytes;
  }
  for (const std::uint64_t bytes :
       {std::uint64_t{0}, raw_.size(), frame_.size() - 1, frame_.size() + 1}) {
    const auto writer =
        RecordBlockWriter::Create(0, Encoding::kFrame, bytes, Spec().Digest(), geometry, "d");
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
    const auto writer = Start(Encoding::kFrame, damaged.size());
    ASSERT_TRUE(Append(*writer, damaged).ok());
    EXPECT_TRUE(absl::IsInvalidArgument(writer->Seal())) << "flip at " << at;
  }
}

TEST_F(RecordBlockWriterTest, FramesOfAnotherModelAreRefused) {
  // The same shape under another name.
  ModelSpec other = Spec();
  other.weights_revision = "r2";
  const auto foreign = FrameOf(other, raw_);
  const auto writer = Start(Encoding::kFrame, foreign.size());
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
  const auto writer = Start(Encoding::kFrame, frame.size());
  ASSERT_TRUE(Append(*writer, frame).ok());
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
    auto writer =
        RecordBlockWriter::Create(0, Encoding::kRaw, raw.size(), spec.Digest(), geometry, "d");
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
