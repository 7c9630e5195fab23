#include "client/ctl/verb_status.h"

#include <string>
#include <vector>

#include "client/ctl/format.h"
#include "client/ctl/json_views.h"
#include "client/ctl/table.h"

namespace kvtrie {
namespace {

std::string Of(std::uint64_t bytes, std::uint64_t limit_bytes) {
  std::string text = FormatBytes(bytes);
  if (limit_bytes > 0) text += " of " + FormatBytes(limit_bytes);
  return text;
}

void Print(const v1::GetStatusResponse& status, std::ostream& out) {
  Table table({{"STATE"}, {FormatText(status.state())}});
  const auto row = [&](const char* name, std::string value) {
    table.AddRow({name, std::move(value)});
  };
  for (const std::string& reason : status.reasons()) row("because", FormatText(reason));
  row("version", FormatText(status.version()));
  row("up", FormatDuration(status.uptime_seconds()));
  row("models", FormatCount(status.model_count()));
  row("nodes", FormatCount(status.node_count()));
  row("stored", FormatBytes(status.stored_bytes()));
  row("disk", Of(status.disk_bytes(), status.disk_limit_bytes()));
  row("memory tier", Of(status.memory_tier_bytes(), status.memory_tier_limit_bytes()));
  row("index", FormatBytes(status.index_bytes()));
  row("token cache", FormatBytes(status.token_cache_bytes()));
  row("leases", FormatCount(status.lease_count()));
  row("pinned", FormatBytes(status.pinned_bytes()));
  row("open puts", FormatBytes(status.open_put_bytes()));
  const v1::RecoveryReport& recovery = status.recovery();
  row("last start", FormatCount(recovery.nodes_loaded()) + " nodes loaded, " +
                        FormatCount(recovery.nodes_dropped()) + " dropped, " +
                        FormatBytes(recovery.unreferenced_bytes()) + " freed");
  if (recovery.lost_batches() > 0) row("lost batches", FormatCount(recovery.lost_batches()));
  if (recovery.rebuilt_from_segments()) row("rebuilt", "the metadata could not be read");
  for (const std::string& file : recovery.foreign_files()) row("foreign file", FormatText(file));
  for (const std::string& note : recovery.notes()) row("note", FormatText(note));
  table.Print(out);
}

ExitCode Run(const VerbContext& context) {
  const auto status = context.Admin().GetStatus();
  if (!status.ok()) return context.Fail(status.status());
  if (context.json) {
    context.out << DumpJson(StatusToJson(*status)) << "\n";
  } else {
    Print(*status, context.out);
  }
  return ExitCode::kOk;
}

}  // namespace

const Verb kStatusVerb{
    .name = "status",
    .positionals = "",
    .positionals_min = 0,
    .positionals_max = 0,
    .summary = "state of the server in one page",
    .details = "",
    .flags = {},
    .run = Run,
};

}  // namespace kvtrie
