#include "server/worker/kv_worker.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/status_translation.h"
#include "server/wire_conversion.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

constexpr std::chrono::milliseconds kTickPeriod{1000};
// The thread that ticks does short work only: when it has not ticked for so long, the process is
// broken.
constexpr std::chrono::seconds kTickMax{30};

// What makes the processor's products fast, and no more.
constexpr std::size_t kCpuBatchTokens = 256;
// A device has thousands of blocks' lanes to fill.
constexpr std::size_t kDeviceBatchTokens = 16'384;

std::int64_t Seconds(Clock::Duration duration) {
  return std::chrono::duration_cast<std::chrono::seconds>(duration).count();
}

}  // namespace

KvWorker::KvWorker(const WorkerConfig& config, std::unique_ptr<const CodecBackend> backend,
                   Clock& clock)
    : config_(config),
      clock_(clock),
      started_(std::chrono::steady_clock::now()),
      backend_(std::move(backend)),
      streams_(config.streams_max, config.stream_stall_limit, clock),
      memory_(config.memory_bytes),
      shelf_(config.profile_memory_bytes, clock),
      work_(*backend_, shelf_, config.codec_memory_bytes),
      timer_(std::make_unique<TimerThread>()),
      chores_(std::make_unique<TimerThread>()),
      prober_(std::make_unique<TimerThread>()) {}

absl::StatusOr<std::unique_ptr<KvWorker>> KvWorker::Start(
    const WorkerConfig& config, std::unique_ptr<const CodecBackend> backend, Clock& clock) {
  std::unique_ptr<KvWorker> worker(new KvWorker(config, std::move(backend), clock));
  KV_RETURN_IF_ERROR(worker->StartHttp());
  KV_RETURN_IF_ERROR(worker->StartServices());
  spdlog::info("kvtrie {} codes on {} ({}): codec {}, metrics {}", KVTRIE_VERSION,
               std::string(worker->backend_->name()), worker->backend_->device(),
               worker->addresses_.listen, worker->addresses_.metrics);
  return worker;
}

KvWorker::~KvWorker() {
  Stop(std::chrono::milliseconds(0));
  fit_turn_.AwaitFree(absl::InfiniteDuration());
  http_.reset();
  timer_->Stop();
  chores_->Stop();
  prober_->Stop();
  queue_.reset();
}

absl::Status KvWorker::StartHttp() {
  HttpHandlers handlers{.metrics = [this] { return CollectMetrics(); },
                        .live = [this] { return Live(); },
                        .ready = [this] { return Ready(); }};
  last_tick_ns_ = clock_.Monotonic().count();
  watchdog_ = std::make_unique<Watchdog>(
      [this](std::function<void()> done) {
        prober_->Post([this, done = std::move(done)] {
          const absl::Status probed = backend_->Probe();
          {
            absl::MutexLock lock(&mutex_);
            device_fault_ = std::string(probed.message());
          }
          done();
        });
        return true;
      },
      config_.stuck_limit, clock_);
  CodecQueueOptions options = config_.queue;
  if (options.batch_tokens == 0) {
    options.batch_tokens = backend_->name() == "cpu" ? kCpuBatchTokens : kDeviceBatchTokens;
  }
  queue_ = std::make_unique<CodecQueue>(
      options, [this](std::span<const std::unique_ptr<CodecJob>> jobs) { work_.Run(jobs); },
      clock_);
  KV_ASSIGN_OR_RETURN(http_, HttpEndpoint::Start(config_.http_listen, std::move(handlers)));
  addresses_.metrics = config_.http_listen.WithPort(http_->port());
  return absl::OkStatus();
}

absl::Status KvWorker::StartServices() {
  KV_RETURN_IF_ERROR(Within("--listen: ", CheckUnixPathIsFree(config_.listen)));
  context_.reset(new WorkerContext{
      .host = {.queue = *queue_,
               .memory = memory_,
               .clock = clock_,
               .limits = config_.limits,
               .post = [this](std::function<void()> work) { chores_->Post(std::move(work)); }},
      .shelf = shelf_,
      .streams = streams_,
      .metrics = rpc_metrics_,
      .chores = *chores_,
      .describe = [this] { return Describe(); },
      .fit_turn = fit_turn_});
  service_ = std::make_unique<CodecService>(*context_);
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  grpc::ResourceQuota quota("kvtrie-worker");
  quota.Resize(config_.grpc_memory_bytes);
  builder.SetResourceQuota(quota);
  SetConnectionLimits(config_.connections, &builder);
  int port = 0;
  builder.AddListeningPort(config_.listen.WithPort(config_.listen.port),
                           grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(service_.get());
  server_ = builder.BuildAndStart();
  if (server_ == nullptr || (port == 0 && !config_.listen.is_unix())) {
    return absl::UnavailableError(
        absl::StrCat("--listen: cannot listen on ", config_.listen.WithPort(config_.listen.port)));
  }
  addresses_.listen = config_.listen.WithPort(port);
  serving_ = true;
  SetServing(true);
  timer_->Every(kTickPeriod, [this] { Tick(); });
  timer_->Every(streams_.tick_period(), [this] {
    if (const std::size_t ended = streams_.Tick(); ended > 0) {
      stall_log_.Warn("ended {} stream(s) whose caller made no progress", ended);
    }
  });
  return absl::OkStatus();
}

void KvWorker::SetServing(bool serving) {
  auto* const health = server_->GetHealthCheckService();
  health->SetServingStatus(serving);
  health->SetServingStatus(v1::Codec::service_full_name(), serving);
}

std::string KvWorker::Complaint() const {
  if (const auto running = queue_->LongestRunning(); running > config_.stuck_limit) {
    return absl::StrCat("a batch has been coded for ", Seconds(running), " s");
  }
  if (!watchdog_->Complaint().empty()) {
    return absl::StrCat("the device has not answered for more than ", Seconds(config_.stuck_limit),
                        " s");
  }
  absl::MutexLock lock(&mutex_);
  return device_fault_;
}

// Once a second: does the device still work, and who has to know?
void KvWorker::Tick() {
  last_tick_ns_ = clock_.Monotonic().count();
  queue_->Tick();
  if (!serving_ || draining_) return;
  watchdog_->Tick();
  const std::string complaint = Complaint();
  absl::MutexLock lock(&mutex_);
  const bool healthy = complaint.empty();
  if (healthy == last_healthy_ || draining_) return;
  last_healthy_ = healthy;
  SetServing(healthy);
  if (healthy) {
    spdlog::info("the device works again: healthy");
  } else {
    spdlog::error("{}: not healthy", complaint);
  }
}

ProbeAnswer KvWorker::Live() const {
  const auto since = clock_.Monotonic() - Clock::Duration(last_tick_ns_.load());
  if (since < kTickMax) return {true, "ok"};
  return {false, absl::StrCat("the worker has not ticked for ", Seconds(since), " s")};
}

ProbeAnswer KvWorker::Ready() const {
  if (draining_) return {false, "draining"};
  if (!serving_) return {false, "starting"};
  if (const std::string complaint = Complaint(); !complaint.empty()) return {false, complaint};
  return {true, "ok"};
}

WorkerGauges KvWorker::Gauges() const {
  return {.backend = std::string(backend_->name()),
          .ready = Ready().ok,
          .open_streams = streams_.stream_count(),
          .stalled_streams_total = streams_.stalled_total(),
          .refused_streams_total = streams_.refused_total(),
          .memory_bytes = memory_.used_bytes(),
          .waiting_for_memory = memory_.waiting(),
          .fit_bytes = fit_turn_.held_bytes(),
          .shelf = shelf_.Stats(),
          .uptime_seconds =
              std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count()};
}

std::vector<prometheus::MetricFamily> KvWorker::CollectMetrics() const {
  std::vector<prometheus::MetricFamily> families = rpc_metrics_.Collect();
  auto own = ToMetrics(Gauges(), queue_->Stats(), work_.Stats());
  families.insert(families.end(), std::make_move_iterator(own.begin()),
                  std::make_move_iterator(own.end()));
  return families;
}

v1::DescribeResponse KvWorker::Describe() const {
  v1::DescribeResponse response;
  const WorkerGauges gauges = Gauges();
  const CodecQueueStats queue = queue_->Stats();
  const std::string complaint = Complaint();
  response.set_version(KVTRIE_VERSION);
  response.set_state(draining_ ? "draining" : complaint.empty() ? "serving" : "stuck");
  if (!complaint.empty()) response.add_reasons(complaint);
  response.set_backend(gauges.backend);
  response.set_device(backend_->device());
  response.set_uptime_seconds(static_cast<std::uint64_t>(gauges.uptime_seconds));
  response.set_coding_threads(static_cast<std::uint32_t>(config_.queue.threads));
  response.set_item_bytes_max(config_.limits.item_bytes_max);
  response.set_memory_bytes(gauges.memory_bytes);
  response.set_memory_bytes_max(memory_.limit_bytes());
  response.set_queued_items(queue.waiting_jobs);
  response.set_queued_items_max(config_.queue.jobs_max);
  response.set_expected_wait_ms(static_cast<std::uint32_t>(queue.expected_wait.count()));
  for (const CodecQueueStats::Tenant& tenant : queue.tenants) {
    v1::TenantQueue* const entry = response.add_tenants();
    entry->set_tenant(tenant.name);
    entry->set_items(tenant.jobs);
    entry->set_raw_bytes(tenant.bytes);
  }
  for (const ProfileShelf::Held& held : shelf_.List()) {
    v1::HeldProfile* const entry = response.add_profiles();
    entry->set_profile_id(std::string(held.id.view()));
    entry->set_profile_bytes(held.header.profile_bytes());
    for (const ProfileLevel& level : held.header.levels) {
      entry->add_qualities(ToProto(level.quality));
    }
  }
  response.set_profile_bytes_max(shelf_.bytes_max());
  for (const auto& [name, value] : CountersByName(gauges, queue, work_.Stats())) {
    (*response.mutable_counters())[name] = value;
  }
  return response;
}

void KvWorker::Drain() {
  if (draining_.exchange(true)) return;
  spdlog::info("draining: no new items and streams");
  if (server_ != nullptr) {
    absl::MutexLock lock(&mutex_);  // nobody says the opposite any more
    SetServing(false);
  }
  queue_->Drain();
  streams_.Drain();
}

void KvWorker::Stop(std::chrono::milliseconds grace) {
  if (stopped_.exchange(true)) return;
  const auto begin = std::chrono::system_clock::now();
  if (serving_) Drain();
  if (server_ != nullptr) {
    // Streams end by themselves once they are answered.
    streams_.AwaitNone(grace * 3 / 4);
    streams_.AbortAll(absl::UnavailableError("the worker stops; use another one"));
    server_->Shutdown(begin + grace);
  }
  serving_ = false;
  spdlog::info("stopped after {} ms", std::chrono::duration_cast<std::chrono::milliseconds>(
                                          std::chrono::system_clock::now() - begin)
                                          .count());
}

}  // namespace kvtrie
