#include "server/worker/fit_call.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "client/deadline.h"
#include "client/model_spec_to_proto.h"
#include "storage/base/crc32c.h"
#include "storage/codec/profile_draft.h"
#include "storage/codec/residual_fit.h"
#include "tests/server/worker/running_worker.h"
#include "tests/server/worker/worker_blocks.h"
#include "tests/storage/base/fake_clock.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

class FitCallTest : public testing::Test {
 protected:
  FitCallTest() : spec_(SyntheticSpec()) {
    for (std::uint64_t seed = 1; seed <= 6; ++seed) texts_.push_back(MakeText(spec_, 64, seed));
    *open_.mutable_model() = ModelSpecToProto(spec_);
    v1::FitLevel* const level = open_.add_levels();
    level->set_quality(v1::QUALITY_HIGH);
    level->set_step(0.3);
  }

  static void Put(std::span<const std::byte> data, v1::FitProfileRequest* request) {
    request->set_crc32c(Crc32c(data));
    request->set_data(data.data(), data.size());
  }
  static void Await(const std::function<bool()>& condition) {
    const Deadline deadline = Deadline::After(std::chrono::seconds(30));
    while (!condition()) {
      ASSERT_FALSE(deadline.expired());
      std::this_thread::yield();
    }
  }

  using Stream = grpc::ClientReaderWriter<v1::FitProfileRequest, v1::FitProfileResponse>;
  // From then on it has the turn.
  void Begin(Stream& stream) const {
    v1::FitProfileRequest request;
    *request.mutable_open() = open_;
    stream.Write(request);
    stream.WaitForInitialMetadata();
  }
  // Sends texts, and takes what comes.
  struct Fitted {
    grpc::Status status;
    std::string draft;
    std::vector<double> shares;
  };
  Fitted Fit(RunningWorker& worker) const {
    grpc::ClientContext context;
    const auto stream = worker.stub().FitProfile(&context);
    v1::FitProfileRequest request;
    *request.mutable_open() = open_;
    stream->Write(request);
    for (const SyntheticText& text : texts_) {
      request.Clear();
      request.mutable_sample()->set_tokens(TextOf(text.tokens));
      const std::span<const std::byte> raw = text.raw;
      const std::size_t half = raw.size() / 2;
      Put(raw.first(half), &request);
      if (!stream->Write(request)) break;
      request.Clear();
      Put(raw.subspan(half), &request);
      if (!stream->Write(request)) break;
    }
    stream->WritesDone();
    Fitted fitted;
    v1::FitProfileResponse response;
    std::uint64_t bytes = 0;
    while (stream->Read(&response)) {
      if (response.data().empty()) {
        fitted.shares.push_back(response.done_share());
        continue;
      }
      if (response.draft_bytes() != 0) bytes = response.draft_bytes();
      EXPECT_EQ(response.crc32c(), Crc32c(std::as_bytes(std::span(response.data()))));
      fitted.draft += response.data();
    }
    fitted.status = stream->Finish();
    EXPECT_EQ(fitted.draft.size(), bytes);
    return fitted;
  }

  const ModelSpec spec_;
  std::vector<SyntheticText> texts_;
  v1::FitOpen open_;
};

TEST_F(FitCallTest, AWorkerFitsWhatThisProcessWould) {
  RunningWorker worker;
  const Fitted fitted = Fit(worker);
  ASSERT_TRUE(fitted.status.ok()) << fitted.status.error_message();
  EXPECT_FALSE(fitted.shares.empty());
  EXPECT_TRUE(std::is_sorted(fitted.shares.begin(), fitted.shares.end()));

  std::vector<KvSample> samples;
  for (const SyntheticText& text : texts_) {
    samples.push_back({.tokens = text.tokens, .raw = text.raw});
  }
  ResidualFitOptions options;
  options.rounds = 1;
  options.levels = {
      {.quality = Quality::kHigh, .step = 0.3f, .rate_weight = 0.08f, .importance_strength = 0.9f}};
  options.differences.tokens_min = 0;
  const auto own = FitResidualProfile(spec_, samples, {}, options);
  ASSERT_TRUE(own.ok()) << own.status();
  const auto draft = DecodeDraft(fitted.draft);
  ASSERT_TRUE(draft.ok()) << draft.status();
  EXPECT_EQ(BodyDigest(draft->body), BodyDigest(own->EncodeBody()));
  // The turn is free again.
  EXPECT_TRUE(Fit(worker).status.ok());
}

TEST_F(FitCallTest, FaultsNameTheField) {
  RunningWorker worker([](WorkerConfig* config) { config->limits.fit_bytes_max = 1 << 20; });
  open_.clear_levels();
  EXPECT_THAT(Fit(worker).status.error_message(), HasSubstr("open.levels"));
  v1::FitLevel* const level = open_.add_levels();
  level->set_quality(v1::QUALITY_HIGH);
  level->set_step(0.3);
  open_.set_material_bytes(10);
  EXPECT_THAT(Fit(worker).status.error_message(), HasSubstr("material_bytes"));
  open_.clear_material_bytes();
  texts_[0].raw.pop_back();
  EXPECT_THAT(Fit(worker).status.error_message(), HasSubstr("data"));
  texts_[0] = MakeText(spec_, 64, 1);
  texts_[1].tokens.clear();
  EXPECT_THAT(Fit(worker).status.error_message(), HasSubstr("sample.tokens"));
  texts_[1] = MakeText(spec_, 64, 2);
  while (texts_.size() < 80) texts_.push_back(texts_[0]);
  const grpc::Status status = Fit(worker).status;
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("--fit_bytes_max"));
}

TEST_F(FitCallTest, AModelThatTakesTooMuchMemoryIsRefusedBeforeItsTexts) {
  RunningWorker worker;
  ModelSpec wide = SyntheticSpec({{2, 16, 4096, 4096}}, DType::kBfloat16);
  *open_.mutable_model() = ModelSpecToProto(wide);
  texts_.clear();
  const grpc::Status status = Fit(worker).status;
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("open.model"));
  EXPECT_THAT(status.error_message(), HasSubstr("--fit_bytes_max"));
}

TEST_F(FitCallTest, OneAtATime) {
  RunningWorker worker;
  grpc::ClientContext context;
  const auto first = worker.stub().FitProfile(&context);
  Begin(*first);
  EXPECT_EQ(Fit(worker).status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  context.TryCancel();
  EXPECT_EQ(first->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(worker->streams().AwaitNone(std::chrono::seconds(10)));
}

TEST_F(FitCallTest, WhoeverSendsNothingHasNoTurn) {
  RunningWorker worker;
  grpc::ClientContext context;
  const auto silent = worker.stub().FitProfile(&context);
  grpc::ClientContext other_context;
  const auto other = worker.stub().FitProfile(&other_context);
  Await([&] { return worker->streams().stream_count() == 2; });
  EXPECT_TRUE(Fit(worker).status.ok());
  context.TryCancel();
  other_context.TryCancel();
  silent->Finish();
  other->Finish();
}

TEST_F(FitCallTest, TextsThatDripLoseTheTurn) {
  FakeClock clock;
  RunningWorker worker(
      [](WorkerConfig* config) { config->stream_stall_limit = std::chrono::hours(1); },
      CpuBackend(), clock);
  grpc::ClientContext context;
  const auto dripping = worker.stub().FitProfile(&context);
  Begin(*dripping);
  clock.Advance(std::chrono::minutes(11));
  v1::FitProfileRequest request;
  request.mutable_sample()->set_tokens(TextOf(texts_[0].tokens));
  dripping->Write(request);
  v1::FitProfileResponse response;
  EXPECT_FALSE(dripping->Read(&response));
  const grpc::Status ended = dripping->Finish();
  EXPECT_EQ(ended.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_THAT(ended.error_message(), HasSubstr("not all texts came"));
  EXPECT_TRUE(Fit(worker).status.ok());
}

TEST_F(FitCallTest, ADrainEndsIt) {
  RunningWorker worker;
  grpc::ClientContext context;
  const auto stream = worker.stub().FitProfile(&context);
  Begin(*stream);
  v1::FitProfileRequest request;
  request.mutable_sample()->set_tokens(TextOf(texts_[0].tokens));
  Put(texts_[0].raw, &request);
  stream->Write(request);
  Await([&] { return worker->fit_bytes() > 0; });
  worker->Drain();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(worker->streams().AwaitNone(std::chrono::seconds(10)));
  EXPECT_EQ(worker->fit_bytes(), 0u);
}

TEST_F(FitCallTest, ACancelledFitEnds) {
  const CodecLimits limits;
  FitRequest request(limits);
  v1::FitProfileRequest message;
  BulkPayload none;
  *message.mutable_open() = open_;
  ASSERT_TRUE(request.Add(message, none).ok());
  for (const SyntheticText& text : texts_) {
    message.Clear();
    message.mutable_sample()->set_tokens(TextOf(text.tokens));
    Put(text.raw, &message);
    const std::string wire = message.SerializeAsString();
    const grpc::Slice slice(wire);
    v1::FitProfileRequest parsed;
    BulkPayload payload;
    ASSERT_TRUE(ParseBulkMessage(grpc::ByteBuffer(&slice, 1), &parsed, &payload).ok());
    ASSERT_TRUE(request.Add(parsed, payload).ok());
  }
  const auto fitted = request.Fit({}, [] { return true; });
  EXPECT_TRUE(absl::IsCancelled(fitted.status())) << fitted.status();
}

}  // namespace
}  // namespace kvtrie
