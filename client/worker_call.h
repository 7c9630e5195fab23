#pragma once

#include <grpcpp/channel.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/deadline.h"
#include "kvtrie/v1/codec.pb.h"

namespace kvtrie {

// A block on its way to a worker and back.
struct WorkerItem {
  v1::CodecItem item;  // its id is its index in the call
  // The block, and the frames of its references, in order. They outlive the call.
  std::vector<std::span<const std::byte>> bytes;
  // Where the answer's bytes go, once it is known how many they are; empty: it is refused.
  std::function<std::span<std::byte>(const v1::CodecResult& result)> place;

  // What became of it.
  bool answered = false;  // with all its bytes, if its status is OK
  v1::CodecResult result;
};

enum class WorkerMethod { kEncode, kDecode };

// Sends items to a worker, and takes the answers, until all are answered or the call fails. The
// thread that calls does the work. Bytes are copied on their way out: a worker that hangs would
// keep the caller's memory otherwise. Errors: those of gRPC; DeadlineExceeded; DataLoss: what comes
// is not what was announced; Cancelled, soon after `stop` has become true. Items that were answered
// stay so.
absl::Status CallWorker(const std::shared_ptr<grpc::Channel>& channel, WorkerMethod method,
                        const v1::CodecOpen& open, std::span<WorkerItem> items, Deadline deadline,
                        const std::atomic<bool>* stop = nullptr);

// Hands a worker a profile. Errors: as above.
absl::Status SendProfile(const std::shared_ptr<grpc::Channel>& channel,
                         std::span<const std::byte> profile, Deadline deadline,
                         const std::atomic<bool>* stop = nullptr);

// What a worker says of itself.
absl::StatusOr<v1::DescribeResponse> DescribeWorker(const std::shared_ptr<grpc::Channel>& channel,
                                                    Deadline deadline);

}  // namespace kvtrie
