#include "client/lane_socket.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "kvtrie/v1/local_lane.pb.h"
#include "storage/base/byte_order.h"

namespace kvtrie {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class LaneSocketTest : public ::testing::Test {
 protected:
  LaneSocketTest() {
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    socket_ = std::make_unique<LaneSocket>(fds[0]);
    peer_ = fds[1];
  }
  ~LaneSocketTest() override { ClosePeer(); }

  void ClosePeer() {
    if (peer_ >= 0) close(peer_);
    peer_ = -1;
  }
  void Write(const std::string& bytes) {
    ASSERT_EQ(write(peer_, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }
  static std::string Framed(const std::string& body) {
    std::string bytes(4, '\0');
    StoreLittle(bytes.data(), static_cast<std::uint32_t>(body.size()));
    return bytes + body;
  }

  std::unique_ptr<LaneSocket> socket_;
  int peer_ = -1;
};

TEST_F(LaneSocketTest, MessageGoesOutWithItsLengthAndDescriptor) {
  v1::LaneHello hello;
  hello.set_token(std::string(32, 't'));
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  ASSERT_TRUE(socket_->Send(hello, pipe_fds[1], Deadline::After(seconds(5))).ok());

  char bytes[256];
  iovec vector{bytes, sizeof bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr header{};
  header.msg_iov = &vector;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  const ssize_t count = recvmsg(peer_, &header, 0);
  ASSERT_EQ(count, static_cast<ssize_t>(4 + hello.ByteSizeLong()));
  EXPECT_EQ(LoadLittle<std::uint32_t>(bytes), hello.ByteSizeLong());
  const cmsghdr* rights = CMSG_FIRSTHDR(&header);
  ASSERT_NE(rights, nullptr);
  int passed;
  std::memcpy(&passed, CMSG_DATA(rights), sizeof passed);
  EXPECT_EQ(write(passed, "x", 1), 1);
  close(passed);
  close(pipe_fds[0]);
  close(pipe_fds[1]);
}

TEST_F(LaneSocketTest, AnswerMayArriveByteByByte) {
  v1::LaneResponse sent;
  sent.mutable_status()->set_message("hello");
  const std::string framed = Framed(sent.SerializeAsString());
  std::thread writer([&] {
    for (const char byte : framed) ASSERT_EQ(write(peer_, &byte, 1), 1);
  });
  v1::LaneResponse received;
  EXPECT_TRUE(socket_->Receive(&received, Deadline::After(seconds(10))).ok());
  writer.join();
  EXPECT_EQ(received.status().message(), "hello");
}

TEST_F(LaneSocketTest, LargeAnswerIsWhole) {
  v1::LaneResponse sent;
  sent.mutable_status()->set_message(std::string(3 << 20, 'z'));
  std::thread writer([&] { Write(Framed(sent.SerializeAsString())); });
  v1::LaneResponse received;
  EXPECT_TRUE(socket_->Receive(&received, Deadline::After(seconds(10))).ok());
  writer.join();
  EXPECT_EQ(received.status().message().size(), std::size_t{3} << 20);
}

TEST_F(LaneSocketTest, MalformedAnswersAreDataLoss) {
  v1::LaneResponse received;
  std::string over(4, '\0');
  StoreLittle(over.data(), static_cast<std::uint32_t>(kLaneMessageBytesMax + 1));
  Write(over);
  EXPECT_TRUE(absl::IsDataLoss(socket_->Receive(&received, Deadline::After(seconds(5)))));
}

TEST_F(LaneSocketTest, BytesThatAreNoMessageAreDataLoss) {
  v1::LaneResponse received;
  Write(Framed("\xff\xff\xff"));
  EXPECT_TRUE(absl::IsDataLoss(socket_->Receive(&received, Deadline::After(seconds(5)))));
}

TEST_F(LaneSocketTest, SecondAnswerToOneRequestIsDataLoss) {
  v1::LaneResponse received;
  Write(Framed("") + Framed(""));
  EXPECT_TRUE(absl::IsDataLoss(socket_->Receive(&received, Deadline::After(seconds(5)))));
}

TEST_F(LaneSocketTest, ClosedPeerIsUnavailable) {
  ClosePeer();
  v1::LaneResponse received;
  EXPECT_TRUE(absl::IsUnavailable(socket_->Receive(&received, Deadline::After(seconds(5)))));
  EXPECT_TRUE(absl::IsUnavailable(socket_->Send(received, -1, Deadline::After(seconds(5)))));
}

TEST_F(LaneSocketTest, SilentPeerEndsAtTheDeadline) {
  v1::LaneResponse received;
  const auto began = std::chrono::steady_clock::now();
  EXPECT_TRUE(
      absl::IsDeadlineExceeded(socket_->Receive(&received, Deadline::After(milliseconds(50)))));
  const auto took = std::chrono::steady_clock::now() - began;
  EXPECT_GE(took, milliseconds(50));
  EXPECT_LT(took, seconds(5));
}

TEST_F(LaneSocketTest, PeerThatDoesNotReadEndsASendAtTheDeadline) {
  v1::LaneResponse large;
  large.mutable_status()->set_message(std::string(4 << 20, 'z'));
  EXPECT_TRUE(
      absl::IsDeadlineExceeded(socket_->Send(large, -1, Deadline::After(milliseconds(50)))));
}

TEST(LaneConnectTest, MissingSocketIsUnavailable) {
  EXPECT_TRUE(absl::IsUnavailable(LaneSocket::Connect("/nonexistent/lane.sock").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(LaneSocket::Connect(std::string(200, 'x')).status()));
}

}  // namespace
}  // namespace kvtrie
