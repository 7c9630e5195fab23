#pragma once

#include "storage/kv/quality.h"
#include "storage/kv/trie_node_id.h"

namespace kvtrie {

// A frame that another one was coded against: without it, that one is of no use.
struct RungReference {
  TrieNodeId node;
  Rung rung = Rung::kCoded;

  bool operator==(const RungReference&) const = default;
};

}  // namespace kvtrie
