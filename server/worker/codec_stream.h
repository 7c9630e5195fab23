#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "kvtrie/v1/codec.pb.h"
#include "proto/bulk_message.h"
#include "server/bulk_stream.h"
#include "server/worker/codec_checks.h"
#include "server/worker/codec_job.h"
#include "server/worker/codec_queue.h"
#include "server/worker/codec_work.h"
#include "storage/base/byte_budget.h"
#include "storage/base/clock.h"

namespace kvtrie {

// What streams of items need; outlives them.
struct CodecStreamHost {
  CodecQueue& queue;
  ByteBudget& memory;  // of items, from their first byte until their answer is sent
  Clock& clock;
  const CodecLimits& limits;
  // Runs something short elsewhere, soon.
  std::function<void(std::function<void()>)> post;
};

struct CodecMessage {
  v1::CodecRequest request;
  BulkPayload payload;
};

// The protocol of one Encode or Decode call: takes messages, hands items to the queue, gives
// answers. The server's memory is taken before an item's bytes are; while there is none, the stream
// wants no messages, and that is what slows its caller down.
//
// Thread-safe. `on_change` is called without locks whenever there may be something to do: to read,
// to write, or to end.
class CodecStream final : public BulkStream, public std::enable_shared_from_this<CodecStream> {
 public:
  static std::shared_ptr<CodecStream> Create(const CodecStreamHost& host, CodecOp op,
                                             std::function<void()> on_change);

  absl::StatusOr<std::size_t> ReceiveMessage(const grpc::ByteBuffer& message) override;
  void Receive(std::unique_ptr<CodecMessage> message);
  void CloseInput() override;
  // Drops what is not answered.
  void Cancel() override;

  // An item that has waited for memory for too long fails.
  bool Tick() override;

  std::optional<std::size_t> TakeMessage(grpc::ByteBuffer* message) override;

  bool wants_message() const override;
  // One that asks for nothing, too: it has a place that others need.
  bool owes_progress() const override;
  bool idle() const override;
  bool finished() const override;
  absl::Status status() const override;

 private:
  // An item whose bytes arrive.
  struct Incoming {
    std::uint64_t item_id = 0;
    std::unique_ptr<CodecJob> job;  // null: it failed, and what still comes of it is dropped
    v1::CodecResult result;         // what is known of it already
    std::vector<std::uint64_t> frame_bytes;  // of references
    std::uint64_t wanted_bytes = 0;
    std::size_t memory_bytes = 0;  // for all that becomes of it
    std::uint64_t received_bytes = 0;
  };
  // An item that is answered, with what is sent of it.
  struct Answer {
    v1::CodecResult result;
    std::shared_ptr<const CodecJob> job;
    std::span<const std::byte> bytes;
  };

  CodecStream(const CodecStreamHost& host, CodecOp op, std::function<void()> on_change)
      : host_(host), op_(op), on_change_(std::move(on_change)) {}

  absl::Status Take(CodecMessage& message, std::unique_ptr<CodecJob>* complete)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Open(const v1::CodecOpen& open) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Begin(const v1::CodecItem& item) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // False: the item waits for memory.
  bool Reserve() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnGranted(std::uint64_t wait, std::size_t bytes);
  void Allocate(std::size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddBytes(CodecMessage& message, std::unique_ptr<CodecJob>* complete)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Where the next bytes of the item go, as far as they belong together.
  std::span<std::byte> Place(CodecJob& job, std::uint64_t at) const;
  void FailIncoming(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsIdle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Hands over an item that is whole.
  void Submit(std::unique_ptr<CodecJob> job, v1::CodecResult result);
  void OnDone(std::unique_ptr<CodecJob> job, v1::CodecResult result);
  void AddAnswer(v1::CodecResult result, std::shared_ptr<const CodecJob> job)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool NextPiece(v1::CodecResponse* response, std::shared_ptr<const CodecJob>* job,
                 std::span<const std::byte>* bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool NextOfLayers(v1::CodecResponse* response, std::shared_ptr<const CodecJob>* job,
                    std::span<const std::byte>* bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const CodecStreamHost& host_;
  const CodecOp op_;
  const std::function<void()> on_change_;
  const std::shared_ptr<std::atomic<bool>> abandoned_ = std::make_shared<std::atomic<bool>>(false);

  mutable absl::Mutex mutex_;
  std::shared_ptr<const CodecModel> model_ ABSL_GUARDED_BY(mutex_);
  std::string tenant_ ABSL_GUARDED_BY(mutex_);
  Clock::Duration item_timeout_ ABSL_GUARDED_BY(mutex_){};
  bool layer_major_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<Incoming> incoming_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<CodecMessage> waiting_ ABSL_GUARDED_BY(mutex_);  // for memory
  std::uint64_t waits_ ABSL_GUARDED_BY(mutex_) = 0;                // that have begun
  std::size_t in_queue_ ABSL_GUARDED_BY(mutex_) = 0;
  std::size_t held_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of items that are not answered
  std::deque<Answer> answers_ ABSL_GUARDED_BY(mutex_);
  std::size_t sent_of_front_ ABSL_GUARDED_BY(mutex_) = 0;
  // Layer by layer: results go first.
  std::size_t results_sent_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint32_t layer_ ABSL_GUARDED_BY(mutex_) = 0;
  std::size_t answer_of_layer_ ABSL_GUARDED_BY(mutex_) = 0;
  bool input_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtrie
