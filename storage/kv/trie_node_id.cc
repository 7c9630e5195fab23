#include "storage/kv/trie_node_id.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <array>
#include <cstring>

#include "storage/base/byte_order.h"
#include "storage/base/check.h"

namespace kvtrie {
namespace {

constexpr std::uint8_t kVersion = 1;
constexpr std::size_t kSha256BlockBytes = 64;
constexpr std::size_t kSha256Bytes = 32;

struct FreeDigest {
  void operator()(EVP_MD_CTX* digest) const { EVP_MD_CTX_free(digest); }
};
using Digest = std::unique_ptr<EVP_MD_CTX, FreeDigest>;

Digest NewDigest() {
  Digest digest(EVP_MD_CTX_new());
  KV_CHECK(digest != nullptr);
  return digest;
}

void Update(EVP_MD_CTX* digest, const void* data, std::size_t bytes) {
  KV_CHECK(EVP_DigestUpdate(digest, data, bytes) == 1);
}

// SHA-256 that has taken in the secret, padded to a block and masked: half of HMAC's key schedule
// (RFC 2104).
Digest KeyedDigest(std::string_view secret, std::uint8_t mask) {
  std::array<std::uint8_t, kSha256BlockBytes> block{};
  std::memcpy(block.data(), secret.data(), secret.size());
  for (std::uint8_t& byte : block) byte = static_cast<std::uint8_t>(byte ^ mask);
  Digest digest = NewDigest();
  KV_CHECK(EVP_DigestInit_ex(digest.get(), EVP_sha256(), nullptr) == 1);
  Update(digest.get(), block.data(), block.size());
  OPENSSL_cleanse(block.data(), block.size());
  return digest;
}

}  // namespace

// Both keyed halves of HMAC. A name costs two copies of these states instead of a new MAC context,
// which takes three times as long in OpenSSL 3.
struct TrieNodeNamer::Context {
  Digest inner;
  Digest outer;
};

TrieNodeNamer::TrieNodeNamer(std::string_view secret) : context_(std::make_unique<Context>()) {
  KV_CHECK(secret.size() == kSecretBytes);
  context_->inner = KeyedDigest(secret, 0x36);
  context_->outer = KeyedDigest(secret, 0x5c);
}

TrieNodeNamer::~TrieNodeNamer() = default;
TrieNodeNamer::TrieNodeNamer(TrieNodeNamer&&) noexcept = default;
TrieNodeNamer& TrieNodeNamer::operator=(TrieNodeNamer&&) noexcept = default;

TrieNodeId TrieNodeNamer::Name(const ModelId& model, const TrieNodeId& parent,
                               Provenance provenance, std::string_view salt,
                               std::string_view extra_key, std::span<const TokenId> tokens) const {
  // A context of its own for each thread: setting one up costs as much as a name.
  thread_local const Digest scratch = NewDigest();
  EVP_MD_CTX* const digest = scratch.get();
  const auto update_number = [digest](auto value) { Update(digest, &value, sizeof value); };

  KV_CHECK(EVP_MD_CTX_copy_ex(digest, context_->inner.get()) == 1);
  std::array<std::uint8_t, 2 + ModelId::kBytes + TrieNodeId::kBytes> head;
  head[0] = kVersion;
  std::memcpy(&head[1], model.bytes.data(), ModelId::kBytes);
  std::memcpy(&head[1 + ModelId::kBytes], parent.bytes.data(), TrieNodeId::kBytes);
  head.back() = static_cast<std::uint8_t>(provenance);
  Update(digest, head.data(), head.size());
  update_number(static_cast<std::uint32_t>(salt.size()));
  Update(digest, salt.data(), salt.size());
  update_number(static_cast<std::uint32_t>(extra_key.size()));
  Update(digest, extra_key.data(), extra_key.size());
  update_number(static_cast<std::uint32_t>(tokens.size()));
  Update(digest, tokens.data(), tokens.size_bytes());

  std::array<unsigned char, kSha256Bytes> hash;
  KV_CHECK(EVP_DigestFinal_ex(digest, hash.data(), nullptr) == 1);
  KV_CHECK(EVP_MD_CTX_copy_ex(digest, context_->outer.get()) == 1);
  Update(digest, hash.data(), hash.size());
  KV_CHECK(EVP_DigestFinal_ex(digest, hash.data(), nullptr) == 1);

  TrieNodeId node;
  std::memcpy(node.bytes.data(), hash.data(), TrieNodeId::kBytes);
  return node;
}

}  // namespace kvtrie
