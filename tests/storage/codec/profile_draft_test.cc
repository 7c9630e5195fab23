#include "storage/codec/profile_draft.h"

#include <string>

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

const CodecKey kKey = *CodecKey::FromBytes("0123456789abcdef");

TEST(ProfileDraftTest, ComesBackAsItWas) {
  const std::string draft = EncodeDraft(kKey, "body");
  const auto decoded = DecodeDraft(draft);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->codec_key, kKey);
  EXPECT_EQ(decoded->body, "body");
}

TEST(ProfileDraftTest, DamageIsNoticed) {
  const std::string draft = EncodeDraft(kKey, "body");
  for (std::size_t i = 0; i < draft.size(); ++i) {
    std::string damaged = draft;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    EXPECT_FALSE(DecodeDraft(damaged).ok()) << i;
    EXPECT_FALSE(DecodeDraft(draft.substr(0, i)).ok()) << i;
  }
}

TEST(ProfileDraftTest, ABodyIsNamedByItsContent) {
  EXPECT_EQ(BodyDigest("a"), BodyDigest("a"));
  EXPECT_NE(BodyDigest("a"), BodyDigest("b"));
}

}  // namespace
}  // namespace kvtrie
