#include "client/worker_call.h"

#include <grpcpp/client_context.h>
#include <grpcpp/support/slice.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/raw_call.h"
#include "client/status_from_grpc.h"
#include "kvtrie/v1/codec.grpc.pb.h"
#include "proto/bulk_message.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

constexpr std::size_t kMessageBytes = std::size_t{1} << 20;
// How long a stop may go unseen.
constexpr std::chrono::milliseconds kStopLook{100};
constexpr char kPutProfile[] = "/kvtrie.v1.Codec/PutProfile";

const char* NameOf(WorkerMethod method) {
  return method == WorkerMethod::kEncode ? "/kvtrie.v1.Codec/Encode" : "/kvtrie.v1.Codec/Decode";
}

// The messages of a call, one after the other.
class Sender {
 public:
  Sender(const v1::CodecOpen& open, std::span<const WorkerItem> items)
      : open_(open), items_(items) {}

  bool AtEnd() const { return item_ == items_.size(); }

  grpc::ByteBuffer Next() {
    v1::CodecRequest request;
    const WorkerItem& item = items_[item_];
    if (item_ == 0 && piece_ == 0 && offset_ == 0) *request.mutable_open() = open_;
    if (piece_ == 0 && offset_ == 0) {
      *request.mutable_item() = item.item;
      request.mutable_item()->set_item_id(item_);
    }
    const std::span<const std::byte> piece = item.bytes[piece_];
    const std::size_t bytes = std::min(kMessageBytes, piece.size() - offset_);
    const grpc::Slice slice(piece.data() + offset_, bytes);
    request.set_crc32c(Crc32c(piece.subspan(offset_, bytes)));
    offset_ += bytes;
    if (offset_ == piece.size()) {
      offset_ = 0;
      if (++piece_ == item.bytes.size()) {
        piece_ = 0;
        ++item_;
      }
    }
    return ComposeBulkMessage(request, {&slice, 1});
  }

 private:
  const v1::CodecOpen& open_;
  const std::span<const WorkerItem> items_;
  std::size_t item_ = 0;
  std::size_t piece_ = 0;
  std::size_t offset_ = 0;
};

// Puts answers where they belong.
class Receiver {
 public:
  explicit Receiver(std::span<WorkerItem> items) : items_(items), answers_(items.size()) {}

  absl::Status Take(const grpc::ByteBuffer& message) {
    v1::CodecResponse response;
    BulkPayload payload;
    KV_RETURN_IF_ERROR(ParseBulkMessage(message, &response, &payload));
    if (response.has_result()) KV_RETURN_IF_ERROR(Begin(response.result()));
    if (payload.size() == 0) return absl::OkStatus();
    const std::uint64_t id = response.item_id();
    if (id >= items_.size() || !answers_[id].begun || items_[id].answered) {
      return absl::DataLossError("worker: bytes of an item that was not answered");
    }
    Answer& answer = answers_[id];
    if (response.offset() != answer.received ||
        payload.size() > answer.to.size() - answer.received) {
      return absl::DataLossError("worker: bytes that do not follow those before them");
    }
    std::uint32_t crc = 0;
    for (const auto& piece : payload.pieces()) {
      crc = Crc32c(piece, crc);
      std::memcpy(answer.to.data() + answer.received, piece.data(), piece.size());
      answer.received += piece.size();
    }
    if (crc != response.crc32c()) return absl::DataLossError("worker: wrong checksum");
    items_[id].answered = answer.received == answer.to.size();
    return absl::OkStatus();
  }

 private:
  struct Answer {
    bool begun = false;
    std::span<std::byte> to;
    std::size_t received = 0;
  };

  absl::Status Begin(const v1::CodecResult& result) {
    if (result.item_id() >= items_.size() || answers_[result.item_id()].begun) {
      return absl::DataLossError("worker: an answer to no item of this call");
    }
    WorkerItem& item = items_[result.item_id()];
    Answer& answer = answers_[result.item_id()];
    answer.begun = true;
    item.result = result;
    if (result.status().code() != 0) {
      item.answered = true;
      return absl::OkStatus();
    }
    answer.to = item.place(result);
    if (answer.to.empty() || answer.to.size() != result.block_bytes()) {
      return absl::DataLossError(
          absl::StrCat("worker: an answer of ", result.block_bytes(), " bytes"));
    }
    return absl::OkStatus();
  }

  const std::span<WorkerItem> items_;
  std::vector<Answer> answers_;
};

// The call's next completion, or why there is none.
absl::StatusOr<RawCall::Completion> Await(RawCall& call, Deadline deadline,
                                          const std::atomic<bool>* stop) {
  while (stop == nullptr || !*stop) {
    const auto completion = call.Next(stop == nullptr ? deadline : deadline.AtMost(kStopLook));
    if (completion.has_value()) return *completion;
    if (deadline.expired()) return absl::DeadlineExceededError("worker: no answer in time");
  }
  return absl::CancelledError("worker: its caller stops");
}

}  // namespace

absl::Status CallWorker(const std::shared_ptr<grpc::Channel>& channel, WorkerMethod method,
                        const v1::CodecOpen& open, std::span<WorkerItem> items, Deadline deadline,
                        const std::atomic<bool>* stop) {
  if (items.empty()) return absl::OkStatus();
  RawCall call(channel, NameOf(method), deadline, /*wait_for_ready=*/false);
  Sender sender(open, items);
  Receiver receiver(items);
  bool writing = false, reading = false;
  while (true) {
    if (!writing && !sender.AtEnd()) {
      grpc::ByteBuffer message = sender.Next();
      call.Write(message, sender.AtEnd());
      writing = true;
    }
    if (!reading) {
      call.Read();
      reading = true;
    }
    KV_ASSIGN_OR_RETURN(const RawCall::Completion completion, Await(call, deadline, stop));
    if (completion.op == RawCall::Op::kWrite) {
      // When it fails, reading tells why.
      writing = !completion.ok;
      continue;
    }
    reading = false;
    if (!completion.ok) {
      KV_RETURN_IF_ERROR(call.Finish(deadline));
      return absl::DataLossError("worker: the call ended before all items were answered");
    }
    KV_RETURN_IF_ERROR(receiver.Take(call.message()));
    call.ForgetMessage();
    const bool all = std::all_of(items.begin(), items.end(),
                                 [](const WorkerItem& item) { return item.answered; });
    if (all) return absl::OkStatus();
  }
}

absl::Status SendProfile(const std::shared_ptr<grpc::Channel>& channel,
                         std::span<const std::byte> profile, Deadline deadline,
                         const std::atomic<bool>* stop) {
  if (profile.empty()) return absl::InvalidArgumentError("worker: an empty profile");
  RawCall call(channel, kPutProfile, deadline, /*wait_for_ready=*/false);
  for (std::size_t at = 0; at < profile.size();) {
    const auto piece = profile.subspan(at, std::min(kMessageBytes, profile.size() - at));
    v1::PutProfileRequest request;
    if (at == 0) request.set_total_bytes(profile.size());
    v1::Chunk* const chunk = request.add_chunks();
    chunk->set_offset(at);
    chunk->set_bytes(static_cast<std::uint32_t>(piece.size()));
    chunk->set_crc32c(Crc32c(piece));
    const grpc::Slice slice(piece.data(), piece.size());
    at += piece.size();
    call.Write(ComposeBulkMessage(request, {&slice, 1}), /*last=*/at == profile.size());
    KV_ASSIGN_OR_RETURN(const RawCall::Completion written, Await(call, deadline, stop));
    if (!written.ok) break;  // Finish() tells why
  }
  call.Read();
  KV_RETURN_IF_ERROR(Await(call, deadline, stop).status());
  return call.Finish(deadline);
}

absl::StatusOr<v1::DescribeResponse> DescribeWorker(const std::shared_ptr<grpc::Channel>& channel,
                                                    Deadline deadline) {
  grpc::ClientContext context;
  context.set_deadline(deadline.ToGrpc());
  v1::DescribeResponse response;
  KV_RETURN_IF_ERROR(FromGrpc(v1::Codec::NewStub(channel)->Describe(&context, {}, &response)));
  return response;
}

}  // namespace kvtrie
