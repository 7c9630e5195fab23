#include "client/worker_addresses.h"

#include <arpa/inet.h>
#include <netdb.h>

#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/worker_options.h"

namespace kvtrie {

struct WorkerAddresses::Shared {
  struct Target {
    std::string name;  // empty: it is an address
    std::vector<std::string> addresses;
  };

  absl::Mutex mutex;
  std::vector<Target> targets ABSL_GUARDED_BY(mutex);
  std::uint64_t version ABSL_GUARDED_BY(mutex) = 1;
  bool stopping ABSL_GUARDED_BY(mutex) = false;
};

std::vector<std::string> WorkerAddresses::LookUp(const std::string& name_and_port) {
  const std::size_t colon = name_and_port.rfind(':');
  std::string host = name_and_port.substr(0, colon);
  const std::string port = name_and_port.substr(colon + 1);
  if (host.starts_with("[")) host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return {};
  std::set<std::string> addresses;
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    char text[NI_MAXHOST];
    if (::getnameinfo(at->ai_addr, at->ai_addrlen, text, sizeof text, nullptr, 0, NI_NUMERICHOST) !=
        0) {
      continue;
    }
    addresses.insert(at->ai_family == AF_INET6 ? absl::StrCat("[", text, "]:", port)
                                               : absl::StrCat(text, ":", port));
  }
  ::freeaddrinfo(found);
  return {addresses.begin(), addresses.end()};
}

WorkerAddresses::WorkerAddresses(const std::vector<std::string>& targets,
                                 std::chrono::milliseconds period, Lookup lookup)
    : shared_(std::make_shared<Shared>()) {
  bool has_names = false;
  {
    absl::MutexLock lock(&shared_->mutex);
    for (const std::string& target : targets) {
      Shared::Target& added = shared_->targets.emplace_back();
      absl::string_view name = target;
      if (absl::ConsumePrefix(&name, WorkerOptions::kNamePrefix)) {
        added.name = std::string(name);
        has_names = true;
      } else {
        added.addresses = {target};
      }
    }
  }
  if (!has_names) return;
  std::thread([shared = shared_, period, lookup = std::move(lookup)] {
    Watch(shared, period, lookup);
  }).detach();
}

WorkerAddresses::~WorkerAddresses() {
  absl::MutexLock lock(&shared_->mutex);
  shared_->stopping = true;
}

void WorkerAddresses::Watch(const std::shared_ptr<Shared>& shared, std::chrono::milliseconds period,
                            const Lookup& lookup) {
  absl::MutexLock lock(&shared->mutex);
  while (true) {
    for (Shared::Target& target : shared->targets) {
      if (target.name.empty()) continue;
      shared->mutex.Unlock();
      std::vector<std::string> addresses = lookup(target.name);
      shared->mutex.Lock();
      if (shared->stopping) return;
      // A resolver that fails for a while takes no worker away.
      if (addresses.empty() || addresses == target.addresses) continue;
      target.addresses = std::move(addresses);
      ++shared->version;
    }
    if (shared->mutex.AwaitWithTimeout(absl::Condition(&shared->stopping),
                                       absl::FromChrono(period))) {
      return;
    }
  }
}

std::optional<WorkerAddresses::Known> WorkerAddresses::After(std::uint64_t version) const {
  absl::MutexLock lock(&shared_->mutex);
  if (shared_->version == version) return std::nullopt;
  Known known{.version = shared_->version, .addresses = {}};
  std::set<std::string> seen;
  for (const Shared::Target& target : shared_->targets) {
    for (const std::string& address : target.addresses) {
      if (seen.insert(address).second) known.addresses.push_back(address);
    }
  }
  return known;
}

}  // namespace kvtrie
