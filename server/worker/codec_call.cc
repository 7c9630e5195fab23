#include "server/worker/codec_call.h"

#include <utility>

#include "proto/bulk_message.h"
#include "server/cancel_call.h"
#include "server/status_translation.h"

namespace kvtrie {

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* CodecCall::Start(
    WorkerContext& context, CodecOp op, grpc::CallbackServerContext* call) {
  const std::shared_ptr<CodecCall> codec_call(new CodecCall(context, op, call));
  codec_call->stream_ =
      CodecStream::Create(context.host, op, [weak = codec_call->weak_from_this()] {
        if (const auto self = weak.lock()) self->Pump();
      });
  {
    absl::MutexLock lock(&codec_call->mutex_);
    codec_call->self_ = codec_call;
  }
  if (const absl::Status status = context.streams.Add(codec_call); !status.ok()) {
    codec_call->FinishWith(status);
  } else {
    // A client may wait for this before it sends its first message.
    codec_call->StartSendInitialMetadata();
    codec_call->Pump();
  }
  return codec_call.get();
}

// Does what there is to do: ends, writes, reads.
void CodecCall::Pump() {
  absl::Status end = stream_->status();
  bool ended = !end.ok();
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    if (!ended && !writing_) {
      if (stream_->TakeResponse(&write_buffer_)) {
        writing_ = true;
        context_.metrics.Sent(write_buffer_.Length());
        StartWrite(&write_buffer_);
      } else if (stream_->finished()) {
        ended = true;
      } else if (draining_ && stream_->idle()) {
        ended = true;
        end = absl::UnavailableError("the worker drains; use another one");
      }
    }
    if (!ended) {
      if (!reading_ && stream_->wants_message()) {
        reading_ = true;
        StartRead(&read_buffer_);
      }
      WatchForStall();
    }
  }
  if (ended) FinishWith(end);
}

void CodecCall::WatchForStall() {
  // While it waits (for memory, or for its turn) the caller owes nothing. One that asks for nothing
  // has a place that others need.
  if (!writing_ && !(reading_ && (stream_->owes_bytes() || stream_->idle()))) {
    DisarmStall();
  } else if (!stall_is_armed() || (progress_bytes_ >= kProgressBytes && !writing_)) {
    // What is sent is no progress where answers are not read.
    progress_bytes_ = 0;
    ArmStall(context_.streams.clock().Monotonic());
  }
}

void CodecCall::OnReadDone(bool ok) {
  if (!ok) {
    {
      absl::MutexLock lock(&mutex_);
      // Stays "reading": there is nothing more to read.
      if (finished_) return;
    }
    stream_->CloseInput();
    return;
  }
  auto message = std::make_unique<CodecMessage>();
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    status = ParseBulkMessage(read_buffer_, &message->request, &message->payload);
    read_buffer_.Clear();
  }
  if (!status.ok()) {
    FinishWith(status);
    return;
  }
  const std::size_t received_bytes = message->payload.size();
  context_.metrics.Received(received_bytes);
  {
    // Receive() itself may read on: another thread's Pump reads the next message only once this one
    // was taken.
    absl::MutexLock lock(&mutex_);
    progress_bytes_ += received_bytes;
  }
  stream_->Receive(std::move(message));
  {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
  }
  Pump();
}

void CodecCall::OnWriteDone(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    DisarmStall();  // that was progress
    write_buffer_.Clear();
  }
  if (!ok) {
    FinishWith(absl::CancelledError("the reader has gone"));
    return;
  }
  Pump();
}

void CodecCall::OnCancel() { FinishWith(absl::CancelledError("cancelled by the client")); }

void CodecCall::Abort(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    // Behind a write that is stuck the status would be stuck too.
    if (writing_) CancelCall(*call_, status);
  }
  FinishWith(status);
}

void CodecCall::OnDrain() {
  {
    absl::MutexLock lock(&mutex_);
    draining_ = true;
  }
  Pump();
}

void CodecCall::FinishWith(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    finished_ = true;
    DisarmStall();
  }
  // Whoever sees the end sees its memory given back.
  stream_->Cancel();
  probe_.Finish(static_cast<int>(status.code()));
  Finish(ToGrpc(status));
}

void CodecCall::OnDone() {
  DisarmStall();
  context_.streams.Remove(this);
  stream_->Cancel();
  std::shared_ptr<CodecCall> self;
  {
    absl::MutexLock lock(&mutex_);
    finished_ = true;
    self = std::move(self_);
  }
}

}  // namespace kvtrie
