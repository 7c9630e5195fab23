#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/channel_pool.h"
#include "client/deadline.h"
#include "client/fetch_assembly.h"
#include "client/fetch_types.h"
#include "client/lane_socket.h"
#include "client/local_region.h"
#include "client/put_progress.h"

namespace kvtrie {

// Whether a target's server runs on this host, as far as its name tells.
bool IsLocalTarget(const std::string& target);

// The shared-memory lane to a server on the same host (local_lane.proto): blocks are copied once,
// by the server, into or out of a region of ours. A target's memory that lies in the region is
// filled in place; other targets get their bytes by way of a scratch buffer, with one more copy.
// Thread-safe.
//
// A server that does not answer in time may still write: the memory that it was given is cut from
// the region then.
class LocalLane {
 public:
  // Bytes that travel in one request: they are checked while they are still in the processor's
  // cache.
  static constexpr std::size_t kRequestBytes = std::size_t{1} << 20;

  LocalLane(ChannelPool& channels, std::shared_ptr<LocalRegion> region);

  // Asks for the first blocks that `assembly` lacks, as many as go into one request. With
  // `wait_for_ready` it waits for a server that is not there. Unavailable: the lane is off or
  // broken.
  absl::Status FetchSome(const ModelId& model, const FetchOptions& options, Deadline deadline,
                         bool wait_for_ready, FetchAssembly* assembly);

  // REQUIRES: all blocks of `put` together fit into one request, or it has a single one.
  absl::Status Put(PutProgress* put, Deadline deadline, bool wait_for_ready);

  const std::shared_ptr<LocalRegion>& region() const { return region_; }

 private:
  struct Connection {
    std::unique_ptr<LaneSocket> socket;
    RegionBuffer scratch;
  };

  absl::StatusOr<std::unique_ptr<Connection>> TakeConnection(Deadline deadline,
                                                             bool wait_for_ready);
  absl::StatusOr<std::unique_ptr<Connection>> Open(Deadline deadline, bool wait_for_ready);
  void GiveBack(std::unique_ptr<Connection> connection);
  absl::StatusOr<std::span<std::byte>> Scratch(Connection& connection, std::size_t bytes);

  ChannelPool& channels_;
  const std::shared_ptr<LocalRegion> region_;

  absl::Mutex mutex_;
  std::vector<std::unique_ptr<Connection>> idle_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtrie
