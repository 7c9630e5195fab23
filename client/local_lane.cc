#include "client/local_lane.h"

#include <grpcpp/client_context.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "client/status_from_grpc.h"
#include "kvtrie/v1/cache.grpc.pb.h"
#include "kvtrie/v1/local_lane.pb.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

// Blocks of one request start at multiples of it.
constexpr std::size_t kBlockAlignment = 64;
// A request names 16 bytes per block; far below the limit of a message.
constexpr std::size_t kRequestBlocksMax = 4096;
// Idle connections beyond it are closed.
constexpr std::size_t kIdleConnectionsMax = 64;

constexpr std::size_t AlignBlock(std::size_t bytes) {
  return (bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
}

// Where the blocks of a request come to lie.
struct Landing {
  std::size_t block_count = 0;
  std::size_t bytes = 0;
  std::uint64_t region_offset = 0;  // of an in-place landing
  bool in_place = false;
};

// As many blocks from the front of `wanted` as go into one request and one kind of landing.
// Frames do not fill their targets, and so come to lie elsewhere.
Landing PlanLanding(const FetchAssembly& assembly, std::span<const std::uint32_t> wanted,
                    const LocalRegion& region, BlockForm form) {
  Landing landing;
  for (const std::uint32_t target_index : wanted) {
    const std::span<std::byte> raw = assembly.target(target_index).raw;
    const auto offset = region.OffsetOf(raw);
    const bool placeable =
        form == BlockForm::kRaw && offset.has_value() && *offset % kBlockAlignment == 0;
    const std::size_t end = AlignBlock(landing.bytes) + raw.size();
    if (landing.block_count == 0) {
      landing.in_place = placeable;
      landing.region_offset = offset.value_or(0);
    } else {
      if (end > LocalLane::kRequestBytes || landing.block_count == kRequestBlocksMax) break;
      if (placeable != landing.in_place) break;
      if (placeable && *offset != landing.region_offset + AlignBlock(landing.bytes)) break;
    }
    landing.bytes = end;
    ++landing.block_count;
  }
  return landing;
}

}  // namespace

bool IsLocalTarget(const std::string& target) {
  std::string_view name = target;
  if (name.starts_with("unix:")) return true;
  for (const std::string_view scheme : {"dns:", "ipv4:", "ipv6:", "///"}) {
    if (name.starts_with(scheme)) name.remove_prefix(scheme.size());
  }
  return name.starts_with("127.") || name.starts_with("[::1]") || name.starts_with("localhost:");
}

LocalLane::LocalLane(ChannelPool& channels, std::shared_ptr<LocalRegion> region)
    : channels_(channels), region_(std::move(region)) {}

absl::StatusOr<std::unique_ptr<LocalLane::Connection>> LocalLane::TakeConnection(
    Deadline deadline, bool wait_for_ready) {
  while (true) {
    std::unique_ptr<Connection> connection;
    {
      absl::MutexLock lock(&mutex_);
      if (idle_.empty()) break;
      connection = std::move(idle_.back());
      idle_.pop_back();
    }
    if (connection->socket->StillOpen()) return connection;
  }
  return Open(deadline, wait_for_ready);
}

absl::StatusOr<std::unique_ptr<LocalLane::Connection>> LocalLane::Open(Deadline deadline,
                                                                       bool wait_for_ready) {
  grpc::ClientContext context;
  context.set_deadline(deadline.ToGrpc());
  context.set_wait_for_ready(wait_for_ready);
  v1::OpenLocalLaneRequest request;
  v1::OpenLocalLaneResponse response;
  KV_RETURN_IF_ERROR(FromGrpc(channels_.Control(0).OpenLocalLane(&context, request, &response)));

  auto connection = std::make_unique<Connection>();
  KV_ASSIGN_OR_RETURN(connection->socket, LaneSocket::Connect(response.socket_path()));
  v1::LaneHello hello;
  hello.set_token(response.token());
  hello.set_region_bytes(region_->size());
  KV_RETURN_IF_ERROR(connection->socket->Send(hello, region_->fd(), deadline));
  v1::LaneHelloReply reply;
  KV_RETURN_IF_ERROR(connection->socket->Receive(&reply, deadline));
  KV_RETURN_IF_ERROR(FromItem(reply.status()));
  return connection;
}

void LocalLane::GiveBack(std::unique_ptr<Connection> connection) {
  absl::MutexLock lock(&mutex_);
  if (idle_.size() < kIdleConnectionsMax) idle_.push_back(std::move(connection));
}

absl::StatusOr<std::span<std::byte>> LocalLane::Scratch(Connection& connection, std::size_t bytes) {
  if (connection.scratch.bytes().size() < bytes) {
    connection.scratch.Reset();
    KV_ASSIGN_OR_RETURN(connection.scratch, region_->Allocate(std::max(bytes, kRequestBytes)));
  }
  return connection.scratch.bytes();
}

absl::Status LocalLane::FetchSome(const ModelId& model, const FetchOptions& options,
                                  Deadline deadline, bool wait_for_ready, FetchAssembly* assembly) {
  const Landing landing =
      PlanLanding(*assembly, assembly->StartAttempt(kRequestBlocksMax), *region_, options.form);
  const auto wanted = assembly->StartAttempt(landing.block_count);

  KV_ASSIGN_OR_RETURN(std::unique_ptr<Connection> connection,
                      TakeConnection(deadline, wait_for_ready));
  std::span<std::byte> room;
  if (landing.in_place) {
    room = region_->At(landing.region_offset, landing.bytes);
  } else {
    KV_ASSIGN_OR_RETURN(room, Scratch(*connection, landing.bytes));
    room = room.first(landing.bytes);
  }
  const auto room_offset = region_->OffsetOf(room);
  if (!room_offset.has_value()) return absl::UnavailableError("lane: the region was withdrawn");

  v1::LaneRequest request;
  v1::LaneFetch& fetch = *request.mutable_fetch();
  fetch.mutable_request()->set_model_id(std::string(model.view()));
  std::string& node_ids = *fetch.mutable_request()->mutable_node_ids();
  for (const std::uint32_t i : wanted) node_ids.append(assembly->target(i).node.view());
  fetch.mutable_request()->set_order(v1::FETCH_ORDER_BLOCK_MAJOR);
  fetch.mutable_request()->set_encoding(options.form == BlockForm::kFrame ? v1::ENCODING_FRAME
                                                                          : v1::ENCODING_RAW);
  fetch.mutable_request()->set_min_quality(static_cast<v1::Quality>(options.min_quality));
  if (!options.release_lease.empty() && wanted.size() == assembly->pending_blocks()) {
    fetch.mutable_request()->set_release_lease_id(std::string(options.release_lease.view()));
  }
  fetch.set_region_offset(*room_offset);
  fetch.set_region_bytes(room.size());

  v1::LaneResponse response;
  KV_RETURN_IF_ERROR(connection->socket->Send(request, /*fd_to_pass=*/-1, deadline));
  if (absl::Status status = connection->socket->Receive(&response, deadline); !status.ok()) {
    if (absl::IsDeadlineExceeded(status)) region_->Withdraw(room);
    return status;
  }
  KV_RETURN_IF_ERROR(FromItem(response.status()));

  const auto landed = [&](const v1::LaneBlock& block) -> std::optional<std::span<std::byte>> {
    const std::uint64_t bytes = block.result().bytes();
    if (block.region_offset() < *room_offset || bytes > room.size() ||
        block.region_offset() - *room_offset > room.size() - bytes ||
        block.result().block_index() >= wanted.size()) {
      return std::nullopt;
    }
    return room.subspan(block.region_offset() - *room_offset, bytes);
  };
  if (landing.in_place) {
    // Behind a block that is not stored, and where some came from disk, blocks land in other places
    // than their targets.
    std::vector<std::byte> copy;
    for (const v1::LaneBlock& block : response.blocks()) {
      if (block.result().status().code() != 0) continue;
      const auto from = landed(block);
      if (!from.has_value()) return absl::InternalError("lane: a block out of its place");
      const auto to = assembly->target(wanted[block.result().block_index()]).raw;
      if (from->size() != to.size() || from->data() == to.data()) continue;
      copy.assign(room.begin(), room.end());
      break;
    }
    for (const v1::LaneBlock& block : response.blocks()) {
      if (copy.empty()) break;
      if (block.result().status().code() != 0) continue;
      const auto from = landed(block);
      if (!from.has_value()) return absl::InternalError("lane: a block out of its place");
      const auto to = assembly->target(wanted[block.result().block_index()]).raw;
      if (from->size() != to.size()) continue;
      std::memcpy(to.data(), copy.data() + (from->data() - room.data()), to.size());
    }
  }
  for (v1::LaneBlock& block : *response.mutable_blocks()) {
    for (v1::Chunk& chunk : *block.mutable_chunks()) {
      chunk.set_block_index(block.result().block_index());
    }
    if (landing.in_place || block.result().status().code() != 0) {
      KV_RETURN_IF_ERROR(assembly->AcceptInPlace(
          block.result(),
          std::span(block.chunks().data(), block.chunks().data() + block.chunks_size())));
      continue;
    }
    const auto from = landed(block);
    if (!from.has_value()) return absl::InternalError("lane: a block out of its place");
    v1::FetchResponse message;
    message.add_blocks()->Swap(block.mutable_result());
    message.mutable_chunks()->Swap(block.mutable_chunks());
    const std::span<const std::byte> piece = *from;
    KV_RETURN_IF_ERROR(assembly->Accept(message, std::span(&piece, piece.empty() ? 0 : 1)));
  }
  GiveBack(std::move(connection));
  return absl::OkStatus();
}

absl::Status LocalLane::Put(PutProgress* put, Deadline deadline, bool wait_for_ready) {
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Connection> connection,
                      TakeConnection(deadline, wait_for_ready));
  const std::span<const std::span<const std::byte>> blocks = put->path().blocks;
  std::size_t bytes = 0;
  bool contiguous = true;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    contiguous = contiguous && blocks[i].data() == blocks[0].data() + bytes;
    bytes += blocks[i].size();
  }
  std::optional<std::uint64_t> offset;
  if (contiguous) offset = region_->OffsetOf({blocks[0].data(), bytes});
  std::byte* copy_to = nullptr;
  if (!offset.has_value()) {
    KV_ASSIGN_OR_RETURN(const std::span<std::byte> scratch, Scratch(*connection, bytes));
    copy_to = scratch.data();
    offset = region_->OffsetOf(scratch);
    if (!offset.has_value()) return absl::UnavailableError("lane: the region was withdrawn");
  }

  v1::LaneRequest request;
  v1::LanePut& lane_put = *request.mutable_put();
  *lane_put.mutable_announce() = put->Announce(/*put_id=*/1);
  lane_put.mutable_announce()->set_eager(true);
  lane_put.set_region_offset(*offset);
  for (std::uint32_t i = 0; i < blocks.size(); ++i) {
    for (std::size_t at = 0; at < blocks[i].size();) {
      const std::uint32_t chunk_bytes = put->ChunkBytesAt(i, at);
      const auto piece = blocks[i].subspan(at, chunk_bytes);
      v1::Chunk* chunk = lane_put.add_chunks();
      chunk->set_put_id(1);
      chunk->set_block_index(put->block_index(i));
      chunk->set_offset(at);
      chunk->set_bytes(chunk_bytes);
      if (copy_to != nullptr) {
        chunk->set_crc32c(CopyAndCrc32c(piece, copy_to));
        copy_to += piece.size();
      } else {
        chunk->set_crc32c(Crc32c(piece));
      }
      at += chunk_bytes;
    }
  }

  v1::LaneResponse response;
  KV_RETURN_IF_ERROR(connection->socket->Send(request, /*fd_to_pass=*/-1, deadline));
  KV_RETURN_IF_ERROR(connection->socket->Receive(&response, deadline));
  KV_RETURN_IF_ERROR(FromItem(response.status()));
  for (const v1::PutPlan& plan : response.put().plans()) put->Accept(plan);
  for (const v1::PutAck& ack : response.put().acks()) put->Accept(ack);
  for (const v1::PutDone& done : response.put().dones()) put->Accept(done);
  GiveBack(std::move(connection));
  return absl::OkStatus();
}

}  // namespace kvtrie
