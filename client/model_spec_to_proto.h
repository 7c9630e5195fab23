#pragma once

#include "kvtrie/v1/types.pb.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

v1::ModelSpec ModelSpecToProto(const ModelSpec& spec);

}  // namespace kvtrie
