#include "client/fetch_assembly.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "storage/base/byte_reader.h"
#include "storage/base/crc32c.h"

namespace kvtrie {
namespace {

using ::testing::ElementsAre;

constexpr std::byte kPoison{0xa5};

// 4 tokens x 1 head x (2 + 2) bytes: 16 bytes per layer, two layers.
ModelSpec TwoLayers() {
  ModelSpec spec;
  spec.name = "m";
  spec.weights_revision = "1";
  spec.tokenizer_digest = "t";
  spec.dtype = DType::kUint8;
  spec.block_tokens = 4;
  spec.kv_groups = {{.layer_runs = {{2, 1, 2, 2}}, .window_tokens = 0}};
  return spec;
}
constexpr std::size_t kLayerBytes = 16;
constexpr std::size_t kBlockBytes = 2 * kLayerBytes;

class FetchAssemblyTest : public ::testing::Test {
 protected:
  FetchAssemblyTest() : memory_(3 * kBlockBytes, kPoison), geometry_(TwoLayers()) {
    for (std::size_t i = 0; i < 3; ++i) {
      FetchTarget target;
      target.node.bytes[0] = static_cast<std::uint8_t>(i + 1);
      target.raw = std::span(memory_).subspan(i * kBlockBytes, kBlockBytes);
      targets_.push_back(target);
      blocks_.push_back(std::string(kBlockBytes, static_cast<char>('a' + i)));
    }
  }

  void AddResult(std::uint32_t block, v1::FetchResponse* message, std::uint32_t code = 0,
                 std::uint64_t bytes = kBlockBytes) {
    v1::BlockResult* result = message->add_blocks();
    result->set_block_index(block);
    result->mutable_status()->set_code(code);
    result->set_bytes(bytes);
  }

  void AddChunk(std::uint32_t block, const std::string& of, std::size_t offset, std::size_t count,
                v1::FetchResponse* message, std::string* data) {
    const std::string bytes = of.substr(offset, count);
    v1::Chunk* chunk = message->add_chunks();
    chunk->set_block_index(block);
    chunk->set_offset(offset);
    chunk->set_bytes(static_cast<std::uint32_t>(count));
    chunk->set_crc32c(Crc32c(AsBytes(bytes)));
    *data += bytes;
  }

  // The bytes arrive in pieces of 5.
  absl::Status Give(const v1::FetchResponse& message, const std::string& data,
                    FetchAssembly& assembly) {
    std::vector<std::span<const std::byte>> pieces;
    for (std::size_t at = 0; at < data.size(); at += 5) {
      pieces.push_back(AsBytes(data).subspan(at, std::min<std::size_t>(5, data.size() - at)));
    }
    return assembly.Accept(message, pieces);
  }

  absl::Status GiveWhole(std::uint32_t block, const std::string& bytes, FetchAssembly& assembly) {
    v1::FetchResponse message;
    std::string data;
    AddResult(block, &message);
    AddChunk(block, bytes, 0, kBlockBytes, &message, &data);
    return Give(message, data, assembly);
  }

  std::string Content(std::size_t i) const { return std::string(AsText(targets_[i].raw)); }

  std::vector<std::byte> memory_;
  std::vector<FetchTarget> targets_;
  std::vector<std::string> blocks_;
  KvGeometry geometry_;
  FetchOptions options_;
};

TEST_F(FetchAssemblyTest, BlocksInAnyOrderLandInTheirTargets) {
  FetchAssembly assembly(targets_, options_, nullptr);
  EXPECT_THAT(assembly.StartAttempt(100), ElementsAre(0, 1, 2));
  for (const std::uint32_t i : {2u, 0u, 1u}) ASSERT_TRUE(GiveWhole(i, blocks_[i], assembly).ok());
  EXPECT_TRUE(assembly.attempt_complete());
  ASSERT_TRUE(assembly.done());
  const FetchReport report = assembly.TakeReport();
  EXPECT_TRUE(report.all_loaded());
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(Content(i), blocks_[i]);
}

TEST_F(FetchAssemblyTest, MissIsNotLoadedAndOthersAre) {
  FetchAssembly assembly(targets_, options_, nullptr);
  assembly.StartAttempt(100);
  v1::FetchResponse miss;
  AddResult(1, &miss, /*code=*/5);
  ASSERT_TRUE(Give(miss, "", assembly).ok());
  ASSERT_TRUE(GiveWhole(0, blocks_[0], assembly).ok());
  ASSERT_TRUE(GiveWhole(2, blocks_[2], assembly).ok());
  const FetchReport report = assembly.TakeReport();
  EXPECT_EQ(report.loaded_blocks, 2u);
  EXPECT_TRUE(absl::IsNotFound(report.blocks[1].status));
  EXPECT_EQ(Content(1), std::string(kBlockBytes, static_cast<char>(kPoison)));
}

TEST_F(FetchAssemblyTest, DamagedBlockIsAskedForOnceMoreAndThenMissed) {
  FetchAssembly assembly(targets_, options_, nullptr);
  assembly.StartAttempt(100);
  const auto give_damaged = [&](std::uint32_t block) {
    v1::FetchResponse message;
    std::string data;
    AddResult(block, &message);
    AddChunk(block, blocks_[1], 0, kBlockBytes, &message, &data);
    data[7] ^= 1;
    return Give(message, data, assembly);
  };
  ASSERT_TRUE(GiveWhole(0, blocks_[0], assembly).ok());
  ASSERT_TRUE(give_damaged(1).ok());
  ASSERT_TRUE(GiveWhole(2, blocks_[2], assembly).ok());
  EXPECT_TRUE(assembly.attempt_complete());
  EXPECT_FALSE(assembly.done());
  EXPECT_THAT(assembly.StartAttempt(100), ElementsAre(1));
  ASSERT_TRUE(give_damaged(0).ok());
  const FetchReport report = assembly.TakeReport();
  EXPECT_EQ(report.loaded_blocks, 2u);
  EXPECT_FALSE(report.blocks[1].loaded());
  EXPECT_TRUE(absl::IsDataLoss(report.blocks[1].status));
  EXPECT_EQ(assembly.damaged_blocks(), 2u);
}

TEST_F(FetchAssemblyTest, PartlyWrittenBlockIsNeverLoaded) {
  FetchAssembly assembly(targets_, options_, nullptr);
  assembly.StartAttempt(100);
  v1::FetchResponse message;
  std::string data;
  AddResult(0, &message);
  AddChunk(0, blocks_[0], 0, kLayerBytes, &message, &data);
  ASSERT_TRUE(Give(message, data, assembly).ok());
  assembly.FailRest(absl::DeadlineExceededError("late"));
  const FetchReport report = assembly.TakeReport();
  EXPECT_EQ(report.loaded_blocks, 0u);
  for (const FetchedBlock& block : report.blocks) EXPECT_FALSE(block.loaded());
}

TEST_F(FetchAssemblyTest, SecondAttemptDoesNotWriteCheckedBytesAgain) {
  FetchAssembly assembly(targets_, options_, nullptr);
  assembly.StartAttempt(100);
  v1::FetchResponse half;
  std::string data;
  AddResult(0, &half);
  AddChunk(0, blocks_[0], 0, kLayerBytes, &half, &data);
  ASSERT_TRUE(Give(half, data, assembly).ok());

  EXPECT_THAT(assembly.StartAttempt(100), ElementsAre(0, 1, 2));
  v1::FetchResponse whole;
  data.clear();
  AddResult(0, &whole);
  // Other bytes, with a matching checksum, for what is in place already.
  AddChunk(0, std::string(kBlockBytes, 'x'), 0, kLayerBytes, &whole, &data);
  AddChunk(0, blocks_[0], kLayerBytes, kLayerBytes, &whole, &data);
  ASSERT_TRUE(Give(whole, data, assembly).ok());
  EXPECT_EQ(Content(0), blocks_[0]);
}

TEST_F(FetchAssemblyTest, BlockOfAnotherSizeIsRefused) {
  FetchAssembly assembly(targets_, options_, nullptr);
  assembly.StartAttempt(1);
  v1::FetchResponse message;
  AddResult(0, &message, 0, kBlockBytes - 1);
  ASSERT_TRUE(Give(message, "", assembly).ok());
  assembly.FailRest(absl::UnavailableError("x"));
  EXPECT_TRUE(absl::IsFailedPrecondition(assembly.TakeReport().blocks[0].status));
}

TEST_F(FetchAssemblyTest, FramesMayBeSmallerThanTheirTargetsAndNotLarger) {
  options_.form = BlockForm::kFrame;
  FetchAssembly assembly(targets_, options_, nullptr);
  assembly.StartAttempt(3);
  v1::FetchResponse message;
  std::string data;
  AddResult(0, &message, 0, 10);
  message.mutable_blocks(0)->set_codec(v1::CODEC_RESIDUAL);
  message.mutable_blocks(0)->set_quality(v1::QUALITY_SMALL);
  AddChunk(0, blocks_[0], 0, 10, &message, &data);
  AddResult(1, &message, 0, kBlockBytes + 1);
  AddResult(2, &message, 0, 0);
  ASSERT_TRUE(Give(message, data, assembly).ok());
  ASSERT_TRUE(assembly.done());
  const FetchReport report = assembly.TakeReport();
  EXPECT_TRUE(report.blocks[0].loaded());
  EXPECT_EQ(report.blocks[0].bytes, 10u);
  EXPECT_EQ(report.blocks[0].codec, CodecId::kResidual);
  EXPECT_EQ(report.blocks[0].quality, Quality::kSmall);
  EXPECT_EQ(Content(0).substr(0, 10), blocks_[0].substr(0, 10));
  EXPECT_EQ(Content(0)[10], static_cast<char>(kPoison));
  EXPECT_TRUE(absl::IsFailedPrecondition(report.blocks[1].status));
  EXPECT_TRUE(absl::IsFailedPrecondition(report.blocks[2].status));
}

// Half of a block decoded from one frame and half of another would be neither.
TEST_F(FetchAssemblyTest, HalvesOfTwoFramesAreNeverOneBlock) {
  FetchAssembly assembly(targets_, options_, nullptr);
  const std::string coded(kBlockBytes, 'c');
  const auto give = [&](v1::Quality quality, v1::FrameCodec codec, const std::string& bytes,
                        std::size_t count) {
    assembly.StartAttempt(1);
    v1::FetchResponse message;
    std::string data;
    AddResult(0, &message);
    message.mutable_blocks(0)->set_quality(quality);
    message.mutable_blocks(0)->set_codec(codec);
    AddChunk(0, bytes, 0, count, &message, &data);
    ASSERT_TRUE(Give(message, data, assembly).ok());
  };
  give(v1::QUALITY_HIGH, v1::CODEC_RESIDUAL, coded, kLayerBytes);
  give(v1::QUALITY_EXACT, v1::CODEC_RAW, blocks_[0], kBlockBytes);
  EXPECT_EQ(Content(0), blocks_[0]);
  assembly.FailRest(absl::UnavailableError("x"));
  EXPECT_EQ(assembly.TakeReport().blocks[0].quality, Quality::kExact);
}

TEST_F(FetchAssemblyTest, AnswersThatContradictTheProtocolEndTheAttempt) {
  const auto refused = [&](const std::function<void(v1::FetchResponse*, std::string*)>& fill) {
    FetchAssembly assembly(targets_, options_, nullptr);
    assembly.StartAttempt(2);
    v1::FetchResponse message;
    std::string data;
    fill(&message, &data);
    return absl::IsInternal(Give(message, data, assembly));
  };
  EXPECT_TRUE(refused([&](auto* m, auto*) { AddResult(2, m); }));
  EXPECT_TRUE(refused([&](auto* m, auto*) {
    AddResult(1, m);
    AddResult(1, m);
  }));
  EXPECT_TRUE(refused([&](auto* m, auto* d) { AddChunk(0, blocks_[0], 0, 8, m, d); }));
  EXPECT_TRUE(refused([&](auto* m, auto* d) {
    AddResult(0, m);
    AddChunk(0, blocks_[0], 8, 8, m, d);  // a gap
  }));
  EXPECT_TRUE(refused([&](auto* m, auto* d) {
    AddResult(0, m);
    AddChunk(0, blocks_[0] + "xxxx", 0, kBlockBytes + 4, m, d);  // over the end
  }));
  EXPECT_TRUE(refused([&](auto* m, auto* d) {
    AddResult(0, m);
    AddChunk(0, blocks_[0], 0, kBlockBytes, m, d);
    d->resize(kBlockBytes - 1);
  }));
  EXPECT_TRUE(refused([&](auto* m, auto* d) {
    AddResult(0, m);
    AddChunk(0, blocks_[0], 0, 8, m, d);
    m->mutable_chunks(0)->set_offset(~std::uint64_t{0} - 3);  // wraps around
  }));
}

TEST_F(FetchAssemblyTest, LayersAreReportedInOrderWhenAllBlocksHaveThem) {
  std::vector<std::uint32_t> layers;
  options_.on_layer = [&](std::uint32_t layer, std::span<const FetchedBlock> blocks) {
    layers.push_back(layer);
    EXPECT_EQ(blocks[1].state, FetchedBlock::State::kMissed);
    for (const std::size_t i : {0u, 2u}) {
      EXPECT_EQ(Content(i).substr(layer * kLayerBytes, kLayerBytes),
                blocks_[i].substr(layer * kLayerBytes, kLayerBytes));
    }
  };
  FetchAssembly assembly(targets_, options_, &geometry_);
  assembly.StartAttempt(100);
  const auto give_layer = [&](std::uint32_t block, std::size_t layer) {
    v1::FetchResponse message;
    std::string data;
    if (layer == 0) AddResult(block, &message);
    AddChunk(block, blocks_[block], layer * kLayerBytes, kLayerBytes, &message, &data);
    ASSERT_TRUE(Give(message, data, assembly).ok());
  };
  give_layer(0, 0);
  give_layer(2, 0);
  EXPECT_TRUE(layers.empty());  // block 1 may still come
  v1::FetchResponse miss;
  AddResult(1, &miss, /*code=*/5);
  ASSERT_TRUE(Give(miss, "", assembly).ok());
  EXPECT_THAT(layers, ElementsAre(0));
  give_layer(0, 1);
  EXPECT_THAT(layers, ElementsAre(0));
  give_layer(2, 1);
  EXPECT_THAT(layers, ElementsAre(0, 1));
}

TEST_F(FetchAssemblyTest, DamagedLayerHoldsUpItsReportUntilTheBlockIsSettled) {
  std::vector<std::uint32_t> layers;
  options_.on_layer = [&](std::uint32_t layer, std::span<const FetchedBlock>) {
    layers.push_back(layer);
  };
  const auto targets = std::span<const FetchTarget>(targets_).first(1);
  FetchAssembly assembly(targets, options_, &geometry_);
  assembly.StartAttempt(100);
  v1::FetchResponse message;
  std::string data;
  AddResult(0, &message);
  AddChunk(0, blocks_[0], 0, kLayerBytes, &message, &data);
  data[0] ^= 1;
  ASSERT_TRUE(Give(message, data, assembly).ok());
  EXPECT_TRUE(layers.empty());
  assembly.StartAttempt(100);
  ASSERT_TRUE(GiveWhole(0, blocks_[0], assembly).ok());
  EXPECT_THAT(layers, ElementsAre(0, 1));
  EXPECT_TRUE(assembly.TakeReport().all_loaded());
}

TEST_F(FetchAssemblyTest, BytesThatSomeoneElseWroteAreCheckedInPlace) {
  const auto targets = std::span<const FetchTarget>(targets_).first(2);
  FetchAssembly assembly(targets, options_, nullptr);
  assembly.StartAttempt(100);
  for (const std::uint32_t i : {0u, 1u}) {
    std::memcpy(targets_[i].raw.data(), blocks_[i].data(), kBlockBytes);
    v1::FetchResponse message;
    std::string data;
    AddResult(i, &message);
    AddChunk(i, blocks_[i], 0, kBlockBytes, &message, &data);
    if (i == 1) targets_[i].raw[9] ^= std::byte{1};
    const v1::Chunk* chunk = &message.chunks(0);
    ASSERT_TRUE(assembly.AcceptInPlace(message.blocks(0), std::span(&chunk, 1)).ok());
  }
  EXPECT_EQ(assembly.pending_blocks(), 1u);
  EXPECT_EQ(assembly.damaged_blocks(), 1u);
  EXPECT_THAT(assembly.StartAttempt(100), ElementsAre(1));
}

// Into frames: memory of the assembly's own, which a head and sections fill.
class FetchIntoFramesTest : public FetchAssemblyTest {
 protected:
  void GiveParts(const std::string& frame, std::size_t count, FetchAssembly& assembly,
                 v1::Quality quality = v1::QUALITY_HIGH) {
    v1::FetchResponse message;
    std::string data;
    AddResult(0, &message, /*code=*/0, frame.size());
    message.mutable_blocks(0)->set_quality(quality);
    for (std::size_t at = 0; at < count; at += 8) AddChunk(0, frame, at, 8, &message, &data);
    ASSERT_TRUE(Give(message, data, assembly).ok());
  }
  std::string Here(const FetchAssembly& assembly) const {
    return std::string(AsText(assembly.frame(0).first(assembly.verified_bytes(0))));
  }

  const std::string frame_ = "headheadbodyBODYBODYbody";  // larger than the target would be fine
  const std::span<const FetchTarget> target_ = std::span<const FetchTarget>(targets_).first(1);
};

TEST_F(FetchIntoFramesTest, AFrameOfAnySizeThatABlockMayHaveComesWithoutTouchingItsTarget) {
  const std::string large(kBlockBytes + 64, 'f');
  FetchAssembly assembly(target_, options_, nullptr, FetchAssembly::Into::kFrames);
  assembly.StartAttempt(1);
  GiveParts(large, large.size(), assembly);
  EXPECT_EQ(Here(assembly), large);
  EXPECT_EQ(Content(0), std::string(kBlockBytes, static_cast<char>(kPoison)));
  const FetchReport report = assembly.TakeReport();
  EXPECT_TRUE(report.all_loaded());
  EXPECT_EQ(report.blocks[0].bytes, kBlockBytes);  // of what was decoded
}

TEST_F(FetchIntoFramesTest, AFrameThatNoBlockHasIsMissed) {
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{1} << 30}) {
    FetchAssembly assembly(target_, options_, nullptr, FetchAssembly::Into::kFrames);
    assembly.StartAttempt(1);
    v1::FetchResponse message;
    AddResult(0, &message, /*code=*/0, bytes);
    ASSERT_TRUE(Give(message, "", assembly).ok());
    EXPECT_TRUE(absl::IsFailedPrecondition(assembly.TakeReport().blocks[0].status));
  }
}

TEST_F(FetchIntoFramesTest, ANewAttemptGoesOnWithTheSameFrameAndStartsAnewWithAnother) {
  std::string other = frame_;
  other[2] = 'H';
  for (const bool same : {true, false}) {
    for (const bool keep : {true, false}) {
      FetchAssembly assembly(target_, options_, nullptr, FetchAssembly::Into::kFrames);
      assembly.StartAttempt(1);
      GiveParts(frame_, 16, assembly);
      EXPECT_EQ(Here(assembly), frame_.substr(0, 16));
      if (keep) assembly.KeepFrame(0);
      assembly.StartAttempt(1);
      GiveParts(same ? frame_ : other, 8, assembly);
      if (same) {
        EXPECT_EQ(Here(assembly), frame_.substr(0, 16));
      } else if (keep) {
        EXPECT_TRUE(absl::IsUnavailable(assembly.TakeReport().blocks[0].status));
      } else {
        EXPECT_EQ(Here(assembly), other.substr(0, 8));
      }
    }
  }
}

TEST_F(FetchIntoFramesTest, AFrameOfAnotherSizeOrQualityIsAnother) {
  for (const bool keep : {true, false}) {
    for (const bool longer : {true, false}) {
      FetchAssembly assembly(target_, options_, nullptr, FetchAssembly::Into::kFrames);
      assembly.StartAttempt(1);
      GiveParts(frame_, 16, assembly);
      if (keep) assembly.KeepFrame(0);
      assembly.StartAttempt(1);
      const std::string again = longer ? frame_ + "12345678" : frame_;
      GiveParts(again, again.size(), assembly, longer ? v1::QUALITY_HIGH : v1::QUALITY_NEAR_EXACT);
      const std::string here = Here(assembly);
      const FetchReport report = assembly.TakeReport();
      EXPECT_EQ(report.blocks[0].loaded(), !keep) << report.blocks[0].status;
      if (!keep) {
        EXPECT_EQ(here, again);
      }
    }
  }
}

TEST_F(FetchIntoFramesTest, ALoadedBlockCanBeRejected) {
  FetchAssembly assembly(target_, options_, nullptr, FetchAssembly::Into::kFrames);
  assembly.StartAttempt(1);
  GiveParts(frame_, frame_.size(), assembly);
  EXPECT_TRUE(assembly.block(0).loaded());
  assembly.RejectBlock(0, absl::DataLossError("bad"));
  const FetchReport report = assembly.TakeReport();
  EXPECT_EQ(report.loaded_blocks, 0u);
  EXPECT_TRUE(absl::IsDataLoss(report.blocks[0].status));
}

}  // namespace
}  // namespace kvtrie
