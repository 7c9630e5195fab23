#include "server/server_config.h"

#include <algorithm>

#include "absl/flags/flag.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "server/flag_set.h"
#include "server/status_translation.h"
#include "storage/base/status_macros.h"

using kvtrie::ByteSize;

namespace {
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
}  // namespace

// What the server does.
ABSL_FLAG(std::string, data_dir, "",
          "Folder of this store; created if it does not exist. Required.");
ABSL_FLAG(std::string, listen, "127.0.0.1:50051",
          "Where the Cache service listens: host:port, [IPv6]:port or unix:path. Port 0: any.");
ABSL_FLAG(std::string, admin_listen, "127.0.0.1:50052", "Where the Admin service listens.");
ABSL_FLAG(std::string, http_listen, "127.0.0.1:9464",
          "Where /metrics, /livez and /readyz are served over HTTP.");
ABSL_FLAG(std::string, local_socket, "auto",
          "Unix socket of the shared-memory lane for clients on this host; auto is "
          "DATA_DIR/local.sock, empty turns the lane off.");
ABSL_FLAG(bool, allow_remote, false,
          "Allow addresses that other machines reach although nothing is encrypted and nobody has "
          "to prove who they are. Only for networks where that is true of everybody.");
ABSL_FLAG(
    std::string, ready_file, "",
    "File that is written when the server serves: JSON with the bound addresses and the pid.");
ABSL_FLAG(bool, check_config, false, "Check the settings, print them, and end.");
ABSL_FLAG(std::string, log_level, "info", "trace, debug, info, warn or error.");
ABSL_FLAG(std::string, log_format, "text", "text, or json (one object per line).");

ABSL_FLAG(std::string, workers, "",
          "Workers that code for this server, with commas between them: host:port, unix:/path, or "
          "dns:///name:port for all addresses of a name. They do what --recode_level asks for, and "
          "decode for clients that want raw KV; what they do not do in time, this server does.");
ABSL_FLAG(absl::Duration, worker_timeout, absl::Seconds(5),
          "How long blocks may take at the workers before this server codes them.");

// The store.
ABSL_FLAG(ByteSize, disk_limit_bytes, ByteSize{16 * kGiB},
          "Bound on what du shows of the data folder. Eviction keeps below it.");
ABSL_FLAG(bool, eviction, true,
          "Drop what is least worth when the store is full. Without it a full store refuses puts.");
ABSL_FLAG(ByteSize, segment_bytes, ByteSize{64 * kMiB},
          "Size of a segment file. Larger: fewer files; space comes back in larger steps.");
ABSL_FLAG(ByteSize, memory_tier_bytes, ByteSize{1 * kGiB},
          "Frames kept in memory. Larger: more reads without the disk. Keep the sum of all memory "
          "settings below 80 % of the container's limit.");
ABSL_FLAG(
    ByteSize, prefetch_bytes, ByteSize{64 * kMiB},
    "Of memory_tier_bytes, for blocks that are read from the disk before they are fetched: "
    "those that a Lookup leases, and then those that are likely to follow. At most half of the "
    "tier is used. 0: none.");
ABSL_FLAG(
    std::uint32_t, prefetch_percent_min, 50,
    "Blocks behind those of a Lookup are read ahead while all up to there follow with so much "
    "probability, 50 to 99 percent. 100: none are.");
ABSL_FLAG(
    bool, prefault_memory, true,
    "Take memory_tier_bytes from the system at start, not at first use: halves the CPU of puts "
    "into a fresh server.");
ABSL_FLAG(
    ByteSize, token_cache_bytes, ByteSize{512 * kMiB},
    "Tokens of stored blocks kept in memory (4 bytes each). Lookups beyond it read the disk.");
ABSL_FLAG(ByteSize, put_memory_bytes, ByteSize{256 * kMiB},
          "Blocks that puts have begun and not finished. When it is used up, writers wait.");
ABSL_FLAG(
    ByteSize, index_bytes_max, ByteSize{2 * kGiB},
    "Index of blocks in memory, about 100 bytes each. When it is full, the least valuable go.");
ABSL_FLAG(ByteSize, run_index_bytes, ByteSize{320 * kMiB},
          "Index that finds the same text under another prefix, at most 0.9 byte per stored token. "
          "When it is full, text is found less often. 0: none.");
ABSL_FLAG(ByteSize, codec_memory_bytes, ByteSize{512 * kMiB},
          "Codecs kept to decode blocks for clients that want raw KV; each takes about twice its "
          "model's profile.");
ABSL_FLAG(std::uint32_t, decode_threads, 2,
          "Threads that decode for those clients. Clients that decode themselves need none. With "
          "--workers, so many batches are under way at a time.");
ABSL_FLAG(
    std::string, recode_level, "off",
    "near-exact, high or small: exact blocks of models with a profile get a coded frame of this "
    "level in the background, and when space is needed the exact ones go first. For fleets "
    "whose readers take that level. off: blocks stay as they were put.");
ABSL_FLAG(std::uint32_t, recode_cpu_percent, 25, "Share of one core for that, at most.");
ABSL_FLAG(std::string, text_reuse, "off",
          "Who may have KV of the same text under another prefix, if they ask for it: off, all, or "
          "tenant numbers with commas between them (1 is that of a server without tenants). Such "
          "KV is approximate, by how much depends on the model and the text: measure before.");
ABSL_FLAG(std::string, text_reuse_forbidden_models, "",
          "Models of which nobody has it, as model ids (32 hex digits) with commas between them. "
          "Forbid models that add learned positions to their inputs.");
ABSL_FLAG(std::uint32_t, io_threads, 4, "Threads that read and write the disk.");
ABSL_FLAG(std::uint32_t, io_queue_max, 4096,
          "Requests that may wait for those threads; more are refused with UNAVAILABLE.");
ABSL_FLAG(absl::Duration, sync_interval, absl::Seconds(1),
          "How often acknowledged writes are synced: what a loss of power may cost.");
ABSL_FLAG(absl::Duration, lease_max, absl::Seconds(60), "Longest lease that a Lookup gets.");
ABSL_FLAG(absl::Duration, pin_max, absl::Hours(24 * 30), "Longest pin.");
ABSL_FLAG(std::uint32_t, pinned_percent_max, 50,
          "Share of the disk limit that pins may hold, in percent.");
ABSL_FLAG(std::uint32_t, event_log_max, 65'536, "Events kept for watchers that fall behind.");
ABSL_FLAG(std::uint32_t, group_threshold_bits, 128,
          "Surprisal that sessions must share to be shown as a group, in bits; a token of text has "
          "3 to 4, so the default is more than a chat template and less than a system prompt. 0: "
          "no groups.");

// Limits.
ABSL_FLAG(
    absl::Duration, stream_stall_limit, absl::Seconds(30),
    "A stream whose client does not read, or does not send the rest of a block that it has begun, "
    "for so long is ended.");
ABSL_FLAG(absl::Duration, drain_grace, absl::Seconds(20),
          "Time between SIGTERM and the end in which calls may finish. Keep it below the grace "
          "period of whatever stops the server.");
ABSL_FLAG(absl::Duration, connection_age_max, absl::ZeroDuration(),
          "Connections are asked to reconnect after this, so that clients spread over new servers. "
          "0: never.");
ABSL_FLAG(absl::Duration, stuck_limit, absl::Seconds(30),
          "Health fails when work that waits for the disk has not moved for so long.");
ABSL_FLAG(std::uint32_t, streams_per_connection_max, 256, "Calls of one connection at a time.");
ABSL_FLAG(std::uint32_t, streams_max, 1024, "Fetch, Put and Watch calls of all clients at a time.");
ABSL_FLAG(ByteSize, stream_memory_bytes, ByteSize{256 * kMiB},
          "Frames and announcements that streams hold at a time.");
ABSL_FLAG(ByteSize, read_ahead_bytes, ByteSize{4 * kMiB},
          "Bytes that a Fetch reads ahead of its client.");
ABSL_FLAG(ByteSize, grpc_memory_bytes, ByteSize{512 * kMiB},
          "Ceiling on what gRPC buffers. A last resort: calls fail when it is reached.");
ABSL_FLAG(ByteSize, message_bytes_max, ByteSize{8 * kMiB}, "Largest message that is received.");
ABSL_FLAG(std::uint32_t, queries_per_request_max, 1024, "Queries in one Lookup.");
ABSL_FLAG(std::uint32_t, tokens_per_request_max, 1'048'576, "Tokens in one request.");
ABSL_FLAG(std::uint32_t, lane_connections_max, 64,
          "Connections of the shared-memory lane, each with a thread. 0 turns the lane off.");
ABSL_FLAG(ByteSize, lane_region_bytes_max, ByteSize{4 * kGiB},
          "Largest region that a client of the shared-memory lane may share.");

namespace kvtrie {
namespace {

constexpr FlagSet kFlags("server_config.cc");

constexpr absl::string_view kAutoSocket = "auto";

// Turns the values of flags into a ServerConfig; the first fault stays.
class ConfigBuilder : private SettingChecks {
 public:
  explicit ConfigBuilder(const SettingSources& sources) : SettingChecks(sources) {}

  absl::StatusOr<ServerConfig> Build() {
    ServerConfig config;
    FillServer(&config);
    FillEngine(&config.engine);
    FillLimits(&config);
    CheckTogether(config);
    if (!status().ok()) return status();
    return config;
  }

 private:
  void FillServer(ServerConfig* config) {
    config->check_config = absl::GetFlag(FLAGS_check_config);
    config->allow_remote = absl::GetFlag(FLAGS_allow_remote);
    config->listen = Address("listen", absl::GetFlag(FLAGS_listen), config->allow_remote);
    config->admin_listen =
        Address("admin_listen", absl::GetFlag(FLAGS_admin_listen), config->allow_remote);
    config->http_listen =
        Address("http_listen", absl::GetFlag(FLAGS_http_listen), config->allow_remote);
    if (config->http_listen.is_unix()) Fail("http_listen", "HTTP needs host:port");
    FillWorkers(&config->workers);
    config->ready_file = absl::GetFlag(FLAGS_ready_file);
    config->log_level = OneOf("log_level", absl::GetFlag(FLAGS_log_level),
                              {"trace", "debug", "info", "warn", "error"});
    config->log_json =
        OneOf("log_format", absl::GetFlag(FLAGS_log_format), {"text", "json"}) == "json";
  }

  void FillWorkers(WorkerOptions* workers) {
    workers->timeout =
        Milliseconds("worker_timeout", absl::GetFlag(FLAGS_worker_timeout), absl::Milliseconds(10),
                     absl::FromChrono(WorkerOptions::kTimeoutMax));
    const std::string targets = absl::GetFlag(FLAGS_workers);
    if (targets.empty()) return;
    workers->targets = absl::StrSplit(targets, ',');
    workers->tenant = "kvtrie-server";
    if (const absl::Status valid = workers->Validate(); !valid.ok()) {
      Fail("workers", absl::StripPrefix(valid.message(), "workers: "));
    }
  }

  void FillEngine(EngineOptions* engine) {
    engine->data_dir = absl::GetFlag(FLAGS_data_dir);
    if (engine->data_dir.empty()) Fail("data_dir", "is required");
    engine->disk_limit_bytes = absl::GetFlag(FLAGS_disk_limit_bytes).bytes;
    engine->eviction = absl::GetFlag(FLAGS_eviction);
    engine->segment_bytes = absl::GetFlag(FLAGS_segment_bytes).bytes;
    engine->memory_tier_bytes = absl::GetFlag(FLAGS_memory_tier_bytes).bytes;
    const std::uint64_t machine_bytes = static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) *
                                        static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    if (engine->memory_tier_bytes > machine_bytes) {
      Fail("memory_tier_bytes", absl::StrCat(engine->memory_tier_bytes, " is more than the ",
                                             machine_bytes, " bytes of this machine's memory"));
    }
    engine->prefetch_bytes = absl::GetFlag(FLAGS_prefetch_bytes).bytes;
    engine->prefetch_percent_min =
        Between("prefetch_percent_min", absl::GetFlag(FLAGS_prefetch_percent_min), 50u, 100u);
    engine->prefault_memory = absl::GetFlag(FLAGS_prefault_memory);
    engine->token_cache_bytes = absl::GetFlag(FLAGS_token_cache_bytes).bytes;
    engine->put_memory_bytes = absl::GetFlag(FLAGS_put_memory_bytes).bytes;
    engine->index_bytes_max = absl::GetFlag(FLAGS_index_bytes_max).bytes;
    engine->run_index_bytes = absl::GetFlag(FLAGS_run_index_bytes).bytes;
    engine->codec_memory_bytes = absl::GetFlag(FLAGS_codec_memory_bytes).bytes;
    engine->decode_threads =
        Between("decode_threads", absl::GetFlag(FLAGS_decode_threads), 1u, 256u);
    const std::string level = OneOf("recode_level", absl::GetFlag(FLAGS_recode_level),
                                    {"off", "near-exact", "high", "small"});
    if (level != "off") {
      engine->recode_quality = level == "near-exact" ? Quality::kNearExact
                               : level == "high"     ? Quality::kHigh
                                                     : Quality::kSmall;
    }
    engine->recode_cpu_percent =
        Between("recode_cpu_percent", absl::GetFlag(FLAGS_recode_cpu_percent), 1u, 100u);
    FillTextReuse(&engine->text_reuse);
    engine->io_threads = Between("io_threads", absl::GetFlag(FLAGS_io_threads), 1u, 256u);
    engine->io_queue_max = Between("io_queue_max", absl::GetFlag(FLAGS_io_queue_max), 1u, 1u << 20);
    engine->sync_interval = Milliseconds("sync_interval", absl::GetFlag(FLAGS_sync_interval),
                                         absl::Milliseconds(1), absl::Hours(1));
    engine->lease_max = Milliseconds("lease_max", absl::GetFlag(FLAGS_lease_max),
                                     absl::Milliseconds(1), absl::Hours(24));
    engine->pin_max = std::chrono::duration_cast<std::chrono::seconds>(Milliseconds(
        "pin_max", absl::GetFlag(FLAGS_pin_max), absl::Seconds(1), absl::Hours(24 * 3650)));
    engine->pinned_percent_max =
        Between("pinned_percent_max", absl::GetFlag(FLAGS_pinned_percent_max), 0u, 100u);
    engine->event_log_max =
        Between("event_log_max", absl::GetFlag(FLAGS_event_log_max), 1u, 1u << 24);
    engine->group_threshold_bits =
        Between("group_threshold_bits", absl::GetFlag(FLAGS_group_threshold_bits), 0u, 1u << 22);
    // "disk_limit_bytes: ..." of the engine is "--disk_limit_bytes: ..." here.
    Keep(Within("--", engine->Validate()));
  }

  void FillTextReuse(TextReusePolicy* policy) {
    const std::string who = absl::GetFlag(FLAGS_text_reuse);
    policy->all_tenants = who == "all";
    if (who != "all" && who != "off") {
      for (const absl::string_view tenant : absl::StrSplit(who, ',')) {
        TenantId id;
        if (!absl::SimpleAtoi(tenant, &id.value) || id.value == 0) {
          Fail("text_reuse", absl::StrCat("\"", who,
                                          "\" is not off, all, or tenant numbers from 1 "
                                          "on with commas between them"));
        }
        policy->tenants.push_back(id);
      }
    }
    const std::string models = absl::GetFlag(FLAGS_text_reuse_forbidden_models);
    if (models.empty()) return;
    for (const absl::string_view model : absl::StrSplit(models, ',')) {
      const bool is_id = model.size() == 2 * ModelId::kBytes &&
                         std::all_of(model.begin(), model.end(),
                                     [](unsigned char c) { return absl::ascii_isxdigit(c); });
      if (!is_id) {
        Fail("text_reuse_forbidden_models",
             absl::StrCat("\"", model, "\" is not a model id of 32 hex digits"));
        return;
      }
      policy->forbidden_models.push_back(*ModelId::FromBytes(absl::HexStringToBytes(model)));
    }
  }

  void FillLimits(ServerConfig* config) {
    config->stream_stall_limit =
        Milliseconds("stream_stall_limit", absl::GetFlag(FLAGS_stream_stall_limit),
                     absl::Milliseconds(10), absl::Hours(1));
    config->drain_grace = Milliseconds("drain_grace", absl::GetFlag(FLAGS_drain_grace),
                                       absl::Milliseconds(100), absl::Hours(1));
    config->connection_age_max =
        Milliseconds("connection_age_max", absl::GetFlag(FLAGS_connection_age_max),
                     absl::ZeroDuration(), absl::Hours(24 * 365));
    config->stuck_limit = Milliseconds("stuck_limit", absl::GetFlag(FLAGS_stuck_limit),
                                       absl::Seconds(1), absl::Hours(1));
    config->streams_per_connection_max =
        Between("streams_per_connection_max", absl::GetFlag(FLAGS_streams_per_connection_max), 1u,
                1u << 16);
    config->streams_max = Between("streams_max", absl::GetFlag(FLAGS_streams_max), 1u, 1u << 20);
    config->stream_memory_bytes =
        Size("stream_memory_bytes", absl::GetFlag(FLAGS_stream_memory_bytes), 8 * kMiB);
    config->read_ahead_bytes =
        Size("read_ahead_bytes", absl::GetFlag(FLAGS_read_ahead_bytes), kMiB / 4);
    config->grpc_memory_bytes =
        Size("grpc_memory_bytes", absl::GetFlag(FLAGS_grpc_memory_bytes), 16 * kMiB);
    config->message_bytes_max =
        Size("message_bytes_max", absl::GetFlag(FLAGS_message_bytes_max), 2 * kMiB);
    if (config->message_bytes_max > kGiB) Fail("message_bytes_max", "at most 1GiB");
    config->request_limits.queries_max =
        Between("queries_per_request_max", absl::GetFlag(FLAGS_queries_per_request_max), 1u, 1024u);
    config->request_limits.tokens_max =
        Between("tokens_per_request_max", absl::GetFlag(FLAGS_tokens_per_request_max), 1u,
                static_cast<std::uint32_t>(kPathTokensMax));
    config->lane_connections_max =
        Between("lane_connections_max", absl::GetFlag(FLAGS_lane_connections_max), 0u, 4096u);
    config->lane_region_bytes_max =
        Size("lane_region_bytes_max", absl::GetFlag(FLAGS_lane_region_bytes_max), kMiB);

    config->local_socket = absl::GetFlag(FLAGS_local_socket);
    if (config->lane_connections_max == 0) {
      if (config->local_socket != kAutoSocket && !config->local_socket.empty()) {
        Fail("local_socket", "excludes --lane_connections_max=0, which turns the lane off");
      }
      config->local_socket.clear();
    } else if (config->local_socket == kAutoSocket) {
      config->local_socket = absl::StrCat(config->engine.data_dir, "/local.sock");
    }
  }

  void CheckTogether(const ServerConfig& config) {
    const std::pair<const char*, const ListenAddress*> listens[] = {
        {"listen", &config.listen},
        {"admin_listen", &config.admin_listen},
        {"http_listen", &config.http_listen}};
    for (const auto& [name, address] : listens) {
      for (const auto& [other_name, other] : listens) {
        if (name == other_name) break;
        const bool same = address->is_unix()
                              ? address->unix_path == other->unix_path
                              : address->port != 0 && !other->is_unix() &&
                                    address->port == other->port && address->host == other->host;
        if (same) Fail(name, absl::StrCat("is the same address as --", other_name));
      }
    }
    if (config.read_ahead_bytes > config.stream_memory_bytes) {
      Fail("read_ahead_bytes", "is larger than --stream_memory_bytes");
    }
    if (config.message_bytes_max > config.grpc_memory_bytes) {
      Fail("message_bytes_max", "is larger than --grpc_memory_bytes");
    }
  }
};

}  // namespace

absl::StatusOr<ServerConfig> ReadServerConfig(std::span<const char* const> arguments,
                                              std::span<const std::string> environment) {
  KV_ASSIGN_OR_RETURN(const SettingSources sources, kFlags.Read(arguments, environment));
  KV_ASSIGN_OR_RETURN(ServerConfig config, ConfigBuilder(sources).Build());
  config.settings = kFlags.Effective(sources);
  return config;
}

std::string DescribeFlags() {
  return kFlags.Describe("kvtrie-server: a store for KV caches of LLM inference");
}

}  // namespace kvtrie
