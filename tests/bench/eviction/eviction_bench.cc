// What eviction keeps, beside other policies and what could be kept at best: replays traces of
// requests.
//   eviction_bench [--trace NAME|FILE]... [--policy NAME]... [--footprint 10,25,50] [--seed 1]
//   [--shape reported|other]
//                  [--size 1.0] [--requests N] [--folder DIR] [--json FILE] [--check]
// Without --trace all synthetic ones; FILE is one of Mooncake's traces. Policies: kvtrie (the store
// itself), lru, lfu, s3-fifo, gdsf, belady, bound, unlimited. A cache holds so many percent of all
// distinct blocks of the trace.
// --check fails unless kvtrie saves at least as much as the best of lru, lfu, s3-fifo and gdsf
// everywhere (within kTie), and nothing saves more than the bound.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "nlohmann/json.hpp"
#include "storage/base/check.h"
#include "tests/bench/eviction/block_cache.h"
#include "tests/bench/eviction/engine_cache.h"
#include "tests/bench/eviction/index_cache.h"
#include "tests/bench/eviction/request_trace.h"
#include "tests/storage/base/scratch_folder.h"

namespace kvtrie::bench {
namespace {

// Savings that differ by less than this part are counted as equal.
constexpr double kTie = 0.005;

struct Outcome {
  std::uint64_t hit_blocks = 0;
  double seconds_saved = 0;
  std::uint64_t evicted_blocks = 0;
  std::uint64_t held_blocks_max = 0;
  double choose_seconds = 0;  // of `index`, in which victims were chosen
};

Outcome Replay(const RequestTrace& trace, BlockCache& cache) {
  Outcome outcome;
  for (const TraceRequest& request : trace.requests) {
    const std::uint32_t hits = cache.Serve(request);
    outcome.hit_blocks += hits;
    for (std::uint32_t i = 0; i < hits; ++i)
      outcome.seconds_saved += trace.RecomputeSeconds(request.path[i]);
    outcome.held_blocks_max = std::max(outcome.held_blocks_max, cache.held_blocks());
  }
  outcome.evicted_blocks = cache.evicted_blocks();
  return outcome;
}

struct Arguments {
  std::vector<std::string> traces;
  std::vector<std::string> policies;
  std::vector<double> footprints;
  std::uint64_t seed = 1;
  std::string shape = "reported";
  double size = 1;
  std::size_t requests_max = SIZE_MAX;
  // What is decided is measured, not the disk.
  std::string folder = std::filesystem::is_directory("/dev/shm")
                           ? "/dev/shm"
                           : std::filesystem::temp_directory_path().string();
  std::string json;
  bool check = false;
};

[[noreturn]] void Fail(const std::string& why) {
  std::fprintf(stderr, "eviction_bench: %s\n", why.c_str());
  std::exit(2);
}

Arguments Parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (flag == "--check") {
      arguments.check = true;
      continue;
    }
    if (i + 1 == argc) Fail(std::string(flag) + " is not known, or needs a value");
    const std::string value = argv[++i];
    if (flag == "--trace") {
      arguments.traces.push_back(value);
    } else if (flag == "--policy") {
      arguments.policies.push_back(value);
    } else if (flag == "--footprint") {
      for (std::size_t at = 0; at < value.size();) {
        const std::size_t comma = std::min(value.find(',', at), value.size());
        arguments.footprints.push_back(std::atof(value.substr(at, comma - at).c_str()));
        if (arguments.footprints.back() <= 0)
          Fail("--footprint: percents above 0, with commas between");
        at = comma + 1;
      }
    } else if (flag == "--seed") {
      arguments.seed = std::strtoull(value.c_str(), nullptr, 10);
    } else if (flag == "--shape") {
      if (value != "reported" && value != "other") Fail("--shape: reported or other");
      arguments.shape = value;
    } else if (flag == "--size") {
      arguments.size = std::atof(value.c_str());
      if (arguments.size <= 0) Fail("--size: must be above 0");
    } else if (flag == "--requests") {
      arguments.requests_max = std::strtoull(value.c_str(), nullptr, 10);
    } else if (flag == "--folder") {
      arguments.folder = value;
    } else if (flag == "--json") {
      arguments.json = value;
    } else {
      Fail(std::string(flag) + " is not known");
    }
  }
  if (arguments.traces.empty()) arguments.traces = SyntheticTraceNames();
  if (arguments.policies.empty()) {
    arguments.policies = BaselineNames();
    arguments.policies.insert(arguments.policies.end(), {"kvtrie", "bound", "unlimited"});
  }
  if (arguments.footprints.empty()) arguments.footprints = {10, 25, 50};
  return arguments;
}

RequestTrace TraceOf(const std::string& name, const Arguments& arguments) {
  TraceShape shape;
  if (arguments.shape == "other")
    shape = {.think = 1.8, .blocks = 0.7, .zipf = 1.1, .arrivals = 0.7, .size = 1};
  shape.size *= arguments.size;
  auto trace = name.find_first_of("./") == std::string::npos
                   ? MakeSyntheticTrace(name, arguments.seed, shape)
                   : ReadHashIdTrace(name, arguments.requests_max);
  if (!trace.ok()) Fail(std::string(trace.status().message()));
  if (trace->requests.size() > arguments.requests_max)
    trace->requests.resize(arguments.requests_max);
  return *std::move(trace);
}

Outcome RunPolicy(const std::string& policy, const RequestTrace& trace, std::size_t capacity,
                  const Arguments& arguments) {
  if (policy == "bound") return {.seconds_saved = RecomputeSecondsBound(trace, capacity)};
  if (policy == "kvtrie") {
    const ScratchFolder scratch(arguments.folder);
    auto cache = EngineCache::Open(scratch.path() + "/store", trace, capacity);
    if (!cache.ok()) Fail(std::string(cache.status().message()));
    return Replay(trace, **cache);
  }
  if (policy == "index") {
    IndexCache cache(trace, capacity);
    Outcome outcome = Replay(trace, cache);
    outcome.choose_seconds = cache.choose_seconds();
    return outcome;
  }
  const bool unlimited = policy == "unlimited";
  const auto cache =
      MakeBaseline(unlimited ? "lru" : policy, trace, unlimited ? trace.blocks.size() : capacity);
  if (cache == nullptr) Fail("--policy: " + policy + " is not known");
  return Replay(trace, *cache);
}

int Main(int argc, char** argv) {
  const Arguments arguments = Parse(argc, argv);
  std::ofstream json;
  if (!arguments.json.empty()) json.open(arguments.json, std::ios::app);
  std::vector<std::string> faults;
  for (const std::string& name : arguments.traces) {
    const RequestTrace trace = TraceOf(name, arguments);
    std::uint64_t prompt_blocks = 0;
    for (const TraceRequest& request : trace.requests) prompt_blocks += request.prompt_blocks;
    std::printf(
        "%s: %zu requests over %.0f s, %.1f M prompt tokens, %zu distinct blocks of %u tokens "
        "(seed %llu, shape %s)\n",
        trace.name.c_str(), trace.requests.size(),
        trace.requests.empty() ? 0 : trace.requests.back().seconds,
        static_cast<double>(prompt_blocks) * trace.block_tokens / 1e6, trace.blocks.size(),
        trace.block_tokens, static_cast<unsigned long long>(arguments.seed),
        arguments.shape.c_str());
    for (const double footprint : arguments.footprints) {
      const auto capacity =
          static_cast<std::size_t>(static_cast<double>(trace.blocks.size()) * footprint / 100);
      std::map<std::string, double> saved;
      for (const std::string& policy : arguments.policies) {
        const auto begin = std::chrono::steady_clock::now();
        const Outcome outcome = RunPolicy(policy, trace, capacity, arguments);
        const double run_seconds =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        saved[policy] = outcome.seconds_saved;
        std::printf(
            "  %4.0f %%  %-9s  hit tokens %7.2f M (%4.1f %%)  recompute saved %9.1f s  evicted "
            "%7llu  held %7llu of %zu  (%.1f s)\n",
            footprint, policy.c_str(),
            static_cast<double>(outcome.hit_blocks) * trace.block_tokens / 1e6,
            100.0 * static_cast<double>(outcome.hit_blocks) / static_cast<double>(prompt_blocks),
            outcome.seconds_saved, static_cast<unsigned long long>(outcome.evicted_blocks),
            static_cast<unsigned long long>(outcome.held_blocks_max), capacity, run_seconds);
        if (outcome.choose_seconds > 0) {
          std::printf("        %.2f us to choose each block that goes\n",
                      1e6 * outcome.choose_seconds / static_cast<double>(outcome.evicted_blocks));
        }
        std::fflush(stdout);
        if (json.is_open()) {
          nlohmann::ordered_json row{{"name", "eviction"},
                                     {"trace", trace.name},
                                     {"seed", arguments.seed},
                                     {"shape", arguments.shape},
                                     {"requests", trace.requests.size()},
                                     {"distinct_blocks", trace.blocks.size()},
                                     {"footprint_percent", footprint},
                                     {"capacity_blocks", capacity},
                                     {"policy", policy}};
          if (policy != "bound") {
            row["hit_tokens"] = outcome.hit_blocks * trace.block_tokens;
            row["prompt_tokens"] = prompt_blocks * trace.block_tokens;
            row["evicted_blocks"] = outcome.evicted_blocks;
            row["held_blocks_max"] = outcome.held_blocks_max;
          }
          row["recompute_seconds_saved"] = outcome.seconds_saved;
          json << row.dump() << '\n';
        }
        if (policy != "unlimited" && outcome.held_blocks_max > capacity) {
          faults.push_back(trace.name + ": " + policy + " holds more than its capacity");
        }
      }
      const auto expect_at_least = [&](const std::string& policy, double least,
                                       const std::string& what) {
        if (saved.contains(policy) && saved[policy] < least) {
          faults.push_back(trace.name + " at " + std::to_string(static_cast<int>(footprint)) +
                           " %: " + policy + " saves less than " + what);
        }
      };
      for (const auto& [policy, seconds] : saved) {
        if (policy != "unlimited") expect_at_least("bound", seconds * (1 - 1e-9), policy);
        if (policy == "lru" || policy == "lfu" || policy == "s3-fifo" || policy == "gdsf") {
          expect_at_least("kvtrie", seconds * (1 - kTie), policy);
        }
      }
    }
  }
  for (const std::string& fault : faults)
    std::printf("%s%s\n", arguments.check ? "FAULT " : "note: ", fault.c_str());
  return arguments.check && !faults.empty() ? 1 : 0;
}

}  // namespace
}  // namespace kvtrie::bench

int main(int argc, char** argv) { return kvtrie::bench::Main(argc, argv); }
