#include "storage/codec/block_coder.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/codec/codec_kernels.h"

namespace kvtrie {
namespace {

class CpuCoder final : public BlockCoder {
 public:
  explicit CpuCoder(std::shared_ptr<const ResidualCodec> codec) : codec_(std::move(codec)) {}

  absl::StatusOr<std::vector<EncodedBlock>> Encode(std::span<const BlockToEncode> blocks,
                                                   Quality quality) const override {
    return codec_->Encode(blocks, quality);
  }
  absl::Status Decode(std::span<const BlockToDecode> blocks) const override {
    return codec_->Decode(blocks);
  }

 private:
  const std::shared_ptr<const ResidualCodec> codec_;
};

class Cpu final : public CodecBackend {
 public:
  std::string_view name() const override { return "cpu"; }
  std::string device() const override {
    return absl::StrCat("processor, ", KernelSetName(UsedKernelSet()));
  }
  absl::StatusOr<std::shared_ptr<const BlockCoder>> CoderFor(
      const ModelSpec&, std::shared_ptr<const ResidualCodec> codec) const override {
    return std::make_shared<const CpuCoder>(std::move(codec));
  }
  absl::Status Probe() const override { return absl::OkStatus(); }
};

}  // namespace

std::unique_ptr<const CodecBackend> CpuBackend() { return std::make_unique<const Cpu>(); }

}  // namespace kvtrie
