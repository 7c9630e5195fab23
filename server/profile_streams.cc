#include "server/profile_streams.h"

#include <grpcpp/support/slice.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/status_translation.h"
#include "server/wire_conversion.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

// A slice of a piece that keeps its memory alive until gRPC lets go of it.
grpc::Slice MakeSlice(std::shared_ptr<AlignedBuffer> piece, std::size_t bytes) {
  auto* owner = new std::shared_ptr<AlignedBuffer>(std::move(piece));
  return grpc::Slice((*owner)->data(), bytes,
                     [](void* data) { delete static_cast<std::shared_ptr<AlignedBuffer>*>(data); },
                     owner);
}

}  // namespace

// ---- PutProfile

grpc::ServerReadReactor<grpc::ByteBuffer>* ProfilePutStream::Start(
    ServiceContext& context, grpc::CallbackServerContext* call, grpc::ByteBuffer* response) {
  const std::shared_ptr<ProfilePutStream> stream(new ProfilePutStream(context, call, response));
  {
    absl::MutexLock lock(&stream->mutex_);
    stream->self_ = stream;
  }
  if (const absl::Status status = context.streams.Add(stream); !status.ok()) {
    stream->FinishWith(status);
  } else {
    stream->ReadNext();
  }
  return stream.get();
}

void ProfilePutStream::ReadNext() {
  absl::MutexLock lock(&mutex_);
  if (finished_) return;
  ArmStall(context_.streams.clock().Monotonic());
  StartRead(&message_);
}

void ProfilePutStream::OnReadDone(bool ok) {
  DisarmStall();
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
  }
  const bool queued = context_.engine.RunBlocking([self = shared_from_this(), ok] {
    if (ok) {
      self->TakeMessage();
    } else {
      self->Commit();
    }
  });
  if (!queued) FinishWith(BusyError());
}

void ProfilePutStream::TakeMessage() {
  if (const absl::Status status = Append(); !status.ok()) {
    upload_.reset();  // whoever sees the answer sees nothing of it
    FinishWith(status);
  } else {
    ReadNext();
  }
}

absl::Status ProfilePutStream::Append() {
  v1::PutProfileRequest request;
  BulkPayload payload;
  KV_RETURN_IF_ERROR(ParseBulkMessage(message_, &request, &payload));
  KV_RETURN_IF_ERROR(
      CheckPutProfile(request, payload.size(), /*is_first=*/upload_ == nullptr, received_bytes_));
  if (upload_ == nullptr) {
    KV_ASSIGN_OR_RETURN(upload_, context_.engine.BeginProfile(
                                     kBuiltInTenant, request.total_bytes(),
                                     IdFromProto<ProfileId>(request.expected_profile_id())));
  }
  context_.metrics.Received(payload.size());
  std::size_t begin = 0;
  for (const v1::Chunk& chunk : request.chunks()) {
    const auto pieces = payload.Range(begin, chunk.bytes());
    std::uint32_t crc = 0;
    for (const auto& piece : pieces) crc = Crc32c(piece, crc);
    if (crc != chunk.crc32c()) {
      return absl::InvalidArgumentError(
          absl::StrCat("chunks.crc32c: the chunk at offset ", chunk.offset(), " does not match"));
    }
    for (const auto& piece : pieces) KV_RETURN_IF_ERROR(upload_->Append(piece));
    begin += chunk.bytes();
    received_bytes_ += chunk.bytes();
  }
  return absl::OkStatus();
}

void ProfilePutStream::Commit() {
  if (upload_ == nullptr) {
    FinishWith(absl::InvalidArgumentError("total_bytes: no message came"));
    return;
  }
  bool is_cancelled;
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;  // the call may be gone
    is_cancelled = call_->IsCancelled();
  }
  if (is_cancelled) {
    FinishWith(absl::CancelledError("cancelled by the client"));
    return;
  }
  auto profile = upload_->Commit();
  upload_.reset();
  if (!profile.ok()) {
    FinishWith(profile.status());
    return;
  }
  v1::PutProfileResponse response;
  ToProto(*profile, response.mutable_profile());
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    *response_ = ComposeBulkMessage(response, {});
  }
  FinishWith(absl::OkStatus());
}

void ProfilePutStream::FinishWith(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (finished_) return;
  finished_ = true;
  DisarmStall();
  probe_.Finish(static_cast<int>(status.code()));
  Finish(ToGrpc(status));
}

void ProfilePutStream::OnCancel() { FinishWith(absl::CancelledError("cancelled by the client")); }

void ProfilePutStream::Abort(const absl::Status& status) { FinishWith(status); }

void ProfilePutStream::OnDone() {
  context_.streams.Remove(this);
  std::shared_ptr<ProfilePutStream> self;
  absl::MutexLock lock(&mutex_);
  self = std::move(self_);
}

// ---- GetProfile

grpc::ServerWriteReactor<grpc::ByteBuffer>* ProfileGetStream::Start(
    ServiceContext& context, grpc::CallbackServerContext* call, const grpc::ByteBuffer& message) {
  const std::shared_ptr<ProfileGetStream> stream(new ProfileGetStream(context, call));
  {
    absl::MutexLock lock(&stream->mutex_);
    stream->self_ = stream;
  }
  v1::GetProfileRequest request;
  BulkPayload payload;
  absl::Status status = context.streams.Add(stream);
  if (status.ok()) status = ParseBulkMessage(message, &request, &payload);
  if (status.ok()) status = CheckProfileId(request.profile_id());
  if (!status.ok()) {
    stream->FinishWith(status);
    return stream.get();
  }
  stream->id_ = IdFromProto<ProfileId>(request.profile_id());
  stream->PostNext();
  return stream.get();
}

void ProfileGetStream::PostNext() {
  const bool queued =
      context_.engine.RunBlocking([self = shared_from_this()] { self->SendNext(self->id_); });
  if (!queued) FinishWith(BusyError());
}

void ProfileGetStream::SendNext(const ProfileId& id) {
  if (const absl::Status status = ReadPiece(id); !status.ok()) {
    FinishWith(status);
    return;
  }
  const bool last = sent_bytes_ == reader_->info().header.profile_bytes();
  absl::MutexLock lock(&mutex_);
  if (finished_) return;
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

absl::Status ProfileGetStream::ReadPiece(const ProfileId& id) {
  v1::GetProfileResponse response;
  if (reader_ == nullptr) {
    KV_ASSIGN_OR_RETURN(reader_, context_.engine.OpenProfile(id));
    response.set_total_bytes(reader_->info().header.profile_bytes());
  }
  const std::size_t bytes =
      std::min<std::uint64_t>(kPieceBytes, reader_->info().header.profile_bytes() - sent_bytes_);
  auto piece = std::make_shared<AlignedBuffer>(bytes);
  const std::span<std::byte> content(piece->data(), bytes);
  KV_RETURN_IF_ERROR(reader_->Read(sent_bytes_, content));
  v1::Chunk* chunk = response.add_chunks();
  chunk->set_offset(sent_bytes_);
  chunk->set_bytes(static_cast<std::uint32_t>(bytes));
  chunk->set_crc32c(Crc32c(content));
  const grpc::Slice slice = MakeSlice(std::move(piece), bytes);
  buffer_ = ComposeBulkMessage(response, {&slice, 1});
  context_.metrics.Sent(bytes);
  sent_bytes_ += bytes;
  return absl::OkStatus();
}

void ProfileGetStream::OnWriteDone(bool ok) {
  DisarmStall();
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (finished_) return;
  }
  if (ok) {
    PostNext();
  } else {
    FinishWith(absl::CancelledError("the reader has gone"));
  }
}

void ProfileGetStream::FinishWith(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (finished_) return;
  finished_ = true;
  DisarmStall();
  probe_.Finish(static_cast<int>(status.code()));
  Finish(ToGrpc(status));
}

void ProfileGetStream::OnCancel() { FinishWith(absl::CancelledError("cancelled by the client")); }

void ProfileGetStream::Abort(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    // Behind a write that is stuck the status would be stuck too.
    if (writing_) CancelCall(*call_, status);
  }
  FinishWith(status);
}

void ProfileGetStream::OnDone() {
  DisarmStall();
  context_.streams.Remove(this);
  std::shared_ptr<ProfileGetStream> self;
  absl::MutexLock lock(&mutex_);
  self = std::move(self_);
}

}  // namespace kvtrie
