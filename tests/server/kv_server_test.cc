#include "server/kv_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/server/running_server.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

constexpr int kServing = 1;
constexpr int kNotServing = 2;

// grpc.health.v1.Health/Check, whose proto is not installed with gRPC: a request with a name in
// field 1, an answer with an enum in field 1.
int HealthOf(const std::shared_ptr<grpc::Channel>& channel, const std::string& service) {
  std::string request;
  request.push_back('\x0a');
  request.push_back(static_cast<char>(service.size()));
  request += service;
  const grpc::Slice slice(request);
  const grpc::ByteBuffer request_buffer(&slice, 1);
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  auto call =
      stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", request_buffer, &queue);
  call->StartCall();
  grpc::ByteBuffer response;
  grpc::Status status;
  call->Finish(&response, &status, nullptr);
  void* tag;
  bool ok;
  queue.Next(&tag, &ok);
  if (!status.ok()) return -1;
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(response.Dump(&slices).ok());
  return slices.size() == 1 && slices[0].size() == 2 ? slices[0].begin()[1] : -1;
}

// GET of a path; the whole answer.
std::string HttpGet(const std::string& address, const std::string& path) {
  const auto parsed = ParseListenAddress(address);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<std::uint16_t>(parsed->port));
  ::inet_pton(AF_INET, parsed->host.c_str(), &to.sin_addr);
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
  const std::string request = "GET " + path + " HTTP/1.1\r\nHost: x\r\n\r\n";
  EXPECT_EQ(::send(fd, request.data(), request.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(request.size()));
  std::string answer;
  char buffer[4096];
  for (ssize_t count; (count = ::recv(fd, buffer, sizeof buffer, 0)) > 0;) {
    answer.append(buffer, static_cast<std::size_t>(count));
  }
  ::close(fd);
  return answer;
}

// The status of a stream comes behind its last message.
template <typename Response, typename Stream>
grpc::StatusCode ReadToEnd(Stream& stream) {
  Response response;
  while (stream.Read(&response)) {
  }
  return stream.Finish().error_code();
}

TEST(KvServerTest, ServesHealthProbesAndMetrics) {
  RunningServer server;
  EXPECT_EQ(HealthOf(server.channel(), ""), kServing);
  EXPECT_EQ(HealthOf(server.channel(), "kvtrie.v1.Cache"), kServing);
  const std::string http = server.server().addresses().metrics;
  EXPECT_THAT(HttpGet(http, "/livez"), HasSubstr("200 OK"));
  EXPECT_THAT(HttpGet(http, "/readyz"), HasSubstr("200 OK"));
  EXPECT_THAT(HttpGet(http, "/nonsense"), HasSubstr("404"));
  const std::string model = server.RegisterModel();
  PutPath(server.cache(), model, 3);
  const std::string metrics = HttpGet(http, "/metrics");
  EXPECT_THAT(metrics, HasSubstr("kvtrie_put_stored_blocks_total 3"));
  EXPECT_THAT(metrics, HasSubstr("kvtrie_rpc_total{method=\"Put\",code=\"OK\"} 1"));
  EXPECT_THAT(metrics, HasSubstr("kvtrie_ready 1"));
}

TEST(KvServerTest, APortIsNotSharedWithAnotherServer) {
  RunningServer first;
  ScratchFolder folder;
  ServerConfig config = TestConfig(folder.path());
  config.listen = *ParseListenAddress(first.server().addresses().listen);
  const auto second = KvServer::Start(config);
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("--listen"));
}

TEST(KvServerTest, IPv6AndUnixSocketsWork) {
  RunningServer server([](ServerConfig* config) {
    config->listen = *ParseListenAddress("[::1]:0");
    config->http_listen = *ParseListenAddress("[::1]:0");
    config->admin_listen = *ParseListenAddress("unix:" + config->engine.data_dir + ".sock");
  });
  EXPECT_THAT(server.server().addresses().listen, HasSubstr("[::1]:"));
  EXPECT_FALSE(server.RegisterModel().empty());
  v1::GetStatusResponse status;
  grpc::ClientContext context;
  EXPECT_TRUE(server.admin().GetStatus(&context, v1::GetStatusRequest(), &status).ok());
}

TEST(KvServerTest, WhatWasAcknowledgedIsThereAfterARestart) {
  ScratchFolder folder;
  const ServerConfig config = TestConfig(folder.path());
  std::string model;
  for (int run = 0; run < 2; ++run) {
    auto server = KvServer::Start(config);
    ASSERT_TRUE(server.ok()) << server.status();
    const auto cache = v1::Cache::NewStub(RunningServer::Connect((*server)->addresses().listen));
    if (run == 0) {
      v1::RegisterModelRequest request;
      *request.mutable_spec() = TestSpec();
      v1::RegisterModelResponse response;
      grpc::ClientContext context;
      ASSERT_TRUE(cache->RegisterModel(&context, request, &response).ok());
      model = response.model_id();
      PutPath(*cache, model, 3);
    } else {
      EXPECT_EQ(LookUp(*cache, model, PathTokens(3)).matched_blocks(), 3u);
    }
    (*server)->Stop(std::chrono::seconds(5));
  }
}

// Open streams of every kind, idle and stalled, do not keep the server from ending within its grace
// time.
TEST(KvServerTest, StopEndsOpenStreamsWithinTheGraceTime) {
  RunningServer server;
  const std::string model = server.RegisterModel();
  PutPath(server.cache(), model, 200);

  grpc::ClientContext watch_context;
  auto watch = server.cache().Watch(&watch_context, v1::WatchRequest());
  v1::WatchResponse page;
  ASSERT_TRUE(watch->Read(&page));

  grpc::ClientContext idle_context;
  auto idle = server.cache().Put(&idle_context);
  idle->WaitForInitialMetadata();

  grpc::ClientContext stalled_context;
  auto stalled = server.cache().Put(&stalled_context);
  v1::PutRequest half;
  Announce(1, model, PathTokens(1, 9), &half)->set_eager(true);
  AddBlock(1, 0, BlockContent(0).substr(0, 10'000), &half);
  ASSERT_TRUE(stalled->Write(half));

  grpc::ChannelArguments small_window;
  small_window.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 65'536);
  small_window.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  const auto slow_stub =
      v1::Cache::NewStub(RunningServer::Connect(server.server().addresses().listen, small_window));
  grpc::ClientContext slow_context;
  v1::FetchRequest fetch;
  fetch.mutable_prefix()->set_model_id(model);
  fetch.mutable_prefix()->set_tokens(PathTokens(200));
  auto slow = slow_stub->Fetch(&slow_context, fetch);
  v1::FetchResponse first;
  ASSERT_TRUE(slow->Read(&first));
  AwaitTrue([&server] { return server.server().streams().stream_count() == 4; });
  AwaitTrue([&server] { return server.server().engine().put_budget().used_bytes() > 0; });

  const auto begin = std::chrono::steady_clock::now();
  const std::chrono::milliseconds grace(2000);
  std::thread stop([&server, grace] { server.server().Stop(grace); });
  // Health fails first, while calls are still answered.
  const auto channel = server.channel();
  AwaitTrue([&channel] { return HealthOf(channel, "") != kServing; });
  EXPECT_EQ(ReadToEnd<v1::WatchResponse>(*watch), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(ReadToEnd<v1::PutResponse>(*idle), grpc::StatusCode::UNAVAILABLE);
  stop.join();
  EXPECT_LE(std::chrono::steady_clock::now() - begin, grace);
  EXPECT_EQ(ReadToEnd<v1::PutResponse>(*stalled), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(ReadToEnd<v1::FetchResponse>(*slow), grpc::StatusCode::UNAVAILABLE);
  server.server_owner().reset();
}

TEST(KvServerTest, DrainRefusesNewWorkAndStillAnswers) {
  RunningServer server;
  const std::string model = server.RegisterModel();
  PutPath(server.cache(), model, 2);
  EXPECT_TRUE(server.server().Drain(std::chrono::seconds(5)));
  EXPECT_EQ(HealthOf(server.channel(), ""), kNotServing);
  EXPECT_EQ(LookUp(server.cache(), model, PathTokens(2)).matched_blocks(), 2u);
  grpc::ClientContext context;
  EXPECT_EQ(server.cache().Put(&context)->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(HttpGet(server.server().addresses().metrics, "/readyz"), HasSubstr("draining"));
}

}  // namespace
}  // namespace kvtrie
