#include "client/ctl/verb_worker.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <chrono>
#include <string>
#include <vector>

#include "client/ctl/format.h"
#include "client/ctl/json_views.h"
#include "client/ctl/table.h"
#include "client/worker_call.h"

namespace kvtrie {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::chrono::milliseconds kTimeout{5000};
constexpr std::size_t kWorkersMax = 256;

std::string Of(std::uint64_t value, std::uint64_t limit) {
  return FormatBytes(value) + " of " + FormatBytes(limit);
}

Json ToJson(const std::string& target, const v1::DescribeResponse& worker) {
  Json json;
  json["worker"] = target;
  json["state"] = worker.state();
  json["reasons"] = Json::array();
  for (const std::string& reason : worker.reasons()) json["reasons"].push_back(reason);
  json["version"] = worker.version();
  json["backend"] = worker.backend();
  json["device"] = worker.device();
  json["uptime_seconds"] = worker.uptime_seconds();
  json["coding_threads"] = worker.coding_threads();
  json["item_bytes_max"] = worker.item_bytes_max();
  json["memory_bytes"] = worker.memory_bytes();
  json["memory_bytes_max"] = worker.memory_bytes_max();
  json["queued_items"] = worker.queued_items();
  json["queued_items_max"] = worker.queued_items_max();
  json["expected_wait_ms"] = worker.expected_wait_ms();
  json["tenants"] = Json::array();
  for (const v1::TenantQueue& tenant : worker.tenants()) {
    json["tenants"].push_back(Json{
        {"tenant", tenant.tenant()}, {"items", tenant.items()}, {"raw_bytes", tenant.raw_bytes()}});
  }
  json["profiles"] = Json::array();
  for (const v1::HeldProfile& profile : worker.profiles()) {
    json["profiles"].push_back(Json{{"profile_id", IdToHex(profile.profile_id())},
                                    {"profile_bytes", profile.profile_bytes()}});
  }
  json["counters"] = Json::object();
  for (const auto& [name, value] : worker.counters()) json["counters"][name] = value;
  return json;
}

void AddRow(const std::string& target, const v1::DescribeResponse& worker, Table* table) {
  std::string state = FormatText(worker.state());
  for (const std::string& reason : worker.reasons()) state += ": " + FormatText(reason);
  table->AddRow({FormatText(target), state, FormatText(worker.backend()),
                 FormatText(worker.device()), FormatCount(worker.coding_threads()),
                 FormatCount(worker.queued_items()), FormatCount(worker.expected_wait_ms()) + " ms",
                 Of(worker.memory_bytes(), worker.memory_bytes_max()),
                 FormatCount(static_cast<std::uint64_t>(worker.profiles_size())),
                 FormatDuration(worker.uptime_seconds())});
}

ExitCode Run(const VerbContext& context) {
  const auto timeout = context.timeout.count() > 0 ? context.timeout : kTimeout;
  Table table({{"WORKER"},
               {"STATE"},
               {"BACKEND"},
               {"DEVICE"},
               {"THREADS", Table::Align::kRight},
               {"WAITING", Table::Align::kRight},
               {"WAIT", Table::Align::kRight},
               {"MEMORY", Table::Align::kRight},
               {"PROFILES", Table::Align::kRight},
               {"UP", Table::Align::kRight}});
  Json all = Json::array();
  absl::Status failed;
  for (const std::string& target : context.line.positionals()) {
    const auto channel = grpc::CreateChannel(target, grpc::InsecureChannelCredentials());
    const auto worker = DescribeWorker(channel, Deadline::After(timeout));
    if (!worker.ok()) {
      // The others are told all the same.
      failed = absl::Status(worker.status().code(),
                            target + ": " + std::string(worker.status().message()));
      table.AddRow({FormatText(target), "no answer", "", "", "", "", "", "", "", ""});
      all.push_back(Json{{"worker", target}, {"state", "no answer"}});
      continue;
    }
    AddRow(target, *worker, &table);
    all.push_back(ToJson(target, *worker));
  }
  if (context.json) {
    context.out << DumpJson(all) << "\n";
  } else {
    table.Print(context.out);
  }
  return failed.ok() ? ExitCode::kOk : context.Fail(failed);
}

}  // namespace

const Verb kWorkerVerb{
    .name = "worker",
    .positionals = "WORKER...",
    .positionals_min = 1,
    .positionals_max = kWorkersMax,
    .summary = "what workers are, and how busy",
    .details =
        "Each WORKER is an address of a kvtrie-worker, host:port. One that does not answer "
        "fails the command; the others are shown all the same.",
    .run = Run,
};

}  // namespace kvtrie
