#include "client/model_spec_from_proto.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace kvtrie {

absl::StatusOr<ModelSpec> ModelSpecFromProto(const v1::ModelSpec& proto) {
  const int dtype = static_cast<int>(proto.dtype());
  if (dtype < 1 || dtype > static_cast<int>(DType::kUint8)) {
    return absl::InvalidArgumentError(absl::StrCat("spec.dtype: ", dtype, " is not a known DType"));
  }
  const int pairing = static_cast<int>(proto.rope().pairing());
  if (pairing < 0 || pairing > static_cast<int>(RopePairing::kInterleaved)) {
    return absl::InvalidArgumentError(
        absl::StrCat("spec.rope.pairing: ", pairing, " is not a known RopePairing"));
  }
  ModelSpec spec;
  spec.name = proto.name();
  spec.weights_revision = proto.weights_revision();
  spec.tokenizer_digest = proto.tokenizer_digest();
  spec.dtype = static_cast<DType>(proto.dtype());
  for (const v1::KvGroup& group_proto : proto.kv_groups()) {
    KvGroup& group = spec.kv_groups.emplace_back();
    group.window_tokens = group_proto.window_tokens();
    for (const v1::LayerRun& run : group_proto.layer_runs()) {
      group.layer_runs.push_back(
          {run.layer_count(), run.kv_heads(), run.k_head_dim(), run.v_head_dim()});
    }
  }
  // A model that says nothing of RoPE has none.
  spec.rope.pairing = pairing == 0 ? RopePairing::kNone : static_cast<RopePairing>(pairing);
  spec.rope.theta = proto.rope().theta();
  spec.rope.rotary_dims = proto.rope().rotary_dims();
  spec.rope.scaling = proto.rope().scaling();
  spec.tensor_parallel_rank = proto.tensor_parallel_rank();
  // 0 and 1 mean the same and must not give two ids.
  spec.tensor_parallel_size = std::max(1u, proto.tensor_parallel_size());
  spec.adapter = proto.adapter();
  spec.block_tokens = proto.block_tokens();
  spec.layout_tag = proto.layout_tag();
  return spec;
}

}  // namespace kvtrie
