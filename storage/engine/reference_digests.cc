#include "storage/engine/reference_digests.h"

namespace kvtrie {
namespace {

// A few MiB. Those that are in use come back soon.
constexpr std::size_t kDigestsMax = 65'536;

}  // namespace

std::optional<KvDigest> ReferenceDigests::Find(const PayloadLocation& at) const {
  absl::MutexLock lock(&mutex_);
  const auto found = digests_.find(at);
  return found == digests_.end() ? std::nullopt : std::optional(found->second);
}

void ReferenceDigests::Add(const PayloadLocation& at, const KvDigest& digest) {
  absl::MutexLock lock(&mutex_);
  if (digests_.size() >= kDigestsMax) digests_.clear();
  digests_[at] = digest;
}

void ReferenceDigests::Forget(const PayloadLocation& at) {
  absl::MutexLock lock(&mutex_);
  digests_.erase(at);
}

}  // namespace kvtrie
