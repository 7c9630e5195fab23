#pragma once

#include "absl/status/statusor.h"
#include "kvtrie/v1/types.pb.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// InvalidArgument: an enum has a value that is not known here. Ranges are ModelSpec::Validate's.
absl::StatusOr<ModelSpec> ModelSpecFromProto(const v1::ModelSpec& proto);

}  // namespace kvtrie
