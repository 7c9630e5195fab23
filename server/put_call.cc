#include "server/put_call.h"

#include <utility>

#include "proto/bulk_message.h"
#include "server/status_translation.h"
#include "storage/base/status_macros.h"

namespace kvtrie {

void EnginePutHost::BeginPut(const PutAnnouncement& put, BeginCallback on_begun) {
  const bool queued = context_.engine.RunBlocking(
      [this, &put, on_begun] { on_begun(context_.engine.BeginPut(kBuiltInTenant, put)); });
  if (!queued) on_begun(BusyError());
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* PutCall::Start(
    ServiceContext& context, PutHost& host, grpc::CallbackServerContext* call) {
  const std::shared_ptr<PutCall> put(new PutCall(context, call));
  put->stream_ = PutStream::Create(host, context.limits, [weak = put->weak_from_this()] {
    if (const auto self = weak.lock()) self->Pump();
  });
  {
    absl::MutexLock lock(&put->mutex_);
    put->self_ = put;
  }
  if (const absl::Status status = context.streams.Add(put); !status.ok()) {
    put->FinishWith(status);
  } else {
    // A client may wait for this before it sends its first message.
    put->StartSendInitialMetadata();
    put->Pump();
  }
  return put.get();
}

// Does what there is to do: ends, writes, reads.
void PutCall::Pump() {
  absl::Status end = stream_->status();
  bool ended = !end.ok();
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    if (!ended && !writing_) {
      if (stream_->TakeResponse(&response_)) {
        write_buffer_ = ComposeBulkMessage(response_, {});
        writing_ = true;
        StartWrite(&write_buffer_);
      } else if (stream_->finished()) {
        ended = true;
      } else if (draining_ && stream_->idle()) {
        ended = true;
        end = absl::UnavailableError("the server drains; use another one");
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

void PutCall::WatchForStall() {
  // While we wait (for memory, for the disk) the client owes nothing.
  if (!writing_ && !(reading_ && stream_->owes_bytes())) {
    DisarmStall();
  } else if (!stall_is_armed() || progress_bytes_ >= kProgressBytes) {
    progress_bytes_ = 0;
    ArmStall(context_.streams.clock().Monotonic());
  }
}

void PutCall::OnReadDone(bool ok) {
  if (!ok) {
    {
      absl::MutexLock lock(&mutex_);
      // Stays "reading": there is nothing more to read.
      if (finished_) return;
    }
    stream_->CloseInput();
    Pump();
    return;
  }
  auto message = std::make_unique<PutMessage>();
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
  stream_->Receive(std::move(message));
  {
    // Only now: a Pump of another thread would read the next message past this one.
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    progress_bytes_ += received_bytes;
  }
  Pump();
}

void PutCall::OnWriteDone(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    DisarmStall();  // that was progress
    write_buffer_.Clear();
  }
  if (!ok) {
    FinishWith(absl::CancelledError("the writer has gone"));
    return;
  }
  Pump();
}

void PutCall::OnCancel() { FinishWith(absl::CancelledError("cancelled by the client")); }

void PutCall::Abort(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    // Behind a write that is stuck the status would be stuck too.
    if (writing_) CancelCall(*call_, status);
  }
  FinishWith(status);
}

void PutCall::OnDrain() {
  {
    absl::MutexLock lock(&mutex_);
    draining_ = true;
  }
  Pump();
}

void PutCall::FinishWith(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    finished_ = true;
    DisarmStall();
    probe_.Finish(static_cast<int>(status.code()));
    Finish(ToGrpc(status));
  }
  stream_->Cancel();
}

void PutCall::OnDone() {
  DisarmStall();
  context_.streams.Remove(this);
  stream_->Cancel();
  std::shared_ptr<PutCall> self;
  {
    absl::MutexLock lock(&mutex_);
    finished_ = true;
    self = std::move(self_);
  }
}

}  // namespace kvtrie
