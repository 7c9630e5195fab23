// How long a store of many trie nodes takes to open.
//   store_start_bench [--nodes 1000000] [--folder /var/tmp] [--threads 16]
// Synthetic paths of 64 blocks of 16 tokens (seed 1) with the smallest frames, written straight
// into metadata and segments; the store's pages are dropped from the system's memory before each
// time that it is opened: with the index of text runs and without, in turns, three times each, of
// which the soonest counts. Prints one JSON object.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/file_system.h"
#include "storage/engine/engine.h"
#include "storage/meta/meta_keys.h"
#include "storage/meta/node_row.h"
#include "storage/meta/rocksdb_meta_store.h"
#include "storage/payload/segment_store.h"
#include "storage/trie/path_hash.h"

namespace kvtrie {
namespace {

namespace fs = std::filesystem;

constexpr std::uint32_t kBlockTokens = 16;
constexpr std::uint32_t kPathBlocks = 64;

double SecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

ModelSpec Spec() {
  ModelSpec spec;
  spec.name = "bench";
  spec.weights_revision = "r";
  spec.tokenizer_digest = "t";
  spec.dtype = DType::kUint8;
  spec.kv_groups = {{.layer_runs = {{1, 1, 1, 0}}, .window_tokens = 0}};
  spec.block_tokens = kBlockTokens;
  return spec;
}

std::vector<TokenId> PathTokens(std::uint64_t path) {
  std::mt19937_64 random(path + 1);
  std::vector<TokenId> tokens(std::size_t{kPathBlocks} * kBlockTokens);
  for (TokenId& token : tokens) token = static_cast<TokenId>(random() % 50'000);
  return tokens;
}

// Fills an empty store that an engine has made.
class Filler {
 public:
  Filler(const EngineOptions& options, const ModelId& model)
      : options_(options), model_(model), identity_(ReadIdentity(options.data_dir + "/identity")) {
    auto meta = OpenRocksDbMetaStore(options.data_dir + "/meta", {});
    KV_CHECK(meta.ok());
    meta_ = std::move(meta->store);
    auto payload = OpenSegmentStore(PosixFileSystem(), options.data_dir + "/payload",
                                    {.segment_bytes = options.segment_bytes});
    KV_CHECK(payload.ok());
    payload_ = *std::move(payload);
    KV_CHECK(payload_->FinishRecovery().ok());
  }

  void Fill(std::uint64_t path_count, unsigned thread_count) {
    std::atomic<std::uint64_t> next{0};
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < thread_count; ++i) {
      threads.emplace_back([&] {
        while (true) {
          const std::uint64_t path = next++;
          if (path >= path_count) return;
          FillPath(path);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    KV_CHECK(payload_->Sync().ok());
    KV_CHECK(meta_->Sync().ok());
  }

 private:
  static StoreConfig ReadIdentity(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    auto identity = StoreConfig::Decode(text);
    KV_CHECK(identity.ok());
    return *identity;
  }

  void FillPath(std::uint64_t path) {
    const auto tokens = PathTokens(path);
    const PathHasher hasher(identity_.path_hash_seed);
    const TrieNodeNamer namer(identity_.namespace_secret);
    const HashedPath hashed(hasher, kBuiltInTenant,
                            {.model = model_, .tokens = tokens, .salt = {}, .extra_keys = {}},
                            kBlockTokens);
    const std::vector<std::byte> raw(KvGeometry(Spec()).raw_block_bytes());
    const FrameSection section{static_cast<std::uint32_t>(raw.size()), Crc32c(raw)};
    MetaBatch batch(kBuiltInTenant);
    NodeDescriptor descriptor;
    descriptor.tenant = kBuiltInTenant;
    descriptor.row.model = model_;
    for (std::uint32_t block = 0; block < kPathBlocks; ++block) {
      NodeRow& row = descriptor.row;
      row.parent = descriptor.node;
      row.depth = block + 1;
      row.path_hash = hashed.hash(block);
      row.tokens.assign(hashed.tokens(block).begin(), hashed.tokens(block).end());
      descriptor.node =
          namer.Name(model_, row.parent, Provenance::kExact, {}, {}, hashed.tokens(block));
      const std::size_t header_bytes = FrameHeaderBytes(1);
      PayloadRecord record(descriptor.Encode(), header_bytes + raw.size());
      WriteFrameHeader({.model = model_, .raw_bytes = raw.size(), .sections = {&section, 1}},
                       record.payload().first(header_bytes));
      std::copy(raw.begin(), raw.end(), record.payload().data() + header_bytes);
      const auto at = payload_->Append(record);
      KV_CHECK(at.ok());
      NodeRow stored = row;
      stored.rungs = {{.segment = at->segment,
                       .offset_units = at->offset_units,
                       .record_bytes = at->record_bytes}};
      batch.Put(MetaTable::kNodes, NodeRowKey{kBuiltInTenant, descriptor.node}.Encode(),
                stored.Encode());
    }
    KV_CHECK(meta_->Write(batch).ok());
  }

  const EngineOptions& options_;
  const ModelId model_;
  const StoreConfig identity_;
  std::unique_ptr<MetaStore> meta_;
  std::unique_ptr<PayloadStore> payload_;
};

void DropFromPageCache(const std::string& folder) {
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const int file = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) continue;
    ::fdatasync(file);
    ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    ::close(file);
  }
}

struct OpenCost {
  double wall_seconds = 1e9;
  double cpu_seconds = 1e9;  // of all threads
};

std::unique_ptr<Engine> OpenStore(const EngineOptions& options, const std::string& folder,
                                  OpenCost* least) {
  DropFromPageCache(folder);
  const auto begin = std::chrono::steady_clock::now();
  const std::clock_t cpu_begin = std::clock();
  auto engine = Engine::OpenEmbedded(options, SystemClock());
  KV_CHECK(engine.ok());
  least->wall_seconds = std::min(least->wall_seconds, SecondsSince(begin));
  least->cpu_seconds =
      std::min(least->cpu_seconds, static_cast<double>(std::clock() - cpu_begin) / CLOCKS_PER_SEC);
  return *std::move(engine);
}

void Measure(std::uint64_t node_count, const std::string& parent, unsigned thread_count) {
  std::string folder = parent + "/store_start_bench-XXXXXX";
  KV_CHECK(::mkdtemp(folder.data()) != nullptr);
  EngineOptions options;
  options.data_dir = folder + "/store";
  options.disk_limit_bytes = std::uint64_t{1} << 40;
  options.memory_tier_bytes = 0;
  const std::uint64_t path_count = (node_count + kPathBlocks - 1) / kPathBlocks;

  ModelId model;
  {
    auto engine = Engine::OpenEmbedded(options, SystemClock());
    KV_CHECK(engine.ok());
    model = (*engine)->RegisterModel(kBuiltInTenant, Spec())->id;
  }
  const auto build_begin = std::chrono::steady_clock::now();
  Filler(options, model).Fill(path_count, thread_count);
  const double build_seconds = SecondsSince(build_begin);

  EngineOptions without_runs = options;
  without_runs.run_index_bytes = 0;
  OpenCost with;
  OpenCost without;
  std::unique_ptr<Engine> engine;
  for (int round = 0; round < 3; ++round) {
    engine.reset();
    engine = OpenStore(without_runs, folder, &without);
    engine.reset();
    engine = OpenStore(options, folder, &with);
  }
  for (std::uint64_t path = 0; path < path_count; path += 1 + path_count / 100) {
    const auto tokens = PathTokens(path);
    const auto found = engine->Lookup(
        kBuiltInTenant, {.models = {model},
                         .path = {.model = model, .tokens = tokens, .salt = {}, .extra_keys = {}},
                         .min_quality = Quality::kExact,
                         .lease = {},
                         .want_blocks = false});
    KV_CHECK(found.ok() && found->matched_blocks == kPathBlocks);
  }
  const EngineStats stats = engine->Stats();
  std::printf(
      "{\"nodes\": %llu, \"build_s\": %.3f, \"open_s\": %.3f, \"open_cpu_s\": %.3f, "
      "\"without_runs_open_s\": %.3f, \"without_runs_open_cpu_s\": %.3f, "
      "\"run_index_bytes_per_token\": %.3f}\n",
      static_cast<unsigned long long>(stats.node_count), build_seconds, with.wall_seconds,
      with.cpu_seconds, without.wall_seconds, without.cpu_seconds,
      static_cast<double>(stats.run_index_bytes) /
          static_cast<double>(stats.node_count * kBlockTokens));
  engine.reset();
  fs::remove_all(folder);
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) {
  std::uint64_t nodes = 1'000'000;
  std::string folder = "/var/tmp";
  unsigned threads = 16;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view flag = argv[i];
    if (flag == "--nodes") {
      nodes = std::strtoull(argv[i + 1], nullptr, 10);
    } else if (flag == "--folder") {
      folder = argv[i + 1];
    } else if (flag == "--threads") {
      threads = static_cast<unsigned>(std::strtoul(argv[i + 1], nullptr, 10));
    } else {
      std::fprintf(stderr, "unknown flag %s\n", argv[i]);
      return 2;
    }
  }
  kvtrie::Measure(nodes, folder, threads);
  return 0;
}
