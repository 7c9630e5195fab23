// What the payload store makes of the disk: records written and read through it, and with --raw the
// same bytes through plain O_DIRECT calls on a preallocated file, in alternating rounds of one run.
//
//   payload_store_bench --op both --block-bytes 262144 --blocks 4096 --threads 4 --path /data --raw
//   payload_store_bench --op both --block-bytes 5000 --group 16 --blocks 65536 --path /data
//
// A group is what is appended in one call. Prints one JSON object per line; disk_per_payload is
// what the store's files take for each byte of payload. Payloads are incompressible (seeded) and
// larger together than a core's cache; writes end with a sync, reads are in random order. CPU
// seconds are those of the process, user and system.

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "nlohmann/json.hpp"
#include "storage/base/byte_order.h"
#include "storage/base/check.h"
#include "storage/base/file_system.h"
#include "storage/base/shared_bytes.h"
#include "storage/payload/payload_store.h"
#include "storage/payload/segment_store.h"

namespace kvtrie {
namespace {

constexpr std::uint64_t kSeed = 1;
// Buffers that a thread walks through, so that data is not always warm in its L2 cache.
constexpr std::size_t kBytesPerThread = std::size_t{8} << 20;

struct Arguments {
  std::string op = "both";
  std::size_t block_bytes = std::size_t{256} << 10;
  std::size_t blocks = 2048;
  std::size_t group = 1;
  std::size_t threads = 1;
  std::size_t rounds = 1;
  std::string path = ".";
  bool raw = false;
};

struct Measurement {
  double seconds = 0;
  double cpu_seconds = 0;
  double disk_per_payload = 0;  // of puts
  std::vector<double> latencies_us;
};

double CpuSeconds() {
  rusage usage;
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

void Require(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

// Calls `call(thread, index)` for each of `calls` indices once, spread over the threads, and times
// each call; the whole includes `finish`.
Measurement Run(
    const Arguments& arguments, std::size_t calls,
    const std::function<void(std::size_t thread, std::size_t index)>& call,
    const std::function<void()>& finish = [] {}) {
  using Clock = std::chrono::steady_clock;
  std::vector<std::vector<double>> latencies(arguments.threads);
  Measurement result;
  const double cpu_before = CpuSeconds();
  const auto start = Clock::now();
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < arguments.threads; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::size_t i = thread; i < calls; i += arguments.threads) {
        const auto before = Clock::now();
        call(thread, i);
        latencies[thread].push_back(
            std::chrono::duration<double, std::micro>(Clock::now() - before).count());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  finish();
  result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  result.cpu_seconds = CpuSeconds() - cpu_before;
  for (const auto& some : latencies) {
    result.latencies_us.insert(result.latencies_us.end(), some.begin(), some.end());
  }
  std::sort(result.latencies_us.begin(), result.latencies_us.end());
  return result;
}

void FillRandom(std::span<std::byte> bytes, std::mt19937_64& random) {
  for (std::size_t at = 0; at + sizeof(std::uint64_t) <= bytes.size();
       at += sizeof(std::uint64_t)) {
    StoreLittle(bytes.data() + at, random());
  }
}

std::size_t BuffersPerThread(const Arguments& arguments) {
  return std::max(arguments.group, kBytesPerThread / arguments.block_bytes);
}

// The order of reads, the same for both ways.
std::vector<std::size_t> ReadOrder(const Arguments& arguments) {
  std::vector<std::size_t> order(arguments.blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(kSeed));
  return order;
}

using Results = std::map<std::string, std::vector<Measurement>>;

std::uint64_t AllocatedBytes(const std::string& folder) {
  std::uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const auto file =
        PosixFileSystem().Open(entry.path(), FileSystem::Mode::kReadOnly, /*direct=*/false);
    Require(file.status());
    bytes += (*file)->AllocatedBytes().value();
  }
  return bytes;
}

void UseStore(const Arguments& arguments, PayloadStore& store, Results& results) {
  std::mt19937_64 random(kSeed);
  std::vector<std::vector<PayloadRecord>> records(arguments.threads);
  for (auto& some : records) {
    for (std::size_t i = 0; i < BuffersPerThread(arguments); ++i) {
      FillRandom(some.emplace_back("a record of the benchmark", arguments.block_bytes).payload(),
                 random);
    }
  }
  std::vector<PayloadLocation> places(arguments.blocks);
  std::vector<std::size_t> next_buffer(arguments.threads);
  results["put"].push_back(Run(
      arguments, (arguments.blocks + arguments.group - 1) / arguments.group,
      [&](std::size_t thread, std::size_t i) {
        const std::size_t first = i * arguments.group;
        const std::size_t end = std::min(arguments.blocks, first + arguments.group);
        std::vector<PayloadRecord*> group;
        for (std::size_t block = first; block < end; ++block) {
          PayloadRecord& record = records[thread][next_buffer[thread]++ % records[thread].size()];
          StoreLittle(record.payload().data(), std::uint64_t{block});
          group.push_back(&record);
        }
        const auto written = store.AppendGroup(group);
        Require(written.status());
        std::copy(written->begin(), written->end(), places.begin() + static_cast<long>(first));
      },
      [&] { Require(store.Sync()); }));
  if (arguments.op == "put") return;

  const auto order = ReadOrder(arguments);
  results["get_disk"].push_back(Run(arguments, arguments.blocks, [&](std::size_t, std::size_t i) {
    const auto payload = store.Read(places[order[i]]);
    Require(payload.status());
    KV_CHECK(LoadLittle<std::uint64_t>(payload->view.data()) == order[i]);
  }));
}

void RunStore(const Arguments& arguments, const std::string& folder, Results& results) {
  auto store = OpenSegmentStore(PosixFileSystem(), folder, SegmentStoreOptions());
  Require(store.status());
  Require((*store)->FinishRecovery().status());
  UseStore(arguments, **store, results);
  // Closing gives back what was allocated ahead.
  store->reset();
  results["put"].back().disk_per_payload =
      static_cast<double>(AllocatedBytes(folder)) /
      (static_cast<double>(arguments.blocks) * static_cast<double>(arguments.block_bytes));
}

void RunRaw(const Arguments& arguments, const std::string& path, Results& results) {
  auto opened = PosixFileSystem().Open(path, FileSystem::Mode::kCreateNew, /*direct=*/true);
  Require(opened.status());
  File& file = **opened;
  if (!file.direct()) std::fprintf(stderr, "%s: no direct I/O here\n", path.c_str());
  Require(file.Allocate(0, arguments.blocks * arguments.block_bytes));

  std::mt19937_64 random(kSeed);
  std::vector<std::vector<AlignedBuffer>> buffers(arguments.threads);
  for (auto& some : buffers) {
    for (std::size_t i = 0; i < BuffersPerThread(arguments); ++i) {
      AlignedBuffer& buffer = some.emplace_back(arguments.block_bytes);
      FillRandom({buffer.data(), buffer.size()}, random);
    }
  }
  const auto buffer_of = [&](std::size_t thread, std::size_t i) {
    AlignedBuffer& buffer = buffers[thread][i / arguments.threads % buffers[thread].size()];
    return std::span(buffer.data(), arguments.block_bytes);
  };
  results["put"].push_back(Run(
      arguments, arguments.blocks,
      [&](std::size_t thread, std::size_t i) {
        const auto bytes = buffer_of(thread, i);
        StoreLittle(bytes.data(), std::uint64_t{i});
        Require(file.Write(i * arguments.block_bytes, bytes));
      },
      [&] { Require(file.SyncData()); }));
  if (arguments.op == "put") return;

  const auto order = ReadOrder(arguments);
  results["get_disk"].push_back(
      Run(arguments, arguments.blocks, [&](std::size_t thread, std::size_t i) {
        const auto bytes = buffer_of(thread, i);
        Require(file.Read(order[i] * arguments.block_bytes, bytes).status());
        KV_CHECK(LoadLittle<std::uint64_t>(bytes.data()) == order[i]);
      }));
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double Percentile(const std::vector<double>& sorted, std::size_t percent) {
  return sorted[std::min(sorted.size() - 1, sorted.size() * percent / 100)];
}

void Report(const Arguments& arguments, const std::string& peer, const std::string& op,
            const std::vector<Measurement>& rounds, const std::vector<Measurement>* raw_rounds) {
  const double gigabytes =
      static_cast<double>(arguments.blocks) * static_cast<double>(arguments.block_bytes) / 1e9;
  const auto median_of = [&rounds](auto&& value) {
    std::vector<double> values;
    for (const Measurement& round : rounds) values.push_back(value(round));
    return Median(values);
  };
  nlohmann::ordered_json line;
  line["peer"] = peer;
  line["op"] = op;
  line["block_bytes"] = arguments.block_bytes;
  line["clients"] = arguments.threads;
  line["batch"] = peer == "payload-store" && op == "put" ? arguments.group : 1;
  line["gb_per_s"] = median_of([&](const Measurement& round) { return gigabytes / round.seconds; });
  line["cpu_s_per_gb"] =
      median_of([&](const Measurement& round) { return round.cpu_seconds / gigabytes; });
  line["p50_us"] =
      median_of([](const Measurement& round) { return Percentile(round.latencies_us, 50); });
  line["p99_us"] =
      median_of([](const Measurement& round) { return Percentile(round.latencies_us, 99); });
  if (rounds.back().disk_per_payload > 0) {
    line["disk_per_payload"] = rounds.back().disk_per_payload;
  }
  line["rounds"] = rounds.size();
  if (raw_rounds != nullptr) {
    // Neighbours in time are compared, so that a slow minute of the machine hits both.
    std::vector<double> ratios;
    for (std::size_t i = 0; i < rounds.size(); ++i) {
      ratios.push_back((*raw_rounds)[i].seconds / rounds[i].seconds);
    }
    line["ratio_to_raw"] = Median(ratios);
    line["ratio_to_raw_min"] = *std::min_element(ratios.begin(), ratios.end());
    line["ratio_to_raw_max"] = *std::max_element(ratios.begin(), ratios.end());
  }
  std::printf("%s\n", line.dump().c_str());
}

int Main(const Arguments& arguments) {
  const std::filesystem::path place = arguments.path;
  const std::string folder = place / "payload_store_bench.store";
  const std::string raw_file = place / "payload_store_bench.raw";
  const auto clean = [&] {
    std::filesystem::remove_all(folder);
    std::filesystem::remove(raw_file);
  };
  Results store;
  Results raw;
  for (std::size_t round = 0; round < arguments.rounds; ++round) {
    clean();
    // Each goes first in every other round.
    if (arguments.raw && round % 2 == 0) RunRaw(arguments, raw_file, raw);
    RunStore(arguments, folder, store);
    if (arguments.raw && round % 2 == 1) RunRaw(arguments, raw_file, raw);
  }
  clean();
  for (const std::string op : {"put", "get_disk"}) {
    if (arguments.op != "both" && arguments.op != op) continue;
    if (arguments.raw) Report(arguments, "o_direct", op, raw[op], nullptr);
    Report(arguments, "payload-store", op, store[op], arguments.raw ? &raw[op] : nullptr);
  }
  return 0;
}

// Exits with a usage message when an argument is unknown or wrong.
Arguments ParseArguments(int count, char** values) {
  Arguments arguments;
  const auto usage = [] {
    std::fprintf(
        stderr,
        "usage: payload_store_bench [--op put|get_disk|both] [--block-bytes N] [--blocks N]\n"
        "         [--group N] [--threads N] [--rounds N] [--path FOLDER] [--raw] [--json]\n");
    std::exit(2);
  };
  for (int i = 1; i < count; ++i) {
    const std::string name = values[i];
    if (name == "--raw") {
      arguments.raw = true;
      continue;
    }
    if (name == "--json") continue;  // as the other benchmarks have it; there is no other form
    if (++i == count) usage();
    const std::string value = values[i];
    const std::map<std::string, std::size_t*> numbers = {{"--block-bytes", &arguments.block_bytes},
                                                         {"--blocks", &arguments.blocks},
                                                         {"--group", &arguments.group},
                                                         {"--threads", &arguments.threads},
                                                         {"--rounds", &arguments.rounds}};
    if (const auto number = numbers.find(name); number != numbers.end()) {
      *number->second = std::strtoull(value.c_str(), nullptr, 10);
      if (*number->second == 0) usage();
    } else if (name == "--op") {
      arguments.op = value;
    } else if (name == "--path") {
      arguments.path = value;
    } else {
      usage();
    }
  }
  if (arguments.op != "put" && arguments.op != "get_disk" && arguments.op != "both") usage();
  if (arguments.raw && arguments.block_bytes % AlignedBuffer::kAlignment != 0) usage();
  return arguments;
}

}  // namespace
}  // namespace kvtrie

int main(int count, char** values) { return kvtrie::Main(kvtrie::ParseArguments(count, values)); }
