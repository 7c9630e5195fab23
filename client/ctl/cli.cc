#include "client/ctl/cli.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/ctl/command_line.h"
#include "client/ctl/verb.h"
#include "client/ctl/verb_help.h"
#include "storage/base/check.h"

namespace kvtrie {
namespace {

constexpr char kServerVariable[] = "KVTRIE_SERVER";
constexpr char kAdminServerVariable[] = "KVTRIE_ADMIN_SERVER";
constexpr char kServerDefault[] = "127.0.0.1:50051";
constexpr char kAdminServerDefault[] = "127.0.0.1:50052";

const FlagSpec kGlobalFlags[] = {
    {"server", FlagSpec::Kind::kText,
     "data address of the server, HOST:PORT or unix:PATH as in its --listen"},
    {"admin_server", FlagSpec::Kind::kText, "admin address of the server"},
    {"timeout", FlagSpec::Kind::kNumber, "end of each call, in seconds", 1, 86'400},
    {"json", FlagSpec::Kind::kSwitch, "print JSON"},
    {"help", FlagSpec::Kind::kSwitch, "print how the command is used"},
};

bool TakesValue(const std::string& argument, std::span<const FlagSpec> flags) {
  return std::any_of(flags.begin(), flags.end(), [&](const FlagSpec& flag) {
    return flag.kind != FlagSpec::Kind::kSwitch && argument == "--" + std::string(flag.name);
  });
}

// Where the name of one of these commands stands: the first argument that is neither a flag nor a
// flag's value.
std::optional<std::size_t> FindName(std::span<const std::string> arguments,
                                    std::span<const Verb* const> verbs) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument.empty() || argument[0] != '-') return i;
    if (TakesValue(argument, kGlobalFlags) ||
        std::any_of(verbs.begin(), verbs.end(),
                    [&](const Verb* verb) { return TakesValue(argument, verb->flags); })) {
      ++i;
    }
  }
  return std::nullopt;
}

// "" for the program itself.
ExitCode Refuse(std::ostream& err, const std::string& name, std::string_view what) {
  err << "kvtrie: " << name << (name.empty() ? "" : ": ") << what << "\nTry 'kvtrie help"
      << (name.empty() ? "" : " ") << name << "'.\n";
  return ExitCode::kUsage;
}

std::string NamesOf(std::span<const Verb* const> verbs) {
  std::string names;
  for (const Verb* verb : verbs) {
    const char* const between = verb == verbs.front() ? "" : verb == verbs.back() ? " or " : ", ";
    absl::StrAppend(&names, between, std::string(verb->name));
  }
  return names;
}

// What is wrong with a line whose flags are well-formed; empty: nothing.
std::string WhatIsWrong(const Verb& verb, const CommandLine& line) {
  if (!verb.actions.empty()) return "needs " + NamesOf(verb.actions);
  if (line.positionals().size() < verb.positionals_min) {
    return "needs " + std::string(verb.positionals);
  }
  if (line.positionals().size() > verb.positionals_max) {
    return "does not take '" + line.positionals()[verb.positionals_max] + "'";
  }
  for (const FlagSpec& flag : verb.flags) {
    if (flag.required && !line.Has(flag.name)) return "needs --" + std::string(flag.name);
  }
  return "";
}

}  // namespace

std::span<const FlagSpec> GlobalFlags() { return kGlobalFlags; }

const Verb* FindVerb(std::span<const Verb* const> verbs, std::string_view name) {
  const auto found = std::find_if(verbs.begin(), verbs.end(),
                                  [&](const Verb* verb) { return verb->name == name; });
  return found == verbs.end() ? nullptr : *found;
}

ExitCode RunCli(std::span<const std::string> arguments, const CliEnvironment& environment) {
  std::vector<std::string> rest(arguments.begin(), arguments.end());
  const Verb* verb = nullptr;
  std::string name;
  for (auto choices = AllVerbs(); !choices.empty(); choices = verb->actions) {
    const auto at = FindName(rest, choices);
    if (!at.has_value()) break;
    const Verb* const named = FindVerb(choices, rest[*at]);
    if (named == nullptr) {
      return Refuse(environment.err, name,
                    verb == nullptr ? "unknown command '" + rest[*at] + "'"
                                    : "'" + rest[*at] + "' is not " + NamesOf(choices));
    }
    verb = named;
    absl::StrAppend(&name, name.empty() ? "" : " ", std::string(verb->name));
    rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(*at));
  }

  std::vector<FlagSpec> flags(std::begin(kGlobalFlags), std::end(kGlobalFlags));
  if (verb != nullptr) flags.insert(flags.end(), verb->flags.begin(), verb->flags.end());
  const auto line = CommandLine::Parse(rest, flags);
  if (!line.ok()) return Refuse(environment.err, name, std::string(line.status().message()));
  if (verb == nullptr) {
    PrintHelp(line->Has("help") ? environment.out : environment.err);
    return line->Has("help") ? ExitCode::kOk : ExitCode::kUsage;
  }
  if (line->Has("help")) {
    PrintVerbHelp(name, *verb, environment.out);
    return ExitCode::kOk;
  }
  if (const std::string what = WhatIsWrong(*verb, *line); !what.empty()) {
    return Refuse(environment.err, name, what);
  }

  const auto endpoint = [&](const char* flag, const char* variable, const char* otherwise) {
    if (line->Has(flag)) return line->Text(flag);
    return environment.variable(variable).value_or(otherwise);
  };
  const VerbContext context{
      .name = name,
      .line = *line,
      .out = environment.out,
      .err = environment.err,
      .server = endpoint("server", kServerVariable, kServerDefault),
      .admin_server = endpoint("admin_server", kAdminServerVariable, kAdminServerDefault),
      .timeout = std::chrono::seconds(line->Number("timeout", 0)),
      .json = line->Has("json"),
      .out_is_terminal = environment.out_is_terminal,
      .err_is_terminal = environment.err_is_terminal,
  };
  if (context.server.empty() || context.admin_server.empty()) {
    return context.RefuseUsage("a server address is empty");
  }
  const ExitCode code = verb->run(context);
  if (!environment.out.flush()) {
    environment.err << "kvtrie: " << name << ": the output cannot be written\n";
    return code == ExitCode::kOk ? ExitCode::kFailed : code;
  }
  return code;
}

AdminClient VerbContext::Admin() const {
  AdminClientOptions options;
  options.target = admin_server;
  if (timeout.count() > 0) {
    options.timeout = timeout;
    options.verify_timeout = timeout;
  }
  return AdminClient(std::move(options));
}

std::unique_ptr<Client> VerbContext::Cache(Lane lane) const {
  ClientOptions options;
  options.targets = {server};
  options.lane = lane;
  if (timeout.count() > 0) {
    options.unary_timeout = timeout;
    options.bulk_timeout = timeout;
  }
  auto client = Client::Create(std::move(options));
  KV_CHECK(client.ok());
  return *std::move(client);
}

ExitCode VerbContext::Fail(const absl::Status& status) const {
  const ExitCode code = ExitCodeOf(status);
  if (code == ExitCode::kUsage) return RefuseUsage(std::string(status.message()));
  // A server that does not know the call says nothing.
  err << "kvtrie: "
      << (status.message().empty() ? absl::StrCat(absl::StatusCodeToString(status.code()),
                                                  " without a word; is this the right port?")
                                   : std::string(status.message()))
      << "\n";
  const bool is_answer =
      absl::IsUnavailable(status) && status.message().find("connect") == absl::string_view::npos;
  if (code == ExitCode::kUnreachable && !is_answer) {
    err << "kvtrie: the server at " << server << " (admin " << admin_server
        << ") cannot be reached, or does not answer\n";
  }
  return code;
}

ExitCode VerbContext::RefuseUsage(std::string_view what) const { return Refuse(err, name, what); }

}  // namespace kvtrie
