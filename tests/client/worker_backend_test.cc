#include "client/worker_backend.h"

#include <gmock/gmock.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "kvtrie/v1/codec.grpc.pb.h"
#include "storage/codec/frame_codec.h"
#include "storage/codec/profile_codec.h"
#include "tests/client/worker_process.h"
#include "tests/storage/base/fake_clock.h"
#include "tests/storage/codec/plain_profile_bytes.h"
#include "tests/storage/codec/residual_fixture.h"
#include "tests/storage/codec/shared_text.h"

namespace kvtrie {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kBlocks = 12;

// A session of a model with a profile, and what this process makes of it.
struct Session {
  explicit Session(const ModelSpec& of)
      : spec(of),
        profile(ProfileBytes(WithDifferences(PlainProfile(spec), spec))),
        residual(CodecOfProfile(spec, ProfileIdOf(profile), profile).value()),
        own(spec, residual),
        text(MakeText(spec, 16 * kBlocks, 3)) {
    for (std::size_t i = 0; i < kBlocks; ++i) {
      raw.push_back(CutBlock(spec, text, static_cast<std::uint32_t>(16 * i)));
      blocks.push_back({.first_position = static_cast<std::uint32_t>(16 * i),
                        .session_tokens = 16 * kBlocks,
                        .tokens = std::span(text.tokens).subspan(16 * i, 16),
                        .raw = raw.back()});
    }
    for (const Quality quality : {Quality::kHigh, Quality::kSmall}) {
      frames[quality] = own.Encode(blocks, quality).value();
      decoded[quality] = Decode(own, frames[quality]);
    }
  }

  std::vector<std::vector<std::byte>> Decode(const FrameCodec& codec,
                                             const std::vector<EncodedFrame>& of) const {
    std::vector<std::vector<std::byte>> to(kBlocks, std::vector<std::byte>(raw[0].size()));
    std::vector<FrameToDecode> to_decode;
    for (std::size_t i = 0; i < kBlocks; ++i) {
      to_decode.push_back({.frame = FrameView::Parse(of[i].bytes).value(),
                           .tokens = blocks[i].tokens,
                           .raw = to[i]});
    }
    EXPECT_TRUE(codec.Decode(to_decode).ok());
    return to;
  }

  FrameCodec CodecOf(const WorkerBackend& backend) const {
    return FrameCodec(spec, residual, backend.CoderFor(spec, residual).value());
  }

  // Whatever codes them, frames and KV are the same.
  void There(const FrameCodec& codec, Quality quality = Quality::kHigh) const {
    const auto coded = codec.Encode(blocks, quality);
    ASSERT_TRUE(coded.ok()) << coded.status();
    for (std::size_t i = 0; i < kBlocks; ++i) {
      ASSERT_EQ((*coded)[i].bytes, frames.at(quality)[i].bytes);
      EXPECT_EQ((*coded)[i].exact_tokens, frames.at(quality)[i].exact_tokens);
    }
  }
  void ThereAndBack(const FrameCodec& codec, Quality quality = Quality::kHigh) const {
    There(codec, quality);
    EXPECT_EQ(Decode(codec, frames.at(quality)), decoded.at(quality));
  }

  const ModelSpec spec;
  const std::vector<std::byte> profile;
  const std::shared_ptr<const ResidualCodec> residual;
  const FrameCodec own;  // of this process
  const SyntheticText text;
  std::vector<std::vector<std::byte>> raw;
  std::vector<BlockToEncode> blocks;
  std::unordered_map<Quality, std::vector<EncodedFrame>> frames;
  std::unordered_map<Quality, std::vector<std::vector<std::byte>>> decoded;
};

// Made once, for all tests.
const Session& SmallSession() {
  static const Session* const session =
      new Session(SyntheticSpec({{4, 2, 8, 8}}, DType::kBfloat16));
  return *session;
}
// Its frames have several sections, and its profile several messages.
const Session& LargeSession() {
  static const Session* const session = new Session(SectionedSpec());
  return *session;
}

class WorkerBackendTest : public testing::Test {
 protected:
  std::unique_ptr<WorkerBackend> Connect(std::vector<std::string> targets,
                                         milliseconds timeout = kAmple,
                                         milliseconds pause = milliseconds(20),
                                         const Session& session = SmallSession()) {
    WorkerOptions options;
    options.targets = std::move(targets);
    options.timeout = timeout;
    options.pause = pause;
    return std::make_unique<WorkerBackend>(
        options,
        [&session](const ProfileId& id, Deadline) -> absl::StatusOr<WorkerBackend::ProfileBytes> {
          if (id != session.residual->id()) return absl::NotFoundError("no such profile");
          return std::make_shared<const std::vector<std::byte>>(session.profile);
        });
  }

  static constexpr milliseconds kAmple{30'000};

  const Session& session_ = SmallSession();
};

TEST_F(WorkerBackendTest, AWorkerCodesAsThisProcessDoes) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  const Session& session = LargeSession();
  const auto backend = Connect({worker.listen}, kAmple, milliseconds(20), session);
  const FrameCodec codec = session.CodecOf(*backend);
  session.ThereAndBack(codec);
  session.ThereAndBack(codec, Quality::kSmall);
  const WorkerBackendStats stats = backend->Stats();
  EXPECT_EQ(stats.blocks_total, 4 * kBlocks);
  EXPECT_EQ(stats.own_blocks_total, 0u);
  EXPECT_EQ(stats.failed_calls_total, 0u);
  // The profile went there once.
  EXPECT_EQ(stats.sent_profiles_total, 1u);
  EXPECT_TRUE(backend->Probe().ok());
}

TEST_F(WorkerBackendTest, ReferencesGoAlong) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  const Session& session = LargeSession();
  const auto backend = Connect({worker.listen}, kAmple, milliseconds(20), session);
  const FrameCodec codec = session.CodecOf(*backend);
  const std::vector<ReferenceBlock> references = {
      {.node = *TrieNodeId::FromBytes("0123456789abcdef"),
       .first_position = 0,
       .tokens = session.blocks[1].tokens,
       .raw = session.raw[1],
       .quality = Quality::kNearExact}};
  const std::vector<ReferenceRun> runs = {{.first_token = 0, .token_count = 16}};
  BlockToEncode block = session.blocks[1];
  block.references = references;
  block.runs = runs;
  const auto own = session.own.Encode({&block, 1}, Quality::kHigh);
  const auto frames = codec.Encode({&block, 1}, Quality::kHigh);
  ASSERT_TRUE(frames.ok()) << frames.status();
  EXPECT_EQ(frames->front().bytes, own->front().bytes);
  ASSERT_EQ(frames->front().codec, CodecId::kReferenced);
  std::vector<std::byte> raw(session.raw[0].size()), own_raw(raw.size());
  FrameToDecode to_decode{.frame = FrameView::Parse(frames->front().bytes).value(),
                          .tokens = block.tokens,
                          .raw = raw,
                          .references = references};
  ASSERT_TRUE(codec.Decode({&to_decode, 1}).ok());
  to_decode.raw = own_raw;
  ASSERT_TRUE(session.own.Decode({&to_decode, 1}).ok());
  EXPECT_EQ(raw, own_raw);
  EXPECT_EQ(backend->Stats().own_blocks_total, 0u);
}

TEST_F(WorkerBackendTest, WithoutAWorkerThisProcessCodes) {
  const auto backend = Connect({"127.0.0.1:1"});
  const auto began = std::chrono::steady_clock::now();
  session_.ThereAndBack(session_.CodecOf(*backend));
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10));
  EXPECT_EQ(backend->Stats().blocks_total, 0u);
  EXPECT_EQ(backend->Stats().own_blocks_total, 2 * kBlocks);
  EXPECT_GT(backend->Stats().failed_calls_total, 0u);
}

TEST_F(WorkerBackendTest, AKilledWorkerLosesNothingAndARestartedOneIsUsedAgain) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  const auto backend = Connect({worker.listen});
  const FrameCodec codec = session_.CodecOf(*backend);
  session_.ThereAndBack(codec);
  worker.Kill();
  session_.ThereAndBack(codec);
  const std::uint64_t before = backend->Stats().blocks_total;
  worker.Start();
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (backend->Stats().blocks_total == before && std::chrono::steady_clock::now() < give_up) {
    session_.ThereAndBack(codec);
  }
  EXPECT_GT(backend->Stats().blocks_total, before);
  // It had forgotten the profile.
  EXPECT_EQ(backend->Stats().sent_profiles_total, 2u);
}

TEST_F(WorkerBackendTest, AnotherWorkerTakesOver) {
  WorkerProcess one{KVTRIE_WORKER_PROGRAM}, two{KVTRIE_WORKER_PROGRAM};
  const auto backend = Connect({one.listen, two.listen});
  const FrameCodec codec = session_.CodecOf(*backend);
  for (int i = 0; i < 3; ++i) session_.ThereAndBack(codec);
  two.Kill();
  for (int i = 0; i < 4; ++i) session_.ThereAndBack(codec);
  EXPECT_EQ(backend->Stats().own_blocks_total, 0u);
}

TEST_F(WorkerBackendTest, AWorkerThatHangsCostsItsTimeoutOnce) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  const auto backend = Connect({worker.listen}, milliseconds(1000));
  const FrameCodec codec = session_.CodecOf(*backend);
  session_.ThereAndBack(codec);
  worker.Freeze();
  const auto began = std::chrono::steady_clock::now();
  const auto frames = codec.Encode(session_.blocks, Quality::kHigh);
  const auto took = std::chrono::steady_clock::now() - began;
  worker.Thaw();
  ASSERT_TRUE(frames.ok());
  EXPECT_EQ(frames->front().bytes, session_.frames.at(Quality::kHigh)[0].bytes);
  EXPECT_LT(took, std::chrono::seconds(5));
  EXPECT_GE(backend->Stats().failed_calls_total, 1u);
}

TEST_F(WorkerBackendTest, AWorkerThatHangsLeavesTimeForAnother) {
  WorkerProcess one{KVTRIE_WORKER_PROGRAM}, two{KVTRIE_WORKER_PROGRAM};
  const auto backend = Connect({one.listen, two.listen}, milliseconds(4000), milliseconds(10'000));
  const FrameCodec codec = session_.CodecOf(*backend);
  for (int i = 0; i < 2; ++i) session_.ThereAndBack(codec);
  one.Freeze();
  for (int i = 0; i < 2; ++i) session_.ThereAndBack(codec);
  one.Thaw();
  EXPECT_EQ(backend->Stats().failed_calls_total, 1u);
  EXPECT_EQ(backend->Stats().own_blocks_total, 0u);
}

TEST_F(WorkerBackendTest, AProfileThatManyThreadsMissIsSentOnce) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  const auto backend = Connect({worker.listen});
  const FrameCodec codec = session_.CodecOf(*backend);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) threads.emplace_back([&] { session_.ThereAndBack(codec); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(backend->Stats().sent_profiles_total, 1u);
  EXPECT_EQ(backend->Stats().own_blocks_total, 0u);
}

TEST_F(WorkerBackendTest, AWorkerThatIsFullLeavesTheWorkHere) {
  WorkerProcess worker(KVTRIE_WORKER_PROGRAM,
                       {"--queue_items_max=1", "--coding_threads=1", "--batch_tokens=1"});
  const auto backend = Connect({worker.listen});
  const FrameCodec codec = session_.CodecOf(*backend);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) threads.emplace_back([&] { session_.ThereAndBack(codec); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(backend->Stats().blocks_total + backend->Stats().own_blocks_total, 8 * kBlocks);
  // Being full is no failure.
  EXPECT_EQ(backend->Stats().failed_calls_total, 0u);
}

TEST_F(WorkerBackendTest, WhatCannotBeDecodedIsRefusedAsThisProcessWould) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  const auto backend = Connect({worker.listen});
  const FrameCodec codec = session_.CodecOf(*backend);
  const std::vector<EncodedFrame>& frames = session_.frames.at(Quality::kHigh);
  std::vector<std::byte> raw(session_.raw[0].size());
  // Intact as its checksums say, but of another block.
  const FrameToDecode other{.frame = FrameView::Parse(frames[1].bytes).value(),
                            .tokens = session_.blocks[2].tokens,
                            .raw = raw};
  EXPECT_EQ(codec.Decode({&other, 1}), session_.own.Decode({&other, 1}));
}

TEST_F(WorkerBackendTest, ExactFramesWithAProfileAreMadeHere) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  const auto backend = Connect({worker.listen});
  const auto frames = session_.CodecOf(*backend).EncodeSmallestExact(session_.blocks);
  ASSERT_TRUE(frames.ok());
  EXPECT_EQ(frames->front().bytes,
            session_.own.EncodeSmallestExact(session_.blocks)->front().bytes);
  EXPECT_EQ(backend->Stats().blocks_total, 0u);
}

TEST_F(WorkerBackendTest, AWorkerEndsInOrder) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  const auto backend = Connect({worker.listen});
  const FrameCodec codec = session_.CodecOf(*backend);
  std::atomic<bool> stop{false};
  std::thread coding([&] {
    while (!stop) session_.ThereAndBack(codec);
  });
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (backend->Stats().blocks_total == 0 && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::yield();
  }
  EXPECT_GT(backend->Stats().blocks_total, 0u);
  EXPECT_EQ(worker.Terminate(), 0);
  stop = true;
  coding.join();
}

// A worker that does as the test says, within this process.
class FakeWorker final : public v1::Codec::Service {
 public:
  using Stream = grpc::ServerReaderWriter<v1::CodecResponse, v1::CodecRequest>;

  FakeWorker() {
    int port = 0;
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    listen = "127.0.0.1:" + std::to_string(port);
    SetHealthy(true);
  }
  ~FakeWorker() override { server_->Shutdown(std::chrono::system_clock::now()); }

  void SetHealthy(bool healthy) {
    server_->GetHealthCheckService()->SetServingStatus(v1::Codec::service_full_name(), healthy);
  }

  grpc::Status Encode(grpc::ServerContext* context, Stream* stream) override {
    ++calls;
    if (!refusal.ok()) return refusal;
    bool all = true;
    v1::CodecRequest request;
    while (stream->Read(&request)) {
      if (!request.has_item()) continue;
      v1::CodecResponse response;
      response.mutable_result()->set_item_id(request.item().item_id());
      if (answer(request.item(), response.mutable_result())) {
        stream->Write(response);
      } else {
        all = false;
      }
    }
    return all ? grpc::Status::OK : Hang(*context);
  }
  grpc::Status PutProfile(grpc::ServerContext* context, grpc::ServerReader<v1::PutProfileRequest>*,
                          v1::PutProfileResponse*) override {
    ++uploads;
    if (!upload_refusal.ok()) return upload_refusal;
    return Hang(*context);
  }

  // Ways to answer an item. A call hangs that has items without an answer.
  static bool Nothing(const v1::CodecItem&, v1::CodecResult*) { return false; }
  static bool MissesTheProfile(const v1::CodecItem& item, v1::CodecResult* result) {
    result->mutable_status()->set_code(grpc::FAILED_PRECONDITION);
    result->set_missing_profile_id(item.profile_id());
    return true;
  }

  std::string listen;
  std::atomic<int> calls{0}, uploads{0};
  grpc::Status refusal, upload_refusal;
  std::function<bool(const v1::CodecItem&, v1::CodecResult*)> answer = Nothing;

 private:
  static grpc::Status Hang(const grpc::ServerContext& context) {
    while (!context.IsCancelled()) std::this_thread::sleep_for(milliseconds(1));
    return grpc::Status::CANCELLED;
  }

  std::unique_ptr<grpc::Server> server_;
};

class FakeWorkersTest : public testing::Test {
 protected:
  std::unique_ptr<WorkerBackend> Connect(milliseconds timeout, std::vector<std::string> targets) {
    WorkerOptions options;
    options.targets = std::move(targets);
    options.timeout = timeout;
    options.pause = milliseconds(500);
    return std::make_unique<WorkerBackend>(
        options, [this](const ProfileId&, Deadline deadline) { return profiles_(deadline); },
        clock_);
  }
  void Encode(const WorkerBackend& backend) { session_.There(session_.CodecOf(backend)); }

  static constexpr milliseconds kAmple{30'000};

  const Session& session_ = SmallSession();
  FakeClock clock_;
  FakeWorker one_, two_;
  std::function<absl::StatusOr<WorkerBackend::ProfileBytes>(Deadline)> profiles_ = [](Deadline) {
    return absl::NotFoundError("gone");
  };
};

TEST_F(FakeWorkersTest, AWorkerThatIsFullIsLeftAloneForAsLongAsItSays) {
  one_.answer = [](const v1::CodecItem& item, v1::CodecResult* result) {
    result->mutable_status()->set_code(grpc::RESOURCE_EXHAUSTED);
    result->set_retry_after_ms(item.first_position() == 32 ? 700 : 40);
    return true;
  };
  const auto backend = Connect(kAmple, {one_.listen});
  for (int i = 0; i < 3; ++i) Encode(*backend);
  clock_.Advance(milliseconds(699));
  Encode(*backend);
  EXPECT_EQ(one_.calls, 1);
  clock_.Advance(milliseconds(1));
  Encode(*backend);
  EXPECT_EQ(one_.calls, 2);
  EXPECT_EQ(backend->Stats().failed_calls_total, 0u);
}

TEST_F(FakeWorkersTest, AWorkerThatRefusesCallsIsNotAskedAgainAtOnce) {
  one_.refusal = grpc::Status(grpc::UNAVAILABLE, "too many calls");
  const auto backend = Connect(kAmple, {one_.listen});
  const auto end = std::chrono::steady_clock::now() + milliseconds(300);
  while (std::chrono::steady_clock::now() < end) Encode(*backend);
  EXPECT_EQ(one_.calls, 1);
  clock_.Advance(milliseconds(500));
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (one_.calls == 1 && std::chrono::steady_clock::now() < give_up) Encode(*backend);
  EXPECT_EQ(one_.calls, 2);
}

TEST_F(FakeWorkersTest, AWorkerThatIsNotHealthyIsNotAsked) {
  one_.SetHealthy(false);
  one_.refusal = grpc::Status(grpc::UNAVAILABLE, "drains");
  const auto backend = Connect(kAmple, {one_.listen});
  const auto end = std::chrono::steady_clock::now() + milliseconds(300);
  while (std::chrono::steady_clock::now() < end) {
    Encode(*backend);
    clock_.Advance(std::chrono::hours(1));
  }
  EXPECT_EQ(one_.calls, 0);
  one_.SetHealthy(true);
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (one_.calls == 0 && std::chrono::steady_clock::now() < give_up) Encode(*backend);
  EXPECT_EQ(one_.calls, 1);
}

TEST_F(FakeWorkersTest, BlocksWhoseProfileNobodyHasAreSentOnce) {
  one_.answer = two_.answer = FakeWorker::MissesTheProfile;
  for (const absl::Status& why : {absl::NotFoundError("gone"), absl::UnavailableError("closed"),
                                  absl::DeadlineExceededError("slow")}) {
    profiles_ = [why](Deadline) { return why; };
    const auto backend = Connect(kAmple, {one_.listen, two_.listen});
    one_.calls = two_.calls = 0;
    Encode(*backend);
    EXPECT_EQ(one_.calls + two_.calls, 1) << why;
    // It is no fault of the worker's.
    EXPECT_EQ(backend->Stats().failed_calls_total, 0u) << why;
    EXPECT_EQ(backend->Stats().usable_workers, 2u) << why;
  }
}

TEST_F(FakeWorkersTest, AWorkerThatHasNoRoomForAProfileMayBeAskedForOthers) {
  one_.answer = FakeWorker::MissesTheProfile;
  one_.upload_refusal = grpc::Status(grpc::RESOURCE_EXHAUSTED, "all profiles are in use");
  profiles_ = [this](Deadline) {
    return std::make_shared<const std::vector<std::byte>>(session_.profile);
  };
  const auto backend = Connect(kAmple, {one_.listen});
  for (int i = 0; i < 3; ++i) Encode(*backend);
  EXPECT_EQ(one_.calls, 1);
  EXPECT_EQ(one_.uploads, 1);
  EXPECT_EQ(backend->Stats().failed_calls_total, 0u);
  EXPECT_EQ(backend->Stats().usable_workers, 1u);
  clock_.Advance(std::chrono::seconds(10));
  Encode(*backend);
  EXPECT_EQ(one_.uploads, 2);
}

TEST_F(FakeWorkersTest, TheSourceOfProfilesHasTheDeadline) {
  one_.answer = FakeWorker::MissesTheProfile;
  std::chrono::nanoseconds time{0};
  profiles_ = [&](Deadline deadline) {
    time = deadline.remaining();
    return absl::NotFoundError("gone");
  };
  Encode(*Connect(kAmple, {one_.listen}));
  EXPECT_GT(time.count(), 0);
  EXPECT_LE(time, kAmple);
}

TEST_F(FakeWorkersTest, WhoWaitsForAnotherThreadsProfileWaitsUntilItsDeadline) {
  one_.answer = FakeWorker::MissesTheProfile;
  absl::Notification asked, answers;
  profiles_ = [&](Deadline) {
    asked.Notify();
    answers.WaitForNotificationWithTimeout(absl::Seconds(30));
    return absl::NotFoundError("gone");
  };
  const auto backend = Connect(milliseconds(500), {one_.listen});
  std::thread first([&] { Encode(*backend); });
  asked.WaitForNotification();
  const auto began = std::chrono::steady_clock::now();
  Encode(*backend);
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(20));
  answers.Notify();
  first.join();
  EXPECT_EQ(backend->Stats().failed_calls_total, 0u);
}

TEST_F(FakeWorkersTest, AWorkerThatHadTooLittleTimeIsNotBlamed) {
  two_.answer = [](const v1::CodecItem& item, v1::CodecResult* result) {
    result->mutable_status()->set_code(grpc::INVALID_ARGUMENT);
    return item.item_id() == 0;
  };
  // The first hangs for half of the time; the second answers some in what is left.
  const auto backend = Connect(milliseconds(1000), {one_.listen, two_.listen});
  Encode(*backend);
  EXPECT_EQ(one_.calls, 1);
  EXPECT_EQ(two_.calls, 1);
  EXPECT_EQ(backend->Stats().failed_calls_total, 1u);
  // Alone it has all of the time.
  const auto alone = Connect(milliseconds(1000), {two_.listen});
  Encode(*alone);
  EXPECT_EQ(alone->Stats().failed_calls_total, 1u);
}

TEST_F(FakeWorkersTest, AStopEndsCallsThatAreUnderWay) {
  const auto backend = Connect(std::chrono::minutes(5), {one_.listen});
  std::thread coding([&] { Encode(*backend); });
  while (one_.calls == 0) std::this_thread::yield();
  backend->Stop();
  coding.join();
  // From then on no worker is asked.
  Encode(*backend);
  EXPECT_EQ(one_.calls, 1);
  EXPECT_EQ(backend->Stats().own_blocks_total, 2 * kBlocks);
  EXPECT_EQ(backend->Stats().failed_calls_total, 0u);
}

TEST_F(FakeWorkersTest, AStopEndsAProfileThatIsBeingSent) {
  one_.answer = FakeWorker::MissesTheProfile;
  profiles_ = [&](Deadline) -> absl::StatusOr<WorkerBackend::ProfileBytes> {
    return std::make_shared<const std::vector<std::byte>>(session_.profile);
  };
  const auto backend = Connect(std::chrono::minutes(5), {one_.listen});
  // One sends it, the other waits for that.
  std::thread one([&] { Encode(*backend); }), other([&] { Encode(*backend); });
  while (one_.calls < 2 || one_.uploads == 0) std::this_thread::yield();
  backend->Stop();
  one.join();
  other.join();
  EXPECT_EQ(one_.uploads, 1);
  EXPECT_EQ(backend->Stats().own_blocks_total, 2 * kBlocks);
}

}  // namespace
}  // namespace kvtrie
