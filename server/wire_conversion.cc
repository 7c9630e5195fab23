#include "server/wire_conversion.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "client/model_spec_from_proto.h"
#include "client/model_spec_to_proto.h"

namespace kvtrie {

absl::StatusOr<ModelSpec> FromProto(const v1::ModelSpec& proto) {
  return ModelSpecFromProto(proto);
}
void ToProto(const ModelSpec& spec, v1::ModelSpec* proto) { *proto = ModelSpecToProto(spec); }

Quality FromProto(v1::Quality quality) {
  return quality == v1::QUALITY_UNSPECIFIED ? Quality::kExact : static_cast<Quality>(quality);
}
v1::Quality ToProto(Quality quality) { return static_cast<v1::Quality>(quality); }
v1::Rung ToProto(Rung rung) { return static_cast<v1::Rung>(rung); }
v1::FrameCodec ToProto(CodecId codec) { return static_cast<v1::FrameCodec>(codec); }

void ToProto(const CodingPlan& coding, v1::PutPlan* plan) {
  for (const auto& [block, references] : coding.references) {
    v1::BlockReferences* const of_block = plan->add_references();
    of_block->set_block_index(block);
    for (const TrieNodeId& node : references.nodes)
      of_block->mutable_node_ids()->append(node.view());
    for (const ReferenceRun& run : references.runs) {
      v1::TokenRun* const of_run = of_block->add_runs();
      of_run->set_first_token(run.first_token);
      of_run->set_token_count(run.token_count);
      of_run->set_reference(run.reference);
      of_run->set_offset(run.offset);
    }
  }
  for (const std::uint32_t block : coding.finer_blocks) {
    plan->mutable_finer_blocks()->append(reinterpret_cast<const char*>(&block), sizeof(block));
  }
  if (!coding.finer_blocks.empty()) plan->set_finer_quality(ToProto(coding.finer_level));
}

RequestPath::RequestPath(std::string_view model_id, std::string_view tokens, std::string_view salt,
                         const google::protobuf::RepeatedPtrField<v1::BlockExtraKey>& extra_keys) {
  const std::size_t token_count = tokens.size() / sizeof(TokenId);
  if (reinterpret_cast<std::uintptr_t>(tokens.data()) % alignof(TokenId) == 0) {
    view_.tokens = {reinterpret_cast<const TokenId*>(tokens.data()), token_count};
  } else {
    copied_tokens_.resize(token_count);
    std::memcpy(copied_tokens_.data(), tokens.data(), token_count * sizeof(TokenId));
    view_.tokens = copied_tokens_;
  }
  extra_keys_.reserve(static_cast<std::size_t>(extra_keys.size()));
  for (const v1::BlockExtraKey& extra_key : extra_keys) {
    extra_keys_.push_back({extra_key.block_index(), extra_key.key()});
  }
  view_.model = IdFromProto<ModelId>(model_id);
  view_.salt = salt;
  view_.extra_keys = extra_keys_;
}

std::vector<TrieNodeId> NodeIdsFromProto(std::string_view bytes) {
  std::vector<TrieNodeId> nodes(bytes.size() / TrieNodeId::kBytes);
  if (!nodes.empty()) std::memcpy(nodes.data(), bytes.data(), nodes.size() * TrieNodeId::kBytes);
  return nodes;
}

Selection FromProto(const v1::Selection& proto, std::unique_ptr<RequestPath>* path) {
  Selection selection;
  if (!proto.node_id().empty()) selection.node = IdFromProto<TrieNodeId>(proto.node_id());
  if (proto.has_prefix()) {
    *path = std::make_unique<RequestPath>(proto.prefix());
    selection.path = (*path)->view();
  }
  selection.session_id = proto.session_id();
  if (!proto.model_id().empty()) selection.model = IdFromProto<ModelId>(proto.model_id());
  selection.all = proto.all();
  selection.unused_for = std::chrono::seconds(proto.unused_for_seconds());
  return selection;
}

void ToProto(const BlockRun& run, v1::BlockRun* proto) {
  proto->set_first_block(run.first_block);
  proto->set_block_count(run.block_count);
  proto->set_rung(ToProto(RungOf(run.codec)));
  proto->set_codec(ToProto(run.codec));
  proto->set_quality(ToProto(run.quality));
  proto->set_bytes(run.bytes);
  proto->set_memory_bytes(run.memory_bytes);
  proto->set_read_seconds(run.read_seconds);
  proto->set_decode_seconds(run.decode_seconds);
}

void ToProto(const LookupResult& result, v1::LookupResult* proto) {
  proto->set_matched_blocks(result.matched_blocks);
  proto->set_matched_tokens(result.matched_blocks * result.block_tokens);
  proto->set_ignored_tail_tokens(result.ignored_tail_tokens);
  for (const std::vector<MatchedBlock>& blocks : result.blocks) {
    v1::BlockList* list = proto->add_blocks();
    std::string* node_ids = list->mutable_node_ids();
    std::string* rungs = list->mutable_rungs();
    node_ids->resize(blocks.size() * TrieNodeId::kBytes);
    rungs->resize(blocks.size());
    list->mutable_stored_bytes()->Reserve(static_cast<int>(blocks.size()));
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      std::memcpy(node_ids->data() + i * TrieNodeId::kBytes, blocks[i].node.bytes.data(),
                  TrieNodeId::kBytes);
      (*rungs)[i] = static_cast<char>(blocks[i].rungs);
      list->mutable_stored_bytes()->AddAlreadyReserved(blocks[i].stored_bytes);
    }
  }
  if (!result.lease.empty()) {
    proto->set_lease_id(std::string(result.lease.view()));
    proto->set_lease_ms(static_cast<std::uint32_t>(result.lease_granted.count()));
  }
  proto->set_fetch_bytes(result.fetch_bytes);
  if (result.matched_blocks > 0) proto->set_quality(ToProto(result.quality));
  if (!result.group.empty()) proto->set_group_id(std::string(result.group.view()));
  for (const ReusableRun& run : result.reusable_runs) {
    v1::ReusableRun* to = proto->add_reusable_runs();
    to->set_first_token(run.first_token);
    to->set_token_count(run.token_count);
    for (const TrieNodeId& node : run.nodes) to->mutable_node_ids()->append(node.view());
    to->set_node_offset(run.node_offset);
    to->set_first_position(run.first_position);
    to->set_source_quality(ToProto(run.source_quality));
    to->set_fetch_bytes(run.fetch_bytes);
  }
  if (result.text_reuse_forbidden) {
    proto->set_text_reuse_forbidden(
        static_cast<v1::TextReuseForbidden>(*result.text_reuse_forbidden));
  }
  for (const BlockRun& run : result.runs) ToProto(run, proto->add_runs());
}

void ToProto(const SimilarResult& result, v1::SimilarResponse* proto) {
  constexpr std::size_t kRunsMax = 256;
  for (const NearSession& near : result.sessions) {
    v1::SimilarSession* session = proto->add_sessions();
    session->set_node_id(std::string(near.end.view()));
    for (const std::string& id : near.session_ids) session->add_session_ids(id);
    session->set_blocks(near.blocks);
    session->set_shared_prefix_blocks(near.shared_prefix_blocks);
    session->set_shared_prefix_bits(near.shared_prefix_bits);
    session->set_shared_run_tokens(near.shared_run_tokens);
    session->set_shared_run_bits(near.shared_run_bits);
    for (std::size_t i = 0; i < std::min(near.runs.size(), kRunsMax); ++i) {
      v1::SharedRun* run = session->add_runs();
      run->set_first_token(near.runs[i].first_token);
      run->set_token_count(near.runs[i].token_count);
      run->set_node_id(std::string(near.runs[i].node.view()));
      run->set_node_offset(near.runs[i].offset);
      run->set_bits(near.runs[i].bits);
    }
  }
  proto->set_matched_blocks(result.matched_blocks);
  proto->set_work_limit_reached(!result.is_complete);
}

void ToProto(const NodeInfo& node, v1::NodeEntry* proto) {
  proto->set_node_id(std::string(node.id.view()));
  proto->set_parent_id(std::string(node.parent.view()));
  proto->set_model_id(std::string(node.model.view()));
  proto->set_depth(node.depth);
  for (std::size_t i = 0; i < node.frames.size(); ++i) {
    v1::RungEntry* rung = proto->add_rungs();
    rung->set_rung(ToProto(node.frames[i].rung));
    rung->set_stored_bytes(node.frames[i].at.record_bytes);
    rung->set_in_memory(i < node.in_memory.size() && node.in_memory[i]);
    rung->set_quality(ToProto(node.frames[i].quality));
    rung->set_codec(ToProto(node.frames[i].codec));
  }
  proto->set_quality(ToProto(node.quality));
  proto->set_use_count(node.use_count);
  proto->set_last_used_unix_seconds(node.last_used_unix_seconds);
  proto->set_expires_unix_seconds(node.expires_unix_seconds);
  proto->set_priority(node.priority);
  proto->set_surprisal_bits(node.surprisal_bits);
  proto->set_surprisal_estimated(node.surprisal_estimated);
  proto->set_pinned(node.pinned);
  proto->set_leased(node.leased);
  proto->set_child_count(node.child_count);
  proto->set_extra_key_bytes(node.extra_key_bytes);
}

void ToProto(const ModelInfo& model, v1::ModelEntry* proto) {
  proto->set_model_id(std::string(model.id.view()));
  ToProto(model.spec, proto->mutable_spec());
  proto->set_raw_block_bytes(model.raw_block_bytes);
  proto->set_node_count(model.node_count);
  proto->set_stored_bytes(model.stored_bytes);
  if (!model.profile.empty()) proto->set_profile_id(std::string(model.profile.view()));
}

void ToProto(const StoredProfile& profile, v1::ProfileEntry* proto) {
  const ProfileHeader& header = profile.info.header;
  proto->set_profile_id(std::string(profile.info.id.view()));
  proto->set_codec_key(std::string(header.codec_key.view()));
  for (const ModelId& model : profile.models) proto->add_model_ids(std::string(model.view()));
  proto->set_profile_bytes(header.profile_bytes());
  for (const ProfileLevel& level : header.levels) {
    v1::ProfileLevel* level_proto = proto->add_levels();
    level_proto->set_quality(ToProto(level.quality));
    level_proto->set_bits_per_component(level.bits_per_component);
    level_proto->set_mean_kl(level.mean_kl);
    level_proto->set_kl_p99(level.kl_p99);
  }
  proto->set_frames(profile.frames);
  proto->set_created_unix_seconds(profile.info.created_unix_seconds);
}

void ToProto(const PinInfo& pin, v1::PinEntry* proto) {
  proto->set_pin_id(std::string(pin.id.view()));
  proto->set_node_id(std::string(pin.node.view()));
  proto->set_pinned_bytes(pin.bytes);
  proto->set_end_unix_seconds(pin.end_unix_seconds);
}

void ToProto(const GroupInfo& group, v1::GroupEntry* proto) {
  proto->set_group_id(std::string(group.id.view()));
  proto->set_model_id(std::string(group.model.view()));
  proto->set_sessions(group.sessions);
  proto->set_shared_blocks(group.shared_blocks);
  proto->set_shared_bits(group.shared_bits);
  proto->set_shared_bits_estimated(group.shared_bits_estimated);
  proto->set_shared_end_id(std::string(group.shared_end.view()));
  proto->set_blocks(group.blocks);
  proto->set_stored_bytes(group.stored_bytes);
  proto->set_saved_bytes(group.saved_bytes);
  proto->set_centroid_end_id(std::string(group.centroid_end.view()));
  proto->set_centroid_blocks(group.centroid_blocks);
}

void ToProto(const GroupBranchInfo& branch, v1::GroupBranch* proto) {
  proto->set_parent(branch.parent);
  proto->set_first_id(std::string(branch.first.view()));
  proto->set_last_id(std::string(branch.last.view()));
  proto->set_blocks(branch.blocks);
  proto->set_surprisal_bits(branch.surprisal_bits);
  proto->set_surprisal_estimated(branch.surprisal_estimated);
  proto->set_stored_bytes(branch.stored_bytes);
  proto->set_sessions(branch.sessions);
  proto->set_probability(branch.probability);
  proto->set_on_centroid(branch.on_centroid);
}

void ToProto(const RecoveryReport& report, v1::RecoveryReport* proto) {
  proto->set_seconds(report.seconds);
  proto->set_nodes_loaded(report.nodes_loaded);
  proto->set_nodes_dropped(report.nodes_dropped);
  proto->set_unreferenced_bytes(report.unreferenced_bytes);
  proto->set_lost_batches(report.lost_batches);
  proto->set_rebuilt_from_segments(report.rebuilt_from_segments);
  for (const std::string& file : report.foreign_files) proto->add_foreign_files(file);
  for (const std::string& note : report.notes) proto->add_notes(note);
}

TokenProbabilities FromProto(const v1::TokenProbabilities& proto) {
  return {.log_probs = proto.log_probs(),
          .top_k = proto.top_k(),
          .top_token_ids = proto.top_token_ids(),
          .top_log_probs = proto.top_log_probs(),
          .vocabulary_tokens = proto.vocabulary_tokens()};
}

}  // namespace kvtrie
