#include "client/ctl/verb_completion.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace kvtrie {
namespace {

std::string FlagNames(std::span<const FlagSpec> flags) {
  std::string names;
  for (const FlagSpec& flag : flags) names += absl::StrCat(" --", std::string(flag.name));
  return names;
}

// Words of the first argument, where it is one of a list: "put|get".
std::string Choices(const Verb& verb) {
  std::string words;
  for (const Verb* action : verb.actions) absl::StrAppend(&words, " ", std::string(action->name));
  if (!words.empty()) return words;
  words = verb.positionals;
  if (words.find('|') == std::string::npos) return "";
  for (char& c : words) {
    if (c == '|') c = ' ';
  }
  return absl::StrCat(" ", words);
}

// Calls print(pattern, words) for each command: "VERB ACTION", where the second word is that of an
// action, or any.
template <typename Print>
void ForEachCommand(Print print) {
  for (const Verb* verb : AllVerbs()) {
    const std::string name(verb->name);
    for (const Verb* action : verb->actions) {
      print(absl::StrCat("\"", name, " ", std::string(action->name), "\""),
            FlagNames(action->flags));
    }
    print(absl::StrCat("\"", name, " \"*"), Choices(*verb) + FlagNames(verb->flags));
  }
}

void PrintBash(std::ostream& out) {
  out << "# bash completion of kvtrie; load it with: source <(kvtrie completion bash)\n"
         "_kvtrie() {\n"
         "  local word=\"${COMP_WORDS[COMP_CWORD]}\" verb=\"\" action=\"\" i\n"
         "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
         "    case \"${COMP_WORDS[i]}\" in\n"
         "      --server|--admin_server|--timeout) ((++i)) ;;\n"
         "      -*) ;;\n"
         "      *)\n"
         "        if [ -n \"$verb\" ]; then action=\"${COMP_WORDS[i]}\"; break; fi\n"
         "        verb=\"${COMP_WORDS[i]}\" ;;\n"
         "    esac\n"
         "  done\n"
         "  local words=\"\"\n"
         "  case \"$verb $action\" in\n"
         "    \" \") words=\"";
  for (const Verb* verb : AllVerbs()) out << verb->name << " ";
  out << "\" ;;\n";
  ForEachCommand([&](const std::string& pattern, const std::string& words) {
    out << "    " << pattern << ") words=\"" << words << "\" ;;\n";
  });
  out << "  esac\n"
         "  COMPREPLY=($(compgen -W \"$words"
      << FlagNames(GlobalFlags())
      << "\" -- \"$word\"))\n"
         "}\n"
         "complete -F _kvtrie kvtrie\n";
}

void PrintZsh(std::ostream& out) {
  out << "#compdef kvtrie\n"
         "# zsh completion of kvtrie; save it as _kvtrie in a folder of $fpath\n"
         "_kvtrie() {\n"
         "  local at=${words[(i)(";
  std::string bars;
  for (const Verb* verb : AllVerbs())
    absl::StrAppend(&bars, bars.empty() ? "" : "|", std::string(verb->name));
  out << bars
      << ")]}\n"
         "  local action=\"\"\n"
         "  ((at + 1 < CURRENT)) && action=${words[at+1]}\n"
         "  case \"${words[at]} $action\" in\n";
  ForEachCommand([&](const std::string& pattern, const std::string& words) {
    out << "    " << pattern << ") compadd --" << words << FlagNames(GlobalFlags()) << " ;;\n";
  });
  out << "    *) compadd --";
  for (const Verb* verb : AllVerbs()) out << " " << verb->name;
  out << FlagNames(GlobalFlags())
      << " ;;\n"
         "  esac\n"
         "}\n"
         "_kvtrie \"$@\"\n";
}

ExitCode Run(const VerbContext& context) {
  const std::string& shell = context.positional(0);
  if (shell == "bash") {
    PrintBash(context.out);
  } else if (shell == "zsh") {
    PrintZsh(context.out);
  } else {
    return context.RefuseUsage("bash or zsh, not '" + shell + "'");
  }
  return ExitCode::kOk;
}

}  // namespace

const Verb kCompletionVerb{
    .name = "completion",
    .positionals = "bash|zsh",
    .positionals_min = 1,
    .positionals_max = 1,
    .summary = "print a script that completes command lines",
    .details = "",
    .flags = {},
    .run = Run,
};

}  // namespace kvtrie
