#include "client/frame_decoding.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/codec/profile_codec.h"
#include "storage/codec/section_layers.h"
#include "tests/storage/codec/plain_profile_bytes.h"

namespace kvtrie {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::uint32_t kBlocks = 20;

class FrameDecodingTest : public testing::Test {
 protected:
  FrameDecodingTest() {
    const auto profile = ProfileBytes(PlainProfile(spec_));
    codec_ = std::make_shared<const FrameCodec>(
        spec_, std::shared_ptr<const ResidualCodec>(
                   CodecOfProfile(spec_, ProfileIdOf(profile), profile).value()));
    std::vector<BlockToEncode> blocks;
    for (std::uint32_t i = 0; i < kBlocks; ++i) original_.push_back(CutBlock(spec_, text_, 16 * i));
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      blocks.push_back({.first_position = 16 * i,
                        .session_tokens = 16 * kBlocks,
                        .tokens = std::span(text_.tokens).subspan(16 * i, 16),
                        .raw = original_[i]});
    }
    frames_ = codec_->Encode(blocks, Quality::kHigh).value();
    expected_.assign(kBlocks, original_[0]);
    raw_.assign(kBlocks, std::vector<std::byte>(original_[0].size()));
    std::vector<FrameToDecode> to_decode;
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      to_decode.push_back(
          {FrameView::Parse(frames_[i].bytes).value(), blocks[i].tokens, expected_[i]});
      FetchTarget target;
      target.node.bytes[0] = static_cast<std::uint8_t>(i + 1);
      target.raw = raw_[i];
      target.tokens = blocks[i].tokens;
      target.first_position = 16 * i;
      targets_.push_back(target);
    }
    EXPECT_TRUE(codec_->Decode(to_decode).ok());
    options_.min_quality = Quality::kSmall;
  }

  FrameDecoding Decoding(int threads = 1) {
    return FrameDecoding(
        spec_, targets_, options_,
        [this](const ProfileId& profile) -> absl::StatusOr<std::shared_ptr<const FrameCodec>> {
          if (profile.empty()) return std::make_shared<const FrameCodec>(spec_, nullptr);
          if (!has_profile_) return absl::NotFoundError("not stored");
          return codec_;
        },
        threads);
  }
  FetchAssembly Assembly() {
    return FetchAssembly(targets_, options_, nullptr, FetchAssembly::Into::kFrames);
  }

  // Parts of a frame as they travel: part 0 is the head, the others are the sections.
  void Give(std::uint32_t i, std::size_t first_part, std::size_t part_count,
            FetchAssembly& assembly, Quality said = Quality::kHigh) {
    const FrameView view = FrameView::Parse(frames_[i].bytes).value();
    v1::FetchResponse message;
    if (first_part == 0) {
      v1::BlockResult* result = message.add_blocks();
      result->set_block_index(i);
      result->set_quality(static_cast<v1::Quality>(said));
      result->set_codec(static_cast<v1::FrameCodec>(frames_[i].codec));
      result->set_rung(v1::RUNG_CODED);
      result->set_bytes(frames_[i].bytes.size());
    }
    std::size_t at = 0;
    std::size_t begin = 0;
    std::size_t end = 0;
    for (std::size_t part = 0; part <= view.section_count(); ++part) {
      const std::size_t bytes = part == 0 ? view.header_bytes() : view.section(part - 1).bytes;
      if (part == first_part) begin = at;
      if (part >= first_part && part < first_part + part_count) {
        v1::Chunk* chunk = message.add_chunks();
        chunk->set_block_index(i);
        chunk->set_offset(at);
        chunk->set_bytes(static_cast<std::uint32_t>(bytes));
        chunk->set_crc32c(Crc32c(std::span(frames_[i].bytes).subspan(at, bytes)));
        end = at + bytes;
      }
      at += bytes;
    }
    const std::span<const std::byte> piece =
        std::span(frames_[i].bytes).subspan(begin, end - begin);
    ASSERT_TRUE(assembly.Accept(message, {&piece, 1}).ok());
  }
  void GiveWhole(std::uint32_t i, FetchAssembly& assembly, Quality said = Quality::kHigh) {
    Give(i, 0, 1000, assembly, said);
  }

  const ModelSpec spec_ = SectionedSpec();
  const KvGeometry geometry_{spec_};
  const SyntheticText text_ = MakeText(spec_, 16 * kBlocks, 5);
  std::shared_ptr<const FrameCodec> codec_;
  bool has_profile_ = true;
  std::vector<std::vector<std::byte>> original_;
  std::vector<EncodedFrame> frames_;
  std::vector<std::vector<std::byte>> expected_;
  std::vector<std::vector<std::byte>> raw_;
  std::vector<FetchTarget> targets_;
  FetchOptions options_;
};

TEST_F(FrameDecodingTest, BlocksAreDecodedInGroupsWhileOthersArrive) {
  FetchAssembly assembly = Assembly();
  FrameDecoding decoding = Decoding();
  assembly.StartAttempt(100);
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    GiveWhole(i, assembly);
    decoding.Advance(assembly, /*last=*/false);
    EXPECT_EQ(decoding.decoded_blocks(), i < 15 ? 0u : 16u);
  }
  decoding.Advance(assembly, /*last=*/true);
  EXPECT_EQ(decoding.decoded_blocks(), kBlocks);
  EXPECT_TRUE(raw_ == expected_);
  const FetchReport report = assembly.TakeReport();
  EXPECT_TRUE(report.all_loaded());
  EXPECT_EQ(report.blocks[0].bytes, raw_[0].size());
  EXPECT_EQ(report.blocks[0].codec, CodecId::kResidual);
}

TEST_F(FrameDecodingTest, ALayerIsDecodedWhenItsSectionsHaveCome) {
  std::uint32_t done = 0;
  options_.on_layer = [&](std::uint32_t layer, std::span<const FetchedBlock> blocks) {
    EXPECT_EQ(layer, done);
    ++done;
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      EXPECT_EQ(blocks[i].state, FetchedBlock::State::kPending);
      const auto begin = static_cast<std::ptrdiff_t>(geometry_.layer_begin(layer));
      const auto end = static_cast<std::ptrdiff_t>(geometry_.layer_end(layer));
      EXPECT_TRUE(
          std::equal(raw_[i].begin() + begin, raw_[i].begin() + end, expected_[i].begin() + begin))
          << "layer " << layer << " of block " << i;
    }
  };
  for (const int threads : {1, 2}) {
    done = 0;
    raw_.assign(kBlocks, std::vector<std::byte>(original_[0].size()));
    for (std::uint32_t i = 0; i < kBlocks; ++i) targets_[i].raw = raw_[i];
    FetchAssembly assembly = Assembly();
    FrameDecoding decoding = Decoding(threads);
    assembly.StartAttempt(100);
    std::size_t parts = 0;
    for (const EncodedFrame& frame : frames_) {
      parts = std::max(parts, FrameView::Parse(frame.bytes)->section_count() + 1);
    }
    ASSERT_GT(parts, 3u);
    for (std::size_t part = 0; part < parts; ++part) {
      std::uint32_t least = geometry_.layer_count();
      for (std::uint32_t i = 0; i < kBlocks; ++i) {
        const FrameView view = FrameView::Parse(frames_[i].bytes).value();
        if (part <= view.section_count()) Give(i, part, 1, assembly);
        decoding.Advance(assembly, /*last=*/false);
        const auto layers = LayersOfSections(view, geometry_).value();
        if (part < layers.size()) least = std::min(least, part == 0 ? 0 : layers[part - 1]);
      }
      EXPECT_EQ(done, least) << "after part " << part;
    }
    decoding.Advance(assembly, /*last=*/true);
    EXPECT_EQ(done, geometry_.layer_count());
    EXPECT_EQ(decoding.decoded_blocks(), kBlocks);
    EXPECT_TRUE(assembly.TakeReport().all_loaded());
  }
}

TEST_F(FrameDecodingTest, ABlockThatIsLostBetweenLayersLeavesTheOthers) {
  std::uint32_t done = 0;
  options_.on_layer = [&](std::uint32_t, std::span<const FetchedBlock>) { ++done; };
  FetchAssembly assembly = Assembly();
  FrameDecoding decoding = Decoding();
  assembly.StartAttempt(100);
  for (std::uint32_t i = 0; i < kBlocks; ++i) Give(i, 0, 2, assembly);
  decoding.Advance(assembly, /*last=*/false);
  EXPECT_GT(done, 0u);
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    if (i != 7) Give(i, 2, 1000, assembly);
  }
  decoding.Advance(assembly, /*last=*/false);
  EXPECT_LT(done, geometry_.layer_count());
  assembly.FailRest(absl::DeadlineExceededError("late"));
  decoding.Advance(assembly, /*last=*/true);
  EXPECT_EQ(done, geometry_.layer_count());
  const FetchReport report = assembly.TakeReport();
  EXPECT_EQ(report.loaded_blocks, kBlocks - 1);
  EXPECT_TRUE(absl::IsDeadlineExceeded(report.blocks[7].status));
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    if (i != 7) {
      EXPECT_TRUE(raw_[i] == expected_[i]) << i;
    }
  }
}

// A frame whose symbols were damaged, with good checksums.
TEST_F(FrameDecodingTest, WhatCannotBeDecodedIsMissedAlone) {
  for (const std::uint32_t bad : {0u, 7u}) {
    std::vector<std::byte>& bytes = frames_[bad].bytes;
    const FrameView view = FrameView::Parse(bytes).value();
    const std::size_t header_bytes = view.header_bytes();
    for (std::size_t at = bytes.size() - 200; at < bytes.size(); ++at) bytes[at] ^= std::byte{0x33};
    std::vector<FrameSection> sections;
    std::size_t at = header_bytes;
    for (std::size_t s = 0; s < view.section_count(); ++s) {
      const std::uint32_t size = view.section(s).bytes;
      sections.push_back({size, Crc32c(std::span(bytes).subspan(at, size))});
      at += size;
    }
    WriteFrameHeader({.codec = CodecId::kResidual,
                      .quality = Quality::kHigh,
                      .model = spec_.Digest(),
                      .raw_bytes = raw_[0].size(),
                      .sections = sections},
                     std::span(bytes).first(header_bytes));
  }
  for (const bool in_layers : {false, true}) {
    std::uint32_t done = 0;
    if (in_layers) options_.on_layer = [&](std::uint32_t, auto) { ++done; };
    FetchAssembly assembly = Assembly();
    FrameDecoding decoding = Decoding();
    assembly.StartAttempt(100);
    for (std::uint32_t i = 0; i < kBlocks; ++i) GiveWhole(i, assembly);
    decoding.Advance(assembly, /*last=*/true);
    EXPECT_EQ(decoding.undecodable_blocks(), 2u);
    EXPECT_EQ(done, in_layers ? geometry_.layer_count() : 0);
    const FetchReport report = assembly.TakeReport();
    EXPECT_EQ(report.loaded_blocks, kBlocks - 2);
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      if (i == 0 || i == 7) {
        EXPECT_TRUE(absl::IsDataLoss(report.blocks[i].status)) << report.blocks[i].status;
      } else {
        EXPECT_TRUE(raw_[i] == expected_[i]) << i;
      }
    }
  }
}

TEST_F(FrameDecodingTest, AFrameThatIsNotWhatWasSaidIsMissed) {
  targets_[1].first_position = 0;
  targets_[2].tokens = targets_[3].tokens;
  std::swap(frames_[4], frames_[5]);
  for (const bool in_layers : {false, true}) {
    if (in_layers) options_.on_layer = [](std::uint32_t, auto) {};
    FetchAssembly assembly = Assembly();
    FrameDecoding decoding = Decoding();
    assembly.StartAttempt(100);
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      // 6: more than the frame has. 8: less than was asked for.
      GiveWhole(i, assembly,
                i == 6   ? Quality::kNearExact
                : i == 8 ? Quality::kUnrated
                         : Quality::kHigh);
    }
    decoding.Advance(assembly, /*last=*/true);
    const FetchReport report = assembly.TakeReport();
    std::vector<std::uint32_t> missed;
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      if (report.blocks[i].loaded()) continue;
      missed.push_back(i);
      EXPECT_TRUE(absl::IsDataLoss(report.blocks[i].status)) << report.blocks[i].status;
    }
    EXPECT_THAT(missed, ElementsAre(1, 2, 4, 5, 6, 8));
    EXPECT_EQ(decoding.undecodable_blocks(), 6u);
  }
}

TEST_F(FrameDecodingTest, AProfileThatIsNotToBeHadIsNamed) {
  has_profile_ = false;
  FetchAssembly assembly = Assembly();
  FrameDecoding decoding = Decoding();
  assembly.StartAttempt(100);
  for (std::uint32_t i = 0; i < kBlocks; ++i) GiveWhole(i, assembly);
  decoding.Advance(assembly, /*last=*/true);
  const FetchReport report = assembly.TakeReport();
  EXPECT_EQ(report.loaded_blocks, 0u);
  EXPECT_TRUE(absl::IsFailedPrecondition(report.blocks[0].status));
  EXPECT_THAT(std::string(report.blocks[0].status.message()),
              HasSubstr(codec_->residual()->id().ToHex()));
}

// All codecs at once; raw frames need none.
TEST_F(FrameDecodingTest, EveryCodecComesOutInLayersToo) {
  const FrameCodec plain(spec_, nullptr);
  const auto encode = [&](std::uint32_t i, Quality quality) {
    const BlockToEncode block{.first_position = 16 * i,
                              .session_tokens = 16 * kBlocks,
                              .tokens = targets_[i].tokens,
                              .raw = original_[i]};
    return quality == Quality::kExact && i % 2 == 1
               ? codec_->EncodeSmallestExact({&block, 1}).value()[0]
               : plain.Encode({&block, 1}, quality).value()[0];
  };
  for (const std::uint32_t i : {2u, 3u}) {
    frames_[i] = encode(i, Quality::kExact);
    expected_[i] = original_[i];
  }
  // A raw frame.
  std::vector<FrameSection> sections;
  std::size_t at = 0;
  for (const std::uint32_t bytes : RawSectionBytes(geometry_)) {
    sections.push_back({bytes, Crc32c(std::span(original_[5]).subspan(at, bytes))});
    at += bytes;
  }
  frames_[5] = {.bytes = std::vector<std::byte>(FrameHeaderBytes(sections.size())),
                .codec = CodecId::kRaw,
                .quality = Quality::kExact};
  WriteFrameHeader(
      {.model = spec_.Digest(), .raw_bytes = original_[5].size(), .sections = sections},
      frames_[5].bytes);
  frames_[5].bytes.insert(frames_[5].bytes.end(), original_[5].begin(), original_[5].end());
  expected_[5] = original_[5];

  for (const bool in_layers : {false, true}) {
    if (in_layers) options_.on_layer = [](std::uint32_t, auto) {};
    for (auto& raw : raw_) std::fill(raw.begin(), raw.end(), std::byte{0});
    FetchAssembly assembly = Assembly();
    FrameDecoding decoding = Decoding();
    assembly.StartAttempt(100);
    for (std::uint32_t i = 0; i < kBlocks; ++i) GiveWhole(i, assembly);
    decoding.Advance(assembly, /*last=*/true);
    EXPECT_TRUE(assembly.TakeReport().all_loaded());
    EXPECT_TRUE(raw_ == expected_);
    EXPECT_EQ(decoding.decoded_blocks(), kBlocks - 1);
  }
}

TEST_F(FrameDecodingTest, AConnectionThatIsLostBetweenLayersGoesOnWithTheSameFrame) {
  std::uint32_t done = 0;
  options_.on_layer = [&](std::uint32_t, std::span<const FetchedBlock>) { ++done; };
  FetchAssembly assembly = Assembly();
  FrameDecoding decoding = Decoding();
  assembly.StartAttempt(100);
  for (std::uint32_t i = 0; i < kBlocks; ++i) Give(i, 0, 2, assembly);
  decoding.Advance(assembly, /*last=*/false);
  const std::uint32_t before = done;
  EXPECT_GT(before, 0u);
  // Of block 9 another frame comes.
  const BlockToEncode block{.first_position = 16 * 9,
                            .session_tokens = 16 * 9 + 16,
                            .tokens = targets_[9].tokens,
                            .raw = original_[10]};
  const EncodedFrame other = codec_->Encode({&block, 1}, Quality::kHigh).value()[0];
  frames_[9] = other;
  assembly.StartAttempt(100);
  for (std::uint32_t i = 0; i < kBlocks; ++i) GiveWhole(i, assembly);
  decoding.Advance(assembly, /*last=*/true);
  EXPECT_EQ(done, geometry_.layer_count());
  const FetchReport report = assembly.TakeReport();
  EXPECT_EQ(report.loaded_blocks, kBlocks - 1);
  EXPECT_TRUE(absl::IsUnavailable(report.blocks[9].status)) << report.blocks[9].status;
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    if (i != 9) {
      EXPECT_TRUE(raw_[i] == expected_[i]) << i;
    }
  }
}

}  // namespace
}  // namespace kvtrie
