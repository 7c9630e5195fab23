#include "client/ctl/verb_profile.h"

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/format.h"
#include "client/ctl/json_views.h"
#include "client/ctl/profile_code.h"
#include "client/ctl/profile_files.h"
#include "client/ctl/profile_fit.h"
#include "storage/base/byte_reader.h"
#include "storage/codec/profile_header.h"
#include "storage/codec/residual_profile.h"

namespace kvtrie {
namespace {

ExitCode Put(const VerbContext& context) {
  const std::string& path = context.positional(0);
  const auto content = MappedFile::Open(path);
  if (!content.ok()) return context.Fail(content.status());
  if (content->bytes().size() > kProfileBytesMax) {
    return context.Fail(absl::InvalidArgumentError(path + ": is larger than any profile"));
  }
  if (const auto file = ReadProfileFile(path); file.ok()) {
    if (file->levels.empty()) {
      return context.Fail(absl::InvalidArgumentError(
          path + ": is a draft: measure its levels, and seal it with `kvtrie profile seal`"));
    }
    // The server does not look into it, and clients could not use it.
    if (const auto body = ResidualProfile::DecodeBody(file->body); !body.ok()) {
      return context.Fail(absl::InvalidArgumentError(
          absl::StrCat(path, ": cannot be used: ", std::string(body.status().message()))));
    }
  }
  const auto profile = context.Cache()->PutProfile(content->bytes());
  if (!profile.ok()) return context.Fail(profile.status());
  if (context.json) {
    context.out << DumpJson(ProfileToJson(*profile)) << "\n";
  } else {
    context.out << IdToHex(profile->profile_id()) << "\n";
  }
  return ExitCode::kOk;
}

ExitCode Get(const VerbContext& context, const ProfileId& id) {
  const std::string& path = context.positional(1);
  if (const absl::Status can = CheckCanWrite(path); !can.ok()) return context.Fail(can);
  const auto content = context.Cache()->GetProfile(id);
  if (!content.ok()) return context.Fail(content.status());
  const absl::Status written = WriteFile(path, AsText(*content));
  return written.ok() ? ExitCode::kOk : context.Fail(written);
}

ExitCode Remove(const VerbContext& context, const ProfileId& id) {
  const absl::Status status = context.Cache()->DeleteProfile(id);
  return status.ok() ? ExitCode::kOk : context.Fail(status);
}

template <ExitCode (*run)(const VerbContext&, const ProfileId&)>
ExitCode WithId(const VerbContext& context) {
  const auto bytes = IdFromHex(context.positional(0));
  const auto id = bytes ? ProfileId::FromBytes(*bytes) : std::nullopt;
  if (!id) return context.RefuseUsage("'" + context.positional(0) + "' is not an id");
  return run(context, *id);
}

constexpr FlagSpec kSpec =
    FlagSpec{"spec", FlagSpec::Kind::kText, "JSON of the model's ModelSpec"}.Required();
constexpr FlagSpec kSamples =
    FlagSpec{"samples", FlagSpec::Kind::kText, "folder of NAME.tokens, NAME.kv and NAME.importance"}
        .Required();
constexpr FlagSpec kQueries{"queries", FlagSpec::Kind::kText,
                            "file of f32: means [layer][query head][k_head_dim], then covariances"};
constexpr FlagSpec kMetrics{"metrics", FlagSpec::Kind::kText,
                            "file of f32 [plane][KV head][dim][dim], what an error costs"};
constexpr FlagSpec kHeads{"heads", FlagSpec::Kind::kSwitch, "steps and matrices for each KV head"};
constexpr FlagSpec kRank{"rank", FlagSpec::Kind::kNumber, "kept of each query covariance (8)", 0,
                         4096};
constexpr FlagSpec kMeasured{"measured", FlagSpec::Kind::kText,
                             "JSON of what was measured of this very body"};
constexpr FlagSpec kOut{"out", FlagSpec::Kind::kText, "file to write"};

const FlagSpec kMaterialFlags[] = {kSpec,  kSamples, kOut.Required(), kQueries, kMetrics,
                                   kHeads, kRank};

const FlagSpec kFitFlags[] = {
    kSpec,
    kSamples,
    kOut.Required(),
    {"material", FlagSpec::Kind::kText,
     "file of `profile material`, in place of --queries and --metrics"},
    kQueries,
    kMetrics,
    kRank,
    kHeads,
    {"high", FlagSpec::Kind::kReal, "step in units of the metric (0.00115); 0: no such level"},
    {"near-exact", FlagSpec::Kind::kReal, "the same (0.00034)"},
    {"small", FlagSpec::Kind::kReal, "the same (0.0028)"},
    {"importance", FlagSpec::Kind::kReal, "how far steps follow importance (0.9)"},
    {"rate-weight", FlagSpec::Kind::kReal, "of bits against error in rounding (0.08)"},
    {"inputs", FlagSpec::Kind::kText, "of predictors (below,two-below,first-layer,same-k)"},
    {"shrinkage", FlagSpec::Kind::kReal, "of metrics towards their mean (0.1)"},
    FlagSpec{"ridge", FlagSpec::Kind::kReal, "of predictors (0.002)"}.AboveZero(),
    {"vocabulary", FlagSpec::Kind::kText,
     "file of u32 token ids, then f32 K (before RoPE) and V of layer 0 of each: what texts lack"},
    {"table", FlagSpec::Kind::kNumber, "tokens whose layer 0 is kept, at most (32768)", 0, 1 << 20},
    {"no-metric", FlagSpec::Kind::kSwitch, "each component counts by its variance"},
    {"energy-prior", FlagSpec::Kind::kNumber,
     "sixteenths; the more, the less tables follow the energy seen (96)", 1, 65535},
    FlagSpec{"energy-carried", FlagSpec::Kind::kReal,
             "share of its excess for the next plane (0.5)"}
        .AtMost(1),
    {"rounds", FlagSpec::Kind::kNumber, "passes that settle tables (1)", 1, 100},
    {"repeated", FlagSpec::Kind::kText,
     "folder of more samples: text of --samples behind other prefixes, for differences alone"},
    FlagSpec{"difference-steps", FlagSpec::Kind::kReal,
             "steps of differences, in those of the level (4)"}
        .AboveZero(),
    {"base", FlagSpec::Kind::kText,
     "draft or profile to keep as it is, but for differences to --repeated"},
    kMeasured,
};

const FlagSpec kSealFlags[] = {kMeasured.Required(), kOut.Required()};

const FlagSpec kCodeFlags[] = {
    kSpec,
    FlagSpec{"profile", FlagSpec::Kind::kText, "file of `profile fit` or `seal`"}.Required(),
    FlagSpec{"level", FlagSpec::Kind::kChoice, "quality", 0, 0, "exact|near-exact|high|small"}
        .Required(),
    FlagSpec{"tokens", FlagSpec::Kind::kText, "file of u32 token ids, from position 0 on"}
        .Required(),
    FlagSpec{"kv", FlagSpec::Kind::kText, "raw KV of these tokens, as one block"}.Required(),
    {"block-tokens", FlagSpec::Kind::kNumber, "tokens of a block (the spec's)", 1, 1024},
    {"token-importance", FlagSpec::Kind::kText,
     "file of f32, one per token, 1 for an average one (estimated)"},
    {"against-tokens", FlagSpec::Kind::kText,
     "of another session, which is stored: text that both have is coded against it"},
    {"against-kv", FlagSpec::Kind::kText, "raw KV of that session"},
    FlagSpec{"against-level", FlagSpec::Kind::kChoice, "at which it is stored, finer than --level",
             0, 0, "exact|near-exact|high|small"},
    {"rounds", FlagSpec::Kind::kNumber, "repetitions, the fastest counts (1)", 1, 100},
    kOut,
};

const Verb kPut{
    .name = "put",
    .positionals = "FILE",
    .positionals_min = 1,
    .positionals_max = 1,
    .summary = "store a profile, and print its id",
    .run = Put,
};

const Verb kGet{
    .name = "get",
    .positionals = "ID FILE",
    .positionals_min = 2,
    .positionals_max = 2,
    .summary = "write a stored profile to a file",
    .run = WithId<Get>,
};

const Verb kRm{
    .name = "rm",
    .positionals = "ID",
    .positionals_min = 1,
    .positionals_max = 1,
    .summary = "remove a profile that no stored frame names",
    .run = WithId<Remove>,
};

const Verb kMaterial{
    .name = "material",
    .summary = "what is known of a model beside its KV, from --queries, --metrics or both",
    .flags = kMaterialFlags,
    .run = RunProfileMaterial,
};

const Verb kFit{
    .name = "fit",
    .summary = "fit a profile to the KV of texts",
    .details =
        "Without --measured it is a draft: a level promises what was measured with the model, so "
        "no server\ntakes a profile of which nothing was. With --repeated it can code a text "
        "against the same text under\nanother prefix.",
    .flags = kFitFlags,
    .run = RunProfileFit,
};

const Verb kSeal{
    .name = "seal",
    .positionals = "FILE",
    .positionals_min = 1,
    .positionals_max = 1,
    .summary = "make a draft a profile: write it with what was measured",
    .flags = kSealFlags,
    .run = RunProfileSeal,
};

const Verb kCode{
    .name = "code",
    .summary = "code the KV of one text in blocks, restore it, and print JSON of both",
    .flags = kCodeFlags,
    .run = RunProfileCode,
};

const Verb* const kActions[] = {&kPut, &kGet, &kRm, &kMaterial, &kFit, &kSeal, &kCode};

}  // namespace

const Verb kProfileVerb{
    .name = "profile",
    .positionals = "ACTION",
    .summary = "store, read, remove or make a codec profile",
    .details =
        "material, fit, seal and code work on files, without a server. `python -m "
        "kvtrie.calibrate`\n(client/python) runs them all for a model, and measures.",
    .actions = kActions,
};

}  // namespace kvtrie
