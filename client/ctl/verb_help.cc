#include "client/ctl/verb_help.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace kvtrie {
namespace {

std::string FlagUsage(const FlagSpec& flag) {
  std::string usage = absl::StrCat("--", std::string(flag.name));
  switch (flag.kind) {
    case FlagSpec::Kind::kSwitch:
      break;
    case FlagSpec::Kind::kText:
      usage += " TEXT";
      break;
    case FlagSpec::Kind::kNumber:
      usage += " N";
      break;
    case FlagSpec::Kind::kReal:
      usage += " X";
      break;
    case FlagSpec::Kind::kChoice:
      absl::StrAppend(&usage, " ", std::string(flag.choices));
      break;
  }
  return usage;
}

void PrintColumns(std::ostream& out, std::string_view left, std::string_view right) {
  constexpr std::size_t kLeftColumns = 28;
  out << "  " << left;
  if (left.size() >= kLeftColumns) {
    out << "\n  " << std::string(kLeftColumns, ' ');
  } else {
    out << std::string(kLeftColumns - left.size(), ' ');
  }
  out << right << "\n";
}

// "fit --spec TEXT --out TEXT [FLAGS]".
std::string Synopsis(const std::string& name, const Verb& verb) {
  std::string synopsis = name;
  if (!verb.positionals.empty()) absl::StrAppend(&synopsis, " ", std::string(verb.positionals));
  bool more = false;
  for (const FlagSpec& flag : verb.flags) {
    if (flag.required) absl::StrAppend(&synopsis, " ", FlagUsage(flag));
    more |= !flag.required;
  }
  if (more) synopsis += " [FLAGS]";
  return synopsis;
}

ExitCode Run(const VerbContext& context) {
  const Verb* verb = nullptr;
  const Verb* before = nullptr;
  std::string name;
  auto choices = AllVerbs();
  for (const std::string& word : context.line.positionals()) {
    verb = FindVerb(choices, word);
    // Words behind a verb without actions are its own: "groups show", "bench put".
    const bool takes_words =
        before != nullptr && before->actions.empty() && !before->positionals.empty();
    if (verb == nullptr && takes_words) {
      verb = before;
      break;
    }
    if (verb == nullptr) return context.RefuseUsage("unknown command '" + word + "'");
    before = verb;
    absl::StrAppend(&name, name.empty() ? "" : " ", word);
    choices = verb->actions;
  }
  if (verb == nullptr) {
    PrintHelp(context.out);
  } else {
    PrintVerbHelp(name, *verb, context.out);
  }
  return ExitCode::kOk;
}

}  // namespace

void PrintHelp(std::ostream& out) {
  out << "kvtrie: operates and measures a kvtrie-server.\n\n"
         "usage: kvtrie [FLAGS] COMMAND [ARGUMENTS]\n\ncommands:\n";
  for (const Verb* verb : AllVerbs()) {
    std::string left(verb->name);
    if (!verb->positionals.empty()) absl::StrAppend(&left, " ", std::string(verb->positionals));
    PrintColumns(out, left, verb->summary);
  }
  out << "\nflags of every command:\n";
  for (const FlagSpec& flag : GlobalFlags()) PrintColumns(out, FlagUsage(flag), flag.help);
  out << "\nenvironment:\n";
  PrintColumns(out, "KVTRIE_SERVER", "where --server is not given; else 127.0.0.1:50051");
  PrintColumns(out, "KVTRIE_ADMIN_SERVER",
               "where --admin_server is not given; else 127.0.0.1:50052");
  out << "\nexit codes:\n";
  PrintColumns(out, "0", "done");
  PrintColumns(out, "1", "failed, or found something wrong");
  PrintColumns(out, "2", "the command line is wrong");
  PrintColumns(out, "3", "what was named does not exist");
  PrintColumns(out, "4", "the server cannot be reached, or is not ready");
  out << "\nIds are 32 hexadecimal digits; models are also found by name.\n"
         "'kvtrie help COMMAND' has the flags of a command.\n";
}

void PrintVerbHelp(const std::string& name, const Verb& verb, std::ostream& out) {
  out << "usage: kvtrie " << Synopsis(name, verb) << "\n\n" << verb.summary << "\n";
  if (!verb.details.empty()) out << "\n" << verb.details << "\n";
  if (!verb.actions.empty()) {
    out << "\nactions:\n";
    for (const Verb* action : verb.actions) {
      PrintColumns(out, Synopsis(std::string(action->name), *action), action->summary);
    }
    out << "\n'kvtrie help " << name << " ACTION' has the flags of an action.\n";
  }
  if (verb.flags.empty()) return;
  out << "\nflags:\n";
  for (const FlagSpec& flag : verb.flags) PrintColumns(out, FlagUsage(flag), flag.help);
}

const Verb kHelpVerb{
    .name = "help",
    .positionals = "[COMMAND [ACTION]]",
    .positionals_min = 0,
    .positionals_max = 2,
    .summary = "print this, or how a command is used",
    .details = "",
    .flags = {},
    .run = Run,
};

}  // namespace kvtrie
