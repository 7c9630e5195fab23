#include "client/raw_call.h"

#include "client/status_from_grpc.h"
#include "storage/base/check.h"

namespace kvtrie {

RawCall::RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                 std::optional<Deadline> deadline, bool wait_for_ready) {
  context_.set_wait_for_ready(wait_for_ready);
  if (deadline.has_value()) context_.set_deadline(deadline->ToGrpc());
  context_.set_initial_metadata_corked(true);
  grpc::GenericStub stub(channel);
  stream_ = stub.PrepareCall(&context_, method, &queue_);
}

RawCall::~RawCall() {
  if (ops_in_flight_ > 0) context_.TryCancel();
  void* tag;
  bool ok;
  while (ops_in_flight_ > 0 && queue_.Next(&tag, &ok)) --ops_in_flight_;
  queue_.Shutdown();
  while (queue_.Next(&tag, &ok)) {
  }
}

void RawCall::Write(const grpc::ByteBuffer& message, bool last) {
  if (!started_) {
    started_ = true;
    stream_->StartCall(
        Tag(Op::kWrite));  // corked: it leaves with the message and has no completion
  }
  ++ops_in_flight_;
  if (last) {
    stream_->WriteLast(message, grpc::WriteOptions(), Tag(Op::kWrite));
  } else {
    stream_->Write(message, Tag(Op::kWrite));
  }
}

void RawCall::Read() {
  ++ops_in_flight_;
  stream_->Read(&message_, Tag(Op::kRead));
}

std::optional<RawCall::Completion> RawCall::Next(Deadline deadline) {
  KV_CHECK(ops_in_flight_ > 0);
  void* tag = nullptr;
  bool ok = false;
  if (queue_.AsyncNext(&tag, &ok, deadline.ToGrpc()) != grpc::CompletionQueue::GOT_EVENT) {
    return std::nullopt;
  }
  --ops_in_flight_;
  return Completion{static_cast<Op>(reinterpret_cast<std::intptr_t>(tag) - 1), ok};
}

absl::Status RawCall::Finish(Deadline deadline) {
  ++ops_in_flight_;
  stream_->Finish(&status_, Tag(Op::kFinish));
  bool cancelled = false;
  while (true) {
    const auto completion =
        cancelled ? Next(Deadline::After(std::chrono::seconds(1))) : Next(deadline);
    if (completion.has_value()) {
      if (completion->op == Op::kFinish) break;
      continue;
    }
    context_.TryCancel();
    cancelled = true;
  }
  if (cancelled) return absl::DeadlineExceededError("the server did not end the call in time");
  return FromGrpc(status_);
}

}  // namespace kvtrie
