#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/kernels.h"

// What the coder asks of a device: memory, streams of work, and the loops of kernels.h. Two kinds:
// the host twin (host_device.h), and CUDA (cuda_device.h).
namespace kvtrie::gpu {

// products[b][row][out] = rows[b][row][in] * matrix[b][out][in], exact integers: int8 to int32.
// REQUIRES: row_count a multiple of 16; in and out multiples of 16; products fit 31 bits.
struct IntegerProductArgs {
  const std::int8_t* rows = nullptr;
  const std::int8_t* matrix = nullptr;
  std::int32_t* products = nullptr;
  std::uint32_t batch_count = 0;
  std::uint32_t row_count = 0;
  std::uint32_t in = 0;
  std::uint32_t out = 0;
};

// products[b][i][row] = sum over j of rows[row][b][j] * matrix[b][j][i], float32, in any order but
// without shorter formats. size: of i and j.
struct FloatProductArgs {
  const float* rows = nullptr;
  const float* matrix = nullptr;
  float* products = nullptr;
  std::uint32_t batch_count = 0;
  std::uint32_t row_count = 0;
  std::uint32_t size = 0;
};

// Work that a device does in order, one thing behind the other. Calls return at once, and what they
// point to stays until Synchronize(); the first failure stays until then too, and what comes behind
// it is not done. Not thread-safe.
class DeviceStream {
 public:
  virtual ~DeviceStream() = default;

  virtual void CopyToDevice(void* to, const void* from, std::size_t bytes) = 0;
  virtual void CopyFromDevice(void* to, const void* from, std::size_t bytes) = 0;
  virtual void Zero(void* at, std::size_t bytes) = 0;
  // What comes behind it here waits for what was asked of `other` before it. REQUIRES: a stream of
  // the same device.
  virtual void WaitFor(DeviceStream& other) = 0;

  virtual void Launch(const AnglesArgs& args) = 0;
  virtual void Launch(const WriteRawArgs& args) = 0;
  virtual void Launch(const FindExtremesArgs& args) = 0;
  virtual void Launch(const GatherArgs& args) = 0;
  virtual void Launch(const RestoreRowsArgs& args) = 0;
  virtual void Launch(const ResidualArgs& args) = 0;
  virtual void Launch(const ReadRowsArgs& args) = 0;
  virtual void Launch(const ImportanceLayerArgs& args) = 0;
  virtual void Launch(const ExponentsArgs& args) = 0;
  virtual void Launch(const DecodePlaneArgs& args) = 0;
  virtual void Launch(const QuantizePlaneArgs& args) = 0;
  virtual void Launch(const EncodePlaneArgs& args) = 0;
  virtual void Multiply(const IntegerProductArgs& args) = 0;
  virtual void Multiply(const FloatProductArgs& args) = 0;

  // Waits until all is done. Unavailable: something failed; the results are of no use.
  virtual absl::Status Synchronize() = 0;
};

// Thread-safe. Outlives its streams and memory.
class Device {
 public:
  virtual ~Device() = default;

  // For people.
  virtual std::string name() const = 0;
  // How much of its memory coders may take, all together.
  virtual std::size_t memory_bytes() const = 0;

  // Memory of the device, or the host's in a form that copies run fast to and from. At least one
  // byte; aligned to 256. Unavailable: there is no room.
  virtual absl::StatusOr<void*> Allocate(std::size_t bytes) = 0;
  virtual void Free(void* memory) = 0;
  virtual absl::StatusOr<void*> AllocatePinned(std::size_t bytes) = 0;
  virtual void FreePinned(void* memory) = 0;

  virtual absl::StatusOr<std::unique_ptr<DeviceStream>> NewStream() = 0;
};

// Owns memory of a device, or pinned memory of the host; empty at first.
template <bool kPinned>
class OwnedMemory {
 public:
  OwnedMemory() = default;
  OwnedMemory(OwnedMemory&& other) noexcept { *this = std::move(other); }
  OwnedMemory& operator=(OwnedMemory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~OwnedMemory() {
    if (memory_ != nullptr) kPinned ? device_->FreePinned(memory_) : device_->Free(memory_);
  }

  static absl::StatusOr<OwnedMemory> Of(Device& device, std::size_t bytes) {
    absl::StatusOr<void*> memory = kPinned ? device.AllocatePinned(bytes) : device.Allocate(bytes);
    if (!memory.ok()) return std::move(memory).status();
    OwnedMemory owned;
    owned.device_ = &device;
    owned.memory_ = static_cast<std::byte*>(*memory);
    owned.bytes_ = bytes;
    return owned;
  }

  std::byte* data() const { return memory_; }
  std::size_t size() const { return bytes_; }

 private:
  Device* device_ = nullptr;
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
};
using DeviceMemory = OwnedMemory<false>;
using PinnedMemory = OwnedMemory<true>;

// Where things lie in one piece of memory, each aligned to 256 bytes.
class MemoryLayout {
 public:
  // Returns where `bytes` begin.
  std::size_t Add(std::size_t bytes) {
    const std::size_t at = bytes_;
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  template <typename T>
  std::size_t Add(std::size_t count) {
    return Add(count * sizeof(T));
  }
  std::size_t bytes() const { return bytes_; }

  static constexpr std::size_t kAlignment = 256;

 private:
  std::size_t bytes_ = 0;
};

}  // namespace kvtrie::gpu
