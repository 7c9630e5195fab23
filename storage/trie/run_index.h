#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "storage/kv/ids.h"
#include "storage/kv/path.h"
#include "storage/trie/run_index_table.h"
#include "storage/trie/trie_index.h"

namespace kvtrie {

// A stretch of text that a query has in common with a stored path, whatever stands before it in
// either; every token of it was compared.
struct TextRun {
  std::uint32_t first_token = 0;  // in the query
  std::uint32_t token_count = 0;
  std::uint32_t offset = 0;    // of its first token in nodes.front()
  std::vector<NodeRef> nodes;  // that hold it, each the parent of the next

  std::uint32_t end() const { return first_token + token_count; }
  bool operator==(const TextRun&) const = default;
};

// What is looked for, and who may answer.
struct RunQuery {
  ModelSlot model = 0;      // of a tenant; others never show
  std::uint64_t space = 0;  // PathHasher::Root of tenant, model and salt
  std::string_view salt{};  // paths of other salts never show
  std::span<const TokenId> tokens{};
  std::span<const ExtraKey>
      extra_keys{};               // their blocks are in no run: tokens do not say what they are
  std::uint32_t first_token = 0;  // runs begin here or behind it
  // The nodes of the query's own stored prefix, first block first: at its own place it is no answer
  // (it is one elsewhere). To find what new blocks of a session have in common with others, name
  // the blocks that it has, and set first_token behind them.
  std::span<const NodeRef> own_path{};
  // Nodes that may answer; empty: all. Runs end at others.
  std::function<bool(NodeRef)> usable{};
  // Text that is found in so many places is not looked for in more. Fewer are sooner found.
  std::uint32_t places_max = 8;
};

struct RunFindings {
  std::vector<TextRun> runs;  // longest first, then by first_token
  // Nodes that may hold more, whose tokens are not in the token cache: put them there and ask
  // again. At most kUnreadMax.
  std::vector<NodeRef> unread;
  // False: the bound on work was reached, and there may be more.
  bool is_complete = true;
  std::uint64_t steps = 0;  // tokens compared, and 8 per node looked at
};

// Finds equal text anywhere in the trie: a document, a tool result, a template under another
// prefix.
//
// What is found. Text is indexed by cells of 16 tokens, one after the other from the beginning of
// each block; where a block is no multiple of 16 long, one more cell ends with it, and where it is
// shorter than 16, cells lie 16 apart on the path, across blocks. A query is looked up at each of
// its offsets. So each stretch of 31 equal tokens holds a cell, whatever the offsets on both sides,
// and all runs of at least kRunTokensMin = 32 tokens are found, except:
//   - where a cell is stored more than 4 times: 4 of these places (RunIndexTable);
//   - where `places_max` runs go on together: others that begin and end among them, or less than 31
//     tokens behind;
//   - what a full index forgot;
//   - within text that repeats itself with a period of at most 4 tokens: its first and last window
//     are looked up, not those between, since all look alike;
//   - the last tokens of a run, fewer than 16 in a block whose parent has more than 64 children.
// This is one entry per 16 stored tokens. Winnowing (Schleimer, Wilkerson, Aiken 2003) with k = 16
// and windows of 17 gives the same guarantee with one per 9; chunks cut by content give none for
// runs of a given length.
//
// Candidates are compared token by token, and extended over block borders: backwards to parents,
// forwards to the child that has most in common. Tokens are compared where they are in the token
// cache; others are reported (`unread`).
//
// Bounds. Memory: RunIndexTable; at most 0.9 byte per stored token with blocks of 16, from half a
// million tokens on. A query: one hash and one probe per token, and at most kStepsPerToken
// comparisons for each.
//
// Hashes are keyed by `seed`, which is secret to the store, since hashes of chosen tokens could be
// made to collide.
//
// Not thread-safe; const methods may run side by side, beside those of the TrieIndex.
class RunIndex {
 public:
  static constexpr std::uint32_t kCellTokens = 16;
  static constexpr std::uint32_t kRunTokensMin = 32;
  static constexpr std::size_t kUnreadMax = 256;
  static constexpr std::uint64_t kStepsPerToken = 64;

  // At most `limit_bytes`; 0: nothing is kept, nothing is found.
  RunIndex(std::uint64_t seed, std::size_t limit_bytes) : seed_(seed), table_(limit_bytes) {}

  // Adds a node that is linked, and whose tokens (and those above that its cells reach into) are in
  // the token cache. `space` as in RunQuery.
  void Add(const TrieIndex& trie, NodeRef ref, std::uint64_t space);

  // The same in two steps, for loading: hashes of the cells of a block of at least kCellTokens,
  // which can be had before it is known what the block hangs on; then the entries.
  void HashCells(std::span<const TokenId> block, std::vector<std::uint64_t>* hashes) const;
  void AddHashed(NodeRef ref, std::uint64_t space, std::span<const std::uint64_t> hashes);

  // Before the node is erased.
  void Remove(const TrieIndex& trie, NodeRef ref);

  // The longest runs that cover the query without overlap: the longest of all, then the longest of
  // what is left, down to kRunTokensMin.
  RunFindings FindRuns(const TrieIndex& trie, const RunQuery& query) const;
  // All maximal runs of at least kRunTokensMin, several for the same text if it is stored in
  // several places.
  RunFindings FindMaximalRuns(const TrieIndex& trie, const RunQuery& query) const;

  // Cuts runs down to a cover as FindRuns gives it. `first_token`: nothing before it.
  static std::vector<TextRun> Cover(std::vector<TextRun> runs, std::uint32_t block_tokens,
                                    std::uint32_t first_token = 0);

  const RunIndexTable& table() const { return table_; }

 private:
  class Search;

  std::uint64_t HashCell(std::span<const TokenId> cell) const;
  static std::uint64_t InSpace(std::uint64_t cell_hash, std::uint64_t space);

  const std::uint64_t seed_;
  RunIndexTable table_;
};

}  // namespace kvtrie
