#include "client/model_spec_to_proto.h"

namespace kvtrie {

v1::ModelSpec ModelSpecToProto(const ModelSpec& spec) {
  v1::ModelSpec proto;
  proto.set_name(spec.name);
  proto.set_weights_revision(spec.weights_revision);
  proto.set_tokenizer_digest(spec.tokenizer_digest);
  proto.set_dtype(static_cast<v1::DType>(spec.dtype));
  for (const KvGroup& group : spec.kv_groups) {
    v1::KvGroup* group_proto = proto.add_kv_groups();
    group_proto->set_window_tokens(group.window_tokens);
    for (const LayerRun& run : group.layer_runs) {
      v1::LayerRun* run_proto = group_proto->add_layer_runs();
      run_proto->set_layer_count(run.layer_count);
      run_proto->set_kv_heads(run.kv_heads);
      run_proto->set_k_head_dim(run.k_head_dim);
      run_proto->set_v_head_dim(run.v_head_dim);
    }
  }
  proto.mutable_rope()->set_pairing(static_cast<v1::RopePairing>(spec.rope.pairing));
  proto.mutable_rope()->set_theta(spec.rope.theta);
  proto.mutable_rope()->set_rotary_dims(spec.rope.rotary_dims);
  proto.mutable_rope()->set_scaling(spec.rope.scaling);
  proto.set_tensor_parallel_rank(spec.tensor_parallel_rank);
  proto.set_tensor_parallel_size(spec.tensor_parallel_size);
  proto.set_adapter(spec.adapter);
  proto.set_block_tokens(spec.block_tokens);
  proto.set_layout_tag(spec.layout_tag);
  return proto;
}

}  // namespace kvtrie
