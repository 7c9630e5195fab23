#include "storage/engine/text_reuse.h"

#include <algorithm>

#include "storage/codec/rope_shift.h"

namespace kvtrie {

std::optional<TextReuseForbidden> TextReusePolicy::Forbids(TenantId tenant, const ModelId& model,
                                                           const ModelSpec& spec) const {
  if (!all_tenants) {
    if (tenants.empty()) return TextReuseForbidden::kServer;
    if (std::find(tenants.begin(), tenants.end(), tenant) == tenants.end()) {
      return TextReuseForbidden::kTenant;
    }
  }
  if (std::find(forbidden_models.begin(), forbidden_models.end(), model) !=
      forbidden_models.end()) {
    return TextReuseForbidden::kModel;
  }
  if (!RopeShift::Check(spec).ok()) return TextReuseForbidden::kPositions;
  return std::nullopt;
}

}  // namespace kvtrie
