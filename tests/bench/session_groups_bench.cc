// What session groups cost.
//   session_groups_bench [--prompts 2000000] [--waves 2] [--puts 2000] [--path_blocks 64]
//                        [--own_blocks 16] [--block_bytes 4096] [--folder /var/tmp]
// Waves: prompts of 8 blocks (nine of ten share 5 with the one of a group of about 10, the tenth is
// alone) go into an index with groups and are deleted again, wave by wave. One JSON object per
// wave: memory when all are there, and what is left when they are gone; it ends the program if a
// node or a group is left. Puts: sessions with a name that share their first blocks go into a store
// with groups and one without, in turns of 100. One JSON object: CPU time of the whole process per
// put in each, medians of the turns, and of the groups' own work alone. Small blocks, so that the
// share is the highest. Tokens and shapes come from seeded generators.

#include <stdlib.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/engine/engine.h"
#include "storage/group/session_groups.h"

namespace kvtrie {
namespace {

namespace fs = std::filesystem;

constexpr double kThresholdBits = 128;
constexpr float kBlockBits = 60;
constexpr std::uint32_t kBlockTokens = 16;
constexpr std::size_t kPutsPerTurn = 100;

struct Settings {
  std::size_t prompts = 2'000'000;
  std::size_t waves = 2;
  std::size_t puts = 2000;
  std::size_t path_blocks = 64;
  std::size_t own_blocks = 16;
  std::size_t block_bytes = 4096;
  std::string folder = "/var/tmp";
};

double CpuMicroseconds(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return 1e6 * static_cast<double>(time.tv_sec) + 1e-3 * static_cast<double>(time.tv_nsec);
}

std::size_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t pages = 0;
  file >> pages >> pages;
  return pages * 4096;
}

// An index that grows by hand.
class Grower {
 public:
  explicit Grower(double threshold_bits) : groups_(index_, threshold_bits) {
    slot_ = *index_.AddModel(TenantId{1}, ModelId{}, kBlockTokens);
  }

  NodeRef Grow(NodeRef parent, std::size_t blocks) {
    for (std::size_t block = 0; block < blocks; ++block) {
      NewNode node;
      const std::uint64_t words[] = {random_(), random_()};
      std::memcpy(node.id.bytes.data(), words, sizeof words);
      node.parent = parent;
      node.model = slot_;
      node.path_hash = random_();
      node.frames = {.frame = {1, 1, 4096}};
      node.block_surprisal_bits = kBlockBits;
      parent = index_.Insert(node);
      groups_.OnInserted(parent);
    }
    return parent;
  }
  // What a put of a named session tells of its name.
  void Name(NodeRef ref) { groups_.AddName(ref); }
  void Drop(NodeRef leaf) {
    while (leaf != 0 && index_.node(leaf).is_leaf()) {
      const NodeRef parent = index_.parent(leaf);
      groups_.OnErasing(leaf);
      index_.Erase(leaf);
      leaf = parent;
    }
  }
  const TrieIndex& index() const { return index_; }
  const SessionGroups& groups() const { return groups_; }

 private:
  TrieIndex index_{std::size_t{1} << 20};
  SessionGroups groups_;
  ModelSlot slot_ = 0;
  std::mt19937_64 random_{1};
};

void MeasureWaves(const Settings& settings) {
  Grower grower(kThresholdBits);
  const std::size_t per_wave = settings.prompts / settings.waves;
  std::mt19937_64 random(2);
  for (std::size_t wave = 0; wave < settings.waves; ++wave) {
    std::vector<NodeRef> ends;
    ends.reserve(per_wave);
    NodeRef shared = grower.Grow(0, 5);
    std::vector<NodeRef> heads = {shared};
    for (std::size_t prompt = 0; prompt < per_wave; ++prompt) {
      if (prompt % 10 == 0) {
        ends.push_back(grower.Grow(0, 8));
        heads.push_back(grower.Grow(0, 5));
      } else {
        // Groups overlap in time.
        const std::size_t back = random() % std::min<std::size_t>(heads.size(), 50);
        ends.push_back(grower.Grow(heads[heads.size() - 1 - back], 3));
      }
    }
    const auto sessions = static_cast<double>(per_wave);
    const std::size_t nodes = grower.index().node_count();
    const std::size_t groups = grower.groups().group_count();
    const double group_bytes = static_cast<double>(grower.groups().memory_bytes());
    const double index_bytes = static_cast<double>(grower.index().memory_bytes());
    KV_CHECK(grower.groups().CheckInvariants().ok());
    for (const NodeRef end : ends) grower.Drop(end);
    for (const NodeRef head : heads) {
      if (grower.index().alive(head)) grower.Drop(head);
    }
    std::printf(
        "{\"wave\": %zu, \"sessions\": %zu, \"nodes\": %zu, \"groups\": %zu, "
        "\"group_bytes_per_session\": %.2f, \"index_bytes_per_session\": %.1f, "
        "\"index_bytes_per_node\": %.1f, \"nodes_left\": %zu, \"groups_left\": %zu, "
        "\"resident_mib\": %zu}\n",
        wave, per_wave, nodes, groups, group_bytes / sessions, index_bytes / sessions,
        index_bytes / static_cast<double>(nodes), grower.index().node_count(),
        grower.groups().group_count(), ResidentBytes() >> 20);
    std::fflush(stdout);
    KV_CHECK(grower.index().node_count() == 0);
    KV_CHECK(grower.groups().group_count() == 0);
  }
}

ModelSpec Spec(const Settings& settings) {
  ModelSpec spec;
  spec.name = "bench";
  spec.weights_revision = "r";
  spec.tokenizer_digest = "t";
  spec.dtype = DType::kUint8;
  const auto head_dim = static_cast<std::uint32_t>(settings.block_bytes / kBlockTokens / 2);
  spec.kv_groups = {{.layer_runs = {{1, 1, head_dim, head_dim}}, .window_tokens = 0}};
  spec.block_tokens = kBlockTokens;
  return spec;
}

// A store, and what puts into it take.
class Store {
 public:
  Store(const Settings& settings, const std::string& folder, std::uint32_t threshold_bits)
      : settings_(settings), block_(settings.block_bytes), crc32c_(Crc32c(block_)) {
    EngineOptions options;
    options.data_dir = folder;
    options.disk_limit_bytes = std::uint64_t{1} << 40;
    options.memory_tier_bytes = 0;
    options.group_threshold_bits = threshold_bits;
    auto engine = Engine::OpenEmbedded(options, SystemClock());
    KV_CHECK(engine.ok());
    engine_ = *std::move(engine);
    model_ = engine_->RegisterModel(kBuiltInTenant, Spec(settings))->id;
  }

  // CPU time per put of a turn.
  double Turn(std::size_t first_put) {
    const double begin = CpuMicroseconds(CLOCK_PROCESS_CPUTIME_ID);
    for (std::size_t put = first_put; put < first_put + kPutsPerTurn; ++put) Put(put);
    return (CpuMicroseconds(CLOCK_PROCESS_CPUTIME_ID) - begin) / kPutsPerTurn;
  }
  std::uint64_t group_count() const { return engine_->Stats().group_count; }

 private:
  void Put(std::size_t number) {
    std::vector<TokenId> tokens(settings_.path_blocks * kBlockTokens);
    std::mt19937_64 shared(number % 10);
    std::mt19937_64 own(1'000 + number);
    const std::size_t shared_tokens = (settings_.path_blocks - settings_.own_blocks) * kBlockTokens;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = static_cast<TokenId>((i < shared_tokens ? shared() : own()) % 50'000);
    }
    const std::string session = "session-" + std::to_string(number);
    PutAnnouncement announcement;
    announcement.path = {.model = model_, .tokens = tokens, .salt = {}, .extra_keys = {}};
    announcement.session_id = session;
    auto put = engine_->BeginPut(kBuiltInTenant, announcement);
    KV_CHECK(put.ok());
    const auto missing = (*put)->missing_blocks();
    absl::BlockingCounter open(static_cast<int>(missing.size()));
    std::vector<PutSession::FinishedBlock> blocks;
    for (const std::uint32_t block : missing) {
      auto writer = (*put)->StartBlock(block, block_.size());
      KV_CHECK(writer.ok());
      const std::span<const std::byte> piece = block_;
      KV_CHECK((*writer)->AppendChunk({&piece, 1}, crc32c_).ok());
      blocks.push_back({*std::move(writer), [&open](absl::StatusOr<PutBlockResult> result) {
                          KV_CHECK(result.ok());
                          open.DecrementCount();
                        }});
    }
    (*put)->FinishBlocks(std::move(blocks));
    open.Wait();
  }

  const Settings& settings_;
  const std::vector<std::byte> block_;
  const std::uint32_t crc32c_;
  std::unique_ptr<Engine> engine_;
  ModelId model_;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The groups' part of the same puts, without the store around it: an index with and without them.
double OwnMicroseconds(const Settings& settings) {
  std::vector<double> with;
  std::vector<double> without;
  for (int turn = 0; turn < 9; ++turn) {
    for (const bool is_with : {true, false}) {
      Grower grower(is_with ? kThresholdBits : 0);
      std::vector<NodeRef> heads;
      for (int head = 0; head < 10; ++head) {
        heads.push_back(grower.Grow(0, settings.path_blocks - settings.own_blocks));
      }
      const double begin = CpuMicroseconds(CLOCK_THREAD_CPUTIME_ID);
      for (std::size_t put = 0; put < settings.puts; ++put) {
        const NodeRef end = grower.Grow(heads[put % 10], settings.own_blocks);
        if (is_with) grower.Name(end);
      }
      (is_with ? with : without)
          .push_back((CpuMicroseconds(CLOCK_THREAD_CPUTIME_ID) - begin) /
                     static_cast<double>(settings.puts));
    }
  }
  return Median(with) - Median(without);
}

void MeasurePuts(const Settings& settings) {
  std::string folder = settings.folder + "/session_groups_bench-XXXXXX";
  KV_CHECK(::mkdtemp(folder.data()) != nullptr);
  // A second store without groups says how much two equal ones differ.
  std::vector<double> turns[3];
  {
    Store with(settings, folder + "/with", static_cast<std::uint32_t>(kThresholdBits));
    Store without(settings, folder + "/without", 0);
    Store control(settings, folder + "/control", 0);
    Store* const stores[] = {&with, &without, &control};
    std::size_t first = 0;
    for (std::size_t put = 0; put < settings.puts; put += kPutsPerTurn) {
      for (std::size_t i = 0; i < 3; ++i) {
        const std::size_t store = (first + i) % 3;
        turns[store].push_back(stores[store]->Turn(put));
      }
      ++first;  // who begins changes
    }
    KV_CHECK(with.group_count() == std::min<std::size_t>(10, settings.puts / 2));
    KV_CHECK(without.group_count() == 0);
  }
  fs::remove_all(folder);
  const double with_us = Median(turns[0]);
  const double without_us = Median(turns[1]);
  const double control_us = Median(turns[2]);
  const double own_us = OwnMicroseconds(settings);
  std::printf(
      "{\"puts\": %zu, \"path_blocks\": %zu, \"own_blocks\": %zu, \"block_bytes\": %zu, "
      "\"put_cpu_us_with_groups\": %.1f, \"put_cpu_us_without\": %.1f, \"put_cpu_us_control\": "
      "%.1f, \"groups_cpu_us\": %.2f, \"groups_share\": %.5f}\n",
      settings.puts, settings.path_blocks, settings.own_blocks, settings.block_bytes, with_us,
      without_us, control_us, own_us, own_us / without_us);
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) {
  kvtrie::Settings settings;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--folder") {
      settings.folder = argv[i + 1];
      continue;
    }
    const auto value = static_cast<std::size_t>(std::atoll(argv[i + 1]));
    if (flag == "--prompts") settings.prompts = value;
    if (flag == "--waves") settings.waves = value;
    if (flag == "--puts") settings.puts = value;
    if (flag == "--path_blocks") settings.path_blocks = value;
    if (flag == "--own_blocks") settings.own_blocks = value;
    if (flag == "--block_bytes") settings.block_bytes = value;
  }
  if (settings.prompts > 0) kvtrie::MeasureWaves(settings);
  if (settings.puts > 0) kvtrie::MeasurePuts(settings);
  return 0;
}
