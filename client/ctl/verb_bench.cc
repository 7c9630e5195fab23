#include "client/ctl/verb_bench.h"

#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "client/ctl/bench_run.h"
#include "client/ctl/bench_workload.h"
#include "client/ctl/format.h"
#include "client/ctl/process_cpu.h"
#include "client/ctl/table.h"

namespace kvtrie {
namespace {

const FlagSpec kFlags[] = {
    {"block-bytes", FlagSpec::Kind::kNumber, "raw size of a block (262144)", 32, 64 << 20},
    {"blocks", FlagSpec::Kind::kNumber, "blocks in all (1024)", 1, 100'000'000},
    {"clients", FlagSpec::Kind::kNumber, "threads with connections of their own (1)", 1, 256},
    {"batch", FlagSpec::Kind::kNumber, "blocks per request (1)", 1, 4096},
    {"lane", FlagSpec::Kind::kChoice, "how blocks travel (grpc)", 0, 0, "grpc|shm"},
    {"cold", FlagSpec::Kind::kSwitch,
     "get: the server was restarted, the page cache dropped; names the row get_disk"},
    {"prompts", FlagSpec::Kind::kNumber, "lookup: prompts of 4,096 tokens per request (1)", 1,
     1024},
    {"requests", FlagSpec::Kind::kNumber, "lookup: requests per client (2000)", 1, 100'000'000},
    {"repeat", FlagSpec::Kind::kNumber, "get: passes over the blocks (1)", 1, 1'000'000},
    {"seed", FlagSpec::Kind::kNumber, "names what is written and read (1)", 0, UINT64_MAX},
    {"warmup", FlagSpec::Kind::kSwitch, "get: one pass first that does not count"},
    {"durable", FlagSpec::Kind::kSwitch, "put: acknowledged blocks survive a loss of power"},
    {"quality", FlagSpec::Kind::kChoice,
     "level at which blocks are coded, by the client; needs a profile but for unrated (exact)", 0,
     0, "exact|near-exact|high|small|unrated"},
    {"channels", FlagSpec::Kind::kNumber, "connections for Fetch per client (2)", 1, 64},
    {"window-bytes", FlagSpec::Kind::kNumber, "flow-control window of a stream", 64 << 10,
     64 << 20},
    {"server-pid", FlagSpec::Kind::kNumber,
     "process of the server, for its CPU time; found by itself on this host", 1, (1 << 22) - 1},
    {"ready-file", FlagSpec::Kind::kText, "the server's ready file, which has its process"},
};

// Which process to ask for the server's CPU time.
std::optional<pid_t> ServerPid(const VerbContext& context) {
  if (context.line.Has("server-pid")) {
    return static_cast<pid_t>(context.line.Number("server-pid", 0));
  }
  if (context.line.Has("ready-file")) {
    std::ifstream file(context.line.Text("ready-file"));
    const auto ready = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
    if (ready.is_object() && ready.contains("pid") && ready["pid"].is_number_integer()) {
      return ready["pid"].get<pid_t>();
    }
  }
  return ListeningProcess(context.server);
}

std::string Fixed(double value, int decimals) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", decimals, value);
  return text;
}

nlohmann::ordered_json Rounded(std::optional<double> value, int decimals) {
  if (!value.has_value()) return nullptr;
  const double scale = std::pow(10.0, decimals);
  return std::round(*value * scale) / scale;
}

ExitCode Run(const VerbContext& context) {
  BenchOptions options;
  options.op = context.positional(0);
  if (options.op != "put" && options.op != "get" && options.op != "lookup" &&
      options.op != "mixed") {
    return context.RefuseUsage("put, get, lookup or mixed, not '" + options.op + "'");
  }
  const CommandLine& line = context.line;
  options.client.targets = {context.server};
  options.client.lane = line.Text("lane", "grpc") == "shm" ? Lane::kShm : Lane::kGrpc;
  options.client.bulk_channels = static_cast<int>(
      line.Number("channels", static_cast<std::uint64_t>(options.client.bulk_channels)));
  options.client.stream_window_bytes = static_cast<int>(
      line.Number("window-bytes", static_cast<std::uint64_t>(options.client.stream_window_bytes)));
  if (context.timeout.count() > 0) {
    options.client.unary_timeout = context.timeout;
    options.client.bulk_timeout = context.timeout;
  }
  options.block_bytes = line.Number("block-bytes", options.block_bytes);
  options.blocks = line.Number("blocks", options.blocks);
  options.clients = static_cast<int>(line.Number("clients", 1));
  options.batch = line.Number("batch", options.batch);
  options.prompts = line.Number("prompts", options.prompts);
  options.requests = line.Number("requests", options.requests);
  options.repeat = line.Number("repeat", options.repeat);
  options.seed = line.Number("seed", options.seed);
  options.cold = line.Has("cold");
  options.warmup = line.Has("warmup");
  options.durable = line.Has("durable");
  const std::string quality = line.Text("quality", "exact");
  for (const Quality level : kAllQualities) {
    if (QualityName(static_cast<v1::Quality>(level)) == quality) options.quality = level;
  }
  if (options.op == "lookup" && options.quality != Quality::kExact) {
    return context.RefuseUsage("lookup reads no blocks; leave --quality away");
  }
  if (const auto model = BenchModel(options.block_bytes); !model.ok()) {
    return context.RefuseUsage("--block-bytes: " + std::string(model.status().message()) +
                               ": take a power of two");
  }
  options.server_pid = ServerPid(context);
  if (options.cold && (options.warmup || options.repeat > 1)) {
    return context.RefuseUsage("--cold reads each block once");
  }
  if (!options.server_pid.has_value()) {
    context.err << "kvtrie: the server's process is not known: its CPU time is left out\n";
  }

  const auto rows = RunBench(options);
  if (!rows.ok()) return context.Fail(rows.status());
  if (context.json) {
    for (const BenchRow& row : *rows) {
      nlohmann::ordered_json json;
      json["peer"] = row.peer;
      json["op"] = row.op;
      json["block_bytes"] = row.block_bytes;
      json["clients"] = row.clients;
      json["batch"] = row.batch;
      json["gb_per_s"] = Rounded(row.gb_per_s, 4);
      json["cpu_s_per_gb"] = Rounded(row.cpu_s_per_gb, 4);
      json["keys_per_s"] = Rounded(row.keys_per_s, 0);
      json["p50_us"] = Rounded(row.p50_us, 1);
      json["p99_us"] = Rounded(row.p99_us, 1);
      if (options.quality != Quality::kExact) {
        json["quality"] = quality;
        json["stored_part"] = Rounded(row.stored_part, 4);
      }
      context.out << json.dump() << "\n";
    }
    return ExitCode::kOk;
  }
  Table table({{"OP"},
               {"BLOCK", Table::Align::kRight},
               {"CLIENTS", Table::Align::kRight},
               {"BATCH", Table::Align::kRight},
               {"GB/S", Table::Align::kRight},
               {"CPU S/GB", Table::Align::kRight},
               {"BLOCKS/S", Table::Align::kRight},
               {"P50 US", Table::Align::kRight},
               {"P99 US", Table::Align::kRight}});
  for (const BenchRow& row : *rows) {
    table.AddRow({row.op, std::to_string(row.block_bytes), std::to_string(row.clients),
                  std::to_string(row.batch), row.gb_per_s ? Fixed(*row.gb_per_s, 2) : "-",
                  row.cpu_s_per_gb ? Fixed(*row.cpu_s_per_gb, 2) : "-", Fixed(row.keys_per_s, 0),
                  Fixed(row.p50_us, 1), Fixed(row.p99_us, 1)});
  }
  table.Print(context.out);
  return ExitCode::kOk;
}

}  // namespace

const Verb kBenchVerb{
    .name = "bench",
    .positionals = "put|get|lookup|mixed",
    .positionals_min = 1,
    .positionals_max = 1,
    .summary = "measure a server with synthetic blocks, and check what comes back",
    .details =
        "put stores blocks named by --seed; get reads them again, in another order; lookup asks "
        "for\n"
        "prompts of 256 stored blocks; mixed does all three, as an engine does. CPU time is that "
        "of client\n"
        "and server together, per 10^9 bytes of blocks.",
    .flags = kFlags,
    .run = Run,
};

}  // namespace kvtrie
