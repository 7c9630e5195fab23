#include "storage/engine/hold_table.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvtrie {
namespace {

constexpr TenantId kTenant{1};
constexpr TenantId kOther{2};
using std::chrono::seconds;

template <typename Id>
Id IdOf(std::uint8_t number) {
  Id id;
  id.bytes.fill(number);
  return id;
}

class HoldTableTest : public testing::Test {
 protected:
  HoldTableTest() { slot_ = *index_.AddModel(kTenant, IdOf<ModelId>(1), 1); }

  HoldTable::Hold AddNode(std::uint8_t number) {
    const std::vector<TokenId> tokens = {number};
    const TrieNodeId id = IdOf<TrieNodeId>(number);
    return {index_.Insert({.id = id, .model = slot_, .path_hash = number, .tokens = tokens}), id};
  }
  void EraseNode(const HoldTable::Hold& node) {
    holds_.Forget(node.ref);
    index_.Erase(node.ref);
  }
  void AddLease(std::uint8_t number, std::vector<HoldTable::Hold> nodes, seconds end) {
    holds_.AddLease(IdOf<LeaseId>(number), {kTenant, std::move(nodes), end});
  }
  void AddPin(std::uint8_t number, const HoldTable::Hold& node, std::uint64_t bytes,
              std::int64_t end) {
    holds_.AddPin(IdOf<PinId>(number), {kTenant, node, 1, bytes, end});
  }

  TrieIndex index_{std::size_t{1} << 20};
  ModelSlot slot_ = 0;
  HoldTable holds_;
};

TEST_F(HoldTableTest, ANodeIsHeldUntilTheLastHoldIsReleased) {
  auto first = AddNode(1);
  auto second = first;
  holds_.Take(first);
  holds_.Take(second);
  holds_.Release(first);
  EXPECT_TRUE(holds_.IsHeld(first.ref));
  holds_.Release(second);
  EXPECT_FALSE(holds_.IsHeld(first.ref));
}

TEST_F(HoldTableTest, LeasesEndInTimeAndOnlyOnce) {
  const auto node = AddNode(1);
  AddLease(1, {node}, seconds(10));
  AddLease(2, {node}, seconds(20));
  EXPECT_TRUE(holds_.IsLeased(node.ref));
  EXPECT_EQ(holds_.DropEndedLeases(seconds(9)), 0u);
  EXPECT_EQ(holds_.DropEndedLeases(seconds(10)), 1u);
  EXPECT_TRUE(holds_.IsHeld(node.ref));
  EXPECT_FALSE(holds_.DropLease(kTenant, IdOf<LeaseId>(1)));
  EXPECT_TRUE(holds_.IsHeld(node.ref));
  EXPECT_TRUE(holds_.DropLease(kTenant, IdOf<LeaseId>(2)));
  EXPECT_FALSE(holds_.IsHeld(node.ref));
  EXPECT_FALSE(holds_.IsLeased(node.ref));
  EXPECT_EQ(holds_.lease_count(), 0u);
}

TEST_F(HoldTableTest, NobodyEndsTheLeaseOfAnotherTenant) {
  const auto node = AddNode(1);
  AddLease(1, {node}, seconds(10));
  EXPECT_FALSE(holds_.DropLease(kOther, IdOf<LeaseId>(1)));
  EXPECT_TRUE(holds_.IsHeld(node.ref));
}

TEST_F(HoldTableTest, PinnedBytesReturnToZero) {
  const auto node = AddNode(1);
  AddPin(1, node, 100, 50);
  AddPin(2, node, 100, 60);
  EXPECT_EQ(holds_.pinned_bytes(), 200u);
  EXPECT_EQ(holds_.FindPin(kOther, IdOf<PinId>(1)), nullptr);
  ASSERT_NE(holds_.FindPin(kTenant, IdOf<PinId>(1)), nullptr);
  EXPECT_THAT(holds_.EndedPins(49), testing::IsEmpty());
  EXPECT_THAT(holds_.EndedPins(50), testing::ElementsAre(IdOf<PinId>(1)));
  holds_.DropPin(IdOf<PinId>(1));
  holds_.DropPin(IdOf<PinId>(1));  // twice does no harm
  EXPECT_TRUE(holds_.IsHeld(node.ref));
  EXPECT_EQ(holds_.pinned_bytes(), 100u);
  holds_.SetPinEnd(IdOf<PinId>(2), 70);
  EXPECT_THAT(holds_.EndedPins(60), testing::IsEmpty());
  holds_.DropPin(IdOf<PinId>(2));
  EXPECT_FALSE(holds_.IsHeld(node.ref));
  EXPECT_EQ(holds_.pinned_bytes(), 0u);
}

TEST_F(HoldTableTest, AHoldOnAGoneNodeDoesNotTouchItsSuccessor) {
  const auto gone = AddNode(1);
  AddLease(1, {gone}, seconds(10));
  EraseNode(gone);
  const auto successor = AddNode(2);
  ASSERT_EQ(successor.ref, gone.ref);  // takes the same place
  EXPECT_FALSE(holds_.IsHeld(successor.ref));
  AddLease(2, {successor}, seconds(30));
  holds_.DropEndedLeases(seconds(10));
  EXPECT_TRUE(holds_.IsHeld(successor.ref));
}

// Deleted and put again: place and id are the same, the node is another one.
TEST_F(HoldTableTest, AHoldFromBeforeADeleteDoesNotReleaseOneFromAfterIt) {
  const auto before = AddNode(1);
  AddLease(1, {before}, seconds(10));
  AddPin(1, before, 100, 50);
  EraseNode(before);
  const auto after = AddNode(1);
  ASSERT_EQ(after.ref, before.ref);
  AddLease(2, {after}, seconds(30));
  holds_.DropEndedLeases(seconds(10));
  holds_.DropPin(IdOf<PinId>(1));
  EXPECT_TRUE(holds_.IsHeld(after.ref));
  holds_.DropEndedLeases(seconds(30));
  EXPECT_FALSE(holds_.IsHeld(after.ref));
}

TEST_F(HoldTableTest, PinsAndLeasesAreOfTheNodeThatTheyName) {
  const auto gone = AddNode(1);
  AddLease(1, {gone}, seconds(10));
  AddPin(1, gone, 100, 50);
  EraseNode(gone);
  const auto successor = AddNode(2);
  EXPECT_FALSE(holds_.IsPinned(successor.ref));
  EXPECT_FALSE(holds_.IsLeased(successor.ref));
}

}  // namespace
}  // namespace kvtrie
