#pragma once

#include <cstring>
#include <random>
#include <string>

#include "gtest/gtest.h"
#include "storage/trie/trie_index.h"
#include "tests/storage/engine/engine_fixture.h"

namespace kvtrie {

// An index of one model, to which nodes are added by hand.
class IndexFixture : public testing::Test {
 protected:
  IndexFixture() { slot_ = *index_.AddModel(kBuiltInTenant, model_, kTestBlockTokens); }

  static TrieNodeId IdOf(std::uint64_t number) {
    std::mt19937_64 random(number);
    TrieNodeId id;
    for (std::uint8_t& byte : id.bytes) byte = static_cast<std::uint8_t>(random());
    return id;
  }
  // A node with an id of its own, and a frame of 4 KiB.
  NodeRef Insert(NodeRef parent, NewNode node = {}) {
    ++inserted_;
    if (node.id == TrieNodeId{}) node.id = IdOf(inserted_);
    node.parent = parent;
    node.model = slot_;
    node.path_hash = inserted_ * 0x9e3779b97f4a7c15u;
    node.frames = {.frame = {1, static_cast<std::uint32_t>(inserted_), 4096}};
    return index_.Insert(node);
  }

  const ModelId model_{};
  TrieIndex index_{std::size_t{1} << 20};
  ModelSlot slot_ = 0;
  std::uint64_t inserted_ = 0;
};

}  // namespace kvtrie
