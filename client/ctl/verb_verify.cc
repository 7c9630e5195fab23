#include "client/ctl/verb_verify.h"

#include <string>

#include "client/ctl/format.h"
#include "client/ctl/json_views.h"
#include "client/ctl/progress.h"

namespace kvtrie {
namespace {

const FlagSpec kFlags[] = {
    {"structure-only", FlagSpec::Kind::kSwitch, "check the trie without reading blocks"},
    {"repair", FlagSpec::Kind::kSwitch, "drop what is damaged"},
};

ExitCode Run(const VerbContext& context) {
  v1::VerifyRequest request;
  request.set_structure_only(context.line.Has("structure-only"));
  request.set_repair(context.line.Has("repair"));
  v1::VerifyResponse last;
  std::uint64_t findings_count = 0;
  nlohmann::ordered_json findings = nlohmann::json::array();
  Progress shown(context.err, context.err_is_terminal);
  const absl::Status status =
      context.Admin().Verify(request, [&](const v1::VerifyResponse& progress) {
        last = progress;
        shown.Report(progress.nodes_total() == 0 ? 0
                                                 : static_cast<double>(progress.nodes_checked()) /
                                                       static_cast<double>(progress.nodes_total()),
                     "checked " + FormatCount(progress.nodes_checked()) + " of " +
                         FormatCount(progress.nodes_total()) + " nodes, read " +
                         FormatBytes(progress.bytes_read()));
        for (const v1::Finding& finding : progress.findings()) {
          if (context.json) {
            findings.push_back(nlohmann::ordered_json{{"node_id", IdToHex(finding.node_id())},
                                                      {"what", finding.what()}});
          } else {
            shown.EndLine();
            context.out << IdToHex(finding.node_id()) << "  " << FormatText(finding.what())
                        << std::endl;
          }
        }
        findings_count += static_cast<std::uint64_t>(progress.findings_size());
      });
  shown.EndLine();
  if (!status.ok()) return context.Fail(status);
  if (context.json) {
    context.out << DumpJson({{"nodes_checked", last.nodes_checked()},
                             {"bytes_read", last.bytes_read()},
                             {"findings", findings}})
                << "\n";
  } else {
    context.out << "checked " << FormatCount(last.nodes_checked()) << " nodes, read "
                << FormatBytes(last.bytes_read()) << ": "
                << (findings_count == 0 ? "all is well" : FormatCount(findings_count) + " findings")
                << "\n";
  }
  return findings_count == 0 ? ExitCode::kOk : ExitCode::kFailed;
}

}  // namespace

const Verb kVerifyVerb{
    .name = "verify",
    .positionals = "",
    .positionals_min = 0,
    .positionals_max = 0,
    .summary = "check the trie and read every stored block",
    .details =
        "Progress goes to the error output. Exit code 1 when something is wrong.\n"
        "What is put waits while rows are compared with the index: some seconds per million "
        "blocks.",
    .flags = kFlags,
    .run = Run,
};

}  // namespace kvtrie
