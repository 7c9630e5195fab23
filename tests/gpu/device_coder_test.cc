#include "gpu/device_coder.h"

#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/gpu/device_checks.h"
#include "tests/gpu/faulty_device.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/gpu/late_device.h"

namespace kvtrie::gpu {
namespace {

class ShapeTest : public testing::TestWithParam<int> {
 protected:
  const std::uint64_t seed_ = static_cast<std::uint64_t>(GetParam());
  const Shape shape_ = RandomShape(seed_);
  const ResidualProfile profile_ = RandomProfile(shape_, seed_);
};

TEST_P(ShapeTest, DecodesToTheBytesOfTheProcessor) {
  SCOPED_TRACE(shape_.Text());
  ExpectSameDecoded(Twin(shape_, profile_), RandomBlocks(shape_, profile_, 5, 77));
}

TEST_P(ShapeTest, EncodesAsTheProcessorDoes) {
  SCOPED_TRACE(shape_.Text());
  ExpectLikeEncoded(Twin(shape_, profile_), RandomBlocks(shape_, profile_, 5, 78));
}

INSTANTIATE_TEST_SUITE_P(Shapes, ShapeTest, testing::Range(0, 56));

const Shape kShape = {.layers = {{4, 2, 16, 16}}, .block_per_head = true, .group_count = 1};

// Options for batches of so many blocks.
DeviceCoderOptions BatchesOf(std::size_t blocks, std::size_t workspaces) {
  return {.workspaces = workspaces,
          .batch_raw_bytes = blocks * KvGeometry(SpecOf(kShape)).raw_block_bytes()};
}

TEST(DeviceCoderTest, ManyBatchesKeepTheOrder) {
  const ResidualProfile profile = RandomProfile(kShape, 3);
  const Blocks blocks = RandomBlocks(kShape, profile, 11, 79);
  const Twin whole(kShape, profile);
  const auto expected = whole.coder->Encode(blocks.to_encode, Quality::kHigh);
  ASSERT_TRUE(expected.ok()) << expected.status();
  for (const std::size_t workspaces : {1u, 2u, 3u}) {
    const Twin twin(kShape, profile, BatchesOf(2, workspaces));
    EXPECT_EQ(static_cast<const DeviceCoder&>(*twin.coder).decode_blocks_max(), 2u);
    EXPECT_EQ(static_cast<const DeviceCoder&>(*twin.coder).encode_blocks_max(), 2u);
    const auto encoded = twin.coder->Encode(blocks.to_encode, Quality::kHigh);
    ASSERT_TRUE(encoded.ok()) << encoded.status();
    ASSERT_EQ(encoded->size(), expected->size());
    for (std::size_t b = 0; b < expected->size(); ++b) {
      EXPECT_TRUE((*encoded)[b].body == (*expected)[b].body) << b;
    }
    ExpectSameDecoded(twin, blocks);
  }
}

// A profile that was fitted, with importance, and KV that it predicts.
TEST(DeviceCoderTest, FittedProfilesCodeAlike) {
  for (const bool per_head : {false, true}) {
    const Shape shape = {.layers = {{4, 2, 16, 16}}};
    const ModelSpec spec = SpecOf(shape);
    const std::vector<SyntheticText> texts = FitTexts(spec);
    ResidualFitOptions options = SmallFitOptions();
    options.block_per_head = per_head;
    const Twin twin(shape, FitSynthetic(spec, options, MakeMaterial(spec, texts, per_head)));
    ASSERT_NE(twin.coder, nullptr);
    const SyntheticText text = MakeText(spec, 128, 99);
    for (const Quality quality : kCodedQualities) {
      const CodedText coded = EncodeText(*twin.codec, spec, text, quality);
      const auto encoded = twin.coder->Encode(coded.blocks, quality);
      ASSERT_TRUE(encoded.ok()) << encoded.status();
      std::vector<std::vector<std::byte>> raw(8, coded.raw[0]), expected = raw;
      std::vector<BlockToDecode> by_twin, by_codec;
      std::size_t bytes = 0, expected_bytes = 0;
      for (std::size_t b = 0; b < 8; ++b) {
        bytes += (*encoded)[b].body.size();
        expected_bytes += coded.encoded[b].body.size();
        EXPECT_EQ((*encoded)[b].exact_tokens, coded.encoded[b].exact_tokens);
        by_twin.push_back(coded.ToDecode(b, quality, raw[b]));
        by_codec.push_back(coded.ToDecode(b, quality, expected[b]));
      }
      EXPECT_NEAR(static_cast<double>(bytes), static_cast<double>(expected_bytes),
                  0.005 * static_cast<double>(expected_bytes));
      ASSERT_TRUE(twin.coder->Decode(by_twin).ok());
      ASSERT_TRUE(twin.codec->Decode(by_codec).ok());
      EXPECT_TRUE(raw == expected);
    }
  }
}

// A device is free to do what it was asked for whenever streams allow it.
TEST(DeviceCoderTest, StreamsWaitForWhatTheyNeed) {
  const ResidualProfile profile = RandomProfile(kShape, 3);
  const Blocks blocks = RandomBlocks(kShape, profile, 7, 79);
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    const Twin twin(kShape, profile, BatchesOf(2, 2),
                    std::make_unique<LateDevice>(MakeHostDevice(kTwinBytes), seed));
    ExpectSameDecoded(twin, blocks);
    ExpectLikeEncoded(twin, blocks);
    ASSERT_FALSE(HasFailure()) << seed;
  }
}

TEST(DeviceCoderTest, NothingIsNoWork) {
  const Twin twin(kShape, RandomProfile(kShape, 3));
  EXPECT_TRUE(twin.coder->Decode({}).ok());
  const auto encoded = twin.coder->Encode({}, Quality::kHigh);
  ASSERT_TRUE(encoded.ok());
  EXPECT_TRUE(encoded->empty());
}

TEST(DeviceCoderTest, ExactFramesAndLevelsOfAllQualitiesGoInOneCall) {
  const ResidualProfile profile = RandomProfile(kShape, 4);
  const Twin twin(kShape, profile);
  const Blocks blocks = RandomBlocks(kShape, profile, 8, 80);
  const Quality qualities[] = {Quality::kSmall, Quality::kExact, Quality::kHigh,
                               Quality::kNearExact};
  std::vector<EncodedBlock> encoded;
  for (std::size_t b = 0; b < 8; ++b) {
    auto one = twin.coder->Encode({&blocks.to_encode[b], 1}, qualities[b % 4]);
    ASSERT_TRUE(one.ok()) << one.status();
    ASSERT_FALSE(one->front().body.empty());
    encoded.push_back(std::move(one->front()));
  }
  Decoded decoded(blocks, encoded, Quality::kHigh), expected(blocks, encoded, Quality::kHigh);
  for (std::size_t b = 0; b < 8; ++b) {
    decoded.blocks[b].quality = expected.blocks[b].quality = qualities[b % 4];
    ASSERT_TRUE(twin.codec->Decode({&expected.blocks[b], 1}).ok());
  }
  const absl::Status status = twin.coder->Decode(decoded.blocks);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(decoded.raw == expected.raw);
  EXPECT_TRUE(decoded.raw[1] == blocks.raw[1]) << "exact";
}

TEST(DeviceCoderTest, BlocksWithReferencesFallToTheProcessor) {
  ResidualProfile profile = RandomProfile(kShape, 5);
  ResidualProfile differences = profile;
  differences.table_tokens.clear();
  differences.table_rows.clear();
  profile.differences.push_back(differences);
  ASSERT_TRUE(profile.CheckConsistency().ok());
  const Twin twin(kShape, profile);
  Blocks blocks = RandomBlocks(kShape, profile, 4, 81);
  // Block 2 has the tokens of block 1, which it refers to.
  blocks.tokens[2] = blocks.tokens[1];
  const ReferenceBlock reference = {.node = TrieNodeId{{1, 2, 3}},
                                    .first_position = 16,
                                    .tokens = blocks.tokens[1],
                                    .raw = blocks.raw[1]};
  const ReferenceRun run = {.first_token = 0, .token_count = 16, .reference = 0, .offset = 0};
  blocks.to_encode[2].references = {&reference, 1};
  blocks.to_encode[2].runs = {&run, 1};
  const auto encoded = twin.coder->Encode(blocks.to_encode, Quality::kHigh);
  ASSERT_TRUE(encoded.ok()) << encoded.status();
  EXPECT_EQ((*encoded)[1].referenced_tokens, 0u);
  EXPECT_EQ((*encoded)[2].referenced_tokens, 16u);
  const auto by_codec = twin.codec->Encode({&blocks.to_encode[2], 1}, Quality::kHigh);
  ASSERT_TRUE(by_codec.ok());
  EXPECT_TRUE((*encoded)[2].body == by_codec->front().body);

  Decoded decoded(blocks, *encoded, Quality::kHigh), expected(blocks, *encoded, Quality::kHigh);
  for (Decoded* of : {&decoded, &expected}) {
    of->blocks[2].is_referenced = true;
    of->blocks[2].references = {&reference, 1};
  }
  ASSERT_TRUE(twin.codec->Decode(expected.blocks).ok());
  const absl::Status status = twin.coder->Decode(decoded.blocks);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(decoded.raw == expected.raw);

  // A run that is none is refused, as ever.
  const ReferenceRun bad = {.first_token = 0, .token_count = 17, .reference = 0, .offset = 0};
  blocks.to_encode[2].runs = {&bad, 1};
  EXPECT_TRUE(
      absl::IsInvalidArgument(twin.coder->Encode(blocks.to_encode, Quality::kHigh).status()));
}

TEST(DeviceCoderTest, QualitiesWithoutALevelAreRefusedAlike) {
  ResidualProfile profile = RandomProfile(kShape, 6);
  const Blocks blocks = RandomBlocks(kShape, profile, 1, 82);
  profile.levels.resize(1);
  for (PlaneProfile& plane : profile.plane_profiles) plane.scales.resize(1);
  const Twin twin(kShape, profile);
  EXPECT_TRUE(
      absl::IsInvalidArgument(twin.coder->Encode(blocks.to_encode, Quality::kSmall).status()));
  const auto encoded = twin.coder->Encode(blocks.to_encode, Quality::kHigh);
  ASSERT_TRUE(encoded.ok());
  Decoded decoded(blocks, *encoded, Quality::kSmall);
  EXPECT_TRUE(absl::IsDataLoss(twin.codec->Decode(decoded.blocks)));
  EXPECT_TRUE(absl::IsDataLoss(twin.coder->Decode(decoded.blocks)));
}

TEST(DeviceCoderTest, CallsRunSideBySide) {
  const ResidualProfile profile = RandomProfile(kShape, 7);
  const Twin twin(kShape, profile, BatchesOf(2, 3));
  const Blocks blocks = RandomBlocks(kShape, profile, 7, 83);
  const auto expected = twin.coder->Encode(blocks.to_encode, Quality::kHigh);
  ASSERT_TRUE(expected.ok());
  Decoded decoded(blocks, *expected, Quality::kHigh);
  ASSERT_TRUE(twin.codec->Decode(decoded.blocks).ok());
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < 3; ++round) {
        const auto encoded = twin.coder->Encode(blocks.to_encode, Quality::kHigh);
        if (!encoded.ok()) {
          ++wrong;
          continue;
        }
        for (std::size_t b = 0; b < 7; ++b) wrong += (*encoded)[b].body != (*expected)[b].body;
        Decoded own(blocks, *encoded, Quality::kHigh);
        if (!twin.coder->Decode(own.blocks).ok() || own.raw != decoded.raw) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(DeviceCoderTest, NoRoomIsUnavailable) {
  const ResidualProfile profile = RandomProfile(kShape, 8);
  const ModelSpec spec = SpecOf(kShape);
  const std::shared_ptr<const ResidualCodec> codec = MakeCodec(spec, profile);
  const auto tiny = MakeDeviceBackend("twin", MakeHostDevice(std::size_t{8} << 10));
  EXPECT_TRUE(absl::IsUnavailable(tiny->CoderFor(spec, codec).status()));
  EXPECT_TRUE(tiny->Probe().ok());

  // Room for the profile and for no batch.
  std::size_t bytes = std::size_t{8} << 10;
  std::unique_ptr<const CodecBackend> small;
  do {
    bytes += std::size_t{8} << 10;
    small = MakeDeviceBackend("twin", MakeHostDevice(bytes));
  } while (!small->CoderFor(spec, codec).ok());
  const auto coder = small->CoderFor(spec, codec);
  const Blocks blocks = RandomBlocks(kShape, profile, 3, 84);
  EXPECT_TRUE(absl::IsUnavailable((*coder)->Encode(blocks.to_encode, Quality::kHigh).status()));
  const auto encoded = codec->Encode(blocks.to_encode, Quality::kHigh);
  Decoded decoded(blocks, *encoded, Quality::kHigh);
  EXPECT_TRUE(absl::IsUnavailable((*coder)->Decode(decoded.blocks)));
}

// Whatever a device fails at, calls say so, and go on when it is well again.
TEST(DeviceCoderTest, FaultsOfTheDeviceAreUnavailable) {
  const ResidualProfile profile = RandomProfile(kShape, 9);
  Faults faults;
  const Twin twin(kShape, profile, BatchesOf(2, 2),
                  std::make_unique<FaultyDevice>(MakeHostDevice(kTwinBytes), faults));
  const Blocks blocks = RandomBlocks(kShape, profile, 5, 85);
  const auto encoded = twin.codec->Encode(blocks.to_encode, Quality::kHigh);
  Decoded expected(blocks, *encoded, Quality::kHigh);
  ASSERT_TRUE(twin.codec->Decode(expected.blocks).ok());
  int failed = 0;
  for (int calls = 0; calls < 400; calls += 3) {
    Decoded decoded(blocks, *encoded, Quality::kHigh);
    faults.calls_left = calls;
    const absl::Status decode = twin.coder->Decode(decoded.blocks);
    faults.calls_left = calls;
    const absl::Status encode = twin.coder->Encode(blocks.to_encode, Quality::kHigh).status();
    for (const absl::Status& status : {decode, encode}) {
      EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
      failed += status.ok() ? 0 : 1;
    }
    if (decode.ok()) {
      EXPECT_TRUE(decoded.raw == expected.raw);
    }
  }
  EXPECT_GT(failed, 50);
  faults.calls_left = Faults::kNone;
  ExpectSameDecoded(twin, blocks);
  faults.calls_left = 0;
  EXPECT_TRUE(absl::IsUnavailable(twin.backend->Probe()));
  faults.calls_left = Faults::kNone;
  EXPECT_TRUE(twin.backend->Probe().ok());
}

TEST(DeviceBackendTest, SaysWhatItIs) {
  const auto backend = MakeDeviceBackend("twin", MakeHostDevice(kTwinBytes));
  EXPECT_EQ(backend->name(), "twin");
  EXPECT_EQ(backend->device(), "host twin");
}

}  // namespace
}  // namespace kvtrie::gpu
