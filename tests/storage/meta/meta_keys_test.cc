#include "storage/meta/meta_keys.h"

#include <numeric>
#include <string>

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

constexpr TenantId kTenant{0x01020304};

template <typename Id>
Id TestId() {
  Id id;
  std::iota(id.bytes.begin(), id.bytes.end(), std::uint8_t{0xf8});
  return id;
}

template <typename Key>
void ExpectDecodesExactlyItself(const Key& key, bool fixed_size) {
  const std::string bytes = key.Encode();
  const auto decoded = Key::Decode(bytes);
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(decoded->Encode(), bytes);
  if (fixed_size) {
    for (std::size_t length = 0; length < bytes.size(); ++length) {
      EXPECT_FALSE(Key::Decode(bytes.substr(0, length)).has_value()) << length;
    }
    EXPECT_FALSE(Key::Decode(bytes + '\0').has_value());
  }
}

TEST(MetaKeysTest, KeysAreTheTenantAndTheId) {
  const std::string tenant("\x01\x02\x03\x04", 4);
  const std::string id("\xf8\xf9\xfa\xfb\xfc\xfd\xfe\xff\x00\x01\x02\x03\x04\x05\x06\x07", 16);
  EXPECT_EQ((ModelRowKey{kTenant, TestId<ModelId>()}.Encode()), tenant + id);
  EXPECT_EQ((NodeRowKey{kTenant, TestId<TrieNodeId>()}.Encode()), tenant + id);
  EXPECT_EQ((PinRowKey{kTenant, TestId<PinId>()}.Encode()), tenant + id);
  EXPECT_EQ((SessionRowKey{kTenant, "chat-7"}.Encode()), tenant + "chat-7");
  EXPECT_EQ(StoreRowKey("config"), std::string(4, '\0') + "config");
  EXPECT_EQ(TenantPrefix(kTenant), tenant);
}

TEST(MetaKeysTest, DecodesExactlyWhatItEncodes) {
  ExpectDecodesExactlyItself(ModelRowKey{kTenant, TestId<ModelId>()}, true);
  ExpectDecodesExactlyItself(NodeRowKey{kTenant, TestId<TrieNodeId>()}, true);
  ExpectDecodesExactlyItself(PinRowKey{kTenant, TestId<PinId>()}, true);
  ExpectDecodesExactlyItself(SessionRowKey{kTenant, "s"}, false);
  ExpectDecodesExactlyItself(SessionRowKey{kTenant, std::string(64, '\0')}, false);
  const auto node = NodeRowKey::Decode(NodeRowKey{kTenant, TestId<TrieNodeId>()}.Encode());
  EXPECT_EQ(node->tenant, kTenant);
  EXPECT_EQ(node->node, TestId<TrieNodeId>());
}

TEST(MetaKeysTest, OrderOfBytesIsOrderOfTenants) {
  EXPECT_LT(TenantPrefix(TenantId{1}), TenantPrefix(TenantId{2}));
  EXPECT_LT(TenantPrefix(TenantId{255}), TenantPrefix(TenantId{256}));
  EXPECT_LT(TenantPrefix(TenantId{0x7FFFFFFF}), TenantPrefix(TenantId{0x80000000}));
}

TEST(MetaKeysTest, RefusesWhatNoRowHas) {
  // The tenant of the store itself.
  EXPECT_FALSE(NodeRowKey::Decode(NodeRowKey{TenantId{0}, TestId<TrieNodeId>()}.Encode()));
  // The root of a model.
  EXPECT_FALSE(NodeRowKey::Decode(NodeRowKey{kTenant, TrieNodeId{}}.Encode()));
  EXPECT_FALSE(SessionRowKey::Decode(SessionRowKey{kTenant, ""}.Encode()));
  EXPECT_FALSE(SessionRowKey::Decode(SessionRowKey{kTenant, std::string(65, 's')}.Encode()));
  EXPECT_FALSE(SessionRowKey::Decode("abc"));
}

}  // namespace
}  // namespace kvtrie
