#include "storage/engine/reference_counts.h"

#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvtrie {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TrieNodeId Id(std::uint8_t number) {
  TrieNodeId id;
  id.bytes[0] = number;
  id.bytes[15] = 1;
  return id;
}

TEST(ReferenceCountsTest, AReferenceStaysOneUntilItsLastMemberGoes) {
  ReferenceCounts counts;
  counts.Add(Id(1), std::vector<RungReference>{{Id(7), Rung::kCoded}, {Id(8), Rung::kExact}});
  counts.Add(Id(2), std::vector<RungReference>{{Id(7), Rung::kExact}});
  EXPECT_TRUE(counts.IsReferenced(Id(7), Rung::kCoded));
  EXPECT_TRUE(counts.IsReferenced(Id(7), Rung::kExact));
  EXPECT_FALSE(counts.IsReferenced(Id(8), Rung::kCoded));
  EXPECT_FALSE(counts.IsReferenced(Id(1)));
  EXPECT_THAT(counts.MembersOf(Id(7)), ElementsAre(Id(1), Id(2)));
  counts.Remove(Id(1), std::vector<RungReference>{{Id(7), Rung::kCoded}, {Id(8), Rung::kExact}});
  EXPECT_FALSE(counts.IsReferenced(Id(7), Rung::kCoded));
  EXPECT_TRUE(counts.IsReferenced(Id(7)));
  EXPECT_FALSE(counts.IsReferenced(Id(8)));
  counts.Remove(Id(2), std::vector<RungReference>{{Id(7), Rung::kExact}});
  EXPECT_THAT(counts.MembersOf(Id(7)), IsEmpty());
  EXPECT_EQ(counts.size(), 0u);
}

TEST(ReferenceCountsTest, AgreesWithAPlainList) {
  std::mt19937 random(1);
  ReferenceCounts counts;
  std::map<std::uint8_t, std::vector<RungReference>> members;
  for (int step = 0; step < 3000; ++step) {
    const auto member = static_cast<std::uint8_t>(random() % 40);
    if (const auto found = members.find(member); found != members.end()) {
      counts.Remove(Id(member), found->second);
      members.erase(found);
    } else {
      std::set<std::uint8_t> numbers;
      while (numbers.size() < 1 + random() % 5) {
        numbers.insert(static_cast<std::uint8_t>(100 + random() % 20));
      }
      auto& references = members[member];
      for (const std::uint8_t number : numbers) {
        references.push_back({Id(number), random() % 2 == 0 ? Rung::kCoded : Rung::kExact});
      }
      counts.Add(Id(member), references);
    }
    const auto asked = static_cast<std::uint8_t>(100 + random() % 20);
    std::vector<TrieNodeId> wanted;
    for (const auto& [number, references] : members) {
      for (const RungReference& reference : references) {
        if (reference.node == Id(asked)) wanted.push_back(Id(number));
      }
    }
    ASSERT_EQ(counts.MembersOf(Id(asked)), wanted);
    ASSERT_EQ(counts.IsReferenced(Id(asked)), !wanted.empty());
  }
}

TEST(ReferenceCountsDeathTest, WhatWasNotAddedCannotGo) {
  ReferenceCounts counts;
  EXPECT_DEATH(counts.Remove(Id(1), std::vector<RungReference>{{Id(7), Rung::kCoded}}),
               "KV_CHECK|check");
}

}  // namespace
}  // namespace kvtrie
