#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/reference_decoding.h"
#include "server/worker/codec_job.h"
#include "server/worker/profile_shelf.h"
#include "storage/codec/block_coder.h"
#include "storage/codec/codec_cache.h"

namespace kvtrie {

// Codes jobs with the profiles of a shelf, on a device. Thread-safe.
class CodecWork {
 public:
  // All outlive this.
  CodecWork(const CodecBackend& backend, ProfileShelf& shelf, std::size_t codec_bytes_max)
      : shelf_(shelf), codecs_(codec_bytes_max, &backend) {}

  // Holds the frame of a decoding job, all of whose bytes are there, against what the job says of
  // it, and tells by which profile it is to be decoded. DataLoss: it is no frame, or damaged.
  // InvalidArgument: it is of another model, position, or of other tokens.
  static absl::Status Open(CodecJob& job);

  // Jobs that share a batch; sets what became of each. One that fails leaves the others alone.
  void Run(std::span<const std::unique_ptr<CodecJob>> jobs);

  CodecCacheStats Stats() const { return codecs_.Stats(); }

 private:
  using Codec = std::shared_ptr<const FrameCodec>;

  absl::StatusOr<Codec> CodecFor(const CodecModel& model, const ProfileId& profile);
  // Of one job, raw. Error, which is the job's: one of them is not to be had.
  absl::StatusOr<std::vector<ReferenceBlock>> References(CodecJob& job, DecodedReferences* decoded);
  // A job whose references are raw.
  struct Ready {
    CodecJob* job;
    DecodedReferences decoded;
    std::vector<ReferenceBlock> references;  // point into `decoded`
  };
  void Encode(const FrameCodec& codec, std::span<const Ready> jobs);
  void Decode(const FrameCodec& codec, std::span<const Ready> jobs);

  ProfileShelf& shelf_;
  CodecCache codecs_;
};

}  // namespace kvtrie
