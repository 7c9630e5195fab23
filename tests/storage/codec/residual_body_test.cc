#include "storage/codec/residual_body.h"

#include <string>
#include <vector>

#include "storage/base/byte_order.h"
#include "storage/codec/frame.h"
#include "tests/storage/codec/residual_fixture.h"

// That damage is found is held of the decoder: residual_decoder_test.
namespace kvtrie {
namespace {

class ResidualBodyTest : public testing::Test {
 protected:
  ResidualBodyTest() {
    profile_.has_first_token = true;
    profile_.first_token = kFirstTokenOfTexts;
    for (std::size_t c = 0; c < profile_.component_count(); ++c) {
      profile_.first_rows.push_back(static_cast<float>(c) - 5);
    }
  }

  BlockToEncode Block(std::uint32_t first_position) const {
    return {.first_position = first_position, .tokens = text_.tokens, .raw = raw_};
  }
  absl::StatusOr<ResidualBody> Read(const EncodedBlock& encoded, Quality quality) {
    return ReadResidualBody(geometry_, SyntheticProfileId(), profile_,
                            {.body = encoded.body,
                             .section_bytes = encoded.section_bytes,
                             .quality = quality,
                             .tokens = text_.tokens,
                             .raw = decoded_});
  }

  const ModelSpec spec_ = SyntheticSpec({{3, 2, 4, 4}}, DType::kBfloat16);
  const KvGeometry geometry_{spec_};
  ResidualProfile profile_ = PlainProfile(spec_);
  const SyntheticText text_ = MakeText(spec_, 16, 5);
  const std::vector<std::byte> raw_ = CutBlock(spec_, text_, 0);
  std::vector<std::byte> decoded_ = raw_;
};

TEST_F(ResidualBodyTest, WhatIsWrittenIsRead) {
  CodedSymbols coded = {.first_from_profile = true,
                        .exact = {2, 7},
                        .symbols = std::vector<std::byte>(9000, std::byte{0x77}),
                        .layer_bytes = {5000, 5000, 8000}};
  const EncodedBlock encoded =
      WriteResidualBody(geometry_, SyntheticProfileId(), Quality::kHigh, Block(0), coded);
  EXPECT_EQ(encoded.exact_tokens, 2u);
  EXPECT_EQ(encoded.referenced_tokens, 0u);
  const auto body = Read(encoded, Quality::kHigh);
  ASSERT_TRUE(body.ok()) << body.status();
  EXPECT_EQ(body->first_position, 0u);
  EXPECT_TRUE(body->first_from_profile);
  EXPECT_EQ(body->exact, coded.exact);
  EXPECT_TRUE(body->raw_crcs.empty());
  // The second section has what is left: the last layer needs all.
  EXPECT_EQ(body->layers_of_section, (std::vector<std::uint16_t>{2, 3}));
  EXPECT_TRUE(std::equal(body->symbols.begin(), body->symbols.end(), coded.symbols.begin(),
                         coded.symbols.end()));
  ASSERT_EQ(body->exact_rows.size(), 2 * TokenBytes(geometry_));
  const std::vector<std::byte> seventh = BytesOfToken(spec_, raw_, 7);
  EXPECT_TRUE(
      std::equal(seventh.begin(), seventh.end(),
                 body->exact_rows.begin() + static_cast<std::ptrdiff_t>(TokenBytes(geometry_))));
}

TEST_F(ResidualBodyTest, ExactFramesHaveAChecksumOfEachLayer) {
  const CodedSymbols coded = {
      .exact = {0}, .symbols = std::vector<std::byte>(100), .layer_bytes = {80, 90, 95}};
  const EncodedBlock encoded =
      WriteResidualBody(geometry_, SyntheticProfileId(), Quality::kExact, Block(0), coded);
  const auto body = Read(encoded, Quality::kExact);
  ASSERT_TRUE(body.ok()) << body.status();
  EXPECT_EQ(body->raw_crcs.size(), 3u);
  EXPECT_FALSE(body->first_from_profile);
}

TEST_F(ResidualBodyTest, HeadsThatAreTooLongAreSectionsOfTheirOwn) {
  // One layer of 1 MiB.
  const CodedSymbols coded = {.exact = {1},
                              .symbols = std::vector<std::byte>(kSectionBytesMax),
                              .layer_bytes = {1, 1, kSectionBytesMax}};
  const EncodedBlock encoded =
      WriteResidualBody(geometry_, SyntheticProfileId(), Quality::kHigh, Block(16), coded);
  ASSERT_EQ(encoded.section_bytes.size(), 2u);
  const auto body = Read(encoded, Quality::kHigh);
  ASSERT_TRUE(body.ok()) << body.status();
  EXPECT_EQ(body->layers_of_section, (std::vector<std::uint16_t>{0, 3}));
  EXPECT_EQ(body->first_position, 16u);
}

TEST_F(ResidualBodyTest, AFirstTokenThatIsNoneIsDamage) {
  const CodedSymbols coded = {.first_from_profile = true,
                              .symbols = std::vector<std::byte>(100),
                              .layer_bytes = {1, 2, 100}};
  const EncodedBlock later =
      WriteResidualBody(geometry_, SyntheticProfileId(), Quality::kHigh, Block(16), coded);
  EXPECT_TRUE(absl::IsDataLoss(Read(later, Quality::kHigh).status()));
  const EncodedBlock first =
      WriteResidualBody(geometry_, SyntheticProfileId(), Quality::kHigh, Block(0), coded);
  EXPECT_TRUE(Read(first, Quality::kHigh).ok());
  profile_.first_token = 17;
  EXPECT_TRUE(absl::IsDataLoss(Read(first, Quality::kHigh).status()));
}

TEST_F(ResidualBodyTest, AQuarterOfABlockMayBeExact) {
  EXPECT_FALSE(KeepsTooMuchExact(geometry_, 4));
  EXPECT_TRUE(KeepsTooMuchExact(geometry_, 5));
  EXPECT_FALSE(KeepsTooMuchExact(KvGeometry(WithBlocks(spec_, 1)), 1));
  EXPECT_TRUE(KeepsTooMuchExact(KvGeometry(WithBlocks(spec_, 7)), 2));
  // 262,144 bytes at most.
  const KvGeometry wide(SyntheticSpec({{64, 8, 128, 128}}, DType::kBfloat16));
  EXPECT_EQ(TokenBytes(wide), 262'144u);
  EXPECT_TRUE(KeepsTooMuchExact(wide, 1));
  const EncodedBlock uncoded = UncodedBlock(5);
  EXPECT_TRUE(uncoded.body.empty());
  EXPECT_EQ(uncoded.exact_tokens, 5u);
}

TEST_F(ResidualBodyTest, FirstRowsMayDifferByRoundings) {
  std::vector<std::vector<float>> rows;
  std::size_t at = 0;
  for (const PlaneShape& plane : profile_.planes) {
    const auto from = profile_.first_rows.begin() + static_cast<std::ptrdiff_t>(at);
    rows.emplace_back(from, from + plane.components());
    at += plane.components();
  }
  const auto are_first = [&] {
    std::vector<const float*> pointers;
    for (const std::vector<float>& row : rows) pointers.push_back(row.data());
    return AreFirstRows(profile_, pointers);
  };
  EXPECT_TRUE(are_first());
  for (auto& row : rows) {
    for (float& x : row) x *= 1.009f;
  }
  EXPECT_TRUE(are_first());
  rows.back().back() += 10;
  EXPECT_FALSE(are_first());
}

}  // namespace
}  // namespace kvtrie
