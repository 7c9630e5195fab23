#include "server/fetch_stream.h"

#include <grpcpp/support/slice.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/bulk_message.h"
#include "server/status_translation.h"
#include "server/wire_conversion.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

// So large a part of the streams' memory is kept for first frames.
constexpr std::size_t kReserveParts = 4;
// Blocks of fewer tokens than this decode slowly, each for itself.
constexpr std::size_t kDecodeTokens = 64;

// A slice of a frame that keeps the frame alive until gRPC lets go of it.
grpc::Slice MakeSlice(const FetchMessage::Run& run) {
  auto* owner = new std::shared_ptr<const HeldFrame>(run.frame);
  const std::byte* frame_begin =
      run.frame->loaded.view.body().data() - run.frame->loaded.view.header_bytes();
  // gRPC reads only; its signature lacks the const.
  void* begin = const_cast<std::byte*>(frame_begin + run.offset);
  return grpc::Slice(
      begin, run.bytes,
      [](void* data) { delete static_cast<std::shared_ptr<const HeldFrame>*>(data); }, owner);
}

}  // namespace

grpc::ServerWriteReactor<grpc::ByteBuffer>* FetchStream::Start(ServiceContext& context,
                                                               grpc::CallbackServerContext* call,
                                                               const grpc::ByteBuffer& request) {
  const std::shared_ptr<FetchStream> stream(new FetchStream(context, call));
  {
    absl::MutexLock lock(&stream->mutex_);
    stream->self_ = stream;
  }
  stream->Begin(request);
  return stream.get();
}

absl::Status FetchStream::Prepare(const grpc::ByteBuffer& request) {
  KV_RETURN_IF_ERROR(context_.streams.Add(shared_from_this()));
  BulkPayload payload;
  KV_RETURN_IF_ERROR(ParseBulkMessage(request, &request_, &payload));
  KV_RETURN_IF_ERROR(CheckFetch(request_, context_.limits));
  if (request_.model_id().empty()) request_.set_model_id(request_.prefix().model_id());
  if (request_.has_prefix()) request_.mutable_prefix()->set_model_id(request_.model_id());

  KV_ASSIGN_OR_RETURN(const std::shared_ptr<const KvGeometry> geometry,
                      context_.geometries.Get(IdFromProto<ModelId>(request_.model_id())));
  KV_ASSIGN_OR_RETURN(FetchShape shape, FetchShape::Make(request_, geometry));
  const std::size_t group_blocks =
      (kDecodeTokens + geometry->block_tokens() - 1) / geometry->block_tokens();
  absl::MutexLock lock(&mutex_);
  shape_ = std::move(shape);
  decode_ahead_bytes_ =
      std::max(context_.read_ahead_bytes, 2 * group_blocks * geometry->raw_block_bytes());
  return absl::OkStatus();
}

void FetchStream::Begin(const grpc::ByteBuffer& request) {
  if (const absl::Status status = Prepare(request); !status.ok()) {
    absl::MutexLock lock(&mutex_);
    FinishWith(status);
    return;
  }
  const Quality min_quality = FromProto(request_.min_quality());
  const ReadAs as = ReadAsOf(request_);
  if (!request_.has_prefix() && !request_.want_tokens()) {
    auto found =
        context_.engine.TryFindFrames(kBuiltInTenant, IdFromProto<ModelId>(request_.model_id()),
                                      NodeIdsFromProto(request_.node_ids()), min_quality, as);
    if (found.has_value()) {
      OnFound(*std::move(found));
      return;
    }
  }
  const bool queued = context_.engine.RunBlocking([self = shared_from_this(), min_quality, as] {
    const v1::FetchRequest& wanted = self->request_;
    Engine& engine = self->context_.engine;
    const auto model = IdFromProto<ModelId>(wanted.model_id());
    absl::StatusOr<Engine::FoundFrames> frames;
    if (wanted.has_prefix()) {
      const RequestPath path(wanted.prefix());
      frames = engine.FindFramesOfPath(kBuiltInTenant, path.view(), wanted.first_block(),
                                       wanted.block_count(), min_quality, as);
    } else {
      frames = engine.FindFrames(kBuiltInTenant, model, NodeIdsFromProto(wanted.node_ids()),
                                 min_quality, as);
    }
    if (frames.ok() && wanted.want_tokens()) {
      std::vector<TrieNodeId> nodes;
      for (const auto& frame : *frames) nodes.push_back(frame ? frame->node : TrieNodeId{});
      auto tokens = engine.TokensOfBlocks(kBuiltInTenant, model, nodes);
      absl::MutexLock lock(&self->mutex_);
      self->tokens_ = std::move(tokens);
    }
    self->OnFound(std::move(frames));
  });
  if (!queued) OnFound(BusyError());
}

void FetchStream::OnFound(absl::StatusOr<std::vector<std::optional<StoredFrame>>> frames) {
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    if (!frames.ok()) {
      FinishWith(frames.status());
      return;
    }
    if (frames->size() > kFetchBlocksMax) {
      FinishWith(absl::InvalidArgumentError(
          absl::StrCat("block_count: the prefix has ", frames->size(),
                       " blocks; name a range of at most ", kFetchBlocksMax)));
      return;
    }
    stored_ = *std::move(frames);
    steps_ = FetchSteps(shape_, stored_.size());
    if (shape_.layer_major) failed_.resize(stored_.size());
  }
  Pump();
}

void FetchStream::Pump() {
  std::vector<PendingRead> reads;
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    ReadAhead(&reads);
    if (!writing_) {
      FillMessage();
      if (finished_) return;
      // What was sent has made room.
      ReadAhead(&reads);
      const bool last = slots_.empty() && next_step_ == steps_.size();
      if (!message_.empty()) {
        WriteMessage(last);
      } else if (last) {
        FinishWith(absl::OkStatus());
      }
    }
  }
  if (reads.empty()) return;
  std::vector<StoredFrame> frames;
  for (const PendingRead& read : reads) frames.push_back(*read.stored);
  const ReadAs as = ReadAsOf(request_);
  const auto pending = std::make_shared<std::vector<PendingRead>>(std::move(reads));
  context_.engine.ReadFrames(
      frames, as,
      [self = shared_from_this(), pending](std::size_t i, absl::StatusOr<LoadedFrame> loaded) {
        PendingRead& read = (*pending)[i];
        self->OnFrameRead(read.slot_number, std::move(read.reservation), std::move(loaded));
      });
}

void FetchStream::ReadAhead(std::vector<PendingRead>* reads) {
  while (next_step_ < steps_.size() && !waiting_for_memory_ && slots_.size() < kSlotsMax) {
    const FetchStep step = steps_[next_step_];
    const std::optional<StoredFrame>& stored = stored_[step.block_index];
    if (!stored.has_value() || (!step.first_visit && failed_[step.block_index])) {
      ++next_step_;
      if (!step.first_visit) continue;
      if (shape_.layer_major) failed_[step.block_index] = true;
      Slot& slot = slots_.emplace_back();
      slot.step = step;
      slot.status = absl::NotFoundError("not stored at this quality");
      continue;
    }
    const std::size_t frame_bytes = stored->loaded_bytes(shape_.read_as);
    const auto resident = resident_.find(step.block_index);
    const bool decodes = resident == resident_.end() && Decodes(*stored);
    // Its first visit decodes it.
    if (decodes && !step.first_visit) return;
    const std::size_t ahead_max = decodes ? decode_ahead_bytes_ : context_.read_ahead_bytes;
    if (ahead_bytes_ > 0 && ahead_bytes_ + frame_bytes > ahead_max) return;
    // One at a time would come as soon as one has left.
    if (decodes && reads->empty() && ahead_bytes_ > ahead_max / 2) return;

    ByteReservation reservation;
    if (resident == resident_.end() && !Reserve(frame_bytes, &reservation)) return;
    ++next_step_;
    ahead_bytes_ += frame_bytes;
    Slot& slot = slots_.emplace_back();
    slot.step = step;
    if (resident != resident_.end()) {
      slot.frame = resident->second;
    } else if (auto loaded = context_.engine.TryReadFrame(*stored, shape_.read_as)) {
      SetFrame(slot, *std::move(loaded), std::move(reservation));
    } else {
      slot.reading = true;
      reads->push_back({first_slot_number_ + slots_.size() - 1, &*stored, std::move(reservation)});
    }
  }
}

bool FetchStream::Reserve(std::size_t frame_bytes, ByteReservation* reservation) {
  ByteBudget& budget = context_.stream_budget;
  if (granted_.bytes() == frame_bytes) {
    *reservation = std::move(granted_);
    granted_ = ByteReservation();
    return true;
  }
  if (ahead_bytes_ > 0 || writing_) {
    // This stream is being served. What is left is for those that are not: readers that have
    // stopped reading must not keep it from them.
    if (!budget.TryAcquire(frame_bytes, budget.limit_bytes() / kReserveParts)) return false;
    *reservation = ByteReservation(&budget, frame_bytes);
    return true;
  }
  const bool taken =
      budget.AcquireOrWait(frame_bytes, [self = shared_from_this(), &budget, frame_bytes] {
        // Released by whoever let go of a slice: gRPC's threads, mostly. Go on elsewhere.
        self->context_.timer.Post([self, &budget, frame_bytes] {
          ByteReservation granted(&budget, frame_bytes);
          {
            absl::MutexLock lock(&self->mutex_);
            self->waiting_for_memory_ = false;
            if (self->finished_) return;
            self->granted_ = std::move(granted);
          }
          self->Pump();
        });
      });
  if (taken) *reservation = ByteReservation(&budget, frame_bytes);
  waiting_for_memory_ = !taken;
  return taken;
}

void FetchStream::SetFrame(Slot& slot, LoadedFrame loaded, ByteReservation reservation) {
  const std::size_t frame_bytes = loaded.bytes.view.size();
  if (shape_.layer_major && !slot.step.last_visit) {
    if (context_.resident_budget.TryAcquire(frame_bytes)) {
      // Counted there instead, for as long as it stays.
      reservation = ByteReservation(&context_.resident_budget, frame_bytes);
      slot.frame =
          std::make_shared<const HeldFrame>(HeldFrame{std::move(loaded), std::move(reservation)});
      resident_.emplace(slot.step.block_index, slot.frame);
      return;
    }
    if (Decodes(*stored_[slot.step.block_index])) {
      // Decoding it again for each of its layers would cost more than the rest of the fetch.
      slot.status = absl::UnavailableError(
          "no memory for the layers of a decoded block; retry, or fetch it as ENCODING_FRAME");
      return;
    }
  }
  slot.frame =
      std::make_shared<const HeldFrame>(HeldFrame{std::move(loaded), std::move(reservation)});
}

void FetchStream::OnFrameRead(std::uint64_t slot_number, ByteReservation reservation,
                              absl::StatusOr<LoadedFrame> loaded) {
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    Slot& slot = slots_[slot_number - first_slot_number_];
    slot.reading = false;
    if (loaded.ok()) {
      SetFrame(slot, *std::move(loaded), std::move(reservation));
    } else {
      slot.status = loaded.status();
    }
  }
  Pump();
}

void FetchStream::FillMessage() {
  while (!slots_.empty() && !message_.full()) {
    Slot& slot = slots_.front();
    if (slot.reading) return;
    if (slot.frame != nullptr && !slot.begun) BeginSlot(slot);
    if (!slot.status.ok()) {
      if (!slot.step.first_visit) {
        if (failed_[slot.step.block_index]) {
          PopSlot();  // told at its first visit, after this one had been asked for
          continue;
        }
        // Its result was sent long ago, so that the failure can only be told of the whole. A copy:
        // the slot goes with the end of the stream.
        const absl::Status status = slot.status;
        FinishWith(status);
        return;
      }
      if (shape_.layer_major) failed_[slot.step.block_index] = true;
      message_.AddFailure(slot.step.block_index, slot.status);
      PopSlot();
      continue;
    }
    message_.AddChunks(slot.step.block_index, slot.frame, &slot.cursor);
    if (!slot.cursor.AtEnd()) return;
    PopSlot();
  }
}

void FetchStream::BeginSlot(Slot& slot) {
  slot.begun = true;
  const FrameView& view = slot.frame->loaded.view;
  auto cursor = ChunkCursor::Make(view, shape_, slot.step);
  if (!cursor.ok()) {
    slot.status = cursor.status();
    return;
  }
  slot.cursor = *cursor;
  if (slot.step.first_visit) {
    const StoredFrame& stored = *stored_[slot.step.block_index];
    message_.AddBlock(
        slot.step.block_index, stored, shape_.whole_frame ? view.codec() : stored.codec,
        BlockBytes(view, shape_),
        tokens_.empty() ? std::span<const TokenId>() : tokens_[slot.step.block_index]);
  }
}

void FetchStream::PopSlot() {
  const Slot& slot = slots_.front();
  if (stored_[slot.step.block_index].has_value()) {
    ahead_bytes_ -= stored_[slot.step.block_index]->loaded_bytes(shape_.read_as);
  }
  if (slot.step.last_visit) resident_.erase(slot.step.block_index);
  slots_.pop_front();
  ++first_slot_number_;
}

void FetchStream::WriteMessage(bool last) {
  std::vector<grpc::Slice> slices;
  slices.reserve(message_.runs().size());
  for (const FetchMessage::Run& run : message_.runs()) slices.push_back(MakeSlice(run));
  buffer_ = ComposeBulkMessage(message_.header(), slices);
  context_.metrics.Sent(message_.bytes());
  message_.Clear();
  writing_ = true;
  ArmStall(context_.streams.clock().Monotonic());
  if (!last) {
    StartWrite(&buffer_);
    return;
  }
  finished_ = true;
  probe_.Finish(0);
  StartWriteAndFinish(&buffer_, grpc::WriteOptions(), grpc::Status::OK);
}

void FetchStream::OnWriteDone(bool ok) {
  DisarmStall();
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    buffer_.Clear();
    if (!ok) {
      FinishWith(absl::CancelledError("the reader has gone"));
      return;
    }
  }
  Pump();
}

void FetchStream::OnCancel() {
  absl::MutexLock lock(&mutex_);
  FinishWith(absl::CancelledError("cancelled by the client"));
}

void FetchStream::Abort(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  // A last write may be stuck although Finish was called with it.
  if (self_ == nullptr || (finished_ && !writing_)) return;
  if (writing_) CancelCall(*call_, status);
  FinishWith(status);
}

void FetchStream::FinishWith(const absl::Status& status) {
  if (finished_) return;
  finished_ = true;
  Drop();
  probe_.Finish(static_cast<int>(status.code()));
  Finish(ToGrpc(status));
}

// Frames that gRPC does not hold are let go of now, not when the last byte has left.
void FetchStream::Drop() {
  slots_.clear();
  resident_.clear();
  granted_.Reset();
  message_.Clear();
}

void FetchStream::OnDone() {
  DisarmStall();
  context_.streams.Remove(this);
  std::shared_ptr<FetchStream> self;
  LeaseId lease;
  {
    absl::MutexLock lock(&mutex_);
    finished_ = true;
    writing_ = false;
    Drop();
    buffer_.Clear();
    lease = IdFromProto<LeaseId>(request_.release_lease_id());
    self = std::move(self_);
  }
  if (!lease.empty()) context_.engine.ReleaseLease(kBuiltInTenant, lease);
}

}  // namespace kvtrie
