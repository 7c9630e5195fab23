#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "storage/kv/ids.h"

namespace kvtrie {

// The id of a codec profile from its bytes, piece by piece. Not thread-safe.
class ProfileDigest {
 public:
  ProfileDigest();
  ~ProfileDigest();
  ProfileDigest(ProfileDigest&&) noexcept;
  ProfileDigest& operator=(ProfileDigest&&) noexcept;

  void Add(std::span<const std::byte> bytes);
  // Of all that was added. The object is used up.
  ProfileId Finish();

 private:
  struct Context;  // OpenSSL's
  std::unique_ptr<Context> context_;
};

}  // namespace kvtrie
