#include "gpu/device_coder.h"

#include <algorithm>
#include <cstring>
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
  std::unique_ptr<const ImportanceEstimator> importance;
  if (profile.importance.query_heads > 0) {
    importance =
        std::make_unique<const ImportanceEstimator>(profile, RopePairs::OfLayers(spec));
  }
  const KvGeometry geometry(spec);
  auto coder = std::shared_ptr<DeviceCoder>(
      new DeviceCoder(DeviceModel{.geometry = geometry,
                                  .pairing = spec.rope.pairing,
                                  .codec = std::move(codec),
                                  .profile = std::move(on_device),
                                  .importance = std::move(importance),
                                  .raw_kv = RawKv(geometry, spec.rope)},
                      pool));
  coder->decode_blocks_max_ = BlocksOfBatch(DecodeBatch::DeviceBytesOfBlock(coder->model_),
                                            coder->model_, device, options);
  return coder;
}

absl::Status DeviceCoder::DecodeOnDevice(std::span<const BlockToDecode> blocks) const {
  // Two batches at a time, where there are two workspaces: one's copies run beside the other's
  // work.
  std::unique_ptr<DecodeBatch> before;
  for (std::size_t at = 0; at < blocks.size(); at += decode_blocks_max_) {
    WorkspacePool::Lease workspace;
    if (before != nullptr) workspace = pool_.TryAcquire();
    if (workspace == nullptr) {
      if (before != nullptr) {
        const std::unique_ptr<DecodeBatch> last = std::move(before);
        KV_RETURN_IF_ERROR(last->Finish());
      }
      KV_ASSIGN_OR_RETURN(workspace, pool_.Acquire());
    }
    KV_ASSIGN_OR_RETURN(
        std::unique_ptr<DecodeBatch> batch,
        DecodeBatch::Start(model_,
                           blocks.subspan(at, std::min(decode_blocks_max_, blocks.size() - at)),
                           std::move(workspace)));
    if (before != nullptr) KV_RETURN_IF_ERROR(before->Finish());
    before = std::move(batch);
  }
  return before == nullptr ? absl::OkStatus() : before->Finish();
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

absl::StatusOr<std::vector<EncodedBlock>> DeviceCoder::Encode(
    std::span<const BlockToEncode> blocks, Quality quality) const {
  return model_.codec->Encode(blocks, quality);
}

namespace {

class DeviceBackend final : public CodecBackend {
 public:
  DeviceBackend(std::string name, std::unique_ptr<Device> device,
                const DeviceCoderOptions& options)
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
