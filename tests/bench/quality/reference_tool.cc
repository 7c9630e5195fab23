// Codes sessions against other ones that hold the same document, for references.py. Prints JSON.
//
//   reference_tool fit  --spec SPEC.json --profile FILE --samples FOLDER --out FILE [--material
//   FILE]
//                       [--step-factor X] [--rate-weight X] [--importance X] [--rounds N]
//                       [--energy-prior N] [--energy-carried X]
//                       [--inputs below,two-below,same-k]
//   reference_tool code --spec SPEC.json --profile FILE --jobs JOBS.json [--block-tokens N]
//
// fit: gives a draft the part that codes differences. code: for each job, an object of "first" and
// "second" (a folder's NAME, without .tokens and .kv), "way" (alone, against, reuse), "reference"
// and "level" (exact, near-exact, high, small) and "out" (a file for the second's restored KV):
// what each block of the second takes. Files as `kvtrie profile` has them.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "client/ctl/profile_code.h"
#include "client/ctl/profile_files.h"
#include "storage/codec/frame_codec.h"
#include "storage/codec/raw_kv.h"
#include "storage/codec/residual_fit.h"
#include "storage/codec/residual_profile.h"

namespace kvtrie {
namespace {

using Json = nlohmann::ordered_json;
using Flags = std::map<std::string, std::string>;

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "reference_tool: %s\n", what.c_str());
  std::exit(1);
}
void OrFail(const absl::Status& status) {
  if (!status.ok()) Fail(status.ToString());
}
template <typename T>
T OrFail(absl::StatusOr<T> value) {
  OrFail(value.status());
  return *std::move(value);
}

const std::string& Required(const Flags& flags, const std::string& name) {
  const auto found = flags.find(name);
  if (found == flags.end()) Fail("--" + name + " is missing");
  return found->second;
}
double Number(const Flags& flags, const std::string& name, double otherwise) {
  const auto found = flags.find(name);
  return found == flags.end() ? otherwise : std::strtod(found->second.c_str(), nullptr);
}

Quality LevelOf(const std::string& text) { return LevelFromText(text).value_or(Quality::kExact); }

int Fit(const Flags& flags) {
  const ModelSpec spec = OrFail(ReadModelSpec(Required(flags, "spec")));
  const ProfileFile file = OrFail(ReadProfileFile(Required(flags, "profile")));
  ResidualProfile profile = OrFail(ResidualProfile::DecodeBody(file.body));
  profile.codec_key = file.codec_key;
  const SampleFolder texts = OrFail(ReadSamples(spec, Required(flags, "samples")));
  FitMaterial material;
  if (flags.contains("material")) {
    const MappedFile mapped = OrFail(MappedFile::Open(flags.at("material")));
    material = OrFail(FitMaterial::Decode(profile.planes, mapped.text()));
  }
  ResidualFitOptions options;
  DifferenceFitOptions& of = options.differences;
  of.step_factor = static_cast<float>(Number(flags, "step-factor", of.step_factor));
  of.rate_weight = static_cast<float>(Number(flags, "rate-weight", of.rate_weight));
  of.importance_strength = static_cast<float>(Number(flags, "importance", of.importance_strength));
  of.energy_prior = static_cast<std::uint16_t>(Number(flags, "energy-prior", of.energy_prior));
  of.energy_carried = Number(flags, "energy-carried", of.energy_carried);
  of.rounds = static_cast<int>(Number(flags, "rounds", of.rounds));
  if (flags.contains("inputs")) {
    of.inputs.clear();
    for (const absl::string_view name :
         absl::StrSplit(flags.at("inputs"), ',', absl::SkipEmpty())) {
      if (name == "below") of.inputs.push_back(PredictorInput::kLayerBelow);
      if (name == "two-below") of.inputs.push_back(PredictorInput::kTwoBelow);
      if (name == "same-k") of.inputs.push_back(PredictorInput::kSameLayerK);
    }
  }
  const std::size_t before = profile.EncodeBody().size();
  const auto begin = std::chrono::steady_clock::now();
  OrFail(FitDifferences(spec, texts.samples, material, options, profile));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  if (profile.differences.empty()) Fail("the samples share too few tokens");
  const std::string body = profile.EncodeBody();
  OrFail(WriteFile(Required(flags, "out"), EncodeDraft(file.codec_key, body)));
  std::cout << Json{{"bytes", body.size()},
                    {"bytes_of_differences", body.size() - before},
                    {"seconds", seconds.count()}}
            << "\n";
  return 0;
}

struct Session {
  MappedFile token_file, kv_file;
  std::span<const TokenId> tokens;
  std::span<const std::byte> raw;
};

class Coder {
 public:
  Coder(ModelSpec spec, const ProfileFile& file) : spec_(std::move(spec)) {
    const ResidualProfile profile = OrFail(ResidualProfile::DecodeBody(file.body));
    codec_ = std::make_unique<FrameCodec>(
        spec_, OrFail(ResidualCodec::Create(spec_, BodyDigest(file.body), profile)));
  }

  Json Run(const Json& job) {
    const Session& second = Open(job.at("second").get<std::string>());
    const std::string way = job.at("way").get<std::string>();
    const RestoredSession* const first =
        way == "alone" ? nullptr
                       : &Restored(job.at("first").get<std::string>(),
                                   LevelOf(job.at("reference").get<std::string>()));
    CodedRun run = OrFail(CodeRun(spec_, *codec_, second.tokens, second.raw,
                                  {.quality = LevelOf(job.at("level").get<std::string>()),
                                   .against = way == "against" ? first : nullptr}));
    if (way == "reuse") {
      const std::vector<BlockReferences> shared = FindReferences(spec_, *first, second.tokens);
      for (std::size_t b = 0; b < shared.size(); ++b) {
        if (shared[b].runs.empty()) continue;
        Reuse(shared[b], static_cast<std::uint32_t>(b), run.restored[b]);
        run.block_bytes[b] = 0;
      }
    }
    const std::vector<std::byte> restored = RunOfBlocks(spec_, run.restored);
    OrFail(WriteFile(job.at("out").get<std::string>(),
                     {reinterpret_cast<const char*>(restored.data()), restored.size()}));
    return {{"block_bytes", run.block_bytes},
            {"referenced_blocks",
             std::count_if(run.block_referenced_tokens.begin(), run.block_referenced_tokens.end(),
                           [](std::uint32_t tokens) { return tokens > 0; })},
            {"encode_seconds", run.encode_seconds},
            {"decode_seconds", run.decode_seconds}};
  }

 private:
  const Session& Open(const std::string& name) {
    const auto [at, is_new] = sessions_.try_emplace(name);
    Session& session = at->second;
    if (!is_new) return session;
    session.token_file = OrFail(MappedFile::Open(name + ".tokens"));
    session.kv_file = OrFail(MappedFile::Open(name + ".kv"));
    session.tokens = OrFail(NumbersOf<TokenId>(session.token_file, name));
    session.raw = session.kv_file.bytes();
    return session;
  }

  const RestoredSession& Restored(const std::string& name, Quality level) {
    const auto [at, is_new] = restored_.try_emplace({name, static_cast<int>(level)});
    if (is_new) {
      const Session& session = Open(name);
      // As if it were exact: a coarse one is to be measured too.
      at->second = {
          .tokens = session.tokens,
          .blocks = OrFail(CodeRun(spec_, *codec_, session.tokens, session.raw, {.quality = level}))
                        .restored,
          .quality = Quality::kExact};
    }
    return at->second;
  }

  // The references' own KV in place of the block's. What stays of the block is not counted.
  void Reuse(const BlockReferences& shared, std::uint32_t block, std::span<std::byte> raw) const {
    const KvGeometry geometry(spec_);
    const RawKv raw_kv(geometry, spec_.rope);
    const RopeAngles own_angles = raw_kv.AnglesAt(block * spec_.block_tokens);
    for (const PlaneShape& plane : PlanesOf(spec_)) {
      const std::size_t components = plane.components();
      std::vector<float> rows(spec_.block_tokens * components), of_reference(rows.size());
      raw_kv.ReadRows(raw, plane.layer, plane.kind(), own_angles, rows);
      for (const ReferenceRun& run : shared.runs) {
        const ReferenceBlock& reference = shared.references[run.reference];
        raw_kv.ReadRows(reference.raw, plane.layer, plane.kind(),
                        raw_kv.AnglesAt(reference.first_position), of_reference);
        std::copy_n(of_reference.data() + run.offset * components, run.token_count * components,
                    rows.data() + run.first_token * components);
      }
      raw_kv.WriteRows(rows, plane.layer, plane.kind(), own_angles, raw);
    }
  }

  const ModelSpec spec_;
  std::unique_ptr<FrameCodec> codec_;
  std::map<std::string, Session> sessions_;
  std::map<std::pair<std::string, int>, RestoredSession> restored_;
};

int Code(const Flags& flags) {
  ModelSpec spec = OrFail(ReadModelSpec(Required(flags, "spec")));
  spec.block_tokens = static_cast<std::uint32_t>(Number(flags, "block-tokens", 16));
  const ProfileFile file = OrFail(ReadProfileFile(Required(flags, "profile")));
  std::ifstream jobs(Required(flags, "jobs"));
  const Json list = Json::parse(jobs, nullptr, /*allow_exceptions=*/false);
  if (!list.is_array()) Fail("--jobs is no JSON array");
  Coder coder(spec, file);
  Json results = Json::array();
  for (const Json& job : list) results.push_back(coder.Run(job));
  std::cout << results << "\n";
  return 0;
}

int Main(int argc, char** argv) {
  const std::string verb = argc > 1 ? argv[1] : "";
  Flags flags;
  for (int i = 2; i + 1 < argc; i += 2) flags[std::string(argv[i]).substr(2)] = argv[i + 1];
  if (verb == "fit") return Fit(flags);
  if (verb == "code") return Code(flags);
  Fail("fit or code");
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) { return kvtrie::Main(argc, argv); }
