#include "server/worker/fit_call.h"

#include <grpcpp/support/slice.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <span>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/model_spec_from_proto.h"
#include "server/cancel_call.h"
#include "server/status_translation.h"
#include "server/wire_conversion.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/codec/fit_material.h"
#include "storage/codec/profile_draft.h"
#include "storage/codec/residual_fit.h"

namespace kvtrie {
namespace {

// Whoever has the turn keeps it from others: all texts have to be here by then.
constexpr std::chrono::minutes kTextsTime{10};

grpc::Slice SliceOf(std::shared_ptr<const std::string> text, std::size_t at, std::size_t bytes) {
  auto* const owner = new std::shared_ptr<const std::string>(std::move(text));
  return {const_cast<char*>((*owner)->data() + at), bytes,
          [](void* held) { delete static_cast<std::shared_ptr<const std::string>*>(held); }, owner};
}

}  // namespace

absl::Status FitRequest::Open(const v1::FitOpen& open) {
  if (opened_) return absl::InvalidArgumentError("open: is in the first message of a stream only");
  KV_RETURN_IF_ERROR(CheckFitOpen(open, limits_));
  auto spec = ModelSpecFromProto(open.model());
  if (spec.ok()) {
    if (absl::Status valid = spec->Validate(); !valid.ok()) spec = valid;
  }
  if (!spec.ok()) return Within("open.model: ", spec.status());
  if (!spec->layout_tag.empty()) {
    return absl::InvalidArgumentError("open.model.layout_tag: no profile fits such a model");
  }
  spec_ = *spec;
  open_ = open;
  opened_ = true;
  const KvGeometry geometry(spec_);
  token_bytes_ = geometry.raw_block_bytes() / geometry.block_tokens();
  const ResidualFitOptions options = Options();
  const std::uint64_t working_bytes = FitWorkingBytes(spec_, options, 0);
  working_bytes_per_token_ = FitWorkingBytes(spec_, options, 1) - working_bytes;
  held_bytes_ = 2 * open.material_bytes() + working_bytes;  // as it is sent, and decoded
  if (held_bytes_ > limits_.fit_bytes_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat("open.model: to fit it takes ", held_bytes_,
                     " bytes beside its texts, and this worker's limit is ", limits_.fit_bytes_max,
                     " (--fit_bytes_max); open.block_per_head takes far less"));
  }
  return absl::OkStatus();
}

absl::Status FitRequest::CheckComplete() const {
  if (!opened_) return absl::InvalidArgumentError("open: no message came");
  if (material_.size() != open_.material_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("open.material_bytes: ", open_.material_bytes(),
                                                   ", and ", material_.size(), " came"));
  }
  if (!samples_.empty() && samples_.back().received_bytes != samples_.back().raw_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "data: ", samples_.back().received_bytes, " bytes of text ", samples_.size() - 1,
        " came, and its tokens have ", samples_.back().raw_bytes));
  }
  return absl::OkStatus();
}

absl::Status FitRequest::Begin(const v1::FitSample& sample) {
  KV_RETURN_IF_ERROR(CheckComplete());
  const std::size_t count = sample.tokens().size() / sizeof(TokenId);
  if (count == 0 || sample.tokens().size() % sizeof(TokenId) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("sample.tokens: ", sample.tokens().size(),
                                                   " bytes are not whole u32le token ids"));
  }
  const std::size_t bytes = count * token_bytes_;
  const std::uint64_t taken = bytes + count * working_bytes_per_token_;
  if (taken > limits_.fit_bytes_max - held_bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "sample: with it, texts and fitting take ", held_bytes_ + taken,
        " bytes, and this worker's limit is ", limits_.fit_bytes_max, " (--fit_bytes_max)"));
  }
  held_bytes_ += taken;
  Sample& added = samples_.emplace_back();
  added.tokens.resize(count);
  std::memcpy(added.tokens.data(), sample.tokens().data(), sample.tokens().size());
  added.raw = AlignedBuffer(bytes);
  added.raw_bytes = bytes;
  return absl::OkStatus();
}

absl::Status FitRequest::Add(const v1::FitProfileRequest& request, const BulkPayload& payload) {
  if (request.has_open()) KV_RETURN_IF_ERROR(Open(request.open()));
  if (!opened_) {
    return absl::InvalidArgumentError("open: has to be in the first message of a stream");
  }
  if (request.has_sample()) KV_RETURN_IF_ERROR(Begin(request.sample()));
  if (payload.size() > kDataBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("data: ", payload.size(), " bytes are over the limit of ", kDataBytesMax));
  }
  std::uint32_t crc = 0;
  for (const auto& piece : payload.pieces()) {
    crc = Crc32c(piece, crc);
    if (samples_.empty()) {
      if (piece.size() > open_.material_bytes() - material_.size()) {
        return absl::InvalidArgumentError("data: more than open.material_bytes");
      }
      // Not before: whoever announces bytes may have none.
      material_.reserve(open_.material_bytes());
      material_.append(reinterpret_cast<const char*>(piece.data()), piece.size());
      continue;
    }
    Sample& sample = samples_.back();
    if (piece.size() > sample.raw_bytes - sample.received_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("data: more raw KV than the tokens of text ", samples_.size() - 1, " have"));
    }
    std::memcpy(sample.raw.data() + sample.received_bytes, piece.data(), piece.size());
    sample.received_bytes += piece.size();
  }
  if (crc != request.crc32c()) {
    return absl::InvalidArgumentError("crc32c: the bytes of a message do not match");
  }
  return absl::OkStatus();
}

ResidualFitOptions FitRequest::Options() const {
  ResidualFitOptions options;
  options.rounds = open_.rounds() == 0 ? 1 : static_cast<int>(open_.rounds());
  if (open_.table_tokens_max() != 0) options.table_tokens_max = open_.table_tokens_max();
  options.block_per_head = open_.block_per_head();
  for (const v1::FitLevel& level : open_.levels()) {
    ResidualLevel& added = options.levels.emplace_back();
    added.quality = FromProto(level.quality());
    added.step = static_cast<float>(level.step());
    added.rate_weight =
        static_cast<float>(level.rate_weight() == 0 ? kRateWeight : level.rate_weight());
    added.importance_strength = static_cast<float>(
        level.importance_strength() == 0 ? kImportanceStrength : level.importance_strength());
  }
  // Text that samples share by chance is no ground for differences, which would have to be
  // measured.
  options.differences.tokens_min = 0;
  return options;
}

absl::StatusOr<std::string> FitRequest::Fit(const Tell& tell,
                                            const std::function<bool()>& is_cancelled) const {
  KV_RETURN_IF_ERROR(CheckComplete());
  FitMaterial material;
  if (!material_.empty()) {
    KV_ASSIGN_OR_RETURN(material, FitMaterial::Decode(PlanesOf(spec_), material_));
  }
  std::vector<KvSample> samples;
  for (const Sample& sample : samples_) {
    samples.push_back({.tokens = sample.tokens, .raw = {sample.raw.data(), sample.raw_bytes}});
  }
  ResidualFitOptions options = Options();
  options.progress = tell;
  options.is_cancelled = is_cancelled;
  KV_ASSIGN_OR_RETURN(const ResidualProfile profile,
                      FitResidualProfile(spec_, samples, material, options));
  return EncodeDraft(profile.codec_key, profile.EncodeBody());
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* FitCall::Start(
    WorkerContext& context, grpc::CallbackServerContext* call) {
  const std::shared_ptr<FitCall> fit_call(new FitCall(context, call));
  {
    absl::MutexLock lock(&fit_call->mutex_);
    fit_call->self_ = fit_call;
  }
  if (const absl::Status status = context.streams.Add(fit_call); !status.ok()) {
    fit_call->FinishWith(status);
  } else {
    fit_call->ReadNext();
  }
  return fit_call.get();
}

void FitCall::GiveBackTurn() {
  if (std::exchange(holds_turn_, false)) context_.fit_turn.GiveBack();
}

void FitCall::ReadNext() {
  absl::MutexLock lock(&mutex_);
  if (finished_) return;
  ArmStall(context_.streams.clock().Monotonic());
  StartRead(&message_);
}

void FitCall::OnReadDone(bool ok) {
  DisarmStall();
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    fits_ = !ok;
  }
  if (!ok) {
    std::thread([self = shared_from_this()] { self->Fit(); }).detach();
    return;
  }
  if (const absl::Status status = Take(); !status.ok()) {
    FinishWith(status);
  } else {
    ReadNext();
  }
}

absl::Status FitCall::Take() {
  v1::FitProfileRequest request;
  BulkPayload payload;
  KV_RETURN_IF_ERROR(ParseBulkMessage(message_, &request, &payload));
  const Clock::Duration now = context_.streams.clock().Monotonic();
  const bool begins = !request_.opened();
  KV_RETURN_IF_ERROR(request_.Add(request, payload));
  context_.metrics.Received(payload.size());
  if (begins) {
    texts_until_ = now + kTextsTime;
    absl::MutexLock lock(&mutex_);
    if (finished_) return absl::CancelledError("ended");
    if (!context_.fit_turn.Take()) {
      return absl::ResourceExhaustedError(
          "another profile is being fitted here; come back later, or use another worker");
    }
    holds_turn_ = true;
    // Whoever waits for it knows that the turn is theirs.
    StartSendInitialMetadata();
  }
  if (now > texts_until_) {
    return absl::DeadlineExceededError(absl::StrCat(
        "data: not all texts came within ", kTextsTime.count(), " minutes, and others wait"));
  }
  absl::MutexLock lock(&mutex_);
  if (holds_turn_) context_.fit_turn.SetHeldBytes(request_.held_bytes());
  return absl::OkStatus();
}

absl::StatusOr<std::string> FitCall::FitTexts() {
  try {
    return request_.Fit(
        [this](double done_share, std::string_view doing) { Tell(done_share, doing); },
        [this] {
          absl::MutexLock lock(&mutex_);
          return finished_;
        });
  } catch (const std::bad_alloc&) {
    // Its size was estimated, and the machine may have less than the limit says.
    return absl::ResourceExhaustedError("open.model: not enough memory to fit it");
  }
}

void FitCall::Fit() {
  auto draft = FitTexts();
  // From here on nothing of the worker is used unless its call is still there.
  absl::MutexLock lock(&mutex_);
  fits_ = false;
  GiveBackTurn();
  if (!draft.ok()) {
    FinishLocked(draft.status());
    return;
  }
  draft_ = std::make_shared<const std::string>(*std::move(draft));
  WriteNext();
}

void FitCall::Tell(double done_share, std::string_view doing) {
  absl::MutexLock lock(&mutex_);
  progress_.set_done_share(done_share);
  progress_.set_doing(std::string(doing));
  has_progress_ = true;
  WriteNext();
}

void FitCall::WriteNext() {
  if (writing_ || finished_) return;
  if (draft_ != nullptr) {
    v1::FitProfileResponse response;
    response.set_done_share(1);
    if (sent_bytes_ == 0) response.set_draft_bytes(draft_->size());
    const std::size_t bytes = std::min(draft_->size() - sent_bytes_, kDataBytesMax);
    response.set_crc32c(Crc32c(std::as_bytes(std::span(*draft_)).subspan(sent_bytes_, bytes)));
    const grpc::Slice slice = SliceOf(draft_, sent_bytes_, bytes);
    write_buffer_ = ComposeBulkMessage(response, {&slice, 1});
    sent_bytes_ += bytes;
    context_.metrics.Sent(bytes);
    writing_ = true;
    ArmStall(context_.streams.clock().Monotonic());
    if (sent_bytes_ < draft_->size()) {
      StartWrite(&write_buffer_);
      return;
    }
    finished_ = true;
    probe_.Finish(0);
    StartWriteAndFinish(&write_buffer_, grpc::WriteOptions(), grpc::Status::OK);
  } else if (has_progress_) {
    has_progress_ = false;
    write_buffer_ = ComposeBulkMessage(progress_, {});
    writing_ = true;
    ArmStall(context_.streams.clock().Monotonic());
    StartWrite(&write_buffer_);
  }
}

void FitCall::OnWriteDone(bool ok) {
  DisarmStall();
  absl::MutexLock lock(&mutex_);
  writing_ = false;
  if (finished_) return;
  if (ok) {
    WriteNext();
  } else {
    FinishLocked(absl::CancelledError("the reader has gone"));
  }
}

void FitCall::OnDrain() {
  FinishWith(absl::UnavailableError("the worker drains; fit on another one"));
}

void FitCall::OnCancel() { FinishWith(absl::CancelledError("cancelled by the client")); }

void FitCall::Abort(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  // Behind a write that is stuck the status would be stuck too.
  if (writing_ && !done_) CancelCall(*call_, status);
  FinishLocked(status);
}

void FitCall::FinishWith(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  FinishLocked(status);
}

void FitCall::FinishLocked(const absl::Status& status) {
  if (finished_) return;
  finished_ = true;
  if (!fits_) GiveBackTurn();
  DisarmStall();
  probe_.Finish(static_cast<int>(status.code()));
  Finish(ToGrpc(status));
}

void FitCall::OnDone() {
  DisarmStall();
  context_.streams.Remove(this);
  std::shared_ptr<FitCall> self;
  absl::MutexLock lock(&mutex_);
  finished_ = true;
  done_ = true;
  self = std::move(self_);
}

}  // namespace kvtrie
