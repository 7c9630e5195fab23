#include "server/worker/codec_stream.h"

#include <grpcpp/support/slice.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/status_translation.h"
#include "server/wire_conversion.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/trie/surprisal.h"

namespace kvtrie {
namespace {

// One stream may hold this share of the memory, so that one whose caller reads slowly leaves the
// most of it to others.
constexpr std::size_t kMemoryShare = 4;

constexpr std::chrono::milliseconds kMemoryRetryAfter{100};

// Answers that wait for their caller to read; items that fail take no other memory.
constexpr std::size_t kAnswersMax = 1024;
constexpr std::size_t kLayerMajorItemsMax = 65'536;

// What an item takes while it is here: what comes of it, and what it and its references become. A
// frame may be a little larger than what it was made of.
std::size_t MemoryOf(const CodecJob& job, std::uint64_t received_bytes) {
  return received_bytes + (1 + job.references.size()) * job.model->geometry.raw_block_bytes() +
         (std::size_t{64} << 10);
}

// A slice that keeps the job alive, whose memory it is, until gRPC has sent it.
grpc::Slice SliceOf(std::span<const std::byte> bytes, std::shared_ptr<const CodecJob> job) {
  auto* const owner = new std::shared_ptr<const CodecJob>(std::move(job));
  return {const_cast<std::byte*>(bytes.data()), bytes.size(),
          [](void* held) { delete static_cast<std::shared_ptr<const CodecJob>*>(held); }, owner};
}

std::uint64_t Microseconds(Clock::Duration duration) {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(duration).count());
}

// What the job says of itself, once it is done.
void Describe(const CodecJob& job, v1::CodecResult* result) {
  ToItemStatus(job.status, result->mutable_status());
  result->set_queued_us(Microseconds(job.queued));
  result->set_coding_us(Microseconds(job.coding));
  result->set_batch_blocks(job.batch_blocks);
  if (!job.status.ok()) {
    result->set_retry_after_ms(static_cast<std::uint32_t>(job.retry_after.count()));
    if (!job.missing_profile.empty()) {
      result->set_missing_profile_id(std::string(job.missing_profile.view()));
    }
    return;
  }
  const std::size_t raw_bytes = job.model->geometry.raw_block_bytes();
  if (job.op == CodecOp::kDecode) {
    result->set_block_bytes(raw_bytes);
    result->set_quality(ToProto(job.quality));
  } else {
    const double components =
        static_cast<double>(raw_bytes) / static_cast<double>(DTypeBytes(job.model->spec.dtype));
    result->set_block_bytes(job.frame.bytes.size());
    result->set_codec(ToProto(job.frame.codec));
    result->set_rung(job.frame.quality == Quality::kExact ? v1::RUNG_EXACT : v1::RUNG_CODED);
    result->set_quality(ToProto(job.frame.quality));
    const Quality restored = FromProto(result->served_quality());
    result->set_served_quality(ToProto(
        QualityRank(restored) < QualityRank(job.frame.quality) ? restored : job.frame.quality));
    result->set_exact_tokens(job.frame.exact_tokens);
    result->set_referenced_tokens(job.frame.referenced_tokens);
    result->set_bits_per_component(8.0 * static_cast<double>(job.frame.bytes.size()) / components);
    if (job.frame.quality == Quality::kExact) return;
  }
  result->set_predicted_mean_kl(job.mean_kl);
  result->set_predicted_kl_p99(job.kl_p99);
}

}  // namespace

std::shared_ptr<CodecStream> CodecStream::Create(const CodecStreamHost& host, CodecOp op,
                                                 std::function<void()> on_change) {
  return std::shared_ptr<CodecStream>(new CodecStream(host, op, std::move(on_change)));
}

absl::StatusOr<std::size_t> CodecStream::ReceiveMessage(const grpc::ByteBuffer& message) {
  auto parsed = std::make_unique<CodecMessage>();
  KV_RETURN_IF_ERROR(ParseBulkMessage(message, &parsed->request, &parsed->payload));
  const std::size_t payload_bytes = parsed->payload.size();
  Receive(std::move(parsed));
  return payload_bytes;
}

void CodecStream::Receive(std::unique_ptr<CodecMessage> message) {
  std::unique_ptr<CodecJob> complete;
  v1::CodecResult result;
  {
    absl::MutexLock lock(&mutex_);
    if (cancelled_ || !status_.ok()) return;
    KV_CHECK(waiting_ == nullptr);
    status_ = Take(*message, &complete);
    if (incoming_ != nullptr && incoming_->job != nullptr && incoming_->job->memory.bytes() == 0) {
      waiting_ = std::move(message);
    }
    if (complete != nullptr) {
      result = std::move(incoming_->result);
      incoming_.reset();
    }
  }
  if (complete != nullptr) Submit(std::move(complete), std::move(result));
  on_change_();
}

absl::Status CodecStream::Take(CodecMessage& message, std::unique_ptr<CodecJob>* complete) {
  const v1::CodecRequest& request = message.request;
  if (message.payload.size() > kDataBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("data: ", message.payload.size(),
                                                   " bytes are over the limit of ", kDataBytesMax));
  }
  if (request.has_open()) {
    if (model_ != nullptr) {
      return absl::InvalidArgumentError("open: is in the first message of a stream only");
    }
    KV_RETURN_IF_ERROR(Open(request.open()));
  } else if (model_ == nullptr) {
    return absl::InvalidArgumentError("open: has to be in the first message of a stream");
  }
  if (request.has_item()) {
    if (incoming_ != nullptr && incoming_->job != nullptr) {
      FailIncoming(absl::InvalidArgumentError(
          absl::StrCat("block_bytes: ", incoming_->received_bytes, " bytes came, of ",
                       incoming_->wanted_bytes, ", before the next item began")));
    }
    KV_RETURN_IF_ERROR(Begin(request.item()));
    if (incoming_->job != nullptr && !Reserve()) return absl::OkStatus();
  }
  if (message.payload.size() == 0) return absl::OkStatus();
  if (incoming_ == nullptr) {
    return absl::InvalidArgumentError("data: there is no item that it could belong to");
  }
  AddBytes(message, complete);
  return absl::OkStatus();
}

absl::Status CodecStream::Open(const v1::CodecOpen& open) {
  KV_ASSIGN_OR_RETURN(model_, CheckOpen(open, op_));
  tenant_ = open.tenant();
  layer_major_ = open.layer_major();
  item_timeout_ = host_.limits.item_timeout_max;
  if (open.item_timeout_ms() != 0) {
    item_timeout_ =
        std::min<Clock::Duration>(item_timeout_, std::chrono::milliseconds(open.item_timeout_ms()));
  }
  return absl::OkStatus();
}

absl::Status CodecStream::Begin(const v1::CodecItem& item) {
  if (layer_major_ && answers_.size() + in_queue_ >= kLayerMajorItemsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer_major: more than ", kLayerMajorItemsMax, " items on one stream"));
  }
  incoming_ = std::make_unique<Incoming>();
  incoming_->item_id = item.item_id();
  incoming_->result.set_item_id(item.item_id());
  absl::Status checked = CheckItem(item, op_, *model_, host_.limits);
  if (checked.ok() && item.has_probabilities()) {
    std::vector<TokenId> tokens(model_->geometry.block_tokens());
    std::memcpy(tokens.data(), item.tokens().data(), item.tokens().size());
    const auto bits = BlockSurprisalBits(FromProto(item.probabilities()), tokens,
                                         model_->geometry.block_tokens());
    if (!bits.ok()) {
      checked = Within("probabilities.", bits.status());
    } else if (!bits->empty()) {
      incoming_->result.set_surprisal_bits(bits->front());
    }
  }
  if (!checked.ok()) {
    FailIncoming(checked);
    return absl::OkStatus();
  }
  incoming_->result.set_served_quality(item.restored_quality());
  incoming_->job = JobOf(item, op_, model_);
  incoming_->job->tenant = tenant_;
  incoming_->job->block.bytes = item.block_bytes();
  incoming_->wanted_bytes = item.block_bytes();
  for (const v1::CodecReference& reference : item.references()) {
    incoming_->frame_bytes.push_back(reference.frame_bytes());
    incoming_->wanted_bytes += reference.frame_bytes();
  }
  incoming_->memory_bytes = MemoryOf(*incoming_->job, incoming_->wanted_bytes);
  if (const std::size_t share = host_.memory.limit_bytes() / kMemoryShare;
      incoming_->memory_bytes > share) {
    FailIncoming(absl::InvalidArgumentError(absl::StrCat(
        "block_bytes: the item and what it and its references decode to take ",
        incoming_->memory_bytes, " bytes, and one stream may hold ", share, " (--memory_bytes)")));
    return absl::OkStatus();
  }
  incoming_->job->deadline = host_.clock.Monotonic() + item_timeout_;
  // Before its bytes are read.
  if (auto refusal = host_.queue.Refuses(*incoming_->job); refusal.has_value()) {
    incoming_->result.set_retry_after_ms(static_cast<std::uint32_t>(refusal->retry_after.count()));
    FailIncoming(refusal->status);
    return absl::OkStatus();
  }
  return absl::OkStatus();
}

bool CodecStream::Reserve() {
  const std::size_t bytes = incoming_->memory_bytes;
  const std::size_t share = host_.memory.limit_bytes() / kMemoryShare;
  if (layer_major_) {
    // Nothing of such a stream is given back before all of it is here: it must not wait.
    if ((held_bytes_ > 0 && held_bytes_ + bytes > share) || !host_.memory.TryAcquire(bytes)) {
      incoming_->result.set_retry_after_ms(static_cast<std::uint32_t>(kMemoryRetryAfter.count()));
      FailIncoming(absl::ResourceExhaustedError(
          absl::StrCat("layer_major: ", held_bytes_ + bytes,
                       " bytes of the stream's items are more than there is room for now, and a "
                       "stream may hold ",
                       share, "; take fewer blocks at a time")));
      return true;
    }
  } else if (!host_.memory.AcquireOrWait(
                 bytes, [weak = weak_from_this(), wait = ++waits_, bytes, &host = host_] {
                   // Whoever gave the memory back may hold locks.
                   host.post([weak, wait, bytes, &host] {
                     if (const auto self = weak.lock()) {
                       self->OnGranted(wait, bytes);
                     } else {
                       host.memory.Release(bytes);
                     }
                   });
                 })) {
    return false;
  }
  Allocate(bytes);
  return true;
}

void CodecStream::Allocate(std::size_t bytes) {
  CodecJob& job = *incoming_->job;
  job.memory = ByteReservation(&host_.memory, bytes);
  held_bytes_ += bytes;
  job.block.memory = AlignedBuffer(job.block.bytes);
  for (std::size_t i = 0; i < job.references.size(); ++i) {
    job.references[i].frame->bytes.resize(incoming_->frame_bytes[i]);
  }
}

void CodecStream::OnGranted(std::uint64_t wait, std::size_t bytes) {
  std::unique_ptr<CodecJob> complete;
  v1::CodecResult result;
  {
    absl::MutexLock lock(&mutex_);
    // What it was for may have ended.
    if (cancelled_ || waiting_ == nullptr || wait != waits_) {
      host_.memory.Release(bytes);
      return;
    }
    Allocate(bytes);
    if (waiting_->payload.size() > 0) AddBytes(*waiting_, &complete);
    waiting_.reset();
    if (complete != nullptr) {
      result = std::move(incoming_->result);
      incoming_.reset();
    }
  }
  if (complete != nullptr) Submit(std::move(complete), std::move(result));
  on_change_();
}

std::span<std::byte> CodecStream::Place(CodecJob& job, std::uint64_t at) const {
  if (at < job.block.bytes) {
    return std::span(job.block.memory.data(), job.block.bytes).subspan(at);
  }
  at -= job.block.bytes;
  for (const CodecJob::Reference& reference : job.references) {
    std::vector<std::byte>& frame = reference.frame->bytes;
    if (at < frame.size()) return std::span(frame).subspan(at);
    at -= frame.size();
  }
  return {};
}

void CodecStream::AddBytes(CodecMessage& message, std::unique_ptr<CodecJob>* complete) {
  Incoming& item = *incoming_;
  if (item.job == nullptr) return;  // it has failed
  if (host_.clock.Monotonic() > item.job->deadline) {
    FailIncoming(absl::DeadlineExceededError(
        absl::StrCat("block_bytes: ", item.received_bytes, " of ", item.wanted_bytes,
                     " bytes had come when the item's time was over")));
    return;
  }
  const std::size_t bytes = message.payload.size();
  if (bytes > item.wanted_bytes - item.received_bytes) {
    FailIncoming(absl::InvalidArgumentError(absl::StrCat("data: ", item.received_bytes + bytes,
                                                         " bytes came, and block_bytes and "
                                                         "frame_bytes of the item say ",
                                                         item.wanted_bytes)));
    return;
  }
  std::uint32_t crc = 0;
  for (std::span<const std::byte> piece : message.payload.pieces()) {
    crc = Crc32c(piece, crc);
    while (!piece.empty()) {
      const std::span<std::byte> to = Place(*item.job, item.received_bytes);
      const std::size_t here = std::min(piece.size(), to.size());
      std::memcpy(to.data(), piece.data(), here);
      piece = piece.subspan(here);
      item.received_bytes += here;
    }
  }
  if (crc != message.request.crc32c()) {
    FailIncoming(absl::DataLossError(absl::StrCat("crc32c: the bytes up to ", item.received_bytes,
                                                  " of the item do not match")));
    return;
  }
  if (item.received_bytes == item.wanted_bytes) *complete = std::move(item.job);
}

void CodecStream::FailIncoming(const absl::Status& status) {
  v1::CodecResult result = incoming_->result;
  ToItemStatus(status, result.mutable_status());
  if (incoming_->job != nullptr) held_bytes_ -= incoming_->job->memory.bytes();
  incoming_->job.reset();
  waiting_.reset();
  AddAnswer(std::move(result), nullptr);
}

void CodecStream::Submit(std::unique_ptr<CodecJob> job, v1::CodecResult result) {
  {
    absl::MutexLock lock(&mutex_);
    ++in_queue_;
  }
  if (op_ == CodecOp::kDecode) {
    if (absl::Status opened = CodecWork::Open(*job); !opened.ok()) {
      job->status = std::move(opened);
      OnDone(std::move(job), std::move(result));
      return;
    }
  }
  job->abandoned = abandoned_;
  job->on_done = [self = shared_from_this(),
                  result = std::move(result)](std::unique_ptr<CodecJob> done) {
    self->OnDone(std::move(done), result);
    self->on_change_();
  };
  host_.queue.Submit(std::move(job));
}

void CodecStream::OnDone(std::unique_ptr<CodecJob> job, v1::CodecResult result) {
  Describe(*job, &result);
  absl::MutexLock lock(&mutex_);
  --in_queue_;
  if (cancelled_) return;
  if (!job->status.ok()) {
    held_bytes_ -= job->memory.bytes();
    AddAnswer(std::move(result), nullptr);
    return;
  }
  // What was made of it is all that is still needed.
  if (op_ == CodecOp::kEncode) job->block = {};
  job->references.clear();
  AddAnswer(std::move(result), std::move(job));
}

void CodecStream::AddAnswer(v1::CodecResult result, std::shared_ptr<const CodecJob> job) {
  Answer answer{.result = std::move(result), .job = std::move(job), .bytes = {}};
  if (answer.job != nullptr) {
    answer.bytes = op_ == CodecOp::kEncode
                       ? std::span<const std::byte>(answer.job->frame.bytes)
                       : std::span<const std::byte>(answer.job->raw.data(),
                                                    model_->geometry.raw_block_bytes());
  }
  answers_.push_back(std::move(answer));
}

bool CodecStream::NextPiece(v1::CodecResponse* response, std::shared_ptr<const CodecJob>* job,
                            std::span<const std::byte>* bytes) {
  if (answers_.empty()) return false;
  Answer& answer = answers_.front();
  if (sent_of_front_ == 0) *response->mutable_result() = answer.result;
  *bytes = answer.bytes.subspan(sent_of_front_);
  *bytes = bytes->first(std::min(bytes->size(), kDataBytesMax));
  response->set_item_id(answer.result.item_id());
  response->set_offset(sent_of_front_);
  *job = answer.job;
  sent_of_front_ += bytes->size();
  if (sent_of_front_ == answer.bytes.size()) {
    if (answer.job != nullptr) held_bytes_ -= answer.job->memory.bytes();
    answers_.pop_front();
    sent_of_front_ = 0;
  }
  return true;
}

bool CodecStream::NextOfLayers(v1::CodecResponse* response, std::shared_ptr<const CodecJob>* job,
                               std::span<const std::byte>* bytes) {
  if (!input_closed_ || incoming_ != nullptr || in_queue_ > 0) return false;
  if (results_sent_ < answers_.size()) {
    *response->mutable_result() = answers_[results_sent_++].result;
    return true;
  }
  const KvGeometry& geometry = model_->geometry;
  for (; layer_ < geometry.layer_count(); ++layer_, answer_of_layer_ = 0) {
    const std::size_t begin = geometry.layer_begin(layer_), end = geometry.layer_end(layer_);
    while (answer_of_layer_ < answers_.size()) {
      const Answer& answer = answers_[answer_of_layer_];
      const std::size_t at = begin + sent_of_front_;
      if (answer.job == nullptr || at == end) {
        ++answer_of_layer_;
        sent_of_front_ = 0;
        continue;
      }
      *bytes = answer.bytes.subspan(at, std::min(end - at, kDataBytesMax));
      response->set_item_id(answer.result.item_id());
      response->set_offset(at);
      *job = answer.job;
      sent_of_front_ += bytes->size();
      return true;
    }
  }
  answers_.clear();
  held_bytes_ = 0;
  return false;
}

std::optional<std::size_t> CodecStream::TakeMessage(grpc::ByteBuffer* message) {
  v1::CodecResponse response;
  std::shared_ptr<const CodecJob> job;
  std::span<const std::byte> bytes;
  {
    absl::MutexLock lock(&mutex_);
    if (cancelled_) return std::nullopt;
    const bool more =
        layer_major_ ? NextOfLayers(&response, &job, &bytes) : NextPiece(&response, &job, &bytes);
    if (!more) return std::nullopt;
  }
  if (bytes.empty()) {
    *message = ComposeBulkMessage(response, {});
    return 0;
  }
  response.set_crc32c(Crc32c(bytes));
  const grpc::Slice slice = SliceOf(bytes, std::move(job));
  *message = ComposeBulkMessage(response, {&slice, 1});
  return bytes.size();
}

void CodecStream::CloseInput() {
  {
    absl::MutexLock lock(&mutex_);
    input_closed_ = true;
    if (incoming_ != nullptr && incoming_->job != nullptr) {
      FailIncoming(absl::InvalidArgumentError(
          absl::StrCat("block_bytes: ", incoming_->received_bytes, " bytes came, of ",
                       incoming_->wanted_bytes, ", before the stream ended")));
    }
    incoming_.reset();
    if (model_ == nullptr && status_.ok()) {
      status_ = absl::InvalidArgumentError("open: no message came");
    }
  }
  on_change_();
}

void CodecStream::Cancel() {
  std::deque<Answer> answers;
  std::unique_ptr<Incoming> incoming;
  abandoned_->store(true, std::memory_order_relaxed);
  absl::MutexLock lock(&mutex_);
  cancelled_ = true;
  answers.swap(answers_);
  incoming.swap(incoming_);
  waiting_.reset();
}

bool CodecStream::wants_message() const {
  absl::MutexLock lock(&mutex_);
  if (cancelled_ || input_closed_ || !status_.ok() || waiting_ != nullptr) return false;
  if (!layer_major_ && answers_.size() >= kAnswersMax) return false;
  // In the middle of an item, which has its memory.
  if (incoming_ != nullptr) return true;
  return layer_major_ || held_bytes_ <= host_.memory.limit_bytes() / kMemoryShare;
}

bool CodecStream::owes_progress() const {
  absl::MutexLock lock(&mutex_);
  if (incoming_ != nullptr && incoming_->job != nullptr) return true;
  // Answers that go out layer by layer wait for the end of the input.
  return IsIdle() || (layer_major_ && !input_closed_ && in_queue_ == 0);
}

bool CodecStream::Tick() {
  absl::MutexLock lock(&mutex_);
  // While it waits it has a job.
  if (waiting_ == nullptr || host_.clock.Monotonic() <= incoming_->job->deadline) return false;
  incoming_->result.set_retry_after_ms(static_cast<std::uint32_t>(kMemoryRetryAfter.count()));
  FailIncoming(absl::ResourceExhaustedError(
      "block_bytes: the item's time was over before there was memory for it (--memory_bytes)"));
  return true;
}

bool CodecStream::idle() const {
  absl::MutexLock lock(&mutex_);
  return IsIdle();
}

bool CodecStream::IsIdle() const {
  return (incoming_ == nullptr || incoming_->job == nullptr) && in_queue_ == 0 && answers_.empty();
}

bool CodecStream::finished() const {
  absl::MutexLock lock(&mutex_);
  return input_closed_ && incoming_ == nullptr && in_queue_ == 0 && answers_.empty();
}

absl::Status CodecStream::status() const {
  absl::MutexLock lock(&mutex_);
  return status_;
}

}  // namespace kvtrie
