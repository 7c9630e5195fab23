#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/fetch_plan.h"
#include "server/rpc_metrics.h"
#include "server/service_context.h"
#include "server/stream_registry.h"

namespace kvtrie {

// One Fetch call. Frames are read ahead, at most `read_ahead_bytes` (or one frame) beyond what gRPC
// has taken; one write is in flight; messages share the frames' memory. Memory of a frame counts
// against the budget of all streams until the socket has taken its last byte.
//
// Blocks that have to be decoded are read in groups, which decode together. Layer-major, each is
// decoded once, and stays until its last visit.
//
// Owns itself from Start until OnDone.
class FetchStream final : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                          public TrackedStream,
                          public std::enable_shared_from_this<FetchStream> {
 public:
  static grpc::ServerWriteReactor<grpc::ByteBuffer>* Start(ServiceContext& context,
                                                           grpc::CallbackServerContext* call,
                                                           const grpc::ByteBuffer& request);

  void Abort(const absl::Status& status) override;
  void OnDrain() override {}  // goes on until the end of the grace time

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  // A visit whose frame was asked for.
  struct Slot {
    FetchStep step;
    absl::Status status;
    std::shared_ptr<const HeldFrame> frame;  // null: being read, or failed
    bool reading = false;
    bool begun = false;
    ChunkCursor cursor;
  };
  struct PendingRead {
    std::uint64_t slot_number;
    const StoredFrame* stored;
    ByteReservation reservation;
  };
  // Bounds the bookkeeping of fetches of very small blocks and of misses.
  static constexpr std::size_t kSlotsMax = 1024;

  FetchStream(ServiceContext& context, grpc::CallbackServerContext* call)
      : context_(context), call_(call), probe_(context.metrics, RpcMethod::kFetch) {}

  void Begin(const grpc::ByteBuffer& request);
  absl::Status Prepare(const grpc::ByteBuffer& request);
  void OnFound(absl::StatusOr<std::vector<std::optional<StoredFrame>>> frames);
  // Reads ahead and writes what there is to write.
  void Pump();
  void ReadAhead(std::vector<PendingRead>* reads) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // False: memory has to be waited for.
  bool Reserve(std::size_t frame_bytes, ByteReservation* reservation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Decodes(const StoredFrame& stored) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stored.needs_decoding(shape_.read_as);
  }
  void SetFrame(Slot& slot, LoadedFrame loaded, ByteReservation reservation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnFrameRead(std::uint64_t slot_number, ByteReservation reservation,
                   absl::StatusOr<LoadedFrame> loaded);
  void FillMessage() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void BeginSlot(Slot& slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PopSlot() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WriteMessage(bool last) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishWith(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Drop() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  ServiceContext& context_;
  grpc::CallbackServerContext* const call_;
  RpcProbe probe_;

  // Constant once Begin has checked it.
  v1::FetchRequest request_;

  absl::Mutex mutex_;
  std::shared_ptr<FetchStream> self_ ABSL_GUARDED_BY(mutex_);
  FetchShape shape_ ABSL_GUARDED_BY(mutex_);
  FetchSteps steps_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::optional<StoredFrame>> stored_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::vector<TokenId>> tokens_ ABSL_GUARDED_BY(mutex_);  // of each, if wanted
  // What may be read ahead of blocks that have to be decoded: two groups of them at least.
  std::size_t decode_ahead_bytes_ ABSL_GUARDED_BY(mutex_) = 0;

  std::size_t next_step_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Slot> slots_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t first_slot_number_ ABSL_GUARDED_BY(mutex_) = 0;
  std::size_t ahead_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool waiting_for_memory_ ABSL_GUARDED_BY(mutex_) = false;
  ByteReservation granted_ ABSL_GUARDED_BY(mutex_);
  // Layer-major: frames that stay until their last visit.
  absl::flat_hash_map<std::uint32_t, std::shared_ptr<const HeldFrame>> resident_
      ABSL_GUARDED_BY(mutex_);
  // Layer-major: blocks that failed at their first visit.
  std::vector<bool> failed_ ABSL_GUARDED_BY(mutex_);

  FetchMessage message_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer buffer_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvtrie
