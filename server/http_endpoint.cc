#include "server/http_endpoint.h"

#include <civetweb.h>

#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "prometheus/text_serializer.h"

namespace kvtrie {
namespace {

int Reply(mg_connection* connection, int code, const char* code_text, const char* content_type,
          const std::string& body) {
  mg_printf(connection,
            "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n"
            "Cache-Control: no-store\r\nConnection: close\r\n\r\n",
            code, code_text, content_type, body.size());
  mg_write(connection, body.data(), body.size());
  return code;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpEndpoint>> HttpEndpoint::Start(const ListenAddress& address,
                                                                  HttpHandlers handlers) {
  std::unique_ptr<HttpEndpoint> endpoint(new HttpEndpoint(std::move(handlers)));
  // "+port" is civetweb's way of saying both families.
  const bool wildcard = address.host == "::" || address.host == "0.0.0.0";
  const std::string listen =
      wildcard ? absl::StrCat("+", address.port) : address.WithPort(address.port);
  const char* options[] = {"listening_ports",    listen.c_str(), "num_threads", "2",
                           "request_timeout_ms", "5000",         nullptr};
  mg_callbacks callbacks{};
  callbacks.log_message = [](const mg_connection*, const char*) { return 1; };
  mg_init_library(0);
  endpoint->context_ = mg_start(&callbacks, nullptr, options);
  if (endpoint->context_ == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("--http_listen: cannot listen on ", address.WithPort(address.port)));
  }
  mg_server_port port{};
  if (mg_get_server_ports(endpoint->context_, 1, &port) == 1) endpoint->port_ = port.port;
  mg_set_request_handler(endpoint->context_, "/", &HttpEndpoint::Handle, endpoint.get());
  return endpoint;
}

HttpEndpoint::~HttpEndpoint() {
  if (context_ != nullptr) mg_stop(context_);
  mg_exit_library();
}

int HttpEndpoint::Handle(mg_connection* connection, void* self) {
  const HttpHandlers& handlers = static_cast<HttpEndpoint*>(self)->handlers_;
  const mg_request_info* request = mg_get_request_info(connection);
  const std::string_view method = request->request_method;
  const std::string_view path = request->local_uri;
  if (method != "GET" && method != "HEAD") {
    return Reply(connection, 405, "Method Not Allowed", "text/plain", "GET only\n");
  }
  if (path == "/metrics") {
    const std::string body = prometheus::TextSerializer().Serialize(handlers.metrics());
    return Reply(connection, 200, "OK", "text/plain; version=0.0.4; charset=utf-8", body);
  }
  if (path == "/livez" || path == "/readyz") {
    const ProbeAnswer answer = path == "/livez" ? handlers.live() : handlers.ready();
    return Reply(connection, answer.ok ? 200 : 503, answer.ok ? "OK" : "Service Unavailable",
                 "text/plain", answer.text + "\n");
  }
  return Reply(connection, 404, "Not Found", "text/plain", "/metrics, /livez, /readyz\n");
}

}  // namespace kvtrie
