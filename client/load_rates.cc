#include "client/load_rates.h"

#include <algorithm>

namespace kvtrie {
namespace {

// Bytes that come slower move the rate most of the way (1 - 1/e) to theirs.
constexpr double kForgottenAfterBytes = 64 << 20;
// Of decoding, about the last so much counts.
constexpr double kDecodeSecondsRemembered = 2;
// What a report is worth after the next one: the last 20 or so count.
constexpr double kFade = 0.95;
// Below this the reports' x and y are as good as proportional.
constexpr double kDeterminantMin = 1e-3;

}  // namespace

void LoadRates::Fetched(std::uint64_t bytes, double seconds, Time now) {
  if (bytes == 0 || seconds <= 0) return;
  if (now - fetched_ > kKnownFor) bytes_per_second_ = 0;
  fetched_ = now;
  const double rate = static_cast<double>(bytes) / seconds;
  const double weight = rate > bytes_per_second_
                            ? 1
                            : std::min(1.0, static_cast<double>(bytes) / kForgottenAfterBytes);
  bytes_per_second_ += (rate - bytes_per_second_) * weight;
}

void LoadRates::Decoded(CodecId codec, double tokens, double seconds, Time now) {
  if (!IsCodec(codec)) return;
  Decoding& decoding = decodings_[static_cast<std::size_t>(codec) - 1];
  if (now - decoding.measured > kKnownFor) decoding = {};
  decoding.measured = now;
  decoding.tokens += tokens;
  decoding.seconds += seconds;
  if (decoding.seconds < kDecodeSecondsRemembered) return;
  decoding.tokens /= 2;
  decoding.seconds /= 2;
}

LoadCost LoadRates::cost(Time now) const {
  LoadCost cost;
  if (bytes_per_second_ > 0 && now - fetched_ <= kKnownFor)
    cost.seconds_per_byte = 1 / bytes_per_second_;
  for (std::size_t i = 0; i < decodings_.size(); ++i) {
    if (decodings_[i].tokens <= 0 || now - decodings_[i].measured > kKnownFor) continue;
    cost.decode_seconds_per_token[i] = decodings_[i].seconds / decodings_[i].tokens;
  }
  return cost;
}

void PrefillFit::Add(std::uint64_t tokens, std::uint64_t context_tokens, double seconds) {
  const double x = static_cast<double>(tokens) / seconds;
  const double y = x * (static_cast<double>(context_tokens) + static_cast<double>(tokens) / 2);
  xx_ = xx_ * kFade + x * x;
  xy_ = xy_ * kFade + x * y;
  yy_ = yy_ * kFade + y * y;
  x_ = x_ * kFade + x;
  y_ = y_ * kFade + y;
  const double determinant = xx_ * yy_ - xy_ * xy_;
  if (determinant > kDeterminantMin * xx_ * yy_) {
    cost_ = {(x_ * yy_ - y_ * xy_) / determinant, (y_ * xx_ - x_ * xy_) / determinant};
    if (cost_.seconds_per_token >= 0 && cost_.seconds_per_token_pair >= 0) return;
  }
  // Neither can be less than nothing.
  const bool all_on_pairs =
      determinant > kDeterminantMin * xx_ * yy_ && cost_.seconds_per_token < 0;
  cost_ = all_on_pairs ? PrefillCost{0, y_ / yy_} : PrefillCost{x_ / xx_, 0};
}

}  // namespace kvtrie
