#include "storage/kv/profile_digest.h"

#include <openssl/evp.h>

#include <cstring>

#include "storage/base/check.h"

namespace kvtrie {

struct ProfileDigest::Context {
  EVP_MD_CTX* digest = EVP_MD_CTX_new();
  Context() = default;
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() { EVP_MD_CTX_free(digest); }
};

ProfileDigest::ProfileDigest() : context_(std::make_unique<Context>()) {
  KV_CHECK(context_->digest != nullptr);
  KV_CHECK(EVP_DigestInit_ex(context_->digest, EVP_sha256(), nullptr) == 1);
}
ProfileDigest::~ProfileDigest() = default;
ProfileDigest::ProfileDigest(ProfileDigest&&) noexcept = default;
ProfileDigest& ProfileDigest::operator=(ProfileDigest&&) noexcept = default;

void ProfileDigest::Add(std::span<const std::byte> bytes) {
  KV_CHECK(EVP_DigestUpdate(context_->digest, bytes.data(), bytes.size()) == 1);
}

ProfileId ProfileDigest::Finish() {
  unsigned char whole[EVP_MAX_MD_SIZE];
  KV_CHECK(EVP_DigestFinal_ex(context_->digest, whole, nullptr) == 1);
  ProfileId id;
  std::memcpy(id.bytes.data(), whole, ProfileId::kBytes);
  return id;
}

}  // namespace kvtrie
