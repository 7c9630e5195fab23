#pragma once

#include <functional>

#include "server/put_stream.h"
#include "server/service_context.h"
#include "storage/base/byte_budget.h"

namespace kvtrie {

// Puts of services: blocking calls go through the engine's threads. Thread-safe.
class EnginePutHost final : public PutHost {
 public:
  explicit EnginePutHost(ServiceContext& context) : context_(context) {}

  void BeginPut(const PutAnnouncement& put, BeginCallback on_begun) override;
  ByteBudget& block_budget() override { return context_.engine.put_budget(); }
  ByteBudget& announce_budget() override { return context_.stream_budget; }
  void Post(std::function<void()> work) override { context_.timer.Post(std::move(work)); }

 private:
  ServiceContext& context_;
};

}  // namespace kvtrie
