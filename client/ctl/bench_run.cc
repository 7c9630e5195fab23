#include "client/ctl/bench_run.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/ctl/bench_workload.h"
#include "client/ctl/process_cpu.h"
#include "client/status_from_grpc.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

using SteadyClock = std::chrono::steady_clock;

// A session is a path of so many blocks; a batch of so many is one prompt.
constexpr std::uint64_t kSessionBlocks = 16;
// Lookups are for prompts of 4,096 tokens, in a model whose blocks cost little to store.
constexpr std::uint64_t kLookupBlocks = 256;
constexpr std::uint64_t kLookupBlockBytes = 1024;
constexpr std::uint64_t kLookupSessions = std::uint64_t{1} << 40;
constexpr std::uint64_t kWarmupSession = std::uint64_t{1} << 41;
constexpr std::uint64_t kMixedSessions = std::uint64_t{1} << 42;
// mixed: one request in so many is a new prompt.
constexpr std::uint64_t kMixedPutEvery = 4;
constexpr std::size_t kBlockAlignment = 64;

struct BlockRef {
  std::uint64_t session;
  std::uint32_t index;
};

// Requests of one kind, as one thread made them.
struct Samples {
  std::vector<double> latency_us;
  std::uint64_t blocks = 0;
  std::uint64_t frame_bytes = 0;  // encoded
};

// One thread with its connections and its memory.
class Worker {
 public:
  Worker(const BenchOptions& options, int index) : options_(options), index_(index) {}

  absl::Status Open(const ModelSpec& spec, std::uint64_t buffer_blocks) {
    ClientOptions client_options = options_.client;
    const std::uint64_t stride = Stride(spec);
    client_options.local_region_bytes = buffer_blocks * stride + (std::size_t{8} << 20);
    KV_ASSIGN_OR_RETURN(client_, Client::Create(std::move(client_options)));
    KV_ASSIGN_OR_RETURN(model_, client_->RegisterModel(spec));
    const bool coded = options_.quality != Quality::kExact;
    if (coded && options_.quality != Quality::kUnrated && model_.profile.empty()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "nothing can be coded at this level: the server has no profile for the model ", spec.name,
          ", revision ", spec.weights_revision,
          " (kvtrie profile put); exact and unrated need none"));
    }
    if (client_->local_region() != nullptr) {
      KV_ASSIGN_OR_RETURN(region_buffer_,
                          client_->local_region()->Allocate(buffer_blocks * stride));
      memory_ = region_buffer_.bytes();
    } else {
      private_memory_.reset(new (std::align_val_t{4096}) std::byte[buffer_blocks * stride]);
      memory_ = {private_memory_.get(), buffer_blocks * stride};
    }
    stride_ = stride;
    FillIncompressible(memory_, options_.seed + static_cast<std::uint64_t>(index_));
    return absl::OkStatus();
  }

  // Memory of the i-th block of a request.
  std::span<std::byte> Block(std::size_t i) {
    return memory_.subspan(i * stride_, model_.raw_block_bytes);
  }

  // Blocks of one request may belong to several sessions; each run of one is a path.
  absl::Status Put(std::span<const BlockRef> blocks, Samples* samples) {
    std::vector<std::vector<TokenId>> tokens;
    std::vector<std::vector<std::span<const std::byte>>> bytes;
    std::vector<PutPath> paths;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      StampBlock(Block(i), blocks[i].session, blocks[i].index);
      if (i == 0 || blocks[i].session != blocks[i - 1].session) {
        bytes.emplace_back();
        paths.emplace_back();
        paths.back().first_block = blocks[i].index;
        paths.back().eager = true;
        paths.back().durable = options_.durable;
        paths.back().quality = options_.quality;
        tokens.emplace_back();
      }
      bytes.back().push_back(Block(i));
      const std::size_t path_blocks = blocks[i].index + 1;
      if (i + 1 == blocks.size() || blocks[i + 1].session != blocks[i].session) {
        tokens.back() = BenchTokens(options_.seed, blocks[i].session, path_blocks);
      }
    }
    for (std::size_t i = 0; i < paths.size(); ++i) {
      paths[i].path.model = model_.id;
      paths[i].path.tokens = tokens[i];
      paths[i].blocks = bytes[i];
    }
    const auto began = SteadyClock::now();
    const std::vector<PutReport> reports = client_->Put(paths);
    const auto ended = SteadyClock::now();
    for (const PutReport& report : reports) {
      for (const PutBlockReport& block : report.blocks) {
        KV_RETURN_IF_ERROR(block.status);
        samples->frame_bytes += block.frame_bytes;
      }
      if (report.duplicate_blocks > 0) {
        return absl::FailedPreconditionError("these blocks are stored already: use another --seed");
      }
    }
    Count(began, ended, blocks.size(), samples);
    return absl::OkStatus();
  }

  absl::Status Get(std::span<const BlockRef> blocks, std::span<const TrieNodeId> nodes,
                   Samples* samples) {
    const bool exact = options_.quality == Quality::kExact;
    std::vector<std::vector<TokenId>> tokens;
    std::vector<FetchTarget> targets;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      StampBlock(Block(i), ~blocks[i].session, blocks[i].index);  // what was there counts as wrong
      FetchTarget& target = targets.emplace_back();
      target.node = nodes[i];
      target.raw = Block(i);
      if (exact) continue;
      tokens.push_back(BenchTokens(options_.seed, blocks[i].session, blocks[i].index + 1));
      target.first_position = blocks[i].index * kBenchBlockTokens;
      target.tokens = std::span(tokens.back()).subspan(target.first_position);
    }
    FetchOptions fetch_options;
    fetch_options.min_quality = options_.quality;
    const auto began = SteadyClock::now();
    const FetchReport report = client_->Fetch(model_.id, targets, fetch_options);
    const auto ended = SteadyClock::now();
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      if (!report.blocks[i].loaded()) return report.blocks[i].status;
      // What is lossy was held against its place and tokens by the client.
      if (exact && !HasStamp(Block(i), blocks[i].session, blocks[i].index)) {
        return absl::DataLossError("a block came back wrong");
      }
    }
    Count(began, ended, blocks.size(), samples);
    return absl::OkStatus();
  }

  // Node ids of the leading blocks of a session. NotFound unless all are stored.
  absl::StatusOr<std::vector<TrieNodeId>> Nodes(std::uint64_t session, std::size_t block_count,
                                                Samples* samples) {
    const std::vector<TokenId> tokens = BenchTokens(options_.seed, session, block_count);
    const auto began = SteadyClock::now();
    LookupOptions lookup_options;
    lookup_options.min_quality = options_.quality;
    KV_ASSIGN_OR_RETURN(const v1::LookupResult result,
                        client_->Lookup(model_.id, tokens, lookup_options));
    if (samples != nullptr) Count(began, SteadyClock::now(), block_count, samples);
    if (result.matched_blocks() != block_count || result.blocks_size() != 1 ||
        result.blocks(0).node_ids().size() != block_count * TrieNodeId::kBytes) {
      return absl::NotFoundError(
          "the blocks are not stored: run 'bench put' with the same --seed first");
    }
    std::vector<TrieNodeId> nodes(block_count);
    std::memcpy(nodes.data(), result.blocks(0).node_ids().data(), block_count * TrieNodeId::kBytes);
    return nodes;
  }

  absl::Status Lookup(const v1::LookupRequest& request, Samples* samples) {
    const auto began = SteadyClock::now();
    KV_ASSIGN_OR_RETURN(const v1::LookupResponse response, client_->Lookup(request));
    Count(began, SteadyClock::now(), kLookupBlocks * options_.prompts, samples);
    for (const v1::LookupResult& result : response.results()) {
      KV_RETURN_IF_ERROR(FromItem(result.status()));
      if (result.matched_blocks() != kLookupBlocks) {
        return absl::InternalError("a lookup did not find all that is stored");
      }
    }
    return absl::OkStatus();
  }

  Client& client() { return *client_; }
  const ModelHandle& model() const { return model_; }
  int index() const { return index_; }

 private:
  static std::uint64_t Stride(const ModelSpec& spec) {
    const std::uint64_t bytes = KvGeometry(spec).raw_block_bytes();
    return (bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
  }

  static void Count(SteadyClock::time_point began, SteadyClock::time_point ended,
                    std::uint64_t blocks, Samples* samples) {
    samples->latency_us.push_back(std::chrono::duration<double, std::micro>(ended - began).count());
    samples->blocks += blocks;
  }

  struct FreeAligned {
    void operator()(std::byte* memory) const {
      ::operator delete[](memory, std::align_val_t{4096});
    }
  };

  const BenchOptions& options_;
  const int index_;
  std::unique_ptr<Client> client_;
  ModelHandle model_;
  RegionBuffer region_buffer_;
  std::unique_ptr<std::byte[], FreeAligned> private_memory_;
  std::span<std::byte> memory_;
  std::size_t stride_ = 0;
};

// What a worker does before, and while, the time runs.
class Job {
 public:
  virtual ~Job() = default;
  virtual absl::Status Prepare() = 0;
  virtual absl::Status Work() = 0;
  // Kinds of requests, by name of the op.
  std::vector<std::pair<std::string, Samples>> samples;
};

// The blocks of worker `index`: whole sessions, in turns.
std::vector<BlockRef> ShareOf(const BenchOptions& options, int index) {
  std::vector<BlockRef> share;
  const std::uint64_t sessions = (options.blocks + kSessionBlocks - 1) / kSessionBlocks;
  for (std::uint64_t session = static_cast<std::uint64_t>(index); session < sessions;
       session += static_cast<std::uint64_t>(options.clients)) {
    const std::uint64_t begin = session * kSessionBlocks;
    const std::uint64_t end = std::min(options.blocks, begin + kSessionBlocks);
    for (std::uint64_t i = begin; i < end; ++i) {
      share.push_back({session, static_cast<std::uint32_t>(i - begin)});
    }
  }
  return share;
}

class PutJob final : public Job {
 public:
  PutJob(const BenchOptions& options, Worker* worker)
      : options_(options), worker_(*worker), blocks_(ShareOf(options, worker->index())) {
    samples.emplace_back("put", Samples{});
  }

  absl::Status Prepare() override {
    // Opens the connection. A second run on the same store finds this block stored, which is no
    // matter.
    Samples ignored;
    const BlockRef block{kWarmupSession + static_cast<std::uint64_t>(worker_.index()), 0};
    const absl::Status status = worker_.Put(std::span(&block, 1), &ignored);
    return absl::IsFailedPrecondition(status) ? absl::OkStatus() : status;
  }

  absl::Status Work() override {
    for (std::size_t at = 0; at < blocks_.size(); at += options_.batch) {
      const std::size_t count = std::min<std::size_t>(options_.batch, blocks_.size() - at);
      KV_RETURN_IF_ERROR(worker_.Put(std::span(blocks_).subspan(at, count), &samples[0].second));
    }
    return absl::OkStatus();
  }

 private:
  const BenchOptions& options_;
  Worker& worker_;
  const std::vector<BlockRef> blocks_;
};

class GetJob final : public Job {
 public:
  GetJob(const BenchOptions& options, Worker* worker)
      : options_(options), worker_(*worker), blocks_(ShareOf(options, worker->index())) {
    samples.emplace_back(options.cold ? "get_disk" : "get", Samples{});
  }

  absl::Status Prepare() override {
    for (std::size_t i = 0; i < blocks_.size(); i += kSessionBlocks) {
      const std::size_t count = std::min<std::size_t>(kSessionBlocks, blocks_.size() - i);
      KV_ASSIGN_OR_RETURN(const auto nodes,
                          worker_.Nodes(blocks_[i].session, count, /*samples=*/nullptr));
      nodes_.insert(nodes_.end(), nodes.begin(), nodes.end());
    }
    for (std::size_t at = 0; at < blocks_.size(); at += options_.batch) requests_.push_back(at);
    std::shuffle(requests_.begin(), requests_.end(),
                 std::mt19937_64(options_.seed + static_cast<std::uint64_t>(worker_.index())));
    if (requests_.empty()) return absl::OkStatus();
    Samples ignored;
    if (options_.warmup) return Pass(&ignored);
    // Opens the connections.
    for (int i = 0; i < options_.client.bulk_channels; ++i) {
      KV_RETURN_IF_ERROR(
          worker_.Get(std::span(blocks_).first(1), std::span(nodes_).first(1), &ignored));
    }
    return absl::OkStatus();
  }

  absl::Status Work() override {
    for (std::uint64_t pass = 0; pass < options_.repeat; ++pass) {
      KV_RETURN_IF_ERROR(Pass(&samples[0].second));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Pass(Samples* to) {
    for (const std::size_t at : requests_) {
      const std::size_t count = std::min<std::size_t>(options_.batch, blocks_.size() - at);
      KV_RETURN_IF_ERROR(worker_.Get(std::span(blocks_).subspan(at, count),
                                     std::span(nodes_).subspan(at, count), to));
    }
    return absl::OkStatus();
  }

  const BenchOptions& options_;
  Worker& worker_;
  const std::vector<BlockRef> blocks_;
  std::vector<TrieNodeId> nodes_;
  std::vector<std::size_t> requests_;  // first block of each
};

class LookupJob final : public Job {
 public:
  LookupJob(const BenchOptions& options, Worker* worker) : options_(options), worker_(*worker) {
    samples.emplace_back("lookup", Samples{});
  }

  absl::Status Prepare() override {
    for (std::uint64_t prompt = 0; prompt < options_.prompts; ++prompt) {
      const std::uint64_t session =
          kLookupSessions + static_cast<std::uint64_t>(worker_.index()) * options_.prompts + prompt;
      auto nodes = worker_.Nodes(session, kLookupBlocks, /*samples=*/nullptr);
      if (absl::IsNotFound(nodes.status())) {
        std::vector<BlockRef> blocks;
        for (std::uint32_t i = 0; i < kLookupBlocks; ++i) blocks.push_back({session, i});
        Samples ignored;
        KV_RETURN_IF_ERROR(worker_.Put(blocks, &ignored));
        nodes = worker_.Nodes(session, kLookupBlocks, /*samples=*/nullptr);
      }
      KV_RETURN_IF_ERROR(nodes.status());
      v1::LookupQuery* query = request_.add_queries();
      query->add_model_ids(std::string(worker_.model().id.view()));
      const auto tokens = BenchTokens(options_.seed, session, kLookupBlocks);
      query->set_tokens(tokens.data(), tokens.size() * sizeof(TokenId));
      query->set_want_blocks(true);
    }
    Samples ignored;
    for (int i = 0; i < 10; ++i) KV_RETURN_IF_ERROR(worker_.Lookup(request_, &ignored));
    return absl::OkStatus();
  }

  absl::Status Work() override {
    for (std::uint64_t i = 0; i < options_.requests; ++i) {
      KV_RETURN_IF_ERROR(worker_.Lookup(request_, &samples[0].second));
    }
    return absl::OkStatus();
  }

 private:
  const BenchOptions& options_;
  Worker& worker_;
  v1::LookupRequest request_;
};

// Prompts as an engine sees them: most are found and restored, some are new and stored.
class MixedJob final : public Job {
 public:
  MixedJob(const BenchOptions& options, Worker* worker) : options_(options), worker_(*worker) {
    samples.emplace_back("put", Samples{});
    samples.emplace_back("get", Samples{});
    samples.emplace_back("lookup", Samples{});
    random_.seed(options.seed + static_cast<std::uint64_t>(worker->index()));
  }

  absl::Status Prepare() override {
    Samples ignored;
    return PutNew(&ignored);
  }

  absl::Status Work() override {
    const std::uint64_t share = options_.blocks / static_cast<std::uint64_t>(options_.clients);
    for (std::uint64_t done = 0; done < share; done += options_.batch) {
      if (random_() % kMixedPutEvery == 0) {
        KV_RETURN_IF_ERROR(PutNew(&samples[0].second));
        continue;
      }
      const std::uint64_t session = Session(random_() % stored_sessions_);
      KV_ASSIGN_OR_RETURN(const auto nodes,
                          worker_.Nodes(session, options_.batch, &samples[2].second));
      KV_RETURN_IF_ERROR(worker_.Get(Blocks(session), nodes, &samples[1].second));
    }
    return absl::OkStatus();
  }

 private:
  std::uint64_t Session(std::uint64_t number) const {
    return kMixedSessions + (static_cast<std::uint64_t>(worker_.index()) << 32) + number;
  }

  std::vector<BlockRef> Blocks(std::uint64_t session) const {
    std::vector<BlockRef> blocks;
    for (std::uint32_t i = 0; i < options_.batch; ++i) blocks.push_back({session, i});
    return blocks;
  }

  absl::Status PutNew(Samples* to) {
    KV_RETURN_IF_ERROR(worker_.Put(Blocks(Session(stored_sessions_)), to));
    ++stored_sessions_;
    return absl::OkStatus();
  }

  const BenchOptions& options_;
  Worker& worker_;
  std::mt19937_64 random_;
  std::uint64_t stored_sessions_ = 0;
};

std::unique_ptr<Job> MakeJob(const BenchOptions& options, Worker* worker) {
  if (options.op == "put") return std::make_unique<PutJob>(options, worker);
  if (options.op == "get") return std::make_unique<GetJob>(options, worker);
  if (options.op == "lookup") return std::make_unique<LookupJob>(options, worker);
  KV_CHECK(options.op == "mixed");
  return std::make_unique<MixedJob>(options, worker);
}

double CpuSeconds(const BenchOptions& options) {
  return OwnCpuSeconds() +
         (options.server_pid.has_value() ? CpuSecondsOf(*options.server_pid).value_or(0) : 0);
}

double Percentile(const std::vector<double>& sorted, std::size_t percent) {
  return sorted.empty() ? 0 : sorted[(sorted.size() - 1) * percent / 100];
}

// Calls `work` once per worker, each on a thread of its own. The first error, if any.
absl::Status OnThreads(std::size_t count, const std::function<absl::Status(std::size_t)>& work) {
  std::vector<absl::Status> statuses(count);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] { statuses[i] = work(i); });
  }
  for (std::thread& thread : threads) thread.join();
  for (absl::Status& status : statuses) KV_RETURN_IF_ERROR(std::move(status));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<BenchRow>> RunBench(const BenchOptions& options) {
  const bool lookup = options.op == "lookup";
  KV_ASSIGN_OR_RETURN(const ModelSpec spec,
                      BenchModel(lookup ? kLookupBlockBytes : options.block_bytes));
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<std::unique_ptr<Job>> jobs;
  for (int i = 0; i < options.clients; ++i) {
    workers.push_back(std::make_unique<Worker>(options, i));
    jobs.push_back(MakeJob(options, workers.back().get()));
  }
  KV_RETURN_IF_ERROR(OnThreads(workers.size(), [&](std::size_t i) {
    absl::Status status = workers[i]->Open(spec, lookup ? kLookupBlocks : options.batch);
    if (status.ok()) status = jobs[i]->Prepare();
    return status;
  }));

  const double cpu_began = CpuSeconds(options);
  const auto began = SteadyClock::now();
  KV_RETURN_IF_ERROR(OnThreads(workers.size(), [&](std::size_t i) { return jobs[i]->Work(); }));
  const double seconds = std::chrono::duration<double>(SteadyClock::now() - began).count();
  const double cpu_seconds = CpuSeconds(options) - cpu_began;

  std::uint64_t moved_bytes = 0;
  for (const auto& job : jobs) {
    for (const auto& [op, samples] : job->samples) {
      if (op != "lookup") moved_bytes += samples.blocks * options.block_bytes;
    }
  }
  std::vector<BenchRow> rows;
  for (std::size_t kind = 0; kind < jobs[0]->samples.size(); ++kind) {
    BenchRow row;
    std::vector<double> latency_us;
    std::uint64_t blocks = 0;
    std::uint64_t frame_bytes = 0;
    for (const auto& job : jobs) {
      const Samples& samples = job->samples[kind].second;
      latency_us.insert(latency_us.end(), samples.latency_us.begin(), samples.latency_us.end());
      blocks += samples.blocks;
      frame_bytes += samples.frame_bytes;
    }
    std::sort(latency_us.begin(), latency_us.end());
    row.peer = options.client.lane == Lane::kShm ? "kvtrie-shm" : "kvtrie";
    row.op = jobs[0]->samples[kind].first;
    row.block_bytes = options.block_bytes;
    row.clients = options.clients;
    row.batch = lookup ? kLookupBlocks * options.prompts : options.batch;
    if (row.op != "lookup") {
      row.gb_per_s = static_cast<double>(blocks * options.block_bytes) / 1e9 / seconds;
      if (options.server_pid.has_value() && moved_bytes > 0) {
        row.cpu_s_per_gb = cpu_seconds / (static_cast<double>(moved_bytes) / 1e9);
      }
    }
    row.keys_per_s = static_cast<double>(blocks) / seconds;
    if (frame_bytes > 0) {
      row.stored_part =
          static_cast<double>(frame_bytes) / static_cast<double>(blocks * options.block_bytes);
    }
    row.p50_us = Percentile(latency_us, 50);
    row.p99_us = Percentile(latency_us, 99);
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace kvtrie
