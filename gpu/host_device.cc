#include "gpu/host_device.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "storage/base/check.h"

namespace kvtrie::gpu {
namespace {

// The 16 lanes of one block, for decoding and for encoding.
class HostTeam {
 public:
  HostTeam() {
    for (std::uint32_t i = 0; i < kLanes; ++i) lanes_[i].index = i;
  }

  template <typename Function>
  void Each(Function function) {
    for (Lane& lane : lanes_) function(lane);
  }
  template <typename Function>
  bool Any(Function function) {
    return std::any_of(lanes_.begin(), lanes_.end(), function);
  }

 protected:
  std::array<Lane, kLanes> lanes_;
};

class HostDecodeTeam : public HostTeam {
 public:
  HostDecodeTeam(const DecodePlaneArgs& args, std::uint32_t block)
      : words_(args.words + args.word_begins[block]),
        word_count_(args.word_begins[block + 1] - args.word_begins[block]),
        taken_(args.taken[block]) {
    for (Lane& lane : lanes_) lane.state = args.states[block * kLanes + lane.index];
  }
  void Suspend(const DecodePlaneArgs& args, std::uint32_t block) const {
    for (const Lane& lane : lanes_) args.states[block * kLanes + lane.index] = lane.state;
    args.taken[block] = taken_;
  }

  void TakeWords() {
    for (Lane& lane : lanes_) {
      if (lane.state >= kRansStateMin) continue;
      const std::uint32_t word = taken_ < word_count_ ? words_[taken_] : 0;
      lane.state = lane.state << 16 | word;
      ++taken_;
    }
  }

 private:
  const std::uint16_t* words_;
  std::uint32_t word_count_;
  std::uint32_t taken_;
};

class HostEncodeTeam : public HostTeam {
 public:
  HostEncodeTeam(const EncodePlaneArgs& args, std::uint32_t block)
      : end_(args.words + (std::size_t{block} + 1) * args.capacity),
        capacity_(args.capacity),
        put_(args.put[block]) {
    for (Lane& lane : lanes_) lane.state = args.states[block * kLanes + lane.index];
  }
  void Suspend(const EncodePlaneArgs& args, std::uint32_t block) const {
    for (const Lane& lane : lanes_) args.states[block * kLanes + lane.index] = lane.state;
    args.put[block] = put_;
  }

  void PutSlots() {
    for (std::size_t i = kLanes; i-- > 0;) {
      Lane& lane = lanes_[i];
      if (!lane.puts) continue;
      if (IsFull(lane.state, lane.slots)) {
        ++put_;
        if (put_ <= capacity_) *(end_ - put_) = static_cast<std::uint16_t>(lane.state);
        lane.state >>= 16;
      }
      lane.state = EncodeState(lane.state, lane.slots);
    }
  }

 private:
  std::uint16_t* end_;
  std::uint32_t capacity_;
  std::uint32_t put_;
};

class HostStream final : public DeviceStream {
 public:
  void CopyToDevice(void* to, const void* from, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void CopyFromDevice(void* to, const void* from, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void Zero(void* at, std::size_t bytes) override {
    if (bytes > 0) std::memset(at, 0, bytes);
  }
  void WaitFor(DeviceStream&) override {}

  void Launch(const AnglesArgs& args) override {
    ForEach(args.row_count, args.pairs, [&](auto row, auto pair) { AnglesStep(args, row, pair); });
  }
  void Launch(const WriteRawArgs& args) override {
    ForEach(args.row_count, args.plane.components,
            [&](auto row, auto component) { WriteRawStep(args, row, component); });
  }
  void Launch(const FindExtremesArgs& args) override {
    ForEach(args.row_count, args.plane.components,
            [&](auto row, auto component) { FindExtremesStep(args, row, component); });
  }
  void Launch(const GatherArgs& args) override {
    for (std::uint32_t block = 0; block < args.plane_blocks; ++block) {
      ForEach(args.row_count, args.in_stride / 4,
              [&](auto row, auto quad) { GatherStep(args, block, row, quad); });
    }
  }
  void Launch(const RestoreRowsArgs& args) override {
    ForEach(args.prediction.row_count / kTileRows, args.prediction.components,
            [&](auto tile, auto component) { RestoreRowsStep(args, tile, component); });
  }
  void Launch(const ResidualArgs& args) override {
    ForEach(args.prediction.row_count, args.plane.components,
            [&](auto row, auto component) { ResidualStep(args, row, component); });
  }
  void Launch(const ReadRowsArgs& args) override {
    ForEach(args.row_count, args.plane.components,
            [&](auto row, auto component) { ReadRowsStep(args, row, component); });
  }
  void Launch(const ImportanceLayerArgs& args) override {
    ForEach(args.row_count, args.heads * kImportanceItems,
            [&](auto row, auto item) { ImportanceItemStep(args, row, item); });
    ForEach(args.row_count, kImportanceItems,
            [&](auto row, auto item) { ImportanceLogStep(args, row, item); });
  }
  void Launch(const ExponentsArgs& args) override {
    ForEach(args.row_count, args.groups,
            [&](auto row, auto group) { ExponentsStep(args, row, group); });
  }
  void Launch(const DecodePlaneArgs& args) override {
    for (std::uint32_t block = 0; block < args.block_count; ++block) {
      HostDecodeTeam team(args, block);
      DecodePlaneStep(args, args.symbols.tables, block, team);
      team.Suspend(args, block);
    }
  }
  void Launch(const QuantizePlaneArgs& args) override {
    for (std::uint32_t row = 0; row < args.row_count; ++row) QuantizePlaneStep(args, row);
  }
  void Launch(const EncodePlaneArgs& args) override {
    for (std::uint32_t block = 0; block < args.block_count; ++block) {
      if (args.mark != nullptr) args.mark[block] = args.put[block];
      HostEncodeTeam team(args, block);
      EncodePlaneStep(args, args.symbols.tables, block, team);
      team.Suspend(args, block);
    }
  }

  void Multiply(const IntegerProductArgs& args) override {
    for (std::uint32_t batch = 0; batch < args.batch_count; ++batch) {
      const std::int8_t* const matrix = args.matrix + std::size_t{batch} * args.out * args.in;
      for (std::uint32_t row = 0; row < args.row_count; ++row) {
        const std::size_t at = std::size_t{batch} * args.row_count + row;
        const std::int8_t* const from = args.rows + at * args.in;
        for (std::uint32_t o = 0; o < args.out; ++o) {
          const std::int8_t* const weights = matrix + std::size_t{o} * args.in;
          std::int32_t sum = 0;
          for (std::uint32_t i = 0; i < args.in; ++i) sum += from[i] * weights[i];
          args.products[at * args.out + o] = sum;
        }
      }
    }
  }
  void Multiply(const FloatProductArgs& args) override {
    std::vector<float> sums(args.size);
    for (std::uint32_t batch = 0; batch < args.batch_count; ++batch) {
      const float* const matrix = args.matrix + std::size_t{batch} * args.size * args.size;
      float* const to = args.products + std::size_t{batch} * args.size * args.row_count;
      for (std::uint32_t row = 0; row < args.row_count; ++row) {
        const float* const from =
            args.rows + (std::size_t{row} * args.batch_count + batch) * args.size;
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (std::uint32_t j = 0; j < args.size; ++j) {
          for (std::uint32_t i = 0; i < args.size; ++i) {
            sums[i] += from[j] * matrix[std::size_t{j} * args.size + i];
          }
        }
        for (std::uint32_t i = 0; i < args.size; ++i) {
          to[std::size_t{i} * args.row_count + row] = sums[i];
        }
      }
    }
  }

  absl::Status Synchronize() override { return absl::OkStatus(); }

 private:
  template <typename Function>
  static void ForEach(std::uint32_t rows, std::uint32_t columns, Function function) {
    for (std::uint32_t row = 0; row < rows; ++row) {
      for (std::uint32_t column = 0; column < columns; ++column) function(row, column);
    }
  }
};

class HostDevice final : public Device {
 public:
  explicit HostDevice(std::size_t memory_bytes) : memory_bytes_(memory_bytes) {}
  ~HostDevice() override { KV_CHECK(sizes_.empty()); }

  std::string name() const override { return "host twin"; }
  std::size_t memory_bytes() const override { return memory_bytes_; }

  absl::StatusOr<void*> Allocate(std::size_t bytes) override {
    const std::size_t rounded =
        (bytes + MemoryLayout::kAlignment) / MemoryLayout::kAlignment * MemoryLayout::kAlignment;
    const absl::MutexLock lock(&mutex_);
    if (rounded > memory_bytes_ - used_bytes_) {
      return absl::UnavailableError(absl::StrCat("host twin: no room for ", bytes, " bytes, ",
                                                 memory_bytes_ - used_bytes_, " are free"));
    }
    void* const memory = std::aligned_alloc(MemoryLayout::kAlignment, rounded);
    KV_CHECK(memory != nullptr);
    used_bytes_ += rounded;
    sizes_[memory] = rounded;
    return memory;
  }
  void Free(void* memory) override {
    const absl::MutexLock lock(&mutex_);
    const auto found = sizes_.find(memory);
    KV_CHECK(found != sizes_.end());
    used_bytes_ -= found->second;
    sizes_.erase(found);
    std::free(memory);
  }
  absl::StatusOr<void*> AllocatePinned(std::size_t bytes) override { return Allocate(bytes); }
  void FreePinned(void* memory) override { Free(memory); }

  absl::StatusOr<std::unique_ptr<DeviceStream>> NewStream() override {
    return std::make_unique<HostStream>();
  }

 private:
  const std::size_t memory_bytes_;
  absl::Mutex mutex_;
  std::size_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unordered_map<void*, std::size_t> sizes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<Device> MakeHostDevice(std::size_t memory_bytes) {
  return std::make_unique<HostDevice>(memory_bytes);
}

}  // namespace kvtrie::gpu
