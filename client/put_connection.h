#pragma once

#include <grpcpp/channel.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "client/borrowed_slices.h"
#include "client/deadline.h"
#include "client/put_progress.h"
#include "client/raw_call.h"

namespace kvtrie {

// One Put stream on a connection of its own, used by one thread at a time and kept between uses.
class PutConnection {
 public:
  PutConnection(std::shared_ptr<grpc::Channel> channel, bool wait_for_ready);

  // Runs the puts, many at a time, until each is done or the attempt has failed for it. Memory of
  // the blocks is not touched after the return. OK: the stream may be used again. Otherwise it is
  // broken, and why.
  absl::Status Run(std::span<PutProgress*> puts, Deadline deadline);

  // False when the stream has ended while it was idle.
  bool StillOpen();
  // Whether a former Run has succeeded: a failure may then be that of a stale connection.
  bool used() const { return used_; }

 private:
  absl::Status RunOpen(std::span<PutProgress*> puts, Deadline deadline, BorrowedSlices* slices);
  absl::Status AcceptMessage();
  grpc::ByteBuffer NextMessage(std::span<PutProgress*> puts, BorrowedSlices* slices);
  bool MayAnnounce(std::span<PutProgress*> puts) const;
  // The put to send blocks of, or null.
  PutProgress* Sending();
  absl::Status Broken(Deadline deadline);

  const bool wait_for_ready_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<RawCall> call_;
  bool read_in_flight_ = false;
  bool write_in_flight_ = false;
  bool used_ = false;

  // Of the current Run.
  std::uint64_t next_put_id_ = 1;
  std::uint64_t first_put_id_ = 1;
  std::vector<PutProgress*> announced_;  // [put id - first_put_id_]
  std::size_t open_puts_ = 0;
  std::deque<std::size_t> sending_;  // indexes in announced_ of puts that have blocks to send
  std::size_t chunk_offset_ = 0;
};

}  // namespace kvtrie
