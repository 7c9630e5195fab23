#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "storage/codec/block_coder.h"
#include "storage/codec/frame_codec.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

struct CodecCacheStats {
  std::uint64_t hits_total = 0;    // Get found its codec
  std::uint64_t builds_total = 0;  // or had to make it
  std::uint64_t failures_total = 0;
  std::uint64_t codecs = 0;  // now
  std::uint64_t bytes = 0;   // that they take; an estimate from their profiles' sizes
};

// Codecs of models with their profiles, made on first use and kept within a bound of memory; the
// one that was not used for longest goes first. Each is made once, by the first who asks; others
// wait for it. That a profile cannot be used for a model is kept too: its bytes never change.
//
// A codec that is in use lives on when it is dropped here. One that is larger than the bound is
// kept alone. Thread-safe.
class CodecCache {
 public:
  // `backend` codes for the codecs, and outlives them; null: the threads that call them do.
  explicit CodecCache(std::size_t bytes_max, const CodecBackend* backend = nullptr)
      : bytes_max_(bytes_max), backend_(backend) {}

  // Bytes of a profile, and what keeps them alive.
  struct ProfileBytes {
    std::shared_ptr<const void> owner;
    std::span<const std::byte> view;
  };
  // Calls `load` without locks where the codec has to be made. An empty profile id: the codec of a
  // model without one. Errors: those of `load`, which are not kept; those of CodecOfProfile.
  using Load = absl::FunctionRef<absl::StatusOr<ProfileBytes>()>;
  absl::StatusOr<std::shared_ptr<const FrameCodec>> Get(const ModelSpec& spec, const ModelId& model,
                                                        const ProfileId& profile, Load load);

  // Drops what was made of a profile.
  void Forget(const ProfileId& profile);

  CodecCacheStats Stats() const;

 private:
  using Key = std::pair<ModelId, ProfileId>;
  using Result = absl::StatusOr<std::shared_ptr<const FrameCodec>>;
  struct Entry {
    bool made = false;
    Result result = absl::UnknownError("");
    std::uint64_t bytes = 0;
    std::uint64_t last_use = 0;
  };

  void Shrink(const Key& keep) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Result MakeCodec(const ModelSpec& spec, const ProfileId& profile,
                   std::span<const std::byte> bytes) const;

  const std::size_t bytes_max_;
  const CodecBackend* const backend_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<Key, std::shared_ptr<Entry>> entries_ ABSL_GUARDED_BY(mutex_);
  CodecCacheStats stats_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t uses_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvtrie
