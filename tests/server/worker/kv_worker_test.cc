#include "server/worker/kv_worker.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "client/worker_call.h"
#include "server/request_checks.h"
#include "storage/base/crc32c.h"
#include "tests/server/worker/running_worker.h"
#include "tests/server/worker/worker_blocks.h"
#include "tests/storage/base/fake_clock.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

Deadline Soon() { return Deadline::After(std::chrono::seconds(30)); }

// A device that waits until it may work, and can be lost.
class GatedBackend final : public CodecBackend {
 public:
  explicit GatedBackend(absl::Notification* gate) : gate_(gate) {}

  std::string_view name() const override { return "gated"; }
  std::string device() const override { return "a test's"; }
  absl::StatusOr<std::shared_ptr<const BlockCoder>> CoderFor(
      const ModelSpec&, std::shared_ptr<const ResidualCodec> codec) const override {
    return std::make_shared<const Coder>(gate_, std::move(codec));
  }
  absl::Status Probe() const override { return absl::OkStatus(); }

 private:
  class Coder final : public BlockCoder {
   public:
    Coder(absl::Notification* gate, std::shared_ptr<const ResidualCodec> codec)
        : gate_(gate), codec_(std::move(codec)) {}
    absl::StatusOr<std::vector<EncodedBlock>> Encode(std::span<const BlockToEncode> blocks,
                                                     Quality quality) const override {
      gate_->WaitForNotification();
      return codec_->Encode(blocks, quality);
    }
    absl::Status Decode(std::span<const BlockToDecode> blocks) const override {
      gate_->WaitForNotification();
      return codec_->Decode(blocks);
    }

   private:
    absl::Notification* const gate_;
    const std::shared_ptr<const ResidualCodec> codec_;
  };

  absl::Notification* const gate_;
};

class KvWorkerTest : public testing::Test {
 protected:
  // Codes blocks with a worker; what became of each, and the bytes.
  struct Coded {
    absl::Status status;
    std::vector<WorkerItem> items;
    std::vector<std::vector<std::byte>> bytes;
  };
  Coded Encode(RunningWorker& worker, std::size_t count, const std::string& tenant = "",
               Deadline deadline = Soon()) const {
    Coded coded;
    coded.bytes.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      WorkerItem& item = coded.items.emplace_back();
      item.item = blocks_.ToEncode(i);
      item.bytes = {blocks_.raw(i)};
      item.place = [to = &coded.bytes[i]](const v1::CodecResult& result) {
        to->resize(result.block_bytes());
        return std::span<std::byte>(*to);
      };
    }
    coded.status = CallWorker(worker.channel(), WorkerMethod::kEncode, blocks_.Open(tenant),
                              coded.items, deadline);
    return coded;
  }
  Coded Decode(RunningWorker& worker, const std::vector<std::vector<std::byte>>& frames) const {
    Coded coded;
    coded.bytes.assign(frames.size(), std::vector<std::byte>(blocks_.raw_bytes()));
    for (std::size_t i = 0; i < frames.size(); ++i) {
      WorkerItem& item = coded.items.emplace_back();
      item.item = blocks_.ToDecode(i, frames[i].size());
      item.bytes = {frames[i]};
      item.place = [to = &coded.bytes[i]](const v1::CodecResult&) {
        return std::span<std::byte>(*to);
      };
    }
    coded.status =
        CallWorker(worker.channel(), WorkerMethod::kDecode, blocks_.Open(), coded.items, Soon());
    return coded;
  }
  void SendTheProfile(RunningWorker& worker) const {
    const absl::Status sent = SendProfile(worker.channel(), blocks_.profile(), Soon());
    ASSERT_TRUE(sent.ok()) << sent;
  }
  v1::DescribeResponse Describe(RunningWorker& worker) const {
    grpc::ClientContext context;
    v1::DescribeResponse response;
    const grpc::Status status = worker.stub().Describe(&context, {}, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  const WorkerBlocks blocks_{8};
};

TEST_F(KvWorkerTest, BlocksGoThereAndBack) {
  RunningWorker worker;
  SendTheProfile(worker);
  const Coded encoded = Encode(worker, blocks_.count());
  ASSERT_TRUE(encoded.status.ok()) << encoded.status;
  for (std::size_t i = 0; i < blocks_.count(); ++i) {
    ASSERT_TRUE(encoded.items[i].answered);
    EXPECT_EQ(encoded.bytes[i], blocks_.Frame(i).bytes);
  }
  const Coded decoded = Decode(worker, encoded.bytes);
  ASSERT_TRUE(decoded.status.ok()) << decoded.status;
  for (std::size_t i = 0; i < blocks_.count(); ++i) {
    EXPECT_EQ(decoded.bytes[i], blocks_.Decoded(i, encoded.bytes[i]));
  }
}

TEST_F(KvWorkerTest, DescribesItself) {
  RunningWorker worker;
  v1::DescribeResponse described = Describe(worker);
  EXPECT_EQ(described.state(), "serving");
  EXPECT_EQ(described.backend(), "cpu");
  EXPECT_THAT(described.device(), HasSubstr("processor"));
  EXPECT_EQ(described.coding_threads(), 2u);
  EXPECT_EQ(described.profiles_size(), 0);
  SendTheProfile(worker);
  Encode(worker, 2);
  described = Describe(worker);
  ASSERT_EQ(described.profiles_size(), 1);
  EXPECT_EQ(described.profiles(0).profile_id(), std::string(blocks_.profile_id().view()));
  EXPECT_EQ(described.counters().at("kvtrie_worker_blocks_total"), 2u);
}

TEST_F(KvWorkerTest, ProfilesAreTakenWholeOrNotAtAll) {
  RunningWorker worker([](WorkerConfig* config) { config->profile_memory_bytes = 4 << 20; });
  std::vector<std::byte> damaged = blocks_.profile();
  damaged[damaged.size() / 2] ^= std::byte{1};
  EXPECT_TRUE(absl::IsInvalidArgument(SendProfile(worker.channel(), damaged, Soon())));
  EXPECT_TRUE(absl::IsInvalidArgument(
      SendProfile(worker.channel(), std::span(blocks_.profile()).first(100), Soon())));
  EXPECT_TRUE(absl::IsResourceExhausted(
      SendProfile(worker.channel(), std::vector<std::byte>(5 << 20), Soon())));
  EXPECT_EQ(Describe(worker).profiles_size(), 0);
}

TEST_F(KvWorkerTest, AProfileOfAnotherIdThanExpectedIsNotKept) {
  RunningWorker worker;
  const std::vector<std::byte>& profile = blocks_.profile();
  const auto put = [&](std::string_view expected) {
    grpc::ClientContext context;
    v1::PutProfileResponse response;
    const auto writer = worker.stub().PutProfile(&context, &response);
    v1::PutProfileRequest request;
    request.set_total_bytes(profile.size());
    request.set_expected_profile_id(std::string(expected));
    for (std::size_t at = 0; at < profile.size(); at += kChunkBytesMax) {
      const auto piece = std::span(profile).subspan(
          at, std::min<std::size_t>(kChunkBytesMax, profile.size() - at));
      v1::Chunk* const chunk = request.add_chunks();
      chunk->set_offset(at);
      chunk->set_bytes(static_cast<std::uint32_t>(piece.size()));
      chunk->set_crc32c(Crc32c(piece));
    }
    request.set_data(profile.data(), profile.size());
    writer->Write(request);
    writer->WritesDone();
    return writer->Finish();
  };
  const grpc::Status status = put(std::string(16, 'x'));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("expected_profile_id"));
  EXPECT_EQ(Describe(worker).profiles_size(), 0);
  EXPECT_TRUE(put(blocks_.profile_id().view()).ok());
  EXPECT_EQ(Describe(worker).profiles_size(), 1);
}

TEST_F(KvWorkerTest, ProfilesOnTheirWayHaveTheirBound) {
  RunningWorker worker([](WorkerConfig* config) { config->profile_memory_bytes = 4 << 20; });
  v1::PutProfileRequest announcement;
  announcement.set_total_bytes(4 << 20);
  const Deadline deadline = Soon();
  absl::Status refused;
  // Until the one that announces all of it is the first to come.
  while (!absl::IsResourceExhausted(refused) && !deadline.expired()) {
    grpc::ClientContext context;
    v1::PutProfileResponse response;
    const auto slow = worker.stub().PutProfile(&context, &response);
    slow->Write(announcement);
    refused = SendProfile(worker.channel(), std::vector<std::byte>(2000), deadline);
    context.TryCancel();
    slow->Finish();
  }
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("on their way"));
  // What was given up makes room again.
  absl::Status sent = refused;
  while (absl::IsResourceExhausted(sent) && !deadline.expired()) {
    sent = SendProfile(worker.channel(), blocks_.profile(), deadline);
  }
  EXPECT_TRUE(sent.ok()) << sent;
}

TEST_F(KvWorkerTest, AMessageThatIsNoneEndsTheStreamWithItsReason) {
  RunningWorker worker;
  grpc::ClientContext context;
  const auto stream = worker.stub().Encode(&context);
  v1::CodecRequest request;
  request.set_data("bytes of nothing");
  stream->Write(request);
  v1::CodecResponse response;
  EXPECT_FALSE(stream->Read(&response));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("open"));
}

TEST_F(KvWorkerTest, ACallerThatStallsIsEnded) {
  RunningWorker worker(
      [](WorkerConfig* config) { config->stream_stall_limit = std::chrono::milliseconds(100); });
  grpc::ClientContext context;
  const auto stream = worker.stub().Encode(&context);
  v1::CodecRequest request;
  *request.mutable_open() = blocks_.Open();
  *request.mutable_item() = blocks_.ToEncode(0);
  stream->Write(request);
  v1::CodecResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(worker->memory().used_bytes(), 0u);
}

TEST_F(KvWorkerTest, ACallThatFailedBehindAWriteThatIsStuckIsEnded) {
  FakeClock clock;
  RunningWorker worker({}, CpuBackend(), clock);
  SendTheProfile(worker);
  const auto await = [](const std::function<bool()>& condition) {
    const Deadline deadline = Soon();
    while (!condition() && !deadline.expired()) std::this_thread::yield();
    return condition();
  };
  grpc::ClientContext context;
  const auto stream = worker.stub().Decode(&context);
  v1::CodecRequest request;
  *request.mutable_open() = blocks_.Open();
  ASSERT_TRUE(stream->Write(request));
  // More than a connection holds while nobody reads, and less than a stream may have.
  const std::vector<std::byte> frame = blocks_.Frame(0).bytes;
  const std::size_t item_bytes = frame.size() + blocks_.raw_bytes() + (std::size_t{64} << 10);
  const std::uint64_t items = worker->memory().limit_bytes() / 5 / item_bytes;
  for (std::uint64_t i = 0; i < items; ++i) {
    request.Clear();
    *request.mutable_item() = blocks_.ToDecode(0, frame.size());
    request.mutable_item()->set_item_id(i);
    request.set_data(frame.data(), frame.size());
    request.set_crc32c(Crc32c(frame));
    ASSERT_TRUE(stream->Write(request));
  }
  ASSERT_TRUE(await([&] { return worker->queue().Stats().jobs_total == items; }));
  EXPECT_EQ(worker->rpc_metrics().in_flight(), 1);
  request.Clear();
  *request.mutable_open() = blocks_.Open();
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(await([&] { return worker->rpc_metrics().in_flight() == 0; }));
  // Its end waits behind what nobody reads.
  EXPECT_EQ(worker->streams().stream_count(), 1u);
  EXPECT_GT(worker->memory().used_bytes(), 0u);
  clock.Advance(TestWorkerConfig().stream_stall_limit);
  EXPECT_TRUE(await(
      [&] { return worker->streams().stream_count() == 0 && worker->memory().used_bytes() == 0; }));
  context.TryCancel();
  stream->Finish();
}

TEST_F(KvWorkerTest, ACallerThatAsksForNothingKeepsNoPlace) {
  FakeClock clock;
  RunningWorker worker(
      [](WorkerConfig* config) {
        config->stream_stall_limit = std::chrono::milliseconds(100);
        config->streams_max = 1;
      },
      CpuBackend(), clock);
  SendTheProfile(worker);
  ASSERT_TRUE(worker->streams().AwaitNone(std::chrono::seconds(10)));
  grpc::ClientContext context;
  const auto idle = worker.stub().Encode(&context);
  v1::CodecRequest request;
  *request.mutable_open() = blocks_.Open();
  idle->Write(request);
  idle->WaitForInitialMetadata();
  EXPECT_TRUE(absl::IsUnavailable(Encode(worker, 1).status));
  EXPECT_EQ(Describe(worker).counters().at("kvtrie_worker_refused_streams_total"), 1u);
  clock.Advance(std::chrono::milliseconds(100));
  v1::CodecResponse response;
  EXPECT_FALSE(idle->Read(&response));
  EXPECT_EQ(idle->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  ASSERT_TRUE(worker->streams().AwaitNone(std::chrono::seconds(10)));
  EXPECT_TRUE(Encode(worker, 1).status.ok());
}

TEST_F(KvWorkerTest, CallersOfManyThreadsAreAnswered) {
  RunningWorker worker;
  SendTheProfile(worker);
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 3; ++round) {
        const Coded coded = Encode(worker, blocks_.count(), "tenant " + std::to_string(t % 3));
        bool all = coded.status.ok();
        for (std::size_t i = 0; all && i < blocks_.count(); ++i) {
          all = coded.bytes[i] == blocks_.Frame(i).bytes;
        }
        good += all ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 18);
}

TEST_F(KvWorkerTest, CallersThatGoAwayLeaveNothing) {
  absl::Notification gate;
  RunningWorker worker({}, std::make_unique<const GatedBackend>(&gate));
  SendTheProfile(worker);
  for (int i = 0; i < 5; ++i) {
    const Coded coded = Encode(worker, 4, "", Deadline::After(std::chrono::milliseconds(50)));
    EXPECT_FALSE(coded.status.ok());
  }
  gate.Notify();
  const Coded coded = Encode(worker, 4);
  EXPECT_TRUE(coded.status.ok()) << coded.status;
  EXPECT_TRUE(worker->streams().AwaitNone(std::chrono::seconds(10)));
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (worker->memory().used_bytes() > 0 && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::yield();
  }
  EXPECT_EQ(worker->memory().used_bytes(), 0u);
  // At most one batch of those that went was under way on each thread.
  EXPECT_LE(worker->queue().Stats().jobs_total, 4u + 2 * 16u);
}

TEST_F(KvWorkerTest, DrainingAnswersWhatIsHereAndRefusesTheRest) {
  absl::Notification gate;
  RunningWorker worker({}, std::make_unique<const GatedBackend>(&gate));
  SendTheProfile(worker);
  Coded coded;
  std::thread caller([&] { coded = Encode(worker, 4); });
  while (worker->queue().Stats().running_jobs + worker->queue().Stats().waiting_jobs < 4) {
    std::this_thread::yield();
  }
  worker->Drain();
  EXPECT_EQ(Describe(worker).state(), "draining");
  EXPECT_TRUE(absl::IsUnavailable(Encode(worker, 1).status));
  gate.Notify();
  caller.join();
  ASSERT_TRUE(coded.status.ok()) << coded.status;
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(coded.bytes[i], blocks_.Frame(i).bytes);
}

TEST_F(KvWorkerTest, StoppingWithinTheGraceLosesNoAnswer) {
  RunningWorker worker;
  SendTheProfile(worker);
  Coded coded;
  std::thread caller([&] { coded = Encode(worker, blocks_.count()); });
  while (worker->queue().Stats().jobs_total == 0) std::this_thread::yield();
  worker->Stop(std::chrono::seconds(20));
  caller.join();
  for (std::size_t i = 0; i < blocks_.count(); ++i) {
    if (!coded.items[i].answered) continue;
    const auto code = coded.items[i].result.status().code();
    if (code == 0) {
      EXPECT_EQ(coded.bytes[i], blocks_.Frame(i).bytes);
    } else {
      EXPECT_EQ(code, static_cast<std::uint32_t>(absl::StatusCode::kUnavailable));
    }
  }
}

TEST_F(KvWorkerTest, AnAddressThatIsTakenStopsTheStart) {
  RunningWorker worker;
  WorkerConfig config = TestWorkerConfig();
  config.listen = *ParseListenAddress(worker->addresses().listen);
  const auto second = KvWorker::Start(config, CpuBackend());
  EXPECT_TRUE(absl::IsUnavailable(second.status()));
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("--listen"));
}

}  // namespace
}  // namespace kvtrie
