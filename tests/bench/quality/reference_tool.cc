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
#include <cstring>
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
#include "storage/codec/shared_runs.h"

namespace kvtrie {
namespace {

using Json = nlohmann::ordered_json;
using Flags = std::map<std::string, std::string>;

constexpr std::size_t kRunTokensMin = 32;

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

// A session that is stored, in whole blocks.
struct Session {
  MappedFile token_file, kv_file;
  std::vector<TokenId> tokens;
  std::vector<std::vector<std::byte>> raw;  // [block]
};

class Coder {
 public:
  Coder(ModelSpec spec, const ProfileFile& file) : spec_(std::move(spec)) {
    const ResidualProfile profile = OrFail(ResidualProfile::DecodeBody(file.body));
    codec_ = std::make_unique<FrameCodec>(
        spec_, std::shared_ptr<const ResidualCodec>(
                   OrFail(ResidualCodec::Create(spec_, BodyDigest(file.body), profile))));
  }

  Json Run(const Json& job) {
    const Session& first = Open(job.at("first").get<std::string>());
    const Session& second = Open(job.at("second").get<std::string>());
    const std::string way = job.at("way").get<std::string>();
    const Quality level = LevelOf(job.at("level").get<std::string>());
    const std::vector<ReferenceBlock> references =
        way == "alone" ? std::vector<ReferenceBlock>()
                       : References(first, job.at("first").get<std::string>(),
                                    LevelOf(job.at("reference").get<std::string>()));
    std::vector<BlockToEncode> to_encode = BlocksOf(second);
    std::vector<std::vector<ReferenceBlock>> own_references(to_encode.size());
    std::vector<std::vector<ReferenceRun>> runs(to_encode.size());
    if (way != "alone") AddRuns(first, second, references, own_references, runs);
    for (std::size_t b = 0; b < to_encode.size() && way == "against"; ++b) {
      to_encode[b].references = own_references[b];
      to_encode[b].runs = runs[b];
    }
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<EncodedFrame> frames = OrFail(codec_->Encode(to_encode, level));
    const auto encoded = std::chrono::steady_clock::now();
    std::vector<std::vector<std::byte>> restored = Decode(second, frames, own_references);
    const auto decoded = std::chrono::steady_clock::now();
    Json result;
    std::size_t referenced = 0;
    for (std::size_t b = 0; b < frames.size(); ++b) {
      std::size_t bytes = frames[b].bytes.size();
      if (way == "reuse" && !runs[b].empty()) {
        bytes = Reuse(own_references[b], runs[b], static_cast<std::uint32_t>(b), restored[b]);
      }
      referenced += frames[b].codec == CodecId::kReferenced ? 1 : 0;
      result["block_bytes"].push_back(bytes);
    }
    result["referenced_blocks"] = referenced;
    result["encode_seconds"] = std::chrono::duration<double>(encoded - begin).count();
    result["decode_seconds"] = std::chrono::duration<double>(decoded - encoded).count();
    const std::vector<std::byte> run = RunOfBlocks(spec_, restored);
    OrFail(WriteFile(job.at("out").get<std::string>(),
                     {reinterpret_cast<const char*>(run.data()), run.size()}));
    return result;
  }

 private:
  const Session& Open(const std::string& name) {
    const auto [at, is_new] = sessions_.try_emplace(name);
    Session& session = at->second;
    if (!is_new) return session;
    session.token_file = OrFail(MappedFile::Open(name + ".tokens"));
    session.kv_file = OrFail(MappedFile::Open(name + ".kv"));
    const auto tokens = OrFail(NumbersOf<TokenId>(session.token_file, name));
    session.raw = BlocksOfRun(spec_, session.kv_file.bytes());
    session.tokens.assign(
        tokens.begin(),
        tokens.begin() + static_cast<std::ptrdiff_t>(session.raw.size() * spec_.block_tokens));
    return session;
  }

  std::vector<BlockToEncode> BlocksOf(const Session& session) const {
    std::vector<BlockToEncode> blocks;
    for (std::size_t b = 0; b < session.raw.size(); ++b) {
      blocks.push_back(
          {.first_position = static_cast<std::uint32_t>(b * spec_.block_tokens),
           .session_tokens = static_cast<std::uint32_t>(session.tokens.size()),
           .tokens = std::span(session.tokens).subspan(b * spec_.block_tokens, spec_.block_tokens),
           .raw = session.raw[b]});
    }
    return blocks;
  }

  std::vector<std::vector<std::byte>> Decode(
      const Session& session, std::span<const EncodedFrame> frames,
      std::span<const std::vector<ReferenceBlock>> references) const {
    std::vector<std::vector<std::byte>> restored(
        frames.size(), std::vector<std::byte>(KvGeometry(spec_).raw_block_bytes()));
    std::vector<FrameToDecode> to_decode;
    for (std::size_t b = 0; b < frames.size(); ++b) {
      to_decode.push_back(
          {.frame = OrFail(FrameView::Parse(frames[b].bytes)),
           .tokens = std::span(session.tokens).subspan(b * spec_.block_tokens, spec_.block_tokens),
           .raw = restored[b]});
      if (!references.empty()) to_decode.back().references = references[b];
    }
    OrFail(codec_->Decode(to_decode));
    return restored;
  }

  // All blocks of a session as they are restored at a level.
  std::vector<ReferenceBlock> References(const Session& session, const std::string& name,
                                         Quality level) {
    const auto [at, is_new] = restored_.try_emplace({name, static_cast<int>(level)});
    if (is_new) {
      at->second = Decode(session, OrFail(codec_->Encode(BlocksOf(session), level)), {});
    }
    std::vector<ReferenceBlock> references;
    for (std::size_t b = 0; b < session.raw.size(); ++b) {
      ReferenceBlock& reference = references.emplace_back();
      reference.node.bytes.fill(0xEE);
      std::memcpy(reference.node.bytes.data(), &b, sizeof b);
      reference.first_position = static_cast<std::uint32_t>(b * spec_.block_tokens);
      reference.tokens =
          std::span(session.tokens).subspan(b * spec_.block_tokens, spec_.block_tokens);
      reference.raw = at->second[b];
      // A coarse one is to be measured too.
      reference.quality = Quality::kExact;
    }
    return references;
  }

  void AddRuns(const Session& first, const Session& second,
               std::span<const ReferenceBlock> references,
               std::vector<std::vector<ReferenceBlock>>& own_references,
               std::vector<std::vector<ReferenceRun>>& runs) const {
    const std::span<const TokenId> texts[] = {first.tokens, second.tokens};
    const std::size_t size = spec_.block_tokens;
    for (const SharedRun& shared : FindSharedRuns(texts, kRunTokensMin)) {
      if (shared.earlier_text != 0 || shared.text != 1) continue;
      for (std::size_t i = 0; i < shared.token_count;) {
        const std::size_t token = shared.first_token + i, other = shared.offset + i;
        const std::size_t count =
            std::min({shared.token_count - i, size - token % size, size - other % size});
        std::vector<ReferenceBlock>& own = own_references[token / size];
        const ReferenceBlock& reference = references[other / size];
        auto place = std::find_if(own.begin(), own.end(), [&](const ReferenceBlock& block) {
          return block.node == reference.node;
        });
        if (place == own.end()) place = own.insert(own.end(), reference);
        runs[token / size].push_back({.first_token = static_cast<std::uint16_t>(token % size),
                                      .token_count = static_cast<std::uint16_t>(count),
                                      .reference = static_cast<std::uint16_t>(place - own.begin()),
                                      .offset = static_cast<std::uint16_t>(other % size)});
        i += count;
      }
    }
  }

  // The references' own KV in place of the block's. What stays of the block is not counted.
  std::size_t Reuse(std::span<const ReferenceBlock> references, std::span<const ReferenceRun> runs,
                    std::uint32_t block, std::span<std::byte> raw) const {
    const KvGeometry geometry(spec_);
    const RawKv raw_kv(geometry, spec_.rope);
    const RopeAngles own_angles = raw_kv.AnglesAt(block * spec_.block_tokens);
    for (const PlaneShape& plane : PlanesOf(spec_)) {
      const std::size_t components = plane.components();
      std::vector<float> rows(spec_.block_tokens * components), of_reference(rows.size());
      raw_kv.ReadRows(raw, plane.layer, plane.kind(), own_angles, rows);
      for (const ReferenceRun& run : runs) {
        const ReferenceBlock& reference = references[run.reference];
        raw_kv.ReadRows(reference.raw, plane.layer, plane.kind(),
                        raw_kv.AnglesAt(reference.first_position), of_reference);
        std::copy_n(of_reference.data() + run.offset * components, run.token_count * components,
                    rows.data() + run.first_token * components);
      }
      raw_kv.WriteRows(rows, plane.layer, plane.kind(), own_angles, raw);
    }
    return 0;
  }

  const ModelSpec spec_;
  std::unique_ptr<FrameCodec> codec_;
  std::map<std::string, Session> sessions_;
  std::map<std::pair<std::string, int>, std::vector<std::vector<std::byte>>> restored_;
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
