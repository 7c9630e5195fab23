#include "client/channel_pool.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>

#include "storage/base/check.h"

namespace kvtrie {
namespace {

// A Lookup of 1,024 prompts answers with megabytes of node ids; one message of blocks is a few
// chunks.
constexpr int kControlReceiveBytesMax = 64 << 20;
constexpr int kBulkReceiveBytesMax = 8 << 20;

// A block in one frame instead of sixteen: measured 2-5 % less CPU time, and a steadier single
// Fetch.
constexpr int kFrameBytesMax = 1 << 20;

constexpr int kReconnectInitialMs = 50;
constexpr int kReconnectMaxMs = 2000;
// How long one try to connect may take; gRPC names it as if it were a pause.
constexpr int kConnectMs = 5000;

}  // namespace

ChannelPool::ChannelPool(const ClientOptions& options) : options_(options) {
  KV_CHECK(!options.targets.empty());
  for (const std::string& target : options.targets) {
    control_.push_back(v1::Cache::NewStub(Connect(target, kControlReceiveBytesMax)));
  }
  for (int i = 0; i < std::max(1, options.bulk_channels); ++i) {
    for (const std::string& target : options.targets) {
      bulk_.push_back(Connect(target, kBulkReceiveBytesMax));
    }
  }
}

v1::Cache::Stub& ChannelPool::Control(int attempt) {
  return *control_[static_cast<std::size_t>(attempt) % control_.size()];
}

const std::shared_ptr<grpc::Channel>& ChannelPool::Bulk() {
  return bulk_[next_bulk_.fetch_add(1, std::memory_order_relaxed) % bulk_.size()];
}

std::shared_ptr<grpc::Channel> ChannelPool::NewConnection() {
  const std::size_t index = next_target_.fetch_add(1, std::memory_order_relaxed);
  return Connect(options_.targets[index % options_.targets.size()], kBulkReceiveBytesMax);
}

const std::string& ChannelPool::target(int attempt) const {
  return options_.targets[static_cast<std::size_t>(attempt) % options_.targets.size()];
}

std::shared_ptr<grpc::Channel> ChannelPool::Connect(const std::string& target,
                                                    int max_receive_bytes) const {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(max_receive_bytes);
  // Without it, channels to one target share one connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // The window is fixed: probing for it costs pings and lets it grow past the processor's cache.
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, options_.stream_window_bytes);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kFrameBytesMax);
  // Retries are ours (gRPC's buffer each message for its own), and nothing is compressed.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_COMPRESSION, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectInitialMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMaxMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, static_cast<int>(options_.keepalive_time.count()));
  return grpc::CreateCustomChannel(
      target, options_.credentials ? options_.credentials : grpc::InsecureChannelCredentials(),
      arguments);
}

}  // namespace kvtrie
