// Fits profiles and codes KV from files, for measurements of quality. JSON results go to stdout,
// progress to stderr.
//
//   codec_tool material --spec SPEC.json --samples FOLDER --queries FILE.f32 [--metrics FILE.f32]
//                       [--option K=V]... --out FILE
//   codec_tool fit      --spec SPEC.json --samples FOLDER [--material FILE] [--option K=V]... --out
//   FILE codec_tool code     --spec SPEC.json --profile FILE --level LEVEL --block-tokens N
//                       --tokens FILE.tokens --kv FILE.kv --out FILE.kv
//   codec_tool speed    as code, without --out: seconds of encoding and decoding
//
// A sample is NAME.tokens (u32le), NAME.kv (raw KV of these tokens as one block) and, for
// `material`, NAME.importance (f32: squared gradients, [plane][KV head][token]). Queries: f32 means
// [layer][query head][k_head_dim], then covariances. Metrics: f32 [plane][component][component].
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "storage/codec/fit_material.h"
#include "storage/codec/frame.h"
#include "storage/codec/residual_codec.h"
#include "storage/codec/residual_fit.h"
#include "storage/codec/residual_profile.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {
namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "codec_tool: %s\n", what.c_str());
  std::exit(1);
}

template <typename T>
T OrFail(absl::StatusOr<T> value) {
  if (!value.ok()) Fail(std::string(value.status().message()));
  return *std::move(value);
}

// A file as it lies on disk, mapped for the life of the process.
template <typename T>
std::span<const T> Map(const std::filesystem::path& path) {
  const int file = open(path.c_str(), O_RDONLY);
  struct stat about = {};
  if (file < 0 || fstat(file, &about) != 0) Fail("cannot read " + path.string());
  const auto bytes = static_cast<std::size_t>(about.st_size);
  if (bytes == 0 || bytes % sizeof(T) != 0) Fail("size of " + path.string());
  void* const at = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0);
  if (at == MAP_FAILED) Fail("cannot map " + path.string());
  close(file);
  return {static_cast<const T*>(at), bytes / sizeof(T)};
}

void WriteFile(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file.flush()) Fail("cannot write " + path.string());
}

struct Arguments {
  std::map<std::string, std::string> flags;
  std::map<std::string, std::string> options;

  std::string Flag(const std::string& name) const {
    const auto found = flags.find(name);
    if (found == flags.end()) Fail("--" + name + " is missing");
    return found->second;
  }
  double Option(const std::string& name, double otherwise) const {
    const auto found = options.find(name);
    return found == options.end() ? otherwise : std::stod(found->second);
  }
};

Arguments Parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 2; i < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag.rfind("--", 0) != 0 || i + 1 >= argc) Fail("what is " + flag + "?");
    const std::string value = argv[i + 1];
    if (flag == "--option") {
      const auto equals = value.find('=');
      if (equals == std::string::npos) Fail("an option is K=V, not " + value);
      arguments.options[value.substr(0, equals)] = value.substr(equals + 1);
    } else {
      arguments.flags[flag.substr(2)] = value;
    }
  }
  return arguments;
}

// proto3's JSON of kvtrie.v1.ModelSpec, as far as it decides how KV is coded.
ModelSpec ReadSpec(const std::string& path, std::uint32_t block_tokens) {
  std::ifstream file(path);
  const Json json = Json::parse(file, nullptr, false);
  if (json.is_discarded()) Fail(path + " is no JSON");
  ModelSpec spec;
  spec.name = json.value("name", "model");
  spec.weights_revision = json.value("weights_revision", "1");
  spec.tokenizer_digest = "tokenizer";
  static const std::map<std::string, DType> kDTypes = {
      {"DTYPE_FLOAT32", DType::kFloat32},        {"DTYPE_FLOAT16", DType::kFloat16},
      {"DTYPE_BFLOAT16", DType::kBfloat16},      {"DTYPE_FLOAT8_E4M3", DType::kFloat8E4m3},
      {"DTYPE_FLOAT8_E5M2", DType::kFloat8E5m2}, {"DTYPE_INT8", DType::kInt8}};
  const std::string dtype = json.value("dtype", "");
  if (!kDTypes.contains(dtype)) Fail("dtype " + dtype);
  spec.dtype = kDTypes.at(dtype);
  for (const Json& group : json.at("kv_groups")) {
    KvGroup& to = spec.kv_groups.emplace_back();
    for (const Json& run : group.at("layer_runs")) {
      to.layer_runs.push_back({.layer_count = run.at("layer_count"),
                               .kv_heads = run.at("kv_heads"),
                               .k_head_dim = run.at("k_head_dim"),
                               .v_head_dim = run.at("v_head_dim")});
    }
  }
  const Json rope = json.value("rope", Json::object());
  const std::string pairing = rope.value("pairing", "ROPE_PAIRING_NONE");
  spec.rope.pairing = pairing == "ROPE_PAIRING_HALF_SPLIT"    ? RopePairing::kHalfSplit
                      : pairing == "ROPE_PAIRING_INTERLEAVED" ? RopePairing::kInterleaved
                                                              : RopePairing::kNone;
  spec.rope.theta = rope.value("theta", 0.0);
  spec.rope.rotary_dims = rope.value("rotary_dims", 0u);
  spec.rope.scaling = rope.value("scaling", "");
  spec.block_tokens = block_tokens;
  if (absl::Status valid = spec.Validate(); !valid.ok()) Fail(std::string(valid.message()));
  return spec;
}

std::vector<KvSample> ReadSamples(const std::string& folder) {
  std::vector<std::filesystem::path> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".tokens") names.push_back(entry.path());
  }
  std::sort(names.begin(), names.end());
  std::vector<KvSample> samples;
  for (std::filesystem::path name : names) {
    KvSample& sample = samples.emplace_back();
    sample.tokens = Map<TokenId>(name);
    sample.raw = Map<std::byte>(name.replace_extension(".kv"));
    if (std::filesystem::exists(name.replace_extension(".importance"))) {
      sample.importance = Map<float>(name);
    }
  }
  if (samples.empty()) Fail("no samples in " + folder);
  return samples;
}

int Material(const Arguments& arguments) {
  const std::vector<KvSample> samples = ReadSamples(arguments.Flag("samples"));
  const ModelSpec spec = ReadSpec(arguments.Flag("spec"), 16);
  const std::vector<PlaneShape> planes = PlanesOf(spec);
  FitMaterial material;

  const std::span<const float> queries = Map<float>(arguments.Flag("queries"));
  std::size_t per_head_means = 0, per_head_all = 0;
  for (const PlaneShape& plane : planes) {
    if (plane.is_v) continue;
    per_head_means += plane.head_dim;
    per_head_all += std::size_t{plane.head_dim} * (plane.head_dim + 1);
  }
  QueryStatistics statistics;
  statistics.query_heads = static_cast<std::uint32_t>(queries.size() / per_head_all);
  statistics.means = queries.first(per_head_means * statistics.query_heads);
  statistics.covariances = queries.subspan(statistics.means.size());
  ImportanceFitOptions options;
  options.group_per_head = arguments.Option("heads", 0) != 0;
  options.covariance_rank = static_cast<std::uint32_t>(arguments.Option("rank", 8));
  material.group_count = options.group_per_head ? planes[0].heads : 1;
  material.importance = OrFail(FitImportance(spec, samples, statistics, options));

  if (arguments.flags.contains("metrics")) {
    std::span<const float> metrics = Map<float>(arguments.Flag("metrics"));
    for (const PlaneShape& plane : planes) {
      const std::size_t size = std::size_t{plane.components()} * plane.components();
      if (metrics.size() < size) Fail("metrics are of another model");
      material.metrics.emplace_back(metrics.begin(), metrics.begin() + static_cast<long>(size));
      metrics = metrics.subspan(size);
    }
  }
  const std::string bytes = material.Encode(planes);
  WriteFile(arguments.Flag("out"), bytes);
  std::cout << Json{{"bytes", bytes.size()}} << std::endl;
  return 0;
}

int FitProfile(const Arguments& arguments) {
  const std::vector<KvSample> samples = ReadSamples(arguments.Flag("samples"));
  const ModelSpec spec = ReadSpec(arguments.Flag("spec"), 16);
  FitMaterial material;
  if (arguments.flags.contains("material")) {
    const auto bytes = Map<char>(arguments.Flag("material"));
    material = OrFail(FitMaterial::Decode(PlanesOf(spec), {bytes.data(), bytes.size()}));
  }
  ResidualFitOptions options;
  if (arguments.Option("below", 2) < 2) {
    std::erase(options.inputs, PredictorInput::kTwoBelow);
  }
  if (arguments.Option("below", 2) < 1) {
    std::erase(options.inputs, PredictorInput::kLayerBelow);
  }
  if (arguments.Option("first_layer", 1) == 0) {
    std::erase(options.inputs, PredictorInput::kFirstLayer);
  }
  if (arguments.Option("k_for_v", 1) == 0) {
    std::erase(options.inputs, PredictorInput::kSameLayerK);
  }
  options.block_per_head = arguments.Option("block_per_head", 0) != 0;
  options.metric_shrinkage = arguments.Option("shrinkage", options.metric_shrinkage);
  options.ridge = arguments.Option("ridge", options.ridge);
  options.table_tokens_max = static_cast<std::size_t>(arguments.Option("table", 8192));
  options.rounds = static_cast<int>(arguments.Option("rounds", 1));
  const double strength = arguments.Option("importance", 0.9);
  const double rate_weight = arguments.Option("rate_weight", 0.08);
  const auto add_level = [&](Quality quality, const char* name, double step) {
    ResidualLevel level;
    level.quality = quality;
    level.step = static_cast<float>(arguments.Option(name, step));
    level.rate_weight = static_cast<float>(rate_weight);
    level.importance_strength = static_cast<float>(strength);
    if (level.step > 0) options.levels.push_back(level);
  };
  add_level(Quality::kHigh, "high", 0.0026);
  add_level(Quality::kNearExact, "near_exact", 0.00072);
  add_level(Quality::kSmall, "small", 0.0054);
  options.progress = [](double done, std::string_view what) {
    std::fprintf(stderr, "\r%3.0f %%  %-12s", 100 * done, std::string(what).c_str());
  };
  const auto begin = std::chrono::steady_clock::now();
  const ResidualProfile profile = OrFail(FitResidualProfile(spec, samples, material, options));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::fprintf(stderr, "\n");
  const std::string body = profile.EncodeBody();
  WriteFile(arguments.Flag("out"), body);
  std::size_t weights = 0, bases = 0;
  for (const PlaneProfile& plane : profile.plane_profiles) {
    weights += plane.weights.size();
    bases += plane.basis.size();
  }
  std::cout << Json{{"bytes", body.size()},
                    {"predictors", weights},
                    {"bases", bases},
                    {"token_table", profile.table_rows.size()},
                    {"seconds", seconds.count()}}
            << std::endl;
  return 0;
}

const std::map<std::string, Quality> kLevels = {{"exact", Quality::kExact},
                                                {"near-exact", Quality::kNearExact},
                                                {"high", Quality::kHigh},
                                                {"small", Quality::kSmall}};

// The KV of a run of tokens as blocks, and back. Raw order is [layer][K, V][token]...
template <typename Copy>  // copy(block, offset in the block, offset in the run, bytes)
void ForEachRun(const KvGeometry& block, const KvGeometry& run, std::size_t block_count,
                Copy copy) {
  for (std::uint32_t layer = 0; layer < run.layer_count(); ++layer) {
    for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
      const std::size_t bytes = block.kind_bytes(layer, kind);
      for (std::size_t b = 0; b < block_count; ++b) {
        copy(b, block.kind_begin(layer, kind), run.kind_begin(layer, kind) + b * bytes, bytes);
      }
    }
  }
}

struct Blocks {
  ModelSpec spec;
  std::span<const TokenId> tokens;
  std::vector<std::vector<std::byte>> raw;
  std::vector<BlockToEncode> to_encode;
};

Blocks ReadBlocks(const Arguments& arguments) {
  Blocks blocks;
  const auto block_tokens = static_cast<std::uint32_t>(std::stoul(arguments.Flag("block-tokens")));
  blocks.spec = ReadSpec(arguments.Flag("spec"), block_tokens);
  blocks.tokens = Map<TokenId>(arguments.Flag("tokens"));
  const std::span<const std::byte> kv = Map<std::byte>(arguments.Flag("kv"));
  ModelSpec run = blocks.spec;
  run.block_tokens = static_cast<std::uint32_t>(blocks.tokens.size());
  const KvGeometry block_geometry(blocks.spec), run_geometry(run);
  if (kv.size() != run_geometry.raw_block_bytes()) Fail("size of --kv");
  const std::size_t block_count = blocks.tokens.size() / block_tokens;
  blocks.raw.assign(block_count, std::vector<std::byte>(block_geometry.raw_block_bytes()));
  ForEachRun(block_geometry, run_geometry, block_count,
             [&](std::size_t b, std::size_t to, std::size_t from, std::size_t bytes) {
               std::memcpy(blocks.raw[b].data() + to, kv.data() + from, bytes);
             });
  for (std::size_t b = 0; b < block_count; ++b) {
    blocks.to_encode.push_back({.first_position = static_cast<std::uint32_t>(b * block_tokens),
                                .session_tokens = static_cast<std::uint32_t>(blocks.tokens.size()),
                                .tokens = blocks.tokens.subspan(b * block_tokens, block_tokens),
                                .raw = blocks.raw[b]});
  }
  return blocks;
}

std::unique_ptr<const ResidualCodec> ReadCodec(const Arguments& arguments, const ModelSpec& spec) {
  const auto body = Map<char>(arguments.Flag("profile"));
  const ResidualProfile profile = OrFail(ResidualProfile::DecodeBody({body.data(), body.size()}));
  ProfileId id;
  id.bytes[0] = 1;
  return OrFail(ResidualCodec::Create(spec, id, profile));
}

int Code(const Arguments& arguments, bool speed) {
  const Blocks blocks = ReadBlocks(arguments);
  const auto codec = ReadCodec(arguments, blocks.spec);
  const auto level = kLevels.find(arguments.Flag("level"));
  if (level == kLevels.end()) Fail("level " + arguments.Flag("level"));

  const KvGeometry geometry(blocks.spec);
  std::vector<EncodedBlock> encoded;
  std::vector<std::vector<std::byte>> restored(blocks.raw.size(),
                                               std::vector<std::byte>(geometry.raw_block_bytes()));
  const int rounds = speed ? 5 : 1;
  double encode_seconds = 1e9, decode_seconds = 1e9;
  for (int round = 0; round < rounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    encoded = OrFail(codec->Encode(blocks.to_encode, level->second));
    const auto middle = std::chrono::steady_clock::now();
    std::vector<BlockToDecode> to_decode;
    for (std::size_t b = 0; b < encoded.size(); ++b) {
      to_decode.push_back({.body = encoded[b].body,
                           .section_bytes = encoded[b].section_bytes,
                           .quality = level->second,
                           .tokens = blocks.to_encode[b].tokens,
                           .raw = restored[b]});
    }
    if (absl::Status status = codec->Decode(to_decode); !status.ok()) {
      Fail(std::string(status.message()));
    }
    const auto end = std::chrono::steady_clock::now();
    encode_seconds =
        std::min(encode_seconds, std::chrono::duration<double>(middle - begin).count());
    decode_seconds = std::min(decode_seconds, std::chrono::duration<double>(end - middle).count());
  }

  std::size_t bytes = 0, exact = 0;
  std::vector<std::size_t> block_bytes;
  for (const EncodedBlock& block : encoded) {
    block_bytes.push_back(FrameHeaderBytes(block.section_bytes.size()) + block.body.size());
    bytes += block_bytes.back();
    exact += block.exact_tokens;
  }
  if (level->second == Quality::kExact && restored != blocks.raw) Fail("exact, but not the same");
  const std::size_t raw_bytes = blocks.raw.size() * geometry.raw_block_bytes();
  const double components = static_cast<double>(raw_bytes / DTypeBytes(blocks.spec.dtype));
  Json result = {{"bytes", bytes},           {"raw_bytes", raw_bytes},
                 {"components", components}, {"bits", 8 * static_cast<double>(bytes) / components},
                 {"frames", encoded.size()}, {"exact_tokens", exact}};
  if (speed) {
    result["encode_mb_per_second"] = static_cast<double>(raw_bytes) / encode_seconds / 1e6;
    result["decode_mb_per_second"] = static_cast<double>(raw_bytes) / decode_seconds / 1e6;
  } else {
    result["block_bytes"] = block_bytes;
    ModelSpec run = blocks.spec;
    run.block_tokens = static_cast<std::uint32_t>(blocks.tokens.size());
    const KvGeometry run_geometry(run);
    std::string kv(run_geometry.raw_block_bytes(), '\0');
    ForEachRun(geometry, run_geometry, restored.size(),
               [&](std::size_t b, std::size_t from, std::size_t to, std::size_t count) {
                 std::memcpy(kv.data() + to, restored[b].data() + from, count);
               });
    WriteFile(arguments.Flag("out"), kv);
  }
  std::cout << result << std::endl;
  return 0;
}

int Main(int argc, char** argv) {
  const std::string verb = argc > 1 ? argv[1] : "";
  const Arguments arguments = Parse(argc, argv);
  if (verb == "material") return Material(arguments);
  if (verb == "fit") return FitProfile(arguments);
  if (verb == "code") return Code(arguments, false);
  if (verb == "speed") return Code(arguments, true);
  Fail("verbs: material, fit, code, speed");
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) { return kvtrie::Main(argc, argv); }
