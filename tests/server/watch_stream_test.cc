#include "server/watch_stream.h"

#include "tests/server/running_server.h"

namespace kvtrie {
namespace {

TEST(WatchStreamTest, TellsWhatIsStoredAndRemoved) {
  RunningServer server;
  const std::string model = server.RegisterModel();
  grpc::ClientContext context;
  v1::WatchRequest request;
  request.set_want_tokens(true);
  auto stream = server.cache().Watch(&context, request);
  v1::WatchResponse page;
  ASSERT_TRUE(stream->Read(&page));  // where the watcher stands
  EXPECT_EQ(page.events_size(), 0);
  EXPECT_NE(page.epoch(), 0u);

  PutPath(server.cache(), model, 3);
  std::vector<v1::Event> events;
  while (events.size() < 3) {
    ASSERT_TRUE(stream->Read(&page));
    for (const auto& event : page.events()) events.push_back(event);
  }
  for (std::uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(events[i].kind(), v1::EVENT_KIND_STORED);
    EXPECT_EQ(events[i].depth(), i + 1);
    EXPECT_EQ(events[i].model_id(), model);
    EXPECT_EQ(events[i].tokens(),
              PathTokens(3).substr(i * kTestBlockTokens * 4, kTestBlockTokens * 4));
    if (i > 0) {
      EXPECT_EQ(events[i].parent_id(), events[i - 1].node_id());
      EXPECT_EQ(events[i].sequence(), events[i - 1].sequence() + 1);
    }
  }

  v1::DeleteRequest remove;
  remove.mutable_selection()->set_node_id(events[2].node_id());
  v1::DeleteResponse removed;
  grpc::ClientContext remove_context;
  ASSERT_TRUE(server.cache().Delete(&remove_context, remove, &removed).ok());
  ASSERT_TRUE(stream->Read(&page));
  ASSERT_EQ(page.events_size(), 1);
  EXPECT_EQ(page.events(0).kind(), v1::EVENT_KIND_REMOVED);
  EXPECT_EQ(page.events(0).node_id(), events[2].node_id());
}

TEST(WatchStreamTest, WhoFellBehindTheLogIsToldSo) {
  RunningServer server([](ServerConfig* config) { config->engine.event_log_max = 4; });
  const std::string model = server.RegisterModel();
  PutPath(server.cache(), model, 10);
  grpc::ClientContext context;
  v1::WatchRequest request;
  request.set_from_sequence(1);
  auto stream = server.cache().Watch(&context, request);
  v1::WatchResponse page;
  ASSERT_TRUE(stream->Read(&page));
  ASSERT_EQ(page.events_size(), 5);
  EXPECT_EQ(page.events(0).kind(), v1::EVENT_KIND_CLEARED);
  EXPECT_TRUE(page.events(0).gap());
  EXPECT_EQ(page.events(1).depth(), 7u);
}

TEST(WatchStreamTest, OtherModelsAreFilteredAway) {
  RunningServer server;
  const std::string watched = server.RegisterModel();
  const std::string other = server.RegisterModel(TestSpec("other"));
  grpc::ClientContext context;
  v1::WatchRequest request;
  request.set_model_id(watched);
  request.set_from_sequence(1);
  auto stream = server.cache().Watch(&context, request);
  v1::WatchResponse page;
  ASSERT_TRUE(stream->Read(&page));
  PutPath(server.cache(), other, 3);
  PutPath(server.cache(), watched, 1);
  ASSERT_TRUE(stream->Read(&page));
  ASSERT_EQ(page.events_size(), 1);
  EXPECT_EQ(page.events(0).model_id(), watched);
}

TEST(WatchStreamTest, BadModelIdIsRefused) {
  RunningServer server;
  grpc::ClientContext context;
  v1::WatchRequest request;
  request.set_model_id("short");
  auto stream = server.cache().Watch(&context, request);
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST(WatchStreamTest, CancelledWatchersAreForgotten) {
  RunningServer server;
  grpc::ClientContext context;
  auto stream = server.cache().Watch(&context, v1::WatchRequest());
  v1::WatchResponse page;
  ASSERT_TRUE(stream->Read(&page));
  context.TryCancel();
  AwaitTrue([&server] { return server.server().streams().stream_count() == 0; });
}

}  // namespace
}  // namespace kvtrie
