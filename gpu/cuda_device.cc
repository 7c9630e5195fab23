#include "gpu/cuda_device.h"

#include <cuda_runtime_api.h>

#include <string>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "gpu/cuda_kernels.h"
#include "gpu/cuda_products.h"
#include "gpu/cuda_status.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"

namespace kvtrie::gpu {
namespace {

constexpr int kOldestMajor = 8;  // of the architectures that kernels are built for
// What cuBLASLt is offered; newer devices make use of so much.
constexpr std::size_t kScratchBytes = std::size_t{32} << 20;

class CudaStream final : public DeviceStream {
 public:
  explicit CudaStream(int number) : number_(number) {}
  ~CudaStream() override {
    // Nothing can be done about what fails here.
    cudaSetDevice(number_);
    if (stream_ != nullptr) {
      cudaStreamSynchronize(stream_);
      cudaStreamDestroy(stream_);
    }
    if (event_ != nullptr) cudaEventDestroy(event_);
    if (scratch_ != nullptr) cudaFree(scratch_);
  }
  absl::Status Open() {
    KV_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(number_), "choosing the device"));
    KV_RETURN_IF_ERROR(
        CudaStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream"));
    return CudaStatus(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "making an event");
  }

  void CopyToDevice(void* to, const void* from, std::size_t bytes) override {
    Ask("copying to the device",
        [&] { return cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_); });
  }
  void CopyFromDevice(void* to, const void* from, std::size_t bytes) override {
    Ask("copying from the device",
        [&] { return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_); });
  }
  void Zero(void* at, std::size_t bytes) override {
    Ask("clearing memory", [&] { return cudaMemsetAsync(at, 0, bytes, stream_); });
  }
  void WaitFor(DeviceStream& other) override {
    const auto& before = static_cast<const CudaStream&>(other);
    Ask("joining streams", [&] {
      const cudaError_t error = cudaEventRecord(before.event_, before.stream_);
      return error != cudaSuccess ? error : cudaStreamWaitEvent(stream_, before.event_, 0);
    });
  }

  void Launch(const AnglesArgs& args) override { LaunchAny("angles", args); }
  void Launch(const WriteRawArgs& args) override { LaunchAny("writing raw KV", args); }
  void Launch(const FindExtremesArgs& args) override { LaunchAny("finding extremes", args); }
  void Launch(const GatherArgs& args) override { LaunchAny("gathering codes", args); }
  void Launch(const RestoreRowsArgs& args) override { LaunchAny("restoring rows", args); }
  void Launch(const ResidualArgs& args) override { LaunchAny("residuals", args); }
  void Launch(const ReadRowsArgs& args) override { LaunchAny("reading rows", args); }
  void Launch(const ImportanceLayerArgs& args) override { LaunchAny("importance", args); }
  void Launch(const ExponentsArgs& args) override { LaunchAny("exponents", args); }
  void Launch(const DecodePlaneArgs& args) override { LaunchAny("decoding a plane", args); }
  void Launch(const QuantizePlaneArgs& args) override { LaunchAny("quantizing a plane", args); }
  void Launch(const EncodePlaneArgs& args) override { LaunchAny("encoding a plane", args); }
  void Multiply(const IntegerProductArgs& args) override { MultiplyAny(args); }
  void Multiply(const FloatProductArgs& args) override { MultiplyAny(args); }

  absl::Status Synchronize() override {
    absl::Status status = std::exchange(status_, absl::OkStatus());
    status.Update(CudaStatus(cudaSetDevice(number_), "choosing the device"));
    status.Update(CudaStatus(cudaStreamSynchronize(stream_), "waiting for a stream"));
    return status;
  }

 private:
  template <typename Call>
  void Ask(absl::string_view doing, Call call) {
    if (!status_.ok()) return;
    status_ = CudaStatus(cudaSetDevice(number_), "choosing the device");
    if (status_.ok()) status_ = CudaStatus(call(), doing);
  }
  template <typename Args>
  void LaunchAny(absl::string_view doing, const Args& args) {
    Ask(doing, [&] { return LaunchKernel(args, stream_); });
  }
  template <typename Args>
  void MultiplyAny(const Args& args) {
    // Streams that only copy do without.
    if (products_ == nullptr) {
      if (scratch_ == nullptr) {
        Ask("allocating scratch memory", [&] { return cudaMalloc(&scratch_, kScratchBytes); });
      }
      if (!status_.ok()) return;
      absl::StatusOr<std::unique_ptr<CudaProducts>> products = CudaProducts::Create();
      status_ = products.status();
      if (!status_.ok()) return;
      products_ = *std::move(products);
    }
    Ask("choosing the device", [] { return cudaSuccess; });
    if (!status_.ok()) return;
    status_ = products_->Multiply(args, scratch_, kScratchBytes, stream_);
  }

  const int number_;
  std::unique_ptr<CudaProducts> products_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_ = nullptr;
  void* scratch_ = nullptr;
  absl::Status status_;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(int number, std::string name, std::size_t memory_bytes)
      : number_(number), name_(std::move(name)), memory_bytes_(memory_bytes) {}

  std::string name() const override { return name_; }
  std::size_t memory_bytes() const override { return memory_bytes_; }

  absl::StatusOr<void*> Allocate(std::size_t bytes) override {
    {
      const absl::MutexLock lock(&mutex_);
      if (bytes > memory_bytes_ - used_bytes_) {
        return absl::UnavailableError(absl::StrCat(name_, ": no room for ", bytes, " bytes, ",
                                                   memory_bytes_ - used_bytes_, " are free"));
      }
      used_bytes_ += bytes;
    }
    void* memory = nullptr;
    absl::Status status = CudaStatus(cudaSetDevice(number_), "choosing the device");
    if (status.ok()) status = CudaStatus(cudaMalloc(&memory, bytes), "allocating memory");
    const absl::MutexLock lock(&mutex_);
    if (!status.ok()) {
      used_bytes_ -= bytes;
      return status;
    }
    sizes_[memory] = bytes;
    return memory;
  }
  void Free(void* memory) override {
    cudaSetDevice(number_);
    cudaFree(memory);
    const absl::MutexLock lock(&mutex_);
    const auto found = sizes_.find(memory);
    KV_CHECK(found != sizes_.end());
    used_bytes_ -= found->second;
    sizes_.erase(found);
  }
  absl::StatusOr<void*> AllocatePinned(std::size_t bytes) override {
    void* memory = nullptr;
    KV_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(number_), "choosing the device"));
    KV_RETURN_IF_ERROR(CudaStatus(cudaHostAlloc(&memory, bytes, cudaHostAllocDefault),
                                  "allocating pinned memory"));
    return memory;
  }
  void FreePinned(void* memory) override { cudaFreeHost(memory); }

  absl::StatusOr<std::unique_ptr<DeviceStream>> NewStream() override {
    auto stream = std::make_unique<CudaStream>(number_);
    KV_RETURN_IF_ERROR(stream->Open());
    return stream;
  }

 private:
  const int number_;
  const std::string name_;
  const std::size_t memory_bytes_;
  absl::Mutex mutex_;
  std::size_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unordered_map<void*, std::size_t> sizes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int number) {
  int count = 0;
  KV_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceCount(&count), "looking for devices"));
  if (number >= count) {
    return absl::UnavailableError(absl::StrCat("CUDA: no device ", number, ", there are ", count));
  }
  cudaDeviceProp properties;
  KV_RETURN_IF_ERROR(
      CudaStatus(cudaGetDeviceProperties(&properties, number), "asking what the device is"));
  if (properties.major < kOldestMajor) {
    return absl::UnavailableError(absl::StrCat("CUDA: ", properties.name, " is of version ",
                                               properties.major, ".", properties.minor,
                                               ", kernels need ", kOldestMajor, ".0"));
  }
  KV_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(number), "choosing the device"));
  std::size_t free_bytes = 0, all_bytes = 0;
  KV_RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free_bytes, &all_bytes), "asking for free memory"));
  KV_RETURN_IF_ERROR(CudaProducts::Create().status());
  return std::make_unique<CudaDevice>(number, absl::StrCat(properties.name, " (CUDA ", number, ")"),
                                      free_bytes / 5 * 4);
}

}  // namespace kvtrie::gpu
