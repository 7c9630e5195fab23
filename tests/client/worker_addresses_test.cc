#include "client/worker_addresses.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace kvtrie {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;
using Strings = std::vector<std::string>;

constexpr std::chrono::milliseconds kAtOnce{1};

// What is known once that is something else.
WorkerAddresses::Known Await(const WorkerAddresses& addresses, std::uint64_t version) {
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (std::chrono::steady_clock::now() < give_up) {
    if (const auto known = addresses.After(version)) return *known;
    std::this_thread::yield();
  }
  ADD_FAILURE() << "nothing new";
  return {};
}

TEST(WorkerAddressesTest, AddressesAreKnownAtOnceAndEachIsThereOnce) {
  const WorkerAddresses addresses({"b:1", "unix:/a", "b:1"}, kAtOnce);
  const auto known = addresses.After(0);
  ASSERT_TRUE(known.has_value());
  EXPECT_THAT(known->addresses, ElementsAre("b:1", "unix:/a"));
  EXPECT_FALSE(addresses.After(known->version).has_value());
}

TEST(WorkerAddressesTest, ANameStandsForAllItWasFoundToBe) {
  const auto turn = std::make_shared<std::atomic<int>>(0);
  const WorkerAddresses addresses(
      {"dns:///name:7", "b:1"}, kAtOnce, [turn](const std::string& name) {
        EXPECT_EQ(name, "name:7");
        // Not known at last: it keeps what it had.
        const Strings found[] = {{}, {"1.1.1.1:7", "b:1"}, {"2.2.2.2:7"}};
        return turn->load() < 3 ? found[turn->load()] : Strings();
      });
  WorkerAddresses::Known known = *addresses.After(0);
  EXPECT_THAT(known.addresses, ElementsAre("b:1"));
  *turn = 1;
  known = Await(addresses, known.version);
  EXPECT_THAT(known.addresses, UnorderedElementsAre("1.1.1.1:7", "b:1"));
  *turn = 2;
  known = Await(addresses, known.version);
  EXPECT_THAT(known.addresses, UnorderedElementsAre("2.2.2.2:7", "b:1"));
  *turn = 3;
  EXPECT_FALSE(addresses.After(known.version).has_value());
}

TEST(WorkerAddressesTest, DestructionDoesNotWaitForALookup) {
  struct Resolver {
    absl::Notification asked, answers, gone;
  };
  const auto resolver = std::make_shared<Resolver>();
  {
    // Gone with its thread.
    const std::shared_ptr<void> held(nullptr, [resolver](void*) { resolver->gone.Notify(); });
    const WorkerAddresses addresses({"dns:///hangs:1"}, kAtOnce,
                                    [resolver, held](const std::string&) {
                                      resolver->asked.Notify();
                                      resolver->answers.WaitForNotification();
                                      return Strings{"1.1.1.1:1"};
                                    });
    resolver->asked.WaitForNotification();
    EXPECT_THAT(addresses.After(0)->addresses, IsEmpty());
  }
  EXPECT_FALSE(resolver->gone.HasBeenNotified());
  resolver->answers.Notify();
  EXPECT_TRUE(resolver->gone.WaitForNotificationWithTimeout(absl::Seconds(30)));
}

TEST(WorkerAddressesTest, LookUpGivesNumbers) {
  EXPECT_THAT(WorkerAddresses::LookUp("127.0.0.1:80"), ElementsAre("127.0.0.1:80"));
  EXPECT_THAT(WorkerAddresses::LookUp("[::1]:80"), ElementsAre("[::1]:80"));
}

}  // namespace
}  // namespace kvtrie
