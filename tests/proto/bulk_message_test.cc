#include "proto/bulk_message.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "kvtrie/v1/cache.pb.h"

namespace kvtrie {
namespace {

std::string Flatten(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

// The bytes cut into slices at random places, as a socket would.
grpc::ByteBuffer Cut(const std::string& bytes, std::mt19937& random) {
  std::vector<grpc::Slice> slices;
  for (std::size_t offset = 0; offset < bytes.size();) {
    const std::size_t count = std::min<std::size_t>(bytes.size() - offset, 1 + random() % 7);
    slices.emplace_back(bytes.data() + offset, count);
    offset += count;
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

std::string Bytes(const BulkPayload& payload) {
  std::string bytes;
  for (const auto piece : payload.pieces()) {
    bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  return bytes;
}

v1::FetchResponse TestHeader() {
  v1::FetchResponse header;
  header.add_blocks()->set_block_index(300);
  header.mutable_blocks(0)->mutable_status()->set_message("why");
  v1::Chunk* chunk = header.add_chunks();
  chunk->set_offset(1u << 30);
  chunk->set_crc32c(0xfedcba98);
  return header;
}

TEST(BulkMessageTest, IsTheSameOnTheWireAsProtobufs) {
  const v1::FetchResponse header = TestHeader();
  const grpc::Slice payload[] = {grpc::Slice("abc"), grpc::Slice("defg")};
  v1::FetchResponse plain = header;
  plain.set_data("abcdefg");
  EXPECT_EQ(Flatten(ComposeBulkMessage(header, payload)), plain.SerializeAsString());
  EXPECT_EQ(Flatten(ComposeBulkMessage(header, {})), header.SerializeAsString());
}

TEST(BulkMessageTest, PayloadIsSharedNotCopied) {
  static bool released;
  static char memory[100'000];
  released = false;
  {
    const grpc::Slice slice(memory, sizeof memory, [](void*) { released = true; });
    const grpc::ByteBuffer buffer = ComposeBulkMessage(TestHeader(), {&slice, 1});
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(buffer.Dump(&slices).ok());
    EXPECT_EQ(slices.back().begin(), reinterpret_cast<const std::uint8_t*>(memory));
    EXPECT_FALSE(released);
  }
  EXPECT_TRUE(released);
}

TEST(BulkMessageTest, ParsesHoweverItIsCut) {
  std::mt19937 random(1);
  v1::FetchResponse plain = TestHeader();
  plain.set_data(std::string(100, 'x') + "end");
  for (int i = 0; i < 100; ++i) {
    v1::FetchResponse header;
    BulkPayload payload;
    ASSERT_TRUE(ParseBulkMessage(Cut(plain.SerializeAsString(), random), &header, &payload).ok());
    EXPECT_EQ(header.SerializeAsString(), TestHeader().SerializeAsString());
    EXPECT_EQ(Bytes(payload), plain.data());
    EXPECT_EQ(payload.size(), 103u);
    std::string range;
    for (const auto piece : payload.Range(99, 3)) {
      range.append(reinterpret_cast<const char*>(piece.data()), piece.size());
    }
    EXPECT_EQ(range, "xen");
  }
}

TEST(BulkMessageTest, TheLastOfTwoPayloadsCounts) {
  std::mt19937 random(2);
  v1::FetchResponse first;
  first.set_data("first");
  v1::FetchResponse second = TestHeader();
  second.set_data("2nd");
  const std::string both = first.SerializeAsString() + second.SerializeAsString();
  v1::FetchResponse header;
  BulkPayload payload;
  ASSERT_TRUE(ParseBulkMessage(Cut(both, random), &header, &payload).ok());
  EXPECT_EQ(Bytes(payload), "2nd");
}

TEST(BulkMessageTest, CutOffMessagesAreRefused) {
  std::mt19937 random(3);
  v1::FetchResponse plain = TestHeader();
  plain.set_data("payload");
  const std::string bytes = plain.SerializeAsString();
  const std::size_t header_bytes = TestHeader().ByteSizeLong();
  for (std::size_t count = header_bytes + 1; count < bytes.size(); ++count) {
    v1::FetchResponse header;
    BulkPayload payload;
    EXPECT_TRUE(absl::IsInvalidArgument(
        ParseBulkMessage(Cut(bytes.substr(0, count), random), &header, &payload)));
  }
}

}  // namespace
}  // namespace kvtrie
