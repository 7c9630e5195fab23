#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvtrie {

// One setting as it stands on the command line or in a flag file.
struct FlagSetting {
  std::string name;
  std::optional<std::string> value;  // none: "--name" or "--noname" alone
  std::string where;                 // "command line" or "FILE:LINE", for messages
};

// The lines of a flag file: "--name=value" or "--name", one per line; blank lines and lines that
// begin with '#' are skipped. InvalidArgument names file and line of what is not a setting, and of
// the second of two with the same name.
absl::StatusOr<std::vector<FlagSetting>> ParseFlagFile(absl::string_view file_name,
                                                       absl::string_view text);

// The arguments after the program's name: "--name=value", "--name value" (when `takes_value` says
// so of the name) or "--name". InvalidArgument: something else.
absl::StatusOr<std::vector<FlagSetting>> ParseArguments(
    std::span<const char* const> arguments,
    absl::FunctionRef<bool(absl::string_view name)> takes_value);

// The name that is most like `name`; empty when none is.
std::string NearestName(absl::string_view name, std::span<const std::string> names);

// Environment variables with our prefix: settings are not read from there, and one that is ignored
// without a word is worse than a start that fails. What Kubernetes sets for a Service of that name
// is not meant. InvalidArgument names the variable and the setting that it may have been meant for.
absl::Status CheckEnvironment(std::span<const std::string> environment,
                              std::span<const std::string> setting_names);

}  // namespace kvtrie
