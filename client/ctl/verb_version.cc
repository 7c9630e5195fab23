#include "client/ctl/verb_version.h"

#include "client/ctl/json_views.h"

namespace kvtrie {
namespace {

ExitCode Run(const VerbContext& context) {
  if (context.json) {
    context.out << DumpJson({{"version", KVTRIE_VERSION}}) << "\n";
  } else {
    context.out << "kvtrie " << KVTRIE_VERSION << "\n";
  }
  return ExitCode::kOk;
}

}  // namespace

const Verb kVersionVerb{
    .name = "version",
    .positionals = "",
    .positionals_min = 0,
    .positionals_max = 0,
    .summary = "version of this program",
    .details = "",
    .flags = {},
    .run = Run,
};

}  // namespace kvtrie
