#include "client/ctl/verb_ls.h"

#include <string>

#include "client/ctl/format.h"
#include "client/ctl/json_views.h"
#include "client/ctl/selection.h"
#include "client/ctl/table.h"

namespace kvtrie {
namespace {

constexpr std::uint32_t kPageNodes = 1000;

const FlagSpec kFlags[] = {
    kModelFlag,
    kTokensFlag,
    kTokensFileFlag,
    kSaltFlag,
    {"limit", FlagSpec::Kind::kNumber, "print at most so many (1000)", 1, UINT32_MAX},
};

std::string Rungs(const v1::NodeEntry& node) {
  std::string text;
  for (const v1::RungEntry& rung : node.rungs()) {
    if (!text.empty()) text += ",";
    text += RungName(rung.rung());
    // What is said by the rung already is left out.
    if (rung.quality() != v1::QUALITY_EXACT || rung.codec() != v1::CODEC_RAW) {
      text += '(';
      text += QualityName(rung.quality());
      text += ' ';
      text += CodecName(rung.codec());
      text += ')';
    }
    if (rung.in_memory()) text += "*";
  }
  return text;
}

std::uint64_t StoredBytes(const v1::NodeEntry& node) {
  std::uint64_t bytes = 0;
  for (const v1::RungEntry& rung : node.rungs()) bytes += rung.stored_bytes();
  return bytes;
}

// What to list the children of: fills model and parent.
absl::Status ReadParent(const VerbContext& context, AdminClient& admin,
                        v1::ListNodesRequest* request) {
  v1::DescribeNodeRequest describe;
  if (NamesPrefix(context.line)) {
    auto prefix = ReadPrefix(admin, context.line);
    if (!prefix.ok()) return prefix.status();
    *describe.mutable_prefix() = *std::move(prefix);
  } else if (context.line.positionals().empty()) {
    auto model = ResolveModel(admin, context.line.Text("model"));
    if (!model.ok()) return model.status();
    request->set_model_id(*std::move(model));
    return absl::OkStatus();
  } else {
    describe.set_node_id(*IdFromHex(context.positional(0)));
  }
  const auto described = admin.DescribeNode(describe);
  if (!described.ok()) return described.status();
  request->set_model_id(described->node().model_id());
  request->set_parent_id(described->node().node_id());
  return absl::OkStatus();
}

ExitCode Run(const VerbContext& context) {
  const int named =
      (context.line.positionals().empty() ? 0 : 1) + (NamesPrefix(context.line) ? 1 : 0);
  if (named > 1) return context.RefuseUsage("a node or a prefix, not both");
  if (named == 0 && !context.line.Has("model")) {
    return context.RefuseUsage("needs a node, --model, or a prefix");
  }
  if (!context.line.positionals().empty() && !IdFromHex(context.positional(0))) {
    return context.RefuseUsage("'" + context.positional(0) + "' is not an id");
  }
  AdminClient admin = context.Admin();
  v1::ListNodesRequest request;
  if (absl::Status status = ReadParent(context, admin, &request); !status.ok()) {
    return context.Fail(status);
  }

  std::uint64_t left = context.line.Number("limit", kPageNodes);
  nlohmann::ordered_json json = nlohmann::json::array();
  Table table({{"NODE"},
               {"DEPTH", Table::Align::kRight},
               {"CHILDREN", Table::Align::kRight},
               {"RUNGS"},
               {"STORED", Table::Align::kRight},
               {"USES", Table::Align::kRight},
               {"LAST USED (UTC)"},
               {"HELD BY"}});
  bool more = false;
  do {
    request.set_page_size(static_cast<std::uint32_t>(std::min<std::uint64_t>(left, kPageNodes)));
    const auto page = admin.ListNodes(request);
    if (!page.ok()) return context.Fail(page.status());
    for (const v1::NodeEntry& node : page->nodes()) {
      if (context.json) {
        json.push_back(NodeToJson(node));
        continue;
      }
      std::string held = node.pinned() ? "pin" : "";
      if (node.leased()) held += held.empty() ? "lease" : ",lease";
      table.AddRow({IdToHex(node.node_id()), FormatCount(node.depth()),
                    FormatCount(node.child_count()), Rungs(node), FormatBytes(StoredBytes(node)),
                    FormatCount(node.use_count()), FormatTime(node.last_used_unix_seconds()),
                    held});
    }
    left -= std::min<std::uint64_t>(left, static_cast<std::uint64_t>(page->nodes_size()));
    request.set_page_token(page->next_page_token());
    more = !page->next_page_token().empty();
  } while (more && left > 0);
  if (context.json) {
    context.out << DumpJson({{"nodes", json}, {"more", more}}) << "\n";
  } else {
    table.Print(context.out);
    if (more) context.err << "kvtrie: there are more; see --limit\n";
  }
  return ExitCode::kOk;
}

}  // namespace

const Verb kLsVerb{
    .name = "ls",
    .positionals = "[NODE]",
    .positionals_min = 0,
    .positionals_max = 1,
    .summary = "list the children of a node, or the first blocks of a model",
    .details =
        "Names what to list by NODE, by --model alone, or by --model with the tokens of a prefix.\n"
        "A * marks what is in memory.",
    .flags = kFlags,
    .run = Run,
};

}  // namespace kvtrie
