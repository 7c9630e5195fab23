#include "storage/engine/retention_policy.h"

#include <algorithm>
#include <set>

#include "gtest/gtest.h"
#include "tests/storage/engine/index_fixture.h"

namespace kvtrie {
namespace {

class RetentionPolicyTest : public IndexFixture {
 protected:
  RetentionPolicyTest() { policy_.SetModel(slot_, TestModelSpec()); }

  // A path of new blocks under `parent`; its nodes, first block first.
  std::vector<NodeRef> Put(NodeRef parent, std::size_t blocks, std::uint32_t priority = 0) {
    std::vector<NodeRef> refs;
    for (std::size_t i = 0; i < blocks; ++i) {
      NewNode node;
      node.id = IdOf(1'000'000 + ++put_);
      node.last_used_seconds = now_;
      node.priority = priority;
      node.traffic =
          policy_.Arrives(node.id, parent, {.new_blocks = blocks, .is_first = i == 0}, now_);
      parent = Insert(parent, node);
      policy_.OnInsert(parent);
      refs.push_back(parent);
    }
    return refs;
  }
  void Use(const std::vector<NodeRef>& path) {
    RetentionPolicy::Uses uses(policy_);
    for (const NodeRef ref : path) {
      uses.Add(ref, now_);
      index_.Touch(ref, now_);
    }
  }
  std::vector<NodeRef> Choose(std::uint64_t nodes) {
    return policy_.ChooseVictims(
        0, nodes, now_,
        [](const IndexNode& node) -> std::uint64_t { return node.frame.record_bytes; },
        [this](NodeRef ref) { return held_.contains(ref); });
  }
  void Evict(const std::vector<NodeRef>& victims) {
    for (const NodeRef ref : victims) {
      const NodeRef parent = index_.parent(ref);
      policy_.BeforeErase(ref, /*evicted=*/true, now_);
      index_.Erase(ref);
      policy_.AfterErase(parent);
    }
  }
  static std::set<NodeRef> SetOf(const std::vector<NodeRef>& refs) {
    return {refs.begin(), refs.end()};
  }

  RetentionPolicy policy_{index_};
  std::uint32_t now_ = 1'000'000;
  std::uint64_t put_ = 0;
  std::set<NodeRef> held_;
};

TEST_F(RetentionPolicyTest, TakesPathsFromTheirEnd) {
  const auto old_path = Put(0, 20);
  now_ += 100;
  const auto fresh_path = Put(0, 20);
  const auto victims = Choose(12);
  ASSERT_EQ(victims.size(), 12u);
  for (std::size_t i = 0; i < 12; ++i) EXPECT_EQ(victims[i], old_path[19 - i]);
}

TEST_F(RetentionPolicyTest, UsedBlocksOutliveUnusedOnesAsOld) {
  const auto trunk = Put(0, 10);
  const auto twig = Put(trunk.back(), 5);
  now_ += 5;
  Use(trunk);
  now_ += 5;
  Use(trunk);
  Put(0, 5);
  now_ += 20;
  const auto victims = SetOf(Choose(10));
  for (const NodeRef ref : trunk) EXPECT_FALSE(victims.contains(ref));
  for (const NodeRef ref : twig) EXPECT_TRUE(victims.contains(ref));
}

TEST_F(RetentionPolicyTest, WhatIsHeldStaysWithAllAboveIt) {
  const auto path = Put(0, 10);
  const auto other = Put(0, 3);
  held_.insert(path[6]);
  const auto victims = SetOf(Choose(100));
  EXPECT_EQ(victims.size(), 6u);  // behind the held one, and the other path
  for (std::size_t i = 0; i <= 6; ++i) EXPECT_FALSE(victims.contains(path[i]));
}

TEST_F(RetentionPolicyTest, TakesUntilBothBytesAndNodesAreEnough) {
  Put(0, 100);
  const auto bytes_of = [](const IndexNode& node) -> std::uint64_t {
    return node.frame.record_bytes;
  };
  const auto is_held = [](NodeRef) { return false; };
  EXPECT_EQ(policy_.ChooseVictims(4096 * 5, 0, now_, bytes_of, is_held).size(), 5u);
  EXPECT_EQ(policy_.ChooseVictims(4096 * 5 + 1, 0, now_, bytes_of, is_held).size(), 6u);
  EXPECT_EQ(policy_.ChooseVictims(4096, 7, now_, bytes_of, is_held).size(), 7u);
  EXPECT_EQ(policy_.ChooseVictims(0, 0, now_, bytes_of, is_held).size(), 0u);
  EXPECT_EQ(policy_.ChooseVictims(1 << 30, 0, now_, bytes_of, is_held).size(), 100u);
}

TEST_F(RetentionPolicyTest, PrioritiesAndCostAndBytesWeigh) {
  const auto low = Put(0, 2, 0);
  const auto high = Put(0, 2, 2);
  const IndexNode& node = index_.node(low[1]);
  EXPECT_DOUBLE_EQ(policy_.Value(index_.node(high[1]), 4096, now_),
                   16 * policy_.Value(node, 4096, now_));
  EXPECT_DOUBLE_EQ(policy_.Value(node, 4096, now_), 2 * policy_.Value(node, 8192, now_));
  const auto deep = Put(low[1], 2000);
  EXPECT_GT(policy_.Value(index_.node(deep.back()), 4096, now_),
            2 * policy_.Value(node, 4096, now_));
}

// Two models with the same spec, one of which clients need nine times as long for.
TEST_F(RetentionPolicyTest, WhatClientsMeasureWeighsBetweenModels) {
  const ModelSlot fast = slot_;
  ModelId other_id;
  other_id.bytes[0] = 1;
  const ModelSlot slow = *index_.AddModel(kBuiltInTenant, other_id, kTestBlockTokens);
  policy_.SetModel(slow, TestModelSpec());
  const NodeRef fast_node = Put(0, 1).front();
  slot_ = slow;
  const NodeRef slow_node = Put(0, 1).front();
  const auto ratio = [&] {
    return policy_.Value(index_.node(slow_node), 4096, now_) /
           policy_.Value(index_.node(fast_node), 4096, now_);
  };
  EXPECT_DOUBLE_EQ(ratio(), 1);
  policy_.ComputeMeasured(slow, 1, 8, 9e-3);
  EXPECT_DOUBLE_EQ(ratio(), 1);  // the other one is taken for as dear as the measured ones
  policy_.ComputeMeasured(fast, 1, 8, 1e-3);
  EXPECT_NEAR(ratio(), 9, 1e-9);
  // Seconds of deep blocks say as much as those of others.
  const RecomputeCost cost(TestModelSpec());
  const double deep_per_shallow =
      (cost.BlockFlops(5000) + cost.BlockFlops(6000)) / (cost.BlockFlops(1) + cost.BlockFlops(8));
  ASSERT_GT(deep_per_shallow, 2);
  for (int i = 0; i < 3; ++i) {
    policy_.ComputeMeasured(fast, 5000, 6000, 1e-3 * deep_per_shallow);
  }
  EXPECT_NEAR(ratio(), 9, 1e-9);
}

TEST_F(RetentionPolicyTest, WhatComesBackIsNoStranger) {
  const auto path = Put(0, 4);
  now_ += 50;
  Use(path);
  const NodeTraffic traffic = index_.node(path.back()).traffic();
  const TrieNodeId id = index_.node(path.back()).id;
  // Enough that it finds a place among the remembered.
  for (int i = 0; i < 100; ++i) Put(0, 1);
  Evict({path.back()});
  now_ += 100;
  const NodeTraffic back = policy_.Arrives(id, path[2], {.new_blocks = 1, .is_first = true}, now_);
  EXPECT_EQ(back.uses(), traffic.uses() + 1);
  EXPECT_EQ(back.origin(), traffic.origin());
  // Once: it is in the trie now.
  EXPECT_EQ(policy_.Arrives(id, path[2], {.new_blocks = 1, .is_first = true}, now_).uses(), 0u);
}

TEST_F(RetentionPolicyTest, WhatWasDeletedIsNotRemembered) {
  const auto path = Put(0, 2);
  const TrieNodeId id = index_.node(path[1]).id;
  for (int i = 0; i < 100; ++i) Put(0, 1);
  policy_.BeforeErase(path[1], /*evicted=*/false, now_);
  index_.Erase(path[1]);
  EXPECT_EQ(policy_.Arrives(id, path[0], {.new_blocks = 1, .is_first = true}, now_).uses(), 0u);
  EXPECT_EQ(policy_.ghosts().size(), 0u);
}

TEST_F(RetentionPolicyTest, TheWayInWhichABlockCameIsKept) {
  const auto root = Put(0, 8);
  EXPECT_EQ(index_.node(root[7]).traffic().origin(), NodeOrigin::kRoot);
  EXPECT_EQ(index_.node(root[7]).traffic().trait(), 1u);  // 5 to 16 blocks
  Use(root);
  const auto more = Put(root.back(), 2);
  EXPECT_EQ(index_.node(more[0]).traffic().origin(), NodeOrigin::kContinuation);
  EXPECT_EQ(index_.node(more[1]).traffic(), index_.node(more[0]).traffic());
  const auto fork = Put(root.back(), 2);
  EXPECT_EQ(index_.node(fork[1]).traffic().origin(), NodeOrigin::kFork);
}

TEST_F(RetentionPolicyTest, ForksAreJudgedByWhatBecameOfTheirSiblings) {
  const auto instruction = Put(0, 4);
  const auto system_prompt = Put(0, 4);
  for (int i = 0; i < 30; ++i) {
    Put(instruction.back(), 3);  // nobody asks again
    const auto chat = Put(system_prompt.back(), 3);
    now_ += 5;
    Use(system_prompt);
    Use(chat);
  }
  const auto trait_of = [&](NodeRef parent) {
    return index_.node(Put(parent, 3)[0]).traffic().trait();
  };
  EXPECT_EQ(trait_of(instruction.back()), 1u);
  EXPECT_EQ(trait_of(system_prompt.back()), 3u);
}

// A scan through a full store: it must not wash out what is asked for again and again.
TEST_F(RetentionPolicyTest, ScansGoBeforeTheWorkingSet) {
  constexpr std::size_t kCapacity = 400;
  std::vector<std::vector<NodeRef>> working_set;
  for (int i = 0; i < 20; ++i) working_set.push_back(Put(0, 10));
  for (int round = 0; round < 60; ++round) {
    now_ += 60;
    for (const auto& path : working_set) Use(path);
    for (int scan = 0; scan < 10; ++scan) {
      now_ += 1;
      if (index_.node_count() + 30 > kCapacity) Evict(Choose(index_.node_count() + 30 - kCapacity));
      Put(0, 30);
    }
  }
  std::size_t kept = 0;
  for (const auto& path : working_set) {
    for (const NodeRef ref : path)
      kept += index_.alive(ref) && index_.node(ref).use_count() >= 50 ? 1 : 0;
  }
  EXPECT_EQ(kept, 200u);
}

TEST_F(RetentionPolicyTest, ChoosesTheSameForTheSameHistory) {
  std::vector<std::vector<NodeRef>> chosen;
  for (int run = 0; run < 2; ++run) {
    TrieIndex index(1 << 20);
    RetentionPolicy policy(index);
    const ModelSlot slot = *index.AddModel(kBuiltInTenant, model_, kTestBlockTokens);
    std::mt19937 random(5);
    for (std::uint32_t i = 1; i < 20'000; ++i) {
      const NodeRef ref = index.Insert(
          {.id = IdOf(i),
           .parent = random() % 3 == 0 || i == 1 ? 0 : 1 + static_cast<NodeRef>(random() % (i - 1)),
           .model = slot,
           .path_hash = i * 0x9e3779b97f4a7c15u,
           .last_used_seconds = now_ - static_cast<std::uint32_t>(random() % 5000)});
      policy.OnInsert(ref);
    }
    chosen.push_back(policy.ChooseVictims(
        0, 300, now_, [](const IndexNode&) -> std::uint64_t { return 1; },
        [](NodeRef) { return false; }));
  }
  EXPECT_EQ(chosen[0].size(), 300u);
  EXPECT_EQ(chosen[0], chosen[1]);
}

}  // namespace
}  // namespace kvtrie
