#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"
#include "storage/kv/quality.h"

namespace kvtrie {

// Text of a query whose KV is stored under another prefix (cache.proto, ReusableRun).
struct ReusableRun {
  std::uint32_t first_token = 0;  // in the query
  std::uint32_t token_count = 0;
  std::vector<TrieNodeId> nodes;     // the blocks that hold them, in order
  std::uint32_t node_offset = 0;     // of the first token in the first of these
  std::uint32_t first_position = 0;  // of that token in its own session
  Quality source_quality = Quality::kExact;
  std::uint64_t fetch_bytes = 0;
};

// Values equal those of the protos.
enum class TextReuseForbidden : std::uint8_t {
  kServer = 1,
  kTenant = 2,
  kModel = 3,
  kPositions = 4
};

// Who may have KV of the same text under another prefix. KV that is reused so is approximate, so
// nobody has it unless an operator says so.
struct TextReusePolicy {
  bool all_tenants = false;
  std::vector<TenantId> tenants = {};          // that may, beside
  std::vector<ModelId> forbidden_models = {};  // of which nobody has any

  // nullopt: it is allowed.
  std::optional<TextReuseForbidden> Forbids(TenantId tenant, const ModelId& model,
                                            const ModelSpec& spec) const;
};

inline constexpr std::uint32_t kReusableRunTokensMin = 32;
inline constexpr std::uint32_t kReusableRunTokensDefault = 64;
inline constexpr std::size_t kReusableRunsMax = 256;

}  // namespace kvtrie
