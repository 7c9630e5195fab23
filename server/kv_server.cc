#include "server/kv_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/connection_limits.h"
#include "server/metrics.h"
#include "server/status_translation.h"
#include "storage/base/status_macros.h"
#include "storage/engine/profile_block_codec.h"

namespace kvtrie {
namespace {

constexpr std::chrono::milliseconds kTickPeriod{1000};
// The thread that ticks does short work only: when it has not ticked for so long, the process is
// broken.
constexpr std::chrono::seconds kTickMax{30};

constexpr std::size_t kProfilePieceBytes = std::size_t{1} << 20;

ConnectionLimits LimitsOf(const ServerConfig& config) {
  return {.message_bytes_max = config.message_bytes_max,
          .streams_per_connection_max = config.streams_per_connection_max,
          .connection_age_max = config.connection_age_max};
}

}  // namespace

KvServer::KvServer(const ServerConfig& config, Clock& clock)
    : config_(config),
      clock_(clock),
      started_(std::chrono::steady_clock::now()),
      streams_(config.streams_max, config.stream_stall_limit, clock),
      stream_budget_(config.stream_memory_bytes),
      resident_budget_(config.stream_memory_bytes),
      timer_(std::make_unique<TimerThread>()) {}

absl::StatusOr<std::unique_ptr<KvServer>> KvServer::Start(const ServerConfig& config,
                                                          Clock& clock) {
  std::unique_ptr<KvServer> server(new KvServer(config, clock));
  KV_RETURN_IF_ERROR(server->Open(server->MakeCodec()));
  return server;
}

absl::StatusOr<std::unique_ptr<KvServer>> KvServer::Start(const ServerConfig& config, Clock& clock,
                                                          std::shared_ptr<const BlockCodec> codec) {
  std::unique_ptr<KvServer> server(new KvServer(config, clock));
  KV_RETURN_IF_ERROR(server->Open(std::move(codec)));
  return server;
}

absl::Status KvServer::Open(std::shared_ptr<const BlockCodec> codec) {
  KV_RETURN_IF_ERROR(StartHttp());
  KV_RETURN_IF_ERROR(OpenStore(std::move(codec)));
  KV_RETURN_IF_ERROR(StartServices());
  LogStart();
  return absl::OkStatus();
}

// With workers that miss profiles, these come from the store.
std::shared_ptr<const BlockCodec> KvServer::MakeCodec() {
  if (!config_.workers.targets.empty()) {
    workers_ = std::make_unique<WorkerBackend>(
        config_.workers,
        [this](const ProfileId& id,
               Deadline deadline) -> absl::StatusOr<WorkerBackend::ProfileBytes> {
          Engine* const engine = open_engine_;
          if (engine == nullptr) return absl::UnavailableError("the store is not open");
          KV_ASSIGN_OR_RETURN(const auto reader, engine->OpenProfile(id));
          std::vector<std::byte> bytes(reader->info().header.profile_bytes());
          // In pieces: on a slow disk nobody waits past the deadline.
          for (std::size_t at = 0; at < bytes.size(); at += kProfilePieceBytes) {
            if (deadline.expired()) return absl::DeadlineExceededError("profile: not read in time");
            const std::size_t here = std::min(kProfilePieceBytes, bytes.size() - at);
            KV_RETURN_IF_ERROR(reader->Read(at, std::span(bytes).subspan(at, here)));
          }
          return std::make_shared<const std::vector<std::byte>>(std::move(bytes));
        },
        clock_);
  }
  return std::make_shared<ProfileBlockCodec>(config_.engine.codec_memory_bytes, workers_.get());
}

KvServer::~KvServer() {
  Stop(std::chrono::milliseconds(0));
  http_.reset();
  open_engine_ = nullptr;
  // Callbacks of the store reach for what stands above it: it goes first, and the timer's work
  // before it.
  timer_->Stop();
  engine_.reset();
}

absl::Status KvServer::StartHttp() {
  HttpHandlers handlers{.metrics = [this] { return CollectMetrics(); },
                        .live = [this] { return Live(); },
                        .ready = [this] { return Ready(); }};
  KV_ASSIGN_OR_RETURN(http_, HttpEndpoint::Start(config_.http_listen, std::move(handlers)));
  addresses_.metrics = config_.http_listen.WithPort(http_->port());
  last_tick_ns_ = clock_.Monotonic().count();
  timer_->Every(kTickPeriod, [this] { Tick(); });
  timer_->Every(streams_.tick_period(), [this] {
    if (const std::size_t ended = streams_.Tick(); ended > 0) {
      stall_log_.Warn("ended {} stream(s) whose client made no progress", ended);
    }
  });
  return absl::OkStatus();
}

absl::Status KvServer::OpenStore(std::shared_ptr<const BlockCodec> codec) {
  const auto tell = [this](std::uint64_t done, std::string_view what) {
    std::string progress = absl::StrCat("starting: ", std::string(what), ", ", done);
    spdlog::info("{}", progress);
    absl::MutexLock lock(&mutex_);
    start_progress_ = std::move(progress);
  };
  KV_ASSIGN_OR_RETURN(engine_,
                      Engine::OpenEmbedded(config_.engine, clock_, tell, std::move(codec)));
  open_engine_ = engine_.get();
  const RecoveryReport& recovery = engine_->recovery();
  spdlog::info(
      "store open in {:.2f} s: {} blocks, {} dropped, {} unreferenced bytes freed, {} batches lost",
      recovery.seconds, recovery.nodes_loaded, recovery.nodes_dropped, recovery.unreferenced_bytes,
      recovery.lost_batches);
  for (const std::string& note : recovery.notes) spdlog::warn("recovery: {}", note);
  for (const std::string& file : recovery.foreign_files) {
    spdlog::warn("recovery: {} in the data folder is not ours; left alone", file);
  }
  return absl::OkStatus();
}

absl::Status KvServer::StartServices() {
  geometries_ = std::make_unique<GeometryCache>(*engine_);
  context_.reset(new ServiceContext{.engine = *engine_,
                                    .timer = *timer_,
                                    .streams = streams_,
                                    .metrics = rpc_metrics_,
                                    .geometries = *geometries_,
                                    .stream_budget = stream_budget_,
                                    .resident_budget = resident_budget_,
                                    .limits = config_.request_limits,
                                    .read_ahead_bytes = config_.read_ahead_bytes});
  watchdog_ = std::make_unique<Watchdog>(
      [this](std::function<void()> work) { return engine_->RunBlocking(std::move(work)); },
      config_.stuck_limit, clock_);
  if (!config_.local_socket.empty()) {
    KV_ASSIGN_OR_RETURN(lane_, LocalLaneServer::Listen(
                                   *context_, {.socket_path = config_.local_socket,
                                               .connections_max = config_.lane_connections_max,
                                               .region_bytes_max = config_.lane_region_bytes_max,
                                               .stall_limit = config_.stream_stall_limit}));
    addresses_.local_socket = config_.local_socket;
  }
  cache_service_ = std::make_unique<CacheService>(*context_, lane_.get());
  admin_service_ = std::make_unique<AdminService>(
      *context_, config_,
      AdminHooks{.state = [this] { return State(); },
                 .drain = [this](std::chrono::milliseconds deadline) { return Drain(deadline); }});
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  KV_RETURN_IF_ERROR(BuildDataServer());
  KV_RETURN_IF_ERROR(BuildAdminServer());
  serving_ = true;
  SetServing(true);
  return absl::OkStatus();
}

absl::Status KvServer::BuildDataServer() {
  KV_RETURN_IF_ERROR(Within("--listen: ", CheckUnixPathIsFree(config_.listen)));
  grpc::ServerBuilder builder;
  grpc::ResourceQuota quota("kvtrie");
  quota.Resize(config_.grpc_memory_bytes);
  builder.SetResourceQuota(quota);
  SetConnectionLimits(LimitsOf(config_), &builder);
  int port = 0;
  builder.AddListeningPort(config_.listen.WithPort(config_.listen.port),
                           grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(cache_service_.get());
  data_server_ = builder.BuildAndStart();
  if (data_server_ == nullptr || (port == 0 && !config_.listen.is_unix())) {
    return absl::UnavailableError(
        absl::StrCat("--listen: cannot listen on ", config_.listen.WithPort(config_.listen.port)));
  }
  addresses_.listen = config_.listen.WithPort(port);
  return absl::OkStatus();
}

absl::Status KvServer::BuildAdminServer() {
  KV_RETURN_IF_ERROR(Within("--admin_listen: ", CheckUnixPathIsFree(config_.admin_listen)));
  grpc::ServerBuilder builder;
  SetConnectionLimits(LimitsOf(config_), &builder);
  int port = 0;
  builder.AddListeningPort(config_.admin_listen.WithPort(config_.admin_listen.port),
                           grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(admin_service_.get());
  admin_server_ = builder.BuildAndStart();
  if (admin_server_ == nullptr || (port == 0 && !config_.admin_listen.is_unix())) {
    return absl::UnavailableError(
        absl::StrCat("--admin_listen: cannot listen on ",
                     config_.admin_listen.WithPort(config_.admin_listen.port)));
  }
  addresses_.admin = config_.admin_listen.WithPort(port);
  return absl::OkStatus();
}

void KvServer::LogStart() {
  const auto describe = [](const ListenAddress& configured, const std::string& bound) {
    const auto parsed = ParseListenAddress(bound);
    const auto families =
        parsed.ok() ? ReachableFamilies(configured, parsed->port) : std::vector<std::string>();
    return absl::StrCat(bound, " (", absl::StrJoin(families, " and "), ")");
  };
  spdlog::info("kvtrie {} serves: cache {}, admin {}, metrics {}, local socket {}", KVTRIE_VERSION,
               describe(config_.listen, addresses_.listen),
               describe(config_.admin_listen, addresses_.admin),
               describe(config_.http_listen, addresses_.metrics),
               addresses_.local_socket.empty() ? "off" : addresses_.local_socket);
}

void KvServer::SetServing(bool serving) {
  for (grpc::Server* server : {data_server_.get(), admin_server_.get()}) {
    if (server == nullptr) continue;
    auto* health = server->GetHealthCheckService();
    // The admin service goes on answering while the server drains.
    health->SetServingStatus(serving);
    health->SetServingStatus(v1::Cache::service_full_name(), serving);
    health->SetServingStatus(v1::Admin::service_full_name(), true);
  }
}

// Once a second: is the store well, and who has to know?
void KvServer::Tick() {
  last_tick_ns_ = clock_.Monotonic().count();
  if (!serving_ || draining_) return;
  watchdog_->Tick();
  const std::string complaint = watchdog_->Complaint();
  std::vector<std::string> degraded = engine_->Stats().degraded;

  absl::MutexLock lock(&mutex_);
  if (const bool healthy = complaint.empty(); healthy != last_healthy_) {
    last_healthy_ = healthy;
    SetServing(healthy);
    if (healthy) {
      spdlog::info("work that waits for the disk moves again: healthy");
    } else {
      spdlog::error("{}: not healthy", complaint);
    }
  }
  if (degraded != last_degraded_) {
    if (degraded.empty()) {
      spdlog::info("the store serves in full again");
    } else {
      spdlog::warn("the store does not serve in full: {}", absl::StrJoin(degraded, ", "));
    }
    last_degraded_ = std::move(degraded);
  }
}

ProbeAnswer KvServer::Live() const {
  const auto since = clock_.Monotonic() - Clock::Duration(last_tick_ns_.load());
  if (since < kTickMax) return {true, "ok"};
  return {false,
          absl::StrCat("the server has not ticked for ",
                       std::chrono::duration_cast<std::chrono::seconds>(since).count(), " s")};
}

ProbeAnswer KvServer::Ready() const {
  if (draining_) return {false, "draining"};
  if (!serving_) {
    absl::MutexLock lock(&mutex_);
    return {false, start_progress_};
  }
  if (const std::string complaint = watchdog_->Complaint(); !complaint.empty()) {
    return {false, complaint};
  }
  const std::vector<std::string> degraded = engine_->Stats().degraded;
  return {true, degraded.empty() ? "ok" : absl::StrCat("ok, but: ", absl::StrJoin(degraded, ", "))};
}

std::pair<std::string, std::vector<std::string>> KvServer::State() const {
  std::vector<std::string> reasons = engine_->Stats().degraded;
  if (const std::string complaint = watchdog_->Complaint(); !complaint.empty()) {
    reasons.insert(reasons.begin(), complaint);
  }
  if (draining_) return {"draining", std::move(reasons)};
  if (!serving_) return {"starting", std::move(reasons)};
  return {reasons.empty() ? "serving" : "read-only", std::move(reasons)};
}

std::vector<prometheus::MetricFamily> KvServer::CollectMetrics() const {
  std::vector<prometheus::MetricFamily> families = rpc_metrics_.Collect();
  const auto add = [&families](std::vector<prometheus::MetricFamily> more) {
    families.insert(families.end(), std::make_move_iterator(more.begin()),
                    std::make_move_iterator(more.end()));
  };
  add(ToMetrics(ServerGauges{
      .open_streams = streams_.stream_count(),
      .stalled_streams_total = streams_.stalled_total(),
      .refused_streams_total = streams_.refused_total(),
      .stream_memory_bytes = stream_budget_.used_bytes() + resident_budget_.used_bytes(),
      .lane_connections = serving_ && lane_ != nullptr ? lane_->connection_count() : 0,
      .ready = Ready().ok,
      .uptime_seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count()}));
  if (const Engine* engine = open_engine_) add(ToMetrics(engine->Stats()));
  if (workers_ != nullptr) add(ToMetrics(workers_->Stats()));
  return families;
}

bool KvServer::Drain(std::chrono::milliseconds deadline) {
  if (!draining_.exchange(true)) {
    spdlog::info("draining: no new puts and streams");
    SetServing(false);
    streams_.Drain();
  }
  return engine_->Drain(deadline);
}

void KvServer::Stop(std::chrono::milliseconds grace) {
  if (stopped_.exchange(true)) return;
  const auto begin = std::chrono::system_clock::now();
  if (engine_ != nullptr && serving_) {
    const bool clean = Drain(grace / 2);
    if (!clean) spdlog::warn("puts were still running after {} ms", (grace / 2).count());
  }
  // Streams that are not done by now wait for clients that may never come back.
  streams_.AbortAll(absl::UnavailableError("the server stops; use another one"));
  // Nor is a worker waited for that hangs.
  if (workers_ != nullptr) workers_->Stop();
  if (data_server_ != nullptr) data_server_->Shutdown(begin + grace * 3 / 4);
  if (admin_server_ != nullptr) admin_server_->Shutdown(begin + grace * 3 / 4);
  serving_ = false;
  lane_.reset();
  spdlog::info("stopped after {} ms", std::chrono::duration_cast<std::chrono::milliseconds>(
                                          std::chrono::system_clock::now() - begin)
                                          .count());
}

}  // namespace kvtrie
