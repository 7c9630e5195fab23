#pragma once

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kvtrie/v1/admin.grpc.pb.h"
#include "kvtrie/v1/cache.grpc.pb.h"
#include "server/kv_server.h"
#include "storage/base/crc32c.h"
#include "tests/storage/base/scratch_folder.h"

namespace kvtrie {

inline ServerConfig TestConfig(const std::string& folder) {
  ServerConfig config;
  config.engine.data_dir = folder + "/data";
  config.engine.disk_limit_bytes = std::uint64_t{256} << 20;
  config.engine.segment_bytes = std::uint64_t{4} << 20;
  config.engine.memory_tier_bytes = std::uint64_t{64} << 20;
  config.engine.put_memory_bytes = std::uint64_t{16} << 20;
  config.engine.token_cache_bytes = std::uint64_t{16} << 20;
  config.engine.index_bytes_max = std::uint64_t{64} << 20;
  config.listen = *ParseListenAddress("127.0.0.1:0");
  config.admin_listen = *ParseListenAddress("127.0.0.1:0");
  config.http_listen = *ParseListenAddress("127.0.0.1:0");
  config.local_socket = folder + "/local.sock";
  return config;
}

// Two layers of 8 tokens per block; a block is raw 2 * 2 * 8 * 4 * 64 * 2 = 16 KiB per layer.
inline v1::ModelSpec TestSpec(const std::string& name = "test-model") {
  v1::ModelSpec spec;
  spec.set_name(name);
  spec.set_weights_revision("1");
  spec.set_tokenizer_digest("t");
  spec.set_dtype(v1::DTYPE_BFLOAT16);
  v1::LayerRun* run = spec.add_kv_groups()->add_layer_runs();
  run->set_layer_count(2);
  run->set_kv_heads(4);
  run->set_k_head_dim(64);
  run->set_v_head_dim(64);
  spec.mutable_rope()->set_pairing(v1::ROPE_PAIRING_NONE);
  spec.set_block_tokens(8);
  return spec;
}
inline constexpr std::uint32_t kTestBlockTokens = 8;
inline constexpr std::size_t kTestLayerBytes = 8 * 4 * 64 * 2 * 2;
inline constexpr std::size_t kTestBlockBytes = 2 * kTestLayerBytes;

// A server and stubs to it.
class RunningServer {
 public:
  explicit RunningServer(const std::function<void(ServerConfig*)>& change = {},
                         std::shared_ptr<const BlockCodec> codec = nullptr) {
    ServerConfig config = TestConfig(folder_.path());
    if (change) change(&config);
    auto started = KvServer::Start(config, SystemClock(), std::move(codec));
    EXPECT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
    channel_ = Connect(server_->addresses().listen);
    cache_ = v1::Cache::NewStub(channel_);
    admin_ = v1::Admin::NewStub(Connect(server_->addresses().admin));
  }

  static std::shared_ptr<grpc::Channel> Connect(const std::string& target,
                                                const grpc::ChannelArguments& arguments = {}) {
    return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
  }

  KvServer& server() { return *server_; }
  std::unique_ptr<KvServer>& server_owner() { return server_; }
  v1::Cache::Stub& cache() { return *cache_; }
  v1::Admin::Stub& admin() { return *admin_; }
  std::shared_ptr<grpc::Channel> channel() { return channel_; }
  const std::string& folder() const { return folder_.path(); }

  std::string RegisterModel(const v1::ModelSpec& spec = TestSpec()) {
    v1::RegisterModelRequest request;
    *request.mutable_spec() = spec;
    v1::RegisterModelResponse response;
    grpc::ClientContext context;
    const grpc::Status status = cache_->RegisterModel(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.model_id();
  }

 private:
  ScratchFolder folder_;
  std::unique_ptr<KvServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Cache::Stub> cache_;
  std::unique_ptr<v1::Admin::Stub> admin_;
};

// Tokens of a path that is told apart from others by its seed.
inline std::string PathTokens(std::uint32_t block_count, std::uint32_t seed = 1) {
  std::vector<std::uint32_t> tokens(block_count * kTestBlockTokens);
  for (std::uint32_t i = 0; i < tokens.size(); ++i) tokens[i] = seed * 1'000'003 + i;
  return {reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(tokens[0])};
}

// Incompressible content of one block.
inline std::string BlockContent(std::uint32_t block_index, std::uint32_t seed = 1,
                                std::size_t bytes = kTestBlockBytes) {
  std::mt19937_64 random(seed * 7919u + block_index);
  std::string content(bytes, '\0');
  for (std::size_t i = 0; i + 8 <= bytes; i += 8) {
    const std::uint64_t value = random();
    std::memcpy(content.data() + i, &value, 8);
  }
  return content;
}

inline std::uint32_t CrcOf(std::string_view bytes) {
  return Crc32c({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()});
}

// Appends a block to a request, cut into chunks.
inline void AddBlock(std::uint64_t put_id, std::uint32_t block_index, std::string_view content,
                     v1::PutRequest* request, std::size_t chunk_bytes = 10'000) {
  for (std::size_t offset = 0; offset < content.size(); offset += chunk_bytes) {
    const std::string_view part = content.substr(offset, chunk_bytes);
    v1::Chunk* chunk = request->add_chunks();
    chunk->set_put_id(put_id);
    chunk->set_block_index(block_index);
    chunk->set_offset(offset);
    chunk->set_bytes(static_cast<std::uint32_t>(part.size()));
    chunk->set_crc32c(CrcOf(part));
    request->mutable_data()->append(part);
  }
}

inline v1::PutAnnounce* Announce(std::uint64_t put_id, const std::string& model_id,
                                 const std::string& tokens, v1::PutRequest* request) {
  v1::PutAnnounce* announce = request->add_announces();
  announce->set_put_id(put_id);
  announce->mutable_prefix()->set_model_id(model_id);
  announce->mutable_prefix()->set_tokens(tokens);
  return announce;
}

// Puts a whole path eagerly and waits for its end; returns all answers.
inline v1::PutResponse PutPath(v1::Cache::Stub& cache, const std::string& model_id,
                               std::uint32_t block_count, std::uint32_t seed = 1,
                               const std::string& session_id = {}) {
  grpc::ClientContext context;
  auto stream = cache.Put(&context);
  v1::PutRequest request;
  v1::PutAnnounce* announce = Announce(1, model_id, PathTokens(block_count, seed), &request);
  announce->set_eager(true);
  announce->set_session_id(session_id);
  EXPECT_TRUE(stream->Write(request));
  for (std::uint32_t i = 0; i < block_count; ++i) {
    request.Clear();
    AddBlock(1, i, BlockContent(i, seed), &request);
    EXPECT_TRUE(stream->Write(request));
  }
  stream->WritesDone();
  v1::PutResponse all;
  v1::PutResponse part;
  while (stream->Read(&part)) all.MergeFrom(part);
  const grpc::Status status = stream->Finish();
  EXPECT_TRUE(status.ok()) << status.error_code() << " " << status.error_message();
  return all;
}

inline v1::LookupResult LookUp(v1::Cache::Stub& cache, const std::string& model_id,
                               const std::string& tokens) {
  v1::LookupRequest request;
  v1::LookupQuery* query = request.add_queries();
  query->add_model_ids(model_id);
  query->set_tokens(tokens);
  query->set_want_blocks(true);
  v1::LookupResponse response;
  grpc::ClientContext context;
  const grpc::Status status = cache.Lookup(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response.results_size() == 1 ? response.results(0) : v1::LookupResult();
}

// What a Fetch sent, put together again and checked.
struct Fetched {
  grpc::Status status;
  std::vector<v1::BlockResult> results;  // in order of arrival
  std::map<std::uint32_t, std::string> content;
  std::vector<v1::Chunk> chunks;
  std::size_t message_count = 0;
  std::size_t message_bytes_max = 0;

  const v1::BlockResult* result(std::uint32_t block_index) const {
    for (const auto& r : results) {
      if (r.block_index() == block_index) return &r;
    }
    return nullptr;
  }
};

inline Fetched Fetch(v1::Cache::Stub& cache, const v1::FetchRequest& request) {
  Fetched fetched;
  grpc::ClientContext context;
  auto stream = cache.Fetch(&context, request);
  v1::FetchResponse response;
  while (stream->Read(&response)) {
    ++fetched.message_count;
    fetched.message_bytes_max = std::max(fetched.message_bytes_max, response.data().size());
    for (const auto& result : response.blocks()) fetched.results.push_back(result);
    std::size_t offset = 0;
    for (const auto& chunk : response.chunks()) {
      const std::string part = response.data().substr(offset, chunk.bytes());
      EXPECT_EQ(part.size(), chunk.bytes());
      EXPECT_EQ(CrcOf(part), chunk.crc32c());
      std::string& content = fetched.content[chunk.block_index()];
      content.resize(std::max(content.size(), chunk.offset() + chunk.bytes()));
      content.replace(chunk.offset(), chunk.bytes(), part);
      offset += chunk.bytes();
      fetched.chunks.push_back(chunk);
    }
    EXPECT_EQ(offset, response.data().size());
  }
  fetched.status = stream->Finish();
  return fetched;
}

// Waits for what another thread brings about; a test that waits for ever is ended by its time
// limit.
inline void AwaitTrue(const std::function<bool()>& condition) {
  while (!condition()) std::this_thread::yield();
}

}  // namespace kvtrie
