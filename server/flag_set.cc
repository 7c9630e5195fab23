#include "server/flag_set.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/flags/marshalling.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

absl::StatusOr<std::string> ReadText(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) return absl::InvalidArgumentError(absl::StrCat("--flagfile: cannot read ", path));
  return text.str();
}

}  // namespace

bool AbslParseFlag(absl::string_view text, ByteSize* size, std::string* error) {
  constexpr std::pair<absl::string_view, unsigned> kUnits[] = {
      {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
  absl::string_view digits = text;
  unsigned shift = 0;
  for (const auto& [unit, unit_shift] : kUnits) {
    if (absl::ConsumeSuffix(&digits, unit)) {
      shift = unit_shift;
      break;
    }
  }
  std::uint64_t count = 0;
  const bool only_digits = !digits.empty() && std::all_of(digits.begin(), digits.end(), [](char c) {
    return c >= '0' && c <= '9';
  });
  if (!only_digits || !absl::SimpleAtoi(digits, &count) || count > (UINT64_MAX >> shift)) {
    *error = "a size is a whole number of bytes, or one with KiB, MiB, GiB or TiB";
    return false;
  }
  size->bytes = count << shift;
  return true;
}

std::string AbslUnparseFlag(ByteSize size) {
  constexpr std::pair<absl::string_view, unsigned> kUnits[] = {
      {"TiB", 40}, {"GiB", 30}, {"MiB", 20}, {"KiB", 10}};
  for (const auto& [unit, shift] : kUnits) {
    const std::uint64_t one = std::uint64_t{1} << shift;
    if (size.bytes != 0 && size.bytes % one == 0) return absl::StrCat(size.bytes >> shift, unit);
  }
  return absl::StrCat(size.bytes);
}

std::vector<absl::CommandLineFlag*> FlagSet::Flags() const {
  std::vector<absl::CommandLineFlag*> flags;
  for (const auto& [_, flag] : absl::GetAllFlags()) {
    if (absl::EndsWith(flag->Filename(), file_)) flags.push_back(flag);
  }
  std::sort(flags.begin(), flags.end(),
            [](const auto* a, const auto* b) { return a->Name() < b->Name(); });
  return flags;
}

std::vector<std::string> FlagSet::Names() const {
  std::vector<std::string> names = {"flagfile"};
  for (const absl::CommandLineFlag* flag : Flags()) names.emplace_back(flag->Name());
  return names;
}

absl::CommandLineFlag* FlagSet::Find(absl::string_view name) const {
  absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
  return flag != nullptr && absl::EndsWith(flag->Filename(), file_) ? flag : nullptr;
}

bool FlagSet::TakesValue(absl::string_view name) const {
  if (name == "flagfile") return true;
  const absl::CommandLineFlag* flag = Find(name);
  return flag != nullptr && !flag->IsOfType<bool>();
}

absl::Status FlagSet::Apply(const FlagSetting& setting, SettingSources* sources) const {
  const auto fail = [&setting](const auto&... parts) {
    return absl::InvalidArgumentError(
        absl::StrCat(setting.where, ": --", setting.name, ": ", parts...));
  };
  std::string value = setting.value.value_or("true");
  absl::CommandLineFlag* flag = Find(setting.name);
  absl::string_view positive = setting.name;
  if (flag == nullptr && !setting.value.has_value() && absl::ConsumePrefix(&positive, "no")) {
    flag = Find(positive);
    if (flag != nullptr && !flag->IsOfType<bool>()) flag = nullptr;
    value = "false";
  }
  if (flag == nullptr) {
    const std::string nearest = NearestName(setting.name, Names());
    return fail("there is no such setting",
                nearest.empty() ? "" : absl::StrCat("; did you mean --", nearest, "?"));
  }
  if (!setting.value.has_value() && !flag->IsOfType<bool>()) {
    return fail("needs a value: --", setting.name, "=...");
  }
  std::string error;
  if (!flag->ParseFrom(value, &error)) return fail("\"", value, "\" is not valid; ", error);
  (*sources)[std::string(flag->Name())] = setting;
  return absl::OkStatus();
}

absl::Status FlagSet::ApplyAll(std::span<const char* const> arguments,
                               SettingSources* sources) const {
  KV_ASSIGN_OR_RETURN(
      const std::vector<FlagSetting> given,
      ParseArguments(arguments, [this](absl::string_view name) { return TakesValue(name); }));
  // The command line goes last, since it beats the file.
  for (const FlagSetting& setting : given) {
    if (setting.name != "flagfile") continue;
    if (!setting.value.has_value() || setting.value->empty()) {
      return absl::InvalidArgumentError("--flagfile: needs a file name");
    }
    KV_ASSIGN_OR_RETURN(const std::string text, ReadText(*setting.value));
    KV_ASSIGN_OR_RETURN(const auto lines, ParseFlagFile(*setting.value, text));
    for (const FlagSetting& line : lines) KV_RETURN_IF_ERROR(Apply(line, sources));
  }
  for (const FlagSetting& setting : given) {
    if (setting.name != "flagfile") KV_RETURN_IF_ERROR(Apply(setting, sources));
  }
  return absl::OkStatus();
}

absl::StatusOr<SettingSources> FlagSet::Read(std::span<const char* const> arguments,
                                             std::span<const std::string> environment) const {
  KV_RETURN_IF_ERROR(CheckEnvironment(environment, Names()));
  SettingSources sources;
  KV_RETURN_IF_ERROR(ApplyAll(arguments, &sources));
  return sources;
}

std::vector<EffectiveSetting> FlagSet::Effective(const SettingSources& sources) const {
  std::vector<EffectiveSetting> settings;
  for (const absl::CommandLineFlag* flag : Flags()) {
    const std::string name(flag->Name());
    const auto source = sources.find(name);
    std::string origin = "default";
    if (source != sources.end()) {
      origin = source->second.where == "command line" ? "flag" : "flagfile";
    }
    settings.push_back({name, flag->CurrentValue(), origin, flag->Help()});
  }
  return settings;
}

std::string FlagSet::Describe(absl::string_view title) const {
  std::string text = absl::StrCat(
      title,
      "\n\n  --flagfile=FILE\n"
      "      Read settings from FILE, one --name=value per line; the command line beats it.\n");
  for (const absl::CommandLineFlag* flag : Flags()) {
    absl::StrAppend(&text, "  --", flag->Name(), "=", flag->DefaultValue(), "\n      ",
                    flag->Help(), "\n");
  }
  return text;
}

void SettingChecks::Keep(absl::Status status) {
  if (status_.ok()) status_ = std::move(status);
}

void SettingChecks::Fail(absl::string_view name, absl::string_view what) {
  if (!status_.ok()) return;
  const auto source = sources_.find(std::string(name));
  const std::string where =
      source == sources_.end() ? "" : absl::StrCat(source->second.where, ": ");
  status_ = absl::InvalidArgumentError(absl::StrCat(where, "--", name, ": ", what));
}

ListenAddress SettingChecks::Address(const char* name, const std::string& text, bool allow_remote) {
  const auto address = ParseListenAddress(text);
  if (!address.ok()) {
    Fail(name, address.status().message());
    return {};
  }
  const auto loopback = IsLoopback(*address);
  if (!loopback.ok()) {
    Fail(name, loopback.status().message());
  } else if (!*loopback && !allow_remote) {
    Fail(name, absl::StrCat("\"", text,
                            "\" can be reached from other machines, and nothing is "
                            "encrypted; bind a loopback address, or set --allow_remote"));
  }
  return *address;
}

std::string SettingChecks::OneOf(const char* name, const std::string& value,
                                 std::initializer_list<absl::string_view> choices) {
  if (std::find(choices.begin(), choices.end(), value) == choices.end()) {
    std::string list;
    for (const absl::string_view choice : choices) {
      absl::StrAppend(&list, list.empty() ? "" : ", ", choice);
    }
    Fail(name, absl::StrCat("\"", value, "\" is not one of ", list));
  }
  return value;
}

std::uint32_t SettingChecks::Between(const char* name, std::uint32_t value, std::uint32_t low,
                                     std::uint32_t high) {
  if (value < low || value > high) {
    Fail(name, absl::StrCat(value, "; ", low, " to ", high, " are allowed"));
  }
  return value;
}

std::size_t SettingChecks::Size(const char* name, ByteSize value, std::uint64_t low) {
  if (value.bytes < low) Fail(name, absl::StrCat("at least ", AbslUnparseFlag(ByteSize{low})));
  return value.bytes;
}

std::chrono::milliseconds SettingChecks::Milliseconds(const char* name, absl::Duration value,
                                                      absl::Duration low, absl::Duration high) {
  if (value < low || value > high) {
    Fail(name, absl::StrCat(absl::FormatDuration(value), "; ", absl::FormatDuration(low), " to ",
                            absl::FormatDuration(high), " are allowed"));
  }
  return absl::ToChronoMilliseconds(value);
}

}  // namespace kvtrie
