#include "client/put_connection.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kvtrie/v1/cache.pb.h"
#include "proto/bulk_message.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

constexpr char kPutMethod[] = "/kvtrie.v1.Cache/Put";

// Bulk bytes of one message: large enough that its headers do not count, small enough to stay in
// the cache until the kernel has read it.
constexpr std::size_t kMessageBytes = std::size_t{1} << 20;
// Puts that wait for their acknowledgements at a time; more would only queue at the server.
constexpr std::size_t kOpenPutsMax = 64;
// Announcements carry the tokens of whole prefixes.
constexpr std::size_t kAnnounceBytes = std::size_t{1} << 20;
// Shorter runs of bytes are copied: a slice of their own costs more.
constexpr std::size_t kLendBytesMin = 4096;

}  // namespace

PutConnection::PutConnection(std::shared_ptr<grpc::Channel> channel, bool wait_for_ready)
    : wait_for_ready_(wait_for_ready), channel_(std::move(channel)) {}

bool PutConnection::StillOpen() {
  if (call_ == nullptr) return true;
  if (!read_in_flight_) return false;
  const auto completion = call_->Next(Deadline::After(std::chrono::nanoseconds{0}));
  if (!completion.has_value()) return true;
  // Whatever it is, it answers no put of ours.
  read_in_flight_ = false;
  return false;
}

absl::Status PutConnection::Run(std::span<PutProgress*> puts, Deadline deadline) {
  BorrowedSlices slices;
  absl::Status status = RunOpen(puts, deadline, &slices);
  if (!status.ok()) {
    // Throwing the connection away is what makes gRPC give back bytes that wait in it.
    call_.reset();
    channel_.reset();
  } else {
    used_ = true;
  }
  slices.WaitUntilReturned();
  return status;
}

absl::Status PutConnection::RunOpen(std::span<PutProgress*> puts, Deadline deadline,
                                    BorrowedSlices* slices) {
  if (call_ == nullptr) {
    call_ = std::make_unique<RawCall>(channel_, kPutMethod, std::nullopt, wait_for_ready_);
  }
  first_put_id_ = next_put_id_;
  announced_.clear();
  open_puts_ = 0;
  sending_.clear();
  chunk_offset_ = 0;

  while (true) {
    if (!write_in_flight_ && (Sending() != nullptr || MayAnnounce(puts))) {
      const bool first = !read_in_flight_;
      call_->Write(NextMessage(puts, slices), /*last=*/false);
      write_in_flight_ = true;
      if (first) {
        call_->Read();
        read_in_flight_ = true;
      }
    }
    if (announced_.size() == puts.size() && open_puts_ == 0 && !write_in_flight_) {
      return absl::OkStatus();
    }
    const auto completion = call_->Next(deadline);
    if (!completion.has_value()) {
      return absl::DeadlineExceededError("put: not all blocks were acknowledged in time");
    }
    if (completion->op == RawCall::Op::kWrite) {
      write_in_flight_ = false;
      if (!completion->ok) return Broken(deadline);
      continue;
    }
    read_in_flight_ = false;
    if (!completion->ok) return Broken(deadline);
    KV_RETURN_IF_ERROR(AcceptMessage());
    call_->Read();
    read_in_flight_ = true;
  }
}

absl::Status PutConnection::AcceptMessage() {
  v1::PutResponse response;
  BulkPayload payload;
  KV_RETURN_IF_ERROR(ParseBulkMessage(call_->message(), &response, &payload));
  const auto find = [this](std::uint64_t put_id) -> PutProgress* {
    if (put_id < first_put_id_ || put_id - first_put_id_ >= announced_.size()) return nullptr;
    return announced_[put_id - first_put_id_];
  };
  const auto accept = [this, &find](const auto& answers) {
    for (const auto& answer : answers) {
      PutProgress* put = find(answer.put_id());
      if (put == nullptr) return absl::InternalError("put: an answer to no put of this stream");
      if (put->attempt_done()) continue;
      put->Accept(answer);
      if (put->attempt_done()) --open_puts_;
    }
    return absl::OkStatus();
  };
  for (const v1::PutPlan& plan : response.plans()) {
    PutProgress* put = find(plan.put_id());
    if (put == nullptr) return absl::InternalError("put: a plan for no put of this stream");
    if (put->attempt_done()) continue;
    const bool was_sending = !put->to_send().empty();
    put->Accept(plan);
    if (put->attempt_done()) --open_puts_;
    if (!was_sending && !put->to_send().empty()) sending_.push_back(plan.put_id() - first_put_id_);
  }
  KV_RETURN_IF_ERROR(accept(response.acks()));
  return accept(response.dones());
}

bool PutConnection::MayAnnounce(std::span<PutProgress*> puts) const {
  return announced_.size() < puts.size() && open_puts_ < kOpenPutsMax;
}

PutProgress* PutConnection::Sending() {
  while (!sending_.empty() && announced_[sending_.front()]->to_send().empty()) {
    sending_.pop_front();
    chunk_offset_ = 0;
  }
  return sending_.empty() ? nullptr : announced_[sending_.front()];
}

grpc::ByteBuffer PutConnection::NextMessage(std::span<PutProgress*> puts, BorrowedSlices* slices) {
  v1::PutRequest request;
  std::vector<grpc::Slice> payload;
  std::size_t payload_bytes = 0;
  std::size_t announce_bytes = 0;
  std::span<const std::byte> run;  // not yet in `payload`
  const auto end_run = [&] {
    if (run.empty()) return;
    if (run.size() < kLendBytesMin) {
      payload.emplace_back(run.data(), run.size());
    } else {
      payload.push_back(slices->Lend(run));
    }
    run = {};
  };

  while (true) {
    if (PutProgress* sending = Sending(); sending != nullptr) {
      PutProgress& put = *sending;
      const std::uint32_t i = put.to_send().front();
      const std::span<const std::byte> block = put.SendingBytes();
      const std::size_t bytes = put.ChunkBytesAt(i, chunk_offset_);
      if (payload_bytes > 0 && payload_bytes + bytes > kMessageBytes) break;
      const auto piece = block.subspan(chunk_offset_, bytes);
      v1::Chunk* chunk = request.add_chunks();
      chunk->set_put_id(first_put_id_ + sending_.front());
      chunk->set_block_index(put.block_index(i));
      chunk->set_offset(chunk_offset_);
      chunk->set_bytes(static_cast<std::uint32_t>(bytes));
      chunk->set_crc32c(Crc32c(piece));
      payload_bytes += bytes;
      if (!run.empty() && run.data() + run.size() == piece.data()) {
        run = std::span(run.data(), run.size() + piece.size());
      } else {
        end_run();
        run = piece;
      }
      chunk_offset_ += bytes;
      if (chunk_offset_ == block.size()) {
        put.to_send().pop_front();
        chunk_offset_ = 0;
      }
      continue;
    }
    if (!MayAnnounce(puts) || announce_bytes >= kAnnounceBytes) break;
    PutProgress* put = puts[announced_.size()];
    *request.add_announces() = put->Announce(next_put_id_++);
    announce_bytes += put->path().path.tokens.size_bytes();
    if (!put->to_send().empty()) sending_.push_back(announced_.size());
    announced_.push_back(put);
    ++open_puts_;
  }
  end_run();
  return ComposeBulkMessage(request, payload);
}

absl::Status PutConnection::Broken(Deadline deadline) {
  if (read_in_flight_) {
    // The read fails with the stream; what it still brings are answers.
    while (true) {
      const auto completion = call_->Next(deadline);
      if (!completion.has_value()) {
        return absl::DeadlineExceededError("put: the stream broke and did not end in time");
      }
      if (completion->op != RawCall::Op::kRead) continue;
      read_in_flight_ = false;
      if (!completion->ok) break;
      if (!AcceptMessage().ok()) break;
      call_->Read();
      read_in_flight_ = true;
    }
  }
  absl::Status status = call_->Finish(deadline);
  // A server that ends the stream of its own accord has not done what it was asked to do.
  if (status.ok()) status = absl::UnavailableError("put: the server ended the stream");
  return status;
}

}  // namespace kvtrie
