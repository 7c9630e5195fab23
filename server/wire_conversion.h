#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kvtrie/v1/admin.pb.h"
#include "kvtrie/v1/cache.pb.h"
#include "storage/engine/engine.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"
#include "storage/kv/path.h"
#include "storage/kv/quality.h"

namespace kvtrie {

// Between the messages of the wire and the types of the store. Requests have passed request_checks.

// InvalidArgument: an enum has a value that this server does not know. Ranges are
// ModelSpec::Validate's.
absl::StatusOr<ModelSpec> FromProto(const v1::ModelSpec& proto);
void ToProto(const ModelSpec& spec, v1::ModelSpec* proto);

Quality FromProto(v1::Quality quality);  // UNSPECIFIED: exact
v1::Quality ToProto(Quality quality);
v1::Rung ToProto(Rung rung);
v1::FrameCodec ToProto(CodecId codec);

template <typename Id>
Id IdFromProto(std::string_view bytes) {
  return Id::FromBytes(bytes).value_or(Id{});
}

// A path in a message, as the engine reads it. Tokens are seen in place when they are aligned, and
// copied otherwise. The message outlives it. Moving keeps `view` right; copying would not.
class RequestPath {
 public:
  RequestPath(std::string_view model_id, std::string_view tokens, std::string_view salt,
              const google::protobuf::RepeatedPtrField<v1::BlockExtraKey>& extra_keys);
  explicit RequestPath(const v1::Prefix& prefix)
      : RequestPath(prefix.model_id(), prefix.tokens(), prefix.salt(), prefix.extra_keys()) {}

  RequestPath(RequestPath&&) = default;
  RequestPath& operator=(RequestPath&&) = default;
  RequestPath(const RequestPath&) = delete;
  RequestPath& operator=(const RequestPath&) = delete;

  const PathView& view() const { return view_; }

 private:
  std::vector<TokenId> copied_tokens_;
  std::vector<ExtraKey> extra_keys_;
  PathView view_;
};

// Ids of a packed list. REQUIRES: whole ids.
std::vector<TrieNodeId> NodeIdsFromProto(std::string_view bytes);

// A selection; `path` keeps what it points to.
Selection FromProto(const v1::Selection& proto, std::unique_ptr<RequestPath>* path);

// What points into the message, which outlives it.
TokenProbabilities FromProto(const v1::TokenProbabilities& proto);

// Only what a plan says of coding.
void ToProto(const CodingPlan& coding, v1::PutPlan* plan);
void ToProto(const BlockRun& run, v1::BlockRun* proto);
void ToProto(const LookupResult& result, v1::LookupResult* proto);
// Of each session, the longest runs.
void ToProto(const SimilarResult& result, v1::SimilarResponse* proto);
void ToProto(const NodeInfo& node, v1::NodeEntry* proto);
void ToProto(const ModelInfo& model, v1::ModelEntry* proto);
void ToProto(const StoredProfile& profile, v1::ProfileEntry* proto);
void ToProto(const PinInfo& pin, v1::PinEntry* proto);
void ToProto(const GroupInfo& group, v1::GroupEntry* proto);
void ToProto(const GroupBranchInfo& branch, v1::GroupBranch* proto);
void ToProto(const RecoveryReport& report, v1::RecoveryReport* proto);

}  // namespace kvtrie
