#include "storage/meta/node_row.h"

#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/kv/path.h"
#include "storage/kv/sealed_bytes.h"
#include "tests/golden/golden_file.h"

namespace kvtrie {
namespace {

template <typename Id>
Id CountingId(std::uint8_t first) {
  Id id;
  std::iota(id.bytes.begin(), id.bytes.end(), first);
  return id;
}

NodeRow FirstRow() {
  NodeRow row;
  row.model = CountingId<ModelId>(0x10);
  row.depth = 1;
  row.path_hash = 0x0123456789ABCDEF;
  row.surprisal_bits = 12.5f;
  row.created_unix_seconds = 1'700'000'000;
  row.salt = "salt";
  row.tokens.resize(16);
  std::iota(row.tokens.begin(), row.tokens.end(), 0u);
  return row;
}

NodeRow DeepRow() {
  NodeRow row;
  row.model = CountingId<ModelId>(0x10);
  row.parent = CountingId<TrieNodeId>(0x30);
  row.depth = 7;
  row.provenance = Provenance::kOnLossy;
  row.path_hash = 1;
  row.created_unix_seconds = 1'700'000'001;
  row.expires_unix_seconds = 1'800'000'000;
  row.priority = kPriorityMax;
  row.extra_key = "image digest";
  row.tokens = {0, 1, 0xFFFFFFFF};
  row.rungs = {{Rung::kCoded, Quality::kNearExact, CodecId::kResidual, {}, 9, 64, 7},
               {Rung::kExact, Quality::kExact, CodecId::kRaw, {}, 0xFFFFFFFF, 0, 1}};
  return row;
}

// On both rungs, as version 1 could not say it.
NodeRow CodedRow() {
  NodeRow row;
  row.model = CountingId<ModelId>(0x10);
  row.parent = CountingId<TrieNodeId>(0x30);
  row.depth = 2;
  row.path_hash = 0xFEDCBA9876543210;
  row.surprisal_bits = 0.5f;
  row.created_unix_seconds = 1'700'000'002;
  row.priority = 3;
  row.tokens = {7, 8, 9};
  row.rungs = {
      {Rung::kCoded, Quality::kSmall, CodecId::kResidual, CountingId<ProfileId>(0x70), 3, 2, 1},
      {Rung::kExact, Quality::kExact, CodecId::kLossless, {}, 6, 5, 4}};
  return row;
}

// Coded against others.
NodeRow ReferencedRow() {
  NodeRow row = CodedRow();
  row.rungs.front().codec = CodecId::kReferenced;
  row.rungs.front().references = {{CountingId<TrieNodeId>(0x90), Rung::kCoded},
                                  {CountingId<TrieNodeId>(0xB0), Rung::kExact}};
  return row;
}

NodeDescriptor Descriptor() {
  NodeDescriptor descriptor;
  descriptor.tenant = kBuiltInTenant;
  descriptor.node = CountingId<TrieNodeId>(0x50);
  descriptor.row = FirstRow();
  return descriptor;
}

NodeDescriptor CodedDescriptor() {
  NodeDescriptor descriptor = Descriptor();
  descriptor.rung = Rung::kCoded;
  descriptor.quality = Quality::kHigh;
  descriptor.codec = CodecId::kResidual;
  descriptor.profile = CountingId<ProfileId>(0x70);
  return descriptor;
}

PinRow Pin() { return {CountingId<TrieNodeId>(0x50), 1'900'000'000}; }

StoreConfig Config() {
  StoreConfig config;
  config.path_hash_seed = 0xFEDCBA9876543210;
  config.namespace_secret.resize(TrieNodeNamer::kSecretBytes);
  std::iota(config.namespace_secret.begin(), config.namespace_secret.end(), '\0');
  return config;
}

// What holds for every stored row, with the file of tests/golden that has its bytes.
template <typename Row>
void ExpectStoredWell(const Row& row, const std::string& golden) {
  SCOPED_TRACE(golden);
  const std::string bytes = row.Encode();
  EXPECT_EQ(bytes, ReadGolden(golden));
  const auto decoded = Row::Decode(bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(*decoded, row);

  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (const int mask : {0x01, 0x80, 0xff}) {
      std::string damaged = bytes;
      damaged[i] = static_cast<char>(damaged[i] ^ mask);
      EXPECT_TRUE(absl::IsDataLoss(Row::Decode(damaged).status())) << i;
    }
    EXPECT_TRUE(absl::IsDataLoss(Row::Decode(bytes.substr(0, i)).status())) << i;
  }
  EXPECT_TRUE(absl::IsDataLoss(Row::Decode(bytes + '\0').status()));

  // Intact, but longer or shorter than such a row.
  const std::string fields = bytes.substr(1, bytes.size() - 5);
  const auto reseal = [&bytes](const std::string& changed) {
    ByteWriter writer = StartSealed(static_cast<std::uint8_t>(bytes[0]));
    writer.WriteText(changed);
    return Seal(std::move(writer));
  };
  ASSERT_EQ(reseal(fields), bytes);
  EXPECT_TRUE(absl::IsDataLoss(Row::Decode(reseal(fields + '\0')).status()));
  EXPECT_TRUE(absl::IsDataLoss(Row::Decode(reseal(fields.substr(0, fields.size() - 1))).status()));

  std::string newer = bytes.substr(0, bytes.size() - 4);
  newer[0] = std::is_same_v<Row, NodeRow> ? 4 : 3;
  ByteWriter newer_writer;
  newer_writer.WriteText(newer);
  EXPECT_TRUE(absl::IsUnimplemented(Row::Decode(Seal(std::move(newer_writer))).status()));
}

TEST(NodeRowTest, IsStoredWell) {
  ExpectStoredWell(FirstRow(), "v1/node_row_first.bin");
  ExpectStoredWell(DeepRow(), "v2/node_row_deep.bin");
  ExpectStoredWell(CodedRow(), "v2/node_row_coded.bin");
  ExpectStoredWell(ReferencedRow(), "v3/node_row_referenced.bin");
}
TEST(NodeRowTest, PlacesOfVersion1AreReadAsUnits) {
  const auto row = NodeRow::Decode(ReadGolden("v1/node_row_deep.bin"));
  ASSERT_TRUE(row.ok()) << row.status();
  EXPECT_EQ(*row, DeepRow());
}
TEST(NodeDescriptorTest, IsStoredWell) {
  ExpectStoredWell(Descriptor(), "v1/node_descriptor.bin");
  ExpectStoredWell(CodedDescriptor(), "v2/node_descriptor_coded.bin");
}
TEST(PinRowTest, IsStoredWell) { ExpectStoredWell(Pin(), "v1/pin_row.bin"); }
TEST(StoreConfigTest, IsStoredWell) { ExpectStoredWell(Config(), "v1/store_config.bin"); }

TEST(NodeRowTest, RefusesTheCorruptFiles) {
  for (const auto& [name, bytes] : ReadCorrupt("node_row_")) {
    EXPECT_TRUE(absl::IsDataLoss(NodeRow::Decode(bytes).status())) << name;
  }
}
TEST(NodeDescriptorTest, RefusesTheCorruptFiles) {
  for (const auto& [name, bytes] : ReadCorrupt("node_descriptor_")) {
    EXPECT_TRUE(absl::IsDataLoss(NodeDescriptor::Decode(bytes).status())) << name;
  }
}
TEST(PinRowTest, RefusesTheCorruptFiles) {
  for (const auto& [name, bytes] : ReadCorrupt("pin_row_")) {
    EXPECT_TRUE(absl::IsDataLoss(PinRow::Decode(bytes).status())) << name;
  }
}
TEST(StoreConfigTest, RefusesTheCorruptFiles) {
  for (const auto& [name, bytes] : ReadCorrupt("store_config_")) {
    EXPECT_TRUE(absl::IsDataLoss(StoreConfig::Decode(bytes).status())) << name;
  }
}

TEST(NodeRowTest, LargestRowIsAllowed) {
  NodeRow row = FirstRow();
  row.salt.assign(256, 's');
  row.extra_key.assign(1024, 'e');
  row.tokens.assign(1024, 0xFFFFFFFF);
  ASSERT_TRUE(row.Validate().ok()) << row.Validate();
  EXPECT_EQ(NodeRow::Decode(row.Encode()).value(), row);
  // Payload records have room for so much (PayloadRecord::kDescriptorBytesMax).
  NodeDescriptor descriptor = Descriptor();
  descriptor.row = row;
  EXPECT_LE(descriptor.Encode().size(), std::size_t{16} << 10);
}

TEST(NodeRowTest, NamesTheFirstFieldThatIsOutOfRange) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  using Change = std::function<void(NodeRow&)>;
  const std::pair<const char*, Change> cases[] = {
      {"model", [](NodeRow& r) { r.model = {}; }},
      {"depth", [](NodeRow& r) { r.depth = 0; }},
      {"depth", [](NodeRow& r) { r.depth = kPathTokensMax + 1; }},
      {"parent", [](NodeRow& r) { r.parent = {}; }},
      {"parent", [](NodeRow& r) { r.depth = 1; }},
      {"provenance", [](NodeRow& r) { r.provenance = Provenance{0}; }},
      {"provenance", [](NodeRow& r) { r.provenance = Provenance{3}; }},
      {"surprisal_bits", [](NodeRow& r) { r.surprisal_bits = -1; }},
      {"surprisal_bits", [](NodeRow& r) { r.surprisal_bits = -0.0f; }},
      {"surprisal_bits", [](NodeRow& r) { r.surprisal_bits = std::nanf(""); }},
      {"surprisal_bits", [kInfinity](NodeRow& r) { r.surprisal_bits = kInfinity; }},
      {"created_unix_seconds", [](NodeRow& r) { r.created_unix_seconds = -1; }},
      {"expires_unix_seconds", [](NodeRow& r) { r.expires_unix_seconds = -1; }},
      {"priority", [](NodeRow& r) { r.priority = kPriorityMax + 1; }},
      {"salt", [](NodeRow& r) { r.salt = "below the root"; }},
      {"extra_key", [](NodeRow& r) { r.extra_key.assign(1025, 'e'); }},
      {"tokens", [](NodeRow& r) { r.tokens.clear(); }},
      {"tokens", [](NodeRow& r) { r.tokens.resize(1025); }},
      {"rung", [](NodeRow& r) { r.rungs[0].rung = Rung{0}; }},
      {"rung", [](NodeRow& r) { r.rungs[0].rung = Rung::kTokens; }},
      {"quality", [](NodeRow& r) { r.rungs[0].quality = Quality{0}; }},
      {"quality", [](NodeRow& r) { r.rungs[0].quality = Quality{6}; }},
      {"codec", [](NodeRow& r) { r.rungs[0].codec = CodecId{0}; }},
      {"codec", [](NodeRow& r) { r.rungs[0].codec = CodecId{6}; }},
      {"count of references", [](NodeRow& r) { r.rungs[0].codec = CodecId::kReferenced; }},
      {"references", [](NodeRow& r) { r.rungs[0].references = {{CountingId<TrieNodeId>(1)}}; }},
      {"codec", [](NodeRow& r) { r.rungs[0].codec = CodecId::kLossless; }},
      {"codec", [](NodeRow& r) { r.rungs[1].codec = CodecId::kRotated; }},
      {"profile", [](NodeRow& r) { r.rungs[1].profile = CountingId<ProfileId>(1); }},
      {"order of rungs", [](NodeRow& r) { std::swap(r.rungs[0], r.rungs[1]); }},
      {"order of rungs", [](NodeRow& r) { r.rungs[0] = r.rungs[1]; }},
      {"segment", [](NodeRow& r) { r.rungs[0].segment = 0; }},
      {"record_bytes", [](NodeRow& r) { r.rungs[0].record_bytes = 0; }},
  };
  for (const auto& [field, change] : cases) {
    NodeRow row = DeepRow();
    change(row);
    const absl::Status status = row.Validate();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << field;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(field));
  }
  NodeRow row = FirstRow();
  row.salt.assign(257, 's');
  EXPECT_TRUE(absl::IsInvalidArgument(row.Validate()));
}

TEST(NodeRowTest, NamesWhatIsWrongWithReferences) {
  using Change = std::function<void(std::vector<RungReference>&)>;
  const std::pair<const char*, Change> cases[] = {
      {"count of references", [](auto& references) { references.clear(); }},
      {"count of references",
       [](auto& references) {
         references.clear();
         for (std::uint8_t i = 0; i <= kRungReferencesMax; ++i) {
           references.push_back({CountingId<TrieNodeId>(i), Rung::kCoded});
         }
       }},
      {"node of reference", [](auto& references) { references[0].node = {}; }},
      {"rung of reference", [](auto& references) { references[0].rung = Rung{0}; }},
      {"rung of reference", [](auto& references) { references[1].rung = Rung::kTokens; }},
      {"one twice", [](auto& references) { references[1].node = references[0].node; }},
  };
  for (const auto& [field, change] : cases) {
    NodeRow row = ReferencedRow();
    change(row.rungs[0].references);
    const absl::Status status = row.Validate();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << field;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(field));
  }
}

// What an engine computed bit for bit on a lossy prefix is no more than that prefix was.
TEST(NodeRowTest, RungAndQualityGoTogetherOnExactPathsOnly) {
  NodeRow row = CodedRow();
  row.rungs[1].quality = Quality::kHigh;
  EXPECT_TRUE(absl::IsInvalidArgument(row.Validate()));
  row.provenance = Provenance::kOnLossy;
  EXPECT_TRUE(row.Validate().ok()) << row.Validate();
  row = CodedRow();
  row.rungs[0].quality = Quality::kExact;
  EXPECT_TRUE(absl::IsInvalidArgument(row.Validate()));
}

TEST(NodeRowTest, SetRungKeepsTheOrderAndReplacesItsKind) {
  const NodeRow coded = CodedRow();
  NodeRow row = coded;
  row.rungs.clear();
  EXPECT_EQ(row.FindRung(Rung::kExact), nullptr);
  row.SetRung(coded.rungs[1]);
  row.SetRung(coded.rungs[0]);
  EXPECT_EQ(row, coded);
  RungRow other = coded.rungs[0];
  other.segment = 77;
  row.SetRung(other);
  ASSERT_EQ(row.rungs.size(), 2u);
  EXPECT_EQ(*row.FindRung(Rung::kCoded), other);
  EXPECT_EQ(*row.FindRung(Rung::kExact), coded.rungs[1]);
}

TEST(NodeRowDeathTest, InvalidRowIsNotWritten) {
  NodeRow row = FirstRow();
  row.surprisal_bits = std::nanf("");
  EXPECT_DEATH(row.Encode(), "Validate");
}

TEST(StoreConfigTest, AnotherVersionIsNotDamage) {
  std::string bytes = Config().Encode();
  bytes.resize(bytes.size() - 4);
  bytes[1] = 2;
  ByteWriter writer;
  writer.WriteText(bytes);
  EXPECT_TRUE(absl::IsFailedPrecondition(StoreConfig::Decode(Seal(std::move(writer))).status()));
}

}  // namespace
}  // namespace kvtrie
