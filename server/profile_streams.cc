#include "server/profile_streams.h"

#include <grpcpp/support/slice.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/status_translation.h"
#include "server/wire_conversion.h"
#include "storage/base/byte_budget.h"
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

// Whoever announces bytes keeps their room from others.
constexpr std::chrono::minutes kUploadTime{10};

// What the store holds of a profile before it writes it (profile_store.h).
constexpr std::size_t kUploadMemoryBytes = std::size_t{1} << 20;

// A profile on its way into the store, with the memory that it takes meanwhile.
class StoreUpload final : public ProfileSink {
 public:
  static absl::StatusOr<std::unique_ptr<ProfileSink>> Begin(ServiceContext& context,
                                                            std::uint64_t total_bytes,
                                                            const ProfileId& expected) {
    ByteBudget& budget = context.stream_budget;
    // Uploads may be slow: half of it is left for reads.
    if (!budget.TryAcquire(kUploadMemoryBytes, budget.limit_bytes() / 2)) {
      return absl::ResourceExhaustedError("memory for open streams is in use; retry with backoff");
    }
    ByteReservation reservation(&budget, kUploadMemoryBytes);
    KV_ASSIGN_OR_RETURN(auto upload,
                        context.engine.BeginProfile(kBuiltInTenant, total_bytes, expected));
    return std::unique_ptr<ProfileSink>(new StoreUpload(std::move(reservation), std::move(upload)));
  }

  absl::Status Append(std::span<const std::byte> bytes) override { return upload_->Append(bytes); }
  absl::StatusOr<StoredProfile> Commit() override { return upload_->Commit(); }

 private:
  StoreUpload(ByteReservation reservation, std::unique_ptr<Engine::ProfileUpload> upload)
      : reservation_(std::move(reservation)), upload_(std::move(upload)) {}

  const ByteReservation reservation_;
  const std::unique_ptr<Engine::ProfileUpload> upload_;
};

}  // namespace

// ---- PutProfile

grpc::ServerReadReactor<grpc::ByteBuffer>* ProfilePutStream::Start(
    ProfilePutHost host, grpc::CallbackServerContext* call, grpc::ByteBuffer* response) {
  const std::shared_ptr<ProfilePutStream> stream(
      new ProfilePutStream(std::move(host), call, response));
  {
    absl::MutexLock lock(&stream->mutex_);
    stream->self_ = stream;
  }
  if (const absl::Status status = stream->host_.streams.Add(stream); !status.ok()) {
    stream->FinishWith(status);
  } else {
    stream->upload_until_ = stream->host_.streams.clock().Monotonic() + kUploadTime;
    stream->ReadNext();
  }
  return stream.get();
}

grpc::ServerReadReactor<grpc::ByteBuffer>* ProfilePutStream::Start(
    ServiceContext& context, grpc::CallbackServerContext* call, grpc::ByteBuffer* response) {
  ProfilePutHost host{
      .streams = context.streams,
      .metrics = context.metrics,
      .method = RpcMethod::kPutProfile,
      .post = [&engine = context.engine](
                  std::function<void()> work) { return engine.RunBlocking(std::move(work)); },
      .begin =
          [&context](std::uint64_t total_bytes, const ProfileId& expected) {
            return StoreUpload::Begin(context, total_bytes, expected);
          }};
  return Start(std::move(host), call, response);
}

void ProfilePutStream::ReadNext() {
  absl::MutexLock lock(&mutex_);
  if (finished_) return;
  ArmStall(host_.streams.clock().Monotonic());
  StartRead(&message_);
}

void ProfilePutStream::OnReadDone(bool ok) {
  DisarmStall();
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
  }
  const bool queued = host_.post([self = shared_from_this(), ok] {
    if (ok) {
      self->TakeMessage();
    } else {
      self->Commit();
    }
  });
  if (!queued) FinishWith(BusyError());
}

void ProfilePutStream::TakeMessage() {
  v1::PutProfileRequest request;
  BulkPayload payload;
  absl::Status status = ParseBulkMessage(message_, &request, &payload);
  if (status.ok()) status = upload_.Take(request, payload);
  if (status.ok() && host_.streams.clock().Monotonic() > upload_until_) {
    status = absl::DeadlineExceededError(absl::StrCat("total_bytes: not all of them came within ",
                                                      kUploadTime.count(),
                                                      " minutes, and others wait for their room"));
  }
  if (!status.ok()) {
    FinishWith(status);
    return;
  }
  host_.metrics.Received(payload.size());
  ReadNext();
}

void ProfilePutStream::Commit() {
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
  const auto response = upload_.Commit();
  if (!response.ok()) {
    FinishWith(response.status());
    return;
  }
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    *response_ = ComposeBulkMessage(*response, {});
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
  host_.streams.Remove(this);
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
