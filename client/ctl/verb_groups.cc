#include "client/ctl/verb_groups.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "client/ctl/format.h"
#include "client/ctl/json_views.h"
#include "client/ctl/table.h"

namespace kvtrie {
namespace {

constexpr std::uint32_t kPageGroups = 1000;
constexpr std::uint32_t kEntriesMax = 10'000;  // of one page or tree
constexpr std::uint32_t kBranchesDefault = 100;

const FlagSpec kFlags[] = {
    {"limit", FlagSpec::Kind::kNumber,
     "print at most so many groups (1000), or branches with show (100; at most 10000)", 1,
     UINT32_MAX},
};

// A ~ says that it is an estimate, at least of a part.
std::string Bits(double bits, bool estimated) { return (estimated ? "~" : "") + FormatBits(bits); }

std::string Percent(double share) {
  char text[16];
  std::snprintf(text, sizeof text, "%.1f%%", 100 * share);
  return text;
}

ExitCode List(const VerbContext& context) {
  AdminClient admin = context.Admin();
  std::uint64_t left = context.line.Number("limit", kPageGroups);
  nlohmann::ordered_json json = nlohmann::json::array();
  Table table({{"GROUP"},
               {"SESSIONS", Table::Align::kRight},
               {"SHARED BLOCKS", Table::Align::kRight},
               {"SHARED BITS", Table::Align::kRight},
               {"BLOCKS", Table::Align::kRight},
               {"STORED", Table::Align::kRight},
               {"SAVED", Table::Align::kRight},
               {"CENTROID BLOCKS", Table::Align::kRight}});
  v1::ListGroupsRequest request;
  bool more = false;
  bool any = false;
  do {
    request.set_page_size(static_cast<std::uint32_t>(std::min<std::uint64_t>(left, kPageGroups)));
    const auto page = admin.ListGroups(request);
    if (!page.ok()) return context.Fail(page.status());
    any = any || page->groups_size() > 0;
    for (const v1::GroupEntry& group : page->groups()) {
      if (context.json) {
        json.push_back(GroupToJson(group));
        continue;
      }
      table.AddRow({IdToHex(group.group_id()), FormatCount(group.sessions()),
                    FormatCount(group.shared_blocks()),
                    Bits(group.shared_bits(), group.shared_bits_estimated()),
                    FormatCount(group.blocks()), FormatBytes(group.stored_bytes()),
                    FormatBytes(group.saved_bytes()), FormatCount(group.centroid_blocks())});
    }
    left -= std::min<std::uint64_t>(left, static_cast<std::uint64_t>(page->groups_size()));
    request.set_page_token(page->next_page_token());
    more = !page->next_page_token().empty();
  } while (more && left > 0);
  if (context.json) {
    context.out << DumpJson({{"groups", json}, {"more", more}}) << "\n";
  } else {
    table.Print(context.out);
    if (!any) {
      context.err << "kvtrie: no two sessions share as much as --group_threshold_bits of the "
                     "server, or that is 0\n";
    }
    if (more) context.err << "kvtrie: there are more; see --limit\n";
  }
  return ExitCode::kOk;
}

void PrintTree(const v1::DescribeGroupResponse& described, std::ostream& out) {
  Table table({{"BRANCH"},
               {"BLOCKS", Table::Align::kRight},
               {"BITS", Table::Align::kRight},
               {"STORED", Table::Align::kRight},
               {"SESSIONS", Table::Align::kRight},
               {"TAKEN", Table::Align::kRight}});
  std::vector<std::size_t> levels;
  for (const v1::GroupBranch& branch : described.branches()) {
    const auto parent = static_cast<std::size_t>(branch.parent());
    // A list that is not in order is shown flat.
    const bool hangs = branch.parent() >= 0 && parent < levels.size();
    levels.push_back(hangs ? levels[parent] + 1 : 0);
    std::string name(2 * levels.back(), ' ');
    name += branch.on_centroid() ? "* " : "- ";
    name += IdToHex(branch.first_id());
    table.AddRow({std::move(name), FormatCount(branch.blocks()),
                  Bits(branch.surprisal_bits(), branch.surprisal_estimated()),
                  FormatBytes(branch.stored_bytes()), FormatCount(branch.sessions()),
                  hangs ? Percent(branch.probability()) : "-"});
  }
  table.Print(out);
}

void Print(const v1::DescribeGroupResponse& described, std::ostream& out) {
  const v1::GroupEntry& group = described.group();
  Table table({{"GROUP"}, {IdToHex(group.group_id())}});
  table.AddRow({"model", IdToHex(group.model_id())});
  table.AddRow({"sessions", FormatCount(group.sessions())});
  table.AddRow({"shared", FormatCount(group.shared_blocks()) + " blocks, " +
                              Bits(group.shared_bits(), group.shared_bits_estimated()) +
                              (group.shared_bits_estimated() ? " bits (estimated)" : " bits")});
  table.AddRow({"shared end", IdToHex(group.shared_end_id())});
  table.AddRow({"blocks", FormatCount(group.blocks())});
  table.AddRow({"stored", FormatBytes(group.stored_bytes())});
  const double alone = static_cast<double>(group.stored_bytes() + group.saved_bytes());
  table.AddRow({"saved", FormatBytes(group.saved_bytes()) + " (each alone would take " +
                             FormatRatio(alone, static_cast<double>(group.stored_bytes())) + ")"});
  table.AddRow({"centroid", FormatCount(group.centroid_blocks()) + " blocks, to " +
                                IdToHex(group.centroid_end_id())});
  table.Print(out);
  out << "\n";
  PrintTree(described, out);
}

ExitCode Show(const VerbContext& context) {
  const auto id = IdFromHex(context.positional(1));
  if (!id) return context.RefuseUsage("'" + context.positional(1) + "' is not an id");
  v1::DescribeGroupRequest request;
  request.set_group_id(*id);
  request.set_branches_max(static_cast<std::uint32_t>(
      std::min<std::uint64_t>(context.line.Number("limit", kBranchesDefault), kEntriesMax)));
  const auto described = context.Admin().DescribeGroup(request);
  if (!described.ok()) return context.Fail(described.status());
  if (context.json) {
    nlohmann::ordered_json json = GroupToJson(described->group());
    json["branches"] = nlohmann::json::array();
    for (const v1::GroupBranch& branch : described->branches()) {
      json["branches"].push_back(GroupBranchToJson(branch));
    }
    json["more"] = described->more();
    context.out << DumpJson(json) << "\n";
  } else {
    Print(*described, context.out);
    if (described->more()) context.err << "kvtrie: there are more branches; see --limit\n";
  }
  return ExitCode::kOk;
}

ExitCode Run(const VerbContext& context) {
  if (context.line.positionals().empty()) return List(context);
  if (context.positional(0) != "show") {
    return context.RefuseUsage("'" + context.positional(0) +
                               "' is not an action; there is show ID");
  }
  if (context.line.positionals().size() != 2) return context.RefuseUsage("show needs an ID");
  return Show(context);
}

}  // namespace

const Verb kGroupsVerb{
    .name = "groups",
    .positionals = "[show ID]",
    .positionals_min = 0,
    .positionals_max = 2,
    .summary = "groups of sessions that share a prefix, and what that saves; show: one as a tree",
    .details =
        "A ~ marks bits that are estimated, since the client sent no probabilities. In the tree,\n"
        "each line is a run of blocks that the same sessions pass, named by its first block; "
        "TAKEN\n"
        "is how likely traffic takes it where it branches off, and a * marks the most probable\n"
        "path, the group's centroid.",
    .flags = kFlags,
    .run = Run,
};

}  // namespace kvtrie
