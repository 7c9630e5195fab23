#include "server/worker/codec_queue.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"

namespace kvtrie {
namespace {

// So far behind its front is a tenant's queue searched for jobs that share a batch.
constexpr std::size_t kLookAhead = 64;

// So much of what was coded counts for the speed, in times of what makes it known: a few large
// blocks say more than many small ones.
constexpr double kSpeedMemory = 16;

constexpr std::chrono::milliseconds kRetryAfterMin{20};

// Tenants name themselves: with all their shares the queue has so many times its places at most.
constexpr std::size_t kOverfull = 2;

}  // namespace

CodecQueue::CodecQueue(const CodecQueueOptions& options, Code code, Clock& clock)
    : options_(options), code_(std::move(code)), clock_(clock) {
  KV_CHECK(options.threads > 0);
  const auto count = static_cast<std::size_t>(options.threads);
  {
    absl::MutexLock lock(&mutex_);
    running_since_.resize(count);
  }
  for (std::size_t i = 0; i < count; ++i) threads_.emplace_back([this, i] { Run(i); });
}

CodecQueue::~CodecQueue() {
  Jobs left;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    for (auto& [_, tenant] : tenants_) {
      std::move(tenant.waiting.begin(), tenant.waiting.end(), std::back_inserter(left));
    }
    tenants_.clear();
    waiting_bytes_ = 0;
    stats_.waiting_jobs = 0;
  }
  EndAll(std::move(left), absl::UnavailableError("the worker stops; use another one"));
  for (std::thread& thread : threads_) thread.join();
}

std::uint64_t CodecQueue::BytesOf(const CodecJob& job) {
  return (1 + job.references.size()) * job.model->geometry.raw_block_bytes();
}

// Tenants are served alike: until the job's turn has come, each of the others gets as much as its
// tenant does, at most.
std::uint64_t CodecQueue::BytesBefore(const CodecJob& job) const {
  const auto own = tenants_.find(job.tenant);
  const std::uint64_t own_bytes = own == tenants_.end() ? 0 : own->second.waiting_bytes;
  std::uint64_t bytes = own_bytes;
  for (const auto& [name, tenant] : tenants_) {
    if (name != job.tenant) bytes += std::min(tenant.waiting_bytes, own_bytes + BytesOf(job));
  }
  return bytes;
}

std::optional<CodecQueue::Refusal> CodecQueue::Admit(const CodecJob& job) {
  if (stopping_ || draining_) {
    return Refusal{absl::UnavailableError("the worker drains; use another one")};
  }
  const std::chrono::milliseconds wait = TimeOf(BytesBefore(job));
  const auto refuse = [&](const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    ++stats_.refused_total;
    return Refusal{absl::ResourceExhaustedError(why), std::max(wait, kRetryAfterMin)};
  };
  if (clock_.Monotonic() + wait > job.deadline) {
    return refuse(absl::StrCat("work for ", wait.count(),
                               " ms waits already, which is longer than the item may wait"));
  }
  if (stats_.waiting_jobs < options_.jobs_max) return std::nullopt;
  // Room that others do not use may be used, but not kept from them.
  const auto own = tenants_.find(job.tenant);
  const std::size_t own_jobs = own == tenants_.end() ? 0 : own->second.waiting.size();
  const std::size_t tenants = tenants_.size() + (own == tenants_.end() ? 1 : 0);
  const bool has_share = own_jobs < options_.jobs_max / tenants;
  if (has_share && stats_.waiting_jobs < kOverfull * options_.jobs_max) return std::nullopt;
  return refuse(absl::StrCat(stats_.waiting_jobs, " items wait already, of ", options_.jobs_max));
}

std::optional<CodecQueue::Refusal> CodecQueue::Refuses(const CodecJob& job) {
  absl::MutexLock lock(&mutex_);
  return Admit(job);
}

void CodecQueue::Submit(std::unique_ptr<CodecJob> job) {
  {
    absl::MutexLock lock(&mutex_);
    job->submitted = clock_.Monotonic();
    const auto refusal = Admit(*job);
    if (!refusal.has_value()) {
      auto [tenant, is_new] = tenants_.try_emplace(job->tenant);
      if (is_new) tenant->second.served_bytes = served_floor_;
      tenant->second.waiting_bytes += BytesOf(*job);
      waiting_bytes_ += BytesOf(*job);
      ++stats_.waiting_jobs;
      tenant->second.waiting.push_back(std::move(job));
      return;
    }
    job->status = refusal->status;
    job->retry_after = refusal->retry_after;
  }
  auto on_done = std::move(job->on_done);
  on_done(std::move(job));
}

CodecQueue::Tenants::iterator CodecQueue::NextTenant() {
  return std::min_element(tenants_.begin(), tenants_.end(), [](const auto& a, const auto& b) {
    return a.second.served_bytes < b.second.served_bytes;
  });
}

std::unique_ptr<CodecJob> CodecQueue::Take(Tenant& tenant, std::size_t at) {
  const auto place = tenant.waiting.begin() + static_cast<std::ptrdiff_t>(at);
  std::unique_ptr<CodecJob> job = std::move(*place);
  tenant.waiting.erase(place);
  tenant.waiting_bytes -= BytesOf(*job);
  waiting_bytes_ -= BytesOf(*job);
  --stats_.waiting_jobs;
  return job;
}

void CodecQueue::DropIdleTenants() {
  for (auto it = tenants_.begin(); it != tenants_.end();) {
    if (it->second.waiting.empty()) {
      it = tenants_.erase(it);
    } else {
      ++it;
    }
  }
}

void CodecQueue::TakeLike(const CodecJob& first, Tenant& tenant, std::size_t* tokens, Jobs* batch) {
  for (std::size_t at = 0; at < std::min(tenant.waiting.size(), kLookAhead);) {
    const CodecJob& job = *tenant.waiting[at];
    const bool fits = batch->empty() || *tokens + job.tokens.size() <= options_.batch_tokens;
    if (!fits || !job.SharesBatch(first)) {
      if (!fits) return;
      ++at;
      continue;
    }
    *tokens += job.tokens.size();
    tenant.served_bytes += BytesOf(job);
    batch->push_back(Take(tenant, at));
  }
}

void CodecQueue::Expire(Jobs* expired) {
  const Clock::Duration now = clock_.Monotonic();
  for (auto& [_, tenant] : tenants_) {
    for (std::size_t at = 0; at < tenant.waiting.size();) {
      const CodecJob& job = *tenant.waiting[at];
      const bool is_late = job.deadline <= now;
      if (!is_late && !job.is_abandoned()) {
        ++at;
        continue;
      }
      if (is_late) ++stats_.expired_total;
      expired->push_back(Take(tenant, at));
    }
  }
  DropIdleTenants();
}

void CodecQueue::TakeBatch(Jobs* batch, Jobs* expired) {
  Expire(expired);
  const auto chosen = NextTenant();
  if (chosen == tenants_.end()) return;
  served_floor_ = std::max(served_floor_, chosen->second.served_bytes);
  const CodecJob& first = *chosen->second.waiting.front();
  std::size_t tokens = 0;
  TakeLike(first, chosen->second, &tokens, batch);
  for (auto it = tenants_.begin(); it != tenants_.end(); ++it) {
    if (it != chosen) TakeLike(first, it->second, &tokens, batch);
  }
  DropIdleTenants();
}

void CodecQueue::Run(std::size_t thread) {
  while (true) {
    Jobs taken, expired;
    Clock::Duration started;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &CodecQueue::HasWork));
      if (stopping_) return;
      TakeBatch(&taken, &expired);
      started = clock_.Monotonic();
      if (!taken.empty()) running_since_[thread] = started;
      stats_.running_jobs += taken.size();
    }
    EndAll(std::move(expired), absl::DeadlineExceededError("waited for longer than it may"));
    if (taken.empty()) continue;

    std::vector<std::unique_ptr<CodecJob>> batch(std::make_move_iterator(taken.begin()),
                                                 std::make_move_iterator(taken.end()));
    code_(batch);
    const Clock::Duration coding = clock_.Monotonic() - started;
    std::uint64_t raw_bytes = 0, bytes = 0;
    bool all_well = true;
    for (const std::unique_ptr<CodecJob>& job : batch) {
      raw_bytes += job->model->geometry.raw_block_bytes();
      bytes += BytesOf(*job);
      all_well = all_well && job->status.ok();
      job->queued = started - job->submitted;
      job->coding = coding;
      job->batch_blocks = static_cast<std::uint32_t>(batch.size());
    }
    {
      absl::MutexLock lock(&mutex_);
      running_since_[thread] = Clock::Duration::zero();
      stats_.running_jobs -= batch.size();
      ++stats_.batches_total;
      stats_.jobs_total += batch.size();
      stats_.bytes_total += raw_bytes;
      const double seconds = std::chrono::duration<double>(coding).count();
      stats_.coding_seconds_total += seconds;
      // What fails, fails fast.
      if (all_well) LearnSpeed(bytes, seconds);
    }
    for (std::unique_ptr<CodecJob>& job : batch) {
      auto on_done = std::move(job->on_done);
      on_done(std::move(job));
    }
  }
}

void CodecQueue::LearnSpeed(std::uint64_t bytes, double seconds) {
  coded_bytes_ += static_cast<double>(bytes);
  coded_seconds_ += seconds;
  const double most = kSpeedMemory * static_cast<double>(options_.speed_bytes);
  if (coded_bytes_ <= most) return;
  coded_seconds_ *= most / coded_bytes_;
  coded_bytes_ = most;
}

std::chrono::milliseconds CodecQueue::TimeOf(std::uint64_t bytes) const {
  if (coded_bytes_ < static_cast<double>(options_.speed_bytes)) return std::chrono::milliseconds(0);
  const double seconds = static_cast<double>(bytes) * coded_seconds_ /
                         (coded_bytes_ * static_cast<double>(options_.threads));
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::min(seconds, 3600.0) * 1e3));
}

void CodecQueue::EndAll(Jobs jobs, const absl::Status& status) {
  for (std::unique_ptr<CodecJob>& job : jobs) {
    job->status = status;
    job->queued = clock_.Monotonic() - job->submitted;
    auto on_done = std::move(job->on_done);
    on_done(std::move(job));
  }
}

void CodecQueue::Tick() {
  Jobs expired;
  {
    absl::MutexLock lock(&mutex_);
    Expire(&expired);
  }
  EndAll(std::move(expired), absl::DeadlineExceededError("waited for longer than it may"));
}

void CodecQueue::Drain() {
  absl::MutexLock lock(&mutex_);
  draining_ = true;
}

Clock::Duration CodecQueue::LongestRunning() const {
  const Clock::Duration now = clock_.Monotonic();
  absl::MutexLock lock(&mutex_);
  Clock::Duration longest{};
  for (const Clock::Duration since : running_since_) {
    if (since != Clock::Duration::zero()) longest = std::max(longest, now - since);
  }
  return longest;
}

CodecQueueStats CodecQueue::Stats() const {
  absl::MutexLock lock(&mutex_);
  CodecQueueStats stats = stats_;
  for (const auto& [name, tenant] : tenants_) {
    stats.tenants.push_back({name, tenant.waiting.size(), tenant.waiting_bytes});
  }
  stats.expected_wait = TimeOf(waiting_bytes_);
  return stats;
}

}  // namespace kvtrie
