#include "client/ctl/verb_top.h"

#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <thread>

#include "client/ctl/format.h"
#include "client/ctl/json_views.h"
#include "client/ctl/table.h"

namespace kvtrie {
namespace {

const FlagSpec kFlags[] = {
    {"once", FlagSpec::Kind::kSwitch, "print one page, with rates over one interval"},
    {"interval", FlagSpec::Kind::kNumber, "seconds between pages (2)", 1, 3600},
};

constexpr char kClearScreen[] = "\x1b[H\x1b[2J";

// Counters of bytes are told by their names.
std::string Rate(const std::string& name, double per_second) {
  if (name.find("bytes") != std::string::npos) {
    return FormatBytes(static_cast<std::uint64_t>(per_second)) + "/s";
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.1f/s", per_second);
  return text;
}

void PrintPage(const v1::GetStatusResponse& before, const v1::GetStatusResponse& now,
               double seconds, std::ostream& out) {
  out << FormatText(now.state()) << ", up " << FormatDuration(now.uptime_seconds()) << ", "
      << FormatCount(now.node_count()) << " nodes, " << FormatBytes(now.stored_bytes())
      << " stored, disk " << FormatBytes(now.disk_bytes()) << " of "
      << FormatBytes(now.disk_limit_bytes()) << ", memory tier "
      << FormatBytes(now.memory_tier_bytes()) << " of "
      << FormatBytes(now.memory_tier_limit_bytes()) << "\n\n";
  Table table({{"COUNTER"}, {"RATE", Table::Align::kRight}, {"TOTAL", Table::Align::kRight}});
  const std::map<std::string, std::uint64_t> sorted(now.counters().begin(), now.counters().end());
  for (const auto& [name, value] : sorted) {
    const auto old = before.counters().find(name);
    const std::uint64_t then = old == before.counters().end() ? 0 : old->second;
    // A server that was started anew counts from zero.
    const double change =
        value >= then ? static_cast<double>(value - then) : static_cast<double>(value);
    table.AddRow({FormatText(name), Rate(name, change / seconds), FormatCount(value)});
  }
  table.Print(out);
}

ExitCode Run(const VerbContext& context) {
  const bool once = context.line.Has("once");
  const std::chrono::seconds interval(context.line.Number("interval", 2));
  AdminClient admin = context.Admin();
  auto before = admin.GetStatus();
  if (!before.ok()) return context.Fail(before.status());
  while (true) {
    const auto began = std::chrono::steady_clock::now();
    std::this_thread::sleep_for(interval);
    auto now = admin.GetStatus();
    if (!now.ok()) {
      if (once) return context.Fail(now.status());
      context.err << "kvtrie: " << now.status().message() << "\n";
      continue;
    }
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    if (context.json) {
      nlohmann::ordered_json json = StatusToJson(*now);
      json["interval_seconds"] = seconds;
      nlohmann::json rates = nlohmann::json::object();
      for (const auto& [name, value] : now->counters()) {
        const auto old = before->counters().find(name);
        const std::uint64_t then = old == before->counters().end() ? 0 : old->second;
        rates[name] = static_cast<double>(value >= then ? value - then : value) / seconds;
      }
      json["rates_per_second"] = rates;
      context.out << json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)
                  << std::endl;
    } else {
      if (!once && context.out_is_terminal) context.out << kClearScreen;
      PrintPage(*before, *now, seconds, context.out);
      context.out << std::flush;
    }
    if (once) return ExitCode::kOk;
    if (!context.out) return ExitCode::kFailed;
    before = std::move(now);
  }
}

}  // namespace

const Verb kTopVerb{
    .name = "top",
    .positionals = "",
    .positionals_min = 0,
    .positionals_max = 0,
    .summary = "what the server does, refreshed",
    .details = "With --json one line per interval.",
    .flags = kFlags,
    .run = Run,
};

}  // namespace kvtrie
