#include "server/profile_streams.h"

#include <gmock/gmock.h>

#include <array>
#include <filesystem>

#include "tests/server/coded_blocks.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

constexpr int kInvalidArgument = 3;
constexpr int kDeadlineExceeded = 4;
constexpr int kNotFound = 5;
constexpr int kResourceExhausted = 8;
constexpr int kFailedPrecondition = 9;

struct Got {
  grpc::Status status;
  std::string content;
  std::size_t message_count = 0;
};
Got GetProfile(v1::Cache::Stub& cache, const ProfileId& id) {
  Got got;
  grpc::ClientContext context;
  v1::GetProfileRequest request;
  request.set_profile_id(std::string(id.view()));
  auto stream = cache.GetProfile(&context, request);
  v1::GetProfileResponse response;
  while (stream->Read(&response)) {
    EXPECT_EQ(response.total_bytes() != 0, got.message_count == 0);
    ++got.message_count;
    EXPECT_EQ(response.chunks_size(), 1);
    EXPECT_EQ(response.chunks(0).offset(), got.content.size());
    EXPECT_EQ(response.chunks(0).bytes(), response.data().size());
    EXPECT_EQ(response.chunks(0).crc32c(), CrcOf(response.data()));
    got.content += response.data();
  }
  got.status = stream->Finish();
  return got;
}

v1::ListProfilesResponse List(v1::Cache::Stub& cache) {
  grpc::ClientContext context;
  v1::ListProfilesResponse response;
  EXPECT_TRUE(cache.ListProfiles(&context, {}, &response).ok());
  return response;
}

std::size_t FileCount(const RunningServer& server) {
  std::size_t count = 0;
  for (const auto& file : std::filesystem::directory_iterator(server.folder() + "/data/profiles")) {
    count += file.is_regular_file() ? 1 : 0;
  }
  return count;
}

TEST(ProfileStreamsTest, WhatIsPutIsListedAndReadBack) {
  RunningServer server;
  const std::string model = server.RegisterModel();
  const std::string small = TestProfile(1024, 1);
  const std::string large = TestProfile((3 << 20) + 77, 2);
  for (const std::string& profile : {small, large}) {
    v1::PutProfileResponse response;
    const grpc::Status status = PutProfile(server.cache(), profile, &response, 300'000);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.profile().profile_id(), ProfileIdOf(profile).view());
    EXPECT_EQ(response.profile().profile_bytes(), profile.size());
    const Got got = GetProfile(server.cache(), ProfileIdOf(profile));
    EXPECT_TRUE(got.status.ok()) << got.status.error_message();
    EXPECT_TRUE(got.content == profile);
    EXPECT_EQ(got.message_count, (profile.size() + (1 << 20) - 1) >> 20);
  }
  const auto listed = List(server.cache());
  ASSERT_EQ(listed.profiles_size(), 2);
  for (const v1::ProfileEntry& profile : listed.profiles()) {
    EXPECT_THAT(profile.model_ids(), testing::ElementsAre(model));
    EXPECT_EQ(profile.codec_key().size(), 16u);
    ASSERT_EQ(profile.levels_size(), 2);
    EXPECT_EQ(profile.levels(0).quality(), v1::QUALITY_HIGH);
    EXPECT_EQ(profile.levels(0).bits_per_component(), 3);
    EXPECT_EQ(profile.frames(), 0u);
    EXPECT_GT(profile.created_unix_seconds(), 0);
  }
}

TEST(ProfileStreamsTest, PuttingIsIdempotentAndRegisteringNamesTheProfile) {
  RunningServer server;
  const std::string profile = TestProfile();
  v1::PutProfileResponse first;
  ASSERT_TRUE(PutProfile(server.cache(), profile, &first).ok());
  v1::PutProfileResponse second;
  const std::string id(ProfileIdOf(profile).view());
  ASSERT_TRUE(PutProfile(server.cache(), profile, &second, 100'000, id).ok());
  EXPECT_EQ(second.profile().profile_id(), first.profile().profile_id());
  EXPECT_EQ(FileCount(server), 1u);

  v1::RegisterModelRequest request;
  *request.mutable_spec() = TestSpec();
  v1::RegisterModelResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(server.cache().RegisterModel(&context, request, &response).ok());
  EXPECT_EQ(response.profile_id(), id);
}

// Each with the name of the field, and nothing left behind.
TEST(ProfileStreamsTest, BadRequestsAreRefused) {
  RunningServer server;
  const std::string profile = TestProfile();
  const auto put = [&](const std::function<void(v1::PutProfileRequest*)>& change) {
    grpc::ClientContext context;
    v1::PutProfileResponse response;
    auto stream = server.cache().PutProfile(&context, &response);
    v1::PutProfileRequest request;
    request.set_total_bytes(profile.size());
    v1::Chunk* chunk = request.add_chunks();
    chunk->set_bytes(static_cast<std::uint32_t>(profile.size()));
    chunk->set_crc32c(CrcOf(profile));
    request.set_data(profile);
    change(&request);
    stream->Write(request);
    stream->WritesDone();
    return stream->Finish();
  };
  const auto expect = [&](int code, const char* what,
                          const std::function<void(v1::PutProfileRequest*)>& change) {
    const grpc::Status status = put(change);
    EXPECT_EQ(status.error_code(), code) << what;
    EXPECT_THAT(status.error_message(), HasSubstr(what));
  };
  expect(kInvalidArgument, "total_bytes", [](auto* r) { r->clear_total_bytes(); });
  expect(kInvalidArgument, "total_bytes", [](auto* r) { r->set_total_bytes(1000); });
  expect(kInvalidArgument, "total_bytes", [](auto* r) { r->set_total_bytes(3001); });
  expect(kInvalidArgument, "total_bytes", [](auto* r) { r->set_total_bytes(1ull << 40); });
  expect(kInvalidArgument, "expected_profile_id",
         [](auto* r) { r->set_expected_profile_id("short"); });
  expect(kFailedPrecondition, "expected_profile_id",
         [](auto* r) { r->set_expected_profile_id(std::string(16, 'x')); });
  expect(kInvalidArgument, "chunks[0].offset",
         [](auto* r) { r->mutable_chunks(0)->set_offset(1); });
  expect(kInvalidArgument, "crc32c", [](auto* r) { r->mutable_chunks(0)->set_crc32c(1); });
  expect(kInvalidArgument, "data", [](auto* r) { r->mutable_data()->pop_back(); });
  expect(kInvalidArgument, "magic", [](auto* r) {
    (*r->mutable_data())[0] = 'X';
    r->mutable_chunks(0)->set_crc32c(CrcOf(r->data()));
  });
  expect(kInvalidArgument, "checksum of the body", [](auto* r) {
    r->mutable_data()->back() ^= 1;
    r->mutable_chunks(0)->set_crc32c(CrcOf(r->data()));
  });
  {
    grpc::ClientContext context;
    v1::PutProfileResponse response;
    auto stream = server.cache().PutProfile(&context, &response);
    stream->WritesDone();
    EXPECT_EQ(stream->Finish().error_code(), kInvalidArgument);
  }
  EXPECT_EQ(FileCount(server), 0u);
  ProfileId missing;
  missing.bytes.fill(3);
  EXPECT_EQ(GetProfile(server.cache(), missing).status.error_code(), kNotFound);
  v1::GetProfileRequest request;
  request.set_profile_id("short");
  grpc::ClientContext context;
  auto stream = server.cache().GetProfile(&context, request);
  v1::GetProfileResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), kInvalidArgument);
}

TEST(ProfileStreamsTest, AStreamThatBreaksLeavesNothing) {
  RunningServer server;
  const std::string profile = TestProfile(300'000);
  for (int round = 0; round < 5; ++round) {
    grpc::ClientContext context;
    v1::PutProfileResponse response;
    auto stream = server.cache().PutProfile(&context, &response);
    v1::PutProfileRequest request;
    request.set_total_bytes(profile.size());
    v1::Chunk* chunk = request.add_chunks();
    chunk->set_bytes(100'000);
    request.set_data(profile.substr(0, 100'000));
    chunk->set_crc32c(CrcOf(request.data()));
    ASSERT_TRUE(stream->Write(request));
    if (round > 0) AwaitTrue([&] { return FileCount(server) == 1; });
    context.TryCancel();
    stream->Finish();
    AwaitTrue([&] { return FileCount(server) == 0; });
  }
  EXPECT_EQ(List(server.cache()).profiles_size(), 0);
}

TEST(ProfileStreamsTest, AWriterThatStallsIsEnded) {
  RunningServer server(
      [](ServerConfig* config) { config->stream_stall_limit = std::chrono::milliseconds(100); });
  grpc::ClientContext context;
  v1::PutProfileResponse response;
  auto stream = server.cache().PutProfile(&context, &response);
  v1::PutProfileRequest request;
  request.set_total_bytes(3000);
  ASSERT_TRUE(stream->Write(request));
  EXPECT_EQ(stream->Finish().error_code(), kDeadlineExceeded);
  AwaitTrue([&] { return FileCount(server) == 0; });
}

TEST(ProfileStreamsTest, WhatFramesNameIsNotDeleted) {
  RunningServer server;
  const std::string model = server.RegisterModel();
  const ProfileId profile = MustPutProfile(server.cache(), TestProfile());
  PutCodedPath(server.cache(), model, profile, 3);
  EXPECT_EQ(List(server.cache()).profiles(0).frames(), 3u);
  const auto remove = [&](const std::string& id) {
    v1::DeleteProfileRequest request;
    request.set_profile_id(id);
    v1::DeleteProfileResponse response;
    grpc::ClientContext context;
    return server.cache().DeleteProfile(&context, request, &response).error_code();
  };
  EXPECT_EQ(remove(std::string(profile.view())), kFailedPrecondition);
  EXPECT_EQ(remove("short"), kInvalidArgument);
  v1::DeleteRequest request;
  request.mutable_selection()->set_all(true);
  v1::DeleteResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(server.cache().Delete(&context, request, &response).ok());
  EXPECT_EQ(remove(std::string(profile.view())), 0);
  EXPECT_EQ(remove(std::string(profile.view())), kNotFound);
}

TEST(ProfileStreamsTest, WhatDoesNotFitTheDiskIsRefusedBeforeItIsSent) {
  RunningServer server([](ServerConfig* config) {
    config->engine.disk_limit_bytes = std::uint64_t{64} << 20;
    config->engine.segment_bytes = std::uint64_t{4} << 20;
  });
  grpc::ClientContext context;
  v1::PutProfileResponse response;
  auto stream = server.cache().PutProfile(&context, &response);
  v1::PutProfileRequest request;
  request.set_total_bytes(std::uint64_t{100} << 20);
  stream->Write(request);
  EXPECT_EQ(stream->Finish().error_code(), kResourceExhausted);
}

// Each takes memory of the streams', of which a half is left for reads.
TEST(ProfileStreamsTest, ProfilesOnTheirWayHaveTheirBound) {
  RunningServer server(
      [](ServerConfig* config) { config->stream_memory_bytes = std::size_t{4} << 20; });
  v1::PutProfileRequest announcement;
  announcement.set_total_bytes(3000);
  struct Call {
    grpc::ClientContext context;
    v1::PutProfileResponse response;
    std::unique_ptr<grpc::ClientWriter<v1::PutProfileRequest>> writer;
  };
  std::array<Call, 2> slow;
  for (Call& call : slow) {
    call.writer = server.cache().PutProfile(&call.context, &call.response);
    ASSERT_TRUE(call.writer->Write(announcement));
  }
  AwaitTrue([&] { return FileCount(server) == slow.size(); });
  v1::PutProfileResponse response;
  EXPECT_EQ(PutProfile(server.cache(), TestProfile(), &response).error_code(), kResourceExhausted);
  for (Call& call : slow) call.context.TryCancel();
  for (Call& call : slow) call.writer->Finish();
  AwaitTrue([&] { return server.server().stream_budget().used_bytes() == 0; });
  EXPECT_TRUE(PutProfile(server.cache(), TestProfile(), &response).ok());
}

}  // namespace
}  // namespace kvtrie
