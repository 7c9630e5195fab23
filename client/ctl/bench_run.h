#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/client_options.h"
#include "storage/kv/quality.h"

namespace kvtrie {

struct BenchOptions {
  std::string op;  // put, get, lookup or mixed
  ClientOptions client;
  std::uint64_t block_bytes = 256 << 10;
  std::uint64_t blocks = 1024;    // in all, over all clients
  int clients = 1;                // threads, each with connections of its own
  std::uint64_t batch = 1;        // blocks per request
  std::uint64_t prompts = 1;      // lookup: prompts per request
  std::uint64_t requests = 2000;  // lookup: per client
  std::uint64_t repeat = 1;       // get: passes over the blocks
  std::uint64_t seed = 1;
  bool cold = false;    // names the row get_disk
  bool warmup = false;  // one pass that does not count
  bool durable = false;
  // Below exact, blocks are encoded and decoded by the client.
  Quality quality = Quality::kExact;
  std::optional<pid_t> server_pid;  // none: only the client's CPU time is known
};

// Rates and times of one kind of request. p50 and p99 are per request.
struct BenchRow {
  std::string peer;
  std::string op;
  std::uint64_t block_bytes = 0;
  int clients = 1;
  std::uint64_t batch = 1;
  std::optional<double> gb_per_s;  // GB = 10^9 bytes; none for lookup
  std::optional<double>
      cpu_s_per_gb;  // client + server; none when the server's process is not known
  double keys_per_s = 0;
  double p50_us = 0;
  double p99_us = 0;
  std::optional<double> stored_part;  // put: stored bytes by raw ones, where the client encodes
};

// Runs one benchmark against a server, and checks what it reads.
// NotFound: what is to be read was not put with this seed, or not at this level.
// FailedPrecondition: what is to be put is stored already; the server has no profile to code at
// this level.
absl::StatusOr<std::vector<BenchRow>> RunBench(const BenchOptions& options);

}  // namespace kvtrie
