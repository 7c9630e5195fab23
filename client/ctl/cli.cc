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
    {"server", FlagSpec::Kind::kText, "data address of the server, HOST:PORT or unix:PATH"},
    {"admin_server", FlagSpec::Kind::kText, "admin address of the server"},
    {"timeout", FlagSpec::Kind::kNumber, "end of each call, in seconds", 1, 86'400},
    {"json", FlagSpec::Kind::kSwitch, "print JSON"},
    {"help", FlagSpec::Kind::kSwitch, "print how the command is used"},
};

// The verb is the first argument that is neither a flag nor a flag's value.
std::optional<std::size_t> FindVerb(std::span<const std::string> arguments) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument.empty() || argument[0] != '-') return i;
    const auto flag = std::find_if(
        std::begin(kGlobalFlags), std::end(kGlobalFlags),
        [&](const FlagSpec& spec) { return argument == "--" + std::string(spec.name); });
    if (flag != std::end(kGlobalFlags) && flag->kind != FlagSpec::Kind::kSwitch) ++i;
  }
  return std::nullopt;
}

ExitCode Refuse(const CliEnvironment& environment, const std::string& what) {
  environment.err << "kvtrie: " << what << "\nTry 'kvtrie help'.\n";
  return ExitCode::kUsage;
}

}  // namespace

std::span<const FlagSpec> GlobalFlags() { return kGlobalFlags; }

ExitCode RunCli(std::span<const std::string> arguments, const CliEnvironment& environment) {
  const auto verb_at = FindVerb(arguments);
  if (!verb_at.has_value()) {
    const auto line = CommandLine::Parse(arguments, kGlobalFlags);
    if (!line.ok()) return Refuse(environment, std::string(line.status().message()));
    PrintHelp(line->Has("help") ? environment.out : environment.err);
    return line->Has("help") ? ExitCode::kOk : ExitCode::kUsage;
  }
  const std::string& name = arguments[*verb_at];
  const auto verbs = AllVerbs();
  const auto found = std::find_if(verbs.begin(), verbs.end(),
                                  [&](const Verb* verb) { return verb->name == name; });
  if (found == verbs.end()) return Refuse(environment, "unknown command '" + name + "'");
  const Verb& verb = **found;

  std::vector<std::string> rest(arguments.begin(), arguments.end());
  rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(*verb_at));
  std::vector<FlagSpec> flags(std::begin(kGlobalFlags), std::end(kGlobalFlags));
  flags.insert(flags.end(), verb.flags.begin(), verb.flags.end());
  const auto line = CommandLine::Parse(rest, flags);
  if (!line.ok()) return Refuse(environment, name + ": " + std::string(line.status().message()));
  if (line->Has("help")) {
    PrintVerbHelp(verb, environment.out);
    return ExitCode::kOk;
  }
  if (line->positionals().size() < verb.positionals_min) {
    return Refuse(environment, name + ": needs " + std::string(verb.positionals));
  }
  if (line->positionals().size() > verb.positionals_max) {
    return Refuse(environment,
                  name + ": does not take '" + line->positionals()[verb.positionals_max] + "'");
  }

  const auto endpoint = [&](const char* flag, const char* variable, const char* otherwise) {
    if (line->Has(flag)) return line->Text(flag);
    return environment.variable(variable).value_or(otherwise);
  };
  const VerbContext context{
      .line = *line,
      .out = environment.out,
      .err = environment.err,
      .server = endpoint("server", kServerVariable, kServerDefault),
      .admin_server = endpoint("admin_server", kAdminServerVariable, kAdminServerDefault),
      .timeout = std::chrono::seconds(line->Number("timeout", 0)),
      .json = line->Has("json"),
      .out_is_terminal = environment.out_is_terminal,
  };
  if (context.server.empty() || context.admin_server.empty()) {
    return Refuse(environment, "a server address is empty");
  }
  return verb.run(context);
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
  // A server that does not know the call says nothing.
  err << "kvtrie: "
      << (status.message().empty() ? absl::StrCat(absl::StatusCodeToString(status.code()),
                                                  " without a word; is this the right port?")
                                   : std::string(status.message()))
      << "\n";
  const ExitCode code = ExitCodeOf(status);
  const bool is_answer =
      absl::IsUnavailable(status) && status.message().find("connect") == absl::string_view::npos;
  if (code == ExitCode::kUnreachable && !is_answer) {
    err << "kvtrie: the server at " << server << " (admin " << admin_server
        << ") cannot be reached, or does not answer\n";
  }
  return code;
}

ExitCode VerbContext::RefuseUsage(std::string_view what) const {
  err << "kvtrie: " << what << "\nTry 'kvtrie help'.\n";
  return ExitCode::kUsage;
}

}  // namespace kvtrie
