#include "storage/codec/token_table_fit.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace kvtrie {
namespace {

// Where the tokens' rows come from: a row of the vocabulary, or the mean over samples.
constexpr std::size_t kOfSamples = SIZE_MAX;
using ChosenTokens = std::map<TokenId, std::size_t>;

ChosenTokens ChooseTokens(const FitRows& rows, std::span<const TokenId> vocabulary,
                          std::size_t tokens_max) {
  std::map<TokenId, std::size_t> seen;
  for (std::size_t row = 0; row < rows.row_count(); ++row) {
    if (rows.counts(row)) ++seen[rows.tokens()[row]];
  }
  std::vector<std::pair<std::size_t, TokenId>> by_count;
  for (const auto& [token, count] : seen) by_count.emplace_back(count, token);
  std::sort(by_count.begin(), by_count.end(), [](const auto& a, const auto& b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
  });
  ChosenTokens chosen;
  for (std::size_t i = 0; i < by_count.size() && chosen.size() < tokens_max; ++i) {
    chosen.emplace(by_count[i].second, kOfSamples);
  }
  for (std::size_t i = 0; i < vocabulary.size() && chosen.size() < tokens_max; ++i) {
    chosen.emplace(vocabulary[i], i);
  }
  return chosen;
}

// Of one plane of layer 0: [entry][component], 0 for tokens that samples lack.
std::vector<double> MeansOfSamples(const FitRows& rows, const ChosenTokens& chosen,
                                   const PlaneShape& plane) {
  const std::size_t components = plane.components();
  std::map<TokenId, std::size_t> entries;
  for (const auto& [token, _] : chosen) entries.emplace(token, entries.size());
  const std::vector<float> values = rows.ReadPlane(plane);
  std::vector<double> means(chosen.size() * components);
  std::vector<double> counts(chosen.size());
  for (std::size_t row = 0; row < rows.row_count(); ++row) {
    const auto found = rows.counts(row) ? entries.find(rows.tokens()[row]) : entries.end();
    if (found == entries.end()) continue;
    ++counts[found->second];
    for (std::size_t c = 0; c < components; ++c) {
      means[found->second * components + c] += values[row * components + c];
    }
  }
  for (std::size_t at = 0; at < means.size(); ++at) {
    means[at] /= std::max(counts[at / components], 1.0);
  }
  return means;
}

}  // namespace

void FitTokenTable(const FitRows& rows, const VocabularyRows& vocabulary, std::size_t tokens_max,
                   ResidualProfile& profile) {
  const ChosenTokens chosen = ChooseTokens(rows, vocabulary.tokens, tokens_max);
  profile.table_tokens.clear();
  for (const auto& [token, _] : chosen) profile.table_tokens.push_back(token);
  const std::size_t width = FirstLayerComponents(profile.planes);
  profile.table_rows.assign(chosen.size() * width, 0);
  std::size_t first = 0;
  for (std::uint32_t i = 0; i < profile.planes.size() && profile.planes[i].layer == 0; ++i) {
    const PlaneProfile& plane = profile.plane_profiles[i];
    const std::size_t components = profile.planes[i].components();
    const std::vector<double> means = MeansOfSamples(rows, chosen, profile.planes[i]);
    std::size_t entry = 0;
    for (const auto& [_, source] : chosen) {
      for (std::size_t c = 0; c < components; ++c) {
        const double value = source == kOfSamples ? means[entry * components + c]
                                                  : vocabulary.rows[source * width + first + c];
        const double code = (value - plane.bias[c]) / plane.input_scales[c];
        profile.table_rows[entry * width + first + c] =
            static_cast<std::int8_t>(std::nearbyint(std::clamp(code, -127.0, 127.0)));
      }
      ++entry;
    }
    first += components;
  }
}

}  // namespace kvtrie
