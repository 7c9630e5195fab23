// KV of the same text under another prefix, from a client through the server's own program and
// back.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "client/client.h"
#include "storage/codec/raw_kv.h"
#include "tests/client/server_process.h"

namespace kvtrie {
namespace {

using testing::HasSubstr;
using Tokens = std::vector<TokenId>;

constexpr std::uint32_t kBlockTokens = 16;
constexpr std::uint32_t kLayers = 2;
constexpr std::uint32_t kHeads = 2;
constexpr std::uint32_t kHeadDim = 32;
constexpr std::size_t kRowComponents = kHeads * kHeadDim;

ModelSpec Spec() {
  ModelSpec spec;
  spec.name = spec.weights_revision = spec.tokenizer_digest = "text-reuse-test";
  spec.dtype = DType::kFloat32;
  spec.kv_groups = {{.layer_runs = {{kLayers, kHeads, kHeadDim, kHeadDim}}, .window_tokens = 0}};
  spec.rope = {
      .pairing = RopePairing::kHalfSplit, .theta = 10'000, .rotary_dims = 0, .scaling = {}};
  spec.block_tokens = kBlockTokens;
  return spec;
}

Tokens Text(std::uint64_t seed, std::size_t count) {
  std::mt19937_64 random(seed);
  Tokens tokens(count);
  for (TokenId& token : tokens) token = static_cast<TokenId>(random() % 50'000);
  return tokens;
}

Tokens Joined(std::initializer_list<Tokens> parts) {
  Tokens all;
  for (const Tokens& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

// KV of a model in which a token's K before RoPE and its V depend on the token alone: what is
// reused is then what would have been computed, within the rounding of the rotation.
std::vector<std::byte> BlockOf(std::span<const TokenId> tokens, std::uint32_t first_position) {
  static const RawKv raw_kv(KvGeometry(Spec()), Spec().rope);
  std::vector<std::byte> raw(raw_kv.geometry().raw_block_bytes());
  const RopeAngles angles = raw_kv.AnglesAt(first_position);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
      std::vector<float> rows;
      for (const TokenId token : tokens) {
        std::mt19937_64 random(token * 8 + layer * 2 + static_cast<unsigned>(kind));
        std::normal_distribution<float> normal;
        for (std::size_t i = 0; i < kRowComponents; ++i) rows.push_back(normal(random));
      }
      rows.resize(kBlockTokens * kRowComponents);
      raw_kv.WriteRows(rows, layer, kind, angles, raw);
    }
  }
  return raw;
}

std::vector<std::vector<std::byte>> BlocksOf(const Tokens& tokens) {
  std::vector<std::vector<std::byte>> blocks;
  for (std::size_t at = 0; at < tokens.size(); at += kBlockTokens) {
    const std::size_t count = std::min<std::size_t>(kBlockTokens, tokens.size() - at);
    blocks.push_back(BlockOf(std::span(tokens).subspan(at, count), static_cast<std::uint32_t>(at)));
  }
  return blocks;
}

class TextReuseTest : public testing::Test {
 protected:
  void Connect(const std::vector<std::string>& settings) {
    client_.reset();
    server_ = std::make_unique<ServerProcess>(settings);
    ClientOptions options;
    options.targets = {server_->listen};
    client_ = *Client::Create(options);
    model_ = client_->RegisterModel(Spec())->id;
  }

  PutReport Put(const Tokens& tokens, const std::vector<std::vector<std::byte>>& raw,
                std::optional<std::uint32_t> first_reused_block = {}) {
    std::vector<std::span<const std::byte>> blocks(raw.begin(), raw.end());
    blocks.resize(tokens.size() / kBlockTokens);
    PutPath path;
    path.path.model = model_;
    path.path.tokens = tokens;
    path.blocks = blocks;
    path.first_reused_block = first_reused_block;
    return client_->Put({&path, 1})[0];
  }
  v1::LookupResult Lookup(const Tokens& tokens, bool allow, Quality min_quality = Quality::kExact) {
    LookupOptions options;
    options.min_quality = min_quality;
    options.allow_text_reuse = allow;
    options.lease = std::chrono::seconds(30);
    const auto found = client_->Lookup(model_, tokens, options);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.value_or(v1::LookupResult{});
  }

  // Memory of a prompt's blocks, each byte as it was before anything came.
  struct Prompt {
    explicit Prompt(const Tokens& of)
        : tokens(of),
          raw(BlocksOf(of).size(),
              std::vector<std::byte>(KvGeometry(Spec()).raw_block_bytes(), std::byte{0x5a})) {
      for (auto& block : raw) blocks.emplace_back(block);
    }
    RunsTarget target() const { return {.tokens = tokens, .blocks = blocks, .first_block = 0}; }

    const Tokens tokens;
    std::vector<std::vector<std::byte>> raw;
    std::vector<std::span<std::byte>> blocks;
  };

  // Reused tokens have the KV that the model computes there; nothing else was written.
  void ExpectReusedAsComputed(const Prompt& prompt, const RunsReport& report) {
    const RawKv raw_kv(KvGeometry(Spec()), {});
    const auto computed = BlocksOf(prompt.tokens);
    const RopeAngles none = raw_kv.AnglesAt(0);
    std::vector<float> rows(kBlockTokens * kRowComponents);
    std::vector<float> wanted(rows.size());
    ASSERT_EQ(report.reused.size(), prompt.tokens.size());
    for (std::size_t block = 0; block < computed.size(); ++block) {
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
          raw_kv.ReadRows(prompt.raw[block], layer, kind, none, rows);
          raw_kv.ReadRows(computed[block], layer, kind, none, wanted);
          float untouched;
          std::memset(&untouched, 0x5a, sizeof(untouched));
          for (std::size_t i = 0; i < rows.size(); ++i) {
            const std::size_t token = block * kBlockTokens + i / kRowComponents;
            const bool reused = token < prompt.tokens.size() && report.reused[token];
            if (reused) {
              ASSERT_NEAR(rows[i], wanted[i], kind == KvKind::kV ? 0 : 2e-5) << "token " << token;
            } else {
              ASSERT_EQ(rows[i], untouched) << "token " << token;
            }
          }
        }
      }
    }
  }

  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<Client> client_;
  ModelId model_;
  const Tokens system_ = Text(1, 48);
  const Tokens document_ = Text(2, 300);
};

TEST_F(TextReuseTest, ADocumentBehindAnotherPrefixComesAtItsNewPlace) {
  Connect({"--text_reuse=all"});
  const Tokens stored = Joined({Text(3, 37), document_, Text(4, 47)});
  ASSERT_TRUE(Put(stored, BlocksOf(stored)).all_stored());
  ASSERT_TRUE(Put(system_, BlocksOf(system_)).all_stored());
  const Tokens prompt_tokens = Joined({system_, Text(5, 9), document_, Text(6, 30)});

  const v1::LookupResult found = Lookup(prompt_tokens, /*allow=*/true);
  EXPECT_EQ(found.matched_blocks(), 3u);
  EXPECT_EQ(found.text_reuse_forbidden(), v1::TEXT_REUSE_FORBIDDEN_UNSPECIFIED);
  ASSERT_EQ(found.reusable_runs_size(), 1);
  const v1::ReusableRun& run = found.reusable_runs(0);
  EXPECT_EQ(run.first_token(), 48u + 9);
  EXPECT_EQ(run.token_count(), 300u);
  EXPECT_EQ(run.first_position(), 37u);
  EXPECT_EQ(run.node_offset(), 37u % 16);
  EXPECT_EQ(run.source_quality(), v1::QUALITY_EXACT);
  EXPECT_GT(run.fetch_bytes(), 300 * 2 * kLayers * kRowComponents * 4);

  for (const std::uint32_t skip : {0u, 7u, 32u}) {
    SCOPED_TRACE(skip);
    Prompt prompt(prompt_tokens);
    const auto report = client_->FetchRuns(model_, found, prompt.target(), {.skip_tokens = skip});
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->reused_tokens, 300u - skip);
    EXPECT_EQ(report->first_reused_block, (57 + skip) / 16);
    EXPECT_TRUE(report->runs[0].status.ok()) << report->runs[0].status;
    for (std::size_t token = 0; token < prompt_tokens.size(); ++token) {
      EXPECT_EQ(report->reused[token], token >= 57 + skip && token < 357) << token;
    }
    ExpectReusedAsComputed(prompt, *report);
  }
}

TEST_F(TextReuseTest, NobodyHasItWhoDoesNotAskOrMayNot) {
  const Tokens stored = Joined({Text(3, 37), document_});
  const Tokens query = Joined({system_, document_});
  Connect({});  // as servers are
  ASSERT_TRUE(Put(stored, BlocksOf(stored)).all_stored());
  EXPECT_EQ(Lookup(query, true).text_reuse_forbidden(), v1::TEXT_REUSE_FORBIDDEN_SERVER);
  EXPECT_EQ(Lookup(query, true).reusable_runs_size(), 0);
  EXPECT_EQ(Lookup(stored, true).matched_blocks(),
            stored.size() / 16);  // the exact prefix, as ever
  const PutReport refused = Put(query, BlocksOf(query), 3);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.blocks[0].status)) << refused.blocks[0].status;
  EXPECT_THAT(std::string(refused.blocks[0].status.message()), HasSubstr("first_reused_block"));

  Connect({"--text_reuse=7,9"});
  EXPECT_EQ(Lookup(query, true).text_reuse_forbidden(), v1::TEXT_REUSE_FORBIDDEN_TENANT);
  Connect({"--text_reuse=all", "--text_reuse_forbidden_models=" + Spec().Digest().ToHex()});
  EXPECT_EQ(Lookup(query, true).text_reuse_forbidden(), v1::TEXT_REUSE_FORBIDDEN_MODEL);

  Connect({"--text_reuse=7,1"});
  ASSERT_TRUE(Put(stored, BlocksOf(stored)).all_stored());
  EXPECT_EQ(Lookup(query, false).reusable_runs_size(), 0);
  EXPECT_EQ(Lookup(query, true).reusable_runs_size(), 1);
  ModelSpec scaled = Spec();
  scaled.rope.scaling = "yarn:factor=4";
  model_ = client_->RegisterModel(scaled)->id;
  EXPECT_EQ(Lookup(query, true).text_reuse_forbidden(), v1::TEXT_REUSE_FORBIDDEN_POSITIONS);
  Prompt prompt(query);
  const auto report = client_->FetchRuns(model_, {}, prompt.target());
  EXPECT_TRUE(absl::IsFailedPrecondition(report.status())) << report.status();
  EXPECT_THAT(std::string(report.status().message()), HasSubstr("rope.scaling"));
}

TEST_F(TextReuseTest, WhatIsPutOfItIsServedAsUnratedOnly) {
  Connect({"--text_reuse=all"});
  const Tokens stored = Joined({Text(3, 37), document_, Text(4, 47)});
  ASSERT_TRUE(Put(stored, BlocksOf(stored)).all_stored());
  const Tokens query = Joined({system_, document_, Text(6, 36)});  // 24 blocks
  Prompt prompt(query);
  const auto report = client_->FetchRuns(model_, Lookup(query, true), prompt.target());
  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_EQ(report->first_reused_block, 4u);  // 16 of the document's tokens are computed
  // The caller computes what is left.
  const auto computed = BlocksOf(query);
  for (std::size_t block = 0; block < computed.size(); ++block) {
    const bool any =
        std::any_of(report->reused.begin() + static_cast<std::ptrdiff_t>(block) * 16,
                    report->reused.begin() + static_cast<std::ptrdiff_t>(block) * 16 + 16,
                    [](bool reused) { return reused; });
    if (!any) prompt.raw[block] = computed[block];
  }
  ASSERT_TRUE(Put(query, prompt.raw, report->first_reused_block).all_stored());
  EXPECT_EQ(Lookup(query, false).matched_blocks(), 4u);
  EXPECT_EQ(Lookup(query, false, Quality::kSmall).matched_blocks(), 4u);
  const v1::LookupResult unrated = Lookup(query, false, Quality::kUnrated);
  EXPECT_EQ(unrated.matched_blocks(), 24u);
  EXPECT_EQ(unrated.quality(), v1::QUALITY_UNRATED);
  // It is no source for others, whatever they take.
  const v1::LookupResult again = Lookup(Joined({Text(7, 20), document_}), true, Quality::kUnrated);
  ASSERT_EQ(again.reusable_runs_size(), 1);
  EXPECT_EQ(again.reusable_runs(0).first_position(), 37u);
  EXPECT_EQ(again.reusable_runs(0).source_quality(), v1::QUALITY_EXACT);
  // The exact path of the same text is another one.
  ASSERT_TRUE(Put(query, computed).all_stored());
  EXPECT_EQ(Lookup(query, false).matched_blocks(), 24u);
  EXPECT_EQ(Lookup(query, false).quality(), v1::QUALITY_EXACT);
}

TEST_F(TextReuseTest, QueriesOfOneRequestEachSayWhetherTheyAllowIt) {
  Connect({"--text_reuse=all"});
  const Tokens stored = Joined({Text(3, 37), document_, Text(4, 47)});
  ASSERT_TRUE(Put(stored, BlocksOf(stored)).all_stored());
  const Tokens query = Joined({system_, document_});
  v1::LookupRequest request;
  for (int i = 0; i < 5; ++i) {
    const Tokens& tokens = i % 2 == 0 ? stored : query;
    v1::LookupQuery* added = request.add_queries();
    added->add_model_ids(std::string(model_.view()));
    added->set_tokens(tokens.data(), tokens.size() * sizeof(TokenId));
    added->set_allow_text_reuse(i == 1);
  }
  request.mutable_queries(4)->set_allow_text_reuse(true);
  request.mutable_queries(4)->set_text_reuse_min_tokens(5);
  const auto answer = client_->Lookup(request);
  ASSERT_TRUE(answer.ok()) << answer.status();
  ASSERT_EQ(answer->results_size(), 5);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(answer->results(i).reusable_runs_size(), i == 1 ? 1 : 0) << i;
    EXPECT_EQ(answer->results(i).matched_blocks(), i % 2 == 0 && i != 4 ? 24u : 0u) << i;
  }
  EXPECT_THAT(answer->results(4).status().message(), HasSubstr("text_reuse_min_tokens: 5"));
}

TEST_F(TextReuseTest, AServerThatWasKilledMeanwhileServesTheSourcesAgain) {
  Connect({"--text_reuse=all"});
  const Tokens stored = Joined({Text(3, 37), document_, Text(4, 47)});
  ASSERT_TRUE(Put(stored, BlocksOf(stored)).all_stored());
  const Tokens query = Joined({system_, document_});
  const v1::LookupResult found = Lookup(query, true);
  server_->Kill();
  server_->Start();
  Prompt prompt(query);
  const auto report = client_->FetchRuns(model_, found, prompt.target(), {.skip_tokens = 0});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->reused_tokens, 300u) << report->runs[0].status;
  ExpectReusedAsComputed(prompt, *report);
  EXPECT_EQ(Lookup(query, true).reusable_runs_size(), 1);
}

TEST_F(TextReuseTest, SourcesThatWentAreLeftToTheCaller) {
  Connect({"--text_reuse=all"});
  const Tokens stored = Joined({Text(3, 32), document_, Text(4, 52)});
  const PutReport put = Put(stored, BlocksOf(stored));
  ASSERT_TRUE(put.all_stored());
  const Tokens query = Joined({system_, document_});
  const v1::LookupResult found = Lookup(query, true);
  v1::DeleteRequest gone;
  gone.mutable_selection()->set_node_id(std::string(put.blocks[10].node.view()));
  ASSERT_TRUE(client_->Delete(gone).ok());
  Prompt prompt(query);
  const auto report = client_->FetchRuns(model_, found, prompt.target(), {.skip_tokens = 0});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->reused_tokens, (10u - 2) * 16);
  EXPECT_TRUE(absl::IsNotFound(report->runs[0].status)) << report->runs[0].status;
  ExpectReusedAsComputed(prompt, *report);
}

}  // namespace
}  // namespace kvtrie
