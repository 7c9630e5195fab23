#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "gpu/device.h"

namespace kvtrie::gpu {

// After so many calls of a device all fail.
struct Faults {
  static constexpr int kNone = 1 << 30;
  std::atomic<int> calls_left = kNone;

  bool Next() { return calls_left.fetch_sub(1) <= 0; }
};

// A device that fails when it is told to.
class FaultyDevice final : public Device {
 public:
  FaultyDevice(std::unique_ptr<Device> device, Faults& faults)
      : device_(std::move(device)), faults_(faults) {}

  std::string name() const override { return device_->name(); }
  std::size_t memory_bytes() const override { return device_->memory_bytes(); }
  absl::StatusOr<void*> Allocate(std::size_t bytes) override {
    if (faults_.Next()) return Fault();
    return device_->Allocate(bytes);
  }
  void Free(void* memory) override { device_->Free(memory); }
  absl::StatusOr<void*> AllocatePinned(std::size_t bytes) override {
    if (faults_.Next()) return Fault();
    return device_->AllocatePinned(bytes);
  }
  void FreePinned(void* memory) override { device_->FreePinned(memory); }
  absl::StatusOr<std::unique_ptr<DeviceStream>> NewStream() override {
    if (faults_.Next()) return Fault();
    auto stream = device_->NewStream();
    if (!stream.ok()) return stream;
    return std::make_unique<Stream>(*std::move(stream), faults_);
  }

 private:
  static absl::Status Fault() { return absl::UnavailableError("a fault"); }

  class Stream final : public DeviceStream {
   public:
    Stream(std::unique_ptr<DeviceStream> stream, Faults& faults)
        : stream_(std::move(stream)), faults_(faults) {}

    void CopyToDevice(void* to, const void* from, std::size_t bytes) override {
      if (Works()) stream_->CopyToDevice(to, from, bytes);
    }
    void CopyFromDevice(void* to, const void* from, std::size_t bytes) override {
      if (Works()) stream_->CopyFromDevice(to, from, bytes);
    }
    void Zero(void* at, std::size_t bytes) override {
      if (Works()) stream_->Zero(at, bytes);
    }
    void WaitFor(DeviceStream& other) override {
      if (Works()) stream_->WaitFor(*static_cast<Stream&>(other).stream_);
    }
    void Launch(const AnglesArgs& args) override { Do(args); }
    void Launch(const WriteRawArgs& args) override { Do(args); }
    void Launch(const FindExtremesArgs& args) override { Do(args); }
    void Launch(const GatherArgs& args) override { Do(args); }
    void Launch(const RestoreRowsArgs& args) override { Do(args); }
    void Launch(const ResidualArgs& args) override { Do(args); }
    void Launch(const ReadRowsArgs& args) override { Do(args); }
    void Launch(const ImportanceLayerArgs& args) override { Do(args); }
    void Launch(const ExponentsArgs& args) override { Do(args); }
    void Launch(const DecodePlaneArgs& args) override { Do(args); }
    void Launch(const QuantizePlaneArgs& args) override { Do(args); }
    void Launch(const EncodePlaneArgs& args) override { Do(args); }
    void Multiply(const IntegerProductArgs& args) override {
      if (Works()) stream_->Multiply(args);
    }
    void Multiply(const FloatProductArgs& args) override {
      if (Works()) stream_->Multiply(args);
    }
    absl::Status Synchronize() override {
      const bool failed = std::exchange(failed_, false);
      return failed ? Fault() : stream_->Synchronize();
    }

   private:
    bool Works() {
      failed_ |= faults_.Next();
      return !failed_;
    }
    template <typename Args>
    void Do(const Args& args) {
      if (Works()) stream_->Launch(args);
    }

    const std::unique_ptr<DeviceStream> stream_;
    Faults& faults_;
    bool failed_ = false;
  };

  const std::unique_ptr<Device> device_;
  Faults& faults_;
};

}  // namespace kvtrie::gpu
