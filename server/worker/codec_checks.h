#pragma once

#include <chrono>
#include <cstddef>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvtrie/v1/codec.pb.h"
#include "server/worker/codec_job.h"

namespace kvtrie {

// What streams and their items are held to.
struct CodecLimits {
  // Of a block and the frames of its references.
  std::size_t item_bytes_max = std::size_t{64} << 20;
  std::chrono::milliseconds item_timeout_max{10'000};
  std::size_t fit_bytes_max = std::size_t{1} << 30;
};

inline constexpr std::size_t kTenantBytesMax = 64;
inline constexpr std::size_t kDataBytesMax = std::size_t{1} << 20;

// The model and the rest of what begins a stream. InvalidArgument names the field.
absl::StatusOr<std::shared_ptr<const CodecModel>> CheckOpen(const v1::CodecOpen& open, CodecOp op);

// An item, against the model of its stream: nothing is allocated for one that cannot be coded.
// InvalidArgument names the field, what is wrong with it and what is right.
absl::Status CheckItem(const v1::CodecItem& item, CodecOp op, const CodecModel& model,
                       const CodecLimits& limits);

// A job with all but its bytes. REQUIRES: CheckItem() is OK.
std::unique_ptr<CodecJob> JobOf(const v1::CodecItem& item, CodecOp op,
                                std::shared_ptr<const CodecModel> model);

absl::Status CheckFitOpen(const v1::FitOpen& open, const CodecLimits& limits);

}  // namespace kvtrie
