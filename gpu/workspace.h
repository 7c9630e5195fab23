#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "gpu/device.h"

namespace kvtrie::gpu {

// What a batch works with: a stream for the work, two for symbols and for copies beside it, and
// memory that grows with what is asked for. Not thread-safe.
class Workspace {
 public:
  static absl::StatusOr<std::unique_ptr<Workspace>> Of(Device& device);

  DeviceStream& work() { return *work_; }
  DeviceStream& symbols() { return *symbols_; }
  DeviceStream& copies() { return *copies_; }

  // Sees to it that there is as much of each kind; what was in them may be gone.
  // REQUIRES: nothing is under way. Unavailable: there is no room.
  absl::Status Reserve(std::size_t device_bytes, std::size_t in_bytes, std::size_t out_bytes);
  std::byte* device() const { return device_memory_.data(); }
  std::byte* in() const { return in_.data(); }    // pinned, to the device
  std::byte* out() const { return out_.data(); }  // pinned, from the device

  // Waits for all streams. Unavailable: something of what was under way failed.
  absl::Status Synchronize();

 private:
  explicit Workspace(Device& device) : device_(device) {}

  Device& device_;
  std::unique_ptr<DeviceStream> work_;
  std::unique_ptr<DeviceStream> symbols_;
  std::unique_ptr<DeviceStream> copies_;
  DeviceMemory device_memory_;
  PinnedMemory in_;
  PinnedMemory out_;
};

// So many workspaces at most, that callers borrow: what bounds memory. Thread-safe.
class WorkspacePool {
 public:
  WorkspacePool(Device& device, std::size_t count);

  // Goes back when it is dropped; what is under way in it is waited for then.
  struct Return {
    WorkspacePool* pool = nullptr;
    void operator()(Workspace* workspace) const;
  };
  using Lease = std::unique_ptr<Workspace, Return>;

  // Waits for one. A caller that holds one takes more of them with TryAcquire, so that two never
  // wait for each other. Unavailable: the device is lost.
  absl::StatusOr<Lease> Acquire();
  // Null: all are lent, or the device is lost.
  Lease TryAcquire();

  std::size_t count() const { return count_; }

 private:
  absl::StatusOr<Lease> Take(std::unique_ptr<Workspace> idle);

  Device& device_;
  const std::size_t count_;
  absl::Mutex mutex_;
  std::size_t lent_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::unique_ptr<Workspace>> idle_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtrie::gpu
