#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"
#include "storage/engine/trie_put_session.h"
#include "storage/meta/meta_keys.h"

namespace kvtrie {

static_assert(kRungReferencesMax == kReferencesMax, "a row holds what a frame may name");

namespace {

// Other places in which a text stands before it is worth a reference. One costs about what three
// blocks at the level cost that are coded alone, and a block that is coded against it next to
// nothing (QUALITY.md): with three places in all, it is paid for.
constexpr std::uint32_t kPlacesOfReferences = 2;
// What one round of maintenance may spend on coding members anew: syncs wait for it.
constexpr std::chrono::milliseconds kDetachTimePerRound{250};

std::string CodedAgainst(std::uint32_t block, const TrieNodeId& reference) {
  return absl::StrCat("block ", block, ": it was coded against block ", reference.ToHex());
}

// To the writer of a block, who can do without.
absl::Status RefuseReference(std::uint32_t block, const TrieNodeId& reference,
                             absl::string_view why) {
  return absl::FailedPreconditionError(
      absl::StrCat(CodedAgainst(block, reference), ", ", why, "; code it again without"));
}

bool IsFiner(Quality quality, Quality than) { return IsAtLeast(quality, than) && quality != than; }

}  // namespace

void Engine::Core::CountFrame(NodeRef ref, const RungRow& rung) {
  const IndexNode& node = index_.node(ref);
  census_.Add(node.model, rung);
  references_.Add(node.id, rung.references);
}

void Engine::Core::UncountFrame(NodeRef ref, const RungRow& rung) {
  const IndexNode& node = index_.node(ref);
  census_.Remove(node.model, rung);
  if (rung.codec == CodecId::kReferenced && rung.references.empty()) {
    references_.Forget(node.id);  // its row could not be read
  } else {
    references_.Remove(node.id, rung.references);
  }
}

void Engine::Core::CheckCodedAgainst(const TriePutSession& session,
                                     std::span<const MemberToCheck> members) {
  struct Known {
    std::optional<std::uint32_t> first_position;  // none: it is not stored any more
    bool is_member = false;
    std::vector<TokenId> tokens;
    std::optional<KvDigest> digest;
  };
  std::map<TrieNodeId, Known> references;
  for (const MemberToCheck& member : members) {
    for (const FrameReference& reference : member.table->references) {
      references.try_emplace(reference.node);
    }
  }
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    for (auto& [node, known] : references) {
      if (const NodeRef ref = index_.FindById(node); ref != 0) {
        known.first_position = (index_.node(ref).depth - 1) * session.block_tokens;
        known.is_member = references_.IsMember(node);
      }
    }
  }
  std::vector<StoredFrame> unread;
  for (const OfferedReference& offered : *session.references) {
    const auto found = references.find(offered.node);
    if (found == references.end() || !found->second.first_position) continue;
    Known& known = found->second;
    if (auto tokens = TokensOf(offered.node, session.model); tokens.ok()) {
      known.tokens = *std::move(tokens);
    }
    known.digest = reference_digests_.Find(offered.at);
    if (known.digest) continue;
    for (const StoredFrame& frame : FramesToReference(offered.node)) {
      if (frame.at == offered.at) unread.push_back(frame);
    }
  }
  // Bounds the raw KV that is in memory at a time.
  constexpr std::size_t kReadAtOnce = 8;
  for (std::size_t begin = 0; begin < unread.size(); begin += kReadAtOnce) {
    const auto part =
        std::span(unread).subspan(begin, std::min(kReadAtOnce, unread.size() - begin));
    const std::vector<absl::StatusOr<LoadedFrame>> raw = ReadRawNow(part);
    for (std::size_t i = 0; i < part.size(); ++i) {
      if (!raw[i].ok()) continue;
      const KvDigest digest = DigestOfKv(raw[i]->view.body());
      references[part[i].node].digest = digest;
      absl::ReaderMutexLock lock(&index_mutex_);
      const NodeRef ref = index_.FindById(part[i].node);
      if (ref != 0 && index_.node(ref).has_frame() &&
          LocationOf(index_.node(ref).frame) == part[i].at) {
        reference_digests_.Add(part[i].at, digest);
      }
    }
  }

  const auto fault = [&](const MemberToCheck& member) -> absl::Status {
    const std::uint32_t block = member.item->block;
    const std::span<const TokenId> tokens = session.tokens_of(block);
    for (const FrameReference& reference : member.table->references) {
      const Known& known = references[reference.node];
      if (known.is_member) {
        return RefuseReference(block, reference.node, "which was itself coded against others");
      }
      if (!known.first_position || known.tokens.empty() || !known.digest) {
        return RefuseReference(block, reference.node, "which is not stored so any more");
      }
      if (reference.first_position != *known.first_position) {
        return absl::InvalidArgumentError(
            absl::StrCat(CodedAgainst(block, reference.node), " as if that began at position ",
                         reference.first_position, "; it begins at ", *known.first_position));
      }
      if (reference.digest != *known.digest) {
        return absl::FailedPreconditionError(
            absl::StrCat(CodedAgainst(block, reference.node),
                         ", whose KV is another one here; fetch it again, or code without"));
      }
    }
    for (const ReferenceRun& run : member.table->runs) {
      const FrameReference& reference = member.table->references[run.reference];
      const auto there = std::span<const TokenId>(references[reference.node].tokens)
                             .subspan(run.offset, run.token_count);
      if (!std::ranges::equal(tokens.subspan(run.first_token, run.token_count), there)) {
        return absl::InvalidArgumentError(absl::StrCat(CodedAgainst(block, reference.node),
                                                       " from token ", run.first_token,
                                                       " on, where that has others"));
      }
    }
    return absl::OkStatus();
  };
  for (const MemberToCheck& member : members) member.item->failure = fault(member);
}

absl::Status Engine::Core::CheckReferences(const PublishItem& item) {
  if (item.rung.references.empty()) return absl::OkStatus();
  const TriePutSession& session = *item.session;
  const TrieNodeId& own = session.blocks[item.block].id;
  const auto refuse = [&item](const RungReference& reference, absl::string_view why) {
    return RefuseReference(item.block, reference.node, why);
  };
  for (const RungReference& reference : item.rung.references) {
    const auto offered = std::find_if(
        session.references->begin(), session.references->end(),
        [&reference](const OfferedReference& other) { return other.node == reference.node; });
    const PayloadLocation at = LocationOn(reference.node, reference.rung);
    if (!at || at != offered->at) return refuse(reference, "which is not stored so any more");
  }
  absl::ReaderMutexLock lock(&index_mutex_);
  for (const RungReference& reference : item.rung.references) {
    const NodeRef ref = index_.FindById(reference.node);
    if (ref == 0 || index_.node(ref).model != session.slot ||
        index_.node(ref).expired(NowSeconds())) {
      return refuse(reference, "which is not stored any more");
    }
    if (leaving_.contains(reference.node)) return refuse(reference, "which is being deleted");
    if (references_.IsMember(reference.node)) {
      return refuse(reference, "which was itself coded against others");
    }
    if (reference.node == own) return refuse(reference, "which is the block itself");
  }
  if (references_.IsReferenced(own)) {
    return absl::FailedPreconditionError(
        absl::StrCat("block ", item.block,
                     ": others were coded against it, so that it cannot be coded against others; "
                     "code it again without"));
  }
  return absl::OkStatus();
}

PayloadLocation Engine::Core::LocationOn(const TrieNodeId& node, Rung rung) {
  TenantId tenant;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    const NodeRef ref = index_.FindById(node);
    if (ref == 0 || !index_.node(ref).has_frame()) return {};
    if (RungOf(index_.node(ref).codec()) == rung) return LocationOf(index_.node(ref).frame);
    if (!index_.node(ref).has_other()) return {};
    tenant = index_.model(index_.node(ref).model).tenant;
  }
  const auto row = ReadRow(tenant, node);
  const RungRow* const of_rung = row.ok() ? row->FindRung(rung) : nullptr;
  return of_rung == nullptr ? PayloadLocation{} : LocationOf(*of_rung);
}

// Frames of a node that others may have been coded against.
std::vector<StoredFrame> Engine::Core::FramesToReference(const TrieNodeId& node) {
  StoredFrame in_index;
  TenantId tenant;
  bool has_other;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    const NodeRef ref = index_.FindById(node);
    if (ref == 0 || !index_.node(ref).has_frame()) return {};
    in_index = FrameInIndex(index_.node(ref));
    has_other = index_.node(ref).has_other();
    tenant = index_.model(index_.node(ref).model).tenant;
  }
  std::vector<StoredFrame> frames;
  if (in_index.codec != CodecId::kReferenced) frames.push_back(in_index);
  if (!has_other) return frames;
  const auto row = ReadRow(tenant, node);
  if (!row.ok()) return frames;
  for (const RungRow& rung : row->rungs) {
    if (LocationOf(rung) == in_index.at || rung.codec == CodecId::kReferenced) continue;
    frames.push_back(FrameInRow(node, *row, rung, in_index.raw_frame_bytes));
  }
  return frames;
}

Engine::Core::DecodedReferences Engine::Core::DecodeReferences(
    const ModelId& model, std::span<const FrameReference> wanted) {
  DecodedReferences decoded;
  std::map<std::pair<TrieNodeId, KvDigest>, std::vector<StoredFrame>> candidates;
  for (const FrameReference& reference : wanted) {
    const auto [found, is_new] = candidates.try_emplace({reference.node, reference.digest});
    if (is_new) found->second = FramesToReference(reference.node);
  }
  // Nearly always the first frame of a node is the one: all of those are read together.
  for (std::size_t attempt = 0; !candidates.empty(); ++attempt) {
    std::vector<StoredFrame> frames;
    std::vector<std::pair<TrieNodeId, KvDigest>> keys;
    for (auto at = candidates.begin(); at != candidates.end();) {
      if (attempt >= at->second.size()) {
        at = candidates.erase(at);
        continue;
      }
      frames.push_back(at->second[attempt]);
      keys.push_back(at->first);
      ++at;
    }
    std::vector<absl::StatusOr<LoadedFrame>> raw = ReadRawNow(frames);
    for (std::size_t i = 0; i < frames.size(); ++i) {
      if (!raw[i].ok() || DigestOfKv(raw[i]->view.body()) != keys[i].second) continue;
      auto tokens = TokensOf(keys[i].first, model);
      if (!tokens.ok()) continue;
      decoded.emplace(keys[i], DecodedReference{*std::move(tokens), *std::move(raw[i])});
      candidates.erase(keys[i]);
    }
  }
  return decoded;
}

// What is coded against another inherits its error, so that one is finer. Exact frames are the
// first to go when space is needed, so they are none.
bool Engine::Core::MayBeReference(NodeRef ref, Quality quality) const {
  const IndexNode& node = index_.node(ref);
  return node.has_frame() && node.codec() == CodecId::kResidual &&
         IsFiner(node.quality(), quality) && !node.expired(NowSeconds()) &&
         !leaving_.contains(node.id);
}

void Engine::Core::AddRun(const TextRun& run, std::span<const NodeRef> own_path,
                          std::uint32_t block_tokens,
                          std::map<std::uint32_t, BlockReferences>* references) const {
  std::uint32_t count = 0;
  for (std::uint32_t at = 0; at < run.token_count; at += count) {
    const std::uint32_t token = run.first_token + at;
    const std::uint32_t block = token / block_tokens;
    const std::uint32_t there = run.offset + at;
    // To the end of the run, of the block, or of the reference's block.
    count = std::min({run.token_count - at, (block + 1) * block_tokens - token,
                      block_tokens - there % block_tokens});
    // A reference of others stays as it is.
    if (block < own_path.size() && references_.IsReferenced(index_.node(own_path[block]).id)) {
      continue;
    }
    BlockReferences& of_block = (*references)[block];
    const TrieNodeId& id = index_.node(run.nodes[there / block_tokens]).id;
    const auto known = std::find(of_block.nodes.begin(), of_block.nodes.end(), id);
    const auto number = static_cast<std::uint16_t>(known - of_block.nodes.begin());
    if (known == of_block.nodes.end()) {
      if (of_block.nodes.size() == kReferencesMax) continue;
      of_block.nodes.push_back(id);
    }
    of_block.runs.push_back({.first_token = static_cast<std::uint16_t>(token % block_tokens),
                             .token_count = static_cast<std::uint16_t>(count),
                             .reference = number,
                             .offset = static_cast<std::uint16_t>(there % block_tokens)});
  }
}

void Engine::Core::SearchRuns(
    const StoredPath& path, std::span<const TokenId> tokens, std::uint32_t first_block,
    bool all_places, const std::function<bool(NodeRef)>& usable,
    const std::function<void(std::span<const TextRun>, std::span<const NodeRef>)>& take) {
  const std::vector<ExtraKey> extra_keys = path.ExtraKeys();
  RunQuery query{.space = TextSpaceOf(path.tenant, path.model, path.salt),
                 .salt = path.salt,
                 .tokens = tokens,
                 .extra_keys = extra_keys,
                 .first_token = first_block * path.registered->spec.block_tokens,
                 .usable = usable};
  RunFindings found;
  SearchInRounds(
      path.tenant, kSearchReadsMax, [&](bool is_last) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
        const auto slot = index_.FindModel(path.tenant, path.model);
        if (!slot) return std::span<const NodeRef>();
        query.model = *slot;
        std::vector<NodeRef> own_path;
        for (const TrieNodeId& node : path.nodes) {
          const NodeRef ref = index_.FindById(node);
          if (ref == 0) return std::span<const NodeRef>();
          own_path.push_back(ref);
        }
        query.own_path = own_path;
        found = all_places ? runs_->FindMaximalRuns(index_, query) : runs_->FindRuns(index_, query);
        if (!found.unread.empty() && !is_last) return std::span<const NodeRef>(found.unread);
        take(found.runs, own_path);
        return std::span<const NodeRef>();
      });
}

std::map<std::uint32_t, BlockReferences> Engine::Core::FindReferences(
    const StoredPath& path, std::span<const TokenId> tokens, std::uint32_t first_block,
    Quality quality) {
  std::map<std::uint32_t, BlockReferences> references;
  SearchRuns(
      path, tokens, first_block, /*all_places=*/false,
      [&](NodeRef ref)
          ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) { return MayBeReference(ref, quality); },
      [&](std::span<const TextRun> runs, std::span<const NodeRef> own_path)
          ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
            for (const TextRun& run : runs) {
              AddRun(run, own_path, path.registered->spec.block_tokens, &references);
            }
          });
  for (auto& [block, of_block] : references) {
    std::sort(
        of_block.runs.begin(), of_block.runs.end(),
        [](const ReferenceRun& a, const ReferenceRun& b) { return a.first_token < b.first_token; });
  }
  return references;
}

Engine::Core::RepeatedText Engine::Core::FindRepeated(const StoredPath& path,
                                                      std::span<const TokenId> tokens,
                                                      std::uint32_t first_block,
                                                      std::uint32_t places_min) {
  const std::uint32_t block_tokens = path.registered->spec.block_tokens;
  RepeatedText repeated;
  SearchRuns(
      path, tokens, first_block, /*all_places=*/true,
      [&](NodeRef ref) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
        return index_.node(ref).has_frame() && !index_.node(ref).expired(NowSeconds());
      },
      [&](std::span<const TextRun> runs, std::span<const NodeRef>)
          ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
            // The blocks of which a run holds more than half.
            const auto blocks_of = [block_tokens](const TextRun& run) {
              const auto holds = [&](std::uint32_t block) {
                const std::uint32_t begin = std::max(run.first_token, block * block_tokens);
                const std::uint32_t end = std::min(run.end(), (block + 1) * block_tokens);
                return 2 * (end - begin) > block_tokens;
              };
              std::uint32_t begin = run.first_token / block_tokens;
              std::uint32_t end = (run.end() + block_tokens - 1) / block_tokens;
              if (begin < end && !holds(begin)) ++begin;
              if (begin < end && !holds(end - 1)) --end;
              return std::pair(begin, end);
            };
            std::map<std::uint32_t, std::uint32_t> places;  // by block
            for (const TextRun& run : runs) {
              const auto [begin, end] = blocks_of(run);
              for (std::uint32_t block = begin; block < end; ++block) ++places[block];
            }
            for (const auto& [block, count] : places) {
              if (count >= places_min) repeated.blocks.insert(block);
            }
            absl::flat_hash_set<NodeRef> known;
            for (const TextRun& run : runs) {
              const auto [begin, end] = blocks_of(run);
              const auto first = repeated.blocks.lower_bound(begin);
              if (first == repeated.blocks.end() || *first >= end) continue;
              for (const NodeRef node : run.nodes) {
                if (known.insert(node).second) repeated.elsewhere.push_back(index_.node(node).id);
              }
            }
          });
  return repeated;
}

CodingPlan Engine::Core::PlanCoding(const StoredPath& path, std::span<const TokenId> tokens,
                                    std::uint32_t first_block, const ProfileId& profile,
                                    Quality level, bool may_refine) {
  CodingPlan plan{.level = level, .references = {}, .finer_blocks = {}, .elsewhere = {}};
  const auto info = profiles_->Find(profile);
  if (!info || !codec_->CodesDifferences(path.registered->spec, profile, *profiles_)) return plan;
  plan.references = FindReferences(path, tokens, first_block, level);
  if (!may_refine) return plan;

  const ProfileLevel* finer = nullptr;  // the next one
  for (const ProfileLevel& other : info->header.levels) {
    if (!IsFiner(other.quality, level)) continue;
    if (finer == nullptr || IsAtLeast(finer->quality, other.quality)) finer = &other;
  }
  if (finer == nullptr) return plan;
  plan.finer_level = finer->quality;
  RepeatedText repeated = FindRepeated(path, tokens, first_block, kPlacesOfReferences);
  plan.finer_blocks = std::move(repeated.blocks);
  plan.elsewhere = std::move(repeated.elsewhere);
  for (const auto& [block, references] : plan.references) plan.finer_blocks.erase(block);
  return plan;
}

void Engine::Core::OfferReferences(TriePutSession* session) {
  const ModelSpec& spec = session->registered->spec;
  if (codec_ == nullptr || session->missing_blocks.empty() || !spec.layout_tag.empty()) return;
  StoredPath path{.tenant = session->tenant,
                  .model = session->model,
                  .registered = session->registered,
                  .salt = session->salt,
                  .extra_keys = {session->extra_keys.begin(), session->extra_keys.end()},
                  .nodes = {}};
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    for (const TriePutSession::Block& block : session->blocks) {
      if (index_.FindById(block.id) == 0) break;
      path.nodes.push_back(block.id);
    }
  }
  const ProfileId profile = profiles_->NewestFor(session->registered->codec_key);
  CodingPlan plan =
      PlanCoding(path, session->tokens, session->missing_blocks.front(), profile, session->quality);
  const auto is_not_missing = [session](std::uint32_t block) {
    return !std::binary_search(session->missing_blocks.begin(), session->missing_blocks.end(),
                               block);
  };
  std::erase_if(plan.references, [&](const auto& entry) { return is_not_missing(entry.first); });
  std::erase_if(plan.finer_blocks, is_not_missing);

  std::vector<OfferedReference> offered = *session->references;
  absl::flat_hash_set<TrieNodeId> known;
  for (const auto& [block, references] : plan.references) {
    for (const TrieNodeId& node : references.nodes) {
      if (!known.insert(node).second) continue;
      offered.push_back({node, Rung::kCoded, LocationOn(node, Rung::kCoded)});
    }
  }
  session->references = std::make_shared<const std::vector<OfferedReference>>(std::move(offered));
  session->coding_plan = std::move(plan);
}

std::map<TrieNodeId, Engine::Core::LoadedReference> Engine::Core::LoadReferences(
    const ModelId& model, const std::map<std::uint32_t, BlockReferences>& wanted) {
  std::map<TrieNodeId, LoadedReference> loaded;
  std::vector<StoredFrame> frames;
  std::vector<std::uint32_t> depths;
  {
    absl::flat_hash_set<TrieNodeId> nodes;
    absl::ReaderMutexLock lock(&index_mutex_);
    for (const auto& [block, references] : wanted) {
      for (const TrieNodeId& node : references.nodes) {
        const NodeRef ref = index_.FindById(node);
        if (ref == 0 || index_.node(ref).codec() != CodecId::kResidual) continue;
        if (!nodes.insert(node).second) continue;
        frames.push_back(FrameInIndex(index_.node(ref)));
        depths.push_back(index_.node(ref).depth);
      }
    }
  }
  std::vector<absl::StatusOr<LoadedFrame>> raw = ReadRawNow(frames);
  for (std::size_t i = 0; i < frames.size(); ++i) {
    auto tokens = TokensOf(frames[i].node, model);
    if (!raw[i].ok() || !tokens.ok()) continue;
    const auto first_position = static_cast<std::uint32_t>((depths[i] - 1) * tokens->size());
    loaded.emplace(frames[i].node,
                   LoadedReference{*std::move(tokens), *std::move(raw[i]), frames[i].at,
                                   first_position, frames[i].quality});
  }
  return loaded;
}

absl::Status Engine::Core::CheckNotNeeded(const PublishItem& item, const PendingNode& node) {
  absl::ReaderMutexLock lock(&index_mutex_);
  for (const RungRow& dropped : node.dropped) {
    if (!references_.IsReferenced(node.id, dropped.rung)) continue;
    // The rest of the put will want the same.
    for (const std::uint32_t block : item.session->missing_blocks) {
      const auto members = references_.MembersOf(item.session->blocks[block].id);
      to_detach_.insert(members.begin(), members.end());
    }
    return absl::UnavailableError(
        absl::StrCat("block ", item.block,
                     ": others were coded against the frame that this one takes the place of; they "
                     "are being coded anew, try again in some seconds"));
  }
  return absl::OkStatus();
}

void Engine::Core::DetachQueued() {
  const Clock::Duration until = clock_.Monotonic() + kDetachTimePerRound;
  std::set<TrieNodeId> members;
  {
    absl::MutexLock change(&change_mutex_);
    members.swap(to_detach_);
  }
  while (!members.empty() && clock_.Monotonic() < until) {
    Detach(members.extract(members.begin()).value());
  }
  absl::MutexLock change(&change_mutex_);
  to_detach_.merge(members);
}

std::vector<TrieNodeId> Engine::Core::MembersOutside(std::span<const NodeRef> refs) const {
  std::vector<TrieNodeId> members;
  if (references_.size() == 0) return members;
  const absl::flat_hash_set<NodeRef> inside(refs.begin(), refs.end());
  absl::flat_hash_set<TrieNodeId> found;
  for (const NodeRef ref : refs) {
    for (const TrieNodeId& member : references_.MembersOf(index_.node(ref).id)) {
      if (!inside.contains(index_.FindById(member)) && found.insert(member).second) {
        members.push_back(member);
      }
    }
  }
  return members;
}

void Engine::Core::Detach(const TrieNodeId& member) {
  if (const absl::Status status = TryDetach(member); !status.ok()) {
    spdlog::info("block {}: could not be coded without what it was coded against: {}",
                 member.ToHex(), std::string(status.message()));
  }
}

Engine::Core::FinestLevel Engine::Core::FinestLevelFor(const RegisteredModel& model,
                                                       const ProfileId& own_profile) const {
  FinestLevel finest;
  for (const ProfileId& id : {profiles_->NewestFor(model.codec_key), own_profile}) {
    const auto info = profiles_->Find(id);
    if (!info) continue;
    for (const auto& level : info->header.levels) {
      if (IsFiner(level.quality, finest.quality)) {
        finest = {id, level.quality};
      }
    }
  }
  return finest;
}

// What is decoded from a lossy frame is coded at a finer level, so that it loses next to nothing a
// second time; it is served at what it was served at before.
absl::Status Engine::Core::TryDetach(const TrieNodeId& member) {
  if (codec_ == nullptr) return absl::FailedPreconditionError("this server has no codecs");
  const std::optional<StoredFrame> frame = MemberFrame(member);
  if (!frame) return absl::OkStatus();
  StoredPath path;
  bool has_smaller;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    const NodeRef ref = index_.FindById(member);
    if (ref == 0) return absl::OkStatus();
    if (!models_.contains(index_.node(ref).model)) {
      return absl::FailedPreconditionError("its model is not registered");
    }
    has_smaller = index_.node(ref).codec() != CodecId::kReferenced;
    path = PathTo(ref);
  }
  if (has_smaller) {
    absl::MutexLock change(&change_mutex_);
    return DropFrame(*frame);
  }
  KV_ASSIGN_OR_RETURN(const NodeRow row, ReadRow(path.tenant, member));
  const RungRow* const own = row.FindRung(Rung::kCoded);
  const FinestLevel finest =
      FinestLevelFor(*path.registered, own == nullptr ? ProfileId{} : own->profile);
  if (!IsFiner(finest.quality, frame->quality)) {
    return absl::FailedPreconditionError("no profile for it has a finer level");
  }
  KV_ASSIGN_OR_RETURN(const std::vector<TokenId> tokens, TokensOfPath(path));
  const std::vector<absl::StatusOr<LoadedFrame>> raw = ReadRawNow({&*frame, 1});
  KV_RETURN_IF_ERROR(raw.front().status());
  const ModelSpec& spec = path.registered->spec;
  const auto block = static_cast<std::uint32_t>(path.nodes.size() - 1);
  const BlockToEncode to_encode{.first_position = block * spec.block_tokens,
                                .session_tokens = static_cast<std::uint32_t>(tokens.size()),
                                .tokens = std::span<const TokenId>(tokens).last(spec.block_tokens),
                                .raw = raw.front()->view.body()};
  KV_ASSIGN_OR_RETURN(
      std::vector<EncodedFrame> encoded,
      codec_->Encode(spec, {&to_encode, 1}, finest.profile, finest.quality, *profiles_));
  if (RungOf(encoded.front().codec) != Rung::kCoded) {
    return absl::FailedPreconditionError("it cannot be coded");
  }
  PutAnnouncement put;
  put.quality = finest.quality;
  put.detaches_at = frame->quality;
  AddedFrames added;
  std::map<std::uint32_t, EncodedFrame> frames;
  frames.emplace(block, std::move(encoded.front()));
  KV_RETURN_IF_ERROR(AddFrames(path, tokens, frames, put, &added));
  counters_.detached_blocks += added.blocks;
  return absl::OkStatus();
}

std::optional<StoredFrame> Engine::Core::MemberFrame(const TrieNodeId& member) {
  TenantId tenant;
  std::uint64_t raw_frame_bytes;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    const NodeRef ref = index_.FindById(member);
    if (ref == 0) return std::nullopt;
    const IndexNode& node = index_.node(ref);
    if (node.codec() == CodecId::kReferenced) return FrameInIndex(node);
    if (!references_.IsMember(member)) return std::nullopt;
    tenant = index_.model(node.model).tenant;
    raw_frame_bytes = RawFrameBytes(node.model);
  }
  // Its exact frame is smaller still.
  const auto row = ReadRow(tenant, member);
  if (!row.ok()) return std::nullopt;
  for (const RungRow& rung : row->rungs) {
    if (rung.codec != CodecId::kReferenced) continue;
    return FrameInRow(member, *row, rung, raw_frame_bytes);
  }
  return std::nullopt;
}

absl::Status Engine::Core::DropMemberFrames(std::span<const TrieNodeId> members) {
  for (const TrieNodeId& member : members) {
    const std::optional<StoredFrame> frame = MemberFrame(member);
    if (!frame) continue;
    counters_.lost_members.fetch_add(1, std::memory_order_relaxed);
    KV_RETURN_IF_ERROR(DropFrame(*frame));
  }
  return absl::OkStatus();
}

}  // namespace kvtrie
