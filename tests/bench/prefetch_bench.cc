// How long a Fetch takes after a Lookup with a lease, of a path that is on the disk only, with and
// without reading ahead; through a server on loopback, over gRPC. The server is started anew for
// each setting, and the system forgets what it had of the files. Beside it, what a lookup of a path
// in memory takes the engine: plain, with runs, with a lease.
//   prefetch_bench [--sessions 40] [--blocks 64] [--block_bytes 262144] [--gap_ms 20]
//                  [--prefetch_bytes 0,67108864] [--folder /tmp]
// Content comes from a seeded generator (seed 1). Prints one JSON object per setting.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "client/client.h"
#include "client/ctl/bench_workload.h"
#include "server/kv_server.h"
#include "storage/base/check.h"
#include "tests/bench/best_cpu_seconds.h"

namespace kvtrie {
namespace {

struct Settings {
  std::size_t sessions = 40;
  std::size_t blocks = 64;
  std::size_t block_bytes = 256 << 10;
  std::chrono::milliseconds gap{20};
  std::vector<std::uint64_t> prefetch_bytes = {0, std::uint64_t{64} << 20};
  std::string folder = "/tmp";
};

void ForgetFiles(const std::string& folder) {
  ::sync();
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const int fd = ::open(entry.path().c_str(), O_RDONLY);
    if (fd < 0) continue;
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
  }
}

std::unique_ptr<KvServer> StartServer(const Settings& settings, const std::string& data,
                                      std::uint64_t prefetch_bytes) {
  ServerConfig config;
  config.engine.data_dir = data;
  config.engine.disk_limit_bytes = std::max<std::uint64_t>(
      256 << 20, 2 * settings.sessions * settings.blocks * (settings.block_bytes + 8192));
  config.engine.prefetch_bytes = prefetch_bytes;
  config.listen = *ParseListenAddress("127.0.0.1:0");
  config.admin_listen = *ParseListenAddress("127.0.0.1:0");
  config.http_listen = *ParseListenAddress("127.0.0.1:0");
  config.local_socket = "";
  auto server = KvServer::Start(config);
  KV_CHECK(server.ok());
  // The memory of the tier is taken in the background; gone on for as long as it grows.
  for (std::uint64_t before = 1, now = 0; before != now;) {
    before = now;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    now = (*server)->engine().Stats().prefaulted_bytes;
  }
  return *std::move(server);
}

std::unique_ptr<Client> Connect(const KvServer& server) {
  ClientOptions options;
  options.targets = {server.addresses().listen};
  options.lane = Lane::kGrpc;
  auto client = Client::Create(options);
  KV_CHECK(client.ok());
  return *std::move(client);
}

double Percentile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(part * static_cast<double>(values.size() - 1))];
}

// CPU time of one lookup, in microseconds.
double LookupMicroseconds(Engine& engine, const LookupQuery& query) {
  constexpr int kLookups = 100;
  return 1e6 / kLookups * BestCpuSeconds(20, [&] {
           for (int i = 0; i < kLookups; ++i) {
             const auto found = engine.TryLookup(kBuiltInTenant, query);
             KV_CHECK(found.has_value());
             KV_CHECK(found->ok());
             if (!(*found)->lease.empty()) engine.ReleaseLease(kBuiltInTenant, (*found)->lease);
           }
         });
}

void Run(const Settings& settings) {
  std::string data = settings.folder + "/prefetch-bench-XXXXXX";
  KV_CHECK(mkdtemp(data.data()) != nullptr);
  const ModelSpec spec = *BenchModel(settings.block_bytes);
  std::vector<std::byte> memory(settings.blocks * settings.block_bytes);
  {
    const auto server = StartServer(settings, data, 0);
    const auto client = Connect(*server);
    const auto model = client->RegisterModel(spec);
    KV_CHECK(model.ok());
    for (std::size_t session = 0; session < settings.sessions; ++session) {
      FillIncompressible(memory, session);
      std::vector<std::span<const std::byte>> blocks;
      for (std::size_t i = 0; i < settings.blocks; ++i) {
        const auto block =
            std::span(memory).subspan(i * settings.block_bytes, settings.block_bytes);
        StampBlock(block, session, i);
        blocks.push_back(block);
      }
      const auto tokens = BenchTokens(1, session, settings.blocks);
      PutPath path;
      path.path = {.model = model->id, .tokens = tokens, .salt = {}, .extra_keys = {}};
      path.blocks = blocks;
      path.durable = true;
      KV_CHECK(client->Put({&path, 1})[0].all_stored());
    }
  }
  for (const std::uint64_t prefetch_bytes : settings.prefetch_bytes) {
    ForgetFiles(data);
    const auto server = StartServer(settings, data, prefetch_bytes);
    const auto client = Connect(*server);
    const auto model = client->RegisterModel(spec);
    KV_CHECK(model.ok());
    std::vector<double> fetch_ms, lookup_ms;
    for (std::size_t session = 0; session < settings.sessions; ++session) {
      const auto tokens = BenchTokens(1, session, settings.blocks);
      LookupOptions options;
      options.lease = std::chrono::seconds(10);
      const auto asked = std::chrono::steady_clock::now();
      const auto found = client->Lookup(model->id, tokens, options);
      const auto answered = std::chrono::steady_clock::now();
      KV_CHECK(found.ok());
      KV_CHECK(found->matched_blocks() == settings.blocks);
      std::this_thread::sleep_for(settings.gap);
      std::vector<FetchTarget> targets(settings.blocks);
      for (std::size_t i = 0; i < settings.blocks; ++i) {
        std::memcpy(targets[i].node.bytes.data(), found->blocks(0).node_ids().data() + 16 * i, 16);
        targets[i].raw = std::span(memory).subspan(i * settings.block_bytes, settings.block_bytes);
      }
      FetchOptions fetch;
      fetch.release_lease = *LeaseId::FromBytes(found->lease_id());
      const auto began = std::chrono::steady_clock::now();
      KV_CHECK(client->Fetch(model->id, targets, fetch).all_loaded());
      const auto done = std::chrono::steady_clock::now();
      for (std::size_t i = 0; i < settings.blocks; ++i) {
        KV_CHECK(HasStamp(targets[i].raw, session, i));
      }
      using ms = std::chrono::duration<double, std::milli>;
      lookup_ms.push_back(ms(answered - asked).count());
      fetch_ms.push_back(ms(done - began).count());
    }
    const EngineStats stats = server->engine().Stats();
    const auto tokens = BenchTokens(1, settings.sessions - 1, settings.blocks);
    LookupQuery query;
    query.models = {model->id};
    query.path = {.model = model->id, .tokens = tokens, .salt = {}, .extra_keys = {}};
    query.want_blocks = true;
    const double plain_us = LookupMicroseconds(server->engine(), query);
    query.want_runs = true;
    const double runs_us = LookupMicroseconds(server->engine(), query);
    query.want_runs = false;
    query.lease = std::chrono::seconds(1);
    const double lease_us = LookupMicroseconds(server->engine(), query);
    std::printf(
        "{\"prefetch_bytes\": %llu, \"gap_ms\": %lld, \"path_bytes\": %zu, \"sessions\": %zu, "
        "\"fetch_p50_ms\": %.2f, \"fetch_p90_ms\": %.2f, \"lookup_p50_ms\": %.3f, "
        "\"prefetched\": %llu, \"useful\": %llu, \"wasted\": %llu, \"disk_reads\": %llu, "
        "\"engine_lookup_us\": %.1f, \"with_runs_us\": %.1f, \"with_lease_us\": %.1f}\n",
        static_cast<unsigned long long>(prefetch_bytes),
        static_cast<long long>(settings.gap.count()), memory.size(), settings.sessions,
        Percentile(fetch_ms, 0.5), Percentile(fetch_ms, 0.9), Percentile(lookup_ms, 0.5),
        static_cast<unsigned long long>(stats.prefetched_frames_total),
        static_cast<unsigned long long>(stats.prefetch_useful_frames_total),
        static_cast<unsigned long long>(stats.prefetch_wasted_frames_total),
        static_cast<unsigned long long>(stats.disk_reads_total), plain_us, runs_us, lease_us);
  }
  std::filesystem::remove_all(data);
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) {
  kvtrie::Settings settings;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const std::string value = argv[i + 1];
    if (name == "--sessions") {
      settings.sessions = std::stoull(value);
    } else if (name == "--blocks") {
      settings.blocks = std::stoull(value);
    } else if (name == "--block_bytes") {
      settings.block_bytes = std::stoull(value);
    } else if (name == "--gap_ms") {
      settings.gap = std::chrono::milliseconds(std::stoll(value));
    } else if (name == "--folder") {
      settings.folder = value;
    } else if (name == "--prefetch_bytes") {
      settings.prefetch_bytes.clear();
      std::istringstream list(value);
      for (std::string part; std::getline(list, part, ',');) {
        settings.prefetch_bytes.push_back(std::stoull(part));
      }
    } else {
      std::fprintf(stderr, "unknown option %s\n", name.c_str());
      return 2;
    }
  }
  kvtrie::Run(settings);
  return 0;
}
