#include "client/ctl/verb_show.h"

#include <string>

#include "client/ctl/format.h"
#include "client/ctl/json_views.h"
#include "client/ctl/selection.h"
#include "client/ctl/table.h"

namespace kvtrie {
namespace {

const FlagSpec kFlags[] = {kModelFlag, kTokensFlag, kTokensFileFlag, kSaltFlag};

void Print(const v1::DescribeNodeResponse& described, std::ostream& out) {
  const v1::NodeEntry& node = described.node();
  Table table({{"NODE"}, {IdToHex(node.node_id())}});
  const auto row = [&](std::string name, std::string value) {
    table.AddRow({std::move(name), std::move(value)});
  };
  row("model", IdToHex(node.model_id()));
  row("parent", IdToHex(node.parent_id()));
  row("depth", FormatCount(node.depth()));
  row("children", FormatCount(node.child_count()));
  for (const v1::RungEntry& rung : node.rungs()) {
    row("rung " + std::string(RungName(rung.rung())),
        std::string(QualityName(rung.quality())) + ", " + std::string(CodecName(rung.codec())) +
            ", " + FormatBytes(rung.stored_bytes()) +
            (rung.in_memory() ? ", in memory" : ", on disk"));
  }
  row("quality", std::string(QualityName(node.quality())));
  row("uses", FormatCount(node.use_count()));
  row("last used", FormatTime(node.last_used_unix_seconds()));
  row("expires", FormatTime(node.expires_unix_seconds()));
  row("priority", FormatCount(node.priority()));
  row("surprisal", std::to_string(node.surprisal_bits()) +
                       (node.surprisal_estimated() ? " bits (estimated)" : " bits"));
  row("pinned", node.pinned() ? "yes" : "no");
  row("leased", node.leased() ? "yes" : "no");
  if (node.extra_key_bytes() > 0) row("extra key", FormatBytes(node.extra_key_bytes()));
  for (const v1::NodeEntry& above : described.path()) {
    row("path " + std::to_string(above.depth()), IdToHex(above.node_id()));
  }
  table.Print(out);
}

ExitCode Run(const VerbContext& context) {
  if (context.line.positionals().empty() != NamesPrefix(context.line)) {
    return context.RefuseUsage("needs a node or a prefix");
  }
  AdminClient admin = context.Admin();
  v1::DescribeNodeRequest request;
  if (NamesPrefix(context.line)) {
    auto prefix = ReadPrefix(admin, context.line);
    if (!prefix.ok()) return context.Fail(prefix.status());
    *request.mutable_prefix() = *std::move(prefix);
  } else if (auto id = IdFromHex(context.positional(0))) {
    request.set_node_id(*std::move(id));
  } else {
    return context.RefuseUsage("'" + context.positional(0) + "' is not an id");
  }
  const auto described = admin.DescribeNode(request);
  if (!described.ok()) return context.Fail(described.status());
  if (context.json) {
    nlohmann::ordered_json json = NodeToJson(described->node());
    json["path"] = nlohmann::json::array();
    for (const v1::NodeEntry& above : described->path()) {
      json["path"].push_back(IdToHex(above.node_id()));
    }
    context.out << DumpJson(json) << "\n";
  } else {
    Print(*described, context.out);
  }
  return ExitCode::kOk;
}

}  // namespace

const Verb kShowVerb{
    .name = "show",
    .positionals = "[NODE]",
    .positionals_min = 0,
    .positionals_max = 1,
    .summary = "everything about one node",
    .details =
        "Names it by NODE, or by --model with the tokens of a prefix (the deepest stored block of "
        "it).",
    .flags = kFlags,
    .run = Run,
};

}  // namespace kvtrie
