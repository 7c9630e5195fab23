#include "client/ctl/command_line.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

bool ParseNumber(std::string_view text, std::uint64_t* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

bool ParseReal(std::string_view text, double* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size() && std::isfinite(*value) &&
         *value >= 0;
}

bool IsOneOf(std::string_view value, std::string_view choices) {
  while (true) {
    const std::size_t bar = choices.find('|');
    if (choices.substr(0, bar) == value) return true;
    if (bar == std::string_view::npos) return false;
    choices.remove_prefix(bar + 1);
  }
}

absl::Status CheckValue(const FlagSpec& flag, const std::string& value) {
  const auto refuse = [&](const std::string& why) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", std::string(flag.name), " ", value, ": ", why));
  };
  std::uint64_t number;
  double real;
  switch (flag.kind) {
    case FlagSpec::Kind::kSwitch:
      return refuse("takes no value");
    case FlagSpec::Kind::kText:
      return absl::OkStatus();
    case FlagSpec::Kind::kNumber:
      if (!ParseNumber(value, &number)) return refuse("not a whole number");
      if (number < flag.min || number > flag.max) {
        return refuse(absl::StrCat("must be ", flag.min, " to ", flag.max));
      }
      return absl::OkStatus();
    case FlagSpec::Kind::kReal:
      if (!ParseReal(value, &real)) return refuse("not a number from 0 on");
      if (real == 0 ? !flag.may_be_zero : real < FlagSpec::kRealMin || real > flag.real_max) {
        return refuse(absl::StrCat("must be ", flag.may_be_zero ? "0, or " : "", FlagSpec::kRealMin,
                                   " to ", flag.real_max));
      }
      return absl::OkStatus();
    case FlagSpec::Kind::kChoice:
      if (!IsOneOf(value, flag.choices)) return refuse("must be " + std::string(flag.choices));
      return absl::OkStatus();
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CommandLine> CommandLine::Parse(std::span<const std::string> arguments,
                                               std::span<const FlagSpec> flags) {
  CommandLine line;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument == "--") {
      line.positionals_.insert(line.positionals_.end(),
                               arguments.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                               arguments.end());
      break;
    }
    if (argument.size() < 2 || argument[0] != '-') {
      line.positionals_.push_back(argument);
      continue;
    }
    if (argument.compare(0, 2, "--") != 0) {
      return absl::InvalidArgumentError(absl::StrCat("unknown flag ", argument));
    }
    const std::size_t equals = argument.find('=');
    const std::string name = argument.substr(2, equals == std::string::npos ? equals : equals - 2);
    const auto flag = std::find_if(flags.begin(), flags.end(),
                                   [&](const FlagSpec& spec) { return spec.name == name; });
    if (flag == flags.end())
      return absl::InvalidArgumentError(absl::StrCat("unknown flag --", name));
    if (line.Has(name))
      return absl::InvalidArgumentError(absl::StrCat("--", name, " is given twice"));
    if (flag->kind == FlagSpec::Kind::kSwitch && equals == std::string::npos) {
      line.values_.emplace(name, "");
      continue;
    }
    std::string value;
    if (equals != std::string::npos) {
      value = argument.substr(equals + 1);
    } else if (i + 1 < arguments.size()) {
      value = arguments[++i];
    } else {
      return absl::InvalidArgumentError(absl::StrCat("--", name, " needs a value"));
    }
    KV_RETURN_IF_ERROR(CheckValue(*flag, value));
    line.values_.emplace(name, std::move(value));
  }
  return line;
}

std::string CommandLine::Text(std::string_view name, std::string_view otherwise) const {
  const auto found = values_.find(name);
  return found == values_.end() ? std::string(otherwise) : found->second;
}

std::uint64_t CommandLine::Number(std::string_view name, std::uint64_t otherwise) const {
  const auto found = values_.find(name);
  if (found == values_.end()) return otherwise;
  std::uint64_t value = 0;
  KV_CHECK(ParseNumber(found->second, &value));
  return value;
}

double CommandLine::Real(std::string_view name, double otherwise) const {
  const auto found = values_.find(name);
  if (found == values_.end()) return otherwise;
  double value = 0;
  KV_CHECK(ParseReal(found->second, &value));
  return value;
}

absl::Status OfFlag(std::string_view flag, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("--", std::string(flag), " ", status.message()));
}

}  // namespace kvtrie
