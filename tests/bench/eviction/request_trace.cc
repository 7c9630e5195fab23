#include "tests/bench/eviction/request_trace.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <fstream>
#include <map>
#include <random>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace kvtrie::bench {
namespace {

constexpr std::uint32_t kBlockTokens = 128;
constexpr std::uint32_t kHashIdTokens = 512;

// The distributions of the standard library differ between libraries; these do not.
class TraceRandom {
 public:
  explicit TraceRandom(std::uint64_t seed) : engine_(seed) {}

  double Unit() { return (static_cast<double>(engine_() >> 11) + 0.5) / 9007199254740992.0; }
  bool Chance(double probability) { return Unit() < probability; }
  std::uint32_t Between(std::uint32_t low, std::uint32_t high) {
    return low + static_cast<std::uint32_t>(engine_() % (high - low + 1));
  }
  double Exponential(double mean) { return -mean * std::log(Unit()); }
  double LogNormal(double median, double sigma) {
    const double normal =
        std::sqrt(-2 * std::log(Unit())) * std::cos(2 * 3.14159265358979 * Unit());
    return median * std::exp(sigma * normal);
  }

 private:
  std::mt19937_64 engine_;
};

// Ranks by Zipf's law.
class ZipfRanks {
 public:
  ZipfRanks(std::size_t count, double exponent) {
    double sum = 0;
    for (std::size_t rank = 1; rank <= count; ++rank) {
      sum += std::pow(static_cast<double>(rank), -exponent);
      sums_.push_back(sum);
    }
  }
  std::size_t Draw(TraceRandom& random) const {
    const double at = random.Unit() * sums_.back();
    return static_cast<std::size_t>(std::lower_bound(sums_.begin(), sums_.end(), at) -
                                    sums_.begin());
  }

 private:
  std::vector<double> sums_;
};

class TraceBuilder {
 public:
  TraceBuilder(std::uint64_t seed, const TraceShape& shape) : random(seed), shape_(shape) {}

  std::uint32_t Scaled(std::uint32_t blocks) const {
    return std::max(1u, static_cast<std::uint32_t>(std::lround(blocks * shape_.blocks)));
  }
  void Extend(std::vector<BlockIndex>* path, std::uint32_t count) {
    for (; count > 0; --count) {
      TraceBlock block;
      if (!path->empty()) block = {path->back(), trace.blocks[path->back()].depth + 1};
      trace.blocks.push_back(block);
      path->push_back(static_cast<BlockIndex>(trace.blocks.size() - 1));
    }
  }
  // A prompt, and its answer of so many blocks, which are appended to it.
  void Ask(double seconds, std::vector<BlockIndex>* path, std::uint32_t answer_blocks) {
    const auto prompt_blocks = static_cast<std::uint32_t>(path->size());
    Extend(path, answer_blocks);
    trace.requests.push_back({seconds, prompt_blocks, *path});
  }

  // Sessions that come during `seconds`, at so many per second.
  void Chats(double begin, double seconds, double per_second) {
    std::vector<std::vector<BlockIndex>> system_prompts(8);
    for (auto& prompt : system_prompts) Extend(&prompt, Scaled(random.Between(4, 24)));
    const ZipfRanks popularity(system_prompts.size(), 1.0);
    for (double at = begin; at < begin + seconds; at += random.Exponential(1 / per_second)) {
      std::vector<BlockIndex> path = system_prompts[popularity.Draw(random)];
      if (random.Chance(0.1)) Extend(&path, Scaled(random.Between(20, 60)));  // a pasted text
      double now = at;
      do {
        Extend(&path, Scaled(random.Between(1, 4)));
        Ask(now, &path, Scaled(random.Between(2, 8)));
        now += 5 + random.LogNormal(115 * shape_.think, 1.1);
      } while (random.Chance(0.75) && path.size() < 1000);
    }
  }

  void Agents(double begin, double seconds, double per_second) {
    std::vector<std::vector<BlockIndex>> system_prompts(6);
    for (auto& prompt : system_prompts) Extend(&prompt, Scaled(random.Between(60, 120)));
    const ZipfRanks popularity(system_prompts.size(), 0.8);
    for (double at = begin; at < begin + seconds; at += random.Exponential(1 / per_second)) {
      std::vector<BlockIndex> task = system_prompts[popularity.Draw(random)];
      Extend(&task, random.Between(1, 4));
      const int samples = random.Chance(0.15) ? 3 : 1;
      for (int sample = 0; sample < samples; ++sample) {
        std::vector<BlockIndex> path = task;
        std::vector<std::size_t> step_ends;
        double now = at + sample;
        const std::uint32_t steps = random.Between(4, samples == 1 ? 32 : 16);
        for (std::uint32_t step = 0; step < steps; ++step) {
          Ask(now, &path, random.Between(1, 2));
          step_ends.push_back(path.size());
          // A retry goes back some steps and takes another way.
          if (step_ends.size() > 2 && random.Chance(0.12)) {
            step_ends.resize(step_ends.size() - random.Between(1, 2));
            path.resize(step_ends.back());
          }
          Extend(&path, Scaled(random.Chance(0.1) ? random.Between(15, 40) : random.Between(1, 6)));
          now += random.Chance(0.04)
                     ? random.LogNormal(180 * shape_.think, 0.8)  // somebody has to agree
                     : random.LogNormal(6 * shape_.think, 0.7);
        }
      }
    }
  }

  void Documents(double begin, double seconds, double per_second, std::size_t count) {
    std::vector<std::vector<BlockIndex>> templates(3);
    for (auto& text : templates) Extend(&text, random.Between(2, 6));
    std::vector<std::uint32_t> sizes;
    for (std::size_t i = 0; i < count; ++i) sizes.push_back(Scaled(random.Between(20, 180)));
    std::vector<std::size_t> ranks(count);
    for (std::size_t i = 0; i < count; ++i) ranks[i] = i;
    std::map<std::pair<std::size_t, std::size_t>, std::vector<BlockIndex>>
        paths;  // (template, document)
    const ZipfRanks popularity(count, shape_.zipf);
    const ZipfRanks template_popularity(templates.size(), 1.2);
    double next_drift = begin;
    for (double at = begin; at < begin + seconds; at += random.Exponential(1 / per_second)) {
      if (at >= next_drift) {
        // Some documents become more or less popular.
        for (std::size_t i = 0; i < count / 50; ++i) {
          std::swap(ranks[random.Between(0, static_cast<std::uint32_t>(count - 1))],
                    ranks[random.Between(0, static_cast<std::uint32_t>(count - 1))]);
        }
        next_drift += seconds / 20;
      }
      const std::size_t document = ranks[popularity.Draw(random)];
      const std::size_t text = template_popularity.Draw(random);
      std::vector<BlockIndex>& shared = paths[{text, document}];
      if (shared.empty()) {
        shared = templates[text];
        Extend(&shared, sizes[document]);
      }
      std::vector<BlockIndex> path = shared;
      Extend(&path, random.Between(1, 2));
      double now = at;
      Ask(now, &path, random.Between(1, 3));
      while (random.Chance(0.25)) {  // a second question
        now += 5 + random.LogNormal(30 * shape_.think, 1.0);
        Extend(&path, 1);
        Ask(now, &path, random.Between(1, 3));
      }
    }
  }

  // Prompts that nobody asks twice, half of them under one instruction.
  void Scan(double begin, std::size_t count, double per_second) {
    if (instruction_.empty()) Extend(&instruction_, 4);
    double at = begin;
    for (std::size_t i = 0; i < count; ++i, at += random.Exponential(1 / per_second)) {
      std::vector<BlockIndex> path;
      if (random.Chance(0.5)) path = instruction_;
      Extend(&path, Scaled(random.Between(20, 180)));
      Ask(at, &path, 1);
    }
  }

  // A text that many ask about for some minutes.
  void Burst(double begin) {
    std::vector<BlockIndex> text;
    Extend(&text, Scaled(random.Between(60, 200)));
    const double seconds = random.Between(60, 400);
    const double per_second = 0.2 + random.Exponential(0.6);
    for (double at = begin; at < begin + seconds; at += random.Exponential(1 / per_second)) {
      std::vector<BlockIndex> path = text;
      Extend(&path, random.Between(1, 2));
      Ask(at, &path, random.Between(1, 4));
    }
  }

  RequestTrace Finish(std::string_view name) {
    trace.name = name;
    trace.block_tokens = kBlockTokens;
    std::stable_sort(
        trace.requests.begin(), trace.requests.end(),
        [](const TraceRequest& a, const TraceRequest& b) { return a.seconds < b.seconds; });
    return std::move(trace);
  }

  TraceRandom random;
  RequestTrace trace;

 private:
  const TraceShape shape_;
  std::vector<BlockIndex> instruction_;
};

}  // namespace

std::vector<std::string> SyntheticTraceNames() {
  return {"chat", "agents", "documents", "scans", "bursts", "mixed"};
}

absl::StatusOr<RequestTrace> MakeSyntheticTrace(std::string_view name, std::uint64_t seed,
                                                const TraceShape& shape) {
  TraceBuilder builder(
      seed * 1'000'003 + name.size() * 31 + static_cast<unsigned char>(name.front()), shape);
  const double rate = shape.arrivals;
  const auto seconds = [&shape](double at_size_1) {
    return at_size_1 * shape.size / shape.arrivals;
  };
  const auto count = [&shape](double at_size_1) {
    return static_cast<std::size_t>(at_size_1 * shape.size) + 1;
  };
  if (name == "chat") {
    builder.Chats(0, seconds(2400), 1.5 * rate);
  } else if (name == "agents") {
    builder.Agents(0, seconds(1200), 0.9 * rate);
  } else if (name == "documents") {
    builder.Documents(0, seconds(4000), 2 * rate, count(900));
  } else if (name == "scans") {
    builder.Documents(0, seconds(3600), 1.5 * rate, count(250));
    for (int sweep = 0; sweep < 4; ++sweep)
      builder.Scan(seconds(500 + 800 * sweep), count(180), 2 * rate);
  } else if (name == "bursts") {
    builder.Chats(0, seconds(3000), 0.8 * rate);
    for (std::size_t i = 0; i < count(120); ++i)
      builder.Burst(builder.random.Unit() * seconds(3000));
  } else if (name == "mixed") {
    builder.Chats(0, seconds(3000), 1.0 * rate);
    builder.Agents(0, seconds(3000), 0.012 * rate);
    builder.Documents(0, seconds(3000), 0.9 * rate, count(1500));
    builder.Scan(0, count(1800), 0.6 * rate);  // all the time
    for (int sweep = 0; sweep < 3; ++sweep) {
      builder.Scan(seconds(400 + 900 * sweep), count(150), 1 * rate);
    }
    for (std::size_t i = 0; i < count(3); ++i) {
      builder.Burst(builder.random.Unit() * seconds(3000));
    }
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("trace: ", std::string(name), " is not one of ",
                     "chat, agents, documents, scans, bursts, mixed"));
  }
  return builder.Finish(name);
}

absl::StatusOr<RequestTrace> ReadHashIdTrace(const std::string& path, std::size_t requests_max) {
  std::ifstream file(path);
  if (!file) return absl::InvalidArgumentError(absl::StrCat("trace: cannot read ", path));
  RequestTrace trace;
  const std::size_t slash = path.find_last_of('/');
  trace.name = path.substr(slash == std::string::npos ? 0 : slash + 1);
  trace.name = trace.name.substr(0, trace.name.find('.'));
  trace.block_tokens = kHashIdTokens;
  std::map<std::pair<BlockIndex, std::uint64_t>, BlockIndex> children;  // (parent, hash id)
  std::string line;
  for (std::size_t number = 1; trace.requests.size() < requests_max && std::getline(file, line);
       ++number) {
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || !json.contains("timestamp") || !json["timestamp"].is_number() ||
        !json.contains("hash_ids") || !json["hash_ids"].is_array()) {
      return absl::InvalidArgumentError(absl::StrCat("trace: ", path, ", line ", number,
                                                     ": is no object with timestamp and hash_ids"));
    }
    TraceRequest request{json["timestamp"].get<double>() / 1000, 0, {}};
    BlockIndex parent = kNoBlock;
    std::size_t full_blocks = json["hash_ids"].size();
    // The last id may stand for fewer tokens than a block has, which a store does not keep.
    if (json.contains("input_length") && json["input_length"].is_number_unsigned()) {
      full_blocks = std::min(full_blocks, json["input_length"].get<std::size_t>() / kHashIdTokens);
    }
    for (std::size_t i = 0; i < full_blocks; ++i) {
      if (!json["hash_ids"][i].is_number_unsigned()) {
        return absl::InvalidArgumentError(
            absl::StrCat("trace: ", path, ", line ", number, ": hash_ids holds more than numbers"));
      }
      const auto [child, is_new] =
          children.try_emplace({parent, json["hash_ids"][i].get<std::uint64_t>()},
                               static_cast<BlockIndex>(trace.blocks.size()));
      if (is_new) {
        trace.blocks.push_back({parent, parent == kNoBlock ? 1 : trace.blocks[parent].depth + 1});
      }
      parent = child->second;
      request.path.push_back(parent);
    }
    if (request.path.empty()) continue;
    request.prompt_blocks = static_cast<std::uint32_t>(request.path.size());
    trace.requests.push_back(std::move(request));
  }
  std::stable_sort(
      trace.requests.begin(), trace.requests.end(),
      [](const TraceRequest& a, const TraceRequest& b) { return a.seconds < b.seconds; });
  return trace;
}

}  // namespace kvtrie::bench
