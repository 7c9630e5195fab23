#include "storage/kv/sealed_bytes.h"

#include <string>

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

std::string Sealed(std::uint8_t version) {
  ByteWriter writer = StartSealed(version);
  writer.Write(std::uint32_t{7});
  return Seal(std::move(writer));
}

TEST(SealedBytesTest, GivesBackTheFields) {
  const std::string sealed = Sealed(3);
  auto reader = Unseal("row", 3, sealed);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(reader->Read<std::uint32_t>(), 7u);
  EXPECT_TRUE(reader->Done());
}

TEST(SealedBytesTest, RefusesEveryBitFlip) {
  const std::string sealed = Sealed(1);
  for (std::size_t bit = 0; bit < sealed.size() * 8; ++bit) {
    std::string flipped = sealed;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    EXPECT_TRUE(absl::IsDataLoss(Unseal("row", 1, flipped).status())) << bit;
  }
}

TEST(SealedBytesTest, RefusesEveryOtherLength) {
  const std::string sealed = Sealed(1);
  for (std::size_t length = 0; length < sealed.size(); ++length) {
    EXPECT_TRUE(absl::IsDataLoss(Unseal("row", 1, sealed.substr(0, length)).status())) << length;
  }
  EXPECT_TRUE(absl::IsDataLoss(Unseal("row", 1, sealed + '\0').status()));
}

TEST(SealedBytesTest, ZerosAreDamage) {
  for (std::size_t length = 0; length < 64; ++length) {
    EXPECT_TRUE(absl::IsDataLoss(Unseal("row", 1, std::string(length, '\0')).status())) << length;
  }
}

TEST(SealedBytesTest, OlderVersionsAreReadWhereTheyAreKnown) {
  for (std::uint8_t version = 1; version <= 3; ++version) {
    const std::string sealed = Sealed(version);
    auto unsealed = UnsealUpTo("row", 3, sealed);
    ASSERT_TRUE(unsealed.ok()) << unsealed.status();
    EXPECT_EQ(unsealed->version, version);
    EXPECT_EQ(unsealed->reader.Read<std::uint32_t>(), 7u);
  }
  EXPECT_TRUE(absl::IsUnimplemented(UnsealUpTo("row", 3, Sealed(4)).status()));
  EXPECT_TRUE(absl::IsDataLoss(UnsealUpTo("row", 3, Sealed(0)).status()));
}

TEST(SealedBytesTest, NewerVersionIsNotDamage) {
  EXPECT_TRUE(absl::IsUnimplemented(Unseal("row", 1, Sealed(2)).status()));
  EXPECT_TRUE(absl::IsDataLoss(Unseal("row", 2, Sealed(1)).status()));
  EXPECT_TRUE(absl::IsDataLoss(Unseal("row", 1, Sealed(0)).status()));
}

}  // namespace
}  // namespace kvtrie
