// KV at a level below exact, from a client through the server's own program and back, with a real
// profile: by clients that decode and by ones that leave it to the server.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/client.h"
#include "storage/codec/frame_codec.h"
#include "storage/codec/profile_codec.h"
#include "storage/codec/rope_shift.h"
#include "tests/client/server_process.h"
#include "tests/storage/codec/plain_profile_bytes.h"
#include "tests/storage/codec/shared_text.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

constexpr std::size_t kBlocks = 40;

// One session's KV.
struct Session {
  explicit Session(std::uint64_t seed, std::size_t block_count = kBlocks)
      : text(MakeText(SectionedSpec(), static_cast<std::uint32_t>(16 * block_count), seed)) {
    for (std::size_t i = 0; i < block_count; ++i) {
      raw.push_back(CutBlock(SectionedSpec(), text, static_cast<std::uint32_t>(16 * i)));
    }
    blocks.assign(raw.begin(), raw.end());
  }

  SyntheticText text;
  std::vector<std::vector<std::byte>> raw;
  std::vector<std::span<const std::byte>> blocks;
};

struct Fetched {
  std::vector<std::vector<std::byte>> raw;
  FetchReport report;
};

class CodedClientTest : public ::testing::Test {
 protected:
  CodedClientTest()
      : spec_(SectionedSpec()),
        profile_(ProfileBytes(PlainProfile(spec_))),
        profile_id_(ProfileIdOf(profile_)) {}

  std::unique_ptr<Client> Connect(Coding coding, int threads = 1, Lane lane = Lane::kGrpc) {
    ClientOptions options;
    options.targets = {server_.listen};
    options.lane = lane;
    options.coding = coding;
    options.coding_threads = threads;
    auto client = Client::Create(options);
    EXPECT_TRUE(client.ok()) << client.status();
    const auto model = (*client)->RegisterModel(spec_);
    EXPECT_TRUE(model.ok()) << model.status();
    model_ = model->id;
    return *std::move(client);
  }
  std::unique_ptr<Client> ConnectWithProfile(Coding coding = Coding::kInProcess) {
    auto client = Connect(coding);
    EXPECT_TRUE(client->PutProfile(profile_).ok());
    return Connect(coding);
  }

  PutPath PathOf(const Session& session, Quality quality) const {
    PutPath path;
    path.path.model = model_;
    path.path.tokens = session.text.tokens;
    path.blocks = session.blocks;
    path.quality = quality;
    return path;
  }
  PutReport Put(Client& client, const Session& session, Quality quality) {
    const PutPath path = PathOf(session, quality);
    return client.Put({&path, 1})[0];
  }

  std::vector<TrieNodeId> Find(Client& client, const Session& session, Quality min_quality) {
    const auto found = client.Lookup(model_, session.text.tokens, {.min_quality = min_quality});
    EXPECT_TRUE(found.ok()) << found.status();
    std::vector<TrieNodeId> nodes(found.ok() ? found->matched_blocks() : 0);
    if (!nodes.empty()) {
      std::memcpy(nodes.data(), found->blocks(0).node_ids().data(), nodes.size() * 16);
    }
    return nodes;
  }
  Fetched Fetch(Client& client, const Session& session, const std::vector<TrieNodeId>& nodes,
                FetchOptions options) {
    Fetched fetched;
    const std::size_t block_bytes = KvGeometry(spec_).raw_block_bytes();
    fetched.raw.assign(nodes.size(), std::vector<std::byte>(block_bytes, std::byte{0xa5}));
    std::vector<FetchTarget> targets;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      targets.push_back({nodes[i], fetched.raw[i],
                         std::span(session.text.tokens).subspan(16 * i, 16),
                         static_cast<std::uint32_t>(16 * i)});
    }
    fetched.report = client.Fetch(model_, targets, options);
    return fetched;
  }
  Fetched FetchAt(Client& client, const Session& session, Quality quality) {
    return Fetch(client, session, Find(client, session, Quality::kUnrated),
                 {.min_quality = quality});
  }

  // What the codec makes of the session: what readers are to get.
  std::vector<std::vector<std::byte>> Reference(const Session& session, Quality quality) const {
    const FrameCodec codec(spec_, std::shared_ptr<const ResidualCodec>(
                                      CodecOfProfile(spec_, profile_id_, profile_).value()));
    std::vector<BlockToEncode> blocks;
    for (std::size_t i = 0; i < session.raw.size(); ++i) {
      blocks.push_back({.first_position = static_cast<std::uint32_t>(16 * i),
                        .session_tokens = static_cast<std::uint32_t>(session.text.tokens.size()),
                        .tokens = std::span(session.text.tokens).subspan(16 * i, 16),
                        .raw = session.raw[i]});
    }
    const auto frames = codec.Encode(blocks, quality).value();
    std::vector<std::vector<std::byte>> decoded(frames.size(), session.raw[0]);
    std::vector<FrameToDecode> to_decode;
    for (std::size_t i = 0; i < frames.size(); ++i) {
      to_decode.push_back(
          {FrameView::Parse(frames[i].bytes).value(), blocks[i].tokens, decoded[i]});
    }
    EXPECT_TRUE(codec.Decode(to_decode).ok());
    return decoded;
  }

  std::filesystem::path ProfileFolder() const { return server_.folder() + "/store/profiles"; }

  const ModelSpec spec_;
  const std::vector<std::byte> profile_;
  const ProfileId profile_id_;
  ServerProcess server_{{"--text_reuse=all"}};
  ModelId model_;
};

TEST_F(CodedClientTest, WhatIsPutAtHighIsReadTheSameByAllAfterAKill) {
  const Session session(11);
  const auto writer = ConnectWithProfile();
  const PutReport put = Put(*writer, session, Quality::kHigh);
  ASSERT_TRUE(put.all_stored()) << put.blocks[0].status;
  std::uint64_t frame_bytes = 0;
  for (const PutBlockReport& block : put.blocks) {
    EXPECT_EQ(block.codec, CodecId::kResidual);
    EXPECT_EQ(block.quality, Quality::kHigh);
    frame_bytes += block.frame_bytes;
  }
  EXPECT_LT(frame_bytes, kBlocks * session.raw[0].size() * 3 / 4);
  EXPECT_EQ(writer->stats().encoded_blocks, kBlocks);
  EXPECT_EQ(writer->stats().encoded_exact_blocks, 0u);
  // Nothing is encoded twice.
  EXPECT_EQ(Put(*writer, session, Quality::kHigh).duplicate_blocks, kBlocks);
  EXPECT_EQ(writer->stats().encoded_blocks, kBlocks);

  server_.Kill();
  server_.Start();
  const auto expected = Reference(session, Quality::kHigh);
  for (const Coding coding : {Coding::kInProcess, Coding::kServer}) {
    for (const Lane lane : {Lane::kGrpc, Lane::kShm}) {
      const auto reader = Connect(coding, /*threads=*/2, lane);
      const Fetched fetched = FetchAt(*reader, session, Quality::kSmall);
      ASSERT_EQ(fetched.report.blocks.size(), kBlocks);
      ASSERT_TRUE(fetched.report.all_loaded()) << fetched.report.blocks[0].status;
      for (std::size_t i = 0; i < kBlocks; ++i) {
        EXPECT_EQ(fetched.report.blocks[i].quality, Quality::kHigh);
        EXPECT_EQ(fetched.report.blocks[i].rung, Rung::kCoded);
        EXPECT_EQ(fetched.report.blocks[i].codec, CodecId::kResidual);
        EXPECT_EQ(fetched.report.blocks[i].bytes, expected[i].size());
        EXPECT_TRUE(fetched.raw[i] == expected[i]) << "block " << i;
      }
      EXPECT_EQ(reader->stats().decoded_blocks, coding == Coding::kInProcess ? kBlocks : 0);
    }
  }
}

TEST_F(CodedClientTest, LayersComeInOrderFromFrames) {
  const Session session(12);
  const auto writer = ConnectWithProfile();
  ASSERT_TRUE(Put(*writer, session, Quality::kHigh).all_stored());
  const auto expected = Reference(session, Quality::kHigh);
  const KvGeometry geometry(spec_);
  for (const Coding coding : {Coding::kInProcess, Coding::kServer}) {
    const auto reader = Connect(coding, /*threads=*/2);
    const auto nodes = Find(*reader, session, Quality::kHigh);
    std::vector<std::uint32_t> layers;
    FetchOptions options{.min_quality = Quality::kHigh};
    options.on_layer = [&](std::uint32_t layer, std::span<const FetchedBlock> blocks) {
      layers.push_back(layer);
      EXPECT_EQ(blocks.size(), kBlocks);
    };
    const Fetched fetched = Fetch(*reader, session, nodes, options);
    ASSERT_TRUE(fetched.report.all_loaded()) << fetched.report.blocks[0].status;
    ASSERT_EQ(layers.size(), geometry.layer_count());
    for (std::uint32_t layer = 0; layer < layers.size(); ++layer) EXPECT_EQ(layers[layer], layer);
    for (std::size_t i = 0; i < kBlocks; ++i) EXPECT_TRUE(fetched.raw[i] == expected[i]) << i;
  }
}

TEST_F(CodedClientTest, WhoWantsExactMissesWhatIsStoredCoded) {
  const Session session(13);
  const auto client = ConnectWithProfile();
  ASSERT_TRUE(Put(*client, session, Quality::kHigh).all_stored());
  EXPECT_TRUE(Find(*client, session, Quality::kExact).empty());
  const Fetched fetched = FetchAt(*client, session, Quality::kNearExact);
  EXPECT_EQ(fetched.report.loaded_blocks, 0u);
  for (const FetchedBlock& block : fetched.report.blocks) {
    EXPECT_TRUE(absl::IsNotFound(block.status)) << block.status;
  }
}

TEST_F(CodedClientTest, ExactAndHighLieBesideEachOther) {
  const Session session(14);
  const auto client = ConnectWithProfile();
  ASSERT_TRUE(Put(*client, session, Quality::kExact).all_stored());
  EXPECT_EQ(Put(*client, session, Quality::kHigh).duplicate_blocks, kBlocks);
  EXPECT_EQ(client->stats().encoded_blocks, 0u);
  PutPath beside = PathOf(session, Quality::kHigh);
  beside.beside_exact = true;
  const PutReport put = client->Put({&beside, 1})[0];
  EXPECT_TRUE(put.all_stored());
  EXPECT_EQ(put.duplicate_blocks, 0u);
  EXPECT_TRUE(FetchAt(*client, session, Quality::kHigh).raw == Reference(session, Quality::kHigh));
  EXPECT_TRUE(FetchAt(*client, session, Quality::kExact).raw == session.raw);
  // At a level that only the exact ones reach they come as frames too.
  EXPECT_TRUE(FetchAt(*client, session, Quality::kNearExact).raw == session.raw);
}

TEST_F(CodedClientTest, WithoutAProfileBlocksAreCodedWithoutLoss) {
  const Session session(15);
  const auto client = Connect(Coding::kInProcess);
  const PutReport put = Put(*client, session, Quality::kHigh);
  ASSERT_TRUE(put.all_stored()) << put.blocks[0].status;
  EXPECT_EQ(put.blocks[0].codec, CodecId::kLossless);
  EXPECT_EQ(put.blocks[0].quality, Quality::kExact);
  EXPECT_EQ(client->stats().encoded_exact_blocks, kBlocks);
  for (const Coding coding : {Coding::kInProcess, Coding::kServer}) {
    for (const Quality quality : {Quality::kHigh, Quality::kExact}) {
      const auto reader = Connect(coding);
      const Fetched fetched = FetchAt(*reader, session, quality);
      ASSERT_TRUE(fetched.report.all_loaded()) << fetched.report.blocks[0].status;
      EXPECT_EQ(fetched.report.blocks[0].codec, CodecId::kLossless);
      EXPECT_TRUE(fetched.raw == session.raw);
    }
  }
}

TEST_F(CodedClientTest, ExactBlocksArePackedWhereThatIsAskedFor) {
  const Session session(16);
  const auto client = Connect(Coding::kInProcess);
  PutPath path = PathOf(session, Quality::kExact);
  path.pack_exact = true;
  const PutReport put = client->Put({&path, 1})[0];
  ASSERT_TRUE(put.all_stored()) << put.blocks[0].status;
  EXPECT_EQ(put.blocks[0].codec, CodecId::kLossless);
  EXPECT_LT(put.blocks[0].frame_bytes, session.raw[0].size());
  EXPECT_TRUE(FetchAt(*client, session, Quality::kExact).raw == session.raw);
}

TEST_F(CodedClientTest, AClientThatLeavesCodingToTheServerStoresExact) {
  const Session session(17);
  const auto client = ConnectWithProfile(Coding::kServer);
  ASSERT_TRUE(Put(*client, session, Quality::kHigh).all_stored());
  EXPECT_EQ(client->stats().encoded_blocks, 0u);
  EXPECT_TRUE(FetchAt(*client, session, Quality::kExact).raw == session.raw);
}

TEST_F(CodedClientTest, ALostProfileIsNamedAndMayComeBack) {
  const Session session(18);
  const auto writer = ConnectWithProfile();
  ASSERT_TRUE(Put(*writer, session, Quality::kHigh).all_stored());
  EXPECT_TRUE(absl::IsFailedPrecondition(writer->DeleteProfile(profile_id_)));
  server_.Kill();
  for (const auto& file : std::filesystem::directory_iterator(ProfileFolder())) {
    std::filesystem::remove(file.path());
  }
  server_.Start();
  for (const Coding coding : {Coding::kInProcess, Coding::kServer}) {
    const auto reader = Connect(coding);
    const Fetched fetched = FetchAt(*reader, session, Quality::kHigh);
    EXPECT_EQ(fetched.report.loaded_blocks, 0u);
    ASSERT_EQ(fetched.report.blocks.size(), kBlocks);
    for (const FetchedBlock& block : fetched.report.blocks) {
      EXPECT_TRUE(absl::IsFailedPrecondition(block.status)) << block.status;
      EXPECT_THAT(std::string(block.status.message()),
                  ::testing::AllOf(HasSubstr(profile_id_.ToHex()), HasSubstr("PutProfile")));
    }
    EXPECT_EQ(reader->stats().undecodable_blocks, coding == Coding::kInProcess ? kBlocks : 0);
  }
  ASSERT_TRUE(writer->PutProfile(profile_).ok());
  for (const Coding coding : {Coding::kInProcess, Coding::kServer}) {
    const auto reader = Connect(coding);
    EXPECT_TRUE(FetchAt(*reader, session, Quality::kHigh).raw ==
                Reference(session, Quality::kHigh));
  }
}

TEST_F(CodedClientTest, AWriterWhoseProfileWasDeletedFindsTheNextOne) {
  const auto client = ConnectWithProfile();
  ASSERT_TRUE(Put(*client, Session(19, 4), Quality::kHigh).all_stored());
  v1::DeleteRequest everything;
  everything.mutable_selection()->set_all(true);
  ASSERT_TRUE(client->Delete(everything).ok());
  ASSERT_TRUE(client->DeleteProfile(profile_id_).ok());
  const Session session(20, 4);
  const PutReport refused = Put(*client, session, Quality::kHigh);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.blocks[0].status)) << refused.blocks[0].status;
  EXPECT_THAT(std::string(refused.blocks[0].status.message()), HasSubstr(profile_id_.ToHex()));
  const PutReport put = Put(*client, session, Quality::kHigh);
  ASSERT_TRUE(put.all_stored()) << put.blocks[0].status;
  EXPECT_EQ(put.blocks[0].codec, CodecId::kLossless);
}

// Frames as another client might make them: intact, but for what only a decoder sees.
TEST_F(CodedClientTest, AFrameThatCannotBeDecodedIsAMissAndHurtsNoOther) {
  const Session session(21);
  const auto client = ConnectWithProfile();
  const auto codec = CodecOfProfile(spec_, profile_id_, profile_).value();
  std::vector<std::vector<std::byte>> frames;
  for (std::size_t i = 0; i < kBlocks; ++i) {
    const BlockToEncode block{
        .first_position = static_cast<std::uint32_t>(16 * i),
        .session_tokens = static_cast<std::uint32_t>(session.text.tokens.size()),
        .tokens = std::span(session.text.tokens).subspan(16 * i, 16),
        .raw = session.raw[i]};
    EncodedBlock encoded = codec->Encode({&block, 1}, Quality::kHigh).value()[0];
    if (i == 5) {
      const auto symbols = encoded.body.end() - 300;
      for (auto at = symbols; at != encoded.body.end(); ++at) *at ^= std::byte{0x5a};
    }
    std::vector<FrameSection> sections;
    std::size_t at = 0;
    for (const std::uint32_t bytes : encoded.section_bytes) {
      sections.push_back({bytes, Crc32c(std::span(encoded.body).subspan(at, bytes))});
      at += bytes;
    }
    EXPECT_GT(sections.size(), 2u);
    std::vector<std::byte>& frame = frames.emplace_back(FrameHeaderBytes(sections.size()));
    WriteFrameHeader({.codec = CodecId::kResidual,
                      .quality = Quality::kHigh,
                      .model = model_,
                      .raw_bytes = session.raw[i].size(),
                      .sections = sections},
                     frame);
    frame.insert(frame.end(), encoded.body.begin(), encoded.body.end());
  }
  const std::vector<std::span<const std::byte>> blocks(frames.begin(), frames.end());
  PutPath path = PathOf(session, Quality::kHigh);
  path.blocks = blocks;
  path.form = BlockForm::kFrame;
  const PutReport put = client->Put({&path, 1})[0];
  ASSERT_TRUE(put.all_stored()) << put.blocks[0].status;

  const auto expected = Reference(session, Quality::kHigh);
  const auto nodes = Find(*client, session, Quality::kHigh);
  ASSERT_EQ(nodes.size(), kBlocks);
  const auto expect_others = [&](const Fetched& fetched) {
    EXPECT_EQ(fetched.report.loaded_blocks, kBlocks - 1);
    for (std::size_t i = 0; i < kBlocks; ++i) {
      EXPECT_EQ(fetched.report.blocks[i].loaded(), i != 5) << fetched.report.blocks[i].status;
      if (i != 5) {
        EXPECT_TRUE(fetched.raw[i] == expected[i]) << i;
      }
    }
  };
  for (const bool in_layers : {false, true}) {
    FetchOptions options{.min_quality = Quality::kHigh};
    std::uint32_t layers = 0;
    if (in_layers) options.on_layer = [&](std::uint32_t, auto) { ++layers; };
    const Fetched fetched = Fetch(*client, session, nodes, options);
    expect_others(fetched);
    EXPECT_TRUE(absl::IsDataLoss(fetched.report.blocks[5].status));
    EXPECT_EQ(layers, in_layers ? 12u : 0u);
  }
  EXPECT_EQ(client->stats().undecodable_blocks, 2u);
  // The server finds out too, and drops it with what hangs on it.
  const auto reader = Connect(Coding::kServer);
  const Fetched fetched = Fetch(*reader, session, nodes, {.min_quality = Quality::kHigh});
  EXPECT_FALSE(fetched.report.blocks[5].loaded());
  for (std::size_t i = 0; i < kBlocks; ++i) {
    if (fetched.report.blocks[i].loaded()) {
      EXPECT_TRUE(fetched.raw[i] == expected[i]) << i;
    }
  }
  EXPECT_EQ(Find(*reader, session, Quality::kHigh).size(), 5u);
}

TEST_F(CodedClientTest, ADamagedFrameOnTheDiskIsAMiss) {
  const Session session(22);
  const auto writer = ConnectWithProfile();
  ASSERT_TRUE(Put(*writer, session, Quality::kHigh).all_stored());
  server_.Kill();
  // Of a block in the second half.
  int damaged = 0;
  for (const auto& file :
       std::filesystem::directory_iterator(server_.folder() + "/store/payload")) {
    if (!file.is_regular_file() || file.file_size() < 2'500'000) continue;
    std::fstream segment(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    segment.seekp(2'000'000);
    const std::string zeros(3000, '\x77');
    segment.write(zeros.data(), static_cast<std::streamsize>(zeros.size()));
    ++damaged;
  }
  ASSERT_GT(damaged, 0);
  server_.Start();
  const auto expected = Reference(session, Quality::kHigh);
  for (const Coding coding : {Coding::kInProcess, Coding::kServer}) {
    const auto reader = Connect(coding);
    const Fetched fetched = FetchAt(*reader, session, Quality::kHigh);
    EXPECT_LT(fetched.report.loaded_blocks, kBlocks);
    EXPECT_GT(fetched.report.loaded_blocks, 0u);
    for (std::size_t i = 0; i < fetched.raw.size(); ++i) {
      if (fetched.report.blocks[i].loaded()) {
        EXPECT_TRUE(fetched.raw[i] == expected[i]) << i;
      }
    }
  }
}

TEST_F(CodedClientTest, WhatIsComputedOnRestoredKvIsServedAtThatLevel) {
  const Session session(23, 8);
  const auto client = ConnectWithProfile();
  PutPath prefix = PathOf(session, Quality::kHigh);
  prefix.blocks = prefix.blocks.first(4);
  ASSERT_TRUE(client->Put({&prefix, 1})[0].all_stored());
  // The engine restores these at high, computes the rest on top of them, and puts it exact.
  PutPath rest = PathOf(session, Quality::kExact);
  rest.first_block = 4;
  rest.blocks = rest.blocks.subspan(4);
  rest.restored_blocks = 4;
  rest.restored_quality = Quality::kHigh;
  const PutReport put = client->Put({&rest, 1})[0];
  ASSERT_TRUE(put.all_stored()) << put.blocks[0].status;
  EXPECT_TRUE(Find(*client, session, Quality::kExact).empty());
  EXPECT_EQ(Find(*client, session, Quality::kNearExact).size(), 0u);
  const auto nodes = Find(*client, session, Quality::kHigh);
  ASSERT_EQ(nodes.size(), 8u);
  const Fetched fetched = Fetch(*client, session, nodes, {.min_quality = Quality::kHigh});
  ASSERT_TRUE(fetched.report.all_loaded()) << fetched.report.blocks[7].status;
  for (std::size_t i = 4; i < 8; ++i) {
    EXPECT_EQ(fetched.report.blocks[i].quality, Quality::kHigh);
    EXPECT_EQ(fetched.report.blocks[i].codec, CodecId::kRaw);
    EXPECT_TRUE(fetched.raw[i] == session.raw[i]);
  }
}

TEST_F(CodedClientTest, WithoutTokensTheServerDecodes) {
  const Session session(24, 8);
  const auto client = ConnectWithProfile();
  ASSERT_TRUE(Put(*client, session, Quality::kHigh).all_stored());
  const auto nodes = Find(*client, session, Quality::kHigh);
  std::vector<std::vector<std::byte>> raw(8, session.raw[0]);
  std::vector<FetchTarget> targets;
  for (std::size_t i = 0; i < 8; ++i) targets.push_back({.node = nodes[i], .raw = raw[i]});
  const FetchReport report = client->Fetch(model_, targets, {.min_quality = Quality::kHigh});
  ASSERT_TRUE(report.all_loaded()) << report.blocks[0].status;
  EXPECT_TRUE(raw == Reference(session, Quality::kHigh));
  EXPECT_EQ(client->stats().decoded_blocks, 0u);
}

// Blocks at the ends of runs hold tokens that the prompt does not tell: those the server decodes.
TEST_F(CodedClientTest, ReusedTextIsWhatReadersOfItsSourceGetAtAnotherPosition) {
  const Session stored(26, 20);
  const auto client = ConnectWithProfile();
  ASSERT_TRUE(Put(*client, stored, Quality::kHigh).all_stored());
  const auto source = Reference(stored, Quality::kHigh);
  constexpr std::uint32_t kFirst = 21;     // of the run in the prompt
  constexpr std::uint32_t kPosition = 42;  // and in its source
  constexpr std::uint32_t kCount = 200;
  std::vector<TokenId> tokens(kFirst, 7);
  tokens.insert(tokens.end(), stored.text.tokens.begin() + kPosition,
                stored.text.tokens.begin() + kPosition + kCount);
  tokens.resize(14 * 16, 9);

  const std::vector<std::vector<std::byte>> untouched(
      14, std::vector<std::byte>(source[0].size(), std::byte{0xa5}));
  auto wanted = untouched;
  const RopeShift shift(spec_, std::int64_t{kFirst} - kPosition);
  for (std::uint32_t t = 16; t < kCount; ++t) {
    shift.Copy(source[(kPosition + t) / 16], (kPosition + t) % 16, wanted[(kFirst + t) / 16],
               (kFirst + t) % 16, 1);
  }
  for (const Coding coding : {Coding::kInProcess, Coding::kServer}) {
    const auto reader = Connect(coding);
    const auto found =
        reader->Lookup(model_, tokens, {.min_quality = Quality::kHigh, .allow_text_reuse = true});
    ASSERT_TRUE(found.ok()) << found.status();
    ASSERT_EQ(found->reusable_runs_size(), 1);
    EXPECT_EQ(found->reusable_runs(0).source_quality(), v1::QUALITY_HIGH);
    auto raw = untouched;
    const std::vector<std::span<std::byte>> blocks(raw.begin(), raw.end());
    const auto report = reader->FetchRuns(model_, *found, {.tokens = tokens, .blocks = blocks},
                                          {.min_quality = Quality::kHigh, .skip_tokens = 16});
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_TRUE(report->runs[0].status.ok()) << report->runs[0].status;
    EXPECT_EQ(report->reused_tokens, kCount - 16);
    EXPECT_EQ(report->runs[0].source_quality, Quality::kHigh);
    EXPECT_TRUE(raw == wanted);
    // Of blocks 3 to 15 of the source, all but the last.
    EXPECT_EQ(reader->stats().decoded_blocks, coding == Coding::kInProcess ? 12u : 0u);
  }
}

// Its frames say their own level, which is that of a codec; not of what it coded.
TEST_F(CodedClientTest, WhatIsCodedOfReusedTextIsUnratedToo) {
  const Session session(27, 8);
  const auto client = ConnectWithProfile();
  PutPath path = PathOf(session, Quality::kHigh);
  path.first_reused_block = 2;
  const PutReport put = client->Put({&path, 1})[0];
  ASSERT_TRUE(put.all_stored()) << put.blocks[0].status;
  EXPECT_EQ(put.blocks[5].quality, Quality::kHigh);
  EXPECT_EQ(Find(*client, session, Quality::kHigh).size(), 2u);
  EXPECT_EQ(Find(*client, session, Quality::kSmall).size(), 2u);
  ASSERT_EQ(Find(*client, session, Quality::kUnrated).size(), 8u);
  const Fetched at_high = FetchAt(*client, session, Quality::kHigh);
  EXPECT_EQ(at_high.report.loaded_blocks, 2u);
  const Fetched all = FetchAt(*client, session, Quality::kUnrated);
  ASSERT_TRUE(all.report.all_loaded()) << all.report.blocks[7].status;
  EXPECT_EQ(all.report.blocks[1].quality, Quality::kHigh);
  EXPECT_EQ(all.report.blocks[2].quality, Quality::kUnrated);
  EXPECT_TRUE(all.raw == Reference(session, Quality::kHigh));
}

TEST_F(CodedClientTest, OtherTokensOrAnotherPositionMakeAMiss) {
  const Session session(25, 8);
  const auto client = ConnectWithProfile();
  ASSERT_TRUE(Put(*client, session, Quality::kHigh).all_stored());
  const auto nodes = Find(*client, session, Quality::kHigh);
  std::vector<std::byte> raw(session.raw[0].size());
  FetchTarget target{nodes[1], raw, std::span(session.text.tokens).subspan(16, 16), 32};
  FetchReport report = client->Fetch(model_, {&target, 1}, {.min_quality = Quality::kHigh});
  EXPECT_TRUE(absl::IsDataLoss(report.blocks[0].status)) << report.blocks[0].status;
  target.first_position = 16;
  target.tokens = std::span(session.text.tokens).subspan(32, 16);
  report = client->Fetch(model_, {&target, 1}, {.min_quality = Quality::kHigh});
  EXPECT_TRUE(absl::IsDataLoss(report.blocks[0].status)) << report.blocks[0].status;
  EXPECT_EQ(client->stats().undecodable_blocks, 2u);
}

// Sessions whose text stands in each other, and a profile that can code it so.
class SharedTextClientTest : public ::testing::Test {
 protected:
  static constexpr std::uint32_t kSessionBlocks = 12;

  explicit SharedTextClientTest(std::vector<std::string> server_flags = {})
      : spec_(SectionedSpec()),
        profile_(ProfileBytes(WithDifferences(PlainProfile(spec_), spec_))),
        server_(std::move(server_flags)) {
    EXPECT_TRUE(Connect(Coding::kServer)->PutProfile(profile_).ok());
  }

  std::unique_ptr<Client> Connect(Coding coding, int threads = 1) {
    ClientOptions options;
    options.targets = {server_.listen};
    options.lane = Lane::kGrpc;
    options.coding = coding;
    options.coding_threads = threads;
    auto client = Client::Create(options);
    EXPECT_TRUE(client.ok()) << client.status();
    model_ = (*client)->RegisterModel(spec_)->id;
    return *std::move(client);
  }

  SyntheticText Text(std::uint32_t number) const {
    const SyntheticText other = MakeText(spec_, 16 * kSessionBlocks, 100);
    return ShareTokens(spec_, other, 0, 16 * kSessionBlocks - 48, 16 + 5 * number,
                       16 * kSessionBlocks, number, 0.05f);
  }
  PutReport Put(Client& client, const SyntheticText& text, Quality quality,
                bool use_references = false) {
    std::vector<std::vector<std::byte>> raw;
    for (std::uint32_t block = 0; block < kSessionBlocks; ++block) {
      raw.push_back(CutBlock(spec_, text, 16 * block));
    }
    const std::vector<std::span<const std::byte>> blocks(raw.begin(), raw.end());
    PutPath path;
    path.path.model = model_;
    path.path.tokens = text.tokens;
    path.blocks = blocks;
    path.quality = quality;
    path.use_references = use_references;
    PutReport report = client.Put({&path, 1})[0];
    EXPECT_TRUE(report.all_stored()) << report.blocks[0].status;
    return report;
  }
  // A session's blocks, decoded here or there.
  Fetched Fetch(Client& client, const SyntheticText& text, bool in_layers = false) {
    Fetched fetched;
    const auto found = client.Lookup(model_, text.tokens, {.min_quality = Quality::kSmall});
    EXPECT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->matched_blocks(), kSessionBlocks);
    const std::size_t block_bytes = KvGeometry(spec_).raw_block_bytes();
    fetched.raw.assign(found->matched_blocks(), std::vector<std::byte>(block_bytes));
    std::vector<FetchTarget> targets;
    for (std::uint32_t i = 0; i < found->matched_blocks(); ++i) {
      targets.push_back({*TrieNodeId::FromBytes(found->blocks(0).node_ids().substr(16 * i, 16)),
                         fetched.raw[i], std::span(text.tokens).subspan(16 * i, 16), 16 * i});
    }
    FetchOptions options{.min_quality = Quality::kSmall};
    if (in_layers) options.on_layer = [](std::uint32_t, auto) {};
    fetched.report = client.Fetch(model_, targets, options);
    EXPECT_TRUE(fetched.report.all_loaded());
    for (const FetchedBlock& block : fetched.report.blocks) {
      EXPECT_TRUE(block.loaded()) << block.status;
      EXPECT_EQ(block.bytes, block_bytes);
    }
    return fetched;
  }

  const ModelSpec spec_;
  const std::vector<std::byte> profile_;
  ServerProcess server_;
  ModelId model_;
  std::vector<SyntheticText> texts_;
};

// Put raw to a server that codes them against each other.
class MemberClientTest : public SharedTextClientTest {
 protected:
  static constexpr std::size_t kSessions = 4;

  MemberClientTest() : SharedTextClientTest({"--recode_level=small", "--recode_cpu_percent=100"}) {}

  // The same tokens for every `seed`, with other KV.
  void PutAll(std::uint64_t seed) {
    texts_.clear();
    for (std::uint32_t i = 0; i < kSessions; ++i) {
      SyntheticText text = Text(i);
      const std::vector<TokenId> tokens = text.tokens;
      if (seed != 0) {
        text =
            ShareTokens(spec_, text, 0, 16 * kSessionBlocks, 0, 16 * kSessionBlocks, seed, 0.01f);
      }
      EXPECT_EQ(text.tokens, tokens);
      texts_.push_back(std::move(text));
    }
    // The first one finer than the server codes: the others are coded against it.
    for (const SyntheticText& text : texts_) {
      const bool is_first = &text == &texts_.front();
      Put(is_first ? *fine_writer_ : *writer_, text, is_first ? Quality::kHigh : Quality::kExact);
    }
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    const std::size_t raw_bytes = KvGeometry(spec_).raw_block_bytes();
    for (const SyntheticText& text : texts_) {
      bool is_coded = false;
      while (!is_coded && std::chrono::steady_clock::now() < give_up) {
        const auto found = writer_->Lookup(model_, text.tokens, {.min_quality = Quality::kSmall});
        ASSERT_TRUE(found.ok()) << found.status();
        const auto& sizes = found->blocks(0).stored_bytes();
        is_coded = sizes.size() == kSessionBlocks &&
                   std::all_of(sizes.begin(), sizes.end(),
                               [&](std::uint64_t bytes) { return bytes < raw_bytes * 3 / 4; });
        if (!is_coded) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      ASSERT_TRUE(is_coded);
    }
  }

  // All sessions' blocks.
  std::vector<std::vector<std::byte>> FetchAll(Client& client, bool in_layers = false) {
    std::vector<std::vector<std::byte>> raw;
    members_ = 0;
    for (const SyntheticText& text : texts_) {
      Fetched fetched = Fetch(client, text, in_layers);
      std::move(fetched.raw.begin(), fetched.raw.end(), std::back_inserter(raw));
      for (const FetchedBlock& block : fetched.report.blocks) {
        members_ += block.codec == CodecId::kReferenced ? 1 : 0;
      }
    }
    return raw;
  }

  const std::unique_ptr<Client> writer_ = Connect(Coding::kServer);  // raw KV travels
  const std::unique_ptr<Client> fine_writer_ = Connect(Coding::kInProcess);
  std::size_t members_ = 0;  // of the last FetchAll
};

TEST_F(MemberClientTest, AReaderDecodesWhatWasCodedAgainstOthersAndKeepsThese) {
  PutAll(0);
  ASSERT_FALSE(HasFatalFailure());
  const auto expected = FetchAll(*writer_);
  const auto reader = Connect(Coding::kInProcess);
  EXPECT_EQ(FetchAll(*reader), expected);
  EXPECT_GE(members_, (kSessions - 1) * (kSessionBlocks - 4));
  const std::uint64_t misses = reader->stats().reference_misses;
  EXPECT_GT(misses, 0u);
  EXPECT_EQ(reader->stats().members_fetched_again, 0u);
  EXPECT_EQ(reader->stats().decoded_blocks, kSessions * kSessionBlocks);
  const std::uint64_t bytes = reader->stats().fetched_bytes;
  EXPECT_LT(bytes, expected.size() * expected[0].size() * 3 / 4);

  EXPECT_EQ(FetchAll(*reader), expected);
  EXPECT_EQ(reader->stats().reference_misses, misses);
  EXPECT_LT(reader->stats().fetched_bytes - bytes, bytes);
  // Layer by layer, the server decodes them.
  EXPECT_EQ(FetchAll(*reader, /*in_layers=*/true), expected);

  // What loading will cost is reckoned with what each way was measured to cost.
  const std::vector<TokenId>& tokens = texts_.back().tokens;
  const auto found =
      reader->Lookup(model_, tokens, {.min_quality = Quality::kSmall, .want_runs = true});
  ASSERT_TRUE(found.ok()) << found.status();
  FetchOptions fetch{.min_quality = Quality::kSmall};
  const auto whole = reader->PlanLoad(model_, *found, tokens.size(), fetch);
  fetch.on_layer = [](std::uint32_t, auto) {};
  const auto by_layers = reader->PlanLoad(model_, *found, tokens.size(), fetch);
  ASSERT_TRUE(whole.ok() && by_layers.ok()) << whole.status() << by_layers.status();
  EXPECT_GT(whole->load_seconds, 0);
  EXPECT_NE(whole->load_seconds, by_layers->load_seconds);
}

TEST_F(MemberClientTest, WhatWasKeptOfYesterdayIsFetchedAnew) {
  PutAll(0);
  ASSERT_FALSE(HasFatalFailure());
  const auto reader = Connect(Coding::kInProcess);
  FetchAll(*reader);
  const std::uint64_t misses = reader->stats().reference_misses;

  v1::DeleteRequest all;
  all.mutable_selection()->set_all(true);
  ASSERT_TRUE(writer_->Delete(all).ok());
  PutAll(77);
  ASSERT_FALSE(HasFatalFailure());
  const auto expected = FetchAll(*writer_);
  EXPECT_EQ(FetchAll(*reader), expected);
  EXPECT_GT(reader->stats().members_fetched_again, 0u);
  const std::uint64_t again = reader->stats().members_fetched_again;
  EXPECT_EQ(FetchAll(*reader), expected);
  EXPECT_EQ(reader->stats().members_fetched_again, again);
  EXPECT_GT(reader->stats().reference_misses, misses);
}

// Clients code against what the server names, at once.
class PutReferencesTest : public SharedTextClientTest {
 protected:
  PutReferencesTest() {
    for (std::uint32_t i = 0; i < 5; ++i) texts_.push_back(Text(i));
  }

  PutReport Put(const SyntheticText& text, Quality quality, bool use_references = true) {
    return SharedTextClientTest::Put(*writer_, text, quality, use_references);
  }
  static std::size_t Count(const PutReport& report, CodecId codec, Quality quality) {
    return static_cast<std::size_t>(std::count_if(
        report.blocks.begin(), report.blocks.end(),
        [&](const auto& block) { return block.codec == codec && block.quality == quality; }));
  }
  // The same from a client that decodes and from the server.
  void ExpectReadable(const SyntheticText& text) {
    const Fetched decoded_there = Fetch(*Connect(Coding::kServer, 2), text);
    EXPECT_EQ(Fetch(*Connect(Coding::kInProcess, 2), text).raw, decoded_there.raw);
  }

  const std::unique_ptr<Client> writer_ = Connect(Coding::kInProcess, 2);
};

TEST_F(PutReferencesTest, BlocksAreCodedAgainstWhatIsStoredFiner) {
  Put(texts_[0], Quality::kHigh);
  const PutReport alone = Put(texts_[1], Quality::kSmall, /*use_references=*/false);
  EXPECT_EQ(Count(alone, CodecId::kReferenced, Quality::kSmall), 0u);
  const PutReport report = Put(texts_[2], Quality::kSmall);
  EXPECT_GE(Count(report, CodecId::kReferenced, Quality::kSmall), kSessionBlocks - 4);
  EXPECT_GT(writer_->stats().reference_misses, 0u);
  const std::uint64_t misses = writer_->stats().reference_misses;
  const PutReport next = Put(texts_[3], Quality::kSmall);
  EXPECT_GE(Count(next, CodecId::kReferenced, Quality::kSmall), kSessionBlocks - 4);
  EXPECT_EQ(writer_->stats().reference_misses, misses);
  for (const SyntheticText& text : {texts_[2], texts_[3]}) ExpectReadable(text);
}

TEST_F(PutReferencesTest, TheThirdOfTheSameTextIsFinerAndThoseBehindItAreCodedAgainstIt) {
  for (const std::size_t i : {0, 1}) {
    const PutReport report = Put(texts_[i], Quality::kSmall);
    EXPECT_EQ(Count(report, CodecId::kResidual, Quality::kSmall), kSessionBlocks) << i;
  }
  const PutReport third = Put(texts_[2], Quality::kSmall);
  EXPECT_GE(Count(third, CodecId::kResidual, Quality::kHigh), kSessionBlocks - 5);
  for (const std::size_t i : {3, 4}) {
    const PutReport report = Put(texts_[i], Quality::kSmall);
    EXPECT_GE(Count(report, CodecId::kReferenced, Quality::kSmall), kSessionBlocks - 6) << i;
    ExpectReadable(texts_[i]);
  }
}

}  // namespace
}  // namespace kvtrie
