#include "gpu/workspace.h"

#include <functional>
#include <utility>

#include "storage/base/status_macros.h"

namespace kvtrie::gpu {
namespace {

// Room for a little more than was asked for, so that batches of about one size do not each ask the
// driver, which makes all streams wait.
std::size_t Grown(std::size_t bytes) { return bytes + bytes / 8 + (std::size_t{64} << 10); }

template <typename Memory>
absl::Status Grow(Device& device, std::size_t bytes, Memory& memory) {
  if (memory.size() >= bytes) return absl::OkStatus();
  memory = Memory();  // before there is another, for they might not both fit
  absl::StatusOr<Memory> grown = Memory::Of(device, Grown(bytes));
  if (!grown.ok()) grown = Memory::Of(device, bytes);
  if (!grown.ok()) return std::move(grown).status();
  memory = *std::move(grown);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Workspace>> Workspace::Of(Device& device) {
  auto workspace = std::unique_ptr<Workspace>(new Workspace(device));
  KV_ASSIGN_OR_RETURN(workspace->work_, device.NewStream());
  KV_ASSIGN_OR_RETURN(workspace->symbols_, device.NewStream());
  KV_ASSIGN_OR_RETURN(workspace->copies_, device.NewStream());
  return workspace;
}

absl::Status Workspace::Reserve(std::size_t device_bytes, std::size_t in_bytes,
                                std::size_t out_bytes) {
  KV_RETURN_IF_ERROR(Grow(device_, device_bytes, device_memory_));
  KV_RETURN_IF_ERROR(Grow(device_, in_bytes, in_));
  return Grow(device_, out_bytes, out_);
}

absl::Status Workspace::Synchronize() {
  absl::Status status;
  for (const auto& stream : {std::ref(work_), std::ref(symbols_), std::ref(copies_)}) {
    status.Update(stream.get()->Synchronize());
  }
  return status;
}

WorkspacePool::WorkspacePool(Device& device, std::size_t count) : device_(device), count_(count) {}

absl::StatusOr<WorkspacePool::Lease> WorkspacePool::Take(std::unique_ptr<Workspace> idle) {
  if (idle == nullptr) {
    absl::StatusOr<std::unique_ptr<Workspace>> made = Workspace::Of(device_);
    if (!made.ok()) {
      const absl::MutexLock lock(&mutex_);
      --lent_;
      return std::move(made).status();
    }
    idle = *std::move(made);
  }
  return Lease(idle.release(), Return{this});
}

absl::StatusOr<WorkspacePool::Lease> WorkspacePool::Acquire() {
  std::unique_ptr<Workspace> idle;
  {
    const absl::MutexLock lock(&mutex_);
    const auto has_one = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return lent_ < count_; };
    mutex_.Await(absl::Condition(&has_one));
    ++lent_;
    if (!idle_.empty()) {
      idle = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  return Take(std::move(idle));
}

WorkspacePool::Lease WorkspacePool::TryAcquire() {
  std::unique_ptr<Workspace> idle;
  {
    const absl::MutexLock lock(&mutex_);
    if (lent_ == count_) return nullptr;
    ++lent_;
    if (!idle_.empty()) {
      idle = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  absl::StatusOr<Lease> lease = Take(std::move(idle));
  return lease.ok() ? *std::move(lease) : nullptr;
}

void WorkspacePool::Return::operator()(Workspace* workspace) const {
  std::unique_ptr<Workspace> owned(workspace);
  // One that failed is not used again: its memory may be gone with its device.
  const bool usable = owned->Synchronize().ok();
  const absl::MutexLock lock(&pool->mutex_);
  --pool->lent_;
  if (usable) pool->idle_.push_back(std::move(owned));
}

}  // namespace kvtrie::gpu
