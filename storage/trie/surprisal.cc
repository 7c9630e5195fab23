#include "storage/trie/surprisal.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "storage/base/byte_order.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

constexpr std::size_t kHalfBytes = 2;
// The least that a half can say; stands for a probability that rounds to zero.
constexpr float kLogProbMin = -65504.0f;
// A half is off by 2^-11 of its value at most, so a probability p by p |ln p| 2^-11, and the sum
// over 64 of them by ln(64) / 2^11 < 0.0021.
constexpr double kMassMax = 1.0021;
// What is left to the tokens outside of a distribution when rounding hides it.
constexpr double kRestMassMin = 1.0 / 4096;

float LogProbAt(std::string_view log_probs, std::size_t index) {
  return HalfToFloat(LoadLittle<std::uint16_t>(log_probs.data() + kHalfBytes * index));
}

template <typename... Parts>
absl::Status Invalid(const char* field, std::size_t token, const Parts&... what) {
  return absl::InvalidArgumentError(
      absl::StrCat("probabilities.", field, ": token ", token, " ", what...));
}

absl::StatusOr<float> CheckedLogProb(const char* field, std::size_t token, float log_prob) {
  if (!(log_prob <= 0)) {
    return Invalid(field, token, "has ", log_prob, "; a log-probability is at most 0");
  }
  return std::max(log_prob, kLogProbMin);
}

// The log-probability that the distribution of token `index` gives it.
absl::StatusOr<float> FromDistribution(const TokenProbabilities& from, std::size_t index,
                                       TokenId token) {
  const std::uint32_t vocabulary_tokens =
      from.vocabulary_tokens != 0 ? from.vocabulary_tokens : kVocabularyTokensAssumed;
  std::array<TokenId, kTopKMax> ids;
  double mass = 0;
  float found = std::numeric_limits<float>::quiet_NaN();
  for (std::uint32_t rank = 0; rank < from.top_k; ++rank) {
    const std::size_t at = index * from.top_k + rank;
    ids[rank] = LoadLittle<TokenId>(from.top_token_ids.data() + sizeof(TokenId) * at);
    if (from.vocabulary_tokens != 0 && ids[rank] >= from.vocabulary_tokens) {
      return Invalid("top_token_ids", index, "names id ", ids[rank], "; vocabulary_tokens is ",
                     from.vocabulary_tokens);
    }
    const float sent = LogProbAt(from.top_log_probs, at);
    KV_ASSIGN_OR_RETURN(const float log_prob, CheckedLogProb("top_log_probs", index, sent));
    mass += std::exp(static_cast<double>(log_prob));
    if (ids[rank] == token) found = log_prob;
  }
  std::sort(ids.begin(), ids.begin() + from.top_k);
  const auto twice = std::adjacent_find(ids.begin(), ids.begin() + from.top_k);
  if (twice != ids.begin() + from.top_k) {
    return Invalid("top_token_ids", index, "has id ", *twice, " twice");
  }
  if (mass > kMassMax) {
    return Invalid("top_log_probs", index, "has probabilities that sum up to ", mass,
                   "; at most 1 is possible");
  }
  if (!std::isnan(found)) return found;
  const double others = std::max(1.0, static_cast<double>(vocabulary_tokens) - from.top_k);
  return static_cast<float>(std::log(std::max(1 - mass, kRestMassMin) / others));
}

}  // namespace

absl::Status CheckSizes(const TokenProbabilities& from, std::size_t token_count) {
  const auto check = [](const char* field, std::size_t bytes, std::size_t expected) {
    if (bytes == expected) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("probabilities.", field, ": ", bytes,
                                                   " bytes; the announced tokens need ", expected));
  };
  if (!from.log_probs.empty()) {
    KV_RETURN_IF_ERROR(check("log_probs", from.log_probs.size(), token_count * kHalfBytes));
  }
  if (from.top_k > kTopKMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("probabilities.top_k: ", from.top_k, " is over the limit of ", kTopKMax));
  }
  const std::size_t entries = token_count * from.top_k;
  KV_RETURN_IF_ERROR(check("top_token_ids", from.top_token_ids.size(), entries * sizeof(TokenId)));
  return check("top_log_probs", from.top_log_probs.size(), entries * kHalfBytes);
}

float HalfToFloat(std::uint16_t half) {
  const int exponent = (half >> 10) & 0x1f;
  const int mantissa = half & 0x3ff;
  float magnitude;
  if (exponent == 0x1f) {
    magnitude = mantissa == 0 ? std::numeric_limits<float>::infinity()
                              : std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  }
  return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

absl::StatusOr<std::vector<float>> BlockSurprisalBits(const TokenProbabilities& probabilities,
                                                      std::span<const TokenId> tokens,
                                                      std::uint32_t block_tokens) {
  KV_RETURN_IF_ERROR(CheckSizes(probabilities, tokens.size()));
  std::vector<float> bits;
  if (probabilities.empty()) return bits;
  std::vector<double> nats(tokens.size() / block_tokens);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    float log_prob = 0;
    // Both are held to their rules, whichever is used.
    if (probabilities.top_k > 0) {
      KV_ASSIGN_OR_RETURN(log_prob, FromDistribution(probabilities, i, tokens[i]));
    }
    if (!probabilities.log_probs.empty()) {
      const float sent = LogProbAt(probabilities.log_probs, i);
      KV_ASSIGN_OR_RETURN(log_prob, CheckedLogProb("log_probs", i, sent));
    }
    if (i / block_tokens < nats.size()) nats[i / block_tokens] -= static_cast<double>(log_prob);
  }
  bits.reserve(nats.size());
  for (const double of_block : nats) {
    bits.push_back(std::max(static_cast<float>(of_block / std::numbers::ln2),
                            std::numeric_limits<float>::min()));
  }
  return bits;
}

}  // namespace kvtrie
