#include "server/local_lane_server.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "kvtrie/v1/local_lane.pb.h"
#include "tests/server/running_server.h"

namespace kvtrie {
namespace {

constexpr std::size_t kRegionBytes = std::size_t{1} << 20;

// The client's side of the lane, as small as can be.
class LaneClient {
 public:
  explicit LaneClient(const std::string& socket_path, unsigned seals = F_SEAL_SHRINK) {
    memory_ = ::memfd_create("region", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    EXPECT_EQ(::ftruncate(memory_, kRegionBytes), 0);
    if (seals != 0) {
      EXPECT_EQ(::fcntl(memory_, F_ADD_SEALS, seals), 0);
    }
    region_ = static_cast<char*>(
        ::mmap(nullptr, kRegionBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory_, 0));
    socket_ = ::socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, socket_path.c_str(), sizeof address.sun_path - 1);
    EXPECT_EQ(::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  ~LaneClient() {
    ::munmap(region_, kRegionBytes);
    ::close(memory_);
    ::close(socket_);
  }

  v1::ItemStatus Greet(const std::string& token, std::uint64_t region_bytes = kRegionBytes,
                       bool with_memory = true) {
    v1::LaneHello hello;
    hello.set_token(token);
    hello.set_region_bytes(region_bytes);
    std::string bytes = Framed(hello);
    iovec piece{bytes.data(), bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    if (with_memory) {
      header.msg_control = control;
      header.msg_controllen = sizeof control;
      cmsghdr* c = CMSG_FIRSTHDR(&header);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(c), &memory_, sizeof memory_);
    }
    EXPECT_EQ(::sendmsg(socket_, &header, MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
    v1::LaneHelloReply reply;
    EXPECT_TRUE(Receive(&reply));
    return reply.status();
  }

  v1::LaneResponse Ask(const v1::LaneRequest& request) {
    EXPECT_TRUE(SendRaw(Framed(request)));
    v1::LaneResponse response;
    EXPECT_TRUE(Receive(&response));
    return response;
  }

  bool SendRaw(const std::string& bytes) {
    return ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  // True: the server has ended the connection.
  bool AtEnd() {
    char byte;
    return ::recv(socket_, &byte, 1, 0) <= 0;
  }

  char* region() { return region_; }

 private:
  template <typename Message>
  static std::string Framed(const Message& message) {
    const std::string body = message.SerializeAsString();
    const auto size = static_cast<std::uint32_t>(body.size());
    return std::string(reinterpret_cast<const char*>(&size), 4) + body;
  }
  template <typename Message>
  bool Receive(Message* message) {
    std::uint32_t size = 0;
    if (::recv(socket_, &size, 4, MSG_WAITALL) != 4) return false;
    std::string body(size, '\0');
    if (size > 0 && ::recv(socket_, body.data(), size, MSG_WAITALL) != static_cast<ssize_t>(size)) {
      return false;
    }
    return message->ParseFromString(body);
  }

  int memory_ = -1;
  int socket_ = -1;
  char* region_ = nullptr;
};

class LocalLaneServerTest : public ::testing::Test {
 protected:
  std::string Token() {
    v1::OpenLocalLaneResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(
        server_.cache().OpenLocalLane(&context, v1::OpenLocalLaneRequest(), &response).ok());
    EXPECT_EQ(response.token().size(), 32u);
    return response.token();
  }
  std::string socket_path() { return server_.server().addresses().local_socket; }
  std::unique_ptr<LaneClient> Connected() {
    auto client = std::make_unique<LaneClient>(socket_path());
    EXPECT_EQ(client->Greet(Token()).code(), 0u);
    return client;
  }
  v1::LaneRequest FetchRequest(std::uint32_t block_count) {
    v1::LaneRequest request;
    v1::LaneFetch* fetch = request.mutable_fetch();
    fetch->mutable_request()->mutable_prefix()->set_model_id(model_);
    fetch->mutable_request()->mutable_prefix()->set_tokens(PathTokens(block_count));
    fetch->set_region_bytes(kRegionBytes);
    return request;
  }

  RunningServer server_;
  std::string model_ = server_.RegisterModel();
};

TEST_F(LocalLaneServerTest, FetchedBlocksLandInTheRegion) {
  PutPath(server_.cache(), model_, 3);
  auto client = Connected();
  v1::LaneRequest request = FetchRequest(3);
  request.mutable_fetch()->set_region_offset(100);
  request.mutable_fetch()->set_region_bytes(kRegionBytes - 100);
  const v1::LaneResponse response = client->Ask(request);
  ASSERT_EQ(response.status().code(), 0u);
  ASSERT_EQ(response.blocks_size(), 3);
  for (const v1::LaneBlock& block : response.blocks()) {
    EXPECT_EQ(block.region_offset() % 64, 0u);
    EXPECT_GE(block.region_offset(), 100u);
    const std::string content(client->region() + block.region_offset(), kTestBlockBytes);
    EXPECT_EQ(content, BlockContent(block.result().block_index()));
    std::size_t offset = 0;
    for (const v1::Chunk& chunk : block.chunks()) {
      EXPECT_EQ(CrcOf(std::string_view(content).substr(offset, chunk.bytes())), chunk.crc32c());
      offset += chunk.bytes();
    }
    EXPECT_EQ(offset, kTestBlockBytes);
  }
}

TEST_F(LocalLaneServerTest, BlocksWithoutRoomSaySo) {
  PutPath(server_.cache(), model_, 3);
  auto client = Connected();
  v1::LaneRequest request = FetchRequest(4);
  request.mutable_fetch()->set_region_bytes(2 * kTestBlockBytes);
  const v1::LaneResponse response = client->Ask(request);
  std::map<std::uint32_t, std::uint32_t> codes;
  for (const auto& block : response.blocks()) {
    codes[block.result().block_index()] = block.result().status().code();
  }
  EXPECT_EQ(codes, (std::map<std::uint32_t, std::uint32_t>{{0, 0}, {1, 0}, {2, 8}, {3, 5}}));
}

TEST_F(LocalLaneServerTest, PutBlocksAreStored) {
  auto client = Connected();
  v1::LaneRequest request;
  v1::LanePut* put = request.mutable_put();
  v1::PutRequest scratch;
  Announce(1, model_, PathTokens(2), &scratch);
  AddBlock(1, 0, BlockContent(0), &scratch);
  AddBlock(1, 1, BlockContent(1), &scratch);
  std::memcpy(client->region() + 64, scratch.data().data(), scratch.data().size());
  put->set_region_offset(64);
  *put->mutable_announce() = scratch.announces(0);
  *put->mutable_chunks() = scratch.chunks();
  const v1::LaneResponse response = client->Ask(request);
  ASSERT_EQ(response.status().code(), 0u) << response.DebugString();
  ASSERT_EQ(response.put().dones_size(), 1);
  EXPECT_EQ(response.put().dones(0).stored_blocks(), 2u);
  EXPECT_EQ(LookUp(server_.cache(), model_, PathTokens(2)).matched_blocks(), 2u);
}

TEST_F(LocalLaneServerTest, RangesOutsideOfTheRegionAreRefused) {
  auto client = Connected();
  v1::LaneRequest request = FetchRequest(1);
  request.mutable_fetch()->set_region_offset(kRegionBytes);
  EXPECT_EQ(client->Ask(request).status().code(), 3u);
  request = FetchRequest(1);
  request.mutable_fetch()->set_region_bytes(~std::uint64_t{0});
  EXPECT_EQ(client->Ask(request).status().code(), 3u);
  v1::LaneRequest put;
  v1::PutRequest scratch;
  Announce(1, model_, PathTokens(1), &scratch);
  *put.mutable_put()->mutable_announce() = scratch.announces(0);
  put.mutable_put()->set_region_offset(kRegionBytes - 10);
  v1::Chunk* chunk = put.mutable_put()->add_chunks();
  chunk->set_put_id(1);
  chunk->set_bytes(100);
  EXPECT_EQ(client->Ask(put).status().code(), 3u);
}

TEST_F(LocalLaneServerTest, TokensAreValidOnce) {
  const std::string token = Token();
  LaneClient first(socket_path());
  EXPECT_EQ(first.Greet(token).code(), 0u);
  LaneClient second(socket_path());
  EXPECT_EQ(second.Greet(token).code(), 16u);
  EXPECT_TRUE(second.AtEnd());
  LaneClient third(socket_path());
  EXPECT_EQ(third.Greet(std::string(32, 'x')).code(), 16u);
}

TEST_F(LocalLaneServerTest, RegionsThatCouldShrinkOrAreTooSmallAreRefused) {
  LaneClient unsealed(socket_path(), /*seals=*/0);
  EXPECT_EQ(unsealed.Greet(Token()).code(), 3u);
  LaneClient small(socket_path());
  EXPECT_EQ(small.Greet(Token(), kRegionBytes + 1).code(), 3u);
  LaneClient none(socket_path());
  EXPECT_EQ(none.Greet(Token(), kRegionBytes, /*with_memory=*/false).code(), 3u);
}

TEST_F(LocalLaneServerTest, MalformedMessagesEndTheConnection) {
  for (const std::string& bytes :
       {std::string("\xff\xff\xff\xff", 4), std::string("\2\0\0\0\x0f\x0f", 6),
        std::string("\0\0\0\0", 4)}) {
    auto client = Connected();
    ASSERT_TRUE(client->SendRaw(bytes));
    EXPECT_TRUE(client->AtEnd());
  }
}

TEST_F(LocalLaneServerTest, SocketIsForThisUserOnly) {
  struct stat file;
  ASSERT_EQ(::stat(socket_path().c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0600u);
}

TEST_F(LocalLaneServerTest, StopEndsIdleConnections) {
  auto client = Connected();
  const std::string path = socket_path();
  server_.server_owner().reset();
  EXPECT_TRUE(client->AtEnd());
  struct stat file;
  EXPECT_NE(::stat(path.c_str(), &file), 0);
}

}  // namespace
}  // namespace kvtrie
