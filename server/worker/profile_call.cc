#include "server/worker/profile_call.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/bulk_message.h"
#include "server/request_checks.h"
#include "server/status_translation.h"
#include "server/wire_conversion.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/codec/profile_header.h"

namespace kvtrie {

grpc::ServerReadReactor<grpc::ByteBuffer>* ProfileCall::Start(WorkerContext& context,
                                                              grpc::CallbackServerContext*,
                                                              grpc::ByteBuffer* response) {
  const std::shared_ptr<ProfileCall> profile_call(new ProfileCall(context, response));
  {
    absl::MutexLock lock(&profile_call->mutex_);
    profile_call->self_ = profile_call;
  }
  if (const absl::Status status = context.streams.Add(profile_call); !status.ok()) {
    profile_call->FinishWith(status);
  } else {
    profile_call->ReadNext();
  }
  return profile_call.get();
}

void ProfileCall::ReadNext() {
  absl::MutexLock lock(&mutex_);
  if (finished_) return;
  ArmStall(context_.streams.clock().Monotonic());
  StartRead(&message_);
}

void ProfileCall::OnReadDone(bool ok) {
  DisarmStall();
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
  }
  if (!ok) {
    // Digests of megabytes are not for gRPC's threads.
    context_.chores.Post([self = shared_from_this()] { self->Commit(); });
    return;
  }
  if (const absl::Status status = Append(); !status.ok()) {
    FinishWith(status);
  } else {
    ReadNext();
  }
}

absl::Status ProfileCall::Append() {
  v1::PutProfileRequest request;
  BulkPayload payload;
  KV_RETURN_IF_ERROR(ParseBulkMessage(message_, &request, &payload));
  KV_RETURN_IF_ERROR(CheckPutProfile(request, payload.size(), is_first_, profile_.size()));
  if (is_first_) {
    is_first_ = false;
    total_bytes_ = request.total_bytes();
    if (total_bytes_ < kProfileBytesMin || total_bytes_ > kProfileBytesMax) {
      return absl::InvalidArgumentError(absl::StrCat("total_bytes: ", total_bytes_,
                                                     "; a profile has ", kProfileBytesMin, " to ",
                                                     kProfileBytesMax));
    }
    if (total_bytes_ > context_.shelf.bytes_max()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("total_bytes: ", total_bytes_, "; profiles together may have ",
                       context_.shelf.bytes_max(), " here (--profile_memory_bytes)"));
    }
    expected_id_ = IdFromProto<ProfileId>(request.expected_profile_id());
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
    if (profile_.size() + chunk.bytes() > total_bytes_) {
      return absl::InvalidArgumentError(
          absl::StrCat("chunks: more bytes than total_bytes, ", total_bytes_));
    }
    for (const auto& piece : pieces) profile_.insert(profile_.end(), piece.begin(), piece.end());
    begin += chunk.bytes();
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::PutProfileResponse> ProfileCall::Shelve() {
  if (is_first_) return absl::InvalidArgumentError("total_bytes: no message came");
  if (profile_.size() != total_bytes_) {
    return absl::InvalidArgumentError(
        absl::StrCat("total_bytes: ", total_bytes_, ", and ", profile_.size(), " bytes came"));
  }
  auto held = context_.shelf.Add(std::move(profile_));
  if (absl::IsDataLoss(held.status())) return absl::InvalidArgumentError(held.status().message());
  if (!held.ok()) return held.status();
  if (!expected_id_.empty() && held->id != expected_id_) {
    return absl::FailedPreconditionError(absl::StrCat("expected_profile_id: ", expected_id_.ToHex(),
                                                      "; these bytes are ", held->id.ToHex()));
  }
  v1::PutProfileResponse response;
  StoredProfile profile;
  profile.info.id = held->id;
  profile.info.header = held->header;
  ToProto(profile, response.mutable_profile());
  return response;
}

void ProfileCall::Commit() {
  const auto response = Shelve();
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

void ProfileCall::FinishWith(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (finished_) return;
  finished_ = true;
  DisarmStall();
  probe_.Finish(static_cast<int>(status.code()));
  Finish(ToGrpc(status));
}

void ProfileCall::OnDone() {
  context_.streams.Remove(this);
  std::shared_ptr<ProfileCall> self;
  absl::MutexLock lock(&mutex_);
  self = std::move(self_);
}

}  // namespace kvtrie
