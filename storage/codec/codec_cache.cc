#include "storage/codec/codec_cache.h"

#include <algorithm>

#include "storage/base/status_macros.h"
#include "storage/codec/profile_codec.h"

namespace kvtrie {
namespace {

// What a codec takes for each byte of its profile (residual_codec.h).
constexpr std::uint64_t kBytesPerProfileByte = 2;
// And an entry without one.
constexpr std::uint64_t kFailureBytes = 4096;

}  // namespace

absl::StatusOr<std::shared_ptr<const FrameCodec>> CodecCache::Get(const ModelSpec& spec,
                                                                  const ModelId& model,
                                                                  const ProfileId& profile,
                                                                  Load load) {
  if (profile.empty()) return std::make_shared<const FrameCodec>(spec, nullptr);
  const Key key{model, profile};
  std::shared_ptr<Entry> entry;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = entries_.find(key);
    if (found != entries_.end()) {
      entry = found->second;
      mutex_.Await(absl::Condition(&entry->made));
      entry->last_use = ++uses_;
      ++(entry->result.ok() ? stats_.hits_total : stats_.failures_total);
      return entry->result;
    }
    entry = std::make_shared<Entry>();
    entries_.emplace(key, entry);
  }

  Result result = absl::UnknownError("");
  std::uint64_t bytes = kFailureBytes;
  auto loaded = load();
  if (loaded.ok()) {
    result = MakeCodec(spec, profile, loaded->view);
    if (result.ok()) bytes = kBytesPerProfileByte * loaded->view.size();
  } else {
    result = loaded.status();
  }

  absl::MutexLock lock(&mutex_);
  entry->made = true;
  entry->result = result;
  entry->last_use = ++uses_;
  ++(result.ok() ? stats_.builds_total : stats_.failures_total);
  const auto found = entries_.find(key);
  if (found == entries_.end() || found->second != entry) return result;  // forgotten meanwhile
  if (!loaded.ok()) {
    entries_.erase(found);
    return result;
  }
  entry->bytes = bytes;
  stats_.bytes += bytes;
  stats_.codecs += result.ok() ? 1 : 0;
  Shrink(key);
  return result;
}

CodecCache::Result CodecCache::MakeCodec(const ModelSpec& spec, const ProfileId& profile,
                                         std::span<const std::byte> bytes) const {
  KV_ASSIGN_OR_RETURN(std::shared_ptr<const ResidualCodec> residual,
                      CodecOfProfile(spec, profile, bytes));
  std::shared_ptr<const BlockCoder> coder;
  if (backend_ != nullptr) {
    auto made = backend_->CoderFor(spec, residual);
    if (made.ok()) {
      coder = *std::move(made);
    } else if (!absl::IsUnavailable(made.status())) {
      return made.status();
    }
  }
  return std::make_shared<const FrameCodec>(spec, std::move(residual), std::move(coder));
}

void CodecCache::Shrink(const Key& keep) {
  while (stats_.bytes > bytes_max_) {
    auto oldest = entries_.end();
    for (auto it = entries_.begin(); it != entries_.end(); ++it) {
      if (!it->second->made || it->first == keep) continue;
      if (oldest == entries_.end() || it->second->last_use < oldest->second->last_use) oldest = it;
    }
    if (oldest == entries_.end()) return;
    stats_.bytes -= oldest->second->bytes;
    stats_.codecs -= oldest->second->result.ok() ? 1 : 0;
    entries_.erase(oldest);
  }
}

void CodecCache::Forget(const ProfileId& profile) {
  absl::MutexLock lock(&mutex_);
  for (auto it = entries_.begin(); it != entries_.end();) {
    if (it->first.second != profile) {
      ++it;
      continue;
    }
    stats_.bytes -= it->second->bytes;
    stats_.codecs -= it->second->made && it->second->result.ok() ? 1 : 0;
    entries_.erase(it++);
  }
}

CodecCacheStats CodecCache::Stats() const {
  absl::MutexLock lock(&mutex_);
  return stats_;
}

}  // namespace kvtrie
