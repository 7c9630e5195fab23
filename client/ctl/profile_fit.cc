#include "client/ctl/profile_fit.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/format.h"
#include "client/ctl/json_views.h"
#include "client/ctl/profile_code.h"
#include "client/ctl/profile_files.h"
#include "client/ctl/progress.h"
#include "client/ctl/table.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/codec/fit_material.h"
#include "storage/codec/frame_codec.h"
#include "storage/codec/residual_codec.h"
#include "storage/codec/residual_fit.h"
#include "storage/codec/shared_runs.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {
namespace {

using Json = nlohmann::ordered_json;

// Base steps in units of the metric. Where it is Fisher's information of the loss of 256 tokens,
// they come near to what levels promise, for texts like those that are fitted; only a measurement
// tells.
struct LevelFlag {
  Quality quality;
  std::string_view flag;
  double step;
};
constexpr LevelFlag kLevelFlags[] = {{Quality::kHigh, "high", 0.00115},
                                     {Quality::kNearExact, "near-exact", 0.00034},
                                     {Quality::kSmall, "small", 0.0028}};

struct InputName {
  std::string_view name;
  PredictorInput input;
};
constexpr InputName kInputs[] = {{"below", PredictorInput::kLayerBelow},
                                 {"two-below", PredictorInput::kTwoBelow},
                                 {"first-layer", PredictorInput::kFirstLayer},
                                 {"same-k", PredictorInput::kSameLayerK}};

// Texts that are coded with a new profile, to tell about how large it makes KV.
constexpr std::size_t kEstimatedTexts = 2;
constexpr std::uint32_t kEstimatedBlockTokens = 16;

absl::Status Bad(const std::string& path, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", what));
}

// The numbers of the file that a flag names.
struct Numbers {
  MappedFile file;
  std::span<const float> of_file;  // point into `file`
};
absl::StatusOr<Numbers> ReadNumbers(const std::string& path) {
  Numbers numbers;
  KV_ASSIGN_OR_RETURN(numbers.file, MappedFile::Open(path));
  KV_ASSIGN_OR_RETURN(numbers.of_file, NumbersOf<float>(numbers.file, path));
  return numbers;
}

// Of a file: means [layer][query head][k_head_dim], then covariances [..][k_head_dim].
absl::StatusOr<QueryStatistics> SplitQueries(std::span<const PlaneShape> planes,
                                             std::span<const float> numbers,
                                             const std::string& path) {
  std::size_t means = 0, all = 0;  // of each query head
  for (const PlaneShape& plane : planes) {
    if (plane.is_v) continue;
    means += plane.head_dim;
    all += std::size_t{plane.head_dim} * (plane.head_dim + 1);
  }
  if (numbers.size() % all != 0) {
    return Bad(path, absl::StrCat("has ", numbers.size(), " numbers, and this model takes ", all,
                                  " for each query head: means [layer][query head][k_head_dim], "
                                  "then covariances"));
  }
  QueryStatistics statistics;
  statistics.query_heads = static_cast<std::uint32_t>(numbers.size() / all);
  statistics.means = numbers.first(means * statistics.query_heads);
  statistics.covariances = numbers.subspan(statistics.means.size());
  return statistics;
}

// Of a file: [plane][KV head][head_dim][head_dim].
absl::StatusOr<std::vector<std::vector<float>>> SplitMetrics(std::span<const PlaneShape> planes,
                                                             std::span<const float> numbers,
                                                             const std::string& path) {
  std::size_t all = 0;
  for (const PlaneShape& plane : planes) all += std::size_t{plane.components()} * plane.head_dim;
  if (numbers.size() != all) {
    return Bad(path, absl::StrCat("has ", numbers.size(), " numbers, and this model takes ", all,
                                  ": [plane][KV head][dim][dim]"));
  }
  std::vector<std::vector<float>> metrics;
  for (const PlaneShape& plane : planes) {
    const std::size_t dim = plane.head_dim, components = plane.components();
    std::vector<float>& metric = metrics.emplace_back(components * components);
    for (std::size_t row = 0; row < components; ++row) {
      std::copy_n(numbers.begin(), dim, metric.data() + row * components + row / dim * dim);
      numbers = numbers.subspan(dim);
    }
  }
  return metrics;
}

absl::StatusOr<FitMaterial> ReadMaterial(std::span<const PlaneShape> planes,
                                         const std::string& path) {
  KV_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  absl::StatusOr<FitMaterial> material = FitMaterial::Decode(planes, file.text());
  if (!material.ok()) return Bad(path, std::string(material.status().message()));
  return material;
}

absl::StatusOr<FitMaterial> MakeMaterial(const VerbContext& context, const ModelSpec& spec,
                                         const SampleFolder& texts) {
  const CommandLine& line = context.line;
  const std::vector<PlaneShape> planes = PlanesOf(spec);
  if (line.Has("material")) {
    KV_ASSIGN_OR_RETURN(FitMaterial material,
                        OfFlag("material", ReadMaterial(planes, line.Text("material"))));
    if (material.group_count > 1 && !line.Has("heads")) {
      return UsageError("--material " + line.Text("material") +
                        " was made with --heads: give --heads here too");
    }
    return material;
  }
  FitMaterial material;
  if (line.Has("metrics")) {
    const std::string path = line.Text("metrics");
    KV_ASSIGN_OR_RETURN(const Numbers numbers, OfFlag("metrics", ReadNumbers(path)));
    KV_ASSIGN_OR_RETURN(material.metrics,
                        OfFlag("metrics", SplitMetrics(planes, numbers.of_file, path)));
  }
  if (line.Has("queries")) {
    const std::string path = line.Text("queries");
    KV_ASSIGN_OR_RETURN(const Numbers numbers, OfFlag("queries", ReadNumbers(path)));
    KV_ASSIGN_OR_RETURN(const QueryStatistics queries,
                        OfFlag("queries", SplitQueries(planes, numbers.of_file, path)));
    Progress progress(context.err, context.err_is_terminal);
    ImportanceFitOptions options;
    options.group_per_head = line.Has("heads");
    options.covariance_rank =
        static_cast<std::uint32_t>(line.Number("rank", options.covariance_rank));
    options.progress = [&](double done_share) { progress.Report(done_share, "importance"); };
    material.group_count = options.group_per_head ? planes[0].heads : 1;
    KV_ASSIGN_OR_RETURN(material.importance, FitImportance(spec, texts.samples, queries, options));
  }
  return material;
}

struct Vocabulary {
  MappedFile file;
  VocabularyRows rows;  // point into `file`
};

// Of a file: token ids (u32), then for each f32 K (before RoPE) and V of layer 0.
absl::StatusOr<Vocabulary> ReadVocabulary(std::span<const PlaneShape> planes,
                                          const std::string& path) {
  const std::size_t width = FirstLayerComponents(planes);
  Vocabulary vocabulary;
  KV_ASSIGN_OR_RETURN(vocabulary.file, MappedFile::Open(path));
  KV_ASSIGN_OR_RETURN(const auto words, NumbersOf<std::uint32_t>(vocabulary.file, path));
  if (words.size() % (1 + width) != 0) {
    return Bad(path, absl::StrCat("has ", words.size(), " words of 4 bytes, and a token takes ",
                                  1 + width, ": its id, and K and V of layer 0"));
  }
  const std::size_t count = words.size() / (1 + width);
  vocabulary.rows.tokens = words.first(count);
  vocabulary.rows.rows = {reinterpret_cast<const float*>(words.data() + count), count * width};
  return vocabulary;
}

absl::StatusOr<std::vector<PredictorInput>> ReadInputs(const std::string& names) {
  std::vector<PredictorInput> inputs;
  for (const absl::string_view name : absl::StrSplit(names, ',', absl::SkipEmpty())) {
    const auto found =
        std::find_if(std::begin(kInputs), std::end(kInputs), [&](const InputName& input) {
          return name == absl::string_view(input.name.data(), input.name.size());
        });
    if (found == std::end(kInputs)) {
      return UsageError(absl::StrCat(
          "--inputs: '", name, "' is none; they are below, two-below, first-layer and same-k"));
    }
    inputs.push_back(found->input);
  }
  return inputs;
}

absl::StatusOr<ResidualFitOptions> ReadFitOptions(const CommandLine& line, bool has_metrics) {
  ResidualFitOptions options;
  options.rounds = static_cast<int>(line.Number("rounds", 1));
  options.table_tokens_max = line.Number("table", options.table_tokens_max);
  options.ridge = line.Real("ridge", options.ridge);
  options.metric_shrinkage = line.Real("shrinkage", options.metric_shrinkage);
  options.block_per_head = line.Has("heads");
  options.energy_prior =
      static_cast<std::uint16_t>(line.Number("energy-prior", options.energy_prior));
  options.energy_carried = line.Real("energy-carried", options.energy_carried);
  options.differences.step_factor =
      static_cast<float>(line.Real("difference-steps", options.differences.step_factor));
  if (line.Has("inputs")) {
    KV_ASSIGN_OR_RETURN(options.inputs, ReadInputs(line.Text("inputs")));
  }
  for (const LevelFlag& of : kLevelFlags) {
    ResidualLevel level;
    level.quality = of.quality;
    // Without metrics, steps are in deviations of what predictions leave, about which nothing is
    // known beforehand.
    level.step = static_cast<float>(line.Real(of.flag, has_metrics ? of.step : 0));
    level.rate_weight = static_cast<float>(line.Real("rate-weight", kRateWeight));
    level.importance_strength = static_cast<float>(line.Real("importance", kImportanceStrength));
    if (level.step > 0) options.levels.push_back(level);
  }
  if (options.levels.empty()) {
    return UsageError(
        has_metrics
            ? "no level is left: give one of --high, --near-exact and --small a step above 0"
            : "without --metrics or --material, or with --no-metric, there are no default steps: "
              "give --high, "
              "--near-exact or --small one above 0, in deviations of what predictions leave");
  }
  return options;
}

// Texts with the KV of the same text behind another prefix.
struct RepeatedTexts {
  SampleFolder folder;
  std::vector<KvSample> all;  // those of --samples, and behind them these
  std::size_t shared_tokens = 0;
};

absl::StatusOr<RepeatedTexts> ReadRepeated(const CommandLine& line, const ModelSpec& spec,
                                           const SampleFolder& texts,
                                           const DifferenceFitOptions& options) {
  RepeatedTexts repeated;
  const std::string path = line.Text("repeated");
  KV_ASSIGN_OR_RETURN(repeated.folder, OfFlag("repeated", ReadSamples(spec, path)));
  repeated.all = texts.samples;
  repeated.all.insert(repeated.all.end(), repeated.folder.samples.begin(),
                      repeated.folder.samples.end());
  std::vector<std::span<const TokenId>> tokens;
  for (const KvSample& sample : repeated.all) tokens.push_back(sample.tokens);
  for (const SharedRun& run : FindSharedRuns(tokens, options.run_tokens_min)) {
    repeated.shared_tokens += run.token_count;
  }
  if (repeated.shared_tokens < options.tokens_min) {
    return OfFlag(
        "repeated",
        Bad(path, absl::StrCat("has ", repeated.shared_tokens, " tokens in runs of ",
                               options.run_tokens_min, " or more that --samples ",
                               line.Text("samples"), " has behind another prefix, must have ",
                               options.tokens_min, ": add texts, or leave it out")));
  }
  return repeated;
}

// Flags that would change nothing: of differences that are not fitted, or of what --base has.
absl::Status CheckFitFlags(const CommandLine& line) {
  if (line.Has("difference-steps") && !line.Has("repeated")) {
    return UsageError(
        "--difference-steps: there are no differences without --repeated: give it too");
  }
  if (!line.Has("base")) return absl::OkStatus();
  if (!line.Has("repeated")) {
    return UsageError("--base: only differences are fitted to it: give --repeated");
  }
  for (const char* flag : {"high", "near-exact", "small", "importance", "rate-weight", "inputs",
                           "vocabulary", "table", "energy-prior", "energy-carried", "rounds"}) {
    if (line.Has(flag)) {
      return UsageError(absl::StrCat("--", flag, ": --base has that already: leave one out"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<ResidualProfile> ReadBase(const CommandLine& line, const ModelSpec& spec) {
  const std::string path = line.Text("base");
  KV_ASSIGN_OR_RETURN(const ProfileFile file, OfFlag("base", ReadProfileFile(path)));
  if (file.codec_key != spec.CodecKey()) {
    return OfFlag("base", Bad(path, absl::StrCat("is of another model than ", line.Text("spec"))));
  }
  absl::StatusOr<ResidualProfile> profile = ResidualProfile::DecodeBody(file.body);
  if (!profile.ok()) return OfFlag("base", Bad(path, std::string(profile.status().message())));
  profile->codec_key = file.codec_key;
  return profile;
}

// Bits per component of some of the texts, by level. They were fitted to, so others take more.
absl::StatusOr<std::vector<double>> EstimateBits(const VerbContext& context, ModelSpec spec,
                                                 const SampleFolder& texts,
                                                 const ResidualProfile& profile,
                                                 std::string_view body) {
  spec.block_tokens = kEstimatedBlockTokens;
  KV_RETURN_IF_ERROR(spec.Validate());
  KV_ASSIGN_OR_RETURN(auto residual, ResidualCodec::Create(spec, BodyDigest(body), profile));
  const FrameCodec codec(spec, std::move(residual));
  Progress progress(context.err, context.err_is_terminal);
  std::vector<double> bits;
  std::vector<const KvSample*> chosen;
  for (const KvSample& text : texts.samples) {
    if (text.tokens.size() >= kEstimatedBlockTokens) chosen.push_back(&text);
  }
  const std::size_t count = std::min(chosen.size(), kEstimatedTexts);
  for (std::size_t level = 0; level < profile.levels.size(); ++level) {
    double bytes = 0, components = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const KvSample& text = *chosen[i * chosen.size() / count];
      KV_ASSIGN_OR_RETURN(const CodedRun run, CodeRun(spec, codec, text.tokens, text.raw,
                                                      {.quality = profile.levels[level].quality}));
      bytes += static_cast<double>(run.frame_bytes());
      components += static_cast<double>(run.components);
      progress.Report(static_cast<double>(level * count + i + 1) /
                          static_cast<double>(profile.levels.size() * count),
                      "estimating");
    }
    bits.push_back(components > 0 ? 8 * bytes / components : 0);
  }
  return bits;
}

struct Part {
  std::string_view name;
  std::size_t bytes;
};

std::vector<Part> PartsOf(const ResidualProfile& profile, std::size_t body_bytes) {
  std::size_t weights = 0, bases = 0;
  for (const PlaneProfile& plane : profile.plane_profiles) {
    weights += plane.weights.size();
    bases += plane.basis.size();
  }
  const std::size_t table =
      profile.table_rows.size() + profile.table_tokens.size() * sizeof(TokenId);
  const ImportanceModel& of = profile.importance;
  const std::size_t importance = sizeof(float) * (of.query_means.size() + of.query_factors.size() +
                                                  of.normalizers.size() + of.weights.size());
  // Of differences to references.
  std::size_t differences = 0;
  for (const ResidualProfile& of_differences : profile.differences) {
    differences += 1 + of_differences.EncodeBody().size();
  }
  return {{"predictors", weights},
          {"bases", bases},
          {"token table", table},
          {"importance", importance},
          {"differences", differences},
          {"tables and scales", body_bytes - weights - bases - table - importance - differences}};
}

std::string Number(const char* format, double value) {
  char text[32];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

Table::Column RightAligned(std::string title) { return {std::move(title), Table::Align::kRight}; }

// What --measured names; no value where it is not given.
absl::StatusOr<std::optional<MeasuredFigures>> ReadMeasured(const CommandLine& line) {
  if (!line.Has("measured")) return std::optional<MeasuredFigures>();
  return OfFlag("measured", ReadMeasuredFigures(line.Text("measured")));
}

// Writes a draft, or with figures a whole profile. Gives its size.
absl::StatusOr<std::size_t> WriteProfile(const CommandLine& line, const CodecKey& codec_key,
                                         std::string_view body,
                                         std::span<const ResidualLevel> levels,
                                         const std::optional<MeasuredFigures>& measured) {
  std::string bytes = EncodeDraft(codec_key, body);
  if (measured.has_value()) {
    absl::StatusOr<std::string> sealed = SealProfile(codec_key, body, levels, *measured);
    if (!sealed.ok()) {
      return OfFlag("measured", Bad(line.Text("measured"), std::string(sealed.status().message())));
    }
    bytes = *std::move(sealed);
  }
  KV_RETURN_IF_ERROR(OfFlag("out", WriteFile(line.Text("out"), bytes)));
  return bytes.size();
}

absl::StatusOr<std::size_t> Material(const VerbContext& context) {
  const CommandLine& line = context.line;
  KV_RETURN_IF_ERROR(OfFlag("out", CheckCanWrite(line.Text("out"))));
  KV_ASSIGN_OR_RETURN(const ModelSpec spec, OfFlag("spec", ReadModelSpec(line.Text("spec"))));
  KV_ASSIGN_OR_RETURN(const SampleFolder texts,
                      OfFlag("samples", ReadSamples(spec, line.Text("samples"))));
  KV_ASSIGN_OR_RETURN(const FitMaterial material, MakeMaterial(context, spec, texts));
  const std::string bytes = material.Encode(PlanesOf(spec));
  KV_RETURN_IF_ERROR(OfFlag("out", WriteFile(line.Text("out"), bytes)));
  return bytes.size();
}

absl::Status Fit(const VerbContext& context) {
  const CommandLine& line = context.line;
  KV_RETURN_IF_ERROR(CheckFitFlags(line));
  const bool has_metrics = (line.Has("metrics") || line.Has("material")) && !line.Has("no-metric");
  // A base has its levels.
  KV_ASSIGN_OR_RETURN(ResidualFitOptions options,
                      ReadFitOptions(line, has_metrics || line.Has("base")));
  KV_RETURN_IF_ERROR(OfFlag("out", CheckCanWrite(line.Text("out"))));
  KV_ASSIGN_OR_RETURN(const auto measured, ReadMeasured(line));
  KV_ASSIGN_OR_RETURN(const ModelSpec spec, OfFlag("spec", ReadModelSpec(line.Text("spec"))));
  KV_ASSIGN_OR_RETURN(const SampleFolder texts,
                      OfFlag("samples", ReadSamples(spec, line.Text("samples"))));
  std::optional<RepeatedTexts> repeated;
  if (line.Has("repeated")) {
    KV_ASSIGN_OR_RETURN(repeated, ReadRepeated(line, spec, texts, options.differences));
  }
  absl::StatusOr<ResidualProfile> profile;
  if (line.Has("base")) {
    profile = ReadBase(line, spec);
    if (!profile.ok()) return profile.status();
  }
  KV_ASSIGN_OR_RETURN(FitMaterial material, MakeMaterial(context, spec, texts));
  if (line.Has("no-metric")) material.metrics.clear();
  Vocabulary vocabulary;
  if (line.Has("vocabulary")) {
    KV_ASSIGN_OR_RETURN(
        vocabulary, OfFlag("vocabulary", ReadVocabulary(PlanesOf(spec), line.Text("vocabulary"))));
    options.vocabulary = vocabulary.rows;
  }

  const auto begin = std::chrono::steady_clock::now();
  if (!line.Has("base")) {
    Progress progress(context.err, context.err_is_terminal);
    options.progress = [&](double done_share, std::string_view what) {
      progress.Report(done_share, what);
    };
    // Text that samples share by chance is no ground for differences, which would have to be
    // measured.
    ResidualFitOptions of_samples = options;
    of_samples.differences.tokens_min = 0;
    profile = FitResidualProfile(spec, texts.samples, material, of_samples);
  }
  if (!profile.ok()) return profile.status();
  if (repeated) {
    Progress progress(context.err, context.err_is_terminal);
    options.progress = [&](double done_share, std::string_view) {
      progress.Report(done_share, "differences");
    };
    KV_RETURN_IF_ERROR(FitDifferences(spec, repeated->all, material, options, *profile));
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  const std::string body = profile->EncodeBody();
  KV_ASSIGN_OR_RETURN(const std::size_t bytes,
                      WriteProfile(line, profile->codec_key, body, profile->levels, measured));
  KV_ASSIGN_OR_RETURN(const std::vector<double> bits,
                      EstimateBits(context, spec, texts, *profile, body));

  const std::vector<Part> parts = PartsOf(*profile, body.size());
  std::size_t tokens = 0;
  for (const KvSample& text : texts.samples) tokens += text.tokens.size();
  if (context.json) {
    Json json;
    json["bytes"] = bytes;
    json["draft"] = !line.Has("measured");
    json["body_digest"] = BodyDigest(body).ToHex();
    json["texts"] = texts.samples.size();
    json["tokens"] = tokens;
    if (repeated) json["shared_tokens"] = repeated->shared_tokens;
    json["seconds"] = seconds.count();
    json["parts"] = Json::object();
    for (const Part& part : parts) json["parts"][std::string(part.name)] = part.bytes;
    json["levels"] = Json::array();
    for (std::size_t i = 0; i < bits.size(); ++i) {
      json["levels"].push_back(Json{{"quality", QualityText(profile->levels[i].quality)},
                                    {"step", profile->levels[i].step},
                                    {"fitted_texts_bits_per_component", bits[i]}});
    }
    context.out << DumpJson(json) << "\n";
    return absl::OkStatus();
  }
  Table sizes({{"PART"}, RightAligned("SIZE")});
  for (const Part& part : parts) {
    sizes.AddRow({std::string(part.name), FormatBytes(part.bytes)});
  }
  sizes.AddRow({"all", FormatBytes(bytes)});
  sizes.Print(context.out);
  context.out << "\n";
  Table levels(
      {{"LEVEL"}, RightAligned("STEP"), RightAligned("BITS OF FITTED TEXTS"), {"QUALITY"}});
  for (std::size_t i = 0; i < bits.size(); ++i) {
    levels.AddRow({std::string(QualityText(profile->levels[i].quality)),
                   Number("%.3g", profile->levels[i].step), Number("%.3f", bits[i]),
                   line.Has("measured") ? "measured" : "not measured"});
  }
  levels.Print(context.out);
  context.out << "\n"
              << FormatCount(texts.samples.size()) << " texts, " << FormatCount(tokens)
              << " tokens, " << Number("%.0f", seconds.count()) << " s\nbody "
              << BodyDigest(body).ToHex() << "\n";
  if (!line.Has("measured")) {
    context.out << "A draft: no server takes it until `kvtrie profile seal` gives it what was "
                   "measured of it.\n";
  }
  return absl::OkStatus();
}

absl::StatusOr<std::size_t> SealFile(const VerbContext& context) {
  const std::string& path = context.positional(0);
  KV_ASSIGN_OR_RETURN(const ProfileFile profile, ReadProfileFile(path));
  const absl::StatusOr<ResidualProfile> body = ResidualProfile::DecodeBody(profile.body);
  if (!body.ok()) return Bad(path, std::string(body.status().message()));
  KV_ASSIGN_OR_RETURN(const auto measured, ReadMeasured(context.line));
  return WriteProfile(context.line, profile.codec_key, profile.body, body->levels, measured);
}

ExitCode PrintBytes(const VerbContext& context, const absl::StatusOr<std::size_t>& bytes) {
  if (!bytes.ok()) return context.Fail(bytes.status());
  if (context.json) {
    context.out << DumpJson(Json{{"bytes", *bytes}}) << "\n";
  } else {
    context.out << context.line.Text("out") << ": " << FormatBytes(*bytes) << "\n";
  }
  return ExitCode::kOk;
}

}  // namespace

ExitCode RunProfileMaterial(const VerbContext& context) {
  if (!context.line.Has("queries") && !context.line.Has("metrics")) {
    return context.RefuseUsage("needs --queries, --metrics or both");
  }
  return PrintBytes(context, Material(context));
}

ExitCode RunProfileFit(const VerbContext& context) {
  if (context.line.Has("material") &&
      (context.line.Has("queries") || context.line.Has("metrics"))) {
    return context.RefuseUsage("--material has queries and metrics in it; give one or the other");
  }
  const absl::Status status = Fit(context);
  return status.ok() ? ExitCode::kOk : context.Fail(status);
}

ExitCode RunProfileSeal(const VerbContext& context) {
  return PrintBytes(context, SealFile(context));
}

}  // namespace kvtrie
