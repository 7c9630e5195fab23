#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvtrie {

// The addresses of workers. Names are looked up on a thread of its own, again and again, and nobody
// waits for it: a resolver may hang for many seconds. Thread-safe.
class WorkerAddresses {
 public:
  // "1.2.3.4:port" or "[v6]:port" for each address of "name:port"; none where it is not known.
  using Lookup = std::function<std::vector<std::string>(const std::string& name_and_port)>;
  static std::vector<std::string> LookUp(const std::string& name_and_port);

  // `targets` as WorkerOptions has them. `lookup` may outlive this.
  WorkerAddresses(const std::vector<std::string>& targets, std::chrono::milliseconds period,
                  Lookup lookup = LookUp);
  // Does not wait: a lookup that is under way goes on, and then its thread ends.
  ~WorkerAddresses();

  WorkerAddresses(const WorkerAddresses&) = delete;
  WorkerAddresses& operator=(const WorkerAddresses&) = delete;

  struct Known {
    std::uint64_t version = 0;
    std::vector<std::string> addresses;  // each is there once
  };
  // What is known now, unless nothing has changed since that version; 0: whatever it is. A name
  // that was not looked up yet has no addresses, and one that is not known any more keeps those it
  // had.
  std::optional<Known> After(std::uint64_t version) const;

 private:
  struct Shared;

  static void Watch(const std::shared_ptr<Shared>& shared, std::chrono::milliseconds period,
                    const Lookup& lookup);

  const std::shared_ptr<Shared> shared_;  // with the thread
};

}  // namespace kvtrie
