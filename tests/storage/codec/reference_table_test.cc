#include "storage/codec/reference_table.h"

#include <functional>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

constexpr std::size_t kBlockTokens = 20;

FrameReference Reference(std::uint8_t name) {
  FrameReference reference;
  reference.node.bytes.fill(name);
  reference.digest.bytes.fill(static_cast<std::uint8_t>(name + 1));
  reference.first_position = 40u + name;
  return reference;
}

ReferenceTable Table() {
  return {.references = {Reference(1), Reference(2)},
          .runs = {{.first_token = 0, .token_count = 5, .reference = 1, .offset = 15},
                   {.first_token = 5, .token_count = 12, .reference = 0, .offset = 0}}};
}

std::string Written(const ReferenceTable& table) {
  ByteWriter writer;
  table.Write(writer);
  return writer.Take();
}

absl::StatusOr<ReferenceTable> Read(std::string_view bytes) {
  ByteReader reader(bytes);
  return ReferenceTable::Read(reader, kBlockTokens);
}

TEST(ReferenceTableTest, ComesBack) {
  const std::string bytes = Written(Table());
  EXPECT_EQ(bytes.size(), 4u + 2 * 36 + 2 * 8);
  const std::string more = bytes + "more";
  ByteReader reader(more);
  const auto table = ReferenceTable::Read(reader, kBlockTokens);
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_EQ(table->references, Table().references);
  EXPECT_EQ(table->runs, Table().runs);
  EXPECT_EQ(reader.remaining_bytes(), 4u);
}

TEST(ReferenceTableTest, WhatIsCutOffIsDamaged) {
  const std::string bytes = Written(Table());
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_TRUE(absl::IsDataLoss(Read(bytes.substr(0, size)).status())) << size;
  }
}

TEST(ReferenceTableTest, WhatIsWrongIsNamed) {
  const struct {
    const char* what;
    std::function<void(ReferenceTable&)> change;
  } kCases[] = {
      {"0 blocks", [](ReferenceTable& t) { t = {}; }},
      {"17 blocks",
       [](ReferenceTable& t) {
         t.references.clear();
         t.runs.clear();
         for (std::uint16_t i = 0; i < 17; ++i) {
           t.references.push_back(Reference(static_cast<std::uint8_t>(i + 1)));
           t.runs.push_back({.first_token = i, .token_count = 1, .reference = i, .offset = 0});
         }
       }},
      {"run 1 names no block", [](ReferenceTable& t) { t.runs[1].reference = 2; }},
      {"run 0 has no token", [](ReferenceTable& t) { t.runs[0].token_count = 0; }},
      {"run 1 begins before", [](ReferenceTable& t) { t.runs[1].first_token = 4; }},
      {"run 1 leaves the block", [](ReferenceTable& t) { t.runs[1].token_count = 16; }},
      {"run 1 leaves the block", [](ReferenceTable& t) { t.runs[1].first_token = 65535; }},
      {"run 0 leaves the block of its reference", [](ReferenceTable& t) { t.runs[0].offset = 16; }},
      {"run 0 leaves the block of its reference",
       [](ReferenceTable& t) { t.runs[0].offset = 65535; }},
      {"block 0 is not used", [](ReferenceTable& t) { t.runs[1].reference = 1; }},
      {"block 1 is block 0 again",
       [](ReferenceTable& t) { t.references[1].node = t.references[0].node; }},
  };
  EXPECT_TRUE(Table().Check(kBlockTokens).ok());
  for (const auto& wrong : kCases) {
    SCOPED_TRACE(wrong.what);
    ReferenceTable table = Table();
    wrong.change(table);
    const absl::Status status = table.Check(kBlockTokens);
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_NE(std::string(status.message()).find(wrong.what), std::string::npos) << status;
    EXPECT_TRUE(absl::IsDataLoss(Read(Written(table)).status()));
  }
}

// The counts alone say that it cannot be there.
TEST(ReferenceTableTest, CountsBeyondTheBytesAreRefused) {
  const std::string bytes = Written(Table());
  for (std::size_t at = 0; at < 4; ++at) {
    std::string damaged = bytes;
    damaged[at] = static_cast<char>(0xFF);
    EXPECT_TRUE(absl::IsDataLoss(Read(damaged).status())) << at;
  }
}

TEST(ReferenceTableTest, DigestsTellBytesApart) {
  std::vector<std::byte> raw(100);
  const KvDigest digest = DigestOfKv(raw);
  EXPECT_EQ(DigestOfKv(raw), digest);
  raw[99] = std::byte{1};
  EXPECT_NE(DigestOfKv(raw), digest);
  // First half of SHA-256 of nothing.
  EXPECT_EQ(DigestOfKv({}).ToHex(), "e3b0c44298fc1c149afbf4c8996fb924");
}

}  // namespace
}  // namespace kvtrie
