#include <algorithm>
#include <ctime>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "absl/time/time.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"

namespace kvtrie {
namespace {

// Tokens that are coded together: products are fast from 64 on, and memory and the time until
// others get their turn are bounded.
constexpr std::uint32_t kTokensAtOnce = 512;
// Nodes that one search looks at while it holds the index.
constexpr NodeRef kNodesPerSearch = 16'384;
// Blocks that wait to be coded again; what comes on top of them stays as it is.
constexpr std::size_t kAgainMax = 65'536;
// How long the thread lets others go first, and how long it rests when there is nothing to do.
constexpr absl::Duration kBusyWait = absl::Milliseconds(20);
constexpr absl::Duration kIdleWait = absl::Seconds(1);

double ThreadCpuSeconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

// Consecutive blocks of one path, exact.
struct Engine::Core::RecodeTask {
  StoredPath path;  // to the last of `frames`
  ProfileId profile;
  // They have frames that were coded alone, and get others if these can be coded against others.
  bool again = false;
  std::uint32_t first_block = 0;
  std::vector<StoredFrame> frames;   // of the blocks from first_block on
  std::uint32_t session_blocks = 0;  // as far as the path is known
};

std::vector<ExtraKey> Engine::Core::StoredPath::ExtraKeys() const {
  std::vector<ExtraKey> keys;
  for (const auto& [block, key] : extra_keys) keys.push_back({block, key});
  return keys;
}

Engine::Core::StoredPath Engine::Core::PathTo(NodeRef last) const {
  const ModelSlot slot = index_.node(last).model;
  StoredPath path;
  path.tenant = index_.model(slot).tenant;
  path.model = index_.model(slot).model;
  path.registered = models_.find(slot)->second;
  std::vector<NodeRef> refs;
  for (NodeRef at = last; at != 0; at = index_.parent(at)) refs.push_back(at);
  std::reverse(refs.begin(), refs.end());
  path.salt = index_.salt(refs.front());
  for (std::uint32_t block = 0; block < refs.size(); ++block) {
    path.nodes.push_back(index_.node(refs[block]).id);
    const std::string_view key = index_.extra_key(refs[block]);
    if (!key.empty()) path.extra_keys.emplace_back(block, key);
  }
  return path;
}

std::optional<ProfileId> Engine::Core::ProfileToRecodeWith(ModelSlot slot) const {
  const auto model = models_.find(slot);
  if (model == models_.end() || !model->second->spec.layout_tag.empty()) return std::nullopt;
  const ProfileId profile = profiles_->NewestFor(model->second->codec_key);
  const auto info = profiles_->Find(profile);
  if (!info) return std::nullopt;
  const bool has_level = info->header.FindLevel(*options_.recode_quality) != nullptr;
  return has_level ? std::optional(profile) : std::nullopt;
}

// Goes round the index from where the last search ended. What it finds is widened to the whole run
// of such blocks on one path: they share the walk and the matrix products.
std::optional<Engine::Core::RecodeTask> Engine::Core::FindRecodeTask() {
  absl::ReaderMutexLock lock(&index_mutex_);
  const std::uint32_t now = NowSeconds();
  const auto wanted = [&](NodeRef ref) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
    return index_.node(ref).may_be_coded() && !index_.node(ref).expired(now);
  };
  std::uint64_t codable = 0;
  for (std::size_t slot = 0; slot < index_.model_count(); ++slot) {
    codable += index_.model(static_cast<ModelSlot>(slot)).codable_node_count;
  }
  if (codable == 0) return std::nullopt;

  NodeRef found = 0;
  std::optional<ProfileId> profile;
  const NodeRef search = std::min(kNodesPerSearch, index_.ref_end());
  for (NodeRef step = 0; step < search && found == 0; ++step) {
    if (recode_hand_ >= index_.ref_end()) recode_hand_ = 1;
    const NodeRef ref = recode_hand_++;
    if (ref >= index_.ref_end() || !index_.alive(ref) || !wanted(ref)) continue;
    profile = ProfileToRecodeWith(index_.node(ref).model);
    if (profile) found = ref;
  }
  if (found == 0) return std::nullopt;

  const std::size_t blocks_max =
      std::max(1u, kTokensAtOnce / index_.model(index_.node(found).model).block_tokens);
  NodeRef first = found;
  for (NodeRef up = index_.parent(first); up != 0 && wanted(up); up = index_.parent(first)) {
    first = up;
  }
  std::vector<StoredFrame> frames;
  NodeRef last = first;
  for (NodeRef at = first; at != 0 && wanted(at) && frames.size() < blocks_max;
       at = index_.node(at).first_child) {
    frames.push_back(FrameInIndex(index_.node(at)));
    last = at;
  }
  RecodeTask task = TaskFor(first, last);
  task.profile = *profile;
  task.frames = std::move(frames);
  return task;
}

Engine::Core::RecodeTask Engine::Core::TaskFor(NodeRef first, NodeRef last) const {
  RecodeTask task;
  task.path = PathTo(last);
  task.first_block = index_.node(first).depth - 1;
  for (NodeRef end = last; end != 0; end = index_.node(end).first_child) {
    task.session_blocks = index_.node(end).depth;
  }
  return task;
}

std::optional<Engine::Core::RecodeTask> Engine::Core::FindRecodeAgainTask() {
  RecodeTask task;
  std::vector<TrieNodeId> nodes;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    const auto may_gain = [&](NodeRef ref) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
      const IndexNode& node = index_.node(ref);
      return node.has_frame() && node.codec() == CodecId::kResidual &&
             node.quality() == *options_.recode_quality && node.has_other() &&
             node.other_quality() == Quality::kExact && !node.expired(NowSeconds()) &&
             !references_.IsReferenced(node.id);
    };
    NodeRef first = 0, last = 0;
    while (!recode_again_.empty()) {
      const NodeRef ref = index_.FindById(recode_again_.front());
      const bool goes_on = last != 0 && ref != 0 && index_.parent(ref) == last;
      if (first != 0 && !goes_on) break;
      recode_again_.pop_front();
      if (ref == 0 || !may_gain(ref)) {
        if (first != 0) break;
        continue;
      }
      if (first == 0) first = ref;
      last = ref;
      nodes.push_back(index_.node(ref).id);
      if (nodes.size() * index_.model(index_.node(ref).model).block_tokens >= kTokensAtOnce) break;
    }
    if (first == 0) return std::nullopt;
    const auto profile = ProfileToRecodeWith(index_.node(first).model);
    if (!profile) return std::nullopt;
    task = TaskFor(first, last);
    task.profile = *profile;
  }
  task.again = true;
  for (const TrieNodeId& node : nodes) {
    const auto row = ReadRow(task.path.tenant, node);
    const RungRow* const exact = row.ok() ? row->FindRung(Rung::kExact) : nullptr;
    // Gone meanwhile: what stands before it is enough of a task, or none.
    if (exact == nullptr) break;
    task.frames.push_back(FrameInRow(node, *row, *exact, task.path.registered->raw_frame_bytes));
  }
  return task.frames.empty() ? std::nullopt : std::optional(std::move(task));
}

absl::StatusOr<std::vector<TokenId>> Engine::Core::TokensOfPath(const StoredPath& path) {
  std::vector<TokenId> tokens;
  tokens.reserve(path.nodes.size() * path.registered->spec.block_tokens);
  for (const TrieNodeId& node : path.nodes) {
    KV_ASSIGN_OR_RETURN(const std::vector<TokenId> of_block, TokensOf(node, path.model));
    tokens.insert(tokens.end(), of_block.begin(), of_block.end());
  }
  return tokens;
}

// Frames of those of the task's blocks that are to be at this level by the plan, by block of the
// path; without those that cannot be read (which was counted), and those that cannot be coded.
// `used`: what they were coded against.
absl::StatusOr<std::map<std::uint32_t, EncodedFrame>> Engine::Core::EncodeBlocks(
    const RecodeTask& task, std::span<const TokenId> tokens,
    std::span<const absl::StatusOr<LoadedFrame>> raw, const CodingPlan& plan, Quality level,
    std::vector<OfferedReference>* used) {
  const ModelSpec& spec = task.path.registered->spec;
  const bool is_finer = level != plan.level;
  const std::map<TrieNodeId, LoadedReference> loaded =
      is_finer ? std::map<TrieNodeId, LoadedReference>{}
               : LoadReferences(task.path.model, plan.references);
  std::vector<BlockToEncode> blocks;
  std::vector<std::vector<ReferenceBlock>> reference_blocks(task.frames.size());
  for (std::uint32_t i = 0; i < raw.size(); ++i) {
    const std::uint32_t block = task.first_block + i;
    if (!raw[i].ok() || plan.finer_blocks.contains(block) != is_finer) continue;
    const std::size_t first_token = std::size_t{block} * spec.block_tokens;
    BlockToEncode to_encode{.first_position = static_cast<std::uint32_t>(first_token),
                            .session_tokens = task.session_blocks * spec.block_tokens,
                            .tokens = tokens.subspan(first_token, spec.block_tokens),
                            .raw = raw[i]->view.body()};
    if (const auto found = plan.references.find(block); found != plan.references.end()) {
      for (const TrieNodeId& node : found->second.nodes) {
        const auto reference = loaded.find(node);
        if (reference == loaded.end()) break;
        reference_blocks[i].push_back({.node = node,
                                       .first_position = reference->second.first_position,
                                       .tokens = reference->second.tokens,
                                       .raw = reference->second.raw.view.body(),
                                       .quality = reference->second.quality});
      }
      if (reference_blocks[i].size() == found->second.nodes.size()) {
        to_encode.references = reference_blocks[i];
        to_encode.runs = found->second.runs;
      }
    }
    blocks.push_back(to_encode);
  }
  std::map<std::uint32_t, EncodedFrame> frames;
  if (blocks.empty()) return frames;
  KV_ASSIGN_OR_RETURN(std::vector<EncodedFrame> encoded,
                      codec_->Encode(spec, blocks, task.profile, level, *profiles_));
  std::set<TrieNodeId> nodes;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (RungOf(encoded[i].codec) != Rung::kCoded) continue;
    if (encoded[i].codec == CodecId::kReferenced) {
      for (const ReferenceBlock& reference : blocks[i].references) nodes.insert(reference.node);
    }
    frames.emplace(blocks[i].first_position / spec.block_tokens, std::move(encoded[i]));
  }
  for (const TrieNodeId& node : nodes) {
    used->push_back({node, Rung::kCoded, loaded.find(node)->second.at});
  }
  return frames;
}

// Returns when they are published, or why one of them is not. `put` says how; not what.
absl::Status Engine::Core::AddFrames(const StoredPath& path, std::span<const TokenId> tokens,
                                     const std::map<std::uint32_t, EncodedFrame>& frames,
                                     PutAnnouncement put, AddedFrames* added) {
  if (frames.empty()) return absl::OkStatus();
  const std::vector<ExtraKey> extra_keys = path.ExtraKeys();
  put.path = {.model = path.model, .tokens = tokens, .salt = path.salt, .extra_keys = extra_keys};
  put.first_block = frames.begin()->first;
  put.beside_exact = true;
  put.only_existing = true;
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<PutSession> session, BeginPut(path.tenant, put));

  std::uint64_t taken_bytes = 0;
  absl::Status failure;
  std::vector<PutSession::FinishedBlock> finished;
  for (const std::uint32_t block : session->missing_blocks()) {
    const auto frame = frames.find(block);
    if (frame == frames.end()) continue;
    const std::span<const std::byte> bytes = frame->second.bytes;
    if (!put_budget_.TryAcquire(bytes.size())) {
      failure = absl::ResourceExhaustedError("too many blocks are on their way");
      break;
    }
    taken_bytes += bytes.size();
    auto writer = session->StartFrame(block, FrameView::Parse(bytes).value());
    KV_CHECK(writer.ok() && (*writer)->AppendChunk({&bytes, 1}, Crc32c(bytes)).ok());
    finished.push_back({*std::move(writer), nullptr});
  }
  absl::Mutex mutex;
  std::size_t open = finished.size();
  for (PutSession::FinishedBlock& block : finished) {
    block.on_done = [&, bytes = block.writer->total_bytes()](const auto& result) {
      absl::MutexLock lock(&mutex);
      --open;
      if (result.ok()) {
        ++added->blocks;
        added->bytes += bytes;
      } else {
        failure = result.status();
      }
    };
  }
  session->FinishBlocks(std::move(finished));
  {
    absl::MutexLock lock(&mutex);
    const auto none_open = [&open] { return open == 0; };
    mutex.Await(absl::Condition(&none_open));
  }
  put_budget_.Release(taken_bytes);
  return failure;
}

absl::Status Engine::Core::Recode(const RecodeTask& task) {
  KV_ASSIGN_OR_RETURN(const std::vector<TokenId> tokens, TokensOfPath(task.path));
  const std::vector<absl::StatusOr<LoadedFrame>> raw = ReadRawNow(task.frames);
  const CodingPlan plan =
      PlanCoding(task.path, tokens, task.first_block, task.profile, *options_.recode_quality,
                 /*may_refine=*/!task.again);
  std::vector<Quality> levels = {plan.level};
  if (!plan.finer_blocks.empty()) levels.push_back(plan.finer_level);
  for (const Quality level : levels) {
    const bool is_finer = level != plan.level;
    PutAnnouncement put;
    put.quality = level;
    put.replaces_larger = task.again;
    KV_ASSIGN_OR_RETURN(auto frames, EncodeBlocks(task, tokens, raw, plan, level, &put.references));
    if (task.again) {
      std::erase_if(frames,
                    [](const auto& entry) { return entry.second.codec != CodecId::kReferenced; });
    }
    AddedFrames added;
    const absl::Status status = AddFrames(task.path, tokens, frames, put, &added);
    if (task.again) {
      counters_.recoded_again_blocks += added.blocks;
    } else {
      counters_.recoded_blocks += added.blocks;
      counters_.recoded_raw_bytes +=
          added.blocks * task.path.registered->geometry.raw_block_bytes();
      counters_.recoded_bytes += added.bytes;
    }
    KV_RETURN_IF_ERROR(status);
    if (!is_finer || added.blocks == 0) continue;
    counters_.refined_blocks += added.blocks;
    const std::size_t room = kAgainMax - std::min(kAgainMax, recode_again_.size());
    const auto elsewhere = std::span(plan.elsewhere).first(std::min(room, plan.elsewhere.size()));
    recode_again_.insert(recode_again_.end(), elsewhere.begin(), elsewhere.end());
  }
  return absl::OkStatus();
}

std::size_t Engine::Core::RecodeSome() {
  absl::MutexLock one_at_a_time(&recode_mutex_);
  const std::size_t block_count = RecodeNext();
  recode_again_waiting_ = recode_again_.size();
  return block_count;
}

std::size_t Engine::Core::RecodeNext() {
  if (!options_.recode_quality || codec_ == nullptr || draining_) return 0;
  auto task = FindRecodeTask();
  if (!task) task = FindRecodeAgainTask();
  if (!task) return 0;
  const absl::Status status = Recode(*task);
  // These say nothing of the blocks: the store is full or drains, the profile is on its way out, or
  // part of the path has gone meanwhile.
  if (absl::IsResourceExhausted(status) || absl::IsUnavailable(status) ||
      absl::IsFailedPrecondition(status) || absl::IsNotFound(status)) {
    return 0;
  }
  // What is not coded now never will be.
  absl::MutexLock lock(&index_mutex_);
  for (const StoredFrame& frame : task->frames) {
    const NodeRef ref = index_.FindById(frame.node);
    if (ref == 0 || !index_.node(ref).may_be_coded()) continue;
    index_.MarkNotCodable(ref);
    counters_.recode_failed_blocks.fetch_add(1, std::memory_order_relaxed);
  }
  return task->frames.size();
}

bool Engine::Core::IsBusy() const {
  return decode_pool_->queue_length() > 0 || read_pool_->queue_length() > 0 ||
         write_pool_->queue_length() > 0;
}

void Engine::Core::RunRecoder() {
  const auto wait = [this](absl::Duration duration) {
    absl::MutexLock lock(&recode_ending_mutex_);
    return recode_ending_mutex_.AwaitWithTimeout(absl::Condition(&recode_ending_), duration);
  };
  absl::Duration rest = absl::ZeroDuration();
  while (!wait(rest)) {
    if (IsBusy()) {
      rest = kBusyWait;
      continue;
    }
    const double begin = ThreadCpuSeconds();
    const std::size_t block_count = RecodeSome();
    const double cpu_seconds = ThreadCpuSeconds() - begin;
    counters_.recode_nanoseconds += static_cast<std::int64_t>(1e9 * cpu_seconds);
    rest = block_count == 0
               ? kIdleWait
               : absl::Seconds(cpu_seconds * (100.0 / options_.recode_cpu_percent - 1));
  }
}

}  // namespace kvtrie
