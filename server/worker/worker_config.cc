#include "server/worker/worker_config.h"

#include <algorithm>
#include <thread>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "storage/base/status_macros.h"

using kvtrie::ByteSize;

namespace {
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
}  // namespace

ABSL_FLAG(std::string, listen, "127.0.0.1:50061",
          "Where the Codec service listens: host:port, [IPv6]:port or unix:path. Port 0: any.");
ABSL_FLAG(std::string, http_listen, "127.0.0.1:9465",
          "Where /metrics, /livez and /readyz are served over HTTP.");
ABSL_FLAG(bool, allow_remote, false,
          "Allow addresses that other machines reach although nothing is encrypted and nobody has "
          "to prove who they are. Only for networks where that is true of everybody.");
ABSL_FLAG(std::string, backend, "auto",
          "What codes: cuda, cpu, or auto for cuda where there is a usable device and cpu "
          "elsewhere. One that is named and is not there stops the start.");
ABSL_FLAG(
    std::string, ready_file, "",
    "File that is written when the worker serves: JSON with the bound addresses and the pid.");
ABSL_FLAG(bool, check_config, false, "Check the settings, print them, and end.");
ABSL_FLAG(std::string, log_level, "info", "trace, debug, info, warn or error.");
ABSL_FLAG(std::string, log_format, "text", "text, or json (one object per line).");

ABSL_FLAG(
    std::uint32_t, coding_threads, 0,
    "Threads that code. 0: as many as the machine has cores. With cuda, each keeps a batch of "
    "its own under way.");
ABSL_FLAG(std::uint32_t, batch_tokens, 0,
          "Tokens of the blocks that are coded together at most; more take longer until the first "
          "is done. 0: as many as the backend needs to be fast.");
ABSL_FLAG(std::uint32_t, queue_items_max, 4096,
          "Items that may wait; more are refused with RESOURCE_EXHAUSTED, those of tenants that "
          "have more than their share first.");
ABSL_FLAG(absl::Duration, item_timeout_max, absl::Seconds(10),
          "How long an item may wait for its turn, where its caller asks for no less.");
ABSL_FLAG(ByteSize, memory_bytes, ByteSize{1 * kGiB},
          "Items that are here, with what they become. When it is used up, callers are slowed "
          "down. One stream has a quarter of it at most.");
ABSL_FLAG(ByteSize, item_bytes_max, ByteSize{0},
          "Largest item: a raw block with the frames that it is coded against. 0: an eighth of "
          "--memory_bytes.");
ABSL_FLAG(ByteSize, fit_bytes_max, ByteSize{4 * kGiB},
          "Memory of one FitProfile: its texts and material, and what fitting them takes.");
ABSL_FLAG(ByteSize, codec_memory_bytes, ByteSize{1 * kGiB},
          "Codecs that are kept, made of profiles; each takes about twice its profile.");
ABSL_FLAG(ByteSize, profile_memory_bytes, ByteSize{256 * kMiB},
          "Profiles that are kept, and as much again for those on their way. Callers send those "
          "that are missing again; none goes that was used within 30 s.");
ABSL_FLAG(ByteSize, grpc_memory_bytes, ByteSize{512 * kMiB},
          "Ceiling on what gRPC buffers. A last resort: calls fail when it is reached.");
ABSL_FLAG(ByteSize, message_bytes_max, ByteSize{8 * kMiB}, "Largest message that is received.");
ABSL_FLAG(std::uint32_t, streams_per_connection_max, 256, "Calls of one connection at a time.");
ABSL_FLAG(std::uint32_t, streams_max, 1024, "Calls of all callers at a time.");
ABSL_FLAG(absl::Duration, stream_stall_limit, absl::Seconds(30),
          "A stream whose caller does not read, or does not send the rest of an item that it has "
          "begun, or has nothing under way, for so long is ended.");
ABSL_FLAG(absl::Duration, stuck_limit, absl::Seconds(30),
          "Health fails when a batch has been coded, or the device has not answered, for so long.");
ABSL_FLAG(
    absl::Duration, drain_grace, absl::Seconds(20),
    "Time between SIGTERM and the end in which items may finish; fits end at once. What still "
    "hangs two seconds later is ended, with exit code 3. Keep it below the grace period of "
    "whatever stops the worker.");

namespace kvtrie {
namespace {

constexpr FlagSet kFlags("worker_config.cc");

class ConfigBuilder : private SettingChecks {
 public:
  explicit ConfigBuilder(const SettingSources& sources) : SettingChecks(sources) {}

  absl::StatusOr<WorkerConfig> Build() {
    WorkerConfig config;
    FillWorker(&config);
    FillLimits(&config);
    CheckTogether(config);
    if (!status().ok()) return status();
    return config;
  }

 private:
  void FillWorker(WorkerConfig* config) {
    config->check_config = absl::GetFlag(FLAGS_check_config);
    config->allow_remote = absl::GetFlag(FLAGS_allow_remote);
    config->listen = Address("listen", absl::GetFlag(FLAGS_listen), config->allow_remote);
    config->http_listen =
        Address("http_listen", absl::GetFlag(FLAGS_http_listen), config->allow_remote);
    if (config->http_listen.is_unix()) Fail("http_listen", "HTTP needs host:port");
    config->backend = OneOf("backend", absl::GetFlag(FLAGS_backend), {"auto", "cpu", "cuda"});
    config->ready_file = absl::GetFlag(FLAGS_ready_file);
    config->log_level = OneOf("log_level", absl::GetFlag(FLAGS_log_level),
                              {"trace", "debug", "info", "warn", "error"});
    config->log_json =
        OneOf("log_format", absl::GetFlag(FLAGS_log_format), {"text", "json"}) == "json";

    const std::uint32_t threads =
        Between("coding_threads", absl::GetFlag(FLAGS_coding_threads), 0u, 1024u);
    config->queue.threads =
        threads != 0 ? static_cast<int>(threads)
                     : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    config->queue.batch_tokens =
        Between("batch_tokens", absl::GetFlag(FLAGS_batch_tokens), 0u, 1u << 20);
    config->queue.jobs_max =
        Between("queue_items_max", absl::GetFlag(FLAGS_queue_items_max), 1u, 1u << 20);
  }

  void FillLimits(WorkerConfig* config) {
    config->limits.item_timeout_max =
        Milliseconds("item_timeout_max", absl::GetFlag(FLAGS_item_timeout_max),
                     absl::Milliseconds(10), absl::Hours(1));
    config->memory_bytes = Size("memory_bytes", absl::GetFlag(FLAGS_memory_bytes), 8 * kMiB);
    const ByteSize item_bytes = absl::GetFlag(FLAGS_item_bytes_max);
    config->limits.item_bytes_max =
        item_bytes.bytes == 0 ? config->memory_bytes / 8 : Size("item_bytes_max", item_bytes, kMiB);
    config->limits.fit_bytes_max = Size("fit_bytes_max", absl::GetFlag(FLAGS_fit_bytes_max), kMiB);
    config->codec_memory_bytes =
        Size("codec_memory_bytes", absl::GetFlag(FLAGS_codec_memory_bytes), kMiB);
    config->profile_memory_bytes =
        Size("profile_memory_bytes", absl::GetFlag(FLAGS_profile_memory_bytes), kMiB);
    config->grpc_memory_bytes =
        Size("grpc_memory_bytes", absl::GetFlag(FLAGS_grpc_memory_bytes), 16 * kMiB);
    config->connections.message_bytes_max =
        Size("message_bytes_max", absl::GetFlag(FLAGS_message_bytes_max), 2 * kMiB);
    if (config->connections.message_bytes_max > kGiB) Fail("message_bytes_max", "at most 1GiB");
    config->connections.streams_per_connection_max =
        Between("streams_per_connection_max", absl::GetFlag(FLAGS_streams_per_connection_max), 1u,
                1u << 16);
    config->streams_max = Between("streams_max", absl::GetFlag(FLAGS_streams_max), 1u, 1u << 20);
    config->stream_stall_limit =
        Milliseconds("stream_stall_limit", absl::GetFlag(FLAGS_stream_stall_limit),
                     absl::Milliseconds(10), absl::Hours(1));
    config->stuck_limit = Milliseconds("stuck_limit", absl::GetFlag(FLAGS_stuck_limit),
                                       absl::Seconds(1), absl::Hours(1));
    config->drain_grace = Milliseconds("drain_grace", absl::GetFlag(FLAGS_drain_grace),
                                       absl::Milliseconds(100), absl::Hours(1));
  }

  void CheckTogether(const WorkerConfig& config) {
    const ListenAddress &codec = config.listen, &http = config.http_listen;
    if (!codec.is_unix() && codec.port != 0 && codec.port == http.port && codec.host == http.host) {
      Fail("http_listen", "is the same address as --listen");
    }
    // One stream has a quarter of it, for what comes and for what that becomes.
    if (config.limits.item_bytes_max > config.memory_bytes / 8) {
      Fail("item_bytes_max", "is more than an eighth of --memory_bytes");
    }
    if (config.connections.message_bytes_max > config.grpc_memory_bytes) {
      Fail("message_bytes_max", "is larger than --grpc_memory_bytes");
    }
  }
};

}  // namespace

absl::StatusOr<WorkerConfig> ReadWorkerConfig(std::span<const char* const> arguments,
                                              std::span<const std::string> environment) {
  KV_ASSIGN_OR_RETURN(const SettingSources sources, kFlags.Read(arguments, environment));
  KV_ASSIGN_OR_RETURN(WorkerConfig config, ConfigBuilder(sources).Build());
  config.settings = kFlags.Effective(sources);
  return config;
}

std::string DescribeWorkerFlags() {
  return kFlags.Describe("kvtrie-worker: makes frames of raw KV blocks, and raw KV of frames");
}

}  // namespace kvtrie
