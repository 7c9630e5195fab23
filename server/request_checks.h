#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "kvtrie/v1/admin.pb.h"
#include "kvtrie/v1/cache.pb.h"
#include "storage/engine/put_session.h"  // kTopKMax
#include "storage/kv/path.h"

namespace kvtrie {

// What one request may ask for. Admin.GetConfig shows them.
struct RequestLimits {
  std::size_t queries_max = 1024;
  std::size_t tokens_max = kPathTokensMax;  // of all queries of a request together
};

// Upper bounds that the wire contract states for every server.
inline constexpr std::size_t kModelsPerQueryMax = 64;
inline constexpr std::size_t kSimilarTokensMax = 262'144;
inline constexpr std::uint32_t kSimilarSessionsMax = 64;
inline constexpr std::size_t kFetchBlocksMax = 65'536;
inline constexpr std::uint32_t kPriorityMax = 15;
inline constexpr std::uint32_t kPageSizeMax = 10'000;
inline constexpr std::uint32_t kChunkBytesMax = 1u << 20;

// Each call checks all that can be said of a request without looking at the store, before anything
// else is done for it. InvalidArgument names the field, what is wrong with it and what is right.
absl::Status CheckRegisterModel(const v1::RegisterModelRequest& request);
// `received_bytes`: of the messages before. `is_first`: there were none.
absl::Status CheckPutProfile(const v1::PutProfileRequest& request, std::size_t payload_bytes,
                             bool is_first, std::uint64_t received_bytes);
absl::Status CheckProfileId(std::string_view profile_id);
absl::Status CheckLookup(const v1::LookupRequest& request, const RequestLimits& limits);
absl::Status CheckLookupQuery(const v1::LookupQuery& query);
absl::Status CheckSimilar(const v1::SimilarRequest& request, const RequestLimits& limits);
absl::Status CheckFetch(const v1::FetchRequest& request, const RequestLimits& limits);
absl::Status CheckAnnounce(const v1::PutAnnounce& announce, const RequestLimits& limits);
// The chunks of a message against the bytes that came with it.
absl::Status CheckChunks(const v1::PutRequest& request, std::size_t payload_bytes);

// Which ways of naming a selection a call takes.
enum class SelectionScope {
  kPath,                // node_id or prefix
  kPathOrWide,          // also session_id, model_id, all
  kPathOrWideIfUnused,  // also with unused_for_seconds
};
absl::Status CheckSelection(const v1::Selection& selection, SelectionScope scope,
                            const RequestLimits& limits);
absl::Status CheckPin(const v1::PinRequest& request, const RequestLimits& limits);
absl::Status CheckUnpin(const v1::UnpinRequest& request);
absl::Status CheckSetRetention(const v1::SetRetentionRequest& request, const RequestLimits& limits);
absl::Status CheckWatch(const v1::WatchRequest& request);

absl::Status CheckListNodes(const v1::ListNodesRequest& request);
absl::Status CheckDescribeNode(const v1::DescribeNodeRequest& request, const RequestLimits& limits);
absl::Status CheckListGroups(const v1::ListGroupsRequest& request);
absl::Status CheckDescribeGroup(const v1::DescribeGroupRequest& request);
absl::Status CheckGetGroup(const v1::GetGroupRequest& request);

}  // namespace kvtrie
