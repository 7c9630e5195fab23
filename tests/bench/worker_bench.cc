// What a worker costs beside the same codec in this process: blocks of an 8B model's shape, coded
// by threads here, and by a kvtrie-worker of its own with as many threads, on the same cores. The
// worker's figure has all of gRPC, copies, checksums and queues in it, on both sides. Rounds
// alternate; the best of each counts. Prints JSON: MB/s of raw KV, and ratios.
//
//   worker_bench --worker PROGRAM [--layers N --heads N --head-dim N --block-tokens N --blocks N]
//                [--threads N] [--calls N] [--rounds N]
//
// KV and profile are synthetic (seed 1): predictors per KV head, which profiles of large models
// have, fitted to this KV.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "client/coding_threads.h"
#include "client/worker_backend.h"
#include "storage/base/check.h"
#include "storage/codec/frame_codec.h"
#include "storage/codec/profile_codec.h"
#include "tests/client/worker_process.h"
#include "tests/storage/codec/plain_profile_bytes.h"
#include "tests/storage/codec/residual_fixture.h"

namespace kvtrie {
namespace {

// Blocks of one call: those that a client codes together.
constexpr std::size_t kCallTokens = 256;

struct Work {
  ModelSpec spec;
  std::vector<std::byte> profile;
  std::shared_ptr<const ResidualCodec> residual;
  std::vector<SyntheticText> texts;  // of the tokens of a call
  std::vector<std::vector<std::byte>> raw;
  std::vector<BlockToEncode> blocks;

  double megabytes() const { return 1e-6 * static_cast<double>(raw.size() * raw[0].size()); }
  std::size_t blocks_of_call() const {
    return std::max<std::size_t>(1, kCallTokens / spec.block_tokens);
  }
};

double Seconds(const std::function<void()>& work) {
  const auto began = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// All blocks, by so many calls at a time.
void EncodeAll(const Work& work, const FrameCodec& codec, int threads,
               std::vector<EncodedFrame>* frames) {
  const std::size_t at_once = work.blocks_of_call();
  frames->resize(work.blocks.size());
  OnThreads(threads, (work.blocks.size() + at_once - 1) / at_once, [&](std::size_t call) {
    const auto rest = std::span(work.blocks).subspan(call * at_once);
    auto coded = codec.Encode(rest.first(std::min(at_once, rest.size())), Quality::kHigh);
    KV_CHECK(coded.ok());
    std::move(coded->begin(), coded->end(),
              frames->begin() + static_cast<std::ptrdiff_t>(call * at_once));
  });
}

void DecodeAll(const Work& work, const FrameCodec& codec, int threads,
               const std::vector<EncodedFrame>& frames, std::vector<std::vector<std::byte>>* raw) {
  const std::size_t at_once = work.blocks_of_call();
  OnThreads(threads, (frames.size() + at_once - 1) / at_once, [&](std::size_t call) {
    std::vector<FrameToDecode> to_decode;
    const std::size_t begin = call * at_once;
    for (std::size_t i = begin; i < std::min(begin + at_once, frames.size()); ++i) {
      to_decode.push_back({.frame = FrameView::Parse(frames[i].bytes).value(),
                           .tokens = work.blocks[i].tokens,
                           .raw = (*raw)[i]});
    }
    KV_CHECK(codec.Decode(to_decode).ok());
  });
}

Work MakeWork(const std::function<std::uint32_t(const char*)>& number) {
  Work work;
  work.spec = SyntheticSpec(
      {{number("--layers"), number("--heads"), number("--head-dim"), number("--head-dim")}},
      DType::kBfloat16);
  work.spec.block_tokens = number("--block-tokens");
  KV_CHECK(work.spec.Validate().ok());
  const auto text_tokens =
      static_cast<std::uint32_t>(work.blocks_of_call()) * work.spec.block_tokens;
  const std::uint32_t tokens = number("--blocks") * work.spec.block_tokens;
  for (std::uint32_t at = 0; at < tokens; at += text_tokens) {
    work.texts.push_back(
        MakeText(work.spec, std::min(text_tokens, tokens - at), 1 + work.texts.size()));
  }
  ResidualFitOptions fit;
  fit.block_per_head = true;
  fit.rounds = 1;
  fit.levels = {{.quality = Quality::kHigh, .step = 1.2f, .rate_weight = 0.08f}};
  const KvSample sample{.tokens = work.texts[0].tokens, .raw = work.texts[0].raw};
  const auto profile = FitResidualProfile(work.spec, {&sample, 1}, {}, fit);
  if (!profile.ok()) {
    std::fprintf(stderr, "worker_bench: %s\n", profile.status().ToString().c_str());
    std::exit(1);
  }
  work.profile = ProfileBytes(*profile);
  work.residual = CodecOfProfile(work.spec, ProfileIdOf(work.profile), work.profile).value();
  for (const SyntheticText& text : work.texts) {
    for (std::uint32_t at = 0; at < text.tokens.size(); at += work.spec.block_tokens) {
      work.raw.push_back(CutBlock(work.spec, text, at));
    }
  }
  std::size_t i = 0;
  for (const SyntheticText& text : work.texts) {
    for (std::uint32_t at = 0; at < text.tokens.size(); at += work.spec.block_tokens) {
      work.blocks.push_back({.first_position = at,
                             .session_tokens = static_cast<std::uint32_t>(text.tokens.size()),
                             .tokens = std::span(text.tokens).subspan(at, work.spec.block_tokens),
                             .raw = work.raw[i++]});
    }
  }
  return work;
}

int Main(int argc, char** argv) {
  std::map<std::string, std::string> options = {
      {"--layers", "32"}, {"--heads", "8"},   {"--head-dim", "128"}, {"--block-tokens", "64"},
      {"--blocks", "16"}, {"--threads", "2"}, {"--calls", "4"},      {"--rounds", "3"}};
  for (int i = 1; i + 1 < argc; i += 2) options[argv[i]] = argv[i + 1];
  KV_CHECK(options.contains("--worker"));
  const auto number = [&](const char* name) {
    return static_cast<std::uint32_t>(std::strtoul(options[name].c_str(), nullptr, 10));
  };
  const int threads = static_cast<int>(number("--threads"));
  const int calls = static_cast<int>(number("--calls"));
  const Work work = MakeWork(number);

  WorkerProcess worker(options["--worker"], {"--coding_threads", options["--threads"]});
  WorkerOptions worker_options;
  worker_options.targets = {worker.listen};
  worker_options.timeout = std::chrono::minutes(5);
  const WorkerBackend backend(
      worker_options,
      [&](const ProfileId&, Deadline) -> absl::StatusOr<WorkerBackend::ProfileBytes> {
        return std::make_shared<const std::vector<std::byte>>(work.profile);
      });
  const FrameCodec here(work.spec, work.residual);
  const FrameCodec there(work.spec, work.residual,
                         backend.CoderFor(work.spec, work.residual).value());

  std::map<std::string, double> best;
  const auto measure = [&](const std::string& what, const std::function<void()>& run) {
    const double seconds = Seconds(run);
    auto [entry, is_new] = best.try_emplace(what, seconds);
    if (!is_new) entry->second = std::min(entry->second, seconds);
  };
  std::vector<EncodedFrame> frames, frames_there;
  std::vector<std::vector<std::byte>> raw(work.raw.size(),
                                          std::vector<std::byte>(work.raw[0].size()));
  std::vector<std::vector<std::byte>> raw_there = raw;
  EncodeAll(work, there, calls, &frames_there);  // the worker has the profile then
  for (std::uint32_t round = 0; round < number("--rounds"); ++round) {
    measure("encode here", [&] { EncodeAll(work, here, threads, &frames); });
    measure("encode there", [&] { EncodeAll(work, there, calls, &frames_there); });
    measure("decode here", [&] { DecodeAll(work, here, threads, frames, &raw); });
    measure("decode there", [&] { DecodeAll(work, there, calls, frames, &raw_there); });
  }
  std::size_t frame_bytes = 0;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    KV_CHECK(frames[i].bytes == frames_there[i].bytes);
    frame_bytes += frames[i].bytes.size();
  }
  KV_CHECK(raw == raw_there);
  const WorkerBackendStats stats = backend.Stats();
  KV_CHECK(stats.own_blocks_total == 0);

  nlohmann::ordered_json json;
  json["shape"] = options["--layers"] + " layers, " + options["--heads"] + " KV heads of " +
                  options["--head-dim"] + ", blocks of " + options["--block-tokens"] + " tokens";
  json["raw_megabytes"] = work.megabytes();
  json["bits_per_component"] = 16.0 * static_cast<double>(frame_bytes) / (1e6 * work.megabytes());
  json["threads"] = threads;
  json["calls_at_a_time"] = calls;
  for (const char* what : {"encode", "decode"}) {
    const double here_seconds = best[std::string(what) + " here"];
    const double there_seconds = best[std::string(what) + " there"];
    json[what] = {{"in_process_mb_per_s", work.megabytes() / here_seconds},
                  {"worker_mb_per_s", work.megabytes() / there_seconds},
                  {"ratio", here_seconds / there_seconds}};
  }
  std::printf("%s\n", json.dump(2).c_str());
  return 0;
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) { return kvtrie::Main(argc, argv); }
