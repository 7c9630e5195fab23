#include "client/ctl/verb_unpin.h"

#include <string>

#include "client/ctl/format.h"
#include "client/ctl/json_views.h"

namespace kvtrie {
namespace {

ExitCode Run(const VerbContext& context) {
  const auto id = IdFromHex(context.positional(0));
  if (!id) return context.RefuseUsage("'" + context.positional(0) + "' is not an id");
  v1::UnpinRequest request;
  request.set_pin_id(*id);
  const auto unpinned = context.Cache()->Unpin(request);
  if (!unpinned.ok()) return context.Fail(unpinned.status());
  if (context.json) {
    context.out << DumpJson({{"existed", unpinned->existed()}}) << "\n";
  } else {
    context.out << (unpinned->existed() ? "dropped\n" : "there was no such pin any more\n");
  }
  return ExitCode::kOk;
}

}  // namespace

const Verb kUnpinVerb{
    .name = "unpin",
    .positionals = "PIN",
    .positionals_min = 1,
    .positionals_max = 1,
    .summary = "drop a pin",
    .details = "",
    .flags = {},
    .run = Run,
};

}  // namespace kvtrie
