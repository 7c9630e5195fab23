#include "storage/trie/run_index.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <optional>
#include <queue>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "storage/base/check.h"

namespace kvtrie {
namespace {

constexpr std::uint32_t kCell = RunIndex::kCellTokens;
constexpr std::uint32_t kPeriodMax = 4;
constexpr int kChildrenMax = 64;
constexpr std::uint64_t kStepsPerNode = 8;
// So that short queries are not cut short by it.
constexpr std::uint64_t kStepsMin = 1u << 16;
// Some milliseconds, for which the trie is held.
constexpr std::uint64_t kStepsMax = 4'000'000;
constexpr std::size_t kProbesAhead = 12;
// Every so many nodes a path's salt is remembered.
constexpr std::uint32_t kSaltStride = 32;

// Calls `on_end(offset)` with the offset behind each cell of a node.
template <typename OnEnd>
void ForEachCellEnd(std::uint32_t block_tokens, std::uint32_t depth, const OnEnd& on_end) {
  if (block_tokens >= kCell) {
    std::uint32_t end = kCell;
    for (; end <= block_tokens; end += kCell) on_end(end);
    if (block_tokens % kCell != 0) on_end(block_tokens);
    return;
  }
  // The multiple of 16 that lies in this block, if there is one.
  const std::uint64_t first = std::uint64_t{depth - 1} * block_tokens;
  const std::uint64_t end = (first / kCell + 1) * kCell - first;
  if (end <= block_tokens) on_end(static_cast<std::uint32_t>(end));
}

std::size_t CellCount(std::uint32_t block_tokens) {
  return (std::max(block_tokens, kCell) + kCell - 1) / kCell;
}

bool HasExtraKey(const TrieIndex& trie, NodeRef ref) {
  return trie.node(ref).has_extra != 0 && !trie.extra_key(ref).empty();
}

std::string_view SaltOf(const TrieIndex& trie, NodeRef first_block) {
  return trie.node(first_block).has_extra != 0 ? trie.salt(first_block) : std::string_view();
}

bool Longer(const TextRun& a, const TextRun& b) {
  return std::tie(b.token_count, a.first_token, a.nodes.front()) <
         std::tie(a.token_count, b.first_token, b.nodes.front());
}

// The part of a run that answers tokens [begin, end) of the query.
TextRun Cut(const TextRun& run, std::uint32_t begin, std::uint32_t end,
            std::uint32_t block_tokens) {
  const std::uint32_t from = run.offset + (begin - run.first_token);
  const std::uint32_t to = run.offset + (end - run.first_token);
  TextRun part;
  part.first_token = begin;
  part.token_count = end - begin;
  part.offset = from % block_tokens;
  part.nodes.assign(run.nodes.begin() + from / block_tokens,
                    run.nodes.begin() + (to + block_tokens - 1) / block_tokens);
  return part;
}

}  // namespace

std::uint64_t RunIndex::HashCell(std::span<const TokenId> cell) const {
  return XXH3_64bits_withSeed(cell.data(), kCell * sizeof(TokenId), seed_);
}

std::uint64_t RunIndex::InSpace(std::uint64_t cell_hash, std::uint64_t space) {
  std::uint64_t hash = cell_hash ^ space;
  hash = (hash ^ hash >> 32) * 0x9e3779b97f4a7c15u;
  return hash ^ hash >> 32;
}

void RunIndex::HashCells(std::span<const TokenId> block, std::vector<std::uint64_t>* hashes) const {
  ForEachCellEnd(static_cast<std::uint32_t>(block.size()), 1, [&](std::uint32_t end) {
    hashes->push_back(HashCell(block.subspan(end - kCell, kCell)));
  });
}

void RunIndex::AddHashed(NodeRef ref, std::uint64_t space, std::span<const std::uint64_t> hashes) {
  for (const std::uint64_t hash : hashes) table_.Insert(InSpace(hash, space), ref);
}

void RunIndex::Add(const TrieIndex& trie, NodeRef ref, std::uint64_t space) {
  if (HasExtraKey(trie, ref)) return;
  const IndexNode& node = trie.node(ref);
  const std::uint32_t block_tokens = trie.model(node.model).block_tokens;
  ForEachCellEnd(block_tokens, node.depth, [&](std::uint32_t end) {
    std::array<TokenId, kCell> cell;
    std::uint32_t missing = kCell;  // filled from the back
    std::uint32_t to = end;
    for (NodeRef at = ref; missing > 0; at = trie.parent(at), to = block_tokens) {
      if (at == 0 || HasExtraKey(trie, at)) return;
      const auto tokens = trie.CachedTokens(at);
      if (tokens.empty()) return;
      const std::uint32_t taken = std::min(missing, to);
      std::copy_n(tokens.begin() + (to - taken), taken, cell.begin() + (missing - taken));
      missing -= taken;
    }
    table_.Insert(InSpace(HashCell(cell), space), ref);
  });
}

void RunIndex::Remove(const TrieIndex& trie, NodeRef ref) {
  table_.Remove(ref, CellCount(trie.model(trie.node(ref).model).block_tokens));
}

// One query on its way.
class RunIndex::Search {
 public:
  Search(const RunIndex& index, const TrieIndex& trie, const RunQuery& query)
      : index_(index),
        trie_(trie),
        query_(query),
        block_tokens_(trie.model(query.model).block_tokens),
        steps_max_(std::min(kStepsMin + kStepsPerToken * query.tokens.size(), kStepsMax)) {}

  RunFindings Run() {
    if (block_tokens_ != 0 && index_.table_.size() != 0) {
      // Blocks with an extra key cut the query into pieces.
      auto begin = query_.first_token;
      const auto size = static_cast<std::uint32_t>(query_.tokens.size());
      for (const ExtraKey& extra : query_.extra_keys) {
        const std::uint64_t from = std::uint64_t{extra.block_index} * block_tokens_;
        if (from >= size) break;
        if (from + block_tokens_ <= begin) continue;
        if (from > begin) SearchPiece(begin, static_cast<std::uint32_t>(from));
        begin = static_cast<std::uint32_t>(std::min<std::uint64_t>(from + block_tokens_, size));
      }
      SearchPiece(begin, size);
    }
    std::sort(found_.runs.begin(), found_.runs.end(), Longer);
    return std::move(found_);
  }

 private:
  void SearchPiece(std::uint32_t low, std::uint32_t high) {
    if (high < low || high - low < kRunTokensMin) return;
    low_ = low;
    high_ = high;
    run_ends_.clear();
    std::vector<std::uint64_t> hashes(high - low - kCell + 1);
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      hashes[i] = InSpace(index_.HashCell(query_.tokens.subspan(low + i, kCell)), query_.space);
    }
    const auto repeats = [&hashes](std::size_t at) {
      for (std::size_t period = 1; period <= std::min<std::size_t>(at, kPeriodMax); ++period) {
        if (hashes[at - period] == hashes[at]) return true;
      }
      return false;
    };
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      if (i + kProbesAhead < hashes.size()) index_.table_.Prefetch(hashes[i + kProbesAhead]);
      if (repeats(i) && i + 1 < hashes.size() && repeats(i + 1)) continue;
      const auto at = low + static_cast<std::uint32_t>(i) + kCell;
      if (IsInRunsEnough(at)) continue;
      index_.table_.Find(hashes[i], [&](NodeRef ref) { return Try(ref, at); });
      if (!found_.is_complete) return;
    }
  }

  // Whether so many runs hold the cell that ends at `at` that more are not wanted.
  bool IsInRunsEnough(std::uint32_t at) {
    if (run_ends_.size() < query_.places_max) return false;
    std::erase_if(run_ends_, [at](std::uint32_t end) { return end < at; });
    return run_ends_.size() >= query_.places_max;
  }

  // A node that may hold the cell that ends at token `at` of the query. True: it does.
  bool Try(NodeRef ref, std::uint32_t at) {
    if (!found_.is_complete || !trie_.alive(ref) || trie_.node(ref).model != query_.model) {
      return false;
    }
    bool is_there = false;
    ForEachCellEnd(block_tokens_, trie_.node(ref).depth, [&](std::uint32_t cell_end) {
      if (seen_.contains({ref, StartOf(at, cell_end)})) {
        is_there = true;
        return;
      }
      auto run = Extend(ref, cell_end, at);
      if (!run) return;
      is_there = true;
      std::int64_t start = StartOf(run->first_token, run->offset);
      for (const NodeRef node : run->nodes) {
        seen_.insert({node, start});
        start += block_tokens_;
      }
      if (run->token_count >= kRunTokensMin && HasSalt(run->nodes.front())) {
        run_ends_.push_back(run->end());
        found_.runs.push_back(*std::move(run));
      }
    });
    return is_there;
  }

  // Where in the query a node begins of which token `offset` lies at `at`.
  static std::int64_t StartOf(std::uint32_t at, std::uint32_t offset) {
    return std::int64_t{at} - offset;
  }

  // The tokens of a node that may be part of a run with its first token at `start` of the query;
  // otherwise empty.
  std::span<const TokenId> Read(NodeRef ref, std::int64_t start, bool is_wanted) {
    Spend(kStepsPerNode);
    const std::uint32_t depth = trie_.node(ref).depth;
    const bool is_own = depth <= query_.own_path.size() && query_.own_path[depth - 1] == ref &&
                        start == std::int64_t{depth - 1} * block_tokens_;
    if (is_own || HasExtraKey(trie_, ref) || (query_.usable && !query_.usable(ref))) return {};
    const auto tokens = trie_.CachedTokens(ref);
    if (tokens.empty() && is_wanted && found_.unread.size() < kUnreadMax &&
        std::find(found_.unread.begin(), found_.unread.end(), ref) == found_.unread.end()) {
      found_.unread.push_back(ref);
    }
    return tokens;
  }

  void Spend(std::uint64_t steps) {
    found_.steps += steps;
    if (found_.steps > steps_max_) found_.is_complete = false;
  }

  // How many tokens are equal, of at most `count`, from these on.
  std::uint32_t SameForwards(std::span<const TokenId> stored, std::uint32_t offset,
                             std::uint32_t at) {
    const std::uint32_t count = std::min(block_tokens_ - offset, high_ - at);
    std::uint32_t same = 0;
    while (same < count && stored[offset + same] == query_.tokens[at + same]) ++same;
    Spend(same);
    return same;
  }

  // The maximal run around a cell; nullopt: the cell is not there.
  std::optional<TextRun> Extend(NodeRef ref, std::uint32_t cell_end, std::uint32_t at) {
    const auto cell_tokens = Read(ref, StartOf(at, cell_end), /*is_wanted=*/true);
    if (cell_tokens.empty() || cell_tokens[cell_end - 1] != query_.tokens[at - 1]) {
      return std::nullopt;
    }
    TextRun run;
    run.nodes.push_back(ref);  // backwards
    run.first_token = at;
    run.offset = cell_end;
    auto stored = cell_tokens;
    while (run.first_token > low_ && found_.is_complete) {
      if (run.offset == 0) {
        const NodeRef parent = trie_.parent(run.nodes.back());
        if (parent == 0) break;
        stored = Read(parent, StartOf(run.first_token, block_tokens_), /*is_wanted=*/true);
        if (stored.empty() || stored.back() != query_.tokens[run.first_token - 1]) break;
        run.nodes.push_back(parent);
        run.offset = block_tokens_;
      }
      const std::uint32_t count = std::min(run.offset, run.first_token - low_);
      std::uint32_t same = 0;
      while (same < count &&
             stored[run.offset - 1 - same] == query_.tokens[run.first_token - 1 - same]) {
        ++same;
      }
      Spend(same);
      run.offset -= same;
      run.first_token -= same;
      if (same < count) break;
    }
    if (at - run.first_token < kCell) return std::nullopt;
    std::reverse(run.nodes.begin(), run.nodes.end());

    stored = cell_tokens;
    std::uint32_t offset = cell_end;
    std::uint32_t end = at;
    while (end < high_ && found_.is_complete) {
      if (offset == block_tokens_) {
        const auto [child, same] = NearestChild(run.nodes.back(), end);
        if (child == 0) break;
        run.nodes.push_back(child);
        offset = same;
        end += same;
      } else {
        const std::uint32_t same = SameForwards(stored, offset, end);
        offset += same;
        end += same;
      }
      if (offset < block_tokens_) break;
    }
    run.token_count = end - run.first_token;
    return run;
  }

  // The child that has most in common with the query from `at` on, and how much; 0: none has
  // anything.
  std::pair<NodeRef, std::uint32_t> NearestChild(NodeRef ref, std::uint32_t at) {
    std::pair<NodeRef, std::uint32_t> nearest{0, 0};
    int left = kChildrenMax;
    for (NodeRef child = trie_.node(ref).first_child; child != 0 && left > 0 && found_.is_complete;
         child = trie_.node(child).next_sibling, --left) {
      // Of many children few have anything in common; those with a whole cell are found by it.
      const bool is_only =
          trie_.node(ref).first_child == child && trie_.node(child).next_sibling == 0;
      const auto stored = Read(child, at, /*is_wanted=*/is_only);
      if (stored.empty()) continue;
      const std::uint32_t same = SameForwards(stored, 0, at);
      if (same > nearest.second) nearest = {child, same};
      if (same == block_tokens_) break;
    }
    return nearest;
  }

  // Whether a path is of the query's salt. The hash says so, and is only a guide.
  bool HasSalt(NodeRef ref) {
    std::vector<NodeRef> passed = {ref};
    std::optional<bool> known;
    NodeRef at = ref;
    while (!known) {
      if (const auto found = salts_.find(at); found != salts_.end()) {
        known = found->second;
      } else if (const NodeRef parent = trie_.parent(at); parent != 0) {
        if (trie_.node(at).depth % kSaltStride == 0) passed.push_back(at);
        at = parent;
        Spend(1);
      } else {
        known = SaltOf(trie_, at) == query_.salt;
        passed.push_back(at);
      }
    }
    for (const NodeRef node : passed) salts_[node] = *known;
    return *known;
  }

  const RunIndex& index_;
  const TrieIndex& trie_;
  const RunQuery& query_;
  const std::uint32_t block_tokens_;
  const std::uint64_t steps_max_;
  // The piece that is searched: no run goes beyond it.
  std::uint32_t low_ = 0;
  std::uint32_t high_ = 0;
  std::vector<std::uint32_t> run_ends_;  // of runs that may go on
  // Nodes that were compared, and where in the query they began.
  absl::flat_hash_set<std::pair<NodeRef, std::int64_t>> seen_;
  absl::flat_hash_map<NodeRef, bool> salts_;
  RunFindings found_;
};

RunFindings RunIndex::FindMaximalRuns(const TrieIndex& trie, const RunQuery& query) const {
  return Search(*this, trie, query).Run();
}

RunFindings RunIndex::FindRuns(const TrieIndex& trie, const RunQuery& query) const {
  RunFindings found = FindMaximalRuns(trie, query);
  found.runs = Cover(std::move(found.runs), trie.model(query.model).block_tokens);
  return found;
}

std::vector<TextRun> RunIndex::Cover(std::vector<TextRun> runs, std::uint32_t block_tokens,
                                     std::uint32_t first_token) {
  const auto shorter = [](const TextRun& a, const TextRun& b) { return Longer(b, a); };
  std::priority_queue<TextRun, std::vector<TextRun>, decltype(shorter)> queue(shorter);
  const auto offer = [&](const TextRun& run, std::uint32_t begin, std::uint32_t end) {
    if (begin < end && end - begin >= kRunTokensMin) queue.push(Cut(run, begin, end, block_tokens));
  };
  for (const TextRun& run : runs) offer(run, std::max(run.first_token, first_token), run.end());
  runs.clear();
  // What is covered: disjoint intervals by their begin.
  std::map<std::uint32_t, std::uint32_t> covered;
  while (!queue.empty()) {
    TextRun run = queue.top();
    queue.pop();
    // What is left of it between those that are there.
    std::uint32_t begin = run.first_token;
    bool is_whole = true;
    auto next = covered.upper_bound(begin);
    if (next != covered.begin() && std::prev(next)->second > begin) {
      begin = std::min(std::prev(next)->second, run.end());
      is_whole = false;
    }
    for (; next != covered.end() && next->first < run.end(); ++next) {
      is_whole = false;
      offer(run, begin, next->first);
      begin = std::min(next->second, run.end());
    }
    if (!is_whole) {
      offer(run, begin, run.end());
      continue;
    }
    covered.emplace(run.first_token, run.end());
    runs.push_back(std::move(run));
  }
  return runs;
}

}  // namespace kvtrie
