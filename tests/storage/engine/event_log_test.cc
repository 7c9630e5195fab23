#include "storage/engine/event_log.h"

#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvtrie {
namespace {

constexpr TenantId kFirst{1};
constexpr TenantId kSecond{2};

std::vector<StoreEvent> Events(std::size_t count, TenantId tenant, std::uint32_t depth = 1) {
  std::vector<StoreEvent> events(count);
  for (StoreEvent& event : events) {
    event.tenant = tenant;
    event.depth = depth;
  }
  return events;
}

TEST(EventLogTest, NumbersEventsFromOneWithoutGaps) {
  EventLog log(77, 100);
  EXPECT_EQ(log.epoch(), 77u);
  EXPECT_EQ(log.next_sequence(), 1u);
  log.Append(Events(3, kFirst));
  log.Append(Events(2, kFirst));
  EXPECT_EQ(log.next_sequence(), 6u);
  const EventLog::Page page = log.Read(kFirst, 1, 100);
  ASSERT_EQ(page.events.size(), 5u);
  for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(page.events[i].sequence, i + 1);
  EXPECT_FALSE(page.gap);
  EXPECT_EQ(page.next_sequence, 6u);
}

TEST(EventLogTest, ATenantSeesItsOwnEventsOnly) {
  EventLog log(1, 100);
  for (int i = 0; i < 5; ++i) {
    log.Append(Events(1, kFirst));
    log.Append(Events(1, kSecond));
  }
  const EventLog::Page page = log.Read(kSecond, 1, 100);
  ASSERT_EQ(page.events.size(), 5u);
  for (const StoreEvent& event : page.events) EXPECT_EQ(event.tenant, kSecond);
  EXPECT_EQ(page.next_sequence, 11u);
  EXPECT_FALSE(page.gap);
}

TEST(EventLogTest, PagesGoOnWhereTheLastOneEnded) {
  EventLog log(1, 100);
  for (int i = 0; i < 10; ++i) {
    log.Append(Events(1, kFirst));
    log.Append(Events(1, kSecond));
  }
  std::vector<std::uint64_t> seen;
  std::uint64_t from = 1;
  for (int page_count = 0; page_count < 4; ++page_count) {
    const EventLog::Page page = log.Read(kFirst, from, 3);
    for (const StoreEvent& event : page.events) seen.push_back(event.sequence);
    from = page.next_sequence;
  }
  EXPECT_THAT(seen, testing::ElementsAre(1, 3, 5, 7, 9, 11, 13, 15, 17, 19));
  EXPECT_TRUE(log.Read(kFirst, from, 3).events.empty());
}

TEST(EventLogTest, AGapIsToldOnceAndTheOldestLeftIsGiven) {
  EventLog log(1, 4);
  log.Append(Events(10, kFirst));
  const EventLog::Page page = log.Read(kFirst, 3, 100);
  EXPECT_TRUE(page.gap);
  ASSERT_EQ(page.events.size(), 4u);
  EXPECT_EQ(page.events.front().sequence, 7u);
  EXPECT_FALSE(log.Read(kFirst, page.next_sequence, 100).gap);
  EXPECT_FALSE(log.Read(kFirst, 7, 100).gap);
  EXPECT_TRUE(log.Read(kFirst, 6, 100).gap);
}

TEST(EventLogTest, APlaceAheadOfTheLogIsAGap) {
  EventLog log(1, 4);
  log.Append(Events(2, kFirst));
  EXPECT_FALSE(log.Read(kFirst, 3, 100).gap);
  const EventLog::Page page = log.Read(kFirst, 4, 100);
  EXPECT_TRUE(page.gap);
  EXPECT_EQ(page.events.size(), 2u);
  EXPECT_EQ(page.next_sequence, 3u);
}

TEST(EventLogTest, NotifiesOnceWhenTheEventComes) {
  EventLog log(1, 100);
  int called = 0;
  EXPECT_NE(log.NotifyAt(3, [&called] { ++called; }), 0u);
  log.Append(Events(2, kFirst));
  EXPECT_EQ(called, 0);
  log.Append(Events(1, kSecond));
  EXPECT_EQ(called, 1);
  log.Append(Events(5, kFirst));
  EXPECT_EQ(called, 1);
  log.NotifyAt(2, [&called] { ++called; });  // is there already
  EXPECT_EQ(called, 2);
}

TEST(EventLogTest, CancelledNotificationsDoNotCome) {
  EventLog log(1, 100);
  int called = 0;
  const std::uint64_t notification = log.NotifyAt(1, [&called] { ++called; });
  log.Cancel(notification);
  log.Cancel(notification);
  log.Cancel(12345);
  log.Append(Events(1, kFirst));
  EXPECT_EQ(called, 0);
}

TEST(EventLogTest, NotificationsMayAskForTheNextOne) {
  EventLog log(1, 100);
  int called = 0;
  std::function<void()> again = [&] {
    ++called;
    log.NotifyAt(log.next_sequence(), again);
  };
  log.NotifyAt(1, again);
  for (int i = 0; i < 5; ++i) log.Append(Events(2, kFirst));
  EXPECT_EQ(called, 5);
}

TEST(EventLogTest, ReadersBesideAWriterSeeEveryEventOnce) {
  EventLog log(1, 1'000'000);
  constexpr std::uint64_t kEvents = 20'000;
  std::vector<std::thread> readers;
  for (int id = 0; id < 2; ++id) {
    readers.emplace_back([&log] {
      std::uint64_t from = 1;
      while (from <= kEvents) {
        const EventLog::Page page = log.Read(kFirst, from, 64);
        for (const StoreEvent& event : page.events) {
          ASSERT_EQ(event.sequence, from);
          ++from;
        }
      }
    });
  }
  for (std::uint64_t i = 0; i < kEvents / 4; ++i) log.Append(Events(4, kFirst));
  for (std::thread& reader : readers) reader.join();
}

}  // namespace
}  // namespace kvtrie
