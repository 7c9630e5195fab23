#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "storage/kv/ids.h"
#include "storage/kv/path.h"
#include "storage/trie/run_index.h"
#include "storage/trie/session_ends.h"
#include "storage/trie/trie_index.h"

namespace kvtrie {

struct SimilarQuery {
  ModelSlot model = 0;
  std::uint64_t space = 0;  // as in RunQuery
  std::string_view salt{};
  std::span<const TokenId> tokens{};
  std::span<const ExtraKey> extra_keys{};
  std::span<const NodeRef> stored_prefix{};  // of these tokens, first block first
  std::uint32_t session_count = 1;           // at most so many in the answer
  std::uint32_t now_seconds = 0;
};

// A stored session, and what it has in common with the query.
struct SimilarSession {
  NodeRef end = 0;  // its last block
  std::uint32_t shared_prefix_blocks = 0;
  double shared_prefix_bits = 0;
  // Of `runs`, which do not overlap and lie behind the shared prefix.
  std::uint32_t shared_run_tokens = 0;
  double shared_run_bits = 0;
  std::vector<TextRun> runs;     // longest first; in nodes of this session's path
  std::vector<double> run_bits;  // of each

  double shared_bits() const { return shared_prefix_bits + shared_run_bits; }
};

struct SimilarSessions {
  std::vector<SimilarSession> sessions;  // nearest first
  std::vector<NodeRef> unread;           // as in RunFindings
  bool is_complete = true;               // false: a bound on work was reached
  std::uint64_t visited_nodes = 0;
};

// The stored sessions that have most in common with a text: in bits, the surprisal of the longest
// prefix that both have (the lowest common ancestor in the trie: SharedSurprisalBits, which is
// -log2 P(s ^ s'), the d_T of arXiv:2604.15356, and grows with nearness) plus that of equal text
// behind it, under whatever prefix.
//
// A session is a path to a leaf, or to where a named session ends.
//
// No scan: from the end of the stored prefix upwards, sessions that hang there are taken, latest
// first, until there are 2 * session_count + 16; and for the longest runs of text, two sessions
// that hold them each, until there are as many again. Those are compared in full; ties go to the
// one used last. So the cost does not depend on how many sessions are stored: at most
// kSimilarVisitsMax nodes, beside the search for runs. Of sessions that share exactly the same,
// some are given; of a text that is stored in more than 4 places, sessions with these (RunIndex).
SimilarSessions FindSimilarSessions(const TrieIndex& trie, const RunIndex& runs,
                                    const SessionEnds& ends, const SimilarQuery& query);

inline constexpr std::uint64_t kSimilarVisitsMax = std::uint64_t{1} << 17;

}  // namespace kvtrie
