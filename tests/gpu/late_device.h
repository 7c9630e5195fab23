#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/device.h"
#include "storage/base/check.h"
#include "tests/storage/codec/test_random.h"

namespace kvtrie::gpu {

// The host twin with streams as a real device has them: what is asked for is done later, and of
// several streams in any order that they do not rule out by waiting for each other. Orders are
// drawn from `seed`. Not thread-safe.
class LateDevice final : public Device {
 public:
  LateDevice(std::unique_ptr<Device> device, std::uint64_t seed)
      : device_(std::move(device)), random_(seed) {}
  ~LateDevice() override { KV_CHECK(streams_.empty()); }

  std::string name() const override { return "late " + device_->name(); }
  std::size_t memory_bytes() const override { return device_->memory_bytes(); }
  absl::StatusOr<void*> Allocate(std::size_t bytes) override { return device_->Allocate(bytes); }
  void Free(void* memory) override { device_->Free(memory); }
  absl::StatusOr<void*> AllocatePinned(std::size_t bytes) override {
    return device_->AllocatePinned(bytes);
  }
  void FreePinned(void* memory) override { device_->FreePinned(memory); }
  absl::StatusOr<std::unique_ptr<DeviceStream>> NewStream() override {
    auto stream = device_->NewStream();
    if (!stream.ok()) return stream;
    return std::make_unique<Stream>(*std::move(stream), *this);
  }

 private:
  class Stream final : public DeviceStream {
   public:
    Stream(std::unique_ptr<DeviceStream> stream, LateDevice& device)
        : stream_(std::move(stream)), device_(device) {
      device_.streams_.push_back(this);
    }
    ~Stream() override {
      KV_CHECK(done_ == asked_.size());
      std::erase(device_.streams_, this);
    }

    void CopyToDevice(void* to, const void* from, std::size_t bytes) override {
      Ask([=, this] { stream_->CopyToDevice(to, from, bytes); });
    }
    void CopyFromDevice(void* to, const void* from, std::size_t bytes) override {
      Ask([=, this] { stream_->CopyFromDevice(to, from, bytes); });
    }
    void Zero(void* at, std::size_t bytes) override {
      Ask([=, this] { stream_->Zero(at, bytes); });
    }
    void WaitFor(DeviceStream& other) override {
      auto& before = static_cast<Stream&>(other);
      asked_.push_back({.work = {}, .other = &before, .count = before.asked_.size()});
    }
    void Launch(const AnglesArgs& args) override { AskFor(args); }
    void Launch(const WriteRawArgs& args) override { AskFor(args); }
    void Launch(const FindExtremesArgs& args) override { AskFor(args); }
    void Launch(const GatherArgs& args) override { AskFor(args); }
    void Launch(const RestoreRowsArgs& args) override { AskFor(args); }
    void Launch(const ResidualArgs& args) override { AskFor(args); }
    void Launch(const ReadRowsArgs& args) override { AskFor(args); }
    void Launch(const ImportanceLayerArgs& args) override { AskFor(args); }
    void Launch(const ExponentsArgs& args) override { AskFor(args); }
    void Launch(const DecodePlaneArgs& args) override { AskFor(args); }
    void Launch(const QuantizePlaneArgs& args) override { AskFor(args); }
    void Launch(const EncodePlaneArgs& args) override { AskFor(args); }
    void Multiply(const IntegerProductArgs& args) override {
      Ask([=, this] { stream_->Multiply(args); });
    }
    void Multiply(const FloatProductArgs& args) override {
      Ask([=, this] { stream_->Multiply(args); });
    }
    absl::Status Synchronize() override {
      while (done_ < asked_.size()) device_.DoSomething(*this);
      return stream_->Synchronize();
    }

    // Does the next thing, unless there is none or it has to wait.
    bool DoNext() {
      if (done_ == asked_.size()) return false;
      const Asked& next = asked_[done_];
      if (next.other != nullptr && next.other->done_ < next.count) return false;
      if (next.other == nullptr) next.work();
      ++done_;
      return true;
    }

   private:
    struct Asked {
      std::function<void()> work;
      Stream* other = nullptr;  // to wait for its first `count`
      std::size_t count = 0;
    };
    void Ask(std::function<void()> work) { asked_.push_back({.work = std::move(work)}); }
    template <typename Args>
    void AskFor(const Args& args) {
      Ask([=, this] { stream_->Launch(args); });
    }

    const std::unique_ptr<DeviceStream> stream_;
    LateDevice& device_;
    std::vector<Asked> asked_;
    std::size_t done_ = 0;
  };

  // Some way on in some stream; mostly in a favourite, which changes, so that streams run far ahead
  // of each other. `wanted` has something to do.
  void DoSomething(Stream& wanted) {
    if (random_.Below(20) == 0) favourite_ = random_.Below(64);
    if (streams_[favourite_ % streams_.size()]->DoNext()) return;
    if (wanted.DoNext()) return;
    const std::size_t first = random_.Below(64);
    for (std::size_t i = 0; i < streams_.size(); ++i) {
      if (streams_[(first + i) % streams_.size()]->DoNext()) return;
    }
    KV_CHECK(false);  // all wait for each other
  }

  const std::unique_ptr<Device> device_;
  TestRandom random_;
  std::size_t favourite_ = 0;
  std::vector<Stream*> streams_;
};

}  // namespace kvtrie::gpu
