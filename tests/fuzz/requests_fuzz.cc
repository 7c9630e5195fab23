#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvtrie/v1/cache.pb.h"
#include "server/fetch_plan.h"
#include "server/request_checks.h"
#include "server/wire_conversion.h"
#include "storage/base/check.h"

namespace kvtrie {
namespace {

template <typename Message>
bool Parse(const std::uint8_t* data, std::size_t size, Message* message) {
  return message->ParseFromArray(data, static_cast<int>(size));
}

// What passed the checks can be translated.
void TryAll(const std::uint8_t* data, std::size_t size) {
  const RequestLimits limits;
  if (v1::FetchRequest fetch; Parse(data, size, &fetch) && CheckFetch(fetch, limits).ok()) {
    KV_CHECK(NodeIdsFromProto(fetch.node_ids()).size() <= kFetchBlocksMax);
    if (fetch.has_prefix()) {
      const RequestPath path(fetch.prefix());
      KV_CHECK(path.view().tokens.size() <= kPathTokensMax);
    }
    if (!FetchShape::NeedsGeometry(fetch)) KV_CHECK(FetchShape::Make(fetch, nullptr).ok());
  }
  if (v1::LookupQuery query; Parse(data, size, &query) && CheckLookupQuery(query).ok()) {
    const RequestPath path({}, query.tokens(), query.salt(), query.extra_keys());
    KV_CHECK(path.view().salt.size() <= kSaltBytesMax);
  }
  if (v1::PutAnnounce announce;
      Parse(data, size, &announce) && CheckAnnounce(announce, limits).ok()) {
    const RequestPath path(announce.prefix());
    const auto bits =
        BlockSurprisalBits(FromProto(announce.probabilities()), path.view().tokens, 16);
    KV_CHECK(!bits.ok() || bits->size() <= path.view().tokens.size() / 16);
    for (const float of_block : bits.value_or(std::vector<float>())) KV_CHECK(of_block > 0);
    KV_CHECK(IsQuality(FromProto(announce.quality())));
    KV_CHECK(IsQuality(FromProto(announce.restored_quality())));
  }
  if (v1::PutProfileRequest profile; Parse(data, size, &profile)) {
    for (const bool is_first : {false, true}) {
      const std::uint64_t before = is_first ? 0 : kChunkBytesMax;
      std::size_t bytes = 0;
      for (const v1::Chunk& chunk : profile.chunks()) bytes += chunk.bytes();
      if (!CheckPutProfile(profile, bytes, is_first, before).ok()) continue;
      KV_CHECK(!is_first || profile.total_bytes() > 0);
      std::uint64_t next = before;
      for (const v1::Chunk& chunk : profile.chunks()) {
        KV_CHECK(chunk.offset() == next);
        next += chunk.bytes();
      }
    }
  }
  if (v1::GetProfileRequest profile;
      Parse(data, size, &profile) && CheckProfileId(profile.profile_id()).ok()) {
    KV_CHECK(ProfileId::FromBytes(profile.profile_id()).has_value());
  }
  if (v1::SetRetentionRequest retention;
      Parse(data, size, &retention) && CheckSetRetention(retention, limits).ok()) {
    KV_CHECK(IsQuality(FromProto(retention.quality())));
  }
  if (v1::Selection selection;
      Parse(data, size, &selection) &&
      CheckSelection(selection, SelectionScope::kPathOrWide, limits).ok()) {
    std::unique_ptr<RequestPath> path;
    const Selection translated = FromProto(selection, &path);
    KV_CHECK(translated.path.has_value() == (path != nullptr));
  }
  if (v1::ModelSpec proto; Parse(data, size, &proto)) {
    const auto spec = FromProto(proto);
    if (spec.ok() && spec->Validate().ok()) KV_CHECK(!spec->Digest().empty());
  }
}

}  // namespace
}  // namespace kvtrie

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvtrie::TryAll(data, size);
  return 0;
}
