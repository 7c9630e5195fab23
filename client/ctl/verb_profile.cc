#include "client/ctl/verb_profile.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "client/ctl/format.h"
#include "client/ctl/json_views.h"
#include "client/ctl/profile_code.h"
#include "client/ctl/profile_files.h"
#include "client/ctl/profile_fit.h"
#include "storage/base/byte_reader.h"
#include "storage/codec/profile_header.h"

namespace kvtrie {
namespace {

ExitCode Put(const VerbContext& context) {
  const auto content = MappedFile::Open(context.positional(1));
  if (!content.ok()) {
    return context.RefuseUsage("profile put: " + std::string(content.status().message()));
  }
  if (content->bytes().size() > kProfileBytesMax) {
    return context.RefuseUsage("profile put: " + context.positional(1) +
                               " is larger than any profile");
  }
  if (const auto file = ReadProfileFile(context.positional(1)); file.ok() && file->levels.empty()) {
    return context.RefuseUsage("profile put: " + context.positional(1) +
                               " is a draft: measure its levels, and seal it with `kvtrie profile "
                               "seal`");
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
  const auto content = context.Cache()->GetProfile(id);
  if (!content.ok()) return context.Fail(content.status());
  const absl::Status written = WriteFile(context.positional(2), AsText(*content));
  return written.ok() ? ExitCode::kOk : context.Fail(written);
}

ExitCode Remove(const VerbContext& context, const ProfileId& id) {
  const absl::Status status = context.Cache()->DeleteProfile(id);
  return status.ok() ? ExitCode::kOk : context.Fail(status);
}

// Flags that several of the verb's commands take; each names those that it must have, and may.
const FlagSpec kFlags[] = {
    {"spec", FlagSpec::Kind::kText, "material, fit, code: JSON of the model's ModelSpec"},
    {"samples", FlagSpec::Kind::kText,
     "material, fit: folder of NAME.tokens, NAME.kv and NAME.importance"},
    {"queries", FlagSpec::Kind::kText,
     "material, fit: f32 means [layer][query head][k_head_dim], then covariances"},
    {"metrics", FlagSpec::Kind::kText,
     "material, fit: f32 [plane][KV head][dim][dim], what an error costs"},
    {"heads", FlagSpec::Kind::kSwitch, "material, fit: steps and matrices for each KV head"},
    {"rank", FlagSpec::Kind::kNumber, "material, fit: kept of each query covariance (8)", 0, 4096},
    {"material", FlagSpec::Kind::kText, "fit: file of `profile material`"},
    {"high", FlagSpec::Kind::kReal, "fit: step in units of the metric (0.00115); 0: no such level"},
    {"near-exact", FlagSpec::Kind::kReal, "fit: the same (0.00031)"},
    {"small", FlagSpec::Kind::kReal, "fit: the same (0.0028)"},
    {"importance", FlagSpec::Kind::kReal, "fit: how far steps follow importance (0.9)"},
    {"rate-weight", FlagSpec::Kind::kReal, "fit: of bits against error in rounding (0.08)"},
    {"inputs", FlagSpec::Kind::kText, "fit: of predictors (below,two-below,first-layer,same-k)"},
    {"shrinkage", FlagSpec::Kind::kReal, "fit: of metrics towards their mean (0.1)"},
    {"ridge", FlagSpec::Kind::kReal, "fit: of predictors (0.002)"},
    {"table", FlagSpec::Kind::kNumber, "fit: tokens whose layer 0 is kept, at most (8192)", 0,
     1 << 20},
    {"no-metric", FlagSpec::Kind::kSwitch, "fit: each component counts by its variance"},
    {"energy-prior", FlagSpec::Kind::kNumber,
     "fit: sixteenths; the more, the less tables follow the energy seen (96)", 1, 65535},
    {"energy-carried", FlagSpec::Kind::kReal, "fit: share of its excess for the next plane (0.5)"},
    {"rounds", FlagSpec::Kind::kNumber,
     "fit: passes that settle tables; code: repetitions, the fastest counts (1)", 1, 100},
    {"measured", FlagSpec::Kind::kText, "fit, seal: JSON of what was measured of this very body"},
    {"profile", FlagSpec::Kind::kText, "code: file of `profile fit` or `seal`"},
    {"level", FlagSpec::Kind::kChoice, "code: quality", 0, 0, "exact|near-exact|high|small"},
    {"block-tokens", FlagSpec::Kind::kNumber, "code: tokens of a block (the spec's)", 1, 1024},
    {"tokens", FlagSpec::Kind::kText, "code: file of u32 token ids, from position 0 on"},
    {"kv", FlagSpec::Kind::kText, "code: raw KV of these tokens, as one block"},
    {"token-importance", FlagSpec::Kind::kText,
     "code: f32 per token, 1 for an average one (estimated)"},
    {"out", FlagSpec::Kind::kText, "material, fit, seal, code: file to write"},
};

struct Command {
  std::string_view name;
  std::size_t argument_count;
  std::string_view arguments;  // for people
  std::vector<std::string_view> needed;
  std::vector<std::string_view> taken;
  ExitCode (*run)(const VerbContext& context);
};

template <ExitCode (*run)(const VerbContext&, const ProfileId&)>
ExitCode WithId(const VerbContext& context) {
  const auto bytes = IdFromHex(context.positional(1));
  const auto id = bytes ? ProfileId::FromBytes(*bytes) : std::nullopt;
  if (!id) {
    return context.RefuseUsage("profile " + context.positional(0) + ": '" + context.positional(1) +
                               "' is not an id");
  }
  return run(context, *id);
}

const Command kCommands[] = {
    {"put", 1, "a file", {}, {}, Put},
    {"get", 2, "an id and a file", {}, {}, WithId<Get>},
    {"rm", 1, "an id", {}, {}, WithId<Remove>},
    {"material",
     0,
     "no argument, but flags",
     {"spec", "samples", "out"},
     {"queries", "metrics", "heads", "rank"},
     RunProfileMaterial},
    {"fit",
     0,
     "no argument, but flags",
     {"spec", "samples", "out"},
     {"queries", "metrics", "heads", "rank", "material", "high", "near-exact", "small",
      "importance", "rate-weight", "inputs", "shrinkage", "ridge", "table", "no-metric",
      "energy-prior", "energy-carried", "rounds", "measured"},
     RunProfileFit},
    {"seal", 1, "a file", {"measured", "out"}, {}, RunProfileSeal},
    {"code",
     0,
     "no argument, but flags",
     {"spec", "profile", "level", "tokens", "kv"},
     {"block-tokens", "token-importance", "rounds", "out"},
     RunProfileCode},
};

ExitCode Run(const VerbContext& context) {
  const std::string& name = context.positional(0);
  const auto command = std::find_if(std::begin(kCommands), std::end(kCommands),
                                    [&](const Command& of) { return of.name == name; });
  if (command == std::end(kCommands)) {
    return context.RefuseUsage("profile: '" + name +
                               "' is not put, get, rm, material, fit, seal or code");
  }
  if (context.line.positionals().size() - 1 != command->argument_count) {
    return context.RefuseUsage("profile " + name + ": needs " + std::string(command->arguments));
  }
  for (const std::string_view flag : command->needed) {
    if (!context.line.Has(flag)) {
      return context.RefuseUsage("profile " + name + ": needs --" + std::string(flag));
    }
  }
  for (const FlagSpec& flag : kFlags) {
    const auto is_it = [&](std::string_view other) { return other == flag.name; };
    if (context.line.Has(flag.name) && std::ranges::none_of(command->needed, is_it) &&
        std::ranges::none_of(command->taken, is_it)) {
      return context.RefuseUsage("profile " + name + ": does not take --" + std::string(flag.name));
    }
  }
  return command->run(context);
}

}  // namespace

const Verb kProfileVerb{
    .name = "profile",
    .positionals = "put FILE | get ID FILE | rm ID | material | fit | seal FILE | code",
    .positionals_min = 1,
    .positionals_max = 3,
    .summary = "store, read, remove or make a codec profile",
    .details =
        "put prints the profile's id. A profile that stored frames name is not removed.\n\n"
        "The others work on files, without a server:\n"
        "  material  what is known of a model beside its KV, from queries and metrics\n"
        "  fit       fits a profile to the KV of texts. Without --measured it is a draft: a level "
        "promises what\n"
        "            was measured with the model, so no server takes a profile of which nothing "
        "was\n"
        "  seal      makes a draft a profile: writes it with what was measured\n"
        "  code      codes the KV of one text in blocks, and restores it; prints JSON\n"
        "`python -m kvtrie.calibrate` (client/python) runs them all for a model, and measures.",
    .flags = kFlags,
    .run = Run,
};

}  // namespace kvtrie
