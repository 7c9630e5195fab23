#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "prometheus/metric_family.h"
#include "server/listen_address.h"

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

// The answer to a request's head (its lines up to the empty one), headers included.
std::string AnswerHttp(std::string_view request_head, const HttpHandlers& handlers);

// /metrics for Prometheus, /livez and /readyz for whoever restarts the server and sends it traffic.
// It answers from before the store is opened until the end of the process.
//
// One thread, one request per connection, few connections, and little time for each: enough for
// probes and scrapers. (The library that prometheus-cpp brings for this is built without IPv6 by
// Debian.) Handlers are called on that thread, so they must be short.
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
  struct Connection;

  HttpEndpoint(std::vector<int> listeners, int wake_fd, int port, HttpHandlers handlers);
  void Run();
  void Accept(int listener);
  // False: the connection has ended.
  bool Advance(Connection& connection);

  const std::vector<int> listeners_;
  const int wake_fd_;
  const int port_;
  const HttpHandlers handlers_;
  std::atomic<bool> stopping_{false};
  std::list<Connection> connections_;  // of the thread
  std::thread thread_;
};

}  // namespace kvtrie
