#include "storage/engine/retention_policy.h"

#include <algorithm>
#include <bit>
#include <queue>
#include <utility>

#include "absl/container/flat_hash_set.h"

namespace kvtrie {
namespace {

// Leaves looked at for each node that has to go, and at least.
constexpr std::size_t kLooksPerVictim = 8;
constexpr std::size_t kLooksMin = 512;
// Nodes and ghosts, each, that stand for all when the store learns what has not been used.
constexpr std::size_t kWaitingLooks = 1024;

// What comes back when this many times as much was evicted as there is room for is a stranger.
constexpr std::size_t kGhostsPerNode = 2;

// Paths that left others at a node: how many are needed to say something of the next one, and from
// how many on the older half is forgotten.
constexpr double kForksMin = 8;
constexpr std::uint32_t kForksRemembered = 512;
// What part of them was used again.
constexpr double kRare = 0.08;
constexpr double kCommon = 0.35;

// Of a put.
std::uint32_t SizeClass(std::uint64_t blocks) {
  return blocks <= 4 ? 0u : blocks <= 16 ? 1u : blocks <= 64 ? 2u : 3u;
}

}  // namespace

RetentionPolicy::Forks& RetentionPolicy::ForksAt(NodeRef ref) {
  const auto& bytes = index_.node(ref).id.bytes;
  return forks_[(bytes[0] | std::size_t{bytes[1]} << 8) % kForkPlaces];
}

NodeTraffic RetentionPolicy::Arrives(const TrieNodeId& id, NodeRef parent, const PutPlace& place,
                                     std::uint32_t now_seconds) {
  const bool is_fork = parent != 0 && place.is_first && !index_.node(parent).is_leaf();
  if (const auto ghost = ghosts_.Take(id)) {
    const std::uint32_t idle =
        now_seconds > ghost->last_used_seconds ? now_seconds - ghost->last_used_seconds : 0;
    reuse_.Reused(ReuseModel::CellOf(ghost->traffic, idle), 1);
    if (is_fork && ghost->traffic.uses() == 0)
      ForksAt(parent).reused.fetch_add(1, std::memory_order_relaxed);
    return ghost->traffic.Used(idle);
  }
  if (parent == 0) return NodeTraffic(NodeOrigin::kRoot, SizeClass(place.new_blocks));
  const IndexNode& up = index_.node(parent);
  if (!place.is_first) return NodeTraffic(up.traffic().origin(), up.traffic().trait());
  if (!is_fork) {
    return NodeTraffic(
        NodeOrigin::kContinuation,
        std::min<std::uint32_t>(3, static_cast<std::uint32_t>(std::bit_width(up.use_count() / 2))));
  }
  Forks& forks = ForksAt(parent);
  const double arrived = forks.arrived.fetch_add(1, std::memory_order_relaxed);
  const double reused = forks.reused.load(std::memory_order_relaxed);
  if (arrived >= kForksRemembered) {
    forks.arrived.store(kForksRemembered / 2, std::memory_order_relaxed);
    forks.reused.store(static_cast<std::uint32_t>(reused / 2), std::memory_order_relaxed);
  }
  const std::uint32_t trait = arrived < kForksMin          ? 0
                              : reused < kRare * arrived   ? 1
                              : reused < kCommon * arrived ? 2
                                                           : 3;
  return NodeTraffic(NodeOrigin::kFork, trait);
}

void RetentionPolicy::BeforeErase(NodeRef ref, bool evicted, std::uint32_t now_seconds) {
  const IndexNode& node = index_.node(ref);
  if (!evicted) return;
  ghosts_.Reserve(kGhostsPerNode * index_.node_count());
  const std::uint32_t idle = node.idle_seconds(now_seconds);
  if (const auto forgotten = ghosts_.Add(node.id, {node.traffic(), now_seconds - idle})) {
    const std::uint32_t age =
        now_seconds > forgotten->last_used_seconds ? now_seconds - forgotten->last_used_seconds : 0;
    reuse_.GivenUp(ReuseModel::CellOf(forgotten->traffic, age), 1);
  }
}

void RetentionPolicy::OnLoaded() {
  for (NodeRef ref = 1; ref < index_.ref_end(); ++ref) {
    if (index_.alive(ref) && index_.node(ref).is_leaf()) leaves_.Add(index_, ref);
  }
}

void RetentionPolicy::Uses::Add(NodeRef ref, std::uint32_t now_seconds) {
  const IndexNode& node = retention_.index_.node(ref);
  const NodeTraffic traffic = node.traffic();
  const ReuseModel::Cell cell = ReuseModel::CellOf(traffic, node.idle_seconds(now_seconds));
  if (cell != cell_) Flush();
  cell_ = cell;
  ++blocks_;
  const bool is_new = traffic.uses() == 0;
  if (is_new && !was_new_ && traffic.origin() == NodeOrigin::kFork) {
    const NodeRef parent = retention_.index_.parent(ref);
    if (parent != 0) retention_.ForksAt(parent).reused.fetch_add(1, std::memory_order_relaxed);
  }
  was_new_ = is_new;
}

void RetentionPolicy::Uses::Flush() {
  if (blocks_ > 0) retention_.reuse_.Reused(cell_, std::exchange(blocks_, 0));
}

void RetentionPolicy::ComputeMeasured(ModelSlot slot, std::uint32_t first_depth,
                                      std::uint32_t last_depth, double seconds_per_token) {
  const auto cost = costs_.find(slot);
  if (cost == costs_.end()) return;
  // Costs grow with depth about linearly, so the mean is that of the two ends.
  const double block_flops =
      (cost->second.BlockFlops(first_depth) + cost->second.BlockFlops(last_depth)) / 2;
  speeds_.Report(slot, seconds_per_token * index_.model(slot).block_tokens / block_flops);
}

double RetentionPolicy::Value(const IndexNode& node, std::uint64_t bytes,
                              std::uint32_t now_seconds) const {
  const auto cost = costs_.find(node.model);
  const double flops = cost != costs_.end() ? cost->second.BlockFlops(node.depth)
                                            : index_.model(node.model).block_tokens;
  return reuse_.UsesPerSecond(node.traffic(), node.idle_seconds(now_seconds)) * flops *
         speeds_.Relative(node.model) / std::max<double>(1, static_cast<double>(bytes)) *
         static_cast<double>(1u << (2 * node.priority));
}

void RetentionPolicy::Learn(std::uint32_t now_seconds) {
  std::vector<ReuseModel::Waiting> waiting;
  const auto take = [&](NodeTraffic traffic, std::uint32_t last_used_seconds, double blocks) {
    const std::uint32_t idle =
        now_seconds > last_used_seconds ? now_seconds - last_used_seconds : 0;
    waiting.push_back({ReuseModel::CellOf(traffic, idle), blocks});
  };
  const auto draw = [this](std::size_t below) {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::size_t>((random_ >> 33) % below);
  };
  for (std::size_t look = 0; look < kWaitingLooks; ++look) {
    const auto ref = static_cast<NodeRef>(1 + draw(std::max<std::size_t>(1, index_.ref_end() - 1)));
    if (!index_.alive(ref)) continue;
    const IndexNode& node = index_.node(ref);
    take(node.traffic(), now_seconds - node.idle_seconds(now_seconds),
         static_cast<double>(index_.ref_end()) / kWaitingLooks);
  }
  for (std::size_t look = 0; ghosts_.size() > 0 && look < kWaitingLooks; ++look) {
    if (const auto ghost = ghosts_.At(draw(ghosts_.place_count()))) {
      take(ghost->traffic, ghost->last_used_seconds,
           static_cast<double>(ghosts_.place_count()) / kWaitingLooks);
    }
  }
  reuse_.Update(waiting);
}

std::vector<NodeRef> RetentionPolicy::ChooseVictims(
    std::uint64_t bytes, std::uint64_t nodes, std::uint32_t now_seconds,
    const std::function<std::uint64_t(const IndexNode&)>& bytes_of,
    const std::function<bool(NodeRef)>& is_held) {
  if (reuse_.WantsUpdate()) Learn(now_seconds);
  struct Candidate {
    double value;
    NodeRef ref;
    bool operator<(const Candidate& other) const {
      return value != other.value ? value > other.value : ref > other.ref;  // the least on top
    }
  };
  std::priority_queue<Candidate> candidates;
  const auto consider = [&](NodeRef ref) {
    if (is_held(ref)) return;
    const IndexNode& node = index_.node(ref);
    candidates.push({Value(node, bytes_of(node), now_seconds), ref});
  };
  std::vector<NodeRef> victims;
  absl::flat_hash_set<NodeRef> chosen;
  // Of parents that lost children: the first one that may still be there.
  absl::flat_hash_map<NodeRef, NodeRef> first_left;
  std::uint64_t total_bytes = 0;
  const auto enough = [&] { return total_bytes >= bytes && victims.size() >= nodes; };
  absl::flat_hash_set<NodeRef> considered;
  std::size_t looks = kLooksMin;
  while (!enough()) {
    if (candidates.empty()) {
      // More than were drawn have to go, or all that were are held.
      const std::size_t before = considered.size();
      for (const NodeRef ref : leaves_.Draw(index_, std::max(looks, kLooksPerVictim * nodes))) {
        if (considered.insert(ref).second) consider(ref);
      }
      looks *= 4;
      if (considered.size() == before && looks > index_.node_count()) break;
      continue;
    }
    const NodeRef ref = candidates.top().ref;
    candidates.pop();
    victims.push_back(ref);
    chosen.insert(ref);
    const IndexNode& node = index_.node(ref);
    total_bytes += bytes_of(node);
    const NodeRef parent = index_.parent(ref);
    if (parent == 0) continue;
    NodeRef& left = first_left.try_emplace(parent, index_.node(parent).first_child).first->second;
    while (left != 0 && chosen.contains(left)) left = index_.node(left).next_sibling;
    if (left == 0) consider(parent);
  }
  return victims;
}

}  // namespace kvtrie
