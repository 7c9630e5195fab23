#include "storage/kv/profile_digest.h"

#include <string>

#include "gtest/gtest.h"
#include "storage/base/byte_reader.h"

namespace kvtrie {
namespace {

// FIPS 180-2: SHA-256 of "abc", its first half.
TEST(ProfileDigestTest, IsTheFirstHalfOfSha256) {
  ProfileDigest digest;
  digest.Add(AsBytes("abc"));
  EXPECT_EQ(digest.Finish().ToHex(), "ba7816bf8f01cfea414140de5dae2223");
}

TEST(ProfileDigestTest, PiecesMakeTheWhole) {
  const std::string text(10'000, 'x');
  ProfileDigest whole;
  whole.Add(AsBytes(text));
  ProfileDigest pieces;
  for (std::size_t at = 0; at < text.size(); at += 97) {
    pieces.Add(AsBytes(std::string_view(text).substr(at, 97)));
  }
  EXPECT_EQ(pieces.Finish(), whole.Finish());
}

}  // namespace
}  // namespace kvtrie
