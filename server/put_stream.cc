#include "server/put_stream.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/status_translation.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/engine/engine.h"

namespace kvtrie {

std::shared_ptr<PutStream> PutStream::Create(PutHost& host, const RequestLimits& limits,
                                             std::function<void()> on_change) {
  return std::shared_ptr<PutStream>(new PutStream(host, limits, std::move(on_change)));
}

PutStream::~PutStream() = default;

absl::StatusOr<std::size_t> PutStream::ReceiveMessage(const grpc::ByteBuffer& message) {
  auto parsed = std::make_unique<PutMessage>();
  KV_RETURN_IF_ERROR(ParseBulkMessage(message, &parsed->request, &parsed->payload));
  const std::size_t payload_bytes = parsed->payload.size();
  Receive(std::move(parsed));
  return payload_bytes;
}

void PutStream::Receive(std::unique_ptr<PutMessage> message) {
  Deferred deferred;
  {
    absl::MutexLock lock(&mutex_);
    if (cancelled_ || !status_.ok()) return;
    KV_CHECK(message_ == nullptr);
    if (absl::Status s = CheckChunks(message->request, message->payload_bytes()); !s.ok()) {
      Fail(std::move(s), &deferred);
    } else {
      message_ = std::move(message);
      next_announce_ = 0;
      next_chunk_ = 0;
      payload_offset_ = 0;
    }
  }
  RunDeferred(std::move(deferred));
  Advance();
}

void PutStream::CloseInput() {
  Deferred deferred;
  {
    absl::MutexLock lock(&mutex_);
    input_closed_ = true;
    std::vector<std::uint64_t> put_ids;
    for (auto& [put_id, put] : puts_) {
      put_ids.push_back(put_id);
      bool abandoned = false;
      for (std::size_t i = 0; i < put->states.size(); ++i) {
        BlockState& state = put->states[i];
        if (state != BlockState::kExpected && state != BlockState::kOpen) continue;
        state = BlockState::kAnswered;
        put->done.set_failed_blocks(put->done.failed_blocks() + 1);
        --put->unanswered;
        // What waits for a later one waits for this one as well.
        if (abandoned) continue;
        abandoned = true;
        const auto block_index = put->first_block + static_cast<std::uint32_t>(i);
        deferred.push_back(
            [session = put->session, block_index] { session->AbandonBlock(block_index); });
      }
      open_blocks_ -= put->open.size();
      deferred.push_back([open = std::move(put->open)] {});
      put->open.clear();
    }
    for (const std::uint64_t put_id : put_ids) EndPutIfDone(put_id, &deferred);
  }
  RunDeferred(std::move(deferred));
}

void PutStream::Cancel() {
  Deferred deferred;
  {
    absl::MutexLock lock(&mutex_);
    cancelled_ = true;
    DropAll(&deferred);
  }
  RunDeferred(std::move(deferred));
}

bool PutStream::wants_message() const {
  absl::MutexLock lock(&mutex_);
  return message_ == nullptr && !input_closed_ && !cancelled_ && status_.ok() &&
         answer_count() < kAnswersMax;
}

std::optional<std::size_t> PutStream::TakeMessage(grpc::ByteBuffer* message) {
  v1::PutResponse response;
  if (!TakeResponse(&response)) return std::nullopt;
  *message = ComposeBulkMessage(response, {});
  return 0;
}

bool PutStream::TakeResponse(v1::PutResponse* response) {
  absl::MutexLock lock(&mutex_);
  if (answer_count() == 0) return false;
  response->Clear();
  if (answers_.acks_size() <= kAcksPerResponse) {
    response->Swap(&answers_);
    return true;
  }
  // The end of a put is told after all of its blocks.
  response->mutable_plans()->Swap(answers_.mutable_plans());
  for (int i = 0; i < kAcksPerResponse; ++i) response->add_acks()->Swap(answers_.mutable_acks(i));
  answers_.mutable_acks()->DeleteSubrange(0, kAcksPerResponse);
  return true;
}

bool PutStream::finished() const {
  absl::MutexLock lock(&mutex_);
  return input_closed_ && puts_.empty() && message_ == nullptr && answer_count() == 0;
}

absl::Status PutStream::status() const {
  absl::MutexLock lock(&mutex_);
  return status_;
}

bool PutStream::owes_progress() const {
  absl::MutexLock lock(&mutex_);
  return open_blocks_ > 0 && message_ == nullptr;
}

bool PutStream::idle() const {
  absl::MutexLock lock(&mutex_);
  return puts_.empty() && message_ == nullptr && answer_count() == 0;
}

void PutStream::RunDeferred(Deferred deferred) {
  for (auto& call : deferred) call();
}

void PutStream::Advance() {
  bool more = true;
  while (more) {
    Deferred deferred;
    {
      absl::MutexLock lock(&mutex_);
      Step(&deferred);
      WriteFinished(&deferred);
      more = message_ != nullptr && !waiting_;
    }
    RunDeferred(std::move(deferred));
  }
}

// Works on the message until it is done, has to wait, or a put has to be begun.
void PutStream::Step(Deferred* deferred) {
  if (message_ == nullptr || waiting_) return;
  v1::PutRequest& request = message_->request;
  while (next_announce_ < request.announces_size()) {
    StartAnnounce(std::move(*request.mutable_announces(next_announce_++)), deferred);
    if (message_ == nullptr || waiting_) return;
  }
  while (next_chunk_ < request.chunks_size()) {
    if (!TakeChunk(request.chunks(next_chunk_), deferred)) return;
    if (message_ == nullptr) return;  // the stream failed
    payload_offset_ += request.chunks(next_chunk_++).bytes();
  }
  for (const std::uint64_t put_id : request.abort_put_ids()) AbortPut(put_id, deferred);
  message_.reset();
}

void PutStream::StartAnnounce(v1::PutAnnounce announce, Deferred* deferred) {
  const std::uint64_t put_id = announce.put_id();
  if (puts_.contains(put_id) || ended_.contains(put_id)) {
    Fail(absl::InvalidArgumentError(absl::StrCat(
             "announces.put_id: ", put_id, " was used before on this stream; number puts anew")),
         deferred);
    return;
  }
  auto announced = PrepareAnnounce(std::move(announce));
  if (!announced.ok()) {
    RefusePut(put_id, announced.status());
    return;
  }
  waiting_ = true;
  deferred->push_back([self = shared_from_this(), announced = *std::move(announced)]() mutable {
    const PutAnnouncement& announcement = announced->announcement;
    // The callback is copied around by std::function, so it shares what it owns.
    auto shared = std::make_shared<std::unique_ptr<Announced>>(std::move(announced));
    self->host_.BeginPut(announcement,
                         [self, shared](absl::StatusOr<std::unique_ptr<PutSession>> session) {
                           self->OnBegun(std::move(*shared), std::move(session));
                         });
  });
}

absl::StatusOr<std::unique_ptr<PutStream::Announced>> PutStream::PrepareAnnounce(
    v1::PutAnnounce announce) {
  KV_RETURN_IF_ERROR(CheckAnnounce(announce, limits_));
  if (puts_.size() >= kOpenPutsMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat("put_id: ", kOpenPutsMax, " puts of this stream are open; finish some first"));
  }
  const std::size_t kept_bytes = announce.ByteSizeLong();
  if (!host_.announce_budget().TryAcquire(kept_bytes)) {
    return absl::ResourceExhaustedError("memory for open streams is in use; retry with backoff");
  }
  ByteReservation reservation(&host_.announce_budget(), kept_bytes);

  auto announced = std::make_unique<Announced>(std::move(announce));
  const v1::PutAnnounce& proto = announced->proto;
  announced->reservation = std::move(reservation);
  announced->announcement = {.path = announced->path.view(),
                             .first_block = proto.first_block(),
                             .session_id = proto.session_id(),
                             .probabilities = FromProto(proto.probabilities()),
                             .restored_blocks = proto.restored_blocks(),
                             .restored_quality = FromProto(proto.restored_quality()),
                             .first_reused_block = proto.has_first_reused_block()
                                                       ? std::optional(proto.first_reused_block())
                                                       : std::nullopt,
                             .quality = FromProto(proto.quality()),
                             .beside_exact = proto.beside_exact(),
                             .want_references = proto.want_references(),
                             .durable = proto.durable(),
                             .ttl = std::chrono::seconds(proto.ttl_seconds()),
                             .priority = proto.priority(),
                             .compute_seconds_per_token = proto.compute_seconds_per_token()};
  return announced;
}

void PutStream::OnBegun(std::unique_ptr<Announced> announced,
                        absl::StatusOr<std::unique_ptr<PutSession>> session) {
  Deferred deferred;
  {
    absl::MutexLock lock(&mutex_);
    waiting_ = false;
    if (cancelled_ || !status_.ok()) {
      deferred.push_back([dropped = std::move(session)] {});
    } else if (!session.ok()) {
      RefusePut(announced->proto.put_id(), session.status());
    } else {
      OpenPlan(std::move(announced), *std::move(session), &deferred);
    }
  }
  RunDeferred(std::move(deferred));
  Advance();
  on_change_();
}

void PutStream::OpenPlan(std::unique_ptr<Announced> announced, std::unique_ptr<PutSession> session,
                         Deferred* deferred) {
  const v1::PutAnnounce& proto = announced->proto;
  auto put = std::make_unique<OpenPut>();
  put->first_block = proto.first_block();
  const std::uint32_t block_count = session->block_count();
  const std::vector<std::uint32_t>& missing = session->missing_blocks();
  put->states.assign(block_count - std::min(block_count, put->first_block), BlockState::kStored);
  put->unanswered = missing.size();

  v1::PutPlan* plan = answers_.add_plans();
  plan->set_put_id(proto.put_id());
  plan->set_block_count(block_count);
  plan->set_ignored_tail_tokens(session->ignored_tail_tokens());
  plan->set_block_bytes(session->raw_block_bytes());
  plan->mutable_missing_blocks()->assign(reinterpret_cast<const char*>(missing.data()),
                                         missing.size() * sizeof(std::uint32_t));
  ToProto(session->coding_plan(), plan);
  for (const std::uint32_t block_index : missing) {
    BlockState* state = put->state(block_index);
    KV_CHECK(state != nullptr);
    *state = BlockState::kExpected;
  }
  put->done.set_put_id(proto.put_id());
  put->done.set_duplicate_blocks(static_cast<std::uint32_t>(put->states.size() - missing.size()));
  if (proto.eager()) {
    for (std::size_t i = 0; i < put->states.size(); ++i) {
      if (put->states[i] != BlockState::kStored) continue;
      const auto block_index = put->first_block + static_cast<std::uint32_t>(i);
      TrieNodeId node;
      session->IsStored(block_index, &node);
      v1::PutAck* ack = AddAck(proto.put_id(), block_index);
      ack->set_duplicate(true);
      ack->set_node_id(std::string(node.view()));
    }
  }
  const std::uint64_t put_id = proto.put_id();
  put->eager = proto.eager();
  put->encoding = proto.encoding();
  put->reservation = std::move(announced->reservation);
  put->session = std::move(session);
  puts_.emplace(put_id, std::move(put));
  EndPutIfDone(put_id, deferred);
}

void PutStream::RefusePut(std::uint64_t put_id, const absl::Status& status) {
  v1::PutPlan* plan = answers_.add_plans();
  plan->set_put_id(put_id);
  ToItemStatus(status, plan->mutable_status());
  RememberEnded(put_id);
}

bool PutStream::TakeChunk(const v1::Chunk& chunk, Deferred* deferred) {
  const auto it = puts_.find(chunk.put_id());
  if (it == puts_.end()) {
    // An eager client may still be sending what was refused or stored meanwhile.
    if (!ended_.contains(chunk.put_id())) {
      Fail(absl::InvalidArgumentError(absl::StrCat("chunks.put_id: ", chunk.put_id(),
                                                   " was not announced on this stream")),
           deferred);
    }
    return true;
  }
  OpenPut& put = *it->second;
  const std::uint32_t block_index = chunk.block_index();
  BlockState* state = put.state(block_index);
  if (state == nullptr) {
    Fail(absl::InvalidArgumentError(
             absl::StrCat("chunks.block_index: ", block_index, " is outside of put ",
                          chunk.put_id(), ", which has blocks ", put.first_block, " to ",
                          put.first_block + put.states.size(), " (exclusive)")),
         deferred);
    return true;
  }
  if (*state == BlockState::kStored) {
    if (chunk.offset() == 0 && !put.eager) {
      AddAck(chunk.put_id(), block_index)->set_duplicate(true);
    }
    return true;
  }
  if (*state == BlockState::kFinishing || *state == BlockState::kAnswered) return true;

  if (*state == BlockState::kExpected) {
    const absl::StatusOr<bool> opened = OpenBlockFor(put, chunk);
    if (opened.ok() && !*opened) return false;
    if (!opened.ok()) {
      FailBlock(chunk.put_id(), put, block_index, opened.status(), deferred);
      return true;
    }
  }
  BlockWriter& writer = *put.open.find(block_index)->second.writer;
  absl::Status status;
  if (chunk.offset() != writer.received_bytes()) {
    status = absl::InvalidArgumentError(
        absl::StrCat("chunks.offset: ", chunk.offset(), " does not follow the ",
                     writer.received_bytes(), " bytes that the block has"));
  } else {
    status = writer.AppendChunk(message_->Pieces(payload_offset_, chunk.bytes()), chunk.crc32c());
  }
  if (!status.ok()) {
    FailBlock(chunk.put_id(), put, block_index, status, deferred);
  } else if (writer.complete()) {
    FinishBlock(chunk.put_id(), put, block_index, deferred);
  }
  return true;
}

std::vector<std::byte> PutStream::FrameHead(const v1::Chunk& chunk) {
  std::vector<std::byte> head;
  const std::size_t head_bytes = std::min<std::size_t>(chunk.bytes(), kFrameHeaderBytesMax);
  for (const auto piece : message_->Pieces(payload_offset_, head_bytes)) {
    head.insert(head.end(), piece.begin(), piece.end());
  }
  return head;
}

absl::StatusOr<bool> PutStream::OpenBlockFor(OpenPut& put, const v1::Chunk& chunk) {
  if (chunk.offset() != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "chunks.offset: ", chunk.offset(), " in the first chunk of a block; it begins at 0"));
  }
  std::vector<std::byte> head;
  std::optional<FrameView> frame;
  if (put.encoding == v1::ENCODING_FRAME) {
    head = FrameHead(chunk);
    const absl::StatusOr<FrameView> parsed = FrameView::Parse(head);
    if (!parsed.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("data: no frame header in the first chunk of the block (",
                       parsed.status().message(), ")"));
    }
    frame = *parsed;
  }
  const std::uint64_t total_bytes = frame ? frame->frame_bytes() : put.session->raw_block_bytes();

  ByteBudget& budget = host_.block_budget();
  ByteReservation reservation;
  if (granted_.bytes() == total_bytes && total_bytes != 0) {
    reservation = std::move(granted_);
  } else if (open_blocks_ > 0) {
    // The rest of an open block stands behind this one: to wait here could be to wait for oneself.
    if (!budget.TryAcquire(total_bytes)) {
      return absl::ResourceExhaustedError(
          "memory for puts is in use; send blocks one after the other and retry");
    }
    reservation = ByteReservation(&budget, total_bytes);
  } else {
    waiting_ = true;
    auto on_granted = [self = shared_from_this(), &budget, total_bytes] {
      self->host_.Post([self, &budget, total_bytes] {
        ByteReservation granted(&budget, total_bytes);
        {
          absl::MutexLock lock(&self->mutex_);
          self->waiting_ = false;
          if (self->cancelled_ || !self->status_.ok()) return;
          self->granted_ = std::move(granted);
        }
        self->Advance();
        self->on_change_();
      });
    };
    if (!budget.AcquireOrWait(total_bytes, std::move(on_granted))) return false;
    waiting_ = false;
    reservation = ByteReservation(&budget, total_bytes);
  }

  KV_ASSIGN_OR_RETURN(auto writer, frame
                                       ? put.session->StartFrame(chunk.block_index(), *frame)
                                       : put.session->StartBlock(chunk.block_index(), total_bytes));
  put.open.emplace(chunk.block_index(), OpenBlock{std::move(writer), std::move(reservation)});
  ++open_blocks_;
  *put.state(chunk.block_index()) = BlockState::kOpen;
  return true;
}

void PutStream::FinishBlock(std::uint64_t put_id, OpenPut& put, std::uint32_t block_index,
                            Deferred* deferred) {
  auto open = put.open.extract(block_index);
  --open_blocks_;
  *put.state(block_index) = BlockState::kFinishing;
  auto reservation = std::make_shared<ByteReservation>(std::move(open.mapped().reservation));
  auto on_done = [self = shared_from_this(), put_id, block_index,
                  reservation](const absl::StatusOr<PutBlockResult>& result) {
    reservation->Reset();
    self->OnBlockDone(put_id, block_index, result);
  };
  if (finished_session_ != put.session || finished_bytes_ >= kWriteTogetherBytes) {
    WriteFinished(deferred);
  }
  finished_session_ = put.session;
  finished_bytes_ += open.mapped().writer->total_bytes();
  finished_.push_back({std::move(open.mapped().writer), std::move(on_done)});
}

void PutStream::WriteFinished(Deferred* deferred) {
  if (finished_.empty()) return;
  finished_bytes_ = 0;
  deferred->push_back([session = std::exchange(finished_session_, nullptr),
                       blocks = std::exchange(finished_, {})]() mutable {
    session->FinishBlocks(std::move(blocks));
  });
}

void PutStream::OnBlockDone(std::uint64_t put_id, std::uint32_t block_index,
                            const absl::StatusOr<PutBlockResult>& result) {
  Deferred deferred;
  {
    absl::MutexLock lock(&mutex_);
    const auto it = puts_.find(put_id);
    if (it == puts_.end()) return;  // aborted meanwhile
    OpenPut& put = *it->second;
    BlockState* state = put.state(block_index);
    if (state == nullptr || *state != BlockState::kFinishing) return;
    if (!result.ok()) {
      FailBlock(put_id, put, block_index, result.status(), &deferred);
    } else {
      *state = BlockState::kAnswered;
      --put.unanswered;
      v1::PutAck* ack = AddAck(put_id, block_index);
      ack->set_node_id(std::string(result->node.view()));
      if (result->outcome == PutOutcome::kDuplicate) {
        ack->set_duplicate(true);
        put.done.set_duplicate_blocks(put.done.duplicate_blocks() + 1);
      } else {
        put.done.set_stored_blocks(put.done.stored_blocks() + 1);
      }
      EndPutIfDone(put_id, &deferred);
    }
  }
  RunDeferred(std::move(deferred));
  on_change_();
}

void PutStream::FailBlock(std::uint64_t put_id, OpenPut& put, std::uint32_t block_index,
                          const absl::Status& status, Deferred* deferred) {
  BlockState& state = *put.state(block_index);
  if (state == BlockState::kOpen) {
    auto open = put.open.extract(block_index);
    --open_blocks_;
    deferred->push_back([dropped = std::move(open.mapped())] {});
  }
  if (state != BlockState::kFinishing) {
    deferred->push_back(
        [session = put.session, block_index] { session->AbandonBlock(block_index); });
  }
  state = BlockState::kAnswered;
  --put.unanswered;
  put.done.set_failed_blocks(put.done.failed_blocks() + 1);
  ToItemStatus(status, AddAck(put_id, block_index)->mutable_status());
  EndPutIfDone(put_id, deferred);
}

v1::PutAck* PutStream::AddAck(std::uint64_t put_id, std::uint32_t block_index) {
  v1::PutAck* ack = answers_.add_acks();
  ack->set_put_id(put_id);
  ack->set_block_index(block_index);
  return ack;
}

void PutStream::EndPutIfDone(std::uint64_t put_id, Deferred* deferred) {
  const auto it = puts_.find(put_id);
  if (it->second->unanswered > 0) return;
  answers_.add_dones()->Swap(&it->second->done);
  DropPut(std::move(it->second), deferred);
  puts_.erase(it);
  RememberEnded(put_id);
}

void PutStream::AbortPut(std::uint64_t put_id, Deferred* deferred) {
  const auto it = puts_.find(put_id);
  if (it == puts_.end()) return;
  OpenPut& put = *it->second;
  put.done.set_failed_blocks(put.done.failed_blocks() + static_cast<std::uint32_t>(put.unanswered));
  put.unanswered = 0;
  EndPutIfDone(put_id, deferred);
}

void PutStream::RememberEnded(std::uint64_t put_id) {
  if (ended_order_.size() < kEndedPutsMax) {
    ended_order_.push_back(put_id);
  } else {
    ended_.erase(std::exchange(ended_order_[ended_next_], put_id));
    ended_next_ = (ended_next_ + 1) % kEndedPutsMax;
  }
  ended_.insert(put_id);
}

void PutStream::DropPut(std::unique_ptr<OpenPut> put, Deferred* deferred) {
  open_blocks_ -= put->open.size();
  deferred->push_back([put = std::move(put)]() mutable {
    // Writers before the session that they belong to.
    put->open.clear();
    put.reset();
  });
}

void PutStream::Fail(absl::Status status, Deferred* deferred) {
  status_ = std::move(status);
  DropAll(deferred);
}

void PutStream::DropAll(Deferred* deferred) {
  for (auto& [_, put] : puts_) DropPut(std::move(put), deferred);
  puts_.clear();
  granted_.Reset();
  answers_.Clear();
  message_.reset();
}

}  // namespace kvtrie
