// The server's program as those see it who outlive it: watchers over a restart, and the system it
// runs on under connections that come and go.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "client/ctl/bench_workload.h"
#include "tests/client/server_process.h"

namespace kvtrie {
namespace {

constexpr std::size_t kBlockBytes = 16 << 10;

class ServerLifetimeTest : public ::testing::Test {
 protected:
  std::unique_ptr<Client> Connect() {
    ClientOptions options;
    options.targets = {server_.listen};
    options.lane = Lane::kGrpc;
    auto client = Client::Create(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  // Puts `block_count` blocks of a path that `session` names.
  void PutPathOf(Client& client, std::uint64_t session, std::size_t block_count) {
    const auto model = client.RegisterModel(*BenchModel(kBlockBytes));
    ASSERT_TRUE(model.ok()) << model.status();
    const std::vector<TokenId> tokens = BenchTokens(1, session, block_count);
    std::vector<std::byte> memory(block_count * kBlockBytes);
    FillIncompressible(memory, session);
    std::vector<std::span<const std::byte>> blocks;
    for (std::size_t i = 0; i < block_count; ++i) {
      blocks.push_back(std::span<const std::byte>(memory).subspan(i * kBlockBytes, kBlockBytes));
    }
    PutPath path;
    path.path.model = model->id;
    path.path.tokens = tokens;
    path.blocks = blocks;
    ASSERT_TRUE(client.Put(std::span(&path, 1))[0].all_stored());
  }

  ServerProcess server_;
};

// What a watcher was told so far.
class Watcher {
 public:
  explicit Watcher(std::unique_ptr<Client> client) : client_(std::move(client)) {
    thread_ = std::jthread([this](std::stop_token stop) {
      const absl::Status status =
          client_->Watch(v1::WatchRequest(), stop, [this](const v1::WatchResponse& response) {
            absl::MutexLock lock(&mutex_);
            is_told_ = true;
            for (const v1::Event& event : response.events()) events_.push_back(event);
            return true;
          });
      EXPECT_TRUE(status.ok()) << status;
    });
  }

  // The events, once there are so many (and the first page has come), or those after a minute.
  std::vector<v1::Event> Await(std::size_t count) {
    const auto enough = [this, count]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return is_told_ && events_.size() >= count;
    };
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithTimeout(absl::Condition(&enough), absl::Minutes(1));
    return events_;
  }

 private:
  const std::unique_ptr<Client> client_;
  absl::Mutex mutex_;
  bool is_told_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<v1::Event> events_ ABSL_GUARDED_BY(mutex_);
  std::jthread thread_;
};

TEST_F(ServerLifetimeTest, WatchersLearnThatTheServerStartedAnewAndGoOn) {
  const auto client = Connect();
  Watcher watcher(Connect());
  watcher.Await(0);
  PutPathOf(*client, 1, 3);
  auto events = watcher.Await(3);
  ASSERT_EQ(events.size(), 3u);
  for (std::uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(events[i].kind(), v1::EVENT_KIND_STORED);
    EXPECT_EQ(events[i].depth(), i + 1);
  }

  server_.Kill();
  server_.Start();
  events = watcher.Await(4);
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[3].kind(), v1::EVENT_KIND_CLEARED);
  EXPECT_TRUE(events[3].gap());
  EXPECT_NE(events[3].epoch(), events[2].epoch());
  PutPathOf(*client, 2, 2);
  events = watcher.Await(6);
  ASSERT_EQ(events.size(), 6u);
  EXPECT_EQ(events[4].kind(), v1::EVENT_KIND_STORED);
  EXPECT_EQ(events[5].parent_id(), events[4].node_id());
}

// Connections of all manners: silent, broken off within the preface, reset.
void ConnectOnce(const std::string& target, int manner) {
  const std::size_t colon = target.rfind(':');
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(std::stoi(target.substr(colon + 1))));
  ASSERT_EQ(::inet_pton(AF_INET, target.substr(0, colon).c_str(), &address.sin_addr), 1);
  const int peer = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_GE(peer, 0);
  ASSERT_EQ(::connect(peer, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  constexpr std::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  const std::string_view sent = manner == 0   ? ""
                                : manner == 1 ? kPreface.substr(0, 10)
                                : manner == 2 ? kPreface
                                              : "GET / HTTP/1.1\r\n\r\n";
  if (!sent.empty()) ::send(peer, sent.data(), sent.size(), MSG_NOSIGNAL);
  if (manner % 2 == 1) {
    // A reset instead of an orderly end.
    const linger at_once{1, 0};
    ::setsockopt(peer, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  }
  ::close(peer);
}

TEST_F(ServerLifetimeTest, ConnectionsThatComeAndGoLeaveNothing) {
  const char* rounds = std::getenv("KV_TEST_ROUNDS");
  const int connections = 50 * (rounds == nullptr ? 60 : std::atoi(rounds));
  const auto client = Connect();
  PutPathOf(*client, 1, 3);
  // Threads and pools are there after the first ones.
  for (int i = 0; i < 400; ++i) ASSERT_NO_FATAL_FAILURE(ConnectOnce(server_.listen, i % 4));
  [[maybe_unused]] const std::uint64_t memory_before = server_.resident_bytes();
  for (int i = 0; i < connections; ++i) {
    ASSERT_NO_FATAL_FAILURE(ConnectOnce(server_.listen, i % 4));
  }
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (server_.open_file_count() > 200 && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_LE(server_.open_file_count(), 200u);
  // Sanitizers keep what was freed.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LE(server_.resident_bytes(), memory_before + (std::uint64_t{64} << 20));
#endif
  PutPathOf(*client, 2, 3);
}

}  // namespace
}  // namespace kvtrie
