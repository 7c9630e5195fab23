#include "server/worker/codec_checks.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/model_spec_from_proto.h"
#include "server/status_translation.h"
#include "server/wire_conversion.h"
#include "storage/base/byte_order.h"
#include "storage/base/status_macros.h"
#include "storage/codec/frame.h"
#include "storage/codec/reference_table.h"
#include "storage/kv/path.h"
#include "storage/trie/surprisal.h"

namespace kvtrie {
namespace {

template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

absl::Status CheckTokens(absl::string_view field, const std::string& tokens,
                         const CodecModel& model) {
  const std::size_t wanted = model.geometry.block_tokens();
  if (tokens.size() == wanted * sizeof(TokenId)) return absl::OkStatus();
  if (tokens.size() % sizeof(TokenId) != 0) {
    return Invalid(field, ": ", tokens.size(), " bytes are not whole u32le token ids");
  }
  return Invalid(field, ": ", tokens.size() / sizeof(TokenId), "; a block of this model has ",
                 wanted);
}

std::vector<TokenId> TokensOf(const std::string& bytes) {
  std::vector<TokenId> tokens(bytes.size() / sizeof(TokenId));
  std::memcpy(tokens.data(), bytes.data(), tokens.size() * sizeof(TokenId));
  return tokens;
}

absl::Status CheckFrameBytes(absl::string_view field, std::uint64_t bytes,
                             const CodecModel& model) {
  const std::size_t least = FrameHeaderBytes(1), most = FrameBytesMax(model.geometry);
  if (bytes >= least && bytes <= most) return absl::OkStatus();
  return Invalid(field, ": ", bytes, "; a frame of this model has ", least, " to ", most);
}

absl::Status CheckPosition(absl::string_view field, std::uint32_t position,
                           const CodecModel& model) {
  if (position % model.geometry.block_tokens() != 0) {
    return Invalid(field, ": ", position, " is not where a block of ",
                   model.geometry.block_tokens(), " tokens begins");
  }
  if (position >= kPathTokensMax) {
    return Invalid(field, ": ", position, " is over the limit of ", kPathTokensMax);
  }
  return absl::OkStatus();
}

std::vector<ReferenceRun> RunsOf(const v1::CodecItem& item) {
  std::vector<ReferenceRun> runs;
  // What does not fit is made something that the table's check refuses.
  const auto number = [](std::uint32_t value) {
    return static_cast<std::uint16_t>(
        std::min<std::uint32_t>(value, std::numeric_limits<std::uint16_t>::max()));
  };
  for (const v1::TokenRun& run : item.runs()) {
    runs.push_back({number(run.first_token()), number(run.token_count()), number(run.reference()),
                    number(run.offset())});
  }
  return runs;
}

// The codec checks it too, and then fails all blocks of its batch.
absl::Status CheckRunTokens(const v1::CodecItem& item, const std::vector<ReferenceRun>& runs) {
  const absl::string_view own = item.tokens();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const absl::string_view other = item.references(runs[i].reference).tokens();
    const std::size_t bytes = runs[i].token_count * sizeof(TokenId);
    if (own.substr(runs[i].first_token * sizeof(TokenId), bytes) !=
        other.substr(runs[i].offset * sizeof(TokenId), bytes)) {
      return Invalid("runs[", i, "]: tokens from ", runs[i].first_token,
                     " on are not those of references[", runs[i].reference, "] from ",
                     runs[i].offset, " on");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckReferences(const v1::CodecItem& item, CodecOp op, const CodecModel& model) {
  if (static_cast<std::size_t>(item.references_size()) > kReferencesMax) {
    return Invalid("references: ", item.references_size(), " are over the limit of ",
                   kReferencesMax);
  }
  if (item.runs_size() > static_cast<int>(model.geometry.block_tokens())) {
    return Invalid("runs: ", item.runs_size(), " are more than the block has tokens");
  }
  if (op == CodecOp::kDecode && item.runs_size() > 0) {
    return Invalid("runs: a frame says them itself; leave them out");
  }
  ReferenceTable table;
  for (int i = 0; i < item.references_size(); ++i) {
    const v1::CodecReference& reference = item.references(i);
    const auto field = [i](absl::string_view name) {
      return absl::StrCat("references[", i, "].", name);
    };
    const auto node = TrieNodeId::FromBytes(reference.node_id());
    if (!node.has_value()) {
      return Invalid(field("node_id"), ": ", reference.node_id().size(),
                     " bytes; an id has exactly ", TrieNodeId::kBytes);
    }
    if (node->empty()) return Invalid(field("node_id"), ": is all zero");
    for (const FrameReference& other : table.references) {
      if (other.node == *node) return Invalid(field("node_id"), ": is there twice");
    }
    KV_RETURN_IF_ERROR(CheckTokens(field("tokens"), reference.tokens(), model));
    KV_RETURN_IF_ERROR(CheckPosition(field("first_position"), reference.first_position(), model));
    KV_RETURN_IF_ERROR(CheckFrameBytes(field("frame_bytes"), reference.frame_bytes(), model));
    table.references.push_back(
        {.node = *node, .digest = {}, .first_position = reference.first_position()});
  }
  if (op == CodecOp::kDecode || (item.references_size() == 0 && item.runs_size() == 0)) {
    return absl::OkStatus();
  }
  table.runs = RunsOf(item);
  KV_RETURN_IF_ERROR(Within("runs: ", table.Check(model.geometry.block_tokens())));
  return CheckRunTokens(item, table.runs);
}

absl::Status CheckEncoding(const v1::CodecItem& item, const CodecModel& model) {
  if (item.block_bytes() != model.geometry.raw_block_bytes()) {
    return Invalid("block_bytes: ", item.block_bytes(), "; raw KV of a block of this model has ",
                   model.geometry.raw_block_bytes(),
                   " ([layer][K, V][token][KV head][dim] in the model's dtype)");
  }
  const std::uint64_t end = std::uint64_t{item.first_position()} + model.geometry.block_tokens();
  if (item.session_tokens() != 0 && item.session_tokens() < end) {
    return Invalid("session_tokens: ", item.session_tokens(), "; the block ends at ", end);
  }
  const Quality quality = FromProto(item.quality());
  if (!IsQuality(quality)) {
    return Invalid("quality: ", static_cast<int>(item.quality()), " is none that is known here");
  }
  if (quality != Quality::kExact && !model.spec.layout_tag.empty()) {
    return Invalid("quality: blocks with a layout of their own (layout_tag) are coded EXACT only");
  }
  if (item.restored_quality() != v1::QUALITY_UNSPECIFIED &&
      !IsQuality(FromProto(item.restored_quality()))) {
    return Invalid("restored_quality: ", static_cast<int>(item.restored_quality()),
                   " is none that is known here");
  }
  if (!item.profile_id().empty() && item.profile_id().size() != ProfileId::kBytes) {
    return Invalid("profile_id: ", item.profile_id().size(), " bytes; an id has exactly ",
                   ProfileId::kBytes);
  }
  const std::size_t importance_bytes = model.geometry.block_tokens() * sizeof(float);
  if (!item.importance().empty() && item.importance().size() != importance_bytes) {
    return Invalid("importance: ", item.importance().size(), " bytes; f32le for each token are ",
                   importance_bytes);
  }
  if (item.dtype() != v1::DTYPE_UNSPECIFIED &&
      static_cast<int>(item.dtype()) != static_cast<int>(model.spec.dtype)) {
    return Invalid("dtype: ", v1::DType_Name(item.dtype()), "; the model's is ",
                   v1::DType_Name(static_cast<v1::DType>(model.spec.dtype)));
  }
  if (!item.has_probabilities()) return absl::OkStatus();
  return Within("probabilities.",
                CheckSizes(FromProto(item.probabilities()), model.geometry.block_tokens()));
}

absl::Status CheckDecoding(const v1::CodecItem& item, const CodecModel& model) {
  KV_RETURN_IF_ERROR(CheckFrameBytes("block_bytes", item.block_bytes(), model));
  if (item.session_tokens() != 0 || item.quality() != v1::QUALITY_UNSPECIFIED ||
      !item.profile_id().empty() || !item.importance().empty() || item.has_probabilities()) {
    return Invalid(
        "item: session_tokens, quality, profile_id, importance and probabilities are of Encode; a "
        "frame says them itself");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<const CodecModel>> CheckOpen(const v1::CodecOpen& open, CodecOp op) {
  if (!open.has_model()) return Invalid("open.model: is required");
  auto spec = ModelSpecFromProto(open.model());
  if (spec.ok()) {
    if (absl::Status valid = spec->Validate(); !valid.ok()) spec = valid;
  }
  if (!spec.ok()) return Within("open.model: ", spec.status());
  if (open.tenant().size() > kTenantBytesMax) {
    return Invalid("open.tenant: ", open.tenant().size(), " bytes are over the limit of ",
                   kTenantBytesMax);
  }
  if (open.layer_major() && op == CodecOp::kEncode) {
    return Invalid("open.layer_major: is of Decode only");
  }
  return std::make_shared<const CodecModel>(*spec);
}

absl::Status CheckItem(const v1::CodecItem& item, CodecOp op, const CodecModel& model,
                       const CodecLimits& limits) {
  KV_RETURN_IF_ERROR(CheckTokens("tokens", item.tokens(), model));
  KV_RETURN_IF_ERROR(CheckPosition("first_position", item.first_position(), model));
  KV_RETURN_IF_ERROR(op == CodecOp::kEncode ? CheckEncoding(item, model)
                                            : CheckDecoding(item, model));
  KV_RETURN_IF_ERROR(CheckReferences(item, op, model));
  std::uint64_t bytes =
      std::max<std::uint64_t>(item.block_bytes(), model.geometry.raw_block_bytes());
  for (const v1::CodecReference& reference : item.references()) bytes += reference.frame_bytes();
  if (bytes > limits.item_bytes_max) {
    return Invalid("block_bytes: with the frames of its references ", bytes,
                   " are over this worker's limit of ", limits.item_bytes_max,
                   " (--item_bytes_max)");
  }
  return absl::OkStatus();
}

std::unique_ptr<CodecJob> JobOf(const v1::CodecItem& item, CodecOp op,
                                std::shared_ptr<const CodecModel> model) {
  auto job = std::make_unique<CodecJob>();
  job->op = op;
  job->model = std::move(model);
  job->first_position = item.first_position();
  job->tokens = TokensOf(item.tokens());
  job->session_tokens =
      std::max(item.session_tokens(), item.first_position() + job->model->geometry.block_tokens());
  if (op == CodecOp::kEncode) {
    job->quality = FromProto(item.quality());
    job->profile = IdFromProto<ProfileId>(item.profile_id());
    if (!item.importance().empty()) {
      job->importance.resize(item.importance().size() / sizeof(float));
      std::memcpy(job->importance.data(), item.importance().data(), item.importance().size());
    }
    job->runs = RunsOf(item);
  }
  for (const v1::CodecReference& reference : item.references()) {
    job->references.push_back({.node = IdFromProto<TrieNodeId>(reference.node_id()),
                               .first_position = reference.first_position(),
                               .frame = nullptr});
    job->references.back().frame = std::make_shared<ReferenceFrame>();
    job->references.back().frame->tokens = TokensOf(reference.tokens());
  }
  return job;
}

absl::Status CheckFitOpen(const v1::FitOpen& open, const CodecLimits& limits) {
  if (!open.has_model()) return Invalid("open.model: is required");
  if (open.levels_size() == 0) return Invalid("open.levels: at least one is needed");
  std::vector<v1::Quality> seen;
  for (int i = 0; i < open.levels_size(); ++i) {
    const v1::FitLevel& level = open.levels(i);
    const auto field = [i](absl::string_view name) {
      return absl::StrCat("open.levels[", i, "].", name);
    };
    if (level.quality() != v1::QUALITY_SMALL && level.quality() != v1::QUALITY_HIGH &&
        level.quality() != v1::QUALITY_NEAR_EXACT) {
      return Invalid(field("quality"), ": SMALL, HIGH or NEAR_EXACT");
    }
    if (std::find(seen.begin(), seen.end(), level.quality()) != seen.end()) {
      return Invalid(field("quality"), ": is there twice");
    }
    seen.push_back(level.quality());
    if (!(level.step() > 0 && level.step() < 1e6)) {
      return Invalid(field("step"), ": ", level.step(), "; above 0, and below 1e6");
    }
    if (!(level.rate_weight() >= 0 && level.rate_weight() < 100)) {
      return Invalid(field("rate_weight"), ": ", level.rate_weight(), "; 0 to 100");
    }
    if (!(level.importance_strength() >= 0 && level.importance_strength() < 100)) {
      return Invalid(field("importance_strength"), ": ", level.importance_strength(), "; 0 to 100");
    }
  }
  if (open.rounds() > 8) return Invalid("open.rounds: ", open.rounds(), "; at most 8");
  if (open.material_bytes() > limits.fit_bytes_max) {
    return Invalid("open.material_bytes: ", open.material_bytes(), " are over the limit of ",
                   limits.fit_bytes_max, " (--fit_bytes_max)");
  }
  return absl::OkStatus();
}

}  // namespace kvtrie
