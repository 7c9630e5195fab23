#include "server/flag_reader.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

// Of the CLI and of the scripts beside it; an operator may have set them for a whole shell.
constexpr std::array<absl::string_view, 3> kOthersVariables = {
    "KVTRIE_SERVER", "KVTRIE_ADMIN_SERVER", "KVTRIE_CACHE"};

std::size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

// nullopt unless `text` begins with one or two dashes and a name.
std::optional<FlagSetting> ParseSetting(absl::string_view text, std::string where) {
  if (!absl::ConsumePrefix(&text, "--") && !absl::ConsumePrefix(&text, "-")) return std::nullopt;
  const std::size_t equals = text.find('=');
  FlagSetting setting;
  setting.name = std::string(text.substr(0, equals));
  setting.where = std::move(where);
  if (setting.name.empty()) return std::nullopt;
  if (equals != absl::string_view::npos) setting.value = std::string(text.substr(equals + 1));
  return setting;
}

// What Docker links and Kubernetes put into a container's environment for a Service.
bool IsServiceVariable(absl::string_view name) {
  return absl::EndsWith(name, "_SERVICE_HOST") || absl::StrContains(name, "_SERVICE_PORT") ||
         absl::EndsWith(name, "_PORT") || absl::StrContains(name, "_PORT_");
}

}  // namespace

absl::StatusOr<std::vector<FlagSetting>> ParseFlagFile(absl::string_view file_name,
                                                       absl::string_view text) {
  std::vector<FlagSetting> settings;
  std::map<std::string, std::string> first_place;
  int line_number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++line_number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line.front() == '#') continue;
    const std::string where = absl::StrCat(file_name, ":", line_number);
    auto setting = ParseSetting(line, where);
    if (!setting.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, ": \"", line, "\" is not a setting; write --name=value"));
    }
    if (setting->name == "flagfile") {
      return absl::InvalidArgumentError(absl::StrCat(where, ": --flagfile inside a flag file"));
    }
    const auto [first, is_new] = first_place.emplace(setting->name, where);
    if (!is_new) {
      return absl::InvalidArgumentError(absl::StrCat(
          where, ": --", setting->name, " is set a second time; first in ", first->second));
    }
    settings.push_back(*std::move(setting));
  }
  return settings;
}

absl::StatusOr<std::vector<FlagSetting>> ParseArguments(
    std::span<const char* const> arguments,
    absl::FunctionRef<bool(absl::string_view name)> takes_value) {
  const std::string where = "command line";
  std::vector<FlagSetting> settings;
  std::set<std::string> seen;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    auto setting = ParseSetting(arguments[i], where);
    if (!setting.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, ": \"", arguments[i], "\" is not a setting; write --name=value"));
    }
    if (!setting->value.has_value() && takes_value(setting->name) && i + 1 < arguments.size()) {
      setting->value = arguments[++i];
    }
    if (!seen.insert(setting->name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, ": --", setting->name, " is set a second time"));
    }
    settings.push_back(*std::move(setting));
  }
  return settings;
}

std::string NearestName(absl::string_view name, std::span<const std::string> names) {
  const std::string lower = absl::AsciiStrToLower(name);
  std::string nearest;
  // Half of the letters wrong is another word.
  std::size_t nearest_distance = std::max<std::size_t>(2, lower.size() / 2);
  for (const std::string& candidate : names) {
    const std::size_t distance = EditDistance(lower, candidate);
    if (distance >= nearest_distance) continue;
    nearest = candidate;
    nearest_distance = distance;
  }
  return nearest;
}

absl::Status CheckEnvironment(std::span<const std::string> environment,
                              std::span<const std::string> setting_names) {
  for (const std::string& entry : environment) {
    const absl::string_view name = absl::string_view(entry).substr(0, entry.find('='));
    if (!absl::StartsWith(name, "KVTRIE_") || IsServiceVariable(name)) continue;
    if (std::find(kOthersVariables.begin(), kOthersVariables.end(), name) !=
        kOthersVariables.end()) {
      continue;
    }
    const std::string nearest = NearestName(absl::StripPrefix(name, "KVTRIE_"), setting_names);
    return absl::InvalidArgumentError(absl::StrCat(
        "environment: ", name, " is not known; settings are flags or lines of --flagfile",
        nearest.empty() ? "" : absl::StrCat(" (did you mean --", nearest, "?)")));
  }
  return absl::OkStatus();
}

}  // namespace kvtrie
