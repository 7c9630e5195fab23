#include "server/profile_upload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "storage/base/crc32c.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

// What an upload did with its sink.
struct Seen {
  int begun = 0;
  std::uint64_t total_bytes = 0;
  ProfileId expected;
  std::string bytes;
  bool committed = false;
  bool dropped = false;
  absl::Status answer;  // of Append and Commit
};

class FakeSink final : public ProfileSink {
 public:
  explicit FakeSink(Seen* seen) : seen_(seen) {}
  ~FakeSink() override { seen_->dropped = true; }
  absl::Status Append(std::span<const std::byte> bytes) override {
    seen_->bytes.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    return seen_->answer;
  }
  absl::StatusOr<StoredProfile> Commit() override {
    if (!seen_->answer.ok()) return seen_->answer;
    seen_->committed = true;
    StoredProfile profile;
    profile.info.id.bytes.fill(7);
    return profile;
  }

 private:
  Seen* const seen_;
};

class ProfileUploadTest : public testing::Test {
 protected:
  absl::Status Take(const v1::PutProfileRequest& message) {
    const grpc::Slice slice(message.data());
    v1::PutProfileRequest head = message;
    head.clear_data();
    v1::PutProfileRequest request;
    BulkPayload payload;
    EXPECT_TRUE(ParseBulkMessage(ComposeBulkMessage(head, {&slice, 1}), &request, &payload).ok());
    return upload_.Take(request, payload);
  }
  // `bytes` at `offset`, in two chunks.
  static v1::PutProfileRequest Message(const std::string& bytes, std::uint64_t offset) {
    v1::PutProfileRequest message;
    const std::string parts[] = {bytes.substr(0, bytes.size() / 3), bytes.substr(bytes.size() / 3)};
    for (const std::string& part : parts) {
      v1::Chunk* const chunk = message.add_chunks();
      chunk->set_offset(offset);
      chunk->set_bytes(static_cast<std::uint32_t>(part.size()));
      chunk->set_crc32c(Crc32c(std::as_bytes(std::span(part))));
      offset += part.size();
    }
    message.set_data(bytes);
    return message;
  }
  static v1::PutProfileRequest First(const std::string& bytes, std::uint64_t total_bytes) {
    v1::PutProfileRequest message = Message(bytes, 0);
    message.set_total_bytes(total_bytes);
    return message;
  }
  void ExpectRefused(const v1::PutProfileRequest& message, const char* what) {
    const absl::Status status = Take(message);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(what));
    EXPECT_EQ(seen_.dropped, seen_.begun > 0);
  }

  const std::string a_ = std::string(700, 'a');
  const std::string b_ = std::string(500, 'b');
  Seen seen_;
  absl::Status begin_;
  ProfileUpload upload_{
      [this](std::uint64_t total_bytes,
             const ProfileId& expected) -> absl::StatusOr<std::unique_ptr<ProfileSink>> {
        ++seen_.begun;
        seen_.total_bytes = total_bytes;
        seen_.expected = expected;
        if (!begin_.ok()) return begin_;
        return std::make_unique<FakeSink>(&seen_);
      }};
};

TEST_F(ProfileUploadTest, HandsOnWhatComes) {
  v1::PutProfileRequest first = First(a_, 1200);
  first.set_expected_profile_id(std::string(16, 'x'));
  ASSERT_TRUE(Take(first).ok());
  EXPECT_EQ(seen_.total_bytes, 1200u);
  EXPECT_EQ(seen_.expected.view(), std::string(16, 'x'));
  ASSERT_TRUE(Take(Message(b_, 700)).ok());
  EXPECT_EQ(seen_.begun, 1);
  EXPECT_EQ(seen_.bytes, a_ + b_);
  EXPECT_FALSE(seen_.committed);
  const auto response = upload_.Commit();
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->profile().profile_id(), std::string(16, '\7'));
  EXPECT_TRUE(seen_.committed);
  EXPECT_TRUE(seen_.dropped);
}

TEST_F(ProfileUploadTest, RefusesWhatWasNotAnnounced) {
  ExpectRefused(Message(a_, 0), "total_bytes");
  EXPECT_EQ(seen_.begun, 0);
}

TEST_F(ProfileUploadTest, TakesNoBytesWithoutRoom) {
  begin_ = absl::ResourceExhaustedError("no room");
  EXPECT_TRUE(absl::IsResourceExhausted(Take(First(a_, 1200))));
  EXPECT_EQ(seen_.bytes, "");
}

TEST_F(ProfileUploadTest, RefusesBytesThatDoNotMatchTheirChecksum) {
  v1::PutProfileRequest first = First(a_, 1200);
  first.mutable_chunks(1)->set_crc32c(1);
  ExpectRefused(first, "crc32c");
}

TEST_F(ProfileUploadTest, RefusesBytesThatDoNotFollow) {
  ASSERT_TRUE(Take(First(a_, 1200)).ok());
  ExpectRefused(Message(b_, 701), "chunks[0].offset");
}

TEST_F(ProfileUploadTest, RefusesMoreThanWasAnnounced) {
  ASSERT_TRUE(Take(First(a_, 1199)).ok());
  ExpectRefused(Message(b_, 700), "total_bytes");
  EXPECT_LE(seen_.bytes.size(), 1199u);
}

TEST_F(ProfileUploadTest, RefusesLessThanWasAnnounced) {
  EXPECT_TRUE(absl::IsInvalidArgument(upload_.Commit().status()));
  ASSERT_TRUE(Take(First(a_, 1200)).ok());
  const auto response = upload_.Commit();
  EXPECT_TRUE(absl::IsInvalidArgument(response.status()));
  EXPECT_THAT(std::string(response.status().message()), HasSubstr("total_bytes"));
  EXPECT_FALSE(seen_.committed);
  EXPECT_TRUE(seen_.dropped);
}

TEST_F(ProfileUploadTest, ErrorsOfTheSinkAreItsOwn) {
  ASSERT_TRUE(Take(First(a_, 1200)).ok());
  ASSERT_TRUE(Take(Message(b_, 700)).ok());
  seen_.answer = absl::FailedPreconditionError("another id");
  EXPECT_EQ(upload_.Commit().status(), seen_.answer);
  EXPECT_TRUE(seen_.dropped);
}

}  // namespace
}  // namespace kvtrie
