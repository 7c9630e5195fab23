#include "gpu/device_coder.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gpu/decode_batch.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"

namespace kvtrie::gpu {
namespace {

// What a body may have beside eight times its raw KV: its head, for one.
constexpr std::size_t kBodyBytesMore = std::size_t{64} << 10;

bool IsForDevice(const BlockToDecode& block) {
  return block.quality != Quality::kExact && !block.is_referenced &&
         block.body.size() <= 8 * block.raw.size() + kBodyBytesMore;
}

// So many blocks that a batch takes its share of the device's memory at most.
std::size_t BlocksOfBatch(std::size_t block_bytes, const DeviceModel& model, const Device& device,
                          const DeviceCoderOptions& options) {
  // Half of it is for profiles.
  const std::size_t share = device.memory_bytes() / 2 / options.workspaces;
  const std::size_t by_raw = options.batch_raw_bytes / model.geometry.raw_block_bytes();
  return std::max<std::size_t>(std::min(share / block_bytes, by_raw), 1);
}

}  // namespace

absl::StatusOr<std::shared_ptr<const DeviceCoder>> DeviceCoder::Of(
    const ModelSpec& spec, std::shared_ptr<const ResidualCodec> codec, Device& device,
    WorkspacePool& pool, const DeviceCoderOptions& options) {
  const ResidualProfile& profile = codec->profile();
  KV_ASSIGN_OR_RETURN(auto on_device, DeviceProfile::Upload(device, spec, profile));
  const KvGeometry geometry(spec);
  auto coder = std::shared_ptr<DeviceCoder>(
      new DeviceCoder(DeviceModel{.geometry = geometry,
                                  .pairing = spec.rope.pairing,
                                  .codec = std::move(codec),
                                  .profile = std::move(on_device),
                                  .raw_kv = RawKv(geometry, spec.rope)},
                      pool));
  coder->batch_raw_bytes_ = options.batch_raw_bytes;
  coder->decode_blocks_max_ =
      BlocksOfBatch(DecodeBatch::DeviceBytesOfBlock(coder->model_), coder->model_, device, options);
  coder->encode_blocks_max_ =
      BlocksOfBatch(EncodeBatch::DeviceBytesOfBlock(coder->model_), coder->model_, device, options);
  return coder;
}

// A call has two batches under way, where there are two workspaces: one's copies run beside the
// other's work.
template <typename Finish>
absl::StatusOr<WorkspacePool::Lease> DeviceCoder::TakeWorkspace(bool has_one, Finish finish) const {
  if (has_one) {
    if (WorkspacePool::Lease second = pool_.TryAcquire(); second != nullptr) return second;
    KV_RETURN_IF_ERROR(finish());
  }
  return pool_.Acquire();
}

absl::Status DeviceCoder::DecodeOnDevice(std::span<const BlockToDecode> blocks) const {
  std::unique_ptr<DecodeBatch> before;
  const auto finish = [&] {
    const std::unique_ptr<DecodeBatch> last = std::move(before);
    return last == nullptr ? absl::OkStatus() : last->Finish();
  };
  while (!blocks.empty()) {
    // Bodies are as large as whoever sent them says, up to a point: they count too.
    std::size_t count = 0, body_bytes = 0;
    while (count < std::min(decode_blocks_max_, blocks.size())) {
      body_bytes += blocks[count].body.size();
      if (count > 0 && body_bytes > batch_raw_bytes_) break;
      ++count;
    }
    KV_ASSIGN_OR_RETURN(WorkspacePool::Lease workspace, TakeWorkspace(before != nullptr, finish));
    KV_ASSIGN_OR_RETURN(std::unique_ptr<DecodeBatch> batch,
                        DecodeBatch::Start(model_, blocks.first(count), std::move(workspace)));
    blocks = blocks.subspan(count);
    KV_RETURN_IF_ERROR(finish());
    before = std::move(batch);
  }
  return finish();
}

absl::Status DeviceCoder::Decode(std::span<const BlockToDecode> blocks) const {
  std::vector<BlockToDecode> exact, referenced;
  std::map<int, std::vector<BlockToDecode>> by_quality;
  for (const BlockToDecode& block : blocks) {
    if (IsForDevice(block)) {
      by_quality[QualityRank(block.quality)].push_back(block);
    } else {
      // Which of the codec's batches a block is in must not decide what it is refused for.
      (block.quality == Quality::kExact ? exact : referenced).push_back(block);
    }
  }
  for (const auto& [rank, of_quality] : by_quality) KV_RETURN_IF_ERROR(DecodeOnDevice(of_quality));
  for (const auto& of_codec : {referenced, exact}) {
    if (!of_codec.empty()) KV_RETURN_IF_ERROR(model_.codec->Decode(of_codec));
  }
  return absl::OkStatus();
}

absl::Status DeviceCoder::EncodeOnDevice(std::span<const BlockToEncode> blocks, Quality quality,
                                         std::vector<EncodeBatch::Encoded>& encoded) const {
  std::unique_ptr<EncodeBatch> before;
  const auto finish = [&]() -> absl::Status {
    if (before == nullptr) return absl::OkStatus();
    const std::unique_ptr<EncodeBatch> last = std::move(before);
    KV_ASSIGN_OR_RETURN(std::vector<EncodeBatch::Encoded> of_batch, last->Finish());
    std::move(of_batch.begin(), of_batch.end(), std::back_inserter(encoded));
    return absl::OkStatus();
  };
  for (std::size_t at = 0; at < blocks.size(); at += encode_blocks_max_) {
    KV_ASSIGN_OR_RETURN(WorkspacePool::Lease workspace, TakeWorkspace(before != nullptr, finish));
    KV_ASSIGN_OR_RETURN(
        std::unique_ptr<EncodeBatch> batch,
        EncodeBatch::Start(model_,
                           blocks.subspan(at, std::min(encode_blocks_max_, blocks.size() - at)),
                           quality, std::move(workspace)));
    KV_RETURN_IF_ERROR(finish());
    before = std::move(batch);
  }
  return finish();
}

absl::StatusOr<std::vector<EncodedBlock>> DeviceCoder::Encode(std::span<const BlockToEncode> blocks,
                                                              Quality quality) const {
  if (model_.profile->LevelOf(quality) < 0) return model_.codec->Encode(blocks, quality);
  const KvGeometry& geometry = model_.geometry;
  std::vector<BlockToEncode> on_device, of_codec;
  std::vector<std::size_t> device_places, codec_places;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const BlockToEncode& block = blocks[i];
    KV_CHECK(block.tokens.size() == geometry.block_tokens());
    KV_CHECK(block.raw.size() == geometry.raw_block_bytes());
    KV_CHECK(block.importance.empty() || block.importance.size() == block.tokens.size());
    const bool is_for_device = block.references.empty() && block.runs.empty();
    (is_for_device ? on_device : of_codec).push_back(block);
    (is_for_device ? device_places : codec_places).push_back(i);
  }
  std::vector<EncodeBatch::Encoded> from_device;
  KV_RETURN_IF_ERROR(EncodeOnDevice(on_device, quality, from_device));
  std::vector<EncodedBlock> encoded(blocks.size());
  for (std::size_t i = 0; i < from_device.size(); ++i) {
    if (from_device[i].is_missing) {
      of_codec.push_back(on_device[i]);
      codec_places.push_back(device_places[i]);
    } else {
      encoded[device_places[i]] = std::move(from_device[i].block);
    }
  }
  if (of_codec.empty()) return encoded;
  KV_ASSIGN_OR_RETURN(std::vector<EncodedBlock> from_codec,
                      model_.codec->Encode(of_codec, quality));
  for (std::size_t i = 0; i < from_codec.size(); ++i) {
    encoded[codec_places[i]] = std::move(from_codec[i]);
  }
  return encoded;
}

namespace {

class DeviceBackend final : public CodecBackend {
 public:
  DeviceBackend(std::string name, std::unique_ptr<Device> device, const DeviceCoderOptions& options)
      : name_(std::move(name)),
        options_(options),
        device_(std::move(device)),
        pool_(*device_, options.workspaces) {}

  std::string_view name() const override { return name_; }
  std::string device() const override { return device_->name(); }

  absl::StatusOr<std::shared_ptr<const BlockCoder>> CoderFor(
      const ModelSpec& spec, std::shared_ptr<const ResidualCodec> codec) const override {
    return DeviceCoder::Of(spec, std::move(codec), *device_, pool_, options_);
  }

  // There and back: what a device that is lost, or full, cannot do.
  absl::Status Probe() const override {
    constexpr std::size_t kBytes = 4096;
    KV_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceStream> stream, device_->NewStream());
    KV_ASSIGN_OR_RETURN(const DeviceMemory memory, DeviceMemory::Of(*device_, kBytes));
    std::vector<std::byte> bytes(kBytes, std::byte{0x5A}), back(kBytes);
    stream->CopyToDevice(memory.data(), bytes.data(), kBytes);
    stream->CopyFromDevice(back.data(), memory.data(), kBytes);
    KV_RETURN_IF_ERROR(stream->Synchronize());
    if (back != bytes) {
      return absl::UnavailableError(absl::StrCat(device_->name(), ": its memory changes"));
    }
    return absl::OkStatus();
  }

 private:
  const std::string name_;
  const DeviceCoderOptions options_;
  const std::unique_ptr<Device> device_;
  mutable WorkspacePool pool_;
};

}  // namespace

std::unique_ptr<const CodecBackend> MakeDeviceBackend(std::string name,
                                                      std::unique_ptr<Device> device,
                                                      const DeviceCoderOptions& options) {
  return std::make_unique<const DeviceBackend>(std::move(name), std::move(device), options);
}

}  // namespace kvtrie::gpu
