#include "storage/engine/reference_digests.h"

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

KvDigest Digest(std::uint8_t number) {
  KvDigest digest;
  digest.bytes.fill(number);
  return digest;
}

TEST(ReferenceDigestsTest, AreOfThePlaceUntilItIsAnothers) {
  ReferenceDigests digests;
  const PayloadLocation here{1, 8, 500};
  const PayloadLocation longer{1, 8, 600};
  EXPECT_FALSE(digests.Find(here));
  digests.Add(here, Digest(1));
  EXPECT_EQ(digests.Find(here), Digest(1));
  EXPECT_FALSE(digests.Find(longer));
  digests.Forget(here);
  EXPECT_FALSE(digests.Find(here));
  digests.Add(here, Digest(2));
  EXPECT_EQ(digests.Find(here), Digest(2));
}

TEST(ReferenceDigestsTest, ManyDoNotTakeMoreAndMoreMemory) {
  ReferenceDigests digests;
  constexpr std::uint32_t kMany = 200'000;
  for (std::uint32_t i = 1; i <= kMany; ++i) digests.Add({i, 0, 1}, Digest(3));
  EXPECT_EQ(digests.Find({kMany, 0, 1}), Digest(3));
  std::uint32_t kept = 0;
  for (std::uint32_t i = 1; i <= kMany; ++i) kept += digests.Find({i, 0, 1}) ? 1 : 0;
  EXPECT_LT(kept, kMany / 2);
}

}  // namespace
}  // namespace kvtrie
