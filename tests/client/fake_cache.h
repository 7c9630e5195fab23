#pragma once

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "kvtrie/v1/cache.grpc.pb.h"
#include "storage/base/byte_order.h"
#include "storage/base/byte_reader.h"
#include "storage/base/crc32c.h"

namespace kvtrie {

// A Cache service that misbehaves on demand. It stores by (first token of the block, depth), which
// is enough for tests whose paths differ in their tokens. Faults are counters: so many calls,
// chunks or acknowledgements go wrong.
class FakeCache final : public v1::Cache::Service {
 public:
  static constexpr std::uint32_t kBlockTokens = 4;

  explicit FakeCache(std::vector<std::size_t> layer_bytes) : layer_bytes_(std::move(layer_bytes)) {
    for (const std::size_t bytes : layer_bytes_) block_bytes_ += bytes;
  }

  std::atomic<int> unavailable_calls{0};
  std::atomic<int> corrupt_chunks{0};
  std::atomic<int> cut_fetches_after_messages{-1};  // -1: never; then once
  std::atomic<int> cut_puts_after_acks{-1};         // -1: never; then once
  std::atomic<int> unavailable_blocks{0};
  std::atomic<bool> silent{false};  // calls are taken, and never answered
  std::atomic<int> calls{0};
  std::atomic<int> put_blocks_received{0};
  std::atomic<int> eager_announces{0};

  std::string Store(const std::string& bytes) {
    absl::MutexLock lock(&mutex_);
    const std::string id = NewId();
    blocks_[id] = bytes;
    return id;
  }
  std::size_t stored_blocks() {
    absl::MutexLock lock(&mutex_);
    return blocks_.size();
  }

  grpc::Status RegisterModel(grpc::ServerContext* context, const v1::RegisterModelRequest*,
                             v1::RegisterModelResponse* response) override {
    if (const grpc::Status status = Begin(context); !status.ok()) return status;
    response->set_model_id(std::string(16, 'm'));
    response->set_block_tokens(kBlockTokens);
    response->set_raw_block_bytes(block_bytes_);
    return grpc::Status::OK;
  }

  grpc::Status Lookup(grpc::ServerContext* context, const v1::LookupRequest* request,
                      v1::LookupResponse* response) override {
    if (const grpc::Status status = Begin(context); !status.ok()) return status;
    for (int i = 0; i < request->queries_size(); ++i) response->add_results();
    return grpc::Status::OK;
  }

  grpc::Status Pin(grpc::ServerContext* context, const v1::PinRequest*, v1::PinResponse*) override {
    return Begin(context);
  }

  grpc::Status Fetch(grpc::ServerContext* context, const v1::FetchRequest* request,
                     grpc::ServerWriter<v1::FetchResponse>* writer) override {
    if (const grpc::Status status = Begin(context); !status.ok()) return status;
    const std::size_t count = request->node_ids().size() / 16;
    std::vector<std::string> found(count);
    std::vector<v1::FetchResponse> messages;
    for (std::uint32_t i = 0; i < count; ++i) {
      v1::FetchResponse& message = messages.emplace_back();
      v1::BlockResult* result = message.add_blocks();
      result->set_block_index(i);
      absl::MutexLock lock(&mutex_);
      const auto block = blocks_.find(request->node_ids().substr(i * 16, 16));
      if (TakeOne(unavailable_blocks)) {
        result->mutable_status()->set_code(grpc::StatusCode::UNAVAILABLE);
      } else if (block == blocks_.end()) {
        result->mutable_status()->set_code(grpc::StatusCode::NOT_FOUND);
      } else {
        found[i] = block->second;
        result->set_bytes(found[i].size());
        result->set_quality(v1::QUALITY_EXACT);
        result->set_rung(v1::RUNG_EXACT);
      }
    }
    const auto add_layer = [&](v1::FetchResponse& message, std::uint32_t i, std::size_t layer) {
      if (found[i].empty()) return;
      std::size_t offset = 0;
      for (std::size_t l = 0; l < layer; ++l) offset += layer_bytes_[l];
      std::string bytes = found[i].substr(offset, layer_bytes_[layer]);
      v1::Chunk* chunk = message.add_chunks();
      chunk->set_block_index(i);
      chunk->set_offset(offset);
      chunk->set_bytes(static_cast<std::uint32_t>(bytes.size()));
      chunk->set_crc32c(Crc32c(AsBytes(bytes)));
      if (TakeOne(corrupt_chunks)) bytes[bytes.size() / 2] ^= 1;
      message.mutable_data()->append(bytes);
    };
    if (request->order() == v1::FETCH_ORDER_LAYER_MAJOR) {
      for (std::size_t layer = 0; layer < layer_bytes_.size(); ++layer) {
        v1::FetchResponse& message = layer == 0 ? messages.back() : messages.emplace_back();
        for (std::uint32_t i = 0; i < count; ++i) add_layer(message, i, layer);
      }
    } else {
      for (std::uint32_t i = 0; i < count; ++i) {
        for (std::size_t layer = 0; layer < layer_bytes_.size(); ++layer) {
          add_layer(messages[i], i, layer);
        }
      }
    }
    int sent = 0;
    for (const v1::FetchResponse& message : messages) {
      if (sent++ == cut_fetches_after_messages) {
        cut_fetches_after_messages = -1;
        return {grpc::StatusCode::UNAVAILABLE, "cut"};
      }
      writer->Write(message);
    }
    return grpc::Status::OK;
  }

  grpc::Status Put(grpc::ServerContext* context,
                   grpc::ServerReaderWriter<v1::PutResponse, v1::PutRequest>* stream) override {
    if (const grpc::Status status = Begin(context); !status.ok()) return status;
    struct OpenPut {
      v1::PutAnnounce announce;
      std::map<std::uint32_t, std::string> bytes;
      std::set<std::uint32_t> missing;
    };
    std::map<std::uint64_t, OpenPut> puts;
    int acks = 0;
    v1::PutRequest request;
    while (stream->Read(&request)) {
      v1::PutResponse response;
      for (const v1::PutAnnounce& announce : request.announces()) {
        OpenPut& put = puts[announce.put_id()];
        put.announce = announce;
        if (announce.eager()) ++eager_announces;
        v1::PutPlan* plan = response.add_plans();
        plan->set_put_id(announce.put_id());
        plan->set_block_bytes(block_bytes_);
        const std::size_t blocks = announce.prefix().tokens().size() / 4 / kBlockTokens;
        for (auto i = announce.first_block(); i < blocks; ++i) {
          absl::MutexLock lock(&mutex_);
          const auto stored = by_path_.find(PathKey(announce, i));
          if (stored != by_path_.end()) {
            AddAck(announce.put_id(), i, stored->second, true, &response);
            continue;
          }
          put.missing.insert(i);
          char index[4];
          StoreLittle(index, i);
          plan->mutable_missing_blocks()->append(index, 4);
        }
        if (put.missing.empty()) response.add_dones()->set_put_id(announce.put_id());
      }
      std::size_t at = 0;
      for (const v1::Chunk& chunk : request.chunks()) {
        const std::string bytes = request.data().substr(at, chunk.bytes());
        at += chunk.bytes();
        OpenPut& put = puts[chunk.put_id()];
        std::string& block = put.bytes[chunk.block_index()];
        block += bytes;
        if (block.size() < block_bytes_) continue;
        ++put_blocks_received;
        if (put.missing.erase(chunk.block_index()) == 0) continue;
        std::string id;
        {
          absl::MutexLock lock(&mutex_);
          id = NewId();
          blocks_[id] = block;
          by_path_[PathKey(put.announce, chunk.block_index())] = id;
        }
        AddAck(chunk.put_id(), chunk.block_index(), id, false, &response);
        if (put.missing.empty()) response.add_dones()->set_put_id(chunk.put_id());
        if (++acks == cut_puts_after_acks) {
          cut_puts_after_acks = -1;
          stream->Write(response);
          return {grpc::StatusCode::UNAVAILABLE, "cut"};
        }
      }
      stream->Write(response);
    }
    return grpc::Status::OK;
  }

 private:
  grpc::Status Begin(grpc::ServerContext* context) {
    ++calls;
    while (silent && !context->IsCancelled()) std::this_thread::yield();
    if (TakeOne(unavailable_calls)) return {grpc::StatusCode::UNAVAILABLE, "not now"};
    return grpc::Status::OK;
  }

  static bool TakeOne(std::atomic<int>& counter) {
    int value = counter.load();
    while (value > 0 && !counter.compare_exchange_weak(value, value - 1)) {
    }
    return value > 0;
  }

  std::string NewId() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::string id(16, '\0');
    StoreLittle(id.data(), ++last_id_);
    return id;
  }

  static std::string PathKey(const v1::PutAnnounce& announce, std::uint32_t block_index) {
    return announce.prefix().tokens().substr(0, (block_index + 1) * kBlockTokens * 4);
  }

  static void AddAck(std::uint64_t put_id, std::uint32_t block_index, const std::string& node,
                     bool duplicate, v1::PutResponse* response) {
    v1::PutAck* ack = response->add_acks();
    ack->set_put_id(put_id);
    ack->set_block_index(block_index);
    ack->set_node_id(node);
    ack->set_duplicate(duplicate);
  }

  const std::vector<std::size_t> layer_bytes_;
  std::size_t block_bytes_ = 0;

  absl::Mutex mutex_;
  std::uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, std::string> blocks_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::string> by_path_ ABSL_GUARDED_BY(mutex_);
};

// A FakeCache on a port of loopback, which can go away and come back.
class FakeServer {
 public:
  explicit FakeServer(FakeCache* cache) : cache_(cache) { Start(); }
  ~FakeServer() { Stop(); }

  void Start() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:" + std::to_string(port_),
                             grpc::InsecureServerCredentials(), &port_);
    builder.SetMaxReceiveMessageSize(8 << 20);
    builder.RegisterService(cache_);
    server_ = builder.BuildAndStart();
  }
  // As a crash looks to clients: connections break.
  void Stop() {
    if (server_ == nullptr) return;
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
    server_.reset();
  }
  std::string target() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  FakeCache* const cache_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace kvtrie
