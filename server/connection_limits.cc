#include "server/connection_limits.h"

#include <grpc/grpc.h>

#include <algorithm>
#include <cstdint>

namespace kvtrie {
namespace {

// Clients ping as often as this to keep connections through idle times open; gRPC's default would
// cut off those that ping more often than every five minutes.
constexpr int kMinPingIntervalMs = 10'000;
constexpr int kKeepaliveTimeMs = 60'000;
constexpr int kKeepaliveTimeoutMs = 20'000;

// What one stream may have under way in each direction. Probing for bandwidth is off: it would let
// windows, and with them the memory per connection, grow without our say.
constexpr int kStreamWindowBytes = 4 << 20;
constexpr int kFrameBytesMax = 1 << 20;

}  // namespace

void SetConnectionLimits(const ConnectionLimits& limits, grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(static_cast<int>(limits.message_bytes_max));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                              static_cast<int>(limits.streams_per_connection_max));
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                              kMinPingIntervalMs);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kStreamWindowBytes);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kFrameBytesMax);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  // Two servers on one port would share its clients without a word.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  if (limits.connection_age_max.count() > 0) {
    builder->AddChannelArgument(
        GRPC_ARG_MAX_CONNECTION_AGE_MS,
        static_cast<int>(std::min<std::int64_t>(limits.connection_age_max.count(), INT32_MAX)));
  }
}

}  // namespace kvtrie
