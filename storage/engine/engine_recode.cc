#include <algorithm>
#include <ctime>
#include <memory>
#include <optional>
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
// How long the thread lets others go first, and how long it rests when there is nothing to do.
constexpr absl::Duration kBusyWait = absl::Milliseconds(20);
constexpr absl::Duration kIdleWait = absl::Seconds(1);

double ThreadCpuSeconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

// Consecutive blocks of one path, exact and without a coded frame.
struct Engine::Core::RecodeTask {
  TenantId tenant;
  ModelId model;
  std::shared_ptr<const RegisteredModel> registered;
  ProfileId profile;
  std::string salt;
  std::vector<ExtraKey> extra_keys;
  std::vector<std::string> extra_key_texts;  // that those point into
  std::vector<TrieNodeId> path;              // from the first block to the last of `frames`
  std::uint32_t first_block = 0;
  std::vector<StoredFrame> frames;   // of the blocks from first_block on
  std::uint32_t session_blocks = 0;  // as far as the path is known
};

std::optional<ProfileId> Engine::Core::ProfileToRecodeWith(ModelSlot slot) const {
  const auto model = models_.find(slot);
  if (model == models_.end() || !model->second->spec.layout_tag.empty()) return std::nullopt;
  const ProfileId profile = profiles_->NewestFor(model->second->codec_key);
  const auto info = profiles_->Find(profile);
  if (!info) return std::nullopt;
  const auto& levels = info->header.levels;
  const bool has_level = std::any_of(levels.begin(), levels.end(), [&](const auto& level) {
    return level.quality == *options_.recode_quality;
  });
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

  const ModelSlot slot = index_.node(found).model;
  const ModelRoot& root = index_.model(slot);
  RecodeTask task;
  task.tenant = root.tenant;
  task.model = root.model;
  task.registered = models_.find(slot)->second;
  task.profile = *profile;
  const std::size_t blocks_max = std::max(1u, kTokensAtOnce / root.block_tokens);

  NodeRef first = found;
  for (NodeRef up = index_.parent(first); up != 0 && wanted(up); up = index_.parent(first)) {
    first = up;
  }
  std::vector<NodeRef> refs;
  NodeRef last = 0;
  for (NodeRef at = first; at != 0 && wanted(at) && refs.size() < blocks_max;
       at = index_.node(at).first_child) {
    refs.push_back(at);
    last = at;
  }
  for (const NodeRef ref : refs) task.frames.push_back(FrameInIndex(index_.node(ref)));
  task.first_block = index_.node(first).depth - 1;
  for (NodeRef end = last; end != 0; end = index_.node(end).first_child) {
    task.session_blocks = index_.node(end).depth;
  }
  std::vector<NodeRef> path;
  for (NodeRef at = last; at != 0; at = index_.parent(at)) path.push_back(at);
  std::reverse(path.begin(), path.end());
  task.salt = index_.salt(path.front());
  for (std::uint32_t block = 0; block < path.size(); ++block) {
    task.path.push_back(index_.node(path[block]).id);
    if (const auto key = index_.extra_key(path[block]); !key.empty()) {
      task.extra_key_texts.emplace_back(key);
      task.extra_keys.push_back({.block_index = block, .key = {}});
    }
  }
  for (std::size_t i = 0; i < task.extra_keys.size(); ++i) {
    task.extra_keys[i].key = task.extra_key_texts[i];
  }
  return task;
}

// Raw KV, one after the other and without waiting for a pool's turn.
std::vector<absl::StatusOr<LoadedFrame>> Engine::Core::ReadRawNow(
    std::span<const StoredFrame> frames) {
  std::vector<absl::StatusOr<LoadedFrame>> raw(frames.size(), absl::NotFoundError(""));
  std::vector<std::size_t> coded_indexes;
  std::vector<StoredFrame> coded;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    if (frames[i].codec != CodecId::kRaw) {
      coded_indexes.push_back(i);
      coded.push_back(frames[i]);
    } else if (auto loaded = TryReadFrame(frames[i], ReadAs::kRaw)) {
      raw[i] = *std::move(loaded);
    } else {
      raw[i] = ReadFromDisk(frames[i]);
    }
  }
  ReadDecoded(coded, [&](std::size_t i, absl::StatusOr<LoadedFrame> loaded) {
    raw[coded_indexes[i]] = std::move(loaded);
  });
  return raw;
}

absl::StatusOr<std::vector<TokenId>> Engine::Core::TokensOfPath(const RecodeTask& task) {
  std::vector<TokenId> tokens;
  tokens.reserve(task.path.size() * task.registered->spec.block_tokens);
  for (const TrieNodeId& node : task.path) {
    KV_ASSIGN_OR_RETURN(const std::vector<TokenId> of_block, TokensOf(node, task.model));
    tokens.insert(tokens.end(), of_block.begin(), of_block.end());
  }
  return tokens;
}

// By block of the path; without those that cannot be read (which was counted), and those that
// cannot be coded.
absl::StatusOr<std::map<std::uint32_t, EncodedFrame>> Engine::Core::EncodeBlocks(
    const RecodeTask& task, std::span<const TokenId> tokens) {
  const ModelSpec& spec = task.registered->spec;
  const std::vector<absl::StatusOr<LoadedFrame>> raw = ReadRawNow(task.frames);
  std::vector<BlockToEncode> blocks;
  for (std::size_t i = 0; i < raw.size(); ++i) {
    if (!raw[i].ok()) continue;
    const std::size_t first_token = (task.first_block + i) * spec.block_tokens;
    blocks.push_back({.first_position = static_cast<std::uint32_t>(first_token),
                      .session_tokens = task.session_blocks * spec.block_tokens,
                      .tokens = tokens.subspan(first_token, spec.block_tokens),
                      .raw = raw[i]->view.body()});
  }
  if (blocks.empty()) return absl::NotFoundError("none of the blocks can be read");
  KV_ASSIGN_OR_RETURN(
      std::vector<EncodedFrame> encoded,
      codec_->Encode(spec, blocks, task.profile, *options_.recode_quality, *profiles_));
  std::map<std::uint32_t, EncodedFrame> frames;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (RungOf(encoded[i].codec) != Rung::kCoded) continue;
    frames.emplace(blocks[i].first_position / spec.block_tokens, std::move(encoded[i]));
  }
  return frames;
}

// Returns when they are published, or why one of them is not.
absl::Status Engine::Core::AddFrames(const RecodeTask& task, std::span<const TokenId> tokens,
                                     const std::map<std::uint32_t, EncodedFrame>& frames) {
  PutAnnouncement put;
  put.path = {
      .model = task.model, .tokens = tokens, .salt = task.salt, .extra_keys = task.extra_keys};
  put.first_block = task.first_block;
  put.quality = *options_.recode_quality;
  put.beside_exact = true;
  put.only_existing = true;
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<PutSession> session, BeginPut(task.tenant, put));

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
      if (!result.ok()) {
        failure = result.status();
        return;
      }
      ++counters_.recoded_blocks;
      counters_.recoded_raw_bytes += task.registered->geometry.raw_block_bytes();
      counters_.recoded_bytes += bytes;
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
  KV_ASSIGN_OR_RETURN(const std::vector<TokenId> tokens, TokensOfPath(task));
  KV_ASSIGN_OR_RETURN(const auto frames, EncodeBlocks(task, tokens));
  return AddFrames(task, tokens, frames);
}

std::size_t Engine::Core::RecodeSome() {
  absl::MutexLock one_at_a_time(&recode_mutex_);
  if (!options_.recode_quality || codec_ == nullptr || draining_) return 0;
  const auto task = FindRecodeTask();
  if (!task) return 0;
  const absl::Status status = Recode(*task);
  // These say nothing of the blocks: the store is full or drains, or the profile is on its way out.
  if (absl::IsResourceExhausted(status) || absl::IsUnavailable(status) ||
      absl::IsFailedPrecondition(status)) {
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
