#pragma once

#include <functional>
#include <optional>
#include <ostream>
#include <span>
#include <string>

#include "client/ctl/exit_code.h"

namespace kvtrie {

// What the CLI takes from its surroundings.
struct CliEnvironment {
  std::ostream& out;
  std::ostream& err;
  bool out_is_terminal = false;
  bool err_is_terminal = false;
  std::function<std::optional<std::string>(const std::string& name)> variable;
};

// Runs `kvtrie ARGUMENTS...`.
ExitCode RunCli(std::span<const std::string> arguments, const CliEnvironment& environment);

}  // namespace kvtrie
