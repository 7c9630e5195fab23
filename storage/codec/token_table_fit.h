#pragma once

#include <cstddef>
#include <span>

#include "storage/codec/fit_rows.h"
#include "storage/codec/residual_profile.h"
#include "storage/kv/ids.h"

namespace kvtrie {

// What layer 0 makes of tokens, which depends on nothing else: from the weights, for tokens that
// samples may lack.
struct VocabularyRows {
  std::span<const TokenId> tokens;  // each once; the likeliest first
  std::span<const float> rows;      // [token][K components, before RoPE, then V components]
};

// Sets table_tokens and table_rows of a profile whose planes of layer 0 have bias and input_scales:
// the tokens that the samples have, the commonest first, then those of the vocabulary, up to
// `tokens_max` in all.
void FitTokenTable(const FitRows& rows, const VocabularyRows& vocabulary, std::size_t tokens_max,
                   ResidualProfile& profile);

}  // namespace kvtrie
