#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvtrie/v1/cache.pb.h"
#include "proto/bulk_message.h"
#include "storage/engine/engine.h"
#include "storage/kv/ids.h"

namespace kvtrie {

// Where the bytes of a profile go that is being put. Dropping it leaves nothing of them. Used by
// one thread at a time.
class ProfileSink {
 public:
  virtual ~ProfileSink() = default;

  // In order, and never more than were announced.
  virtual absl::Status Append(std::span<const std::byte> bytes) = 0;
  // All have come. InvalidArgument: they are no profile. FailedPrecondition: they have another id
  // than was expected.
  virtual absl::StatusOr<StoredProfile> Commit() = 0;
};

// One PutProfile (cache.proto) without its transport: holds messages against what was announced,
// and hands their bytes on. Used by one thread at a time. After an error, or Commit, it is used up
// and its sink is gone: whoever sees the answer sees nothing of the upload.
class ProfileUpload {
 public:
  // Called once, before any bytes are taken, with the size that was announced, and the id that it
  // is to have, or zero. Its error is that of Take: InvalidArgument where no profile has this size.
  using Begin = std::function<absl::StatusOr<std::unique_ptr<ProfileSink>>(
      std::uint64_t total_bytes, const ProfileId& expected)>;

  explicit ProfileUpload(Begin begin) : begin_(std::move(begin)) {}

  // InvalidArgument: the message breaks the protocol; names the field.
  absl::Status Take(const v1::PutProfileRequest& request, const BulkPayload& payload);
  // The last message has come. InvalidArgument: fewer bytes than announced.
  absl::StatusOr<v1::PutProfileResponse> Commit();

 private:
  absl::Status Append(const v1::PutProfileRequest& request, const BulkPayload& payload);
  absl::StatusOr<v1::PutProfileResponse> Finish();

  const Begin begin_;
  std::unique_ptr<ProfileSink> sink_;  // null before the first message
  std::uint64_t total_bytes_ = 0;
  std::uint64_t received_bytes_ = 0;
};

}  // namespace kvtrie
