#include "client/ctl/verb_profiles.h"

#include <cstdio>
#include <string>

#include "client/ctl/format.h"
#include "client/ctl/json_views.h"
#include "client/ctl/table.h"

namespace kvtrie {
namespace {

// "high 2.25, small 1.20": bits per component, level by level.
std::string Levels(const v1::ProfileEntry& profile) {
  std::string text;
  for (const v1::ProfileLevel& level : profile.levels()) {
    char bits[32];
    std::snprintf(bits, sizeof bits, " %.2f", static_cast<double>(level.bits_per_component()));
    if (!text.empty()) text += ", ";
    text += std::string(QualityName(level.quality())) + bits;
  }
  return text;
}

ExitCode Run(const VerbContext& context) {
  const auto profiles = context.Cache()->ListProfiles();
  if (!profiles.ok()) return context.Fail(profiles.status());
  if (context.json) {
    nlohmann::ordered_json json = nlohmann::json::array();
    for (const v1::ProfileEntry& profile : profiles->profiles()) {
      json.push_back(ProfileToJson(profile));
    }
    context.out << DumpJson({{"profiles", json}}) << "\n";
    return ExitCode::kOk;
  }
  Table table({{"PROFILE"},
               {"LEVELS (BITS/COMPONENT)"},
               {"SIZE", Table::Align::kRight},
               {"MODELS", Table::Align::kRight},
               {"FRAMES", Table::Align::kRight},
               {"CREATED (UTC)"}});
  for (const v1::ProfileEntry& profile : profiles->profiles()) {
    table.AddRow({IdToHex(profile.profile_id()), Levels(profile),
                  FormatBytes(profile.profile_bytes()),
                  FormatCount(static_cast<std::uint64_t>(profile.model_ids_size())),
                  FormatCount(profile.frames()), FormatTime(profile.created_unix_seconds())});
  }
  table.Print(context.out);
  return ExitCode::kOk;
}

}  // namespace

const Verb kProfilesVerb{
    .name = "profiles",
    .positionals = "",
    .positionals_min = 0,
    .positionals_max = 0,
    .summary = "codec profiles, newest first",
    .details = "",
    .flags = {},
    .run = Run,
};

}  // namespace kvtrie
