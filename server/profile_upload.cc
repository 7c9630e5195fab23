#include "server/profile_upload.h"

#include "absl/strings/str_cat.h"
#include "server/request_checks.h"
#include "server/wire_conversion.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"

namespace kvtrie {

absl::Status ProfileUpload::Take(const v1::PutProfileRequest& request, const BulkPayload& payload) {
  absl::Status status = Append(request, payload);
  if (!status.ok()) sink_.reset();
  return status;
}

absl::StatusOr<v1::PutProfileResponse> ProfileUpload::Commit() {
  auto response = Finish();
  sink_.reset();
  return response;
}

absl::Status ProfileUpload::Append(const v1::PutProfileRequest& request,
                                   const BulkPayload& payload) {
  const bool is_first = sink_ == nullptr;
  KV_RETURN_IF_ERROR(CheckPutProfile(request, payload.size(), is_first, received_bytes_));
  if (is_first) {
    total_bytes_ = request.total_bytes();
    KV_ASSIGN_OR_RETURN(
        sink_, begin_(total_bytes_, IdFromProto<ProfileId>(request.expected_profile_id())));
  }
  std::size_t begin = 0;
  for (const v1::Chunk& chunk : request.chunks()) {
    if (chunk.bytes() > total_bytes_ - received_bytes_) {
      return absl::InvalidArgumentError(
          absl::StrCat("chunks: more bytes than the ", total_bytes_, " of total_bytes"));
    }
    const auto pieces = payload.Range(begin, chunk.bytes());
    std::uint32_t crc = 0;
    for (const auto& piece : pieces) crc = Crc32c(piece, crc);
    if (crc != chunk.crc32c()) {
      return absl::InvalidArgumentError(
          absl::StrCat("chunks.crc32c: the chunk at offset ", chunk.offset(), " does not match"));
    }
    for (const auto& piece : pieces) KV_RETURN_IF_ERROR(sink_->Append(piece));
    begin += chunk.bytes();
    received_bytes_ += chunk.bytes();
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::PutProfileResponse> ProfileUpload::Finish() {
  if (sink_ == nullptr) return absl::InvalidArgumentError("total_bytes: no message came");
  if (received_bytes_ != total_bytes_) {
    return absl::InvalidArgumentError(
        absl::StrCat("total_bytes: ", total_bytes_, ", and ", received_bytes_, " bytes came"));
  }
  KV_ASSIGN_OR_RETURN(const StoredProfile profile, sink_->Commit());
  v1::PutProfileResponse response;
  ToProto(profile, response.mutable_profile());
  return response;
}

}  // namespace kvtrie
