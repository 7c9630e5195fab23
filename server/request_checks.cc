#include "server/request_checks.h"

#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/status_translation.h"
#include "server/wire_conversion.h"
#include "storage/base/status_macros.h"
#include "storage/engine/text_reuse.h"
#include "storage/kv/ids.h"

namespace kvtrie {
namespace {

template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

absl::Status CheckId(absl::string_view field, std::string_view id) {
  if (id.size() == ModelId::kBytes) return absl::OkStatus();
  return Invalid(field, ": ", id.size(), " bytes; an id has exactly ", ModelId::kBytes);
}

absl::Status CheckOptionalId(absl::string_view field, std::string_view id) {
  return id.empty() ? absl::OkStatus() : CheckId(field, id);
}

absl::Status CheckTokens(std::string_view tokens) {
  if (tokens.size() % sizeof(TokenId) != 0) {
    return Invalid("tokens: ", tokens.size(), " bytes are not whole u32le token ids");
  }
  if (tokens.size() / sizeof(TokenId) > kPathTokensMax) {
    return Invalid("tokens: ", tokens.size() / sizeof(TokenId), " are over the limit of ",
                   kPathTokensMax, "; send a shorter prefix");
  }
  return absl::OkStatus();
}

absl::Status CheckSalt(std::string_view salt) {
  if (salt.size() <= kSaltBytesMax) return absl::OkStatus();
  return Invalid("salt: ", salt.size(), " bytes are over the limit of ", kSaltBytesMax);
}

absl::Status CheckSession(std::string_view session_id) {
  if (session_id.size() <= kSessionIdBytesMax) return absl::OkStatus();
  return Invalid("session_id: ", session_id.size(), " bytes are over the limit of ",
                 kSessionIdBytesMax);
}

absl::Status CheckExtraKeys(const google::protobuf::RepeatedPtrField<v1::BlockExtraKey>& keys) {
  if (static_cast<std::size_t>(keys.size()) > kExtraKeysMax) {
    return Invalid("extra_keys: ", keys.size(), " are over the limit of ", kExtraKeysMax);
  }
  for (int i = 0; i < keys.size(); ++i) {
    if (keys[i].key().empty() || keys[i].key().size() > kExtraKeyBytesMax) {
      return Invalid("extra_keys[", i, "].key: ", keys[i].key().size(), " bytes; 1 to ",
                     kExtraKeyBytesMax, " are allowed");
    }
    if (i > 0 && keys[i].block_index() <= keys[i - 1].block_index()) {
      return Invalid("extra_keys[", i, "].block_index: ", keys[i].block_index(),
                     " does not follow ", keys[i - 1].block_index(),
                     "; send one key per block, ascending");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckQuality(absl::string_view field, v1::Quality quality) {
  if (v1::Quality_IsValid(quality)) return absl::OkStatus();
  return Invalid(field, ": ", static_cast<int>(quality), " is not a Quality of this server");
}

absl::Status CheckEncoding(v1::Encoding encoding) {
  if (v1::Encoding_IsValid(encoding)) return absl::OkStatus();
  return Invalid("encoding: ", static_cast<int>(encoding), " is not an Encoding of this server");
}

absl::Status CheckTokenTotal(std::size_t token_count, const RequestLimits& limits) {
  if (token_count <= limits.tokens_max) return absl::OkStatus();
  return Invalid("tokens: ", token_count, " in one request are over this server's limit of ",
                 limits.tokens_max);
}

// All but the model id, which some calls name elsewhere.
absl::Status CheckPrefixBody(const v1::Prefix& prefix, const RequestLimits& limits) {
  KV_RETURN_IF_ERROR(CheckTokens(prefix.tokens()));
  KV_RETURN_IF_ERROR(CheckTokenTotal(prefix.tokens().size() / sizeof(TokenId), limits));
  KV_RETURN_IF_ERROR(CheckSalt(prefix.salt()));
  return CheckExtraKeys(prefix.extra_keys());
}

absl::Status CheckPrefix(const v1::Prefix& prefix, const RequestLimits& limits) {
  KV_RETURN_IF_ERROR(Within("prefix.", CheckId("model_id", prefix.model_id())));
  return Within("prefix.", CheckPrefixBody(prefix, limits));
}

absl::Status CheckTextReuse(const v1::LookupQuery& query) {
  const std::uint32_t min_tokens = query.text_reuse_min_tokens();
  if (!query.allow_text_reuse()) {
    if (min_tokens == 0) return absl::OkStatus();
    return Invalid("text_reuse_min_tokens: has a meaning with allow_text_reuse only");
  }
  if (query.model_ids_size() > 1) {
    return Invalid("allow_text_reuse: ", query.model_ids_size(),
                   " model_ids; look each model up by itself");
  }
  if (min_tokens != 0 && min_tokens < kReusableRunTokensMin) {
    return Invalid("text_reuse_min_tokens: ", min_tokens, "; at least ", kReusableRunTokensMin,
                   ", or 0 for ", kReusableRunTokensDefault);
  }
  const std::size_t token_count = query.tokens().size() / sizeof(TokenId);
  if (token_count <= kSimilarTokensMax) return absl::OkStatus();
  return Invalid("allow_text_reuse: ", token_count, " tokens are over the limit of ",
                 kSimilarTokensMax, "; look the prefix up without");
}

absl::Status CheckChunkBytes(const google::protobuf::RepeatedPtrField<v1::Chunk>& chunks,
                             std::size_t payload_bytes) {
  std::size_t total_bytes = 0;
  for (int i = 0; i < chunks.size(); ++i) {
    const v1::Chunk& chunk = chunks[i];
    if (chunk.bytes() == 0 || chunk.bytes() > kChunkBytesMax) {
      return Invalid("chunks[", i, "].bytes: ", chunk.bytes(), "; 1 to ", kChunkBytesMax,
                     " are allowed");
    }
    total_bytes += chunk.bytes();
  }
  if (total_bytes == payload_bytes) return absl::OkStatus();
  return Invalid("data: ", payload_bytes, " bytes; the chunks of the message say ", total_bytes);
}

absl::Status CheckPriority(std::uint32_t priority) {
  if (priority <= kPriorityMax) return absl::OkStatus();
  return Invalid("priority: ", priority, " is over the limit of ", kPriorityMax);
}

absl::Status CheckPageSize(std::uint32_t page_size) {
  if (page_size <= kPageSizeMax) return absl::OkStatus();
  return Invalid("page_size: ", page_size, " is over the limit of ", kPageSizeMax);
}

}  // namespace

absl::Status CheckRegisterModel(const v1::RegisterModelRequest& request) {
  if (!request.has_spec()) return Invalid("spec: missing");
  return CheckOptionalId("expected_model_id", request.expected_model_id());
}

absl::Status CheckPutProfile(const v1::PutProfileRequest& request, std::size_t payload_bytes,
                             bool is_first, std::uint64_t received_bytes) {
  if (is_first && request.total_bytes() == 0) {
    return Invalid("total_bytes: missing; the first message says the size of the profile");
  }
  KV_RETURN_IF_ERROR(CheckOptionalId("expected_profile_id", request.expected_profile_id()));
  if (!is_first && (request.total_bytes() != 0 || !request.expected_profile_id().empty())) {
    return Invalid(request.total_bytes() != 0 ? "total_bytes" : "expected_profile_id",
                   ": belongs into the first message only");
  }
  KV_RETURN_IF_ERROR(CheckChunkBytes(request.chunks(), payload_bytes));
  for (int i = 0; i < request.chunks_size(); ++i) {
    if (request.chunks(i).offset() != received_bytes) {
      return Invalid("chunks[", i, "].offset: ", request.chunks(i).offset(),
                     " does not follow the ", received_bytes, " bytes that came before it");
    }
    received_bytes += request.chunks(i).bytes();
  }
  return absl::OkStatus();
}

absl::Status CheckProfileId(std::string_view profile_id) {
  return CheckId("profile_id", profile_id);
}

absl::Status CheckLookup(const v1::LookupRequest& request, const RequestLimits& limits) {
  if (static_cast<std::size_t>(request.queries_size()) > limits.queries_max) {
    return Invalid("queries: ", request.queries_size(), " are over the limit of ",
                   limits.queries_max, "; split the request");
  }
  std::size_t token_count = 0;
  for (const v1::LookupQuery& query : request.queries()) {
    token_count += query.tokens().size() / sizeof(TokenId);
  }
  return CheckTokenTotal(token_count, limits);
}

absl::Status CheckLookupQuery(const v1::LookupQuery& query) {
  const auto model_count = static_cast<std::size_t>(query.model_ids_size());
  if (model_count == 0) return Invalid("model_ids: missing; name at least one model");
  if (model_count > kModelsPerQueryMax) {
    return Invalid("model_ids: ", model_count, " are over the limit of ", kModelsPerQueryMax);
  }
  for (int i = 0; i < query.model_ids_size(); ++i) {
    KV_RETURN_IF_ERROR(CheckId("model_ids", query.model_ids(i)));
  }
  KV_RETURN_IF_ERROR(CheckTokens(query.tokens()));
  KV_RETURN_IF_ERROR(CheckSalt(query.salt()));
  KV_RETURN_IF_ERROR(CheckExtraKeys(query.extra_keys()));
  KV_RETURN_IF_ERROR(CheckQuality("min_quality", query.min_quality()));
  KV_RETURN_IF_ERROR(CheckTextReuse(query));
  return CheckSession(query.session_id());
}

absl::Status CheckSimilar(const v1::SimilarRequest& request, const RequestLimits& limits) {
  if (!request.has_prefix()) return Invalid("prefix: missing; it names the model and the tokens");
  const std::size_t token_count = request.prefix().tokens().size() / sizeof(TokenId);
  if (token_count > kSimilarTokensMax) {
    return Invalid("prefix.tokens: ", token_count, " are over this call's limit of ",
                   kSimilarTokensMax, "; send the last ones of a longer text, or fewer");
  }
  KV_RETURN_IF_ERROR(CheckPrefix(request.prefix(), limits));
  if (request.session_count() > kSimilarSessionsMax) {
    return Invalid("session_count: ", request.session_count(), " is over the limit of ",
                   kSimilarSessionsMax);
  }
  return absl::OkStatus();
}

absl::Status CheckFetch(const v1::FetchRequest& request, const RequestLimits& limits) {
  const bool by_node = !request.node_ids().empty();
  if (by_node && request.has_prefix()) {
    return Invalid("prefix: excludes node_ids; name the blocks in one way");
  }
  if (request.has_prefix()) {
    const std::string& model =
        request.model_id().empty() ? request.prefix().model_id() : request.model_id();
    KV_RETURN_IF_ERROR(CheckId("model_id", model));
    if (!request.prefix().model_id().empty() && request.prefix().model_id() != model) {
      return Invalid("prefix.model_id: differs from model_id; leave one of them empty");
    }
    KV_RETURN_IF_ERROR(Within("prefix.", CheckPrefixBody(request.prefix(), limits)));
    if (request.block_count() > kFetchBlocksMax) {
      return Invalid("block_count: ", request.block_count(), " is over the limit of ",
                     kFetchBlocksMax);
    }
  } else {
    KV_RETURN_IF_ERROR(CheckId("model_id", request.model_id()));
    if (request.first_block() != 0 || request.block_count() != 0) {
      return Invalid(request.first_block() != 0 ? "first_block" : "block_count",
                     ": has a meaning with prefix only");
    }
  }
  if (request.node_ids().size() % TrieNodeId::kBytes != 0) {
    return Invalid("node_ids: ", request.node_ids().size(), " bytes are not whole ids of ",
                   TrieNodeId::kBytes);
  }
  if (request.node_ids().size() / TrieNodeId::kBytes > kFetchBlocksMax) {
    return Invalid("node_ids: ", request.node_ids().size() / TrieNodeId::kBytes,
                   " are over the limit of ", kFetchBlocksMax, "; split the request");
  }
  if (!v1::FetchOrder_IsValid(request.order())) {
    return Invalid("order: ", static_cast<int>(request.order()),
                   " is not a FetchOrder of this server");
  }
  KV_RETURN_IF_ERROR(CheckEncoding(request.encoding()));
  if (request.encoding() == v1::ENCODING_FRAME) {
    if (request.first_layer() != 0 || request.layer_count() != 0) {
      return Invalid(request.first_layer() != 0 ? "first_layer" : "layer_count",
                     ": needs ENCODING_RAW");
    }
  }
  if (request.accept_referenced() && request.encoding() != v1::ENCODING_FRAME) {
    return Invalid("accept_referenced: needs ENCODING_FRAME");
  }
  KV_RETURN_IF_ERROR(CheckQuality("min_quality", request.min_quality()));
  return CheckOptionalId("release_lease_id", request.release_lease_id());
}

absl::Status CheckAnnounce(const v1::PutAnnounce& announce, const RequestLimits& limits) {
  if (!announce.has_prefix()) return Invalid("prefix: missing");
  KV_RETURN_IF_ERROR(CheckPrefix(announce.prefix(), limits));
  KV_RETURN_IF_ERROR(CheckSession(announce.session_id()));
  KV_RETURN_IF_ERROR(CheckSizes(FromProto(announce.probabilities()),
                                announce.prefix().tokens().size() / sizeof(TokenId)));
  KV_RETURN_IF_ERROR(CheckQuality("restored_quality", announce.restored_quality()));
  if (announce.has_first_reused_block() &&
      announce.first_reused_block() < announce.restored_blocks()) {
    return Invalid("first_reused_block: ", announce.first_reused_block(), " lies within the ",
                   announce.restored_blocks(),
                   " restored_blocks; name the first block behind them");
  }
  KV_RETURN_IF_ERROR(CheckQuality("quality", announce.quality()));
  if (announce.beside_exact() &&
      (announce.quality() == v1::QUALITY_UNSPECIFIED || announce.quality() == v1::QUALITY_EXACT)) {
    return Invalid("beside_exact: is for coded frames; announce a quality less than EXACT");
  }
  KV_RETURN_IF_ERROR(CheckEncoding(announce.encoding()));
  if (announce.want_references() &&
      (announce.encoding() != v1::ENCODING_FRAME || announce.quality() == v1::QUALITY_UNSPECIFIED ||
       announce.quality() == v1::QUALITY_EXACT)) {
    return Invalid("want_references: needs ENCODING_FRAME and a quality less than EXACT");
  }
  if (const double seconds = announce.compute_seconds_per_token();
      seconds != 0 && !IsComputeSecondsPerToken(seconds)) {
    return Invalid("compute_seconds_per_token: ", seconds, " is not between ",
                   kComputeSecondsPerTokenMin, " and ", kComputeSecondsPerTokenMax,
                   "; leave it out if it is not known");
  }
  return CheckPriority(announce.priority());
}

absl::Status CheckChunks(const v1::PutRequest& request, std::size_t payload_bytes) {
  return CheckChunkBytes(request.chunks(), payload_bytes);
}

absl::Status CheckSelection(const v1::Selection& selection, SelectionScope scope,
                            const RequestLimits& limits) {
  const int named = (selection.node_id().empty() ? 0 : 1) + (selection.has_prefix() ? 1 : 0) +
                    (selection.session_id().empty() ? 0 : 1) +
                    (selection.model_id().empty() ? 0 : 1) + (selection.all() ? 1 : 0);
  if (named != 1) {
    return Invalid("selection: ", named,
                   " of node_id, prefix, session_id, model_id and all are set; set exactly one");
  }
  if (scope == SelectionScope::kPath && selection.node_id().empty() && !selection.has_prefix()) {
    return Invalid("selection: this call takes node_id or prefix");
  }
  if (scope != SelectionScope::kPathOrWideIfUnused && selection.unused_for_seconds() != 0) {
    return Invalid("selection.unused_for_seconds: only Delete takes it; leave it out");
  }
  KV_RETURN_IF_ERROR(Within("selection.", CheckOptionalId("node_id", selection.node_id())));
  KV_RETURN_IF_ERROR(Within("selection.", CheckOptionalId("model_id", selection.model_id())));
  KV_RETURN_IF_ERROR(Within("selection.", CheckSession(selection.session_id())));
  if (selection.has_prefix()) {
    KV_RETURN_IF_ERROR(Within("selection.", CheckPrefix(selection.prefix(), limits)));
  }
  return absl::OkStatus();
}

absl::Status CheckPin(const v1::PinRequest& request, const RequestLimits& limits) {
  if (request.seconds() == 0) return Invalid("seconds: 0; a pin lasts at least one second");
  if (request.pin_id().empty()) {
    return CheckSelection(request.selection(), SelectionScope::kPath, limits);
  }
  if (request.has_selection()) {
    return Invalid("pin_id: excludes selection; a pin keeps the path that it has");
  }
  return CheckId("pin_id", request.pin_id());
}

absl::Status CheckUnpin(const v1::UnpinRequest& request) {
  return CheckId("pin_id", request.pin_id());
}

absl::Status CheckSetRetention(const v1::SetRetentionRequest& request,
                               const RequestLimits& limits) {
  KV_RETURN_IF_ERROR(CheckSelection(request.selection(), SelectionScope::kPathOrWide, limits));
  KV_RETURN_IF_ERROR(CheckQuality("quality", request.quality()));
  return CheckPriority(request.priority());
}

absl::Status CheckWatch(const v1::WatchRequest& request) {
  return CheckOptionalId("model_id", request.model_id());
}

absl::Status CheckListNodes(const v1::ListNodesRequest& request) {
  KV_RETURN_IF_ERROR(CheckId("model_id", request.model_id()));
  KV_RETURN_IF_ERROR(CheckOptionalId("parent_id", request.parent_id()));
  KV_RETURN_IF_ERROR(CheckOptionalId("page_token", request.page_token()));
  return CheckPageSize(request.page_size());
}

absl::Status CheckListGroups(const v1::ListGroupsRequest& request) {
  KV_RETURN_IF_ERROR(CheckOptionalId("page_token", request.page_token()));
  return CheckPageSize(request.page_size());
}

absl::Status CheckDescribeGroup(const v1::DescribeGroupRequest& request) {
  KV_RETURN_IF_ERROR(CheckId("group_id", request.group_id()));
  if (request.branches_max() <= kPageSizeMax) return absl::OkStatus();
  return Invalid("branches_max: ", request.branches_max(), " is over the limit of ", kPageSizeMax);
}

absl::Status CheckGetGroup(const v1::GetGroupRequest& request) {
  return CheckId("node_id", request.node_id());
}

absl::Status CheckDescribeNode(const v1::DescribeNodeRequest& request,
                               const RequestLimits& limits) {
  if (request.node_id().empty() == !request.has_prefix()) {
    return Invalid("node_id: set exactly one of node_id and prefix");
  }
  return request.has_prefix() ? CheckPrefix(request.prefix(), limits)
                              : CheckId("node_id", request.node_id());
}

}  // namespace kvtrie
