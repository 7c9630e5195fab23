#pragma once

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <utility>

#include "server/worker/kv_worker.h"

namespace kvtrie {

inline WorkerConfig TestWorkerConfig() {
  WorkerConfig config;
  config.listen = *ParseListenAddress("127.0.0.1:0");
  config.http_listen = *ParseListenAddress("127.0.0.1:0");
  config.queue.threads = 2;
  config.queue.batch_tokens = 0;
  config.memory_bytes = std::size_t{64} << 20;
  config.limits.item_bytes_max = std::size_t{8} << 20;
  return config;
}

// A worker and a stub to it.
class RunningWorker {
 public:
  explicit RunningWorker(const std::function<void(WorkerConfig*)>& change = {},
                         std::unique_ptr<const CodecBackend> backend = CpuBackend(),
                         Clock& clock = SystemClock()) {
    WorkerConfig config = TestWorkerConfig();
    if (change) change(&config);
    auto started = KvWorker::Start(config, std::move(backend), clock);
    EXPECT_TRUE(started.ok()) << started.status();
    worker_ = *std::move(started);
    // As the client's: gRPC's own retries keep messages for themselves.
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    channel_ = grpc::CreateCustomChannel(worker_->addresses().listen,
                                         grpc::InsecureChannelCredentials(), arguments);
    stub_ = v1::Codec::NewStub(channel_);
  }

  KvWorker& operator*() { return *worker_; }
  KvWorker* operator->() { return worker_.get(); }
  v1::Codec::Stub& stub() { return *stub_; }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }

 private:
  std::unique_ptr<KvWorker> worker_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Codec::Stub> stub_;
};

}  // namespace kvtrie
