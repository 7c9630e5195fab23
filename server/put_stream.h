#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kvtrie/v1/cache.pb.h"
#include "proto/bulk_message.h"
#include "server/bulk_stream.h"
#include "server/request_checks.h"
#include "server/wire_conversion.h"
#include "storage/base/byte_budget.h"
#include "storage/engine/put_session.h"

namespace kvtrie {

// What a put stream needs of the store and of the server around it.
class PutHost {
 public:
  virtual ~PutHost() = default;

  // Calls back once, on any thread, perhaps before it returns. `put` lives until then.
  using BeginCallback = std::function<void(absl::StatusOr<std::unique_ptr<PutSession>>)>;
  virtual void BeginPut(const PutAnnouncement& put, BeginCallback on_begun) = 0;
  // Memory of blocks that have begun.
  virtual ByteBudget& block_budget() = 0;
  // Memory of announcements that are kept.
  virtual ByteBudget& announce_budget() = 0;
  // Runs `work` on another thread than that which calls.
  virtual void Post(std::function<void()> work) = 0;
};

// A received message with its bytes: those of a gRPC message, or (`flat`) those of a shared region.
struct PutMessage {
  v1::PutRequest request;
  BulkPayload payload;
  std::span<const std::byte> flat;

  std::size_t payload_bytes() const { return flat.empty() ? payload.size() : flat.size(); }
  std::vector<std::span<const std::byte>> Pieces(std::size_t offset, std::size_t count) const {
    if (flat.empty()) return payload.Range(offset, count);
    return {flat.subspan(offset, count)};
  }
};

// The protocol of one stream of puts (cache.proto, Put).
//
// Messages are worked through in order; one that must wait (for the store to begin a put, or for
// memory) holds up those behind it, and so the client.
//
// Thread-safe. `on_change` is called on any thread, without locks. What comes from the store after
// Cancel is dropped.
class PutStream final : public BulkStream, public std::enable_shared_from_this<PutStream> {
 public:
  // Puts of one stream that may be open at a time.
  static constexpr std::size_t kOpenPutsMax = 256;
  // Ended puts whose late chunks are recognised.
  static constexpr std::size_t kEndedPutsMax = 65'536;
  // Answers that may wait for a client that does not read, before its messages have to wait.
  static constexpr int kAnswersMax = 65'536;
  // Blocks of one message are handed to the store in groups of about so much: one change of thread
  // for each, and no more than one thread's worth of writing.
  static constexpr std::size_t kWriteTogetherBytes = std::size_t{1} << 20;
  // Acknowledgements per response: keeps it well below a client's usual limit of 4 MiB.
  static constexpr int kAcksPerResponse = 16'384;

  static std::shared_ptr<PutStream> Create(PutHost& host, const RequestLimits& limits,
                                           std::function<void()> on_change);
  ~PutStream() override;

  absl::StatusOr<std::size_t> ReceiveMessage(const grpc::ByteBuffer& message) override;
  void Receive(std::unique_ptr<PutMessage> message);
  // Blocks that are not complete fail, the others are still published.
  void CloseInput() override;
  // Nothing of what was not published remains.
  void Cancel() override;

  std::optional<std::size_t> TakeMessage(grpc::ByteBuffer* message) override;
  // Moves the answers that have gathered into `response`; false: there are none.
  bool TakeResponse(v1::PutResponse* response);

  bool wants_message() const override;
  // Bytes of a block that has begun: who may put later is waited for.
  bool owes_progress() const override;
  bool idle() const override;
  bool finished() const override;
  absl::Status status() const override;

 private:
  enum class BlockState : std::uint8_t {
    kStored,     // was there before
    kExpected,   // missing; the client has not begun it
    kOpen,       // bytes are arriving
    kFinishing,  // complete; the store publishes it
    kAnswered,
  };

  struct OpenBlock {
    std::unique_ptr<BlockWriter> writer;
    ByteReservation reservation;
  };

  // The announcement of a put, and what its views point to.
  struct Announced {
    v1::PutAnnounce proto;
    RequestPath path;
    PutAnnouncement announcement;
    ByteReservation reservation;

    explicit Announced(v1::PutAnnounce announce)
        : proto(std::move(announce)), path(proto.prefix()) {}
  };

  struct OpenPut {
    bool eager = false;
    v1::Encoding encoding = v1::ENCODING_RAW;
    ByteReservation reservation;          // for what the session keeps of the announcement
    std::shared_ptr<PutSession> session;  // shared with calls that are about to be made
    std::uint32_t first_block = 0;
    std::vector<BlockState> states;  // of block first_block + i
    absl::flat_hash_map<std::uint32_t, OpenBlock> open;
    std::size_t unanswered = 0;
    v1::PutDone done;

    BlockState* state(std::uint32_t block_index) {
      if (block_index < first_block || block_index - first_block >= states.size()) return nullptr;
      return &states[block_index - first_block];
    }
  };

  // Calls into the store that may call back at once: made after the lock was given up, in order.
  using Deferred = std::vector<absl::AnyInvocable<void()>>;

  PutStream(PutHost& host, const RequestLimits& limits, std::function<void()> on_change)
      : host_(host), limits_(limits), on_change_(std::move(on_change)) {}

  void Advance();
  void Step(Deferred* deferred) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartAnnounce(v1::PutAnnounce announce, Deferred* deferred)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::unique_ptr<Announced>> PrepareAnnounce(v1::PutAnnounce announce)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnBegun(std::unique_ptr<Announced> announced,
               absl::StatusOr<std::unique_ptr<PutSession>> session);
  void OpenPlan(std::unique_ptr<Announced> announced, std::unique_ptr<PutSession> session,
                Deferred* deferred) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RefusePut(std::uint64_t put_id, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // False: the chunk has to wait for memory; it was not taken.
  bool TakeChunk(const v1::Chunk& chunk, Deferred* deferred) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ok and true: the block is open. Ok and false: wait.
  absl::StatusOr<bool> OpenBlockFor(OpenPut& put, const v1::Chunk& chunk)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The bytes of the message's next chunk that may hold a frame's header, copied out before they
  // are believed.
  std::vector<std::byte> FrameHead(const v1::Chunk& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishBlock(std::uint64_t put_id, OpenPut& put, std::uint32_t block_index,
                   Deferred* deferred) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WriteFinished(Deferred* deferred) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnBlockDone(std::uint64_t put_id, std::uint32_t block_index,
                   const absl::StatusOr<PutBlockResult>& result);
  void FailBlock(std::uint64_t put_id, OpenPut& put, std::uint32_t block_index,
                 const absl::Status& status, Deferred* deferred)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::PutAck* AddAck(std::uint64_t put_id, std::uint32_t block_index)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndPutIfDone(std::uint64_t put_id, Deferred* deferred) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AbortPut(std::uint64_t put_id, Deferred* deferred) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RememberEnded(std::uint64_t put_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropPut(std::unique_ptr<OpenPut> put, Deferred* deferred)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Fail(absl::Status status, Deferred* deferred) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropAll(Deferred* deferred) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int answer_count() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return answers_.plans_size() + answers_.acks_size() + answers_.dones_size();
  }
  void RunDeferred(Deferred deferred) ABSL_LOCKS_EXCLUDED(mutex_);

  PutHost& host_;
  const RequestLimits& limits_;
  const std::function<void()> on_change_;

  mutable absl::Mutex mutex_;
  std::unique_ptr<PutMessage> message_ ABSL_GUARDED_BY(mutex_);
  int next_announce_ ABSL_GUARDED_BY(mutex_) = 0;
  int next_chunk_ ABSL_GUARDED_BY(mutex_) = 0;
  std::size_t payload_offset_ ABSL_GUARDED_BY(mutex_) = 0;
  bool waiting_ ABSL_GUARDED_BY(mutex_) = false;
  // Blocks of one put that this step has completed: handed on together when it ends.
  std::shared_ptr<PutSession> finished_session_ ABSL_GUARDED_BY(mutex_);
  std::vector<PutSession::FinishedBlock> finished_ ABSL_GUARDED_BY(mutex_);
  std::size_t finished_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  ByteReservation granted_ ABSL_GUARDED_BY(mutex_);  // memory that was waited for
  bool input_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::uint64_t, std::unique_ptr<OpenPut>> puts_ ABSL_GUARDED_BY(mutex_);
  std::size_t open_blocks_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_set<std::uint64_t> ended_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::uint64_t> ended_order_ ABSL_GUARDED_BY(mutex_);  // a ring once it is full
  std::size_t ended_next_ ABSL_GUARDED_BY(mutex_) = 0;
  v1::PutResponse answers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtrie
