#include "server/fetch_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "storage/base/crc32c.h"

namespace kvtrie {
namespace {

using ::testing::ElementsAre;

// Three layers of 1.25 MiB: each is cut into two sections.
ModelSpec LargeLayerSpec() {
  ModelSpec spec;
  spec.name = "m";
  spec.weights_revision = "1";
  spec.tokenizer_digest = "t";
  spec.dtype = DType::kFloat16;
  spec.kv_groups.push_back({.layer_runs = {{3, 10, 128, 128}}, .window_tokens = 0});
  spec.block_tokens = 256;
  return spec;
}

// A raw frame of that geometry with content that tells positions apart.
class FetchPlanTest : public ::testing::Test {
 protected:
  FetchPlanTest() : geometry_(std::make_shared<const KvGeometry>(LargeLayerSpec())) {
    const std::vector<std::uint32_t> sizes = RawSectionBytes(*geometry_);
    const std::size_t header_bytes = FrameHeaderBytes(sizes.size());
    auto buffer = std::make_shared<AlignedBuffer>(header_bytes + geometry_->raw_block_bytes());
    std::byte* body = buffer->data() + header_bytes;
    for (std::size_t i = 0; i < geometry_->raw_block_bytes(); i += 4) {
      const auto value = static_cast<std::uint32_t>(i * 2'654'435'761u);
      std::memcpy(body + i, &value, sizeof value);
    }
    std::vector<FrameSection> sections;
    std::size_t offset = 0;
    for (const std::uint32_t bytes : sizes) {
      sections.push_back({bytes, Crc32c({body + offset, bytes})});
      offset += bytes;
    }
    WriteFrameHeader({.model = LargeLayerSpec().Digest(),
                      .raw_bytes = geometry_->raw_block_bytes(),
                      .sections = sections},
                     {buffer->data(), header_bytes});
    const std::span<const std::byte> frame{buffer->data(),
                                           header_bytes + geometry_->raw_block_bytes()};
    auto view = FrameView::Parse(frame);
    EXPECT_TRUE(view.ok()) << view.status();
    held_ =
        std::make_shared<const HeldFrame>(LoadedFrame{{buffer, frame}, *view}, ByteReservation());
  }

  FetchShape Shape(const v1::FetchRequest& request) {
    auto shape = FetchShape::Make(request, geometry_);
    EXPECT_TRUE(shape.ok()) << shape.status();
    return *shape;
  }

  // Sends all visits to one block and puts its chunks together again, checking each.
  std::string Collect(const FetchShape& shape, std::size_t total_bytes) {
    std::string content(total_bytes, '\0');
    const FetchSteps steps(shape, 1);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      auto cursor = ChunkCursor::Make(held_->loaded.view, shape, steps[i]);
      EXPECT_TRUE(cursor.ok()) << cursor.status();
      while (!cursor->AtEnd()) {
        FetchMessage message;
        message.AddChunks(0, held_, &*cursor);
        EXPECT_FALSE(message.empty());
        std::vector<std::byte> data;
        for (const FetchMessage::Run& run : message.runs()) {
          const auto bytes = held_->loaded.bytes.view.subspan(run.offset, run.bytes);
          data.insert(data.end(), bytes.begin(), bytes.end());
        }
        EXPECT_EQ(data.size(), message.bytes());
        std::size_t offset = 0;
        for (const v1::Chunk& chunk : message.header().chunks()) {
          EXPECT_EQ(Crc32c({data.data() + offset, chunk.bytes()}), chunk.crc32c());
          std::memcpy(content.data() + chunk.offset(), data.data() + offset, chunk.bytes());
          offset += chunk.bytes();
        }
        EXPECT_EQ(offset, data.size());
      }
    }
    return content;
  }

  std::string Body(std::size_t begin, std::size_t end) const {
    const auto body = held_->loaded.view.body().subspan(begin, end - begin);
    return {reinterpret_cast<const char*>(body.data()), body.size()};
  }

  std::shared_ptr<const KvGeometry> geometry_;
  std::shared_ptr<const HeldFrame> held_;
};

TEST(FetchStepsTest, BlockMajorVisitsEachBlockOnce) {
  const FetchSteps steps(FetchShape{}, 3);
  ASSERT_EQ(steps.size(), 3u);
  for (std::uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(steps[i].block_index, i);
    EXPECT_TRUE(steps[i].first_visit);
    EXPECT_TRUE(steps[i].last_visit);
  }
}

TEST(FetchStepsTest, LayerMajorVisitsAllBlocksOfALayerBeforeTheNext) {
  FetchShape shape;
  shape.layer_major = true;
  shape.first_layer = 4;
  shape.layer_count = 2;
  const FetchSteps steps(shape, 2);
  std::vector<std::pair<std::uint32_t, std::uint32_t>> visits;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    visits.emplace_back(steps[i].first_layer, steps[i].block_index);
    EXPECT_EQ(steps[i].layer_count, 1u);
    EXPECT_EQ(steps[i].first_visit, i < 2);
    EXPECT_EQ(steps[i].last_visit, i >= 2);
  }
  EXPECT_THAT(visits,
              ElementsAre(std::pair(4, 0), std::pair(4, 1), std::pair(5, 0), std::pair(5, 1)));
}

TEST_F(FetchPlanTest, WholeBlockIsItsBody) {
  const FetchShape shape = Shape(v1::FetchRequest());
  EXPECT_EQ(BlockBytes(held_->loaded.view, shape), geometry_->raw_block_bytes());
  EXPECT_EQ(Collect(shape, geometry_->raw_block_bytes()), Body(0, geometry_->raw_block_bytes()));
}

TEST_F(FetchPlanTest, LayerMajorIsTheSameBlock) {
  v1::FetchRequest request;
  request.set_order(v1::FETCH_ORDER_LAYER_MAJOR);
  EXPECT_EQ(Collect(Shape(request), geometry_->raw_block_bytes()),
            Body(0, geometry_->raw_block_bytes()));
}

TEST_F(FetchPlanTest, LayerRangeIsThoseBytesAtTheirOffsets) {
  v1::FetchRequest request;
  request.set_first_layer(1);
  request.set_layer_count(1);
  const std::string content = Collect(Shape(request), geometry_->raw_block_bytes());
  const std::size_t begin = geometry_->layer_begin(1);
  const std::size_t end = geometry_->layer_end(1);
  EXPECT_EQ(content.substr(begin, end - begin), Body(begin, end));
  EXPECT_EQ(content.substr(0, begin), std::string(begin, '\0'));
}

TEST_F(FetchPlanTest, WholeFrameBeginsWithItsHeader) {
  v1::FetchRequest request;
  request.set_encoding(v1::ENCODING_FRAME);
  const FetchShape shape = Shape(request);
  const std::size_t frame_bytes = held_->loaded.view.frame_bytes();
  EXPECT_EQ(BlockBytes(held_->loaded.view, shape), frame_bytes);
  const std::string frame = Collect(shape, frame_bytes);
  EXPECT_EQ(std::memcmp(frame.data(), held_->loaded.bytes.view.data(), frame_bytes), 0);
}

TEST_F(FetchPlanTest, LayersBeyondTheModelAreRefused) {
  v1::FetchRequest request;
  request.set_first_layer(3);
  EXPECT_TRUE(absl::IsInvalidArgument(FetchShape::Make(request, geometry_).status()));
  request.set_first_layer(1);
  request.set_layer_count(3);
  EXPECT_TRUE(absl::IsInvalidArgument(FetchShape::Make(request, geometry_).status()));
}

TEST_F(FetchPlanTest, FrameOfAnotherGeometryIsDataLoss) {
  ModelSpec other = LargeLayerSpec();
  other.kv_groups[0].layer_runs = {{5, 6, 128, 128}};
  FetchShape shape;
  shape.geometry = std::make_shared<const KvGeometry>(other);
  const FetchStep step{.block_index = 0, .first_layer = 1, .layer_count = 1};
  EXPECT_TRUE(absl::IsDataLoss(ChunkCursor::Make(held_->loaded.view, shape, step).status()));
}

TEST_F(FetchPlanTest, NeighbouringChunksAreOneRun) {
  const FetchShape shape = Shape(v1::FetchRequest());
  auto cursor = ChunkCursor::Make(held_->loaded.view, shape, FetchSteps(shape, 1)[0]);
  FetchMessage message;
  while (!cursor->AtEnd()) {
    message.Clear();
    message.AddChunks(0, held_, &*cursor);
    EXPECT_EQ(message.runs().size(), 1u);
    EXPECT_LE(message.bytes(), FetchMessage::kTargetBytes);
  }
}

TEST(FetchMessageTest, FailuresFillAMessageToo) {
  FetchMessage message;
  for (int i = 0; i < FetchMessage::kResultsMax; ++i) {
    EXPECT_FALSE(message.full());
    message.AddFailure(static_cast<std::uint32_t>(i), absl::NotFoundError("x"));
  }
  EXPECT_TRUE(message.full());
  message.Clear();
  EXPECT_TRUE(message.empty());
}

}  // namespace
}  // namespace kvtrie
