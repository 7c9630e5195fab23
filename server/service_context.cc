#include "server/service_context.h"

#include "storage/base/status_macros.h"

namespace kvtrie {

absl::StatusOr<std::shared_ptr<const KvGeometry>> GeometryCache::Get(const ModelId& model) {
  {
    absl::MutexLock lock(&mutex_);
    const auto it = geometries_.find(model);
    if (it != geometries_.end()) return it->second;
  }
  KV_ASSIGN_OR_RETURN(const ModelInfo info, engine_.GetModel(kBuiltInTenant, model));
  auto geometry = std::make_shared<const KvGeometry>(info.spec);
  absl::MutexLock lock(&mutex_);
  return geometries_.emplace(model, std::move(geometry)).first->second;
}

}  // namespace kvtrie
