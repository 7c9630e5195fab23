#include "storage/trie/trie_index.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "absl/strings/str_cat.h"
#include "storage/base/byte_order.h"
#include "storage/base/check.h"
#include "storage/kv/path.h"
#include "storage/trie/surprisal.h"

namespace kvtrie {
namespace {

// How many blocks ahead of the walk memory is asked for: table slot, then node, then tokens.
constexpr std::uint32_t kSlotsAhead = 24;
constexpr std::uint32_t kNodesAhead = 16;
constexpr std::uint32_t kTokensAhead = 8;

static_assert(kPathTokensMax < (1u << 23), "IndexNode::depth holds every depth");

void Keep(const NodeFrames& from, IndexNode* to) {
  to->frame = from.frame;
  to->quality_bits = static_cast<std::uint32_t>(from.quality) & 7u;
  to->codec_bits = static_cast<std::uint8_t>(static_cast<unsigned>(from.codec) & 7u);
  to->other_quality_bits =
      from.other_quality
          ? static_cast<std::uint8_t>(static_cast<unsigned>(*from.other_quality) & 7u)
          : std::uint8_t{0};
}

Provenance ProvenanceOf(const IndexNode& node) {
  return node.on_lossy != 0 ? Provenance::kOnLossy : Provenance::kExact;
}

}  // namespace

std::optional<ModelSlot> TrieIndex::AddModel(TenantId tenant, const ModelId& model,
                                             std::uint32_t block_tokens) {
  const auto found = model_slots_.find({tenant, model});
  if (found != model_slots_.end()) {
    if (block_tokens != 0) models_[found->second].block_tokens = block_tokens;
    return found->second;
  }
  if (models_.size() >= std::numeric_limits<ModelSlot>::max()) return std::nullopt;
  const auto slot = static_cast<ModelSlot>(models_.size());
  models_.push_back({.tenant = tenant, .model = model, .block_tokens = block_tokens});
  model_slots_.emplace(std::pair(tenant, model), slot);
  return slot;
}

std::optional<ModelSlot> TrieIndex::FindModel(TenantId tenant, const ModelId& model) const {
  const auto found = model_slots_.find({tenant, model});
  if (found == model_slots_.end()) return std::nullopt;
  return found->second;
}

std::uint32_t TrieIndex::IdHash(const TrieNodeId& id) {
  return LoadLittle<std::uint32_t>(id.bytes.data());  // ids are uniform
}

bool TrieIndex::Matches(NodeRef ref, NodeRef parent_link, Provenance provenance,
                        std::string_view salt, std::string_view extra_key,
                        std::span<const TokenId> tokens, bool* verified) const {
  const IndexNode& candidate = node(ref);
  if (candidate.parent != parent_link || ProvenanceOf(candidate) != provenance) return false;
  const bool wants_extra = !salt.empty() || !extra_key.empty();
  if (wants_extra != (candidate.has_extra != 0)) return false;
  if (wants_extra) {
    const Extra& extra = extras_.find(ref)->second;
    if (extra.salt != salt || extra.extra_key != extra_key) return false;
  }
  *verified = candidate.token_slot != 0;
  if (!*verified) return true;
  const auto stored = tokens_.Get(tokens.size(), candidate.token_slot);
  return std::equal(stored.begin(), stored.end(), tokens.begin(), tokens.end());
}

NodeRef TrieIndex::FindEdge(std::uint32_t edge_hash, NodeRef parent_link, Provenance provenance,
                            std::string_view salt, std::string_view extra_key,
                            std::span<const TokenId> tokens, bool* verified) const {
  return edges_.Find(edge_hash, [&](NodeRef ref) {
    return node(ref).edge_hash == edge_hash &&
           Matches(ref, parent_link, provenance, salt, extra_key, tokens, verified);
  });
}

NodeRef TrieIndex::FindChild(ModelSlot slot, NodeRef parent, const HashedPath& path,
                             std::uint32_t block, std::uint64_t hash, Provenance provenance,
                             bool* verified) const {
  const NodeRef parent_link = parent != 0 ? parent : (IndexNode::kRootBit | slot);
  const std::string_view salt = parent == 0 ? path.salt() : std::string_view();
  return FindEdge(EdgeHash(hash), parent_link, provenance, salt, path.extra_key(block),
                  path.tokens(block), verified);
}

void TrieIndex::PrefetchNode(std::uint32_t edge_hash) const {
  if (const NodeRef guess = edges_.Guess(edge_hash); guess != 0) {
    const auto* at = reinterpret_cast<const char*>(&node(guess));
    __builtin_prefetch(at);
    __builtin_prefetch(at + sizeof(IndexNode) - 1);
  }
}

void TrieIndex::PrefetchTokens(std::uint32_t edge_hash) const {
  if (const NodeRef guess = edges_.Guess(edge_hash); guess != 0) {
    const IndexNode& ahead = node(guess);
    if (ahead.token_slot == 0) return;
    __builtin_prefetch(tokens_.Get(models_[ahead.model].block_tokens, ahead.token_slot).data());
  }
}

WalkResult TrieIndex::Walk(ModelSlot slot, const PathHasher& hasher, const HashedPath& path,
                           Quality min_quality, std::uint32_t now_seconds) const {
  WalkResult result;
  const std::uint32_t block_count = path.block_count();
  const auto step = [&](NodeRef parent, std::uint32_t block, std::uint64_t hash,
                        Provenance provenance, bool* verified) -> NodeRef {
    const NodeRef ref = FindChild(slot, parent, path, block, hash, provenance, verified);
    if (ref == 0) return 0;
    const IndexNode& found = node(ref);
    return found.any_serves(min_quality) && !found.expired(now_seconds) ? ref : 0;
  };

  for (std::uint32_t block = 0; block < std::min(kSlotsAhead, block_count); ++block) {
    edges_.Prefetch(EdgeHash(path.hash(block)));
  }
  for (std::uint32_t block = 0; block < block_count; ++block) {
    if (block + kSlotsAhead < block_count)
      edges_.Prefetch(EdgeHash(path.hash(block + kSlotsAhead)));
    if (block + kNodesAhead < block_count) PrefetchNode(EdgeHash(path.hash(block + kNodesAhead)));
    if (block + kTokensAhead < block_count)
      PrefetchTokens(EdgeHash(path.hash(block + kTokensAhead)));
    bool verified = false;
    const NodeRef parent = block == 0 ? 0 : result.refs.back();
    const NodeRef ref = step(parent, block, path.hash(block), Provenance::kExact, &verified);
    if (ref == 0) break;
    result.refs.push_back(ref);
    if (!verified) result.unverified.push_back(block);
  }
  if (min_quality == Quality::kExact || models_[slot].lossy_node_count == 0) return result;

  // A lossy branch may leave the exact path anywhere on it.
  WalkResult best = result;
  for (std::uint32_t from = 0; from <= result.refs.size() && from < block_count; ++from) {
    WalkResult branch;
    branch.refs.assign(result.refs.begin(), result.refs.begin() + from);
    for (const std::uint32_t block : result.unverified) {
      if (block < from) branch.unverified.push_back(block);
    }
    std::uint64_t hash = path.hash_above(from);
    for (std::uint32_t block = from; block < block_count; ++block) {
      hash = hasher.Extend(hash, Provenance::kOnLossy, path.extra_key(block), path.tokens(block));
      bool verified = false;
      const NodeRef parent = block == 0 ? 0 : branch.refs.back();
      const NodeRef ref = step(parent, block, hash, Provenance::kOnLossy, &verified);
      if (ref == 0) break;
      branch.refs.push_back(ref);
      if (!verified) branch.unverified.push_back(block);
    }
    if (branch.refs.size() > best.refs.size()) best = std::move(branch);
  }
  return best;
}

NodeRef TrieIndex::FindById(const TrieNodeId& id) const {
  return ids_.Find(IdHash(id), [&](NodeRef ref) { return node(ref).id == id; });
}

NodeRef TrieIndex::AllocateRef() {
  if (free_ref_ != 0) {
    const NodeRef ref = free_ref_;
    free_ref_ = node(ref).parent;
    mutable_node(ref) = IndexNode{};
    return ref;
  }
  KV_CHECK(ref_end_ < IndexNode::kRootBit);
  if (ref_end_ / kChunkNodes >= chunks_.size()) {
    chunks_.push_back(std::make_unique<IndexNode[]>(kChunkNodes));
  }
  return ref_end_++;
}

NodeRef TrieIndex::InsertUnlinked(const NewNode& from) {
  const NodeRef ref = AllocateRef();
  IndexNode& to = mutable_node(ref);
  to.id = from.id;
  to.alive = 1;
  to.model = from.model;
  to.edge_hash = EdgeHash(from.path_hash);
  Keep(from.frames, &to);
  to.on_lossy = from.provenance == Provenance::kOnLossy ? 1 : 0;
  to.last_used_seconds = from.last_used_seconds;
  to.traffic_bits = from.traffic.bits();
  to.expires_seconds = from.expires_seconds;
  to.priority = from.priority & 15u;
  to.is_known = from.block_surprisal_bits > 0 ? 1 : 0;
  to.path_is_known = to.is_known;
  // Of the block alone, until it is linked.
  to.surprisal_bits =
      to.is_known != 0 ? from.block_surprisal_bits : EstimatedSurprisalBits(from.tokens.size());
  to.depth = from.depth & 0x3fffffu;
  if (!from.salt.empty() || !from.extra_key.empty()) {
    to.has_extra = 1;
    extras_.emplace(ref, Extra{std::string(from.salt), std::string(from.extra_key)});
    extra_bytes_ += from.salt.size() + from.extra_key.size();
  }
  edges_.Insert(to.edge_hash, ref, [this](NodeRef r) { return node(r).edge_hash; });
  ids_.Insert(IdHash(to.id), ref, [this](NodeRef r) { return IdHash(node(r).id); });
  CacheTokens(ref, from.tokens);

  ModelRoot& root = models_[from.model];
  ++root.node_count;
  root.frame_count += to.has_frame() ? 1 : 0;
  root.other_frame_count += to.has_other() ? 1 : 0;
  root.codable_node_count += to.may_be_coded() ? 1 : 0;
  root.lossy_node_count += to.on_lossy;
  root.record_bytes += to.frame.record_bytes;
  ++node_count_;
  return ref;
}

void TrieIndex::LinkChild(NodeRef ref, NodeRef parent_link) {
  IndexNode& child = mutable_node(ref);
  child.parent = parent_link;
  NodeRef& first = (parent_link & IndexNode::kRootBit) != 0 ? models_[child.model].first_child
                                                            : mutable_node(parent_link).first_child;
  child.next_sibling = first;
  if (first != 0) mutable_node(first).previous_sibling = ref;
  first = ref;
}

void TrieIndex::Link(NodeRef ref, NodeRef parent) {
  LinkChild(ref, parent != 0 ? parent : (IndexNode::kRootBit | node(ref).model));
}

void TrieIndex::AddSurprisalAbove(NodeRef ref, NodeRef parent) {
  IndexNode& below = mutable_node(ref);
  below.surprisal_bits += node(parent).surprisal_bits;
  below.path_is_known = below.is_known & node(parent).path_is_known;
}

void TrieIndex::FinishLoading() {
  std::vector<NodeRef> stack;
  for (const ModelRoot& root : models_) {
    for (NodeRef child = root.first_child; child != 0; child = node(child).next_sibling) {
      stack.push_back(child);
    }
  }
  while (!stack.empty()) {
    const NodeRef up = stack.back();
    stack.pop_back();
    for (NodeRef child = node(up).first_child; child != 0; child = node(child).next_sibling) {
      AddSurprisalAbove(child, up);
      stack.push_back(child);
    }
  }
}

NodeRef TrieIndex::Insert(const NewNode& from) {
  NewNode placed = from;
  if (from.parent != 0) {
    const IndexNode& up = node(from.parent);
    KV_CHECK(up.alive != 0 && up.model == from.model);
    placed.depth = up.depth + 1;
  } else {
    placed.depth = 1;
  }
  const NodeRef ref = InsertUnlinked(placed);
  if (from.parent != 0) AddSurprisalAbove(ref, from.parent);
  Link(ref, from.parent);
  return ref;
}

void TrieIndex::Erase(NodeRef ref) {
  IndexNode& gone = mutable_node(ref);
  KV_CHECK(gone.alive != 0);
  KV_CHECK(gone.is_leaf());
  ModelRoot& root = models_[gone.model];
  if (gone.previous_sibling != 0) {
    mutable_node(gone.previous_sibling).next_sibling = gone.next_sibling;
  } else if ((gone.parent & IndexNode::kRootBit) != 0) {
    root.first_child = gone.next_sibling;
  } else if (gone.parent != 0) {
    mutable_node(gone.parent).first_child = gone.next_sibling;
  }
  if (gone.next_sibling != 0) {
    mutable_node(gone.next_sibling).previous_sibling = gone.previous_sibling;
  }
  edges_.Erase(gone.edge_hash, ref);
  ids_.Erase(IdHash(gone.id), ref);
  if (gone.token_slot != 0) tokens_.Erase(root.block_tokens, gone.token_slot);
  if (gone.has_extra != 0) {
    const auto extra = extras_.find(ref);
    extra_bytes_ -= extra->second.salt.size() + extra->second.extra_key.size();
    extras_.erase(extra);
  }
  if (gone.name_bits == kNameBitsMax) many_names_.erase(ref);
  --root.node_count;
  root.frame_count -= gone.has_frame() ? 1 : 0;
  root.other_frame_count -= gone.has_other() ? 1 : 0;
  root.codable_node_count -= gone.may_be_coded() ? 1 : 0;
  root.lossy_node_count -= gone.on_lossy;
  root.record_bytes -= gone.frame.record_bytes;
  --node_count_;
  gone = IndexNode{};
  gone.parent = free_ref_;
  free_ref_ = ref;
}

void TrieIndex::SetFrames(NodeRef ref, const NodeFrames& frames) {
  IndexNode& changed = mutable_node(ref);
  ModelRoot& root = models_[changed.model];
  root.record_bytes -= changed.frame.record_bytes;
  root.frame_count -= changed.has_frame() ? 1 : 0;
  root.other_frame_count -= changed.has_other() ? 1 : 0;
  root.codable_node_count -= changed.may_be_coded() ? 1 : 0;
  Keep(frames, &changed);
  changed.not_codable = 0;
  root.record_bytes += changed.frame.record_bytes;
  root.frame_count += changed.has_frame() ? 1 : 0;
  root.other_frame_count += changed.has_other() ? 1 : 0;
  root.codable_node_count += changed.may_be_coded() ? 1 : 0;
}

void TrieIndex::MarkNotCodable(NodeRef ref) {
  IndexNode& changed = mutable_node(ref);
  models_[changed.model].codable_node_count -= changed.may_be_coded() ? 1 : 0;
  changed.not_codable = 1;
}

void TrieIndex::SetRetention(NodeRef ref, std::uint32_t expires_seconds, std::uint32_t priority) {
  IndexNode& changed = mutable_node(ref);
  changed.expires_seconds = expires_seconds;
  changed.priority = priority & 15u;
}

std::uint32_t TrieIndex::name_count(NodeRef ref) const {
  const std::uint32_t bits = node(ref).name_bits;
  return bits < kNameBitsMax ? bits : many_names_.find(ref)->second;
}

void TrieIndex::SetNameCount(NodeRef ref, std::uint32_t count) {
  IndexNode& named = mutable_node(ref);
  if (count >= kNameBitsMax) {
    many_names_[ref] = count;
  } else if (named.name_bits == kNameBitsMax) {
    many_names_.erase(ref);
  }
  named.name_bits = static_cast<std::uint8_t>(std::min(count, kNameBitsMax) & 127u);
}

void TrieIndex::CacheTokens(NodeRef ref, std::span<const TokenId> tokens) {
  IndexNode& owner = mutable_node(ref);
  // Tokens of a model that is not registered yet would lie in a pool that nobody can name.
  if (owner.token_slot != 0 || tokens.size() != models_[owner.model].block_tokens) return;
  owner.token_slot = tokens_.Insert(
      tokens, ref, [this](NodeRef evicted) { mutable_node(evicted).token_slot = 0; });
}

std::span<const TokenId> TrieIndex::CachedTokens(NodeRef ref) const {
  const IndexNode& owner = node(ref);
  if (owner.token_slot == 0) return {};
  return tokens_.Get(models_[owner.model].block_tokens, owner.token_slot);
}

std::string_view TrieIndex::extra_key(NodeRef ref) const {
  const auto found = extras_.find(ref);
  return found == extras_.end() ? std::string_view() : found->second.extra_key;
}

std::string_view TrieIndex::salt(NodeRef ref) const {
  const auto found = extras_.find(ref);
  return found == extras_.end() ? std::string_view() : found->second.salt;
}

void TrieIndex::Touch(NodeRef ref, std::uint32_t now_seconds) const {
  // Only these two fields change under a shared lock, and a lost count does no harm.
  auto& touched = const_cast<IndexNode&>(node(ref));
  const NodeTraffic used = touched.traffic().Used(touched.idle_seconds(now_seconds));
  std::atomic_ref<std::uint32_t>(touched.traffic_bits)
      .store(used.bits(), std::memory_order_relaxed);
  std::atomic_ref<std::uint32_t>(touched.last_used_seconds)
      .store(now_seconds, std::memory_order_relaxed);
}

std::size_t TrieIndex::memory_bytes() const {
  return chunks_.size() * kChunkNodes * sizeof(IndexNode) + edges_.memory_bytes() +
         ids_.memory_bytes() + extra_bytes_ +
         extras_.capacity() * (sizeof(NodeRef) + sizeof(Extra) + 1) +
         many_names_.capacity() * (2 * sizeof(std::uint32_t) + 1) +
         models_.capacity() * sizeof(ModelRoot);
}

absl::Status TrieIndex::CheckInvariants() const {
  const auto fault = [](NodeRef ref, std::string_view what) {
    return absl::InternalError(absl::StrCat("trie node ", ref, ": ", std::string(what)));
  };
  std::vector<ModelRoot> sums(models_.size());
  std::size_t alive_count = 0;
  for (NodeRef ref = 1; ref < ref_end_; ++ref) {
    const IndexNode& at = node(ref);
    if (at.alive == 0) continue;
    ++alive_count;
    if (at.model >= models_.size()) return fault(ref, "names a model that is not there");
    ModelRoot& sum = sums[at.model];
    ++sum.node_count;
    sum.frame_count += at.has_frame() ? 1 : 0;
    sum.other_frame_count += at.has_other() ? 1 : 0;
    sum.codable_node_count += at.may_be_coded() ? 1 : 0;
    sum.lossy_node_count += at.on_lossy;
    sum.record_bytes += at.frame.record_bytes;
    if ((at.parent & IndexNode::kRootBit) != 0) {
      if (at.depth != 1) return fault(ref, "is a first block of depth other than 1");
      if (at.previous_sibling == 0 && models_[at.model].first_child != ref) {
        return fault(ref, "is not in its model's list");
      }
    } else {
      if (!alive(at.parent)) return fault(ref, "has no parent");
      const IndexNode& up = node(at.parent);
      if (up.depth + 1 != at.depth) return fault(ref, "has a depth that is not its parent's + 1");
      if (up.model != at.model) return fault(ref, "belongs to another model than its parent");
      if (up.on_lossy != 0 && at.on_lossy == 0) return fault(ref, "is exact on lossy KV");
      if (at.previous_sibling == 0 && up.first_child != ref) {
        return fault(ref, "is not in its parent's list");
      }
    }
    if (at.next_sibling != 0 &&
        (!alive(at.next_sibling) || node(at.next_sibling).previous_sibling != ref ||
         node(at.next_sibling).parent != at.parent)) {
      return fault(ref, "has a broken sibling link");
    }
    if (at.previous_sibling != 0 &&
        (!alive(at.previous_sibling) || node(at.previous_sibling).next_sibling != ref)) {
      return fault(ref, "has a broken sibling link back");
    }
    if (at.first_child != 0 && (!alive(at.first_child) || node(at.first_child).parent != ref)) {
      return fault(ref, "has a first child that is not its own");
    }
    if (edges_.Find(at.edge_hash, [ref](NodeRef found) { return found == ref; }) != ref) {
      return fault(ref, "is not found by its edge");
    }
    if (FindById(at.id) != ref) return fault(ref, "is not found by its id");
    if (at.has_frame() && (!IsQuality(at.quality()) || !IsCodec(at.codec()))) {
      return fault(ref, "has a frame of no quality or codec");
    }
    if (at.has_other() && (!at.has_frame() || !IsQuality(at.other_quality()))) {
      return fault(ref, "has another frame without a first, or of no quality");
    }
    if ((at.has_extra != 0) != extras_.contains(ref)) return fault(ref, "has lost its extra key");
    if ((at.name_bits == kNameBitsMax) != many_names_.contains(ref)) {
      return fault(ref, "has lost its names");
    }
  }
  if (alive_count != node_count_) return absl::InternalError("trie: node count is off");
  if (edges_.size() != node_count_ || ids_.size() != node_count_) {
    return absl::InternalError("trie: a table holds more than the nodes");
  }
  for (std::size_t slot = 0; slot < models_.size(); ++slot) {
    if (sums[slot].node_count != models_[slot].node_count ||
        sums[slot].frame_count != models_[slot].frame_count ||
        sums[slot].other_frame_count != models_[slot].other_frame_count ||
        sums[slot].codable_node_count != models_[slot].codable_node_count ||
        sums[slot].lossy_node_count != models_[slot].lossy_node_count ||
        sums[slot].record_bytes != models_[slot].record_bytes) {
      return absl::InternalError("trie: the sums of a model are off");
    }
  }
  return absl::OkStatus();
}

}  // namespace kvtrie
