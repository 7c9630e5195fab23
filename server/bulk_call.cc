#include "server/bulk_call.h"

#include <utility>

#include "server/cancel_call.h"
#include "server/status_translation.h"

namespace kvtrie {

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* BulkCall::Start(
    const Host& host, RpcMethod method, grpc::CallbackServerContext* call,
    const MakeStream& make_stream) {
  const std::shared_ptr<BulkCall> bulk_call(new BulkCall(host, method, call));
  bulk_call->stream_ = make_stream([weak = bulk_call->weak_from_this()] {
    if (const auto self = weak.lock()) self->Pump();
  });
  {
    absl::MutexLock lock(&bulk_call->mutex_);
    bulk_call->self_ = bulk_call;
  }
  if (const absl::Status status = host.streams.Add(bulk_call); !status.ok()) {
    bulk_call->FinishWith(status);
  } else {
    // A client may wait for this before it sends its first message.
    bulk_call->StartSendInitialMetadata();
    bulk_call->Pump();
  }
  return bulk_call.get();
}

// Does what there is to do: ends, writes, reads.
void BulkCall::Pump() {
  absl::Status end = stream_->status();
  bool ended = !end.ok();
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    if (!ended && !writing_) {
      if (const auto payload_bytes = stream_->TakeMessage(&write_buffer_)) {
        writing_ = true;
        host_.metrics.Sent(*payload_bytes);
        StartWrite(&write_buffer_);
      } else if (stream_->finished()) {
        ended = true;
      } else if (draining_ && stream_->idle()) {
        ended = true;
        end = absl::UnavailableError("this one drains; use another one");
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

void BulkCall::WatchForStall() {
  // While we wait (for memory, for the disk, for a turn) the peer owes nothing.
  if (!writing_ && !(reading_ && stream_->owes_progress())) {
    DisarmStall();
  } else if (!stall_is_armed() || (progress_bytes_ >= kProgressBytes && !writing_)) {
    // What is sent is no progress where answers are not read.
    progress_bytes_ = 0;
    ArmStall(host_.streams.clock().Monotonic());
  }
}

void BulkCall::OnReadDone(bool ok) {
  grpc::ByteBuffer message;
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    message.Swap(&read_buffer_);
  }
  if (!ok) {
    // Stays "reading": there is nothing more to read.
    stream_->CloseInput();
    Pump();
    return;
  }
  const auto payload_bytes = stream_->ReceiveMessage(message);
  if (!payload_bytes.ok()) {
    FinishWith(payload_bytes.status());
    return;
  }
  host_.metrics.Received(*payload_bytes);
  {
    // Only now: a Pump of another thread would read the next message past this one.
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    progress_bytes_ += *payload_bytes;
  }
  Pump();
}

void BulkCall::OnWriteDone(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    DisarmStall();  // that was progress
    write_buffer_.Clear();
  }
  if (!ok) {
    FinishWith(absl::CancelledError("the peer has gone"));
    return;
  }
  Pump();
}

void BulkCall::OnCancel() { FinishWith(absl::CancelledError("cancelled by the client")); }

void BulkCall::Abort(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    // Behind a write that is stuck a status is stuck too, this one or that of an earlier end.
    if (writing_) CancelCall(*call_, status);
  }
  FinishWith(status);
}

void BulkCall::OnTick() {
  if (stream_->Tick()) Pump();
}

void BulkCall::OnDrain() {
  {
    absl::MutexLock lock(&mutex_);
    draining_ = true;
  }
  Pump();
}

void BulkCall::FinishWith(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    finished_ = true;
    if (!writing_) DisarmStall();
  }
  // Whoever sees the end sees its memory given back.
  stream_->Cancel();
  probe_.Finish(static_cast<int>(status.code()));
  Finish(ToGrpc(status));
}

void BulkCall::OnDone() {
  DisarmStall();
  host_.streams.Remove(this);
  stream_->Cancel();
  std::shared_ptr<BulkCall> self;
  {
    absl::MutexLock lock(&mutex_);
    finished_ = true;
    self = std::move(self_);
  }
}

}  // namespace kvtrie
