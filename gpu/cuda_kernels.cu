#include <algorithm>

#include "gpu/cuda_kernels.h"

namespace kvtrie::gpu {
namespace {

constexpr unsigned kAllThreads = 0xFFFFFFFF;
constexpr unsigned kWarp = 32;
constexpr unsigned kTeamsOfWarp = kWarp / kLanes;
constexpr unsigned kColumnThreads = 128;
constexpr unsigned kGridRowsMax = 65535;

// Step(args, row, column) for all of them: columns side by side in threads, so that neighbours read
// neighbouring memory.
template <typename Args, void (*Step)(const Args&, std::uint32_t, std::uint32_t)>
__global__ void ForEach(const Args args, std::uint32_t rows, std::uint32_t columns) {
  const std::uint32_t column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  for (std::uint32_t row = blockIdx.y; row < rows; row += gridDim.y) Step(args, row, column);
}

dim3 GridOf(std::uint32_t rows, std::uint32_t columns) {
  return {(columns + kColumnThreads - 1) / kColumnThreads, std::min(rows, kGridRowsMax), 1};
}

template <typename Args, void (*Step)(const Args&, std::uint32_t, std::uint32_t)>
cudaError_t LaunchForEach(const Args& args, std::uint32_t rows, std::uint32_t columns,
                          cudaStream_t stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  ForEach<Args, Step><<<GridOf(rows, columns), kColumnThreads, 0, stream>>>(args, rows, columns);
  return cudaGetLastError();
}

__global__ void Gather(const GatherArgs args) {
  const std::uint32_t quad = blockIdx.x * blockDim.x + threadIdx.x;
  if (quad >= args.in_stride / 4) return;
  for (std::uint32_t row = blockIdx.y; row < args.row_count; row += gridDim.y) {
    for (std::uint32_t block = 0; block < args.plane_blocks; ++block) {
      GatherStep(args, block, row, quad);
    }
  }
}

__global__ void Quantize(const QuantizePlaneArgs args) {
  const std::uint32_t row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < args.row_count) QuantizePlaneStep(args, row);
}

// Tables that every symbol asks for, near the threads that do. All threads of a thread block call
// it.
__device__ void LoadClasses(const SymbolTable* tables, SymbolTable* classes) {
  constexpr unsigned kWords = kScaleClasses * sizeof(SymbolTable) / sizeof(std::uint64_t);
  static_assert(sizeof(SymbolTable) % sizeof(std::uint64_t) == 0);
  const auto* const from = reinterpret_cast<const std::uint64_t*>(tables);
  auto* const to = reinterpret_cast<std::uint64_t*>(classes);
  for (unsigned i = threadIdx.x; i < kWords; i += blockDim.x) to[i] = from[i];
  __syncthreads();
}

// Half a warp: the 16 lanes of one block, a thread each. The warp's other block goes along, so that
// all its threads meet at each vote; a step in which a lane has no part leaves it as it is.
class Team {
 public:
  template <typename Function>
  __device__ void Each(Function function) {
    function(lane_);
  }
  template <typename Function>
  __device__ bool Any(Function function) {
    return __any_sync(kAllThreads, function(lane_)) != 0;
  }

 protected:
  __device__ Team() { lane_.index = threadIdx.x % kLanes; }

  // Which lanes of this block vote for it, as bits.
  __device__ unsigned Vote(bool voice) const {
    const unsigned all = __ballot_sync(kAllThreads, voice);
    return all >> (threadIdx.x % kWarp / kLanes * kLanes) & kAllLanes;
  }
  __device__ unsigned LanesBefore() const { return (1u << lane_.index) - 1; }

  Lane lane_;
};

// Each lane holds one of the next 16 words and one of the 16 behind them, which were asked for
// before they are needed.
class DecodeTeam : public Team {
 public:
  __device__ DecodeTeam(const DecodePlaneArgs& args, std::uint32_t block) {
    if (block < args.block_count) {
      const std::uint32_t begin = args.word_begins[block];
      words_ = args.words + begin;
      word_count_ = args.word_begins[block + 1] - begin;
      base_ = args.taken[block];
      lane_.state = args.states[block * kLanes + lane_.index];
    }
    window_ = WordAt(base_ + lane_.index);
    ahead_ = WordAt(base_ + static_cast<std::uint32_t>(kLanes) + lane_.index);
  }
  __device__ void Suspend(const DecodePlaneArgs& args, std::uint32_t block) const {
    if (block >= args.block_count) return;
    args.states[block * kLanes + lane_.index] = lane_.state;
    if (lane_.index == 0) args.taken[block] = base_ + used_;
  }

  __device__ void TakeWords() {
    const bool needs = lane_.state < kRansStateMin;
    const unsigned takers = Vote(needs);
    const unsigned at = used_ + __popc(takers & LanesBefore());
    const unsigned near = __shfl_sync(kAllThreads, window_, at % kLanes, kLanes);
    const unsigned far = __shfl_sync(kAllThreads, ahead_, at % kLanes, kLanes);
    if (needs) lane_.state = lane_.state << 16 | (at < kLanes ? near : far);
    used_ += __popc(takers);
    if (used_ >= kLanes) {
      used_ -= kLanes;
      base_ += kLanes;
      window_ = ahead_;
      ahead_ = WordAt(base_ + static_cast<std::uint32_t>(kLanes) + lane_.index);
    }
  }

 private:
  __device__ unsigned WordAt(std::uint32_t index) const {
    return index < word_count_ ? words_[index] : 0;
  }

  const std::uint16_t* words_ = nullptr;
  std::uint32_t word_count_ = 0;
  std::uint32_t base_ = 0;  // of the window
  unsigned used_ = 0;       // of it, below kLanes between steps
  unsigned window_;
  unsigned ahead_;
};

__global__ void DecodePlane(const DecodePlaneArgs args) {
  __shared__ alignas(8) SymbolTable classes[kScaleClasses];
  LoadClasses(args.symbols.tables, classes);
  const std::uint32_t block = (blockIdx.x * blockDim.x + threadIdx.x) / kLanes;
  DecodeTeam team(args, block);
  DecodePlaneStep(args, classes, block, team);
  team.Suspend(args, block);
}

class EncodeTeam : public Team {
 public:
  __device__ EncodeTeam(const EncodePlaneArgs& args, std::uint32_t block)
      : capacity_(args.capacity) {
    if (block >= args.block_count) return;
    end_ = args.words + (std::size_t{block} + 1) * args.capacity;
    put_ = args.put[block];
    lane_.state = args.states[block * kLanes + lane_.index];
    if (args.mark != nullptr && lane_.index == 0) args.mark[block] = put_;
  }
  __device__ void Suspend(const EncodePlaneArgs& args, std::uint32_t block) const {
    if (block >= args.block_count) return;
    args.states[block * kLanes + lane_.index] = lane_.state;
    if (lane_.index == 0) args.put[block] = put_;
  }

  __device__ void PutSlots() {
    const bool gives = lane_.puts && IsFull(lane_.state, lane_.slots);
    const unsigned givers = Vote(gives);
    const std::uint32_t put = put_ + __popc(givers);
    if (gives) {
      const std::uint32_t at = put - __popc(givers & LanesBefore());
      if (at <= capacity_) *(end_ - at) = static_cast<std::uint16_t>(lane_.state);
      lane_.state >>= 16;
    }
    put_ = put;
    if (lane_.puts) lane_.state = EncodeState(lane_.state, lane_.slots);
  }

 private:
  std::uint16_t* end_ = nullptr;
  std::uint32_t capacity_;
  std::uint32_t put_ = 0;
};

__global__ void EncodePlane(const EncodePlaneArgs args) {
  __shared__ alignas(8) SymbolTable classes[kScaleClasses];
  LoadClasses(args.symbols.tables, classes);
  const std::uint32_t block = (blockIdx.x * blockDim.x + threadIdx.x) / kLanes;
  EncodeTeam team(args, block);
  EncodePlaneStep(args, classes, block, team);
  team.Suspend(args, block);
}

// Few blocks are spread over all multiprocessors, a warp to each; many share their tables.
struct TeamGrid {
  unsigned thread_blocks;
  unsigned threads;
};
TeamGrid TeamGridOf(std::uint32_t block_count) {
  int device = 0, processors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    processors = 1;
  }
  unsigned warps = 1;
  while (warps < 8 && block_count > 2 * warps * kTeamsOfWarp * static_cast<unsigned>(processors)) {
    warps *= 2;
  }
  const unsigned teams = warps * kTeamsOfWarp;
  return {(block_count + teams - 1) / teams, warps * kWarp};
}

}  // namespace

cudaError_t LaunchKernel(const AnglesArgs& args, cudaStream_t stream) {
  return LaunchForEach<AnglesArgs, AnglesStep>(args, args.row_count, args.pairs, stream);
}
cudaError_t LaunchKernel(const WriteRawArgs& args, cudaStream_t stream) {
  return LaunchForEach<WriteRawArgs, WriteRawStep>(args, args.row_count, args.plane.components,
                                                   stream);
}
cudaError_t LaunchKernel(const FindExtremesArgs& args, cudaStream_t stream) {
  return LaunchForEach<FindExtremesArgs, FindExtremesStep>(args, args.row_count,
                                                           args.plane.components, stream);
}
cudaError_t LaunchKernel(const GatherArgs& args, cudaStream_t stream) {
  if (args.row_count == 0 || args.in_stride == 0) return cudaSuccess;
  Gather<<<GridOf(args.row_count, args.in_stride / 4), kColumnThreads, 0, stream>>>(args);
  return cudaGetLastError();
}
cudaError_t LaunchKernel(const RestoreRowsArgs& args, cudaStream_t stream) {
  return LaunchForEach<RestoreRowsArgs, RestoreRowsStep>(
      args, args.prediction.row_count / kTileRows, args.prediction.components, stream);
}
cudaError_t LaunchKernel(const ResidualArgs& args, cudaStream_t stream) {
  return LaunchForEach<ResidualArgs, ResidualStep>(args, args.prediction.row_count,
                                                   args.plane.components, stream);
}
cudaError_t LaunchKernel(const ReadRowsArgs& args, cudaStream_t stream) {
  return LaunchForEach<ReadRowsArgs, ReadRowsStep>(args, args.row_count, args.plane.components,
                                                   stream);
}
cudaError_t LaunchKernel(const ImportanceLayerArgs& args, cudaStream_t stream) {
  const cudaError_t error = LaunchForEach<ImportanceLayerArgs, ImportanceItemStep>(
      args, args.row_count, args.heads * kImportanceItems, stream);
  if (error != cudaSuccess) return error;
  return LaunchForEach<ImportanceLayerArgs, ImportanceLogStep>(args, args.row_count,
                                                               kImportanceItems, stream);
}
cudaError_t LaunchKernel(const ExponentsArgs& args, cudaStream_t stream) {
  return LaunchForEach<ExponentsArgs, ExponentsStep>(args, args.row_count, args.groups, stream);
}
cudaError_t LaunchKernel(const DecodePlaneArgs& args, cudaStream_t stream) {
  if (args.block_count == 0) return cudaSuccess;
  const TeamGrid grid = TeamGridOf(args.block_count);
  DecodePlane<<<grid.thread_blocks, grid.threads, 0, stream>>>(args);
  return cudaGetLastError();
}
cudaError_t LaunchKernel(const QuantizePlaneArgs& args, cudaStream_t stream) {
  if (args.row_count == 0) return cudaSuccess;
  // A thread works long on its row: small thread blocks, for as many multiprocessors.
  constexpr unsigned kThreads = 64;
  Quantize<<<(args.row_count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}
cudaError_t LaunchKernel(const EncodePlaneArgs& args, cudaStream_t stream) {
  if (args.block_count == 0) return cudaSuccess;
  const TeamGrid grid = TeamGridOf(args.block_count);
  EncodePlane<<<grid.thread_blocks, grid.threads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvtrie::gpu
