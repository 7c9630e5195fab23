#include "client/path_encoder.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "storage/codec/profile_codec.h"
#include "tests/storage/codec/plain_profile_bytes.h"
#include "tests/storage/codec/shared_text.h"

namespace kvtrie {
namespace {

constexpr std::uint32_t kFirstBlock = 2;
constexpr std::size_t kBlocks = 40;

class PathEncoderTest : public testing::Test {
 protected:
  PathEncoderTest() {
    const auto profile = ProfileBytes(PlainProfile(spec_));
    codec_ = std::make_shared<const FrameCodec>(
        spec_, std::shared_ptr<const ResidualCodec>(
                   CodecOfProfile(spec_, ProfileIdOf(profile), profile).value()));
    for (std::size_t i = 0; i < kBlocks; ++i) {
      raw_.push_back(CutBlock(spec_, text_, static_cast<std::uint32_t>(16 * (kFirstBlock + i))));
    }
    blocks_.assign(raw_.begin(), raw_.end());
    path_.path.tokens = text_.tokens;
    path_.first_block = kFirstBlock;
    path_.blocks = blocks_;
    path_.quality = Quality::kHigh;
  }

  std::vector<std::byte> Expected(std::uint32_t i, const FrameCodec& codec) const {
    const BlockToEncode block{.first_position = 16 * (kFirstBlock + i),
                              .session_tokens = static_cast<std::uint32_t>(text_.tokens.size()),
                              .tokens = std::span(text_.tokens).subspan(16 * (kFirstBlock + i), 16),
                              .raw = raw_[i]};
    return codec.Encode({&block, 1}, path_.quality).value()[0].bytes;
  }

  const ModelSpec spec_ = SyntheticSpec();
  // Some tokens are behind the last block: they are part of what is known of the session.
  const SyntheticText text_ = MakeText(spec_, 16 * (kFirstBlock + kBlocks) + 5, 4);
  std::shared_ptr<const FrameCodec> codec_;
  std::vector<std::vector<std::byte>> raw_;
  std::vector<std::span<const std::byte>> blocks_;
  PutPath path_;
};

TEST_F(PathEncoderTest, OnlyWhatIsWantedIsEncodedAndSomeAtATime) {
  for (const int threads : {1, 3}) {
    PathEncoder encoder(path_, 16, codec_, threads);
    std::deque<std::uint32_t> wanted;
    for (std::uint32_t i = 1; i < kBlocks; i += 2) wanted.push_back(i);
    EXPECT_TRUE(encoder.Frame(wanted).bytes == Expected(1, *codec_));
    EXPECT_EQ(encoder.frame(35) != nullptr, threads == 3) << "16 blocks per thread";
    while (!wanted.empty()) {
      const EncodedFrame& frame = encoder.Frame(wanted);
      EXPECT_EQ(frame.codec, CodecId::kResidual);
      EXPECT_TRUE(frame.bytes == Expected(wanted.front(), *codec_));
      EXPECT_EQ(&frame, encoder.frame(wanted.front()));
      wanted.pop_front();
    }
    for (std::uint32_t i = 0; i < kBlocks; i += 2) EXPECT_EQ(encoder.frame(i), nullptr);
  }
}

TEST_F(PathEncoderTest, WhatTheCodecCannotDoIsCodedWithoutLoss) {
  path_.quality = Quality::kNearExact;  // no such level
  PathEncoder encoder(path_, 16, codec_, 1);
  const EncodedFrame& frame = encoder.Frame({0});
  EXPECT_EQ(frame.codec, CodecId::kLossless);
  EXPECT_EQ(frame.quality, Quality::kExact);
}

// A path of which most tokens stand in another text too.
class PathReferencesTest : public testing::Test {
 protected:
  static constexpr std::uint32_t kPathBlocks = 6;

  PathReferencesTest() : shared_(spec_, other_, text_) {
    for (std::uint32_t b = 0; b < kPathBlocks; ++b) blocks_.push_back(shared_.raw[b]);
    path_.path.tokens = text_.tokens;
    path_.blocks = blocks_;
    path_.quality = Quality::kSmall;
    for (std::uint32_t b = 0; b < kPathBlocks; ++b) {
      if (shared_.runs[b].empty()) continue;
      v1::BlockReferences* const of_block = plan_.add_references();
      of_block->set_block_index(b);
      for (const ReferenceBlock& reference : shared_.of_block[b]) {
        of_block->mutable_node_ids()->append(reference.node.view());
      }
      for (const ReferenceRun& run : shared_.runs[b]) {
        v1::TokenRun* const of_run = of_block->add_runs();
        of_run->set_first_token(run.first_token);
        of_run->set_token_count(run.token_count);
        of_run->set_reference(run.reference);
        of_run->set_offset(run.offset);
      }
    }
  }

  // Exact ones: that is finer than any level.
  DecodedReferences References(std::span<const TrieNodeId> nodes) {
    asked_ += nodes.size();
    DecodedReferences found;
    for (const TrieNodeId& node : nodes) {
      for (const ReferenceBlock& reference : shared_.references) {
        if (reference.node != node) continue;
        auto frame = std::make_shared<ReferenceFrame>();
        frame->tokens.assign(reference.tokens.begin(), reference.tokens.end());
        DecodedReference& decoded = found[node];
        decoded.frame = std::move(frame);
        decoded.raw = std::make_unique<std::byte[]>(reference.raw.size());
        std::copy(reference.raw.begin(), reference.raw.end(), decoded.raw.get());
        decoded.first_position = reference.first_position;
        decoded.quality = Quality::kExact;
      }
    }
    return found;
  }
  PathEncoder Make(const v1::PutPlan& plan) {
    PathEncoder encoder(path_, 16, codec_, 2);
    encoder.Follow(plan, [this](std::span<const TrieNodeId> nodes) { return References(nodes); });
    return encoder;
  }
  static std::deque<std::uint32_t> All() { return {0, 1, 2, 3, 4, 5}; }
  std::size_t CountReferenced(PathEncoder& encoder) {
    std::size_t count = 0;
    for (std::deque<std::uint32_t> wanted = All(); !wanted.empty(); wanted.pop_front()) {
      count += encoder.Frame(wanted).codec == CodecId::kReferenced ? 1 : 0;
    }
    return count;
  }

  const ModelSpec spec_ = SectionedSpec();
  const ResidualProfile profile_ = WithDifferences(PlainProfile(spec_), spec_);
  const std::shared_ptr<const FrameCodec> codec_ = std::make_shared<FrameCodec>(
      spec_,
      std::shared_ptr<const ResidualCodec>(
          ResidualCodec::Create(spec_, ProfileIdOf(ProfileBytes(profile_)), profile_).value()));
  const SyntheticText other_ = MakeText(spec_, 16 * kPathBlocks, 1);
  const SyntheticText text_ = ShareTokens(spec_, other_, 3, 70, 20, 16 * kPathBlocks, 2, 0.05f);
  const SharedBlocks shared_;
  std::vector<std::span<const std::byte>> blocks_;
  PutPath path_;
  v1::PutPlan plan_;
  std::size_t asked_ = 0;
};

TEST_F(PathReferencesTest, BlocksAreCodedAsThePlanSays) {
  PathEncoder encoder = Make(plan_);
  EXPECT_EQ(CountReferenced(encoder), static_cast<std::size_t>(plan_.references_size()));
  EXPECT_GE(plan_.references_size(), 4);

  // Anew, and without.
  std::set<std::string> nodes;
  for (const v1::BlockReferences& references : plan_.references()) {
    for (std::size_t at = 0; at < references.node_ids().size(); at += TrieNodeId::kBytes) {
      nodes.insert(references.node_ids().substr(at, TrieNodeId::kBytes));
    }
  }
  EXPECT_EQ(encoder.ForgetReferences().size(), nodes.size());
  EXPECT_EQ(CountReferenced(encoder), 0u);
  EXPECT_TRUE(encoder.ForgetReferences().empty());
}

TEST_F(PathReferencesTest, FinerBlocksAreFiner) {
  v1::PutPlan plan;
  for (const std::uint32_t block : {1u, 4u, 1000u}) {
    plan.mutable_finer_blocks()->append(reinterpret_cast<const char*>(&block), 4);
  }
  plan.set_finer_quality(v1::QUALITY_HIGH);
  PathEncoder encoder = Make(plan);
  encoder.Frame(All());
  for (std::uint32_t b = 0; b < kPathBlocks; ++b) {
    EXPECT_EQ(encoder.frame(b)->quality, b == 1 || b == 4 ? Quality::kHigh : Quality::kSmall);
  }
  EXPECT_EQ(asked_, 0u);
}

// Of a server that is wrong: blocks are coded as if it had said nothing.
TEST_F(PathReferencesTest, APlanThatMakesNoSenseDoesNoHarm) {
  const auto spoilt = [this](auto spoil) {
    v1::PutPlan plan = plan_;
    spoil(plan);
    return plan;
  };
  const v1::PutPlan plans[] = {
      spoilt([](auto& p) { p.mutable_references(1)->mutable_runs(0)->set_token_count(500); }),
      spoilt([](auto& p) { p.mutable_references(1)->mutable_runs(0)->set_reference(9); }),
      spoilt([](auto& p) { p.mutable_references(1)->mutable_runs(0)->set_offset(1); }),
      spoilt([](auto& p) { p.mutable_references(1)->clear_runs(); }),
      spoilt([](auto& p) { p.mutable_references(1)->mutable_node_ids()->resize(7); }),
      spoilt([](auto& p) { p.mutable_references(1)->set_block_index(77); }),
      spoilt([](auto& p) {
        p.set_finer_blocks(std::string(8, '\0'));
        p.set_finer_quality(static_cast<v1::Quality>(99));
      }),
  };
  for (const v1::PutPlan& plan : plans) {
    PathEncoder encoder = Make(plan);
    encoder.Frame(All());
    for (std::uint32_t b = 0; b < kPathBlocks; ++b) {
      ASSERT_NE(encoder.frame(b), nullptr);
      EXPECT_EQ(encoder.frame(b)->quality, Quality::kSmall);
    }
  }
}

}  // namespace
}  // namespace kvtrie
