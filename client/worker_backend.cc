#include "client/worker_backend.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "client/model_spec_to_proto.h"
#include "storage/base/byte_order.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/codec/frame.h"
#include "storage/codec/reference_table.h"

namespace kvtrie {
namespace {

// One worker, and where that fails another one.
constexpr int kWorkersTried = 2;

std::string TextOf(std::span<const TokenId> tokens) {
  return {reinterpret_cast<const char*>(tokens.data()), tokens.size_bytes()};
}

std::vector<FrameSection> SectionsOf(std::span<const std::byte> body,
                                     std::span<const std::uint32_t> section_bytes) {
  std::vector<FrameSection> sections;
  std::size_t at = 0;
  for (const std::uint32_t bytes : section_bytes) {
    sections.push_back({.bytes = bytes, .crc32c = Crc32c(body.subspan(at, bytes))});
    at += bytes;
  }
  return sections;
}

// The header of a frame around a body that lies elsewhere.
std::vector<std::byte> HeaderOf(CodecId codec, Quality quality, const ModelId& model,
                                std::size_t raw_bytes, std::span<const FrameSection> sections) {
  std::vector<std::byte> header(FrameHeaderBytes(sections.size()));
  WriteFrameHeader({.codec = codec,
                    .quality = quality,
                    .model = model,
                    .raw_bytes = raw_bytes,
                    .sections = sections},
                   header);
  return header;
}

absl::StatusCode CodeOf(const WorkerItem& item) {
  return static_cast<absl::StatusCode>(item.result.status().code());
}

// Whether a worker took no more work.
bool IsRefused(const WorkerItem& item) {
  return CodeOf(item) == absl::StatusCode::kUnavailable ||
         CodeOf(item) == absl::StatusCode::kResourceExhausted;
}

// Whether another worker may do what this one did not.
bool IsForAnother(const WorkerItem& item) {
  return !item.answered || IsRefused(item) || CodeOf(item) == absl::StatusCode::kFailedPrecondition;
}

// Whether a frame was coded against nothing but what its block came with: else nobody could read it
// back.
absl::Status CheckReferences(const FrameView& frame, const BlockToEncode& block) {
  if (frame.codec() != CodecId::kReferenced) return absl::OkStatus();
  KV_ASSIGN_OR_RETURN(const ReferenceTable table, ReferencesOf(frame, block.tokens.size()));
  for (const FrameReference& named : table.references) {
    const bool was_sent = std::any_of(
        block.references.begin(), block.references.end(), [&](const ReferenceBlock& reference) {
          return reference.node == named.node && reference.first_position == named.first_position &&
                 DigestOfKv(reference.raw) == named.digest;
        });
    if (!was_sent) return absl::DataLossError("worker: a frame against a reference of its own");
  }
  return absl::OkStatus();
}

}  // namespace

// Codes blocks of one model and profile with workers.
class WorkerBackend::Coder final : public BlockCoder {
 public:
  Coder(const WorkerBackend& backend, const ModelSpec& spec,
        std::shared_ptr<const ResidualCodec> codec)
      : backend_(backend), codec_(std::move(codec)), model_(spec.Digest()), geometry_(spec) {
    *open_.mutable_model() = ModelSpecToProto(spec);
    open_.set_tenant(backend.options_.tenant);
    open_.set_item_timeout_ms(static_cast<std::uint32_t>(backend.options_.timeout.count()));
  }

  absl::StatusOr<std::vector<EncodedBlock>> Encode(std::span<const BlockToEncode> blocks,
                                                   Quality quality) const override;
  absl::Status Decode(std::span<const BlockToDecode> blocks) const override;

 private:
  // Headers that messages point to while they are sent.
  using Headers = std::vector<std::vector<std::byte>>;

  bool MayEncode(const BlockToEncode& block, Quality quality) const;
  void AddReferences(std::span<const ReferenceBlock> references, WorkerItem* item,
                     Headers* headers) const;
  WorkerItem ItemOf(const BlockToEncode& block, Quality quality, std::vector<std::byte>* frame,
                    Headers* headers) const;
  WorkerItem ItemOf(const BlockToDecode& block, Headers* headers) const;
  // What a frame of the worker's holds. Not OK: it is not what was asked for.
  absl::StatusOr<EncodedBlock> BlockOf(std::span<const std::byte> frame, const BlockToEncode& block,
                                       Quality quality, const v1::CodecResult& result) const;

  const WorkerBackend& backend_;
  const std::shared_ptr<const ResidualCodec> codec_;
  const ModelId model_;
  const KvGeometry geometry_;
  v1::CodecOpen open_;
};

bool WorkerBackend::Coder::MayEncode(const BlockToEncode& block, Quality quality) const {
  return std::all_of(block.references.begin(), block.references.end(),
                     [quality](const ReferenceBlock& reference) {
                       return QualityRank(reference.quality) > QualityRank(quality);
                     });
}

void WorkerBackend::Coder::AddReferences(std::span<const ReferenceBlock> references,
                                         WorkerItem* item, Headers* headers) const {
  for (const ReferenceBlock& reference : references) {
    // Its KV is what counts, whatever frame it came from.
    const std::vector<FrameSection> sections =
        SectionsOf(reference.raw, RawSectionBytes(geometry_));
    headers->push_back(
        HeaderOf(CodecId::kRaw, Quality::kExact, model_, reference.raw.size(), sections));
    v1::CodecReference* const added = item->item.add_references();
    added->set_node_id(std::string(reference.node.view()));
    added->set_first_position(reference.first_position);
    added->set_tokens(TextOf(reference.tokens));
    added->set_frame_bytes(headers->back().size() + reference.raw.size());
    item->bytes.emplace_back(headers->back());
    item->bytes.push_back(reference.raw);
  }
}

WorkerItem WorkerBackend::Coder::ItemOf(const BlockToEncode& block, Quality quality,
                                        std::vector<std::byte>* frame, Headers* headers) const {
  WorkerItem item;
  item.item.set_first_position(block.first_position);
  item.item.set_session_tokens(block.session_tokens);
  item.item.set_tokens(TextOf(block.tokens));
  item.item.set_block_bytes(block.raw.size());
  item.item.set_quality(static_cast<v1::Quality>(quality));
  item.item.set_profile_id(std::string(codec_->id().view()));
  item.item.set_importance(std::string(reinterpret_cast<const char*>(block.importance.data()),
                                       block.importance.size_bytes()));
  item.bytes.push_back(block.raw);
  AddReferences(block.references, &item, headers);
  for (const ReferenceRun& run : block.runs) {
    v1::TokenRun* const added = item.item.add_runs();
    added->set_first_token(run.first_token);
    added->set_token_count(run.token_count);
    added->set_reference(run.reference);
    added->set_offset(run.offset);
  }
  item.place = [this, frame](const v1::CodecResult& result) -> std::span<std::byte> {
    if (result.block_bytes() > FrameBytesMax(geometry_)) return {};
    frame->resize(result.block_bytes());
    return *frame;
  };
  return item;
}

absl::StatusOr<EncodedBlock> WorkerBackend::Coder::BlockOf(std::span<const std::byte> bytes,
                                                           const BlockToEncode& block,
                                                           Quality quality,
                                                           const v1::CodecResult& result) const {
  KV_ASSIGN_OR_RETURN(const FrameView frame, FrameView::Parse(bytes));
  if (frame.frame_bytes() != bytes.size() || frame.model() != model_) {
    return absl::DataLossError("worker: a frame of another model");
  }
  KV_RETURN_IF_ERROR(frame.CheckGeometry(geometry_));
  KV_RETURN_IF_ERROR(frame.VerifyBody());
  EncodedBlock encoded;
  encoded.exact_tokens = result.exact_tokens();
  encoded.referenced_tokens = result.referenced_tokens();
  if (encoded.exact_tokens > block.tokens.size() ||
      encoded.referenced_tokens > block.tokens.size()) {
    return absl::DataLossError("worker: more tokens than the block has");
  }
  // Too many of its tokens would have to be kept as they are.
  if (frame.codec() == CodecId::kLossless && frame.profile().empty()) return encoded;
  const FrameBinding binding{.first_position = block.first_position,
                             .tokens_crc32c = Crc32c(std::as_bytes(block.tokens)),
                             .profile = codec_->id()};
  const CodecId codec = encoded.referenced_tokens > 0 ? CodecId::kReferenced : CodecId::kResidual;
  if (frame.codec() != codec || frame.quality() != quality || frame.binding() != binding) {
    return absl::DataLossError("worker: a frame that was not asked for");
  }
  KV_RETURN_IF_ERROR(CheckReferences(frame, block));
  encoded.body.assign(frame.body().begin(), frame.body().end());
  for (std::size_t i = 0; i < frame.section_count(); ++i) {
    encoded.section_bytes.push_back(frame.section(i).bytes);
  }
  return encoded;
}

absl::StatusOr<std::vector<EncodedBlock>> WorkerBackend::Coder::Encode(
    std::span<const BlockToEncode> blocks, Quality quality) const {
  std::vector<EncodedBlock> encoded(blocks.size());
  std::vector<std::size_t> sent, own;
  std::vector<std::vector<std::byte>> frames(blocks.size());
  std::vector<WorkerItem> items;
  Headers headers;
  headers.reserve(blocks.size() * kReferencesMax);  // items point into it
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (quality == Quality::kExact || !MayEncode(blocks[i], quality)) {
      own.push_back(i);
      continue;
    }
    sent.push_back(i);
    items.push_back(ItemOf(blocks[i], quality, &frames[i], &headers));
  }
  backend_.Run(WorkerMethod::kEncode, open_, codec_->id(), items);
  for (std::size_t k = 0; k < sent.size(); ++k) {
    const std::size_t i = sent[k];
    if (items[k].answered && items[k].result.status().code() == 0) {
      auto block = BlockOf(frames[i], blocks[i], quality, items[k].result);
      if (block.ok()) {
        encoded[i] = *std::move(block);
        continue;
      }
      backend_.failed_calls_.fetch_add(1, std::memory_order_relaxed);
    }
    own.push_back(i);
  }
  backend_.blocks_.fetch_add(blocks.size() - own.size(), std::memory_order_relaxed);
  if (own.empty()) return encoded;
  backend_.own_blocks_.fetch_add(own.size(), std::memory_order_relaxed);
  std::vector<BlockToEncode> left;
  for (const std::size_t i : own) left.push_back(blocks[i]);
  KV_ASSIGN_OR_RETURN(std::vector<EncodedBlock> coded, codec_->Encode(left, quality));
  for (std::size_t k = 0; k < own.size(); ++k) encoded[own[k]] = std::move(coded[k]);
  return encoded;
}

WorkerItem WorkerBackend::Coder::ItemOf(const BlockToDecode& block, Headers* headers) const {
  const CodecId codec = block.quality == Quality::kExact ? CodecId::kLossless
                        : block.is_referenced            ? CodecId::kReferenced
                                                         : CodecId::kResidual;
  headers->push_back(HeaderOf(codec, block.quality, model_, geometry_.raw_block_bytes(),
                              SectionsOf(block.body, block.section_bytes)));
  WorkerItem item;
  item.item.set_first_position(ReadFrameBinding(block.body).first_position);
  item.item.set_tokens(TextOf(block.tokens));
  item.item.set_block_bytes(headers->back().size() + block.body.size());
  item.bytes = {headers->back(), block.body};
  AddReferences(block.references, &item, headers);
  item.place = [raw = block.raw](const v1::CodecResult&) { return raw; };
  return item;
}

absl::Status WorkerBackend::Coder::Decode(std::span<const BlockToDecode> blocks) const {
  std::vector<std::size_t> sent;
  std::vector<BlockToDecode> own;
  std::vector<WorkerItem> items;
  Headers headers;
  headers.reserve(blocks.size() * (1 + kReferencesMax));  // items point into it
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].body.size() < kFrameBindingBytes ||
        blocks[i].references.size() > kReferencesMax) {
      own.push_back(blocks[i]);
      continue;
    }
    sent.push_back(i);
    items.push_back(ItemOf(blocks[i], &headers));
  }
  backend_.Run(WorkerMethod::kDecode, open_, codec_->id(), items);
  for (std::size_t k = 0; k < sent.size(); ++k) {
    // Of a frame that cannot be decoded, this codec says what is wrong with it.
    const BlockToDecode& block = blocks[sent[k]];
    const bool is_decoded = items[k].answered && items[k].result.status().code() == 0 &&
                            static_cast<Quality>(items[k].result.quality()) == block.quality;
    if (!is_decoded) own.push_back(block);
  }
  backend_.blocks_.fetch_add(blocks.size() - own.size(), std::memory_order_relaxed);
  if (own.empty()) return absl::OkStatus();
  backend_.own_blocks_.fetch_add(own.size(), std::memory_order_relaxed);
  return codec_->Decode(own);
}

WorkerBackend::WorkerBackend(WorkerOptions options, ProfileSource profiles, Clock& clock)
    : options_(std::move(options)), profiles_(std::move(profiles)), pool_(options_, clock) {
  KV_CHECK(options_.Validate().ok());
}

WorkerBackend::~WorkerBackend() = default;

std::string WorkerBackend::device() const {
  return absl::StrCat("workers ", absl::StrJoin(options_.targets, ", "));
}

absl::StatusOr<std::shared_ptr<const BlockCoder>> WorkerBackend::CoderFor(
    const ModelSpec& spec, std::shared_ptr<const ResidualCodec> codec) const {
  return std::make_shared<const Coder>(*this, spec, std::move(codec));
}

absl::Status WorkerBackend::Probe() const {
  if (pool_.Workers().usable > 0) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("no usable worker among ", absl::StrJoin(options_.targets, ", ")));
}

WorkerBackendStats WorkerBackend::Stats() const {
  const WorkerPool::Count workers = pool_.Workers();
  return {.blocks_total = blocks_,
          .own_blocks_total = own_blocks_,
          .failed_calls_total = failed_calls_,
          .sent_profiles_total = sent_profiles_,
          .usable_workers = workers.usable,
          .workers = workers.all};
}

void WorkerBackend::Run(WorkerMethod method, const v1::CodecOpen& open, const ProfileId& profile,
                        std::span<WorkerItem> items) const {
  const Deadline deadline = Deadline::After(options_.timeout);
  std::shared_ptr<WorkerPool::Worker> last;
  for (int tried = 0; tried < kWorkersTried && !deadline.expired() && !stopped_; ++tried) {
    // One that hangs leaves time for another.
    const bool is_last = tried + 1 == kWorkersTried || pool_.Workers().usable < 2;
    const Deadline part = is_last ? deadline : deadline.AtMost(options_.timeout / 2);
    std::vector<WorkerItem*> left;
    for (WorkerItem& item : items) {
      if (IsForAnother(item)) left.push_back(&item);
    }
    if (left.empty()) return;
    const std::shared_ptr<WorkerPool::Worker> worker = pool_.Take(last.get(), profile);
    if (worker == nullptr) return;
    const std::chrono::nanoseconds time = part.remaining();
    const absl::Status status = RunAt(*worker, method, open, left, part);
    const WorkerPool::Outcome outcome = OutcomeOf(status, left, time);
    if (outcome == WorkerPool::Outcome::kFailed || outcome == WorkerPool::Outcome::kUnreachable) {
      failed_calls_.fetch_add(1, std::memory_order_relaxed);
    }
    std::uint32_t busy_ms = 0;
    for (const WorkerItem* item : left) busy_ms = std::max(busy_ms, item->result.retry_after_ms());
    pool_.Done(worker, outcome, std::chrono::milliseconds(busy_ms));
    last = worker;
  }
}

WorkerPool::Outcome WorkerBackend::OutcomeOf(const absl::Status& status,
                                             std::span<WorkerItem* const> items,
                                             std::chrono::nanoseconds time) const {
  using Outcome = WorkerPool::Outcome;
  if (status.ok()) {
    // One that has no room for a profile may well code with those that it has.
    const bool refused_some = std::any_of(items.begin(), items.end(),
                                          [](const WorkerItem* item) { return IsRefused(*item); });
    return refused_some ? Outcome::kBusy : Outcome::kWell;
  }
  if (absl::IsUnavailable(status)) return Outcome::kUnreachable;
  if (absl::IsCancelled(status) && stopped_) return Outcome::kWell;
  if (!absl::IsDeadlineExceeded(status)) return Outcome::kFailed;
  const bool answered_some = std::any_of(items.begin(), items.end(),
                                         [](const WorkerItem* item) { return item->answered; });
  return time > options_.timeout / (answered_some ? 2 : 3) ? Outcome::kFailed : Outcome::kBusy;
}

absl::Status WorkerBackend::RunAt(WorkerPool::Worker& worker, WorkerMethod method,
                                  const v1::CodecOpen& open, std::span<WorkerItem*> items,
                                  Deadline deadline) const {
  std::vector<WorkerItem*> left(items.begin(), items.end());
  // Again for those whose profile was not there.
  for (int round = 0; round < 2 && !left.empty(); ++round) {
    std::map<ProfileId, std::uint64_t> sent_before;
    {
      absl::MutexLock lock(&worker.mutex);
      sent_before = worker.uploads;
    }
    std::vector<WorkerItem> call;
    for (const WorkerItem* item : left) {
      call.push_back(*item);
      call.back().answered = false;
      call.back().result.Clear();
    }
    const absl::Status status = CallWorker(worker.channel, method, open, call, deadline, &stopped_);
    std::map<ProfileId, std::vector<WorkerItem*>> missing;
    for (std::size_t i = 0; i < call.size(); ++i) {
      left[i]->answered = call[i].answered;
      left[i]->result = call[i].result;
      const auto profile = ProfileId::FromBytes(call[i].result.missing_profile_id());
      if (call[i].answered && profile.has_value()) missing[*profile].push_back(left[i]);
    }
    KV_RETURN_IF_ERROR(status);
    left.clear();
    for (const auto& [profile, waiting] : missing) {
      const absl::Status sent = Send(worker, profile, sent_before[profile], deadline);
      if (absl::IsUnavailable(sent) || absl::IsDeadlineExceeded(sent) || absl::IsCancelled(sent)) {
        return sent;
      }
      for (WorkerItem* item : waiting) {
        if (sent.ok()) left.push_back(item);
        // That is so at all workers.
        if (!absl::IsNotFound(sent)) continue;
        item->result.mutable_status()->set_code(
            static_cast<std::uint32_t>(absl::StatusCode::kNotFound));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status WorkerBackend::Send(WorkerPool::Worker& worker, const ProfileId& profile,
                                 std::uint64_t sent_before, Deadline deadline) const {
  {
    absl::MutexLock lock(&worker.mutex);
    const auto may_go_on = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(worker.mutex) {
      return !worker.uploading || worker.uploads[profile] != sent_before;
    };
    if (!worker.mutex.AwaitWithTimeout(absl::Condition(&may_go_on),
                                       absl::FromChrono(deadline.remaining()))) {
      return absl::AbortedError("worker: another thread sends it a profile");
    }
    // Another thread has sent it since this one asked.
    if (worker.uploads[profile] != sent_before) return absl::OkStatus();
    if (stopped_) return absl::CancelledError("worker: its caller stops");
    worker.uploading = true;
  }
  const absl::Status sent = Upload(worker, profile, deadline);
  absl::MutexLock lock(&worker.mutex);
  worker.uploading = false;
  if (sent.ok()) ++worker.uploads[profile];
  return sent;
}

absl::Status WorkerBackend::Upload(WorkerPool::Worker& worker, const ProfileId& profile,
                                   Deadline deadline) const {
  const auto bytes = profiles_(profile, deadline);
  // Whatever the source's status is, it is not the worker's.
  if (!bytes.ok()) return absl::NotFoundError(bytes.status().message());
  const absl::Status sent = SendProfile(worker.channel, **bytes, deadline, &stopped_);
  if (absl::IsResourceExhausted(sent)) pool_.HasNoRoom(worker, profile);
  KV_RETURN_IF_ERROR(sent);
  sent_profiles_.fetch_add(1, std::memory_order_relaxed);
  return absl::OkStatus();
}

}  // namespace kvtrie
