#include "client/ctl/verb_rm.h"

#include <string>

#include "client/ctl/format.h"
#include "client/ctl/json_views.h"
#include "client/ctl/selection.h"

namespace kvtrie {
namespace {

const FlagSpec kFlags[] = {
    kModelFlag,
    kTokensFlag,
    kTokensFileFlag,
    kSaltFlag,
    {"session", FlagSpec::Kind::kText, "what a session stored"},
    {"all", FlagSpec::Kind::kSwitch, "everything; needs --yes"},
    {"yes", FlagSpec::Kind::kSwitch, "with --all: do it"},
    {"unused-for", FlagSpec::Kind::kNumber, "only what was not used for so many seconds", 1,
     UINT32_MAX},
};

absl::StatusOr<v1::Selection> ReadSelection(const VerbContext& context) {
  const CommandLine& line = context.line;
  const bool prefix = NamesPrefix(line);
  const int named = (line.positionals().empty() ? 0 : 1) + (line.Has("session") ? 1 : 0) +
                    (line.Has("all") ? 1 : 0) + (line.Has("model") || prefix ? 1 : 0);
  if (named != 1) {
    return UsageError("needs one of: a node, --model, a prefix, --session, --all");
  }
  if (line.Has("all") && !line.Has("yes")) {
    return UsageError("--all removes everything: say --yes");
  }
  v1::Selection selection;
  selection.set_unused_for_seconds(static_cast<std::uint32_t>(line.Number("unused-for", 0)));
  if (line.Has("all")) {
    selection.set_all(true);
  } else if (line.Has("session")) {
    selection.set_session_id(line.Text("session"));
  } else if (!line.positionals().empty()) {
    auto id = IdFromHex(context.positional(0));
    if (!id) return UsageError("'" + context.positional(0) + "' is not an id");
    selection.set_node_id(*std::move(id));
  } else {
    AdminClient admin = context.Admin();
    if (prefix) {
      auto path = ReadPrefix(admin, line);
      if (!path.ok()) return path.status();
      *selection.mutable_prefix() = *std::move(path);
    } else {
      auto model = ResolveModel(admin, line.Text("model"));
      if (!model.ok()) return model.status();
      selection.set_model_id(*std::move(model));
    }
  }
  return selection;
}

ExitCode Run(const VerbContext& context) {
  v1::DeleteRequest request;
  auto selection = ReadSelection(context);
  if (!selection.ok()) return context.Fail(selection.status());
  *request.mutable_selection() = *std::move(selection);
  const auto deleted = context.Cache()->Delete(request);
  if (!deleted.ok()) return context.Fail(deleted.status());
  if (context.json) {
    context.out << DumpJson({{"deleted_blocks", deleted->deleted_blocks()},
                             {"freed_bytes", deleted->freed_bytes()}})
                << "\n";
  } else {
    context.out << "removed " << FormatCount(deleted->deleted_blocks()) << " blocks, "
                << FormatBytes(deleted->freed_bytes()) << "\n";
  }
  return ExitCode::kOk;
}

}  // namespace

const Verb kRmVerb{
    .name = "rm",
    .positionals = "[NODE]",
    .positionals_min = 0,
    .positionals_max = 1,
    .summary = "remove blocks and what lies below them",
    .details =
        "Pins and leases do not hold what is removed. Removing what is not there is no failure.",
    .flags = kFlags,
    .run = Run,
};

}  // namespace kvtrie
