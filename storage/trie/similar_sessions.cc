#include "storage/trie/similar_sessions.h"

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "storage/trie/trie_probability.h"

namespace kvtrie {
namespace {

constexpr std::size_t kSessionsPerRun = 2;

class SimilarSearch {
 public:
  SimilarSearch(const TrieIndex& trie, const SessionEnds& ends, const SimilarQuery& query)
      : trie_(trie),
        ends_(ends),
        query_(query),
        block_tokens_(trie.model(query.model).block_tokens),
        candidates_max_(2 * std::size_t{query.session_count} + 16) {}

  SimilarSessions Run(const RunIndex& runs) {
    if (block_tokens_ == 0) return {};
    RunFindings found =
        runs.FindMaximalRuns(trie_, {.model = query_.model,
                                     .space = query_.space,
                                     .salt = query_.salt,
                                     .tokens = query_.tokens,
                                     .extra_keys = query_.extra_keys,
                                     .own_path = query_.stored_prefix,
                                     .usable = [this](NodeRef ref) { return IsUsable(ref); },
                                     .places_max = query_.session_count + 8});
    answer_.unread = std::move(found.unread);
    answer_.is_complete = found.is_complete;
    runs_ = std::move(found.runs);
    for (std::uint32_t run = 0; run < runs_.size(); ++run) {
      for (std::uint32_t at = 0; at < runs_[run].nodes.size(); ++at) {
        runs_at_[runs_[run].nodes[at]].push_back({run, at});
      }
    }
    TakeByPrefix();
    TakeByRuns();
    for (const NodeRef end : candidates_) Compare(end);
    Rank();
    return std::move(answer_);
  }

 private:
  bool IsUsable(NodeRef ref) const {
    return trie_.node(ref).has_frame() && !trie_.node(ref).expired(query_.now_seconds);
  }
  // False: the bound is reached.
  bool Visit() {
    if (answer_.visited_nodes >= kSimilarVisitsMax) {
      answer_.is_complete = false;
      return false;
    }
    ++answer_.visited_nodes;
    return true;
  }

  // Takes a node if a session ends there. True: it is new.
  bool TakeIfEnd(NodeRef ref) {
    const bool is_end = trie_.node(ref).is_leaf() || ends_.IsEnd(ref);
    if (!is_end || !IsUsable(ref) || !taken_.insert(ref).second) return false;
    candidates_.push_back(ref);
    return true;
  }

  // Takes ends below a node, depth first and latest first, `count` at most; `without`: a child
  // whose sessions are there already.
  void TakeBelow(NodeRef top, NodeRef without, std::size_t count) {
    NodeRef at = trie_.node(top).first_child;
    if (at == without && at != 0) at = trie_.node(at).next_sibling;
    while (at != 0 && count > 0) {
      if (!Visit()) return;
      const bool goes_on = !trie_.node(at).expired(query_.now_seconds);
      if (goes_on && TakeIfEnd(at)) --count;
      if (goes_on && !trie_.node(at).is_leaf()) {
        at = trie_.node(at).first_child;
        continue;
      }
      NodeRef next = NextSibling(at, without);
      while (next == 0 && trie_.parent(at) != top) {
        at = trie_.parent(at);
        next = NextSibling(at, without);
      }
      at = next;
    }
  }
  NodeRef NextSibling(NodeRef ref, NodeRef without) const {
    const NodeRef next = trie_.node(ref).next_sibling;
    return next != 0 && next == without ? trie_.node(next).next_sibling : next;
  }

  void TakeByPrefix() {
    NodeRef below = 0;
    for (std::size_t depth = query_.stored_prefix.size(); depth > 0; --depth) {
      if (candidates_.size() >= candidates_max_ || !Visit()) return;
      const NodeRef at = query_.stored_prefix[depth - 1];
      TakeIfEnd(at);
      TakeBelow(at, below, candidates_max_ - std::min(candidates_max_, candidates_.size()));
      below = at;
    }
  }

  void TakeByRuns() {
    const std::size_t enough = candidates_.size() + candidates_max_;
    for (const TextRun& run : runs_) {  // longest first
      // From its end upwards, since sessions may leave it on the way.
      const std::size_t wanted = candidates_.size() + kSessionsPerRun;
      NodeRef below = 0;
      for (auto at = run.nodes.rbegin(); at != run.nodes.rend(); ++at) {
        if (candidates_.size() >= wanted) break;
        if (candidates_.size() >= enough || !Visit()) return;
        TakeIfEnd(*at);
        TakeBelow(*at, below, wanted - std::min(wanted, candidates_.size()));
        below = *at;
      }
    }
  }

  // What a candidate has in common with the query: from its end upwards to what both share.
  void Compare(NodeRef end) {
    SimilarSession session;
    session.end = end;
    std::vector<TextRun> runs;
    absl::flat_hash_set<std::uint32_t> met;
    for (NodeRef at = end; at != 0; at = trie_.parent(at)) {
      if (!Visit()) return;
      const std::uint32_t depth = trie_.node(at).depth;
      if (depth <= query_.stored_prefix.size() && query_.stored_prefix[depth - 1] == at) {
        session.shared_prefix_blocks = depth;
        break;
      }
      const auto found = runs_at_.find(at);
      if (found == runs_at_.end()) continue;
      for (const auto& [run, place] : found->second) {
        // The session may leave a run's path before the run ends.
        if (met.insert(run).second) runs.push_back(UpTo(runs_[run], place));
      }
    }
    const std::uint32_t prefix_tokens = session.shared_prefix_blocks * block_tokens_;
    session.runs = RunIndex::Cover(std::move(runs), block_tokens_, prefix_tokens);
    for (const TextRun& run : session.runs) {
      session.shared_run_tokens += run.token_count;
      session.run_bits.push_back(BitsOf(run));
      session.shared_run_bits += session.run_bits.back();
    }
    session.shared_prefix_bits = PrefixBits(session.shared_prefix_blocks);
    if (session.shared_bits() > 0) answer_.sessions.push_back(std::move(session));
  }

  // A run without what lies behind its node `last`.
  TextRun UpTo(const TextRun& run, std::uint32_t last) const {
    TextRun part = run;
    part.nodes.resize(last + 1);
    part.token_count = std::min(run.token_count, (last + 1) * block_tokens_ - run.offset);
    return part;
  }

  double BitsOf(const TextRun& run) const {
    double bits = 0;
    std::uint32_t offset = run.offset;
    std::uint32_t left = run.token_count;
    for (const NodeRef node : run.nodes) {
      const std::uint32_t here = std::min(left, block_tokens_ - offset);
      bits += BlockSurprisalBitsOf(trie_, node) * here / block_tokens_;
      left -= here;
      offset = 0;
    }
    return bits;
  }

  double PrefixBits(std::uint32_t blocks) {
    if (prefix_bits_.empty()) {
      prefix_bits_.push_back(0);
      for (const NodeRef node : query_.stored_prefix) {
        prefix_bits_.push_back(prefix_bits_.back() + BlockSurprisalBitsOf(trie_, node));
      }
    }
    return prefix_bits_[blocks];
  }

  void Rank() {
    const auto key = [this](const SimilarSession& session) {
      const IndexNode& end = trie_.node(session.end);
      return std::tuple(-session.shared_bits(), ~end.last_used_seconds, end.id);
    };
    std::sort(answer_.sessions.begin(), answer_.sessions.end(),
              [&key](const auto& a, const auto& b) { return key(a) < key(b); });
    if (answer_.sessions.size() > query_.session_count) {
      answer_.sessions.resize(query_.session_count);
    }
  }

  const TrieIndex& trie_;
  const SessionEnds& ends_;
  const SimilarQuery& query_;
  const std::uint32_t block_tokens_;
  const std::size_t candidates_max_;
  std::vector<TextRun> runs_;
  struct Place {
    std::uint32_t run;
    std::uint32_t node;  // among those of the run
  };
  absl::flat_hash_map<NodeRef, std::vector<Place>> runs_at_;
  std::vector<NodeRef> candidates_;
  absl::flat_hash_set<NodeRef> taken_;
  std::vector<double> prefix_bits_;  // of so many blocks
  SimilarSessions answer_;
};

}  // namespace

SimilarSessions FindSimilarSessions(const TrieIndex& trie, const RunIndex& runs,
                                    const SessionEnds& ends, const SimilarQuery& query) {
  return SimilarSearch(trie, ends, query).Run(runs);
}

}  // namespace kvtrie
