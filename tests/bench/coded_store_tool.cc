// Puts a text's KV at a level into a server, and fetches it again, as every kind of reader does:
// decoded here, layer by layer, and decoded by the server. All must get the same. Prints what it
// measured as JSON.
//
//   coded_store_tool --spec SPEC.json --profile FILE --level LEVEL --block-tokens N
//                    --tokens FILE.tokens --kv FILE.kv --server HOST:PORT --out FILE.kv
//                    [--worker HOST:PORT]
//
// With a worker, that one codes for the writer, and for a reader more.
//
// Files as `kvtrie profile` has them. Of a draft each level claims what it promises at most, which
// nobody measured: for tests.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "client/client.h"
#include "client/ctl/profile_code.h"
#include "client/ctl/profile_files.h"
#include "storage/base/byte_reader.h"
#include "storage/codec/residual_profile.h"

namespace kvtrie {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "coded_store_tool: %s\n", what.c_str());
  std::exit(1);
}

template <typename T>
T OrFail(absl::StatusOr<T> value) {
  if (!value.ok()) Fail(value.status().ToString());
  return *std::move(value);
}

std::string WholeProfile(const ProfileFile& file) {
  MeasuredFigures figures = {.body_digest = BodyDigest(file.body), .levels = file.levels};
  const ResidualProfile profile = OrFail(ResidualProfile::DecodeBody(file.body));
  if (figures.levels.empty()) {
    for (const ResidualLevel& level : profile.levels) {
      const auto kl = static_cast<float>(MeanKlMax(level.quality));
      figures.levels.push_back({level.quality, 4, kl, kl});
    }
  }
  return OrFail(SealProfile(file.codec_key, file.body, profile.levels, figures));
}

int Main(int argc, char** argv) {
  std::map<std::string, std::string> flags;
  for (int i = 1; i + 1 < argc; i += 2) flags[std::string(argv[i]).substr(2)] = argv[i + 1];
  for (const char* flag :
       {"spec", "profile", "level", "block-tokens", "tokens", "kv", "server", "out"}) {
    if (!flags.contains(flag)) Fail(std::string("--") + flag + " is missing");
  }
  ModelSpec spec = OrFail(ReadModelSpec(flags.at("spec")));
  spec.block_tokens = static_cast<std::uint32_t>(std::stoul(flags.at("block-tokens")));
  const ProfileFile profile = OrFail(ReadProfileFile(flags.at("profile")));
  const Quality level = LevelFromText(flags.at("level")).value_or(Quality::kExact);
  const MappedFile tokens_file = OrFail(MappedFile::Open(flags.at("tokens")));
  const auto tokens = OrFail(NumbersOf<TokenId>(tokens_file, flags.at("tokens")));
  const MappedFile kv = OrFail(MappedFile::Open(flags.at("kv")));
  const std::size_t block_tokens = spec.block_tokens;
  const std::size_t block_bytes = KvGeometry(spec).raw_block_bytes();
  if (kv.bytes().size() != tokens.size() / block_tokens * block_bytes) Fail("size of --kv");
  const std::vector<std::vector<std::byte>> blocks = BlocksOfRun(spec, kv.bytes());

  const auto connect = [&](Coding coding) {
    ClientOptions options;
    options.targets = {flags.at("server")};
    options.lane = Lane::kGrpc;
    options.coding = coding;
    if (coding == Coding::kWorker) options.workers.targets = {flags.at("worker")};
    options.workers.timeout = std::chrono::minutes(5);
    return OrFail(Client::Create(options));
  };
  const bool with_worker = flags.contains("worker");
  const auto client = connect(with_worker ? Coding::kWorker : Coding::kInProcess);
  OrFail(client->RegisterModel(spec));
  const std::string whole_profile = WholeProfile(profile);
  OrFail(client->PutProfile(std::as_bytes(std::span(whole_profile))));
  const ModelHandle model = OrFail(client->RegisterModel(spec));

  const std::vector<std::span<const std::byte>> raw(blocks.begin(), blocks.end());
  PutPath path;
  path.path.model = model.id;
  path.path.tokens = tokens;
  path.quality = level;
  // The first block alone: it has the codec made, which is no matter of speed.
  double put_seconds = 0;
  std::size_t frame_bytes = 0;
  for (const bool rest : {false, true}) {
    path.first_block = rest ? 1 : 0;
    path.blocks = std::span(raw).subspan(rest ? 1 : 0, rest ? raw.size() - 1 : 1);
    const auto begin = Clock::now();
    const PutReport put = client->Put({&path, 1})[0];
    put_seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    for (const PutBlockReport& block : put.blocks) {
      if (!block.status.ok()) Fail(block.status.ToString());
      if (block.frame_bytes == 0) Fail("a block was stored already");
      frame_bytes += block.frame_bytes;
    }
  }

  LookupOptions lookup;
  lookup.min_quality = level;
  const auto found = OrFail(client->Lookup(model.id, tokens, lookup));
  if (found.matched_blocks() != raw.size()) Fail("not all that was put is found");
  std::vector<std::vector<std::byte>> first;
  Json result = {{"bytes", frame_bytes}, {"raw_bytes", raw.size() * block_bytes}};
  const auto fetch = [&](Client& reader, const std::string& name, bool in_layers) {
    std::vector<std::vector<std::byte>> to(raw.size(), std::vector<std::byte>(block_bytes));
    std::vector<FetchTarget> targets(raw.size());
    for (std::size_t i = 0; i < raw.size(); ++i) {
      targets[i].node = *TrieNodeId::FromBytes(found.blocks(0).node_ids().substr(16 * i, 16));
      targets[i].raw = to[i];
      targets[i].tokens = tokens.subspan(i * block_tokens, block_tokens);
      targets[i].first_position = static_cast<std::uint32_t>(i * block_tokens);
    }
    FetchOptions options;
    options.min_quality = level;
    double seconds = 1e9, first_layer_seconds = 1e9;
    for (int round = 0; round < 3; ++round) {
      const auto begin = Clock::now();
      const auto since = [&] {
        return std::chrono::duration<double>(Clock::now() - begin).count();
      };
      if (in_layers) {
        options.on_layer = [&](std::uint32_t layer, auto) {
          if (layer == 0) first_layer_seconds = std::min(first_layer_seconds, since());
        };
      }
      const FetchReport report = reader.Fetch(model.id, targets, options);
      seconds = std::min(seconds, since());
      for (const FetchedBlock& block : report.blocks) {
        if (!block.loaded()) Fail(block.status.ToString());
      }
    }
    if (first.empty()) first = to;
    if (to != first) Fail("readers got different KV");
    result[name + "_mb_per_second"] = static_cast<double>(raw.size() * block_bytes) / seconds / 1e6;
    if (in_layers) result[name + "_first_layer_seconds"] = first_layer_seconds;
  };
  result["put_mb_per_second"] =
      static_cast<double>((raw.size() - 1) * block_bytes) / put_seconds / 1e6;
  fetch(*client, "fetch", false);
  fetch(*client, "layers", true);
  if (with_worker) {
    const auto own = connect(Coding::kInProcess);
    OrFail(own->RegisterModel(spec));
    fetch(*own, "own", false);
    result["worker_blocks"] = client->worker_stats().blocks_total;
    result["blocks_without_worker"] = client->worker_stats().own_blocks_total;
  }
  const auto reader = connect(Coding::kServer);
  OrFail(reader->RegisterModel(spec));
  fetch(*reader, "server", false);
  fetch(*reader, "server_layers", true);

  const std::vector<std::byte> run = RunOfBlocks(spec, first);
  if (const absl::Status written = WriteFile(flags.at("out"), AsText(run)); !written.ok()) {
    Fail(written.ToString());
  }
  std::cout << result << std::endl;
  return 0;
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) { return kvtrie::Main(argc, argv); }
