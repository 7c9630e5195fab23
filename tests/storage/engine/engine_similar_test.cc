#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "storage/trie/surprisal.h"
#include "tests/storage/engine/engine_fixture.h"

namespace kvtrie {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::UnorderedElementsAre;
using Tokens = std::vector<TokenId>;

Tokens Joined(std::initializer_list<Tokens> parts) {
  Tokens all;
  for (const Tokens& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

class EngineSimilarTest : public EngineFixture {
 protected:
  void PutSession(const Tokens& tokens, std::string_view name, std::string_view salt = {},
                  double bits_per_token = 0) {
    PutAnnouncement put;
    put.path = PathOf(tokens, salt);
    put.session_id = name;
    const auto half =
        std::bit_cast<std::uint16_t>(static_cast<_Float16>(-bits_per_token * std::log(2.0)));
    const std::vector<std::uint16_t> halves(tokens.size(), half);
    if (bits_per_token > 0) {
      put.probabilities.log_probs = {reinterpret_cast<const char*>(halves.data()),
                                     2 * halves.size()};
    }
    for (const auto& result : Put(put)) ASSERT_TRUE(result.ok()) << result.status();
  }

  SimilarResult Similar(const Tokens& tokens, std::uint32_t count = 8, std::string_view salt = {}) {
    const auto result =
        engine_->Similar(tenant_, {.path = PathOf(tokens, salt), .session_count = count});
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *result : SimilarResult{};
  }
  // The names of the answer, in order; of each session the latest.
  std::vector<std::string> Names(const Tokens& tokens, std::string_view salt = {}) {
    std::vector<std::string> names;
    for (const NearSession& session : Similar(tokens, 8, salt).sessions) {
      names.push_back(session.session_ids.empty() ? "" : session.session_ids.front());
    }
    return names;
  }

  const Tokens system_ = SessionTokens(1, 64);
  const Tokens document_ = SessionTokens(2, 300);
};

TEST_F(EngineSimilarTest, NamesTheNearestSessionsAndWhatTheyShare) {
  Open();
  PutSession(Joined({system_, SessionTokens(10, 96)}), "same prompt");
  PutSession(Joined({SessionTokens(11, 37), document_, SessionTokens(12, 47)}), "same document");
  PutSession(SessionTokens(13, 160), "stranger");
  const Tokens query = Joined({system_, SessionTokens(14, 9), document_});
  const SimilarResult found = Similar(query);
  EXPECT_EQ(found.matched_blocks, 4u);
  EXPECT_EQ(found.block_tokens, kTestBlockTokens);
  EXPECT_TRUE(found.is_complete);
  ASSERT_EQ(found.sessions.size(), 2u);

  const NearSession& by_text = found.sessions[0];
  EXPECT_THAT(by_text.session_ids, ElementsAre("same document"));
  EXPECT_EQ(by_text.blocks, (37u + 300 + 47) / 16);
  EXPECT_EQ(by_text.shared_prefix_blocks, 0u);
  ASSERT_EQ(by_text.runs.size(), 1u);
  EXPECT_EQ(by_text.runs[0].first_token, 64u + 9);
  EXPECT_EQ(by_text.runs[0].token_count, 300u);
  EXPECT_EQ(by_text.runs[0].offset, 37u % 16);
  const Tokens stored = Joined({SessionTokens(11, 37), document_, SessionTokens(12, 47)});
  EXPECT_EQ(by_text.runs[0].node, Lookup(stored).blocks[0][37 / 16].node);
  EXPECT_EQ(by_text.end, Lookup(stored).blocks[0].back().node);
  EXPECT_EQ(by_text.shared_run_tokens, 300u);
  EXPECT_DOUBLE_EQ(by_text.shared_run_bits, 300 * kPriorBitsPerToken);
  EXPECT_DOUBLE_EQ(by_text.runs[0].bits, by_text.shared_run_bits);

  const NearSession& by_prefix = found.sessions[1];
  EXPECT_THAT(by_prefix.session_ids, ElementsAre("same prompt"));
  EXPECT_EQ(by_prefix.shared_prefix_blocks, 4u);
  EXPECT_DOUBLE_EQ(by_prefix.shared_prefix_bits, 64 * kPriorBitsPerToken);
  EXPECT_THAT(by_prefix.runs, IsEmpty());

  EXPECT_EQ(Similar(query, 1).sessions.size(), 1u);
  EXPECT_EQ(engine_->Stats().similar_queries_total, 2u);
  EXPECT_EQ(engine_->Stats().similar_cut_short_total, 0u);
  EXPECT_EQ(engine_->Stats().named_sessions, 3u);
  EXPECT_GT(engine_->Stats().run_index_entries, 30u);
  ExpectSound();
}

TEST_F(EngineSimilarTest, CountsTheBitsThatTheClientSaid) {
  Open();
  PutSession(Joined({system_, SessionTokens(10, 64)}), "a", {}, 2.5);
  const SimilarResult found = Similar(Joined({system_, SessionTokens(11, 64)}));
  ASSERT_EQ(found.sessions.size(), 1u);
  EXPECT_NEAR(found.sessions[0].shared_prefix_bits, 64 * 2.5, 0.2);
}

TEST_F(EngineSimilarTest, AUnknownModelIsNotFound) {
  Open();
  PathView path = PathOf(document_);
  path.model = ModelId{};
  EXPECT_TRUE(absl::IsNotFound(engine_->Similar(tenant_, {.path = path}).status()));
}

TEST_F(EngineSimilarTest, OtherTenantsModelsAndSaltsNeverShow) {
  Open();
  const Tokens stored = Joined({SessionTokens(3, 16), document_});
  PutSession(stored, "salted", "salt");
  ModelSpec other_model = TestModelSpec("other");
  const ModelSpec model = spec_;
  UseModel(other_model);
  PutSession(stored, "other model");
  tenant_ = TenantId{2};
  UseModel(model);
  PutSession(stored, "other tenant");
  EXPECT_THAT(Names(document_), ElementsAre("other tenant"));
  tenant_ = kBuiltInTenant;
  UseModel(model);
  EXPECT_THAT(Names(document_), IsEmpty());
  EXPECT_THAT(Names(document_, "salt"), ElementsAre("salted"));
  EXPECT_THAT(Names(document_, "pepper"), IsEmpty());
  UseModel(other_model);
  EXPECT_THAT(Names(document_), ElementsAre("other model"));
}

// The index of runs and the names are made again of the rows.
TEST_F(EngineSimilarTest, AnswersAreTheSameAfterARestart) {
  for (const std::uint32_t block_tokens : {8u, 16u, 24u}) {
    SCOPED_TRACE(block_tokens);
    options_.data_dir = absl::StrCat(folder_.path(), "/store", block_tokens);
    spec_ = TestModelSpec();
    spec_.block_tokens = block_tokens;
    Open();
    for (const std::string_view salt : {"", "salt"}) {
      PutSession(Joined({system_, SessionTokens(10, 96)}), absl::StrCat(std::string(salt), "a"),
                 salt);
      PutSession(Joined({SessionTokens(11, 37), document_, SessionTokens(12, 43)}),
                 absl::StrCat(std::string(salt), "b"), salt);
    }
    const Tokens query = Joined({system_, SessionTokens(14, 9), document_});
    const auto ends = [&](std::string_view salt) {
      std::vector<std::pair<TrieNodeId, std::uint32_t>> all;
      for (const NearSession& session : Similar(query, 8, salt).sessions) {
        all.emplace_back(session.end, session.shared_run_tokens);
      }
      return all;
    };
    const auto before = ends("");
    const auto salted_before = ends("salt");
    ASSERT_EQ(before.size(), 2u);
    EXPECT_EQ(before[0].second, 300u);
    EXPECT_THAT(Names(query), ElementsAre("b", "a"));
    const std::uint64_t entries = engine_->Stats().run_index_entries;
    Reopen();
    EXPECT_EQ(ends(""), before);
    EXPECT_EQ(ends("salt"), salted_before);
    EXPECT_THAT(Names(query), ElementsAre("b", "a"));
    EXPECT_THAT(Names(query, "salt"), ElementsAre("saltb", "salta"));
    EXPECT_EQ(engine_->Stats().run_index_entries, entries);
    ExpectSound();
    engine_.reset();
  }
}

TEST_F(EngineSimilarTest, WhatIsDeletedIsGone) {
  Open();
  const Tokens stored = Joined({SessionTokens(11, 37), document_, SessionTokens(12, 47)});
  PutSession(stored, "a");
  PutSession(Joined({system_, SessionTokens(10, 96)}), "b");
  const Tokens query = Joined({system_, document_});
  EXPECT_THAT(Names(query), ElementsAre("a", "b"));
  AwaitNoOpenPuts();
  ASSERT_TRUE(engine_->Delete(tenant_, SelectionOf(PathOf(std::span(stored).first(16)))).ok());
  EXPECT_THAT(Names(query), ElementsAre("b"));
  EXPECT_EQ(engine_->Stats().named_sessions, 1u);
  // Its refs are used again by others.
  PutSession(SessionTokens(20, 400), "c");
  EXPECT_THAT(Names(query), ElementsAre("b"));
  EXPECT_THAT(Names(document_), IsEmpty());
  // A session that is deleted by its name: its blocks stay where others need them.
  PutSession(Joined({system_, SessionTokens(10, 96), SessionTokens(21, 32)}), "d");
  AwaitNoOpenPuts();
  Selection by_name;
  by_name.session_id = "b";
  ASSERT_TRUE(engine_->Delete(tenant_, by_name).ok());
  EXPECT_THAT(Names(query), ElementsAre("d"));
  ExpectSound();
}

TEST_F(EngineSimilarTest, ASessionThatGrowsEndsAtItsLastBlock) {
  Open();
  const Tokens chat = Joined({system_, SessionTokens(10, 96)});
  const Tokens longer = Joined({chat, SessionTokens(11, 64)});
  PutSession(chat, "chat");
  PutSession(longer, "chat");
  PutSession(longer, "copy");  // nothing of it is new
  const SimilarResult found = Similar(longer);
  ASSERT_EQ(found.sessions.size(), 1u);
  EXPECT_THAT(found.sessions[0].session_ids, ElementsAre("copy", "chat"));
  EXPECT_EQ(found.sessions[0].shared_prefix_blocks, 14u);
  EXPECT_EQ(engine_->Stats().named_sessions, 2u);
}

// The token cache holds a tenth of what is stored; the rest is read from rows, and compared.
TEST_F(EngineSimilarTest, TokensThatAreNotInMemoryAreRead) {
  options_.token_cache_bytes = std::uint64_t{1} << 20;
  blocks_per_write_ = 256;
  Open();
  PutSession(Joined({SessionTokens(11, 37), document_, SessionTokens(12, 47)}), "a");
  for (std::uint64_t i = 0; i < 5; ++i) MustPut(SessionTokens(100 + i, 80'000));
  const std::uint64_t misses = engine_->Stats().token_cache_misses_total;
  const SimilarResult found = Similar(Joined({SessionTokens(14, 9), document_}));
  ASSERT_EQ(found.sessions.size(), 1u);
  EXPECT_THAT(found.sessions[0].session_ids, ElementsAre("a"));
  EXPECT_EQ(found.sessions[0].shared_run_tokens, 300u);
  EXPECT_GT(engine_->Stats().token_cache_misses_total, misses);
}

TEST_F(EngineSimilarTest, SearchesGoOnBesidePutsAndRemovals) {
  Open();
  PutSession(Joined({SessionTokens(11, 37), document_, SessionTokens(12, 47)}), "stays");
  std::atomic<bool> done{false};
  std::vector<std::thread> readers;
  for (std::uint64_t reader = 0; reader < 3; ++reader) {
    readers.emplace_back([this, reader, &done] {
      const Tokens query = Joined({SessionTokens(50 + reader, 9), document_});
      do {
        const SimilarResult found = Similar(query);
        ASSERT_FALSE(found.sessions.empty());
        EXPECT_EQ(found.sessions[0].shared_run_tokens, 300u);
      } while (!done);
    });
  }
  for (std::uint64_t i = 0; i < 30; ++i) {
    const Tokens comes =
        Joined({SessionTokens(100 + i, 23), document_, SessionTokens(200 + i, 61)});
    PutSession(comes, absl::StrCat("comes ", i));
    AwaitNoOpenPuts();
    const auto first_block = PathOf(std::span(comes).first(16));
    EXPECT_TRUE(engine_->Delete(tenant_, SelectionOf(first_block)).ok());
  }
  done = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(engine_->Stats().named_sessions, 1u);
  ExpectSound();
}

TEST_F(EngineSimilarTest, WithoutARunIndexPrefixesAreAllThereIs) {
  options_.run_index_bytes = 0;
  Open();
  PutSession(Joined({system_, SessionTokens(10, 96)}), "same prompt");
  PutSession(Joined({SessionTokens(11, 37), document_}), "same document");
  const Tokens query = Joined({system_, document_});
  EXPECT_THAT(Names(query), ElementsAre("same prompt"));
  Reopen();
  EXPECT_THAT(Names(query), ElementsAre("same prompt"));
  EXPECT_EQ(engine_->Stats().run_index_entries, 0u);
}

}  // namespace
}  // namespace kvtrie
