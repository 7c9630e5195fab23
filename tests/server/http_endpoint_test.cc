#include "server/http_endpoint.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

namespace kvtrie {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

HttpHandlers TestHandlers() {
  return {.metrics = [] { return std::vector<prometheus::MetricFamily>(); },
          .live =
              [] {
                return ProbeAnswer{true, "ok"};
              },
          .ready =
              [] {
                return ProbeAnswer{false, "starting"};
              }};
}

std::string AnswerTo(const std::string& line) {
  return AnswerHttp(line + "\r\nHost: x\r\n\r\n", TestHandlers());
}

TEST(AnswerHttpTest, ProbesSayWhetherAndWhy) {
  EXPECT_THAT(AnswerTo("GET /livez HTTP/1.1"), StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(AnswerTo("GET /livez HTTP/1.1"), EndsWith("\r\n\r\nok\n"));
  EXPECT_THAT(AnswerTo("GET /readyz?verbose HTTP/1.0"), StartsWith("HTTP/1.1 503 "));
  EXPECT_THAT(AnswerTo("GET /readyz HTTP/1.1"), EndsWith("starting\n"));
}

TEST(AnswerHttpTest, HeadHasNoBody) {
  const std::string answer = AnswerTo("HEAD /livez HTTP/1.1");
  EXPECT_THAT(answer, HasSubstr("Content-Length: 3\r\n"));
  EXPECT_THAT(answer, EndsWith("\r\n\r\n"));
}

TEST(AnswerHttpTest, TheRestIsRefused) {
  EXPECT_THAT(AnswerTo("POST /metrics HTTP/1.1"), StartsWith("HTTP/1.1 405 "));
  EXPECT_THAT(AnswerTo("GET /etc/passwd HTTP/1.1"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(AnswerTo("nonsense"), StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(AnswerHttp("", TestHandlers()), StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(AnswerTo("GET /metrics HTTP/1.1"), StartsWith("HTTP/1.1 200 "));
}

// What it answers over a socket is held by kv_server_test.
TEST(HttpEndpointTest, BindsAnyPortAndSaysWhich) {
  for (const char* address : {"127.0.0.1:0", "[::1]:0", "[::]:0"}) {
    const ListenAddress listen = *ParseListenAddress(address);
    const auto endpoint = HttpEndpoint::Start(listen, TestHandlers());
    ASSERT_TRUE(endpoint.ok()) << endpoint.status();
    EXPECT_GT((*endpoint)->port(), 0);
    EXPECT_EQ(ReachableFamilies(listen, (*endpoint)->port()).size(), listen.host == "::" ? 2u : 1u);
  }
}

int ConnectTo(int port) {
  const int peer = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(peer, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  return peer;
}

TEST(HttpEndpointTest, SilentPeersDoNotKeepAProbeWaiting) {
  const auto endpoint = HttpEndpoint::Start(*ParseListenAddress("127.0.0.1:0"), TestHandlers());
  ASSERT_TRUE(endpoint.ok());
  std::vector<int> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(ConnectTo((*endpoint)->port()));
  const auto began = std::chrono::steady_clock::now();
  const int probe = ConnectTo((*endpoint)->port());
  const std::string_view request = "GET /livez HTTP/1.1\r\n\r\n";
  ASSERT_EQ(::send(probe, request.data(), request.size(), 0), static_cast<ssize_t>(request.size()));
  char answer[16] = {};
  EXPECT_EQ(::recv(probe, answer, 15, MSG_WAITALL), 15);
  EXPECT_STREQ(answer, "HTTP/1.1 200 OK");
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(2));
  for (const int peer : silent) ::close(peer);
  ::close(probe);
}

TEST(HttpEndpointTest, ATakenPortIsUnavailable) {
  const auto first = HttpEndpoint::Start(*ParseListenAddress("127.0.0.1:0"), TestHandlers());
  ASSERT_TRUE(first.ok());
  ListenAddress taken = *ParseListenAddress("127.0.0.1:0");
  taken.port = (*first)->port();
  EXPECT_TRUE(absl::IsUnavailable(HttpEndpoint::Start(taken, TestHandlers()).status()));
}

}  // namespace
}  // namespace kvtrie
