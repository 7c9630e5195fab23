#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "prometheus/metric_family.h"
#include "server/listen_address.h"

struct mg_connection;
struct mg_context;

namespace kvtrie {

// A probe's answer: whether, and why not.
struct ProbeAnswer {
  bool ok = false;
  std::string text;
};

struct HttpHandlers {
  std::function<std::vector<prometheus::MetricFamily>()> metrics;
  std::function<ProbeAnswer()> live;
  std::function<ProbeAnswer()> ready;
};

// /metrics for Prometheus, /livez and /readyz for whoever restarts the server and sends it traffic.
// It answers from before the store is opened until the end of the process. Handlers are called on
// its threads.
class HttpEndpoint {
 public:
  // Unavailable: the address cannot be bound.
  static absl::StatusOr<std::unique_ptr<HttpEndpoint>> Start(const ListenAddress& address,
                                                             HttpHandlers handlers);
  ~HttpEndpoint();

  HttpEndpoint(const HttpEndpoint&) = delete;
  HttpEndpoint& operator=(const HttpEndpoint&) = delete;

  int port() const { return port_; }

 private:
  explicit HttpEndpoint(HttpHandlers handlers) : handlers_(std::move(handlers)) {}
  static int Handle(mg_connection* connection, void* self);

  const HttpHandlers handlers_;
  mg_context* context_ = nullptr;
  int port_ = 0;
};

}  // namespace kvtrie
