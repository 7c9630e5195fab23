#include "storage/codec/block_coder.h"

#include <atomic>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "storage/codec/codec_cache.h"
#include "storage/codec/frame_codec.h"
#include "storage/codec/profile_codec.h"
#include "tests/storage/codec/plain_profile_bytes.h"

namespace kvtrie {
namespace {

// A device that answers every call alike, or does it.
class TestBackend final : public CodecBackend {
 public:
  explicit TestBackend(absl::Status answer) : answer_(std::move(answer)) {}

  std::string_view name() const override { return "test"; }
  std::string device() const override { return "a test"; }
  absl::StatusOr<std::shared_ptr<const BlockCoder>> CoderFor(
      const ModelSpec&, std::shared_ptr<const ResidualCodec> codec) const override {
    if (!coders_.ok()) return coders_;
    return std::make_shared<const Coder>(*this, std::move(codec));
  }
  absl::Status Probe() const override { return answer_; }

  void RefuseCoders(absl::Status status) { coders_ = std::move(status); }
  int calls() const { return calls_; }

 private:
  class Coder final : public BlockCoder {
   public:
    Coder(const TestBackend& backend, std::shared_ptr<const ResidualCodec> codec)
        : backend_(backend), codec_(std::move(codec)) {}
    absl::StatusOr<std::vector<EncodedBlock>> Encode(std::span<const BlockToEncode> blocks,
                                                     Quality quality) const override {
      ++backend_.calls_;
      if (!backend_.answer_.ok()) return backend_.answer_;
      return codec_->Encode(blocks, quality);
    }
    absl::Status Decode(std::span<const BlockToDecode> blocks) const override {
      ++backend_.calls_;
      if (!backend_.answer_.ok()) return backend_.answer_;
      return codec_->Decode(blocks);
    }

   private:
    const TestBackend& backend_;
    const std::shared_ptr<const ResidualCodec> codec_;
  };

  const absl::Status answer_;
  absl::Status coders_;
  mutable std::atomic<int> calls_{0};
};

class BlockCoderTest : public testing::Test {
 protected:
  BlockCoderTest()
      : profile_(ProfileBytes(PlainProfile(spec_))),
        residual_(CodecOfProfile(spec_, ProfileIdOf(profile_), profile_).value()),
        text_(MakeText(spec_, 16, 5)),
        raw_(CutBlock(spec_, text_, 0)),
        block_{.session_tokens = 16, .tokens = text_.tokens, .raw = raw_} {}

  std::shared_ptr<const BlockCoder> CoderOf(const CodecBackend& backend) const {
    auto coder = backend.CoderFor(spec_, residual_);
    EXPECT_TRUE(coder.ok()) << coder.status();
    return *coder;
  }

  // What a frame of the codec holds, after it has decoded it.
  std::vector<std::byte> ThereAndBack(const FrameCodec& codec) const {
    const auto frames = codec.Encode({&block_, 1}, Quality::kHigh);
    EXPECT_TRUE(frames.ok()) << frames.status();
    std::vector<std::byte> raw(raw_.size());
    const FrameToDecode frame{.frame = FrameView::Parse(frames->front().bytes).value(),
                              .tokens = text_.tokens,
                              .raw = raw};
    const absl::Status decoded = codec.Decode({&frame, 1});
    EXPECT_TRUE(decoded.ok()) << decoded;
    return raw;
  }

  const ModelSpec spec_ = SyntheticSpec();
  const std::vector<std::byte> profile_;
  const std::shared_ptr<const ResidualCodec> residual_;
  const SyntheticText text_;
  const std::vector<std::byte> raw_;
  const BlockToEncode block_;
};

TEST_F(BlockCoderTest, TheProcessorIsABackend) {
  const auto cpu = CpuBackend();
  EXPECT_EQ(cpu->name(), "cpu");
  EXPECT_FALSE(cpu->device().empty());
  EXPECT_TRUE(cpu->Probe().ok());
  const FrameCodec by_coder(spec_, residual_, CoderOf(*cpu));
  EXPECT_EQ(ThereAndBack(by_coder), ThereAndBack(FrameCodec(spec_, residual_)));
}

TEST_F(BlockCoderTest, ACoderDoesTheWorkOfProfiles) {
  const TestBackend backend((absl::Status()));
  const FrameCodec codec(spec_, residual_, CoderOf(backend));
  EXPECT_EQ(ThereAndBack(codec), ThereAndBack(FrameCodec(spec_, residual_)));
  EXPECT_EQ(backend.calls(), 2);
}

TEST_F(BlockCoderTest, TheProcessorTakesOverFromALostDevice) {
  const TestBackend lost(absl::UnavailableError("it fell off the bus"));
  const FrameCodec codec(spec_, residual_, CoderOf(lost));
  EXPECT_EQ(ThereAndBack(codec), ThereAndBack(FrameCodec(spec_, residual_)));
  EXPECT_EQ(lost.calls(), 2);
}

TEST_F(BlockCoderTest, OtherErrorsAreThoseOfTheCaller) {
  const TestBackend broken(absl::DataLossError("no frame"));
  const FrameCodec codec(spec_, residual_, CoderOf(broken));
  EXPECT_EQ(codec.Encode({&block_, 1}, Quality::kHigh).status().code(),
            absl::StatusCode::kDataLoss);
}

TEST_F(BlockCoderTest, ACacheOfCodecsMakesThemWithItsBackend) {
  TestBackend backend((absl::Status()));
  const auto load = [&]() -> absl::StatusOr<CodecCache::ProfileBytes> {
    return CodecCache::ProfileBytes{nullptr, profile_};
  };
  const ProfileId id = residual_->id();
  CodecCache cache(1 << 30, &backend);
  const auto codec = cache.Get(spec_, spec_.Digest(), id, load);
  ASSERT_TRUE(codec.ok()) << codec.status();
  ThereAndBack(**codec);
  EXPECT_EQ(backend.calls(), 2);

  // A device without room for the profile leaves the work to the processor.
  backend.RefuseCoders(absl::UnavailableError("full"));
  CodecCache without(1 << 30, &backend);
  ThereAndBack(**without.Get(spec_, spec_.Digest(), id, load));
  EXPECT_EQ(backend.calls(), 2);

  backend.RefuseCoders(absl::InternalError("a fault"));
  CodecCache faulty(1 << 30, &backend);
  EXPECT_EQ(faulty.Get(spec_, spec_.Digest(), id, load).status().code(),
            absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace kvtrie
