// The residual codec on a CUDA device: whether it does what the processor does, and how fast.
//
//   gpu_codec_bench [--seconds N] [--twin 1]
//
// Prints one JSON object. Without a device it says why, and that is all. With one: random shapes,
// whose blocks both have to decode to the same bytes, exit code 1 where they do not; then for the
// shapes of some models GB/s (1e9) of raw KV in bfloat16, host memory to host memory as a server
// calls it, on one thread and on four, beside copies of the same bytes and a plain cast to float8.
//
// --twin 1 runs all of it, but for the baselines, on the host twin, with a model of two layers: so
// the bench itself is tried without a device, and its speed means nothing.
//
// KV and profiles are synthetic: predictions say nothing, residuals are normal, in sizes that fall
// from 2 steps to an eighth of one, and three fifths are not coded. That is about half a bit per
// number, as fitted profiles leave at level high. Products and loops cost what they would with real
// ones.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu/cuda_device.h"
#include "gpu/host_device.h"
#include "nlohmann/json.hpp"
#include "tests/bench/bench_kv.h"
#include "tests/gpu/cuda_baselines.h"
#include "tests/gpu/device_checks.h"

namespace kvtrie::gpu {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kShapes = 28;
constexpr std::size_t kMeasuredBytes = std::size_t{512} << 20;  // raw KV of a call

struct Model {
  const char* name;
  LayerRun layers;
  bool block_per_head;
};
constexpr Model kTwinModel = {"two layers", {2, 2, 32, 32}, true};
constexpr Model kModels[] = {
    {"llama-3.1-8b, a block per head", {32, 8, 128, 128}, true},
    {"llama-3.1-8b, whole planes", {32, 8, 128, 128}, false},
    {"llama-3.1-70b tp4, a block per head", {80, 2, 128, 128}, true},
    {"llama-3.1-70b tp4, whole planes", {80, 2, 128, 128}, false},
    {"mla", {61, 1, 576, 0}, false},
};

// Mean size of a value, in steps, of those that a scale index stands for.
double SizeOf(std::uint32_t scale) { return std::exp2(scale / 8.0 - 8); }

double NormalBelow(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

// What normal values of this mean size are rounded to.
double ShareOf(std::int32_t value, double size) {
  const double deviation = size * 1.2533;
  return NormalBelow((value + 0.5) / deviation) - NormalBelow((value - 0.5) / deviation);
}

// Of the values of a plane.
constexpr double kCodedShare = 0.4;

// The scale index of a value's rank among so many, or kNotCoded.
std::uint8_t ScaleOf(std::size_t rank, std::size_t count) {
  const double share = static_cast<double>(rank) / static_cast<double>(count);
  if (share >= kCodedShare) return kNotCoded;
  return static_cast<std::uint8_t>(std::lround(8 * (9 - 4 * share / kCodedShare)));
}

ResidualProfile MakeProfile(const ModelSpec& spec, bool block_per_head) {
  TestRandom random(1);
  ResidualProfile profile;
  profile.codec_key = spec.CodecKey();
  profile.planes = PlanesOf(spec);
  profile.levels = {{.quality = Quality::kHigh, .step = 0.25f, .rate_weight = 0.1f}};
  for (std::uint32_t i = 0; i < profile.planes.size(); ++i) {
    const PlaneShape& shape = profile.planes[i];
    const std::size_t components = shape.components();
    PlaneProfile& plane = profile.plane_profiles.emplace_back();
    plane.block_count = block_per_head ? shape.heads : 1;
    plane.inputs = {PredictorInput::kLayerBelow, PredictorInput::kTwoBelow,
                    PredictorInput::kSameLayerK};
    const std::size_t size = components / plane.block_count;
    std::size_t in = 0;
    for (const std::uint32_t input : InputPlanes(profile.planes, i, plane.inputs)) {
      in += profile.planes[input].components() / plane.block_count;
    }
    plane.bias.assign(components, 0);
    plane.input_scales.assign(components, 0.03f);
    plane.weight_scales.assign(components, 1e-7f);
    plane.weights.resize(components * in);
    for (std::int8_t& weight : plane.weights) {
      weight = static_cast<std::int8_t>(static_cast<int>(random.Below(127)) - 63);
    }
    plane.basis_scales.assign(components, 1.0f / 127);
    plane.basis.resize(components * size);
    for (std::size_t v = 0; v < components; ++v) {
      for (std::size_t c = 0; c < size; ++c) {
        plane.basis[v * size + c] =
            static_cast<std::int8_t>(c == v % size ? 127 : static_cast<int>(random.Below(3)) - 1);
      }
    }
    plane.cell_exponents.assign(components, -4);
    plane.cell_scales.assign(components, 80);
    std::vector<std::uint8_t>& scales = plane.scales.emplace_back();
    for (std::size_t v = 0; v < components; ++v) scales.push_back(ScaleOf(v % size, size));
  }
  for (std::uint32_t c = 0; c < kScaleClasses; ++c) {
    std::vector<std::uint32_t> counts(kResidualSymbols, 1);
    for (std::int32_t value = -kSymbolMax; value <= kSymbolMax; ++value) {
      counts[static_cast<std::size_t>(value + kSymbolMax)] +=
          static_cast<std::uint32_t>(1e6 * ShareOf(value, SizeOf(2 * c)));
    }
    const std::size_t at = profile.class_frequencies.size();
    profile.class_frequencies.resize(at + kResidualSymbols);
    NormalizeCounts(counts, std::span(profile.class_frequencies).subspan(at));
  }
  for (std::uint32_t i = 0; i <= static_cast<std::uint32_t>(kScaleIndexMax); ++i) {
    double mean = 0;
    for (std::int32_t value = 1; value <= 255; ++value) {
      mean += 2 * value * ShareOf(value, SizeOf(i));
    }
    profile.expected.push_back(static_cast<std::uint16_t>(std::min(16 * mean, 4080.0)));
  }
  profile.offsets.assign(std::size_t{kScaleClasses} * kRestoredOffsets, -0.02f);
  profile.carried.assign(2 * std::size_t{kScaleShiftMax} + 1, 96);
  profile.prior = 96;
  KV_CHECK(profile.CheckConsistency().ok());
  return profile;
}

// A block whose residuals are as the profile's scales say.
std::vector<std::byte> MakeBlock(const ModelSpec& spec, const ResidualProfile& profile,
                                 std::uint64_t seed) {
  const RawKv raw_kv(KvGeometry(spec), spec.rope);
  const RopeAngles angles = raw_kv.AnglesAt(16);
  TestRandom random(seed);
  std::vector<std::byte> raw(raw_kv.geometry().raw_block_bytes());
  for (std::size_t i = 0; i < profile.planes.size(); ++i) {
    const PlaneShape& plane = profile.planes[i];
    const std::vector<std::uint8_t>& scales = profile.plane_profiles[i].scales[0];
    std::vector<float> rows(spec.block_tokens * plane.components());
    for (std::size_t at = 0; at < rows.size(); ++at) {
      const std::uint8_t scale = scales[at % scales.size()];
      const double size = scale == kNotCoded ? 0.02 : SizeOf(scale);
      rows[at] = static_cast<float>(1.2533 * size) * 0.25f * DrawNormal(random);
    }
    raw_kv.WriteRows(rows, plane.layer, plane.kind(), angles, raw);
  }
  return raw;
}

template <typename Body>
double BestSeconds(int rounds, Body body) {
  double best = 1e9;
  for (int round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    body();
    best = std::min(
        best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

// Calls body(thread) on so many threads.
template <typename Body>
void OnThreads(std::size_t count, Body body) {
  std::vector<std::thread> threads;
  for (std::size_t t = 1; t < count; ++t) threads.emplace_back([&body, t] { body(t); });
  body(0);
  for (std::thread& thread : threads) thread.join();
}

// Makes the device that is measured.
using MakeDevice = absl::StatusOr<std::unique_ptr<Device>> (*)();
absl::StatusOr<std::unique_ptr<Device>> MakeCuda() { return MakeCudaDevice(0); }
absl::StatusOr<std::unique_ptr<Device>> MakeTwin() { return MakeHostDevice(kTwinBytes); }

Json Measure(const Model& model, MakeDevice make_device, std::size_t measured_bytes, int rounds) {
  ModelSpec spec = BenchSpec(DType::kBfloat16, model.layers, 16);
  spec.rope = {
      .pairing = RopePairing::kHalfSplit, .theta = 500000, .rotary_dims = 0, .scaling = {}};
  const ResidualProfile profile = MakeProfile(spec, model.block_per_head);
  const std::shared_ptr<const ResidualCodec> codec = MakeCodec(spec, profile);
  const auto backend = MakeDeviceBackend("measured", make_device().value());
  const auto coder = backend->CoderFor(spec, codec).value();

  // A few blocks that differ, over and over.
  constexpr std::size_t kDistinct = 4;
  constexpr std::size_t kThreadsMax = 4;
  const std::size_t raw_bytes = KvGeometry(spec).raw_block_bytes();
  const std::size_t count = std::max<std::size_t>(measured_bytes / raw_bytes, 4);
  const std::vector<TokenId> tokens(16, 7);
  std::vector<std::vector<std::byte>> blocks;
  for (std::size_t i = 0; i < kDistinct; ++i) blocks.push_back(MakeBlock(spec, profile, 50 + i));
  std::vector<BlockToEncode> to_encode;
  for (std::size_t i = 0; i < count; ++i) {
    to_encode.push_back({.first_position = 16,
                         .session_tokens = 1000,
                         .tokens = tokens,
                         .raw = blocks[i % kDistinct]});
  }
  const std::vector<EncodedBlock> encoded = coder->Encode(to_encode, Quality::kHigh).value();
  std::size_t body_bytes = 0;
  std::vector<std::vector<BlockToDecode>> to_decode(kThreadsMax);
  std::vector<std::vector<std::byte>> raw(kThreadsMax, std::vector<std::byte>(count * raw_bytes));
  for (std::size_t i = 0; i < count; ++i) {
    KV_CHECK(!encoded[i].body.empty());
    body_bytes += encoded[i].body.size();
    for (std::size_t t = 0; t < kThreadsMax; ++t) {
      to_decode[t].push_back({.body = encoded[i].body,
                              .section_bytes = encoded[i].section_bytes,
                              .quality = Quality::kHigh,
                              .tokens = tokens,
                              .raw = std::span(raw[t]).subspan(i * raw_bytes, raw_bytes)});
    }
  }
  // What is measured is what the processor decodes.
  bool same = coder->Decode(to_decode[0]).ok();
  std::vector<std::byte> expected(raw_bytes);
  for (std::size_t i = 0; i < kDistinct; ++i) {
    BlockToDecode block = to_decode[0][i];
    block.raw = expected;
    same &= codec->Decode({&block, 1}).ok();
    same &= std::equal(expected.begin(), expected.end(), to_decode[0][i].raw.begin());
  }

  const double bytes = static_cast<double>(count * raw_bytes);
  const auto gbps = [](double of, double seconds) { return of / seconds / 1e9; };
  Json row = {{"model", model.name},
              {"profile", "synthetic"},
              {"blocks", count},
              {"raw_bytes", count * raw_bytes},
              {"bits_per_number", 16.0 * static_cast<double>(body_bytes) / bytes},
              {"same_as_processor", same}};
  for (const std::size_t threads : {std::size_t{1}, kThreadsMax}) {
    const double decode = BestSeconds(rounds, [&] {
      OnThreads(threads, [&](std::size_t t) { KV_CHECK(coder->Decode(to_decode[t]).ok()); });
    });
    const double encode = BestSeconds(rounds, [&] {
      OnThreads(threads,
                [&](std::size_t) { KV_CHECK(coder->Encode(to_encode, Quality::kHigh).ok()); });
    });
    const std::string of = "_gbps_" + std::to_string(threads) + "_threads";
    row["decode" + of] = gbps(bytes * static_cast<double>(threads), decode);
    row["encode" + of] = gbps(bytes * static_cast<double>(threads), encode);
  }
  row["host_copy_gbps"] =
      gbps(bytes,
           BestSeconds(rounds, [&] { std::memcpy(raw[1].data(), raw[0].data(), raw[0].size()); }));
  if (make_device == MakeTwin) return row;
  const CudaBaselines baselines = MeasureCudaBaselines(count * raw_bytes).value();
  row["device_copy_gbps"] = gbps(bytes, baselines.copy_on_device);
  row["to_device_gbps"] = gbps(bytes, baselines.copy_to_device);
  row["from_device_gbps"] = gbps(bytes, baselines.copy_from_device);
  row["fp8_cast_gbps"] = gbps(bytes, baselines.cast_to_fp8);
  return row;
}

// Random shapes, of which both make the same.
bool ShapesAgree(MakeDevice make_device, std::uint64_t count) {
  for (std::uint64_t seed = 0; seed < count; ++seed) {
    const Shape shape = RandomShape(seed);
    const ResidualProfile profile = RandomProfile(shape, seed);
    const Twin twin(shape, profile, {.workspaces = 2}, make_device().value());
    const Blocks blocks = RandomBlocks(shape, profile, 5, 77);
    ExpectSameDecoded(twin, blocks);
    ExpectLikeEncoded(twin, blocks);
    if (testing::Test::HasFailure()) {
      std::fprintf(stderr, "differs: %s\n", shape.Text().c_str());
      return false;
    }
  }
  return true;
}

int Main(int argc, char** argv) {
  double seconds = 180;
  MakeDevice make_device = MakeCuda;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::string(argv[i]) == "--seconds") seconds = std::atof(argv[i + 1]);
    if (std::string(argv[i]) == "--twin" && std::string(argv[i + 1]) == "1") make_device = MakeTwin;
  }
  const bool is_twin = make_device == MakeTwin;
  const auto start = std::chrono::steady_clock::now();
  const auto device = make_device();
  if (!device.ok()) {
    std::printf("%s\n",
                Json{{"device", nullptr}, {"why", device.status().ToString()}}.dump(2).c_str());
    return 0;
  }
  const std::uint64_t shapes = is_twin ? 4 : kShapes;
  bool same = ShapesAgree(make_device, shapes);
  Json result = {{"device", (*device)->name()}, {"shapes", shapes}, {"shapes_agree", same}};
  for (const Model& model : kModels) {
    const double spent =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (is_twin || spent > seconds * 2 / 3) {
      result["left_out"].push_back(model.name);
      continue;
    }
    result["models"].push_back(Measure(model, make_device, kMeasuredBytes, 3));
  }
  if (is_twin) result["models"].push_back(Measure(kTwinModel, make_device, 0, 1));
  for (const Json& model : result["models"]) same &= model["same_as_processor"].get<bool>();
  std::printf("%s\n", result.dump(2).c_str());
  return same ? 0 : 1;
}

}  // namespace
}  // namespace kvtrie::gpu

int main(int argc, char** argv) { return kvtrie::gpu::Main(argc, argv); }
