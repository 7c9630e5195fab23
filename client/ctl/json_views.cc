#include "client/ctl/json_views.h"

#include <string>

#include "client/ctl/format.h"

namespace kvtrie {

nlohmann::ordered_json StatusToJson(const v1::GetStatusResponse& status) {
  nlohmann::ordered_json json;
  json["version"] = status.version();
  json["state"] = status.state();
  json["reasons"] = nlohmann::json::array();
  for (const std::string& reason : status.reasons()) json["reasons"].push_back(reason);
  json["uptime_seconds"] = status.uptime_seconds();
  json["model_count"] = status.model_count();
  json["node_count"] = status.node_count();
  json["stored_bytes"] = status.stored_bytes();
  json["disk_bytes"] = status.disk_bytes();
  json["disk_limit_bytes"] = status.disk_limit_bytes();
  json["memory_tier_bytes"] = status.memory_tier_bytes();
  json["memory_tier_limit_bytes"] = status.memory_tier_limit_bytes();
  json["index_bytes"] = status.index_bytes();
  json["token_cache_bytes"] = status.token_cache_bytes();
  json["lease_count"] = status.lease_count();
  json["pinned_bytes"] = status.pinned_bytes();
  json["open_put_bytes"] = status.open_put_bytes();
  json["codecs"] = nlohmann::json::array();
  for (const v1::CodecUsage& usage : status.codecs()) {
    json["codecs"].push_back(nlohmann::ordered_json{{"codec", CodecName(usage.codec())},
                                                    {"frames", usage.frames()},
                                                    {"stored_bytes", usage.stored_bytes()}});
  }
  json["profile_count"] = status.profile_count();
  json["profile_bytes"] = status.profile_bytes();
  const v1::RecoveryReport& recovery = status.recovery();
  json["recovery"] = {
      {"seconds", recovery.seconds()},
      {"nodes_loaded", recovery.nodes_loaded()},
      {"nodes_dropped", recovery.nodes_dropped()},
      {"unreferenced_bytes", recovery.unreferenced_bytes()},
      {"lost_batches", recovery.lost_batches()},
      {"rebuilt_from_segments", recovery.rebuilt_from_segments()},
      {"foreign_files",
       std::vector<std::string>(recovery.foreign_files().begin(), recovery.foreign_files().end())},
      {"notes", std::vector<std::string>(recovery.notes().begin(), recovery.notes().end())}};
  nlohmann::json counters = nlohmann::json::object();  // sorted by name
  for (const auto& [name, value] : status.counters()) counters[name] = value;
  json["counters"] = counters;
  return json;
}

nlohmann::ordered_json ModelToJson(const v1::ModelEntry& model) {
  const v1::ModelSpec& spec = model.spec();
  std::uint32_t layers = 0;
  for (const v1::KvGroup& group : spec.kv_groups()) {
    for (const v1::LayerRun& run : group.layer_runs()) layers += run.layer_count();
  }
  return {{"model_id", IdToHex(model.model_id())},
          {"name", spec.name()},
          {"weights_revision", spec.weights_revision()},
          {"dtype", DTypeName(spec.dtype())},
          {"layers", layers},
          {"block_tokens", spec.block_tokens()},
          {"tensor_parallel_rank", spec.tensor_parallel_rank()},
          {"tensor_parallel_size", spec.tensor_parallel_size()},
          {"adapter", spec.adapter()},
          {"layout_tag", spec.layout_tag()},
          {"raw_block_bytes", model.raw_block_bytes()},
          {"node_count", model.node_count()},
          {"stored_bytes", model.stored_bytes()},
          {"profile_id", IdToHex(model.profile_id())}};
}

nlohmann::ordered_json ProfileToJson(const v1::ProfileEntry& profile) {
  nlohmann::ordered_json json;
  json["profile_id"] = IdToHex(profile.profile_id());
  json["codec_key"] = IdToHex(profile.codec_key());
  json["model_ids"] = nlohmann::json::array();
  for (const std::string& model : profile.model_ids()) json["model_ids"].push_back(IdToHex(model));
  json["profile_bytes"] = profile.profile_bytes();
  json["levels"] = nlohmann::json::array();
  for (const v1::ProfileLevel& level : profile.levels()) {
    json["levels"].push_back(
        nlohmann::ordered_json{{"quality", QualityName(level.quality())},
                               {"bits_per_component", level.bits_per_component()},
                               {"mean_kl", level.mean_kl()},
                               {"kl_p99", level.kl_p99()}});
  }
  json["frames"] = profile.frames();
  json["created_unix_seconds"] = profile.created_unix_seconds();
  return json;
}

nlohmann::ordered_json NodeToJson(const v1::NodeEntry& node) {
  nlohmann::ordered_json json;
  json["node_id"] = IdToHex(node.node_id());
  json["parent_id"] = IdToHex(node.parent_id());
  json["model_id"] = IdToHex(node.model_id());
  json["depth"] = node.depth();
  json["rungs"] = nlohmann::json::array();
  for (const v1::RungEntry& rung : node.rungs()) {
    json["rungs"].push_back(nlohmann::ordered_json{{"rung", RungName(rung.rung())},
                                                   {"quality", QualityName(rung.quality())},
                                                   {"codec", CodecName(rung.codec())},
                                                   {"stored_bytes", rung.stored_bytes()},
                                                   {"in_memory", rung.in_memory()}});
  }
  json["quality"] = QualityName(node.quality());
  json["use_count"] = node.use_count();
  json["last_used_unix_seconds"] = node.last_used_unix_seconds();
  json["expires_unix_seconds"] = node.expires_unix_seconds();
  json["priority"] = node.priority();
  json["surprisal_bits"] = node.surprisal_bits();
  json["surprisal_estimated"] = node.surprisal_estimated();
  json["pinned"] = node.pinned();
  json["leased"] = node.leased();
  json["child_count"] = node.child_count();
  json["extra_key_bytes"] = node.extra_key_bytes();
  return json;
}

nlohmann::ordered_json SimilarToJson(const v1::SimilarResponse& similar) {
  nlohmann::ordered_json sessions = nlohmann::json::array();
  for (const v1::SimilarSession& session : similar.sessions()) {
    nlohmann::ordered_json runs = nlohmann::json::array();
    for (const v1::SharedRun& run : session.runs()) {
      runs.push_back({{"first_token", run.first_token()},
                      {"token_count", run.token_count()},
                      {"node_id", IdToHex(run.node_id())},
                      {"node_offset", run.node_offset()},
                      {"bits", run.bits()}});
    }
    nlohmann::ordered_json ids = nlohmann::json::array();
    for (const std::string& id : session.session_ids()) ids.push_back(id);
    sessions.push_back({{"node_id", IdToHex(session.node_id())},
                        {"session_ids", std::move(ids)},
                        {"blocks", session.blocks()},
                        {"shared_prefix_blocks", session.shared_prefix_blocks()},
                        {"shared_prefix_bits", session.shared_prefix_bits()},
                        {"shared_run_tokens", session.shared_run_tokens()},
                        {"shared_run_bits", session.shared_run_bits()},
                        {"runs", std::move(runs)}});
  }
  return {{"sessions", std::move(sessions)},
          {"matched_blocks", similar.matched_blocks()},
          {"work_limit_reached", similar.work_limit_reached()}};
}

nlohmann::ordered_json GroupToJson(const v1::GroupEntry& group) {
  return {{"group_id", IdToHex(group.group_id())},
          {"model_id", IdToHex(group.model_id())},
          {"sessions", group.sessions()},
          {"shared_blocks", group.shared_blocks()},
          {"shared_bits", group.shared_bits()},
          {"shared_bits_estimated", group.shared_bits_estimated()},
          {"shared_end_id", IdToHex(group.shared_end_id())},
          {"blocks", group.blocks()},
          {"stored_bytes", group.stored_bytes()},
          {"saved_bytes", group.saved_bytes()},
          {"centroid_end_id", IdToHex(group.centroid_end_id())},
          {"centroid_blocks", group.centroid_blocks()}};
}

nlohmann::ordered_json GroupBranchToJson(const v1::GroupBranch& branch) {
  return {{"parent", branch.parent()},
          {"first_id", IdToHex(branch.first_id())},
          {"last_id", IdToHex(branch.last_id())},
          {"blocks", branch.blocks()},
          {"surprisal_bits", branch.surprisal_bits()},
          {"surprisal_estimated", branch.surprisal_estimated()},
          {"stored_bytes", branch.stored_bytes()},
          {"sessions", branch.sessions()},
          {"probability", branch.probability()},
          {"on_centroid", branch.on_centroid()}};
}

nlohmann::ordered_json PinToJson(const v1::PinEntry& pin) {
  return {{"pin_id", IdToHex(pin.pin_id())},
          {"node_id", IdToHex(pin.node_id())},
          {"pinned_bytes", pin.pinned_bytes()},
          {"end_unix_seconds", pin.end_unix_seconds()}};
}

std::string DumpJson(const nlohmann::ordered_json& json) {
  return json.dump(2, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace);
}

}  // namespace kvtrie
