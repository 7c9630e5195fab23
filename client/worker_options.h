#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace grpc {
class ChannelCredentials;
}

namespace kvtrie {

// Which workers code for this process.
struct WorkerOptions {
  static constexpr std::chrono::minutes kTimeoutMax{5};
  static constexpr char kNamePrefix[] = "dns:///";

  // "host:port" or "unix:/path" is one worker. "dns:///name:port" is as many as the name has
  // addresses, asked again from time to time.
  std::vector<std::string> targets;
  // Null: plain text.
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  // Whom the work is for: tenants share a worker evenly.
  std::string tenant;
  // For the blocks of one call, which are then coded in this process: what they take at most is
  // this, and what that takes. Above 0, at most kTimeoutMax.
  std::chrono::milliseconds timeout{5000};
  // A worker that did not answer in time is left alone for so long, twice as long each time, at
  // most 10 s. So long as well, and at most 2 s, is one that takes no work now and does not say for
  // how long.
  std::chrono::milliseconds pause{500};
  std::chrono::milliseconds resolve_period{10'000};

  // InvalidArgument names the option.
  absl::Status Validate() const;
};

}  // namespace kvtrie
