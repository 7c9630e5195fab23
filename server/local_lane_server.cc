#include "server/local_lane_server.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "kvtrie/v1/local_lane.pb.h"
#include "server/fetch_plan.h"
#include "server/put_stream.h"
#include "server/status_translation.h"
#include "server/wire_conversion.h"
#include "storage/base/byte_order.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

constexpr std::size_t kMessageBytesMax = std::size_t{8} << 20;
constexpr std::size_t kLengthBytes = 4;
constexpr std::size_t kTokenBytes = 32;
constexpr std::uint64_t kBlockAlignment = 64;

absl::Status ErrnoError(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// Memory that a client shares. Its size cannot shrink, so that touching it never faults; its
// content may change at any time.
class SharedRegion {
 public:
  SharedRegion() = default;
  ~SharedRegion() {
    if (bytes_.data() != nullptr) ::munmap(bytes_.data(), bytes_.size());
  }
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  absl::Status Map(const FileDescriptor& memory, std::uint64_t region_bytes,
                   std::uint64_t region_bytes_max) {
    if (region_bytes == 0 || region_bytes > region_bytes_max) {
      return absl::InvalidArgumentError(absl::StrCat("region_bytes: ", region_bytes, "; 1 to ",
                                                     region_bytes_max, " are allowed"));
    }
    const int seals = ::fcntl(memory.get(), F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
      return absl::InvalidArgumentError("region: not a memfd with F_SEAL_SHRINK");
    }
    struct statfs file_system;
    struct stat file;
    if (::fstatfs(memory.get(), &file_system) != 0 || ::fstat(memory.get(), &file) != 0) {
      return ErrnoError("region: stat");
    }
    // A huge page that is not there is a SIGBUS, whatever the seals.
    if (file_system.f_type == HUGETLBFS_MAGIC) {
      return absl::InvalidArgumentError("region: huge pages (MFD_HUGETLB) are not supported");
    }
    if (static_cast<std::uint64_t>(file.st_size) < region_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("region_bytes: ", region_bytes, "; the memfd has ", file.st_size));
    }
    void* at = ::mmap(nullptr, region_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
    if (at == MAP_FAILED) return ErrnoError("region: mmap");
    // A core dump holds no payload.
    ::madvise(at, region_bytes, MADV_DONTDUMP);
    bytes_ = {static_cast<std::byte*>(at), region_bytes};
    return absl::OkStatus();
  }

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

absl::Status CheckRange(absl::string_view field, std::uint64_t offset, std::uint64_t count,
                        std::uint64_t region_bytes) {
  if (offset <= region_bytes && count <= region_bytes - offset) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, ": [", offset, ", +", count,
                                                 ") is outside of the region of ", region_bytes,
                                                 " bytes"));
}

// Puts of the lane: its threads may block, so that nothing changes threads on the way.
class LanePutHost final : public PutHost {
 public:
  explicit LanePutHost(ServiceContext& context) : context_(context) {}

  void BeginPut(const PutAnnouncement& put, BeginCallback on_begun) override {
    on_begun(context_.engine.BeginPut(kBuiltInTenant, put));
  }
  ByteBudget& block_budget() override { return context_.engine.put_budget(); }
  ByteBudget& announce_budget() override { return context_.stream_budget; }
  void Post(std::function<void()> work) override { context_.timer.Post(std::move(work)); }

 private:
  ServiceContext& context_;
};

// Wakes the thread that waits for a PutStream.
class ChangeSignal {
 public:
  void Notify() {
    absl::MutexLock lock(&mutex_);
    changed_ = true;
  }
  void Await() {
    absl::MutexLock lock(&mutex_, absl::Condition(&changed_));
    changed_ = false;
  }

 private:
  absl::Mutex mutex_;
  bool changed_ ABSL_GUARDED_BY(mutex_) = false;
};

ByteReservation AcquireBlocking(ByteBudget& budget, std::size_t bytes) {
  auto granted = std::make_shared<absl::Notification>();
  if (!budget.AcquireOrWait(bytes, [granted] { granted->Notify(); })) {
    granted->WaitForNotification();
  }
  return ByteReservation(&budget, bytes);
}

}  // namespace

class LocalLaneServer::Connection {
 public:
  Connection(LocalLaneServer& lane, FileDescriptor socket)
      : lane_(lane),
        context_(lane.context_),
        put_host_(lane.context_),
        socket_(std::move(socket)),
        thread_([this] { Run(); }) {}
  ~Connection() {
    Shutdown();
    thread_.join();
  }

  void Shutdown() { ::shutdown(socket_.get(), SHUT_RDWR); }
  bool ended() const { return ended_.load(std::memory_order_acquire); }

 private:
  enum class Receipt { kMessage, kIdle, kEnd };

  void Run() {
    if (Greet()) Serve();
    // The peer sees the end now, not when this object is reaped.
    Shutdown();
    ended_.store(true, std::memory_order_release);
  }

  bool Greet() {
    FileDescriptor memory;
    if (Receive(&memory) != Receipt::kMessage) return false;
    v1::LaneHello hello;
    if (!hello.ParseFromString(message_)) return false;
    absl::Status status;
    if (!lane_.Redeem(hello.token())) {
      status = absl::UnauthenticatedError("token: unknown, used or expired; ask for a new one");
    } else if (memory.get() < 0) {
      status = absl::InvalidArgumentError("region: no descriptor came with the hello");
    } else {
      status = region_.Map(memory, hello.region_bytes(), lane_.options_.region_bytes_max);
    }
    v1::LaneHelloReply reply;
    ToItemStatus(status, reply.mutable_status());
    return Send(reply) && status.ok();
  }

  void Serve() {
    while (!lane_.stopping_.load(std::memory_order_relaxed)) {
      const Receipt receipt = Receive(nullptr);
      if (receipt == Receipt::kIdle) continue;
      if (receipt == Receipt::kEnd || !request_.ParseFromString(message_)) return;
      if (request_.has_fetch() == request_.has_put()) return;
      response_.Clear();
      const auto method = request_.has_fetch() ? RpcMethod::kLaneFetch : RpcMethod::kLanePut;
      RpcProbe probe(context_.metrics, method);
      const absl::Status status = request_.has_fetch() ? Fetch(request_.fetch()) : Put();
      if (!status.ok()) {
        response_.Clear();
        ToItemStatus(status, response_.mutable_status());
      }
      probe.Finish(static_cast<int>(status.code()));
      if (!Send(response_)) return;
    }
  }

  // One message into message_, and the descriptor that came with it. kIdle: none has begun in a
  // while.
  Receipt Receive(FileDescriptor* descriptor) {
    std::byte length[kLengthBytes];
    std::size_t have = 0;
    while (have < kLengthBytes) {
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
      iovec piece{length + have, kLengthBytes - have};
      msghdr header{};
      header.msg_iov = &piece;
      header.msg_iovlen = 1;
      if (descriptor != nullptr) {
        header.msg_control = control;
        header.msg_controllen = sizeof control;
      }
      const ssize_t count = ::recvmsg(socket_.get(), &header, MSG_CMSG_CLOEXEC);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) && have == 0 &&
          descriptor == nullptr) {
        return Receipt::kIdle;
      }
      if (count <= 0) return Receipt::kEnd;
      TakeDescriptor(header, descriptor);
      have += static_cast<std::size_t>(count);
    }
    const std::uint32_t message_bytes = LoadLittle<std::uint32_t>(length);
    if (message_bytes > kMessageBytesMax) return Receipt::kEnd;
    message_.resize(message_bytes);
    for (std::size_t offset = 0; offset < message_bytes;) {
      const ssize_t count =
          ::recv(socket_.get(), message_.data() + offset, message_bytes - offset, 0);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return Receipt::kEnd;
      offset += static_cast<std::size_t>(count);
    }
    return Receipt::kMessage;
  }

  static void TakeDescriptor(msghdr& header, FileDescriptor* descriptor) {
    if (descriptor == nullptr) return;
    for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      // The control buffer has room for one; the kernel closes what does not fit.
      int fd;
      std::memcpy(&fd, CMSG_DATA(c), sizeof fd);
      *descriptor = FileDescriptor(fd);
    }
  }

  bool Send(const google::protobuf::MessageLite& message) {
    const std::size_t message_bytes = message.ByteSizeLong();
    if (message_bytes > kMessageBytesMax) return false;
    message_.resize(kLengthBytes + message_bytes);
    StoreLittle(message_.data(), static_cast<std::uint32_t>(message_bytes));
    message.SerializeWithCachedSizesToArray(
        reinterpret_cast<std::uint8_t*>(message_.data() + kLengthBytes));
    for (std::size_t offset = 0; offset < message_.size();) {
      const ssize_t count =
          ::send(socket_.get(), message_.data() + offset, message_.size() - offset, MSG_NOSIGNAL);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return false;
      offset += static_cast<std::size_t>(count);
    }
    return true;
  }

  absl::Status Fetch(const v1::LaneFetch& fetch) {
    const v1::FetchRequest& request = fetch.request();
    KV_RETURN_IF_ERROR(Within("request.", CheckFetch(request, context_.limits)));
    if (request.order() == v1::FETCH_ORDER_LAYER_MAJOR) {
      return absl::InvalidArgumentError("request.order: the lane is BLOCK_MAJOR");
    }
    if (request.want_tokens()) {
      return absl::InvalidArgumentError("request.want_tokens: call Cache.Fetch for them");
    }
    KV_RETURN_IF_ERROR(CheckRange("region_offset", fetch.region_offset(), fetch.region_bytes(),
                                  region_.bytes().size()));
    const auto model = IdFromProto<ModelId>(request.model_id().empty() ? request.prefix().model_id()
                                                                       : request.model_id());
    std::shared_ptr<const KvGeometry> geometry;
    if (FetchShape::NeedsGeometry(request)) {
      KV_ASSIGN_OR_RETURN(geometry, context_.geometries.Get(model));
    }
    KV_ASSIGN_OR_RETURN(const FetchShape shape, FetchShape::Make(request, std::move(geometry)));
    KV_ASSIGN_OR_RETURN(const auto stored, FindFrames(request, model, shape.read_as));

    Landing landing{.at = fetch.region_offset(),
                    .end = fetch.region_offset() + fetch.region_bytes()};
    std::vector<std::uint32_t> on_disk;
    for (std::uint32_t i = 0; i < stored.size(); ++i) {
      if (!stored[i].has_value()) {
        AddFailure(i, absl::NotFoundError("not stored at this quality"));
      } else if (const auto loaded = context_.engine.TryReadFrame(*stored[i], shape.read_as)) {
        Land(i, *stored[i], *loaded, shape, &landing);
      } else {
        on_disk.push_back(i);
      }
    }
    for (std::size_t next = 0; next < on_disk.size();) {
      next = LandFromDisk(stored, on_disk, next, shape, &landing);
    }
    if (!request.release_lease_id().empty()) {
      context_.engine.ReleaseLease(kBuiltInTenant,
                                   IdFromProto<LeaseId>(request.release_lease_id()));
    }
    return absl::OkStatus();
  }

  // Where in the region the next block lands.
  struct Landing {
    std::uint64_t at;
    std::uint64_t end;
  };

  absl::StatusOr<Engine::FoundFrames> FindFrames(const v1::FetchRequest& request,
                                                 const ModelId& model, ReadAs as) {
    const Quality min_quality = FromProto(request.min_quality());
    if (!request.has_prefix()) {
      return context_.engine.FindFrames(kBuiltInTenant, model, NodeIdsFromProto(request.node_ids()),
                                        min_quality, as);
    }
    const v1::Prefix& prefix = request.prefix();
    const RequestPath path(model.view(), prefix.tokens(), prefix.salt(), prefix.extra_keys());
    return context_.engine.FindFramesOfPath(kBuiltInTenant, path.view(), request.first_block(),
                                            request.block_count(), min_quality, as);
  }

  void AddFailure(std::uint32_t block_index, const absl::Status& status) {
    v1::BlockResult* result = response_.add_blocks()->mutable_result();
    result->set_block_index(block_index);
    ToItemStatus(status, result->mutable_status());
  }

  void Land(std::uint32_t block_index, const StoredFrame& stored, const LoadedFrame& loaded,
            const FetchShape& shape, Landing* landing) {
    const FetchStep step{.block_index = block_index,
                         .first_layer = shape.first_layer,
                         .layer_count = shape.layer_count};
    absl::StatusOr<ChunkCursor> cursor = ChunkCursor::Make(loaded.view, shape, step);
    if (!cursor.ok()) {
      AddFailure(block_index, cursor.status());
      return;
    }
    v1::LaneBlock* block = response_.add_blocks();
    std::size_t frame_begin = 0;
    std::size_t bytes = 0;
    for (; !cursor->AtEnd(); cursor->Advance()) {
      v1::Chunk* chunk = block->add_chunks();
      std::size_t frame_offset = 0;
      cursor->Read(chunk, &frame_offset);
      chunk->set_block_index(block_index);
      if (bytes == 0) frame_begin = frame_offset;
      bytes += chunk->bytes();
    }
    v1::BlockResult* result = block->mutable_result();
    result->set_block_index(block_index);
    const std::uint64_t at =
        (landing->at + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
    if (at > landing->end || bytes > landing->end - at) {
      block->clear_chunks();
      ToItemStatus(absl::ResourceExhaustedError("no room in the region; fetch it again"),
                   result->mutable_status());
      return;
    }
    const std::byte* frame = loaded.view.body().data() - loaded.view.header_bytes();
    std::memcpy(region_.bytes().data() + at, frame + frame_begin, bytes);
    landing->at = at + bytes;
    context_.metrics.Sent(bytes);
    block->set_region_offset(at);
    result->set_rung(ToProto(stored.rung));
    result->set_quality(ToProto(stored.quality));
    result->set_codec(ToProto(shape.whole_frame ? loaded.view.codec() : stored.codec));
    result->set_bytes(BlockBytes(loaded.view, shape));
  }

  // Reads some of the blocks at once, as many as may be read ahead, and returns the next that is
  // left.
  std::size_t LandFromDisk(const std::vector<std::optional<StoredFrame>>& stored,
                           const std::vector<std::uint32_t>& on_disk, std::size_t first,
                           const FetchShape& shape, Landing* landing) {
    std::size_t end = first;
    std::size_t batch_bytes = 0;
    while (end < on_disk.size()) {
      const std::size_t frame_bytes = stored[on_disk[end]]->loaded_bytes(shape.read_as);
      if (end > first && batch_bytes + frame_bytes > context_.read_ahead_bytes) break;
      batch_bytes += frame_bytes;
      ++end;
    }
    const ByteReservation reservation = AcquireBlocking(context_.stream_budget, batch_bytes);
    std::vector<absl::StatusOr<LoadedFrame>> frames(end - first,
                                                    absl::UnavailableError("not read"));
    absl::BlockingCounter remaining(static_cast<int>(end - first));
    std::vector<StoredFrame> batch;
    for (std::size_t i = first; i < end; ++i) batch.push_back(*stored[on_disk[i]]);
    context_.engine.ReadFrames(batch, shape.read_as,
                               [&frames, &remaining](std::size_t slot, auto loaded) {
                                 frames[slot] = std::move(loaded);
                                 remaining.DecrementCount();
                               });
    remaining.Wait();
    for (std::size_t i = first; i < end; ++i) {
      const absl::StatusOr<LoadedFrame>& loaded = frames[i - first];
      if (loaded.ok()) {
        Land(on_disk[i], *stored[on_disk[i]], *loaded, shape, landing);
      } else {
        AddFailure(on_disk[i], loaded.status());
      }
    }
    return end;
  }

  absl::Status Put() {
    v1::LanePut* put = request_.mutable_put();
    std::uint64_t bytes = 0;
    for (const v1::Chunk& chunk : put->chunks()) bytes += chunk.bytes();
    KV_RETURN_IF_ERROR(
        CheckRange("region_offset", put->region_offset(), bytes, region_.bytes().size()));
    auto message = std::make_unique<PutMessage>();
    put->mutable_announce()->set_eager(true);
    message->request.add_announces()->Swap(put->mutable_announce());
    message->request.mutable_chunks()->Swap(put->mutable_chunks());
    message->flat = region_.bytes().subspan(put->region_offset(), bytes);

    auto signal = std::make_shared<ChangeSignal>();
    const auto stream =
        PutStream::Create(put_host_, context_.limits, [signal] { signal->Notify(); });
    stream->Receive(std::move(message));
    bool closed = false;
    while (true) {
      if (!stream->status().ok()) break;
      if (!closed && stream->wants_message()) {
        stream->CloseInput();
        closed = true;
      }
      v1::PutResponse part;
      while (stream->TakeResponse(&part)) response_.mutable_put()->MergeFrom(part);
      if (stream->finished()) break;
      signal->Await();
    }
    stream->Cancel();
    if (stream->status().ok()) context_.metrics.Received(bytes);
    return stream->status();
  }

  LocalLaneServer& lane_;
  ServiceContext& context_;
  LanePutHost put_host_;
  FileDescriptor socket_;
  SharedRegion region_;
  // Kept between requests for their memory.
  std::string message_;
  v1::LaneRequest request_;
  v1::LaneResponse response_;
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

absl::StatusOr<std::unique_ptr<LocalLaneServer>> LocalLaneServer::Listen(ServiceContext& context,
                                                                         LocalLaneOptions options) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (options.socket_path.size() >= sizeof address.sun_path) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--local_socket: ", options.socket_path.size(), " bytes; a Unix socket's path has at most ",
        sizeof address.sun_path - 1, " (choose another path, or empty for no lane)"));
  }
  std::memcpy(address.sun_path, options.socket_path.data(), options.socket_path.size());
  FileDescriptor listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (listener.get() < 0) return ErrnoError("local socket");
  // One that a dead server left. The store is locked for this process, so nobody lives behind it.
  struct stat existing;
  if (::lstat(options.socket_path.c_str(), &existing) == 0 && S_ISSOCK(existing.st_mode)) {
    ::unlink(options.socket_path.c_str());
  }
  // Before bind, so that there is no moment in which others may connect.
  if (::fchmod(listener.get(), 0600) != 0 ||
      ::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(listener.get(), SOMAXCONN) != 0) {
    return ErrnoError(absl::StrCat("--local_socket: ", options.socket_path));
  }
  const int fd = ::dup(listener.get());
  if (fd < 0) return ErrnoError("local socket");
  return std::unique_ptr<LocalLaneServer>(new LocalLaneServer(context, std::move(options), fd));
}

LocalLaneServer::LocalLaneServer(ServiceContext& context, LocalLaneOptions options, int listener)
    : context_(context),
      options_(std::move(options)),
      listener_(listener),
      accept_thread_([this] { Accept(); }) {}

LocalLaneServer::~LocalLaneServer() {
  stopping_ = true;
  ::shutdown(listener_, SHUT_RDWR);
  accept_thread_.join();
  ::close(listener_);
  ::unlink(options_.socket_path.c_str());
  std::list<std::unique_ptr<Connection>> connections;
  {
    absl::MutexLock lock(&mutex_);
    connections.swap(connections_);
  }
  for (const auto& connection : connections) connection->Shutdown();
}

LocalLaneServer::Invitation LocalLaneServer::Invite() {
  Invitation invitation{std::string(kTokenBytes, '\0'), options_.token_life};
  KV_CHECK(::getrandom(invitation.token.data(), kTokenBytes, 0) ==
           static_cast<ssize_t>(kTokenBytes));
  const Clock::Duration now = context_.streams.clock().Monotonic();
  absl::MutexLock lock(&mutex_);
  if (invitations_.size() >= kInvitationsMax) {
    absl::erase_if(invitations_, [now](const auto& entry) { return entry.second <= now; });
  }
  // Whoever asks for so many gets those that end first replaced.
  if (invitations_.size() >= kInvitationsMax) {
    invitations_.erase(
        std::min_element(invitations_.begin(), invitations_.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; }));
  }
  invitations_[invitation.token] = now + options_.token_life;
  return invitation;
}

bool LocalLaneServer::Redeem(const std::string& token) {
  const Clock::Duration now = context_.streams.clock().Monotonic();
  absl::MutexLock lock(&mutex_);
  const auto it = invitations_.find(token);
  if (it == invitations_.end()) return false;
  const bool valid = it->second > now;
  invitations_.erase(it);
  return valid;
}

std::size_t LocalLaneServer::connection_count() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<std::size_t>(std::count_if(connections_.begin(), connections_.end(),
                                                [](const auto& c) { return !c->ended(); }));
}

void LocalLaneServer::ReapEnded() {
  connections_.remove_if([](const auto& connection) { return connection->ended(); });
}

void LocalLaneServer::Accept() {
  while (!stopping_) {
    FileDescriptor socket(::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC));
    if (stopping_) return;
    if (socket.get() < 0) {
      // Out of descriptors, most likely: others have to close theirs first.
      if (errno != EINTR && errno != ECONNABORTED) ::usleep(100'000);
      continue;
    }
    ucred peer{};
    socklen_t peer_bytes = sizeof peer;
    if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &peer_bytes) != 0 ||
        peer.uid != ::geteuid()) {
      continue;
    }
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(options_.stall_limit);
    const timeval limit{.tv_sec = seconds.count(),
                        .tv_usec = static_cast<suseconds_t>(
                            std::chrono::microseconds(options_.stall_limit - seconds).count())};
    ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);

    absl::MutexLock lock(&mutex_);
    ReapEnded();
    if (connections_.size() < options_.connections_max) {
      connections_.push_back(std::make_unique<Connection>(*this, std::move(socket)));
    }
  }
}

}  // namespace kvtrie
