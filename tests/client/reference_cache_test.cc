#include "client/reference_cache.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>

namespace kvtrie {
namespace {

ModelId Model(std::uint8_t number) {
  ModelId id;
  id.bytes.fill(number);
  return id;
}

TrieNodeId Node(std::uint8_t number) {
  TrieNodeId id;
  id.bytes.fill(number);
  return id;
}

std::shared_ptr<const ReferenceFrame> Frame(std::size_t bytes) {
  auto frame = std::make_shared<ReferenceFrame>();
  frame->bytes.resize(bytes);
  frame->tokens.resize(16);
  return frame;
}

TEST(ReferenceCacheTest, FramesAreFoundByModelAndBlock) {
  ReferenceCache cache(1 << 20);
  const auto frame = Frame(100);
  cache.Put(Model(1), Node(1), frame);
  EXPECT_EQ(cache.Get(Model(1), Node(1)), frame);
  EXPECT_EQ(cache.Get(Model(2), Node(1)), nullptr);
  EXPECT_EQ(cache.Get(Model(1), Node(2)), nullptr);
  EXPECT_EQ(cache.bytes(), frame->memory_bytes());

  const auto other = Frame(200);
  cache.Put(Model(1), Node(1), other);
  EXPECT_EQ(cache.Get(Model(1), Node(1)), other);
  EXPECT_EQ(cache.bytes(), other->memory_bytes());
  cache.Drop(Model(1), Node(1));
  cache.Drop(Model(1), Node(1));
  EXPECT_EQ(cache.Get(Model(1), Node(1)), nullptr);
  EXPECT_EQ(cache.bytes(), 0u);
}

TEST(ReferenceCacheTest, TheLeastRecentlyUsedGoesWhenItIsFull) {
  const std::size_t of_one = Frame(1000)->memory_bytes();
  ReferenceCache cache(2 * of_one);
  cache.Put(Model(1), Node(1), Frame(1000));
  cache.Put(Model(1), Node(2), Frame(1000));
  EXPECT_NE(cache.Get(Model(1), Node(1)), nullptr);
  cache.Put(Model(1), Node(3), Frame(1000));
  EXPECT_EQ(cache.Get(Model(1), Node(2)), nullptr);
  EXPECT_NE(cache.Get(Model(1), Node(1)), nullptr);
  EXPECT_NE(cache.Get(Model(1), Node(3)), nullptr);
  EXPECT_EQ(cache.bytes(), 2 * of_one);
}

TEST(ReferenceCacheTest, WhatIsLargerThanAllOfItIsNotKept) {
  ReferenceCache cache(1000);
  cache.Put(Model(1), Node(1), Frame(100));
  cache.Put(Model(1), Node(1), Frame(1000));
  EXPECT_EQ(cache.Get(Model(1), Node(1)), nullptr);  // nor the earlier one of the same block
  ReferenceCache none(0);
  none.Put(Model(1), Node(1), Frame(1));
  EXPECT_EQ(none.bytes(), 0u);
}

}  // namespace
}  // namespace kvtrie
