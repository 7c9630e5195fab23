#include "client/worker_pool.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/deadline.h"

namespace kvtrie {
namespace {

constexpr std::chrono::milliseconds kPauseMax{10'000};
constexpr std::chrono::milliseconds kBusyMax{2'000};
// Other profiles have to go out of use there first.
constexpr std::chrono::milliseconds kNoRoom{10'000};
// So long is one worker waited for, before the others have their turn.
constexpr std::chrono::milliseconds kLook{200};
constexpr int kReceiveBytesMax = 8 << 20;
constexpr int kReconnectMinMs = 50;
constexpr int kReconnectMaxMs = 1000;
constexpr int kConnectMs = 2000;
constexpr int kWindowBytes = 4 << 20;
constexpr int kFrameBytesMax = 1 << 20;

// round_robin, though there is one address: pick_first does not look at health.
constexpr char kServiceConfig[] = R"({"loadBalancingConfig":[{"round_robin":{}}],)"
                                  R"("healthCheckConfig":{"serviceName":"kvtrie.v1.Codec"}})";

std::shared_ptr<grpc::Channel> Connect(const std::string& target, const WorkerOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kReceiveBytesMax);
  arguments.SetServiceConfigJSON(kServiceConfig);
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kWindowBytes);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kFrameBytesMax);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectMinMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMaxMs);
  return grpc::CreateCustomChannel(
      target, options.credentials ? options.credentials : grpc::InsecureChannelCredentials(),
      arguments);
}

}  // namespace

absl::Status WorkerOptions::Validate() const {
  if (targets.empty()) {
    return absl::InvalidArgumentError("workers: name at least one, as host:port");
  }
  for (const std::string& target : targets) {
    absl::string_view rest = target;
    if (absl::StartsWith(target, "unix:")) continue;
    absl::ConsumePrefix(&rest, kNamePrefix);
    const std::size_t colon = rest.rfind(':');
    if (colon == absl::string_view::npos || colon == 0 || colon + 1 == rest.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "workers: \"", target, "\" is not host:port, unix:/path or dns:///name:port"));
    }
  }
  if (tenant.size() > 64) {
    return absl::InvalidArgumentError(
        absl::StrCat("workers: a tenant of ", tenant.size(), " bytes is over the limit of 64"));
  }
  if (timeout.count() <= 0 || timeout > kTimeoutMax) {
    return absl::InvalidArgumentError(absl::StrCat("workers: timeout: ", timeout.count(),
                                                   " ms; above 0, and at most ",
                                                   kTimeoutMax.count(), " minutes"));
  }
  return absl::OkStatus();
}

WorkerPool::WorkerPool(const WorkerOptions& options, Clock& clock)
    : options_(options), clock_(clock), addresses_(options.targets, options.resolve_period) {
  Update();
  watcher_ = std::thread([this] { Watch(); });
}

WorkerPool::~WorkerPool() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  watcher_.join();
}

bool WorkerPool::stopping() const {
  absl::MutexLock lock(&mutex_);
  return stopping_;
}

bool WorkerPool::HasUnreachable() const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const Entry& entry) { return entry.unreachable; });
}

void WorkerPool::Watch() {
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      const auto woken = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopping_ || HasUnreachable();
      };
      mutex_.Await(absl::Condition(&woken));
      if (stopping_) return;
    }
    AwaitWorkers();
  }
}

// gRPC reads its sockets on the threads that call it, so that somebody has to for a connection to
// come back.
void WorkerPool::AwaitWorkers() {
  std::vector<std::shared_ptr<Worker>> unreachable;
  {
    absl::MutexLock lock(&mutex_);
    for (const Entry& entry : entries_) {
      if (entry.unreachable) unreachable.push_back(entry.worker);
    }
  }
  for (const std::shared_ptr<Worker>& worker : unreachable) {
    if (stopping()) return;
    if (!worker->channel->WaitForConnected(Deadline::After(kLook).ToGrpc())) continue;
    absl::MutexLock lock(&mutex_);
    for (Entry& entry : entries_) {
      if (entry.worker != worker) continue;
      entry.unreachable = false;
      entry.failures = 0;
    }
  }
}

void WorkerPool::Update() {
  // Those that are left over end without the lock.
  std::vector<Entry> entries;
  absl::MutexLock lock(&mutex_);
  const auto known = addresses_.After(addresses_version_);
  if (!known.has_value()) return;
  addresses_version_ = known->version;
  for (const std::string& target : known->addresses) {
    const auto kept = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
      return entry.worker->target == target;
    });
    if (kept != entries_.end()) {
      entries.push_back(*kept);
      continue;
    }
    Entry& added = entries.emplace_back();
    added.worker = std::make_shared<Worker>();
    added.worker->target = target;
    added.worker->channel = Connect(target, options_);
  }
  entries_.swap(entries);
}

void WorkerPool::HasNoRoom(Worker& worker, const ProfileId& profile) {
  absl::MutexLock lock(&worker.mutex);
  worker.no_room_until[profile] = clock_.Monotonic() + kNoRoom;
}

std::shared_ptr<WorkerPool::Worker> WorkerPool::Take(const Worker* except,
                                                     const ProfileId& profile) {
  Update();
  const Clock::Duration now = clock_.Monotonic();
  absl::MutexLock lock(&mutex_);
  Entry* best = nullptr;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[(next_ + i) % entries_.size()];
    if (entry.worker.get() == except || !entry.MayBeAsked(now)) continue;
    {
      absl::MutexLock worker_lock(&entry.worker->mutex);
      const auto no_room = entry.worker->no_room_until.find(profile);
      if (no_room != entry.worker->no_room_until.end() && no_room->second > now) continue;
    }
    if (best == nullptr || entry.under_way < best->under_way) best = &entry;
  }
  ++next_;
  if (best == nullptr) return nullptr;
  ++best->under_way;
  // Whoever comes next waits for what this one finds, should it fail again.
  if (best->failures > 0) best->left_alone_until = now + options_.pause;
  return best->worker;
}

void WorkerPool::Done(const std::shared_ptr<Worker>& worker, Outcome outcome,
                      std::chrono::milliseconds busy_for) {
  const Clock::Duration now = clock_.Monotonic();
  absl::MutexLock lock(&mutex_);
  for (Entry& entry : entries_) {
    if (entry.worker != worker) continue;
    --entry.under_way;
    switch (outcome) {
      case Outcome::kWell:
        entry.failures = 0;
        entry.left_alone_until = Clock::Duration::zero();
        break;
      case Outcome::kBusy:
        entry.StayBusy(now + std::min(kBusyMax, busy_for.count() > 0 ? busy_for : options_.pause));
        break;
      case Outcome::kUnreachable:
        entry.unreachable = true;
        // The connection may be a good one, over which it refuses all calls.
        entry.StayBusy(now + std::min(kBusyMax, options_.pause));
        break;
      case Outcome::kFailed: {
        const auto doublings = std::min<std::uint64_t>(entry.failures++, 16);
        entry.left_alone_until =
            now + std::min<Clock::Duration>(kPauseMax, options_.pause * (1 << doublings));
        break;
      }
    }
    return;
  }
}

WorkerPool::Count WorkerPool::Workers() {
  Update();
  const Clock::Duration now = clock_.Monotonic();
  absl::MutexLock lock(&mutex_);
  Count count{.usable = 0, .all = entries_.size()};
  for (const Entry& entry : entries_) count.usable += entry.MayBeAsked(now) ? 1 : 0;
  return count;
}

}  // namespace kvtrie
