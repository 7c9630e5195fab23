// Messages of Encode and Decode calls, as they come from the wire.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "proto/bulk_message.h"
#include "server/worker/codec_queue.h"
#include "server/worker/codec_stream.h"
#include "server/worker/codec_work.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "tests/fuzz/codec_stream_target.h"

namespace kvtrie {
namespace {

// A worker without a network, kept over all inputs: its threads cost more than an input does.
class Worker {
 public:
  Worker()
      : cpu_(CpuBackend()),
        work_(*cpu_, shelf_, std::size_t{64} << 20),
        queue_(
            {.threads = 1, .jobs_max = 64},
            [this](std::span<const std::unique_ptr<CodecJob>> jobs) { work_.Run(jobs); },
            SystemClock()),
        host_{.queue = queue_,
              .memory = memory_,
              .clock = SystemClock(),
              .limits = limits_,
              .post = [](std::function<void()> chore) { chore(); }} {
    KV_CHECK(shelf_.Add(ProfileBytes(PlainProfile(FuzzedSpec()))).ok());
  }

  CodecStreamHost& host() { return host_; }
  ByteBudget& memory() { return memory_; }

 private:
  const std::unique_ptr<const CodecBackend> cpu_;
  ProfileShelf shelf_{std::size_t{64} << 20};
  CodecWork work_;
  CodecLimits limits_;
  ByteBudget memory_{std::size_t{16} << 20};
  CodecQueue queue_;
  CodecStreamHost host_;
};

// Wakes whoever waits for a stream to change.
class Changes {
 public:
  void Add() {
    absl::MutexLock lock(&mutex_);
    ++count_;
  }
  int count() {
    absl::MutexLock lock(&mutex_);
    return count_;
  }
  void AwaitOther(int than) {
    absl::MutexLock lock(&mutex_);
    than_ = than;
    mutex_.Await(absl::Condition(this, &Changes::IsOther));
  }

 private:
  bool IsOther() const { return count_ != than_; }
  absl::Mutex mutex_;
  int count_ = 0;
  int than_ = 0;
};

void Run(Worker& worker, std::span<const std::uint8_t> input) {
  if (input.empty()) return;
  const std::uint8_t flags = input[0];
  input = input.subspan(1);
  const auto changes = std::make_shared<Changes>();
  {
    const auto stream = CodecStream::Create(
        worker.host(), (flags & kDecodes) != 0 ? CodecOp::kDecode : CodecOp::kEncode,
        [changes] { changes->Add(); });
    while (input.size() >= 2 && stream->wants_message()) {
      const std::size_t length = input[0] | std::size_t{input[1]} << 8;
      const auto bytes = input.subspan(2, std::min(length, input.size() - 2));
      input = input.subspan(2 + bytes.size());
      const grpc::Slice slice(bytes.data(), bytes.size());
      auto message = std::make_unique<CodecMessage>();
      if (!ParseBulkMessage(grpc::ByteBuffer(&slice, 1), &message->request, &message->payload)
               .ok()) {
        break;
      }
      if ((flags & kMendsChecksums) != 0) {
        std::uint32_t crc = 0;
        for (const auto& piece : message->payload.pieces()) crc = Crc32c(piece, crc);
        message->request.set_crc32c(crc);
      }
      stream->Receive(std::move(message));
      grpc::ByteBuffer answer;
      while (stream->TakeMessage(&answer)) answer.Clear();
    }
    if ((flags & kClosesInput) != 0 && stream->wants_message()) {
      stream->CloseInput();
      // Every item is answered.
      while (stream->status().ok()) {
        const int before = changes->count();
        grpc::ByteBuffer answer;
        while (stream->TakeMessage(&answer)) answer.Clear();
        if (stream->finished()) break;
        changes->AwaitOther(before);
      }
    }
    stream->Cancel();
  }
}

}  // namespace
}  // namespace kvtrie

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static auto* const worker = new kvtrie::Worker;
  kvtrie::Run(*worker, {data, size});
  return 0;
}
