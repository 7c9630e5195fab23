#include "server/request_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

namespace kvtrie {
namespace {

using ::testing::StartsWith;

const std::string kId(16, 'i');

template <typename Message>
struct BadField {
  const char* field;  // what the error begins with
  std::function<void(Message&)> spoil;
};

// Each bad field of an otherwise good request is refused, and the error begins with its name.
template <typename Message>
void ExpectRefused(const Message& good, const std::function<absl::Status(const Message&)>& check,
                   const std::vector<BadField<Message>>& cases) {
  EXPECT_TRUE(check(good).ok()) << check(good);
  for (const auto& c : cases) {
    SCOPED_TRACE(c.field);
    Message bad = good;
    c.spoil(bad);
    const absl::Status status = check(bad);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), StartsWith(c.field));
  }
}

v1::Prefix GoodPrefix() {
  v1::Prefix prefix;
  prefix.set_model_id(kId);
  prefix.set_tokens(std::string(64, '\0'));
  prefix.set_salt("salt");
  v1::BlockExtraKey* key = prefix.add_extra_keys();
  key->set_block_index(1);
  key->set_key("digest");
  return prefix;
}

std::vector<BadField<v1::Prefix>> BadPrefixes() {
  return {
      {"model_id", [](v1::Prefix& p) { p.set_model_id("short"); }},
      {"tokens", [](v1::Prefix& p) { p.set_tokens("abc"); }},
      {"tokens", [](v1::Prefix& p) { p.set_tokens(std::string((kPathTokensMax + 1) * 4, 'x')); }},
      {"salt", [](v1::Prefix& p) { p.set_salt(std::string(kSaltBytesMax + 1, 's')); }},
      {"extra_keys[0].key", [](v1::Prefix& p) { p.mutable_extra_keys(0)->clear_key(); }},
      {"extra_keys[0].key",
       [](v1::Prefix& p) {
         p.mutable_extra_keys(0)->set_key(std::string(kExtraKeyBytesMax + 1, 'k'));
       }},
      {"extra_keys[1].block_index",
       [](v1::Prefix& p) { p.add_extra_keys()->CopyFrom(p.extra_keys(0)); }},
      {"extra_keys: 65537",
       [](v1::Prefix& p) {
         for (std::uint32_t i = 0; i < kExtraKeysMax; ++i) {
           v1::BlockExtraKey* key = p.add_extra_keys();
           key->set_block_index(2 + i);
           key->set_key("k");
         }
       }},
  };
}

TEST(RequestChecksTest, LookupQuery) {
  v1::LookupQuery good;
  good.add_model_ids(kId);
  good.set_tokens(std::string(64, '\0'));
  ExpectRefused<v1::LookupQuery>(
      good, CheckLookupQuery,
      {{"model_ids: missing", [](auto& q) { q.clear_model_ids(); }},
       {"model_ids", [](auto& q) { q.add_model_ids("short"); }},
       {"model_ids: 65",
        [](auto& q) {
          while (q.model_ids_size() <= 64) q.add_model_ids(kId);
        }},
       {"tokens", [](auto& q) { q.set_tokens("12345"); }},
       {"salt", [](auto& q) { q.set_salt(std::string(257, 's')); }},
       {"extra_keys[0].key", [](auto& q) { q.add_extra_keys(); }},
       {"min_quality", [](auto& q) { q.set_min_quality(static_cast<v1::Quality>(9)); }},
       {"session_id", [](auto& q) { q.set_session_id(std::string(65, 's')); }},
       {"text_reuse_min_tokens", [](auto& q) { q.set_text_reuse_min_tokens(64); }},
       {"text_reuse_min_tokens: 31",
        [](auto& q) {
          q.set_allow_text_reuse(true);
          q.set_text_reuse_min_tokens(31);
        }},
       {"allow_text_reuse: 2 model_ids",
        [](auto& q) {
          q.set_allow_text_reuse(true);
          q.add_model_ids(kId);
        }},
       {"allow_text_reuse: 262145 tokens", [](auto& q) {
          q.set_allow_text_reuse(true);
          q.set_tokens(std::string(4 * 262'145, 't'));
        }}});
  good.set_allow_text_reuse(true);
  EXPECT_TRUE(CheckLookupQuery(good).ok());
  good.set_text_reuse_min_tokens(32);
  EXPECT_TRUE(CheckLookupQuery(good).ok());
}

TEST(RequestChecksTest, LookupIsBoundedAsAWhole) {
  const RequestLimits limits{.queries_max = 2, .tokens_max = 10};
  v1::LookupRequest good;
  good.add_queries()->set_tokens(std::string(20, 'x'));
  good.add_queries()->set_tokens(std::string(20, 'x'));
  ExpectRefused<v1::LookupRequest>(
      good, [&limits](const auto& r) { return CheckLookup(r, limits); },
      {{"queries: 3", [](auto& r) { r.add_queries(); }},
       {"tokens: 11", [](auto& r) { r.mutable_queries(0)->set_tokens(std::string(24, 'x')); }}});
}

TEST(RequestChecksTest, FetchByNodes) {
  const RequestLimits limits;
  const auto check = [&limits](const v1::FetchRequest& r) { return CheckFetch(r, limits); };
  v1::FetchRequest good;
  good.set_model_id(kId);
  good.set_node_ids(kId + kId);
  ExpectRefused<v1::FetchRequest>(
      good, check,
      {{"model_id", [](auto& r) { r.clear_model_id(); }},
       {"node_ids", [](auto& r) { r.set_node_ids("x"); }},
       {"node_ids: 65537", [](auto& r) { r.set_node_ids(std::string(65'537 * 16, 'x')); }},
       {"prefix", [](auto& r) { *r.mutable_prefix() = GoodPrefix(); }},
       {"first_block", [](auto& r) { r.set_first_block(1); }},
       {"block_count", [](auto& r) { r.set_block_count(1); }},
       {"order", [](auto& r) { r.set_order(static_cast<v1::FetchOrder>(7)); }},
       {"encoding", [](auto& r) { r.set_encoding(static_cast<v1::Encoding>(7)); }},
       {"min_quality", [](auto& r) { r.set_min_quality(static_cast<v1::Quality>(-1)); }},
       {"release_lease_id", [](auto& r) { r.set_release_lease_id("x"); }},
       {"accept_referenced", [](auto& r) { r.set_accept_referenced(true); }}});
  good.set_encoding(v1::ENCODING_FRAME);
  ExpectRefused<v1::FetchRequest>(good, check,
                                  {{"first_layer", [](auto& r) { r.set_first_layer(1); }},
                                   {"layer_count", [](auto& r) { r.set_layer_count(1); }}});
}

TEST(RequestChecksTest, FetchByPrefix) {
  const RequestLimits limits;
  const auto check = [&limits](const v1::FetchRequest& r) { return CheckFetch(r, limits); };
  v1::FetchRequest good;
  *good.mutable_prefix() = GoodPrefix();
  ExpectRefused<v1::FetchRequest>(
      good, check,
      {{"model_id", [](auto& r) { r.mutable_prefix()->clear_model_id(); }},
       {"prefix.model_id", [](auto& r) { r.set_model_id(std::string(16, 'o')); }},
       {"block_count", [](auto& r) { r.set_block_count(65'537); }}});
  for (const auto& bad : BadPrefixes()) {
    if (std::string(bad.field) == "model_id") continue;
    SCOPED_TRACE(bad.field);
    v1::FetchRequest request = good;
    bad.spoil(*request.mutable_prefix());
    EXPECT_THAT(std::string(check(request).message()),
                StartsWith("prefix." + std::string(bad.field)));
  }
}

TEST(RequestChecksTest, Announce) {
  const RequestLimits limits;
  const auto check = [&limits](const v1::PutAnnounce& a) { return CheckAnnounce(a, limits); };
  v1::PutAnnounce good;
  *good.mutable_prefix() = GoodPrefix();
  good.mutable_probabilities()->set_log_probs(std::string(32, '\0'));
  good.mutable_probabilities()->set_top_k(2);
  good.mutable_probabilities()->set_top_token_ids(std::string(128, '\0'));
  good.mutable_probabilities()->set_top_log_probs(std::string(64, '\0'));
  ExpectRefused<v1::PutAnnounce>(
      good, check,
      {{"prefix: missing", [](auto& a) { a.clear_prefix(); }},
       {"session_id", [](auto& a) { a.set_session_id(std::string(65, 's')); }},
       {"probabilities.log_probs", [](auto& a) { a.mutable_probabilities()->set_log_probs("xx"); }},
       {"probabilities.top_k", [](auto& a) { a.mutable_probabilities()->set_top_k(65); }},
       {"probabilities.top_token_ids",
        [](auto& a) { a.mutable_probabilities()->set_top_token_ids("xxxx"); }},
       {"probabilities.top_log_probs",
        [](auto& a) { a.mutable_probabilities()->clear_top_log_probs(); }},
       {"restored_quality", [](auto& a) { a.set_restored_quality(static_cast<v1::Quality>(99)); }},
       {"first_reused_block: 2",
        [](auto& a) {
          a.set_restored_blocks(3);
          a.set_first_reused_block(2);
        }},
       {"quality", [](auto& a) { a.set_quality(static_cast<v1::Quality>(6)); }},
       {"beside_exact", [](auto& a) { a.set_beside_exact(true); }},
       {"beside_exact",
        [](auto& a) {
          a.set_beside_exact(true);
          a.set_quality(v1::QUALITY_EXACT);
        }},
       {"encoding", [](auto& a) { a.set_encoding(static_cast<v1::Encoding>(99)); }},
       {"want_references",
        [](auto& a) {
          a.set_want_references(true);
          a.set_quality(v1::QUALITY_HIGH);
        }},
       {"want_references",
        [](auto& a) {
          a.set_want_references(true);
          a.set_encoding(v1::ENCODING_FRAME);
        }},
       {"compute_seconds_per_token", [](auto& a) { a.set_compute_seconds_per_token(-1); }},
       {"compute_seconds_per_token", [](auto& a) { a.set_compute_seconds_per_token(1e-10); }},
       {"compute_seconds_per_token", [](auto& a) { a.set_compute_seconds_per_token(1001); }},
       {"compute_seconds_per_token",
        [](auto& a) { a.set_compute_seconds_per_token(std::nan("")); }},
       {"priority", [](auto& a) { a.set_priority(16); }}});
  for (const auto& bad : BadPrefixes()) {
    SCOPED_TRACE(bad.field);
    v1::PutAnnounce announce = good;
    bad.spoil(*announce.mutable_prefix());
    EXPECT_THAT(std::string(check(announce).message()),
                StartsWith("prefix." + std::string(bad.field)));
  }
}

TEST(RequestChecksTest, ChunksMustMeetTheBytesThatCame) {
  v1::PutRequest request;
  request.add_chunks()->set_bytes(10);
  request.add_chunks()->set_bytes(20);
  EXPECT_TRUE(CheckChunks(request, 30).ok());
  EXPECT_THAT(std::string(CheckChunks(request, 31).message()), StartsWith("data"));
  request.mutable_chunks(1)->set_bytes(0);
  EXPECT_THAT(std::string(CheckChunks(request, 10).message()), StartsWith("chunks[1].bytes"));
  request.mutable_chunks(1)->set_bytes(kChunkBytesMax + 1);
  EXPECT_THAT(std::string(CheckChunks(request, 10).message()), StartsWith("chunks[1].bytes"));
  EXPECT_TRUE(CheckChunks(v1::PutRequest(), 0).ok());
}

TEST(RequestChecksTest, EveryQualityOfTheVocabularyIsTaken) {
  const RequestLimits limits;
  v1::PutAnnounce announce;
  *announce.mutable_prefix() = GoodPrefix();
  for (int quality = 0; quality <= 5; ++quality) {
    announce.set_quality(static_cast<v1::Quality>(quality));
    announce.set_restored_quality(static_cast<v1::Quality>(quality));
    EXPECT_TRUE(CheckAnnounce(announce, limits).ok()) << quality;
  }
}

TEST(RequestChecksTest, PutProfile) {
  v1::PutProfileRequest first;
  first.set_total_bytes(3000);
  first.set_expected_profile_id(kId);
  first.add_chunks()->set_bytes(10);
  first.add_chunks()->set_bytes(20);
  first.mutable_chunks(1)->set_offset(10);
  ExpectRefused<v1::PutProfileRequest>(
      first, [](const auto& r) { return CheckPutProfile(r, 30, /*is_first=*/true, 0); },
      {{"total_bytes", [](auto& r) { r.clear_total_bytes(); }},
       {"expected_profile_id", [](auto& r) { r.set_expected_profile_id("x"); }},
       {"chunks[0].bytes", [](auto& r) { r.mutable_chunks(0)->set_bytes(0); }},
       {"data", [](auto& r) { r.mutable_chunks(0)->set_bytes(11); }},
       {"chunks[0].offset", [](auto& r) { r.mutable_chunks(0)->set_offset(1); }},
       {"chunks[1].offset", [](auto& r) { r.mutable_chunks(1)->set_offset(11); }}});
  v1::PutProfileRequest later;
  later.add_chunks()->set_bytes(10);
  later.mutable_chunks(0)->set_offset(30);
  ExpectRefused<v1::PutProfileRequest>(
      later, [](const auto& r) { return CheckPutProfile(r, 10, /*is_first=*/false, 30); },
      {{"total_bytes", [](auto& r) { r.set_total_bytes(1); }},
       {"expected_profile_id", [](auto& r) { r.set_expected_profile_id(kId); }},
       {"chunks[0].offset", [](auto& r) { r.mutable_chunks(0)->set_offset(0); }}});
  EXPECT_TRUE(CheckProfileId(kId).ok());
  EXPECT_THAT(std::string(CheckProfileId("x").message()), StartsWith("profile_id"));
}

TEST(RequestChecksTest, SelectionNamesExactlyOneThing) {
  const RequestLimits limits;
  const auto check = [&limits](const v1::Selection& s) {
    return CheckSelection(s, SelectionScope::kPathOrWide, limits);
  };
  v1::Selection good;
  good.set_node_id(kId);
  ExpectRefused<v1::Selection>(good, check,
                               {{"selection: 0", [](auto& s) { s.clear_node_id(); }},
                                {"selection: 2", [](auto& s) { s.set_all(true); }},
                                {"selection: 2", [](auto& s) { s.set_session_id("s"); }},
                                {"selection.node_id", [](auto& s) { s.set_node_id("x"); }}});
  v1::Selection wide;
  wide.set_model_id(kId);
  EXPECT_TRUE(check(wide).ok());
  EXPECT_FALSE(CheckSelection(wide, SelectionScope::kPath, limits).ok());
  wide.set_model_id("x");
  EXPECT_FALSE(check(wide).ok());
  v1::Selection path;
  *path.mutable_prefix() = GoodPrefix();
  EXPECT_TRUE(CheckSelection(path, SelectionScope::kPath, limits).ok());
}

TEST(RequestChecksTest, PinsRetentionAndTheRest) {
  const RequestLimits limits;
  v1::PinRequest pin;
  pin.mutable_selection()->set_node_id(kId);
  pin.set_seconds(1);
  ExpectRefused<v1::PinRequest>(
      pin, [&limits](const auto& r) { return CheckPin(r, limits); },
      {{"seconds", [](auto& r) { r.set_seconds(0); }},
       {"pin_id: excludes", [](auto& r) { r.set_pin_id(kId); }},
       {"pin_id",
        [](auto& r) {
          r.clear_selection();
          r.set_pin_id("x");
        }},
       {"selection.unused_for_seconds",
        [](auto& r) { r.mutable_selection()->set_unused_for_seconds(1); }},
       {"selection", [](auto& r) { r.clear_selection(); }}});

  v1::SetRetentionRequest retention;
  retention.mutable_selection()->set_all(true);
  ExpectRefused<v1::SetRetentionRequest>(
      retention, [&limits](const auto& r) { return CheckSetRetention(r, limits); },
      {{"priority", [](auto& r) { r.set_priority(16); }},
       {"selection.unused_for_seconds",
        [](auto& r) { r.mutable_selection()->set_unused_for_seconds(1); }},
       {"quality", [](auto& r) { r.set_quality(static_cast<v1::Quality>(6)); }},
       {"selection", [](auto& r) { r.clear_selection(); }}});

  v1::SimilarRequest similar;
  *similar.mutable_prefix() = GoodPrefix();
  similar.set_session_count(64);
  std::vector<BadField<v1::SimilarRequest>> bad_similar = {
      {"prefix: missing", [](auto& r) { r.clear_prefix(); }},
      {"prefix.tokens: 262145",
       [](auto& r) { r.mutable_prefix()->set_tokens(std::string(262'145 * 4, 'x')); }},
      {"session_count", [](auto& r) { r.set_session_count(65); }}};
  std::vector<std::string> names;  // alive until the check
  for (const auto& bad : BadPrefixes()) names.push_back(std::string("prefix.") + bad.field);
  std::size_t next_name = 0;
  for (const auto& bad : BadPrefixes()) {
    bad_similar.push_back(
        {names[next_name++].c_str(), [spoil = bad.spoil](auto& r) { spoil(*r.mutable_prefix()); }});
  }
  ExpectRefused<v1::SimilarRequest>(
      similar, [&limits](const auto& r) { return CheckSimilar(r, limits); }, bad_similar);
  RequestLimits few_tokens;
  few_tokens.tokens_max = 15;
  EXPECT_THAT(std::string(CheckSimilar(similar, few_tokens).message()),
              StartsWith("prefix.tokens: 16"));

  v1::WatchRequest watch;
  ExpectRefused<v1::WatchRequest>(watch, CheckWatch,
                                  {{"model_id", [](auto& r) { r.set_model_id("x"); }}});

  v1::ListNodesRequest list;
  list.set_model_id(kId);
  ExpectRefused<v1::ListNodesRequest>(list, CheckListNodes,
                                      {{"model_id", [](auto& r) { r.clear_model_id(); }},
                                       {"parent_id", [](auto& r) { r.set_parent_id("x"); }},
                                       {"page_token", [](auto& r) { r.set_page_token("x"); }},
                                       {"page_size", [](auto& r) { r.set_page_size(10'001); }}});

  v1::DescribeNodeRequest describe;
  describe.set_node_id(kId);
  ExpectRefused<v1::DescribeNodeRequest>(
      describe, [&limits](const auto& r) { return CheckDescribeNode(r, limits); },
      {{"node_id", [](auto& r) { r.set_node_id("x"); }},
       {"node_id: set exactly", [](auto& r) { r.clear_node_id(); }},
       {"node_id: set exactly", [](auto& r) { *r.mutable_prefix() = GoodPrefix(); }}});

  ExpectRefused<v1::ListGroupsRequest>({}, CheckListGroups,
                                       {{"page_token", [](auto& r) { r.set_page_token("x"); }},
                                        {"page_size", [](auto& r) { r.set_page_size(10'001); }}});
  v1::DescribeGroupRequest group;
  group.set_group_id(kId);
  ExpectRefused<v1::DescribeGroupRequest>(
      group, CheckDescribeGroup,
      {{"group_id", [](auto& r) { r.clear_group_id(); }},
       {"branches_max", [](auto& r) { r.set_branches_max(10'001); }}});
  v1::GetGroupRequest group_of;
  group_of.set_node_id(kId);
  ExpectRefused<v1::GetGroupRequest>(group_of, CheckGetGroup,
                                     {{"node_id", [](auto& r) { r.set_node_id("x"); }}});

  v1::RegisterModelRequest model;
  model.mutable_spec();
  ExpectRefused<v1::RegisterModelRequest>(
      model, CheckRegisterModel,
      {{"spec", [](auto& r) { r.clear_spec(); }},
       {"expected_model_id", [](auto& r) { r.set_expected_model_id("x"); }}});
}

}  // namespace
}  // namespace kvtrie
