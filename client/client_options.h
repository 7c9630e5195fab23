#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "client/retry.h"
#include "client/worker_options.h"

namespace grpc {
class ChannelCredentials;
}

namespace kvtrie {

// How blocks travel between this process and a server.
enum class Lane {
  kAuto,  // shared memory where the server is on this host and offers it, gRPC elsewhere
  kGrpc,
  kShm,  // shared memory or an error
};

// Where raw KV becomes frames of less than exact quality, and raw KV again.
enum class Coding {
  kInProcess,  // in this library: frames travel
  // As kInProcess, with the work done by ClientOptions::workers; what they do not do in time, the
  // library does. Fetches layer by layer (FetchOptions::on_layer) are decoded in the library.
  kWorker,
  kServer,  // raw KV travels: what is put is stored exact, what is fetched the server decodes
};

struct ClientOptions {
  // --- what it does ---

  // Servers that give the same answers: "host:port" or "unix:/path". Calls go round; a retry goes
  // to the next one.
  std::vector<std::string> targets = {"127.0.0.1:50051"};
  Lane lane = Lane::kAuto;
  // Null: plain text.
  std::shared_ptr<grpc::ChannelCredentials> credentials;

  Coding coding = Coding::kInProcess;
  WorkerOptions workers;  // of Coding::kWorker

  // --- how fast it does it ---

  // Ends of calls that do not name their own. A call's retries are part of it.
  std::chrono::milliseconds unary_timeout{5000};
  std::chrono::milliseconds bulk_timeout{30000};
  RetryOptions retry;

  // Connections per target for Fetch. One carries 1-3 GB/s; more help with several threads.
  int bulk_channels = 2;
  // Bytes that a server may send ahead on one stream. More is not faster: bytes that wait in the
  // socket fall out of the processor's cache before they are read.
  int stream_window_bytes = 1 << 20;
  // Shared memory for blocks that come by Lane::kShm, pages taken as they are used.
  std::size_t local_region_bytes = std::size_t{256} << 20;
  // Codecs that are kept, made of profiles; one takes about twice its profile.
  std::size_t codec_memory_bytes = std::size_t{512} << 20;
  // Frames that fetched blocks were coded against, kept for the next ones; 0: none.
  std::size_t reference_cache_bytes = std::size_t{64} << 20;
  // Threads that one Put or Fetch codes with, the calling one among them. With workers, so many
  // batches are under way at a time.
  int coding_threads = 1;
  // A connection that is silent for so long is probed. Below 5 minutes a server with gRPC's
  // defaults hangs up.
  std::chrono::milliseconds keepalive_time{330'000};
};

}  // namespace kvtrie
