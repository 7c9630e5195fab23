#include "storage/codec/shared_runs.h"

#include <algorithm>
#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "storage/base/check.h"

namespace kvtrie {
namespace {

using Tokens = std::span<const TokenId>;

struct Place {
  std::size_t text;
  std::size_t at;
};

// Hashes of all windows of a text, each from the one before.
class Windows {
 public:
  Windows(Tokens tokens, std::size_t size) : tokens_(tokens), size_(size) {
    for (std::size_t i = 0; i < size; ++i) {
      hash_ = hash_ * kFactor + tokens[i] + 1;
      if (i > 0) highest_ *= kFactor;
    }
  }
  std::uint64_t hash() const { return hash_; }
  bool Next() {
    if (at_ + size_ >= tokens_.size()) return false;
    hash_ =
        (hash_ - (tokens_[at_] + std::uint64_t{1}) * highest_) * kFactor + tokens_[at_ + size_] + 1;
    ++at_;
    return true;
  }

 private:
  static constexpr std::uint64_t kFactor = 0x9E3779B97F4A7C15;
  const Tokens tokens_;
  const std::size_t size_;
  std::uint64_t hash_ = 0;
  std::uint64_t highest_ = 1;
  std::size_t at_ = 0;
};

std::size_t CommonTokens(Tokens a, Tokens b) {
  const std::size_t most = std::min(a.size(), b.size());
  return static_cast<std::size_t>(
      std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(most), b.begin()).first -
      a.begin());
}

}  // namespace

std::vector<SharedRun> FindSharedRuns(std::span<const Tokens> texts, std::size_t tokens_min) {
  KV_CHECK(tokens_min > 0);
  std::vector<SharedRun> runs;
  absl::flat_hash_map<std::uint64_t, Place> first_places;
  for (std::size_t text = 0; text < texts.size(); ++text) {
    const Tokens tokens = texts[text];
    if (tokens.size() < tokens_min) continue;
    std::vector<std::uint64_t> hashes;
    Windows windows(tokens, tokens_min);
    do {
      hashes.push_back(windows.hash());
    } while (windows.Next());

    for (std::size_t at = 0; at < hashes.size();) {
      const auto found = first_places.find(hashes[at]);
      std::size_t count = 0;
      if (found != first_places.end()) {
        const Tokens earlier = texts[found->second.text];
        const std::size_t offset = found->second.at;
        count = CommonTokens(tokens.subspan(at), earlier.subspan(offset));
        const bool is_prefix =
            offset == at && CommonTokens(tokens.first(at), earlier.first(at)) == at;
        if (count >= tokens_min && !is_prefix) {
          runs.push_back({.text = text,
                          .first_token = at,
                          .token_count = count,
                          .earlier_text = found->second.text,
                          .offset = offset});
        }
      }
      at += std::max<std::size_t>(count, 1);
    }
    for (std::size_t at = 0; at < hashes.size(); ++at) {
      first_places.try_emplace(hashes[at], Place{.text = text, .at = at});
    }
  }
  return runs;
}

}  // namespace kvtrie
