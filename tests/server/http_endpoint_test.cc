#include "server/http_endpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

TEST(HttpEndpointTest, ATakenPortIsUnavailable) {
  const auto first = HttpEndpoint::Start(*ParseListenAddress("127.0.0.1:0"), TestHandlers());
  ASSERT_TRUE(first.ok());
  ListenAddress taken = *ParseListenAddress("127.0.0.1:0");
  taken.port = (*first)->port();
  EXPECT_TRUE(absl::IsUnavailable(HttpEndpoint::Start(taken, TestHandlers()).status()));
}

}  // namespace
}  // namespace kvtrie
