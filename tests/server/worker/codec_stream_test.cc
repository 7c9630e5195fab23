#include "server/worker/codec_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "proto/bulk_message.h"
#include "server/worker/codec_work.h"
#include "storage/base/crc32c.h"
#include "tests/server/worker/worker_blocks.h"
#include "tests/storage/base/fake_clock.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

grpc::ByteBuffer Bytes(std::span<const std::byte> bytes) {
  const grpc::Slice slice(bytes.data(), bytes.size());
  return grpc::ByteBuffer(&slice, 1);
}

// A message as it comes from the wire.
std::unique_ptr<CodecMessage> Message(v1::CodecRequest request, std::span<const std::byte> data) {
  request.set_crc32c(Crc32c(data));
  request.set_data(data.data(), data.size());
  const std::string wire = request.SerializeAsString();
  auto message = std::make_unique<CodecMessage>();
  const auto buffer = Bytes(std::as_bytes(std::span(wire)));
  EXPECT_TRUE(ParseBulkMessage(buffer, &message->request, &message->payload).ok());
  return message;
}

struct Answer {
  v1::CodecResult result;
  std::vector<std::byte> bytes;
};

class CodecStreamTest : public testing::Test {
 protected:
  // Work and chores happen when the test says so, on its thread.
  CodecStreamTest()
      : work_(*cpu_, shelf_, std::size_t{1} << 30),
        queue_(
            {.threads = 1, .jobs_max = 8},
            [this](std::span<const std::unique_ptr<CodecJob>> jobs) {
              absl::MutexLock lock(&mutex_);
              mutex_.Await(absl::Condition(&go_));
              work_.Run(jobs);
            },
            clock_),
        host_{.queue = queue_,
              .memory = memory_,
              .clock = clock_,
              .limits = limits_,
              .post = [this](std::function<void()> chore) {
                absl::MutexLock lock(&mutex_);
                chores_.push_back(std::move(chore));
              }} {
    EXPECT_TRUE(shelf_.Add(blocks_.profile()).ok());
  }
  ~CodecStreamTest() override {
    Go(true);
    for (const auto& stream : streams_) stream->Cancel();
  }

  std::shared_ptr<CodecStream> Open(CodecOp op, bool layer_major = false) {
    auto stream = CodecStream::Create(host_, op, [this] {
      absl::MutexLock lock(&mutex_);
      ++changes_;
    });
    streams_.push_back(stream);
    v1::CodecRequest request;
    *request.mutable_open() = blocks_.Open();
    request.mutable_open()->set_layer_major(layer_major);
    stream->Receive(Message(request, {}));
    EXPECT_TRUE(stream->status().ok()) << stream->status();
    return stream;
  }
  // In pieces of so many bytes.
  void Send(CodecStream& stream, const v1::CodecItem& item,
            const std::vector<std::span<const std::byte>>& parts, std::size_t piece = 5000) {
    std::vector<std::byte> all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    v1::CodecRequest request;
    *request.mutable_item() = item;
    for (std::size_t at = 0; at < all.size(); at += piece) {
      ASSERT_TRUE(stream.wants_message());
      stream.Receive(
          Message(request, std::span(all).subspan(at, std::min(piece, all.size() - at))));
      request.clear_item();
    }
  }

  void Go(bool go) {
    absl::MutexLock lock(&mutex_);
    go_ = go;
  }
  void RunChores() {
    std::vector<std::function<void()>> chores;
    {
      absl::MutexLock lock(&mutex_);
      chores.swap(chores_);
    }
    for (const auto& chore : chores) chore();
  }

  // Takes what the stream answers, until it has answered so many items. Checks that bytes come in
  // order and intact.
  std::map<std::uint64_t, Answer> TakeAnswers(CodecStream& stream, std::size_t count) {
    std::map<std::uint64_t, Answer> answers;
    const auto complete = [&] {
      std::size_t whole = 0;
      for (const auto& [_, answer] : answers) {
        whole += answer.bytes.size() == answer.result.block_bytes() ? 1 : 0;
      }
      return whole >= count;
    };
    while (!complete()) {
      int before = 0;
      {
        absl::MutexLock lock(&mutex_);
        before = changes_;
      }
      grpc::ByteBuffer buffer;
      if (!stream.TakeMessage(&buffer)) {
        absl::MutexLock lock(&mutex_);
        const auto changed = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return changes_ != before; };
        if (!mutex_.AwaitWithTimeout(absl::Condition(&changed), absl::Seconds(10))) {
          ADD_FAILURE() << "no answer; " << answers.size() << " came";
          return answers;
        }
        continue;
      }
      v1::CodecResponse response;
      BulkPayload payload;
      EXPECT_TRUE(ParseBulkMessage(buffer, &response, &payload).ok());
      if (response.has_result()) {
        EXPECT_FALSE(answers.contains(response.result().item_id()));
        answers[response.result().item_id()].result = response.result();
      }
      if (payload.size() == 0) continue;
      order_.push_back({response.item_id(), response.offset()});
      std::vector<std::byte>& bytes = answers[response.item_id()].bytes;
      EXPECT_EQ(bytes.size(), response.offset());
      std::uint32_t crc = 0;
      for (const auto& piece : payload.pieces()) {
        crc = Crc32c(piece, crc);
        bytes.insert(bytes.end(), piece.begin(), piece.end());
      }
      EXPECT_EQ(crc, response.crc32c());
    }
    return answers;
  }

  const WorkerBlocks blocks_{6};
  const std::unique_ptr<const CodecBackend> cpu_ = CpuBackend();
  FakeClock clock_;
  CodecLimits limits_;
  ByteBudget memory_{std::size_t{64} << 20};
  ProfileShelf shelf_{std::size_t{64} << 20};
  CodecWork work_;
  absl::Mutex mutex_;
  bool go_ = true;
  int changes_ = 0;
  std::vector<std::function<void()>> chores_;
  CodecQueue queue_;
  CodecStreamHost host_;
  std::vector<std::shared_ptr<CodecStream>> streams_;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> order_;  // item and offset of each message
};

TEST_F(CodecStreamTest, RawBlocksBecomeTheFramesThatThisProcessMakes) {
  const auto stream = Open(CodecOp::kEncode);
  for (std::size_t i = 0; i < blocks_.count(); ++i) {
    Send(*stream, blocks_.ToEncode(i), {blocks_.raw(i)});
  }
  const auto answers = TakeAnswers(*stream, blocks_.count());
  for (std::size_t i = 0; i < blocks_.count(); ++i) {
    const v1::CodecResult& result = answers.at(i).result;
    EXPECT_EQ(result.status().code(), 0) << result.status().message();
    EXPECT_EQ(answers.at(i).bytes, blocks_.Frame(i).bytes);
    EXPECT_EQ(result.codec(), v1::CODEC_RESIDUAL);
    EXPECT_EQ(result.rung(), v1::RUNG_CODED);
    EXPECT_EQ(result.quality(), v1::QUALITY_HIGH);
    EXPECT_EQ(result.served_quality(), v1::QUALITY_HIGH);
    EXPECT_GT(result.bits_per_component(), 0);
    EXPECT_GT(result.predicted_mean_kl(), 0);
    EXPECT_GE(result.batch_blocks(), 1u);
  }
  EXPECT_FALSE(stream->finished());
  stream->CloseInput();
  EXPECT_TRUE(stream->finished());
  EXPECT_EQ(memory_.used_bytes(), 0u);
}

TEST_F(CodecStreamTest, FramesBecomeTheKvThatThisProcessMakes) {
  const auto stream = Open(CodecOp::kDecode);
  std::vector<std::vector<std::byte>> frames;
  for (const Quality quality : {Quality::kHigh, Quality::kExact}) {
    frames.push_back(blocks_.Frame(frames.size(), quality).bytes);
    Send(*stream, blocks_.ToDecode(frames.size() - 1, frames.back().size()), {frames.back()});
  }
  const auto answers = TakeAnswers(*stream, frames.size());
  EXPECT_EQ(answers.at(0).bytes, blocks_.Decoded(0, frames[0]));
  EXPECT_EQ(answers.at(0).result.quality(), v1::QUALITY_HIGH);
  EXPECT_EQ(answers.at(1).bytes, blocks_.raw(1));
  EXPECT_EQ(answers.at(1).result.quality(), v1::QUALITY_EXACT);
}

TEST_F(CodecStreamTest, LayersComeInOrderOverAllItems) {
  const auto stream = Open(CodecOp::kDecode, /*layer_major=*/true);
  for (std::size_t i = 0; i < 3; ++i) {
    const auto frame = blocks_.Frame(i).bytes;
    Send(*stream, blocks_.ToDecode(i, frame.size()), {frame});
  }
  // One that fails takes no part.
  Send(*stream, blocks_.ToDecode(3, 1000), {std::vector<std::byte>(1000)});
  grpc::ByteBuffer nothing;
  EXPECT_FALSE(stream->TakeMessage(&nothing));
  stream->CloseInput();
  const auto answers = TakeAnswers(*stream, 4);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(answers.at(i).bytes, blocks_.Decoded(i, blocks_.Frame(i).bytes));
  }
  EXPECT_EQ(answers.at(3).result.status().code(), static_cast<int>(absl::StatusCode::kDataLoss));
  const KvGeometry geometry(blocks_.spec());
  std::size_t at = 0;
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    for (std::uint64_t item = 0; item < 3; ++item, ++at) {
      ASSERT_LT(at, order_.size());
      EXPECT_EQ(order_[at], std::pair(item, std::uint64_t{geometry.layer_begin(layer)}));
    }
  }
  EXPECT_FALSE(stream->TakeMessage(&nothing));
  EXPECT_TRUE(stream->finished());
}

TEST_F(CodecStreamTest, ABlockIsCodedAgainstReferences) {
  // The same text again, behind other tokens: block 0's tokens and KV as a reference of block 0.
  const auto stream = Open(CodecOp::kEncode);
  v1::CodecItem item = blocks_.ToEncode(1);
  const auto reference = blocks_.Frame(1, Quality::kExact).bytes;
  v1::CodecReference* const added = item.add_references();
  added->set_node_id(std::string(16, '\1'));
  added->set_first_position(16);
  added->set_tokens(TextOf(blocks_.tokens(1)));
  added->set_frame_bytes(reference.size());
  v1::TokenRun* const run = item.add_runs();
  run->set_token_count(16);
  Send(*stream, item, {blocks_.raw(1), reference});
  // A reference whose frame is damaged fails the item alone.
  item.set_item_id(7);
  std::vector<std::byte> damaged = reference;
  damaged.back() ^= std::byte{1};
  Send(*stream, item, {blocks_.raw(1), damaged});
  const auto answers = TakeAnswers(*stream, 2);
  EXPECT_EQ(answers.at(1).result.status().code(), 0) << answers.at(1).result.status().message();
  EXPECT_EQ(answers.at(7).result.status().code(),
            static_cast<int>(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(answers.at(7).result.status().message(), HasSubstr("references"));
}

TEST_F(CodecStreamTest, AMissingProfileIsNamedAndItsNeighboursGoOn) {
  const auto stream = Open(CodecOp::kEncode);
  v1::CodecItem item = blocks_.ToEncode(0);
  item.set_profile_id(std::string(16, '\7'));
  Send(*stream, item, {blocks_.raw(0)});
  Send(*stream, blocks_.ToEncode(1), {blocks_.raw(1)});
  const auto answers = TakeAnswers(*stream, 2);
  EXPECT_EQ(answers.at(0).result.status().code(),
            static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(answers.at(0).result.missing_profile_id(), item.profile_id());
  EXPECT_THAT(answers.at(0).result.status().message(), HasSubstr("PutProfile"));
  EXPECT_EQ(answers.at(1).bytes, blocks_.Frame(1).bytes);
}

TEST_F(CodecStreamTest, ItemsThatDoNotFitTheModelFailAloneAndSayWhy) {
  const auto stream = Open(CodecOp::kEncode);
  struct Case {
    std::function<void(v1::CodecItem*)> spoil;
    const char* message;
  };
  const std::vector<Case> cases = {
      {[](v1::CodecItem* item) { item->set_block_bytes(17); }, "block_bytes: 17"},
      {[](v1::CodecItem* item) { item->set_tokens("abc"); }, "tokens: 3 bytes"},
      {[](v1::CodecItem* item) { item->set_tokens(std::string(60, 'x')); }, "tokens: 15"},
      {[](v1::CodecItem* item) { item->set_dtype(v1::DTYPE_FLOAT32); }, "dtype: DTYPE_FLOAT32"},
      {[](v1::CodecItem* item) { item->set_first_position(5); }, "first_position: 5"},
      {[](v1::CodecItem* item) { item->set_profile_id("short"); }, "profile_id: 5"},
      {[](v1::CodecItem* item) { item->set_importance("abc"); }, "importance: 3"},
      {[](v1::CodecItem* item) { item->set_session_tokens(3); }, "session_tokens: 3"},
      {[](v1::CodecItem* item) { item->set_quality(static_cast<v1::Quality>(77)); }, "quality: 77"},
      {[](v1::CodecItem* item) { item->add_runs()->set_token_count(3); }, "runs"},
      {[](v1::CodecItem* item) { item->add_references()->set_node_id("x"); },
       "references[0].node_id"},
      {[](v1::CodecItem* item) { item->mutable_probabilities()->set_log_probs("x"); },
       "probabilities."},
  };
  std::uint64_t id = 100;
  for (const Case& one : cases) {
    v1::CodecItem item = blocks_.ToEncode(0);
    item.set_item_id(id++);
    one.spoil(&item);
    Send(*stream, item, {blocks_.raw(0)});
  }
  Send(*stream, blocks_.ToEncode(1), {blocks_.raw(1)});
  const auto answers = TakeAnswers(*stream, cases.size() + 1);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const v1::CodecResult& result = answers.at(100 + i).result;
    EXPECT_EQ(result.status().code(), static_cast<int>(absl::StatusCode::kInvalidArgument));
    EXPECT_THAT(result.status().message(), HasSubstr(cases[i].message));
  }
  EXPECT_EQ(answers.at(1).bytes, blocks_.Frame(1).bytes);
  EXPECT_EQ(memory_.used_bytes(), 0u);
}

TEST_F(CodecStreamTest, BytesThatAreNotThoseAnnouncedFailTheItemAlone) {
  const auto stream = Open(CodecOp::kEncode);
  // Too few.
  v1::CodecRequest request;
  *request.mutable_item() = blocks_.ToEncode(0);
  stream->Receive(Message(request, std::span(blocks_.raw(0)).first(100)));
  // Of another checksum.
  *request.mutable_item() = blocks_.ToEncode(1);
  auto damaged = Message(request, std::span(blocks_.raw(1)).first(100));
  damaged->request.set_crc32c(1);
  stream->Receive(std::move(damaged));
  // Too many.
  v1::CodecItem small = blocks_.ToEncode(2);
  Send(*stream, small, {blocks_.raw(2)}, blocks_.raw_bytes() - 1);
  *request.mutable_item() = blocks_.ToEncode(3);
  std::vector<std::byte> longer = blocks_.raw(3);
  longer.push_back({});
  stream->Receive(Message(request, longer));
  *request.mutable_item() = blocks_.ToEncode(4);
  stream->Receive(Message(request, std::span(blocks_.raw(4)).first(10)));
  stream->CloseInput();
  const auto answers = TakeAnswers(*stream, 5);
  const auto code = [&](std::uint64_t i) {
    return static_cast<absl::StatusCode>(answers.at(i).result.status().code());
  };
  EXPECT_EQ(code(0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(1), absl::StatusCode::kDataLoss);
  EXPECT_EQ(code(2), absl::StatusCode::kOk);
  EXPECT_EQ(code(3), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(4), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(stream->finished());
  EXPECT_EQ(memory_.used_bytes(), 0u);
}

TEST_F(CodecStreamTest, StreamsThatBeginWrongEnd) {
  const auto begin = [&](const v1::CodecRequest& request, std::span<const std::byte> data,
                         CodecOp op = CodecOp::kEncode) {
    const auto stream = CodecStream::Create(host_, op, [] {});
    streams_.push_back(stream);
    stream->Receive(Message(request, data));
    return stream->status();
  };
  v1::CodecRequest request;
  EXPECT_THAT(std::string(begin(request, {}).message()), HasSubstr("open:"));
  request.mutable_open();
  EXPECT_THAT(std::string(begin(request, {}).message()), HasSubstr("open.model"));
  *request.mutable_open() = blocks_.Open();
  request.mutable_open()->mutable_model()->set_block_tokens(0);
  EXPECT_THAT(std::string(begin(request, {}).message()), HasSubstr("open.model"));
  *request.mutable_open() = blocks_.Open(std::string(65, 't'));
  EXPECT_THAT(std::string(begin(request, {}).message()), HasSubstr("open.tenant"));
  *request.mutable_open() = blocks_.Open();
  request.mutable_open()->set_layer_major(true);
  EXPECT_THAT(std::string(begin(request, {}).message()), HasSubstr("layer_major"));
  *request.mutable_open() = blocks_.Open();
  EXPECT_THAT(std::string(begin(request, blocks_.raw(0)).message()), HasSubstr("data"));
}

TEST_F(CodecStreamTest, AFrameOfAnotherPlaceOrModelIsRefused) {
  const auto stream = Open(CodecOp::kDecode);
  const auto frame = blocks_.Frame(1).bytes;
  v1::CodecItem item = blocks_.ToDecode(1, frame.size());
  item.set_first_position(32);
  Send(*stream, item, {frame});
  item = blocks_.ToDecode(2, frame.size());
  item.set_first_position(16);
  Send(*stream, item, {frame});  // tokens of block 2
  const auto answers = TakeAnswers(*stream, 2);
  EXPECT_THAT(answers.at(1).result.status().message(), HasSubstr("first_position"));
  EXPECT_THAT(answers.at(2).result.status().message(), HasSubstr("tokens"));
}

TEST_F(CodecStreamTest, AnItemWaitsForMemoryAndItsCallerWithIt) {
  const std::size_t all = memory_.limit_bytes();
  ASSERT_TRUE(memory_.TryAcquire(all));
  const auto stream = Open(CodecOp::kEncode);
  v1::CodecRequest request;
  *request.mutable_item() = blocks_.ToEncode(0);
  stream->Receive(Message(request, blocks_.raw(0)));
  EXPECT_FALSE(stream->wants_message());
  memory_.Release(all);
  EXPECT_FALSE(stream->wants_message());  // whoever released it may hold locks
  RunChores();
  const auto answers = TakeAnswers(*stream, 1);
  EXPECT_EQ(answers.at(0).bytes, blocks_.Frame(0).bytes);
  EXPECT_TRUE(stream->wants_message());
}

TEST_F(CodecStreamTest, MemoryThatComesTooLateIsGivenBack) {
  const std::size_t all = memory_.limit_bytes();
  ASSERT_TRUE(memory_.TryAcquire(all));
  auto stream = Open(CodecOp::kEncode);
  v1::CodecRequest request;
  *request.mutable_item() = blocks_.ToEncode(0);
  stream->Receive(Message(request, blocks_.raw(0)));
  stream->Cancel();
  streams_.clear();
  stream.reset();
  memory_.Release(all);
  RunChores();
  EXPECT_EQ(memory_.used_bytes(), 0u);
}

TEST_F(CodecStreamTest, AnItemThatWaitsForMemoryForTooLongFails) {
  const std::size_t all = memory_.limit_bytes();
  ASSERT_TRUE(memory_.TryAcquire(all));
  const auto stream = Open(CodecOp::kEncode);
  v1::CodecRequest request;
  *request.mutable_item() = blocks_.ToEncode(0);
  stream->Receive(Message(request, std::span(blocks_.raw(0)).first(100)));
  EXPECT_FALSE(stream->Tick());
  clock_.Advance(limits_.item_timeout_max + std::chrono::milliseconds(1));
  EXPECT_TRUE(stream->Tick());
  EXPECT_FALSE(stream->Tick());
  const auto late = TakeAnswers(*stream, 1);
  EXPECT_EQ(late.at(0).result.status().code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_GT(late.at(0).result.retry_after_ms(), 0u);
  // The rest of it, and then another one, which waits too.
  stream->Receive(Message({}, std::span(blocks_.raw(0)).subspan(100, 100)));
  *request.mutable_item() = blocks_.ToEncode(1);
  stream->Receive(Message(request, blocks_.raw(1)));
  EXPECT_FALSE(stream->wants_message());
  // The first grant is of the one that has failed.
  memory_.Release(all);
  RunChores();
  const auto answers = TakeAnswers(*stream, 1);
  EXPECT_EQ(answers.at(1).bytes, blocks_.Frame(1).bytes);
  EXPECT_TRUE(stream->idle());
  EXPECT_EQ(memory_.used_bytes(), 0u);
}

TEST_F(CodecStreamTest, TheEndOfTheInputEndsAWaitForMemory) {
  const std::size_t all = memory_.limit_bytes();
  ASSERT_TRUE(memory_.TryAcquire(all));
  const auto stream = Open(CodecOp::kEncode);
  v1::CodecRequest request;
  *request.mutable_item() = blocks_.ToEncode(0);
  stream->Receive(Message(request, std::span(blocks_.raw(0)).first(100)));
  stream->CloseInput();
  clock_.Advance(limits_.item_timeout_max + std::chrono::milliseconds(1));
  EXPECT_FALSE(stream->Tick());
  memory_.Release(all);
  RunChores();
  EXPECT_EQ(memory_.used_bytes(), 0u);
  EXPECT_EQ(TakeAnswers(*stream, 1).at(0).result.status().code(), grpc::INVALID_ARGUMENT);
  EXPECT_TRUE(stream->finished());
}

TEST_F(CodecStreamTest, WhereAnswersWaitForTheEndItIsTheCallersTurn) {
  const auto stream = Open(CodecOp::kDecode, /*layer_major=*/true);
  const std::vector<std::byte> frame = blocks_.Frame(0).bytes;
  Go(false);
  Send(*stream, blocks_.ToDecode(0, frame.size()), {frame});
  EXPECT_FALSE(stream->owes_progress());
  Go(true);
  while (!stream->owes_progress()) std::this_thread::yield();
  stream->CloseInput();
  EXPECT_FALSE(stream->owes_progress());
}

TEST_F(CodecStreamTest, OneStreamHoldsAQuarterOfTheMemory) {
  Go(false);
  const auto stream = Open(CodecOp::kEncode);
  std::size_t sent = 0;
  while (stream->wants_message() && sent < 1000) {
    v1::CodecItem item = blocks_.ToEncode(sent % blocks_.count());
    item.set_item_id(sent++);
    Send(*stream, item, {blocks_.raw(item.item_id() % blocks_.count())});
    if (queue_.Stats().waiting_jobs == 8) break;  // the queue is full before
  }
  EXPECT_LE(memory_.used_bytes(), memory_.limit_bytes() / 4 + 3 * blocks_.raw_bytes());
  Go(true);
  TakeAnswers(*stream, sent);
}

TEST_F(CodecStreamTest, AFullQueueRefusesAnItemBeforeItsBytesAreKept) {
  Go(false);
  const auto stream = Open(CodecOp::kEncode);
  for (std::uint64_t i = 0; i < 12; ++i) {
    v1::CodecItem item = blocks_.ToEncode(0);
    item.set_item_id(i);
    Send(*stream, item, {blocks_.raw(0)});
  }
  Go(true);
  const auto answers = TakeAnswers(*stream, 12);
  int refused = 0;
  for (const auto& [_, answer] : answers) {
    if (answer.result.status().code() == 0) continue;
    EXPECT_EQ(answer.result.status().code(),
              static_cast<int>(absl::StatusCode::kResourceExhausted));
    EXPECT_GT(answer.result.retry_after_ms(), 0u);
    ++refused;
  }
  EXPECT_GE(refused, 1);
  EXPECT_LE(refused, 4);
}

TEST_F(CodecStreamTest, AnItemThatDripsInEndsWithItsTime) {
  const auto stream = Open(CodecOp::kEncode);
  v1::CodecRequest request;
  *request.mutable_item() = blocks_.ToEncode(0);
  stream->Receive(Message(request, std::span(blocks_.raw(0)).first(100)));
  EXPECT_GT(memory_.used_bytes(), 0u);
  clock_.Advance(limits_.item_timeout_max + std::chrono::seconds(1));
  stream->Receive(Message({}, std::span(blocks_.raw(0)).subspan(100, 100)));
  const auto answers = TakeAnswers(*stream, 1);
  EXPECT_EQ(answers.at(0).result.status().code(),
            static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(memory_.used_bytes(), 0u);
}

TEST_F(CodecStreamTest, AnItemThatTakesMoreThanAStreamMayHoldIsRefused) {
  // Granted for being alone, it would keep everybody else waiting.
  ByteBudget small(6 * blocks_.raw_bytes());
  const CodecStreamHost host{.queue = queue_,
                             .memory = small,
                             .clock = clock_,
                             .limits = limits_,
                             .post = [](std::function<void()>) {}};
  const auto stream = CodecStream::Create(host, CodecOp::kEncode, [] {});
  v1::CodecRequest request;
  *request.mutable_open() = blocks_.Open();
  *request.mutable_item() = blocks_.ToEncode(0);
  stream->Receive(Message(request, {}));
  EXPECT_EQ(small.used_bytes(), 0u);
  const auto answers = TakeAnswers(*stream, 1);
  EXPECT_EQ(answers.at(0).result.status().code(),
            static_cast<int>(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(answers.at(0).result.status().message(), HasSubstr("--memory_bytes"));
  stream->Cancel();
}

TEST_F(CodecStreamTest, ACallerThatReadsNothingIsNotReadForEver) {
  const auto stream = Open(CodecOp::kEncode);
  v1::CodecItem item = blocks_.ToEncode(0);
  item.set_block_bytes(17);
  v1::CodecRequest request;
  *request.mutable_item() = item;
  int sent = 0;
  while (stream->wants_message() && sent < 5000) {
    stream->Receive(Message(request, {}));
    ++sent;
  }
  EXPECT_EQ(sent, 1024);
  grpc::ByteBuffer answer;
  EXPECT_TRUE(stream->TakeMessage(&answer));
  EXPECT_TRUE(stream->wants_message());
}

TEST_F(CodecStreamTest, ProvenanceBoundsWhatABlockIsWorth) {
  const auto stream = Open(CodecOp::kEncode);
  v1::CodecItem item = blocks_.ToEncode(0, v1::QUALITY_EXACT);
  item.set_restored_quality(v1::QUALITY_SMALL);
  Send(*stream, item, {blocks_.raw(0)});
  const auto answers = TakeAnswers(*stream, 1);
  EXPECT_EQ(answers.at(0).result.quality(), v1::QUALITY_EXACT);
  EXPECT_EQ(answers.at(0).result.served_quality(), v1::QUALITY_SMALL);
}

TEST_F(CodecStreamTest, ProbabilitiesAreAnsweredWithSurprisal) {
  const auto stream = Open(CodecOp::kEncode);
  v1::CodecItem item = blocks_.ToEncode(0);
  std::string halves;
  for (int i = 0; i < 16; ++i) halves += std::string("\x8c\xb9", 2);  // -0.693 as a half: 1 bit
  item.mutable_probabilities()->set_log_probs(halves);
  Send(*stream, item, {blocks_.raw(0)});
  const auto answers = TakeAnswers(*stream, 1);
  EXPECT_NEAR(answers.at(0).result.surprisal_bits(), 16, 0.1);
}

}  // namespace
}  // namespace kvtrie
