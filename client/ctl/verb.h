#pragma once

#include <chrono>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "client/admin_client.h"
#include "client/client.h"
#include "client/ctl/command_line.h"
#include "client/ctl/exit_code.h"

namespace kvtrie {

// What a verb is run with.
struct VerbContext {
  const std::string& name;  // of the command, "profile fit", say
  const CommandLine& line;
  std::ostream& out;
  std::ostream& err;
  std::string server;
  std::string admin_server;
  // Zero: the default of each call.
  std::chrono::milliseconds timeout{0};
  bool json = false;
  bool out_is_terminal = false;
  bool err_is_terminal = false;

  const std::string& positional(std::size_t i) const { return line.positionals()[i]; }

  AdminClient Admin() const;
  // Aborts on options that Client refuses: the command line has been checked.
  std::unique_ptr<Client> Cache(Lane lane = Lane::kGrpc) const;

  // Prints why a verb failed, and gives the exit code for it; a UsageError is refused as below.
  ExitCode Fail(const absl::Status& status) const;
  // Prints what is wrong with the command line, the command's name before it.
  ExitCode RefuseUsage(std::string_view what) const;
};

// A command of the CLI. Each is defined in its own file. A verb with actions is run as one of them,
// each of which is a command with flags of its own: `kvtrie profile fit`.
struct Verb {
  std::string_view name;
  std::string_view positionals = {};  // as shown in help, e.g. "NODE"
  std::size_t positionals_min = 0;
  std::size_t positionals_max = 0;
  std::string_view summary;       // one line
  std::string_view details = {};  // may be empty
  std::span<const FlagSpec> flags = {};
  ExitCode (*run)(const VerbContext& context) = nullptr;
  std::span<const Verb* const> actions = {};
};

// All verbs, in the order of help.
std::span<const Verb* const> AllVerbs();
// The one with this name, or null.
const Verb* FindVerb(std::span<const Verb* const> verbs, std::string_view name);
// Flags that every verb takes.
std::span<const FlagSpec> GlobalFlags();

}  // namespace kvtrie
