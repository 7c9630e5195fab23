#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "kvtrie/v1/cache.pb.h"
#include "server/put_stream.h"
#include "server/request_checks.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "tests/server/fake_put_host.h"

namespace kvtrie {
namespace {

// What a stream meets, read off the input.
class Script {
 public:
  Script(const std::uint8_t* data, std::size_t size)
      : left_(reinterpret_cast<const std::byte*>(data), size) {}

  bool empty() const { return left_.empty(); }
  std::uint8_t Byte() { return left_.empty() ? 0 : static_cast<std::uint8_t>(Take(1)[0]); }
  // A length of two bytes, and so many or what is left.
  std::span<const std::byte> Bytes() {
    const std::size_t low = Byte();
    return Take(low | std::size_t{Byte()} << 8);
  }

 private:
  std::span<const std::byte> Take(std::size_t count) {
    const auto taken = left_.first(std::min(count, left_.size()));
    left_ = left_.subspan(taken.size());
    return taken;
  }
  std::span<const std::byte> left_;
};

// Checksums that mutations would hardly ever hit.
void MendChecksums(PutMessage& message) {
  std::size_t offset = 0;
  for (v1::Chunk& chunk : *message.request.mutable_chunks()) {
    if (offset > message.flat.size() || chunk.bytes() > message.flat.size() - offset) return;
    chunk.set_crc32c(Crc32c(message.flat.subspan(offset, chunk.bytes())));
    offset += chunk.bytes();
  }
}

enum Action : std::uint8_t { kMessage, kMendedMessage, kHold, kRelease, kRead, kCloseInput };
constexpr std::uint8_t kActions = kCloseInput + 1;

void Run(Script script) {
  FakeHost host;
  const RequestLimits limits;
  {
    const auto stream = PutStream::Create(host, limits, [] {});
    bool is_closed = false;
    while (!script.empty()) {
      const std::uint8_t action = script.Byte() % kActions;
      if (action == kMessage || action == kMendedMessage) {
        auto message = std::make_unique<PutMessage>();
        const auto request = script.Bytes();
        message->flat = script.Bytes();
        if (!message->request.ParseFromArray(request.data(), static_cast<int>(request.size()))) {
          continue;
        }
        if (action == kMendedMessage) MendChecksums(*message);
        if (!is_closed && stream->wants_message()) stream->Receive(std::move(message));
      } else if (action == kHold) {
        host.hold_begins = host.store.hold_finishes = true;
      } else if (action == kRelease) {
        if (host.held_begin) std::exchange(host.held_begin, std::nullopt).value()();
        host.store.ReleaseFinishes();
        host.RunPosted();
      } else if (action == kRead) {
        v1::PutResponse response;
        stream->TakeResponse(&response);
      } else if (!is_closed && stream->wants_message()) {
        // As a transport does it: between messages.
        is_closed = true;
        stream->CloseInput();
      }
    }
    stream->Cancel();
    if (host.held_begin) std::exchange(host.held_begin, std::nullopt).value()();
    host.store.ReleaseFinishes();
    host.RunPosted();
  }
  // Nothing of a stream outlives it, nor what it took.
  KV_CHECK(host.store.live_sessions == 0);
  KV_CHECK(host.store.live_writers == 0);
  KV_CHECK(host.blocks.used_bytes() == 0);
  KV_CHECK(host.announces.used_bytes() == 0);
}

}  // namespace
}  // namespace kvtrie

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvtrie::Run(kvtrie::Script(data, size));
  return 0;
}
