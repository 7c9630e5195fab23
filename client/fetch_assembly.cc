#include "client/fetch_assembly.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/retry.h"
#include "client/status_from_grpc.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/codec/frame.h"

namespace kvtrie {
namespace {

// A block whose bytes fail their check is asked for once more; it may have been the wire.
constexpr std::uint32_t kDamagedMax = 2;

// Bulk bytes in the pieces in which they arrived, taken from front to back.
class PieceCursor {
 public:
  explicit PieceCursor(std::span<const std::span<const std::byte>> pieces) : pieces_(pieces) {}

  // Copies the next `count` bytes to `to` (or skips them when it is null). False: there are fewer.
  bool Take(std::uint64_t count, std::byte* to, std::uint32_t* crc32c) {
    *crc32c = 0;
    while (count > 0) {
      if (pieces_.empty()) return false;
      const std::span<const std::byte> piece = pieces_.front().subspan(offset_);
      const auto here = piece.first(std::min<std::size_t>(piece.size(), count));
      if (to != nullptr) {
        *crc32c = CopyAndCrc32c(here, to, *crc32c);
        to += here.size();
      }
      count -= here.size();
      offset_ += here.size();
      if (offset_ == pieces_.front().size()) {
        pieces_ = pieces_.subspan(1);
        offset_ = 0;
      }
    }
    return true;
  }

 private:
  std::span<const std::span<const std::byte>> pieces_;
  std::size_t offset_ = 0;
};

}  // namespace

FetchAssembly::FetchAssembly(std::span<const FetchTarget> targets, const FetchOptions& options,
                             const KvGeometry* geometry, Into into)
    : targets_(targets),
      options_(options),
      geometry_(options.on_layer && into == Into::kTargets ? geometry : nullptr),
      into_(into),
      blocks_(targets.size()),
      progress_(targets.size()),
      pending_(targets.size()) {
  if (geometry_ != nullptr) {
    layer_lacks_.assign(geometry_->layer_count(), static_cast<std::uint32_t>(targets.size()));
  }
}

std::span<const std::uint32_t> FetchAssembly::StartAttempt(std::size_t limit) {
  attempt_.clear();
  while (first_pending_ < targets_.size() &&
         blocks_[first_pending_].state != FetchedBlock::State::kPending) {
    ++first_pending_;
  }
  for (std::uint32_t i = first_pending_; i < targets_.size() && attempt_.size() < limit; ++i) {
    if (blocks_[i].state != FetchedBlock::State::kPending) continue;
    progress_[i].attempt_bytes = 0;
    progress_[i].answered = false;
    progress_[i].open = true;
    attempt_.push_back(i);
  }
  open_in_attempt_ = attempt_.size();
  return attempt_;
}

absl::Status FetchAssembly::Accept(const v1::FetchResponse& message,
                                   std::span<const std::span<const std::byte>> pieces) {
  for (const v1::BlockResult& result : message.blocks()) {
    KV_RETURN_IF_ERROR(AcceptResult(result));
  }
  PieceCursor cursor(pieces);
  for (const v1::Chunk& chunk : message.chunks()) {
    if (chunk.block_index() >= attempt_.size()) {
      return absl::InternalError("fetch: a chunk of a block that was not asked for");
    }
    const std::uint32_t target_index = attempt_[chunk.block_index()];
    Progress& progress = progress_[target_index];
    const std::uint64_t end_bytes = chunk.offset() + chunk.bytes();
    // The head of a frame has the checksums of the rest: with the same head it is the same frame.
    if (into_frames() && progress.open && chunk.offset() == 0 && progress.verified_bytes > 0 &&
        (end_bytes > progress.verified_bytes ||
         Crc32c({progress.frame.get(), end_bytes}) != chunk.crc32c())) {
      StartFrameAnew(target_index);
    }
    // Bytes of a block that was given up, or that a former attempt brought, pass by.
    const bool wanted = progress.open && end_bytes > progress.verified_bytes;
    if (wanted && (!progress.answered || chunk.offset() != progress.attempt_bytes ||
                   end_bytes > progress.total_bytes)) {
      return absl::InternalError("fetch: a chunk out of its place");
    }
    std::byte* to = wanted ? MemoryOf(target_index) + chunk.offset() : nullptr;
    std::uint32_t crc32c;
    if (!cursor.Take(chunk.bytes(), to, &crc32c)) {
      return absl::InternalError("fetch: a message shorter than its chunks");
    }
    accepted_bytes_ += chunk.bytes();
    if (!progress.open) continue;
    if (wanted && crc32c != chunk.crc32c()) {
      Damaged(target_index);
      continue;
    }
    Advance(target_index, end_bytes);
  }
  ReportLayers();
  return absl::OkStatus();
}

absl::Status FetchAssembly::AcceptInPlace(const v1::BlockResult& result,
                                          std::span<const v1::Chunk* const> chunks) {
  KV_RETURN_IF_ERROR(AcceptResult(result));
  const std::uint32_t target_index = attempt_[result.block_index()];
  for (const v1::Chunk* chunk : chunks) {
    Progress& progress = progress_[target_index];
    if (!progress.open) break;
    const std::uint64_t end_bytes = chunk->offset() + chunk->bytes();
    if (chunk->offset() != progress.attempt_bytes || end_bytes > progress.total_bytes) {
      return absl::InternalError("fetch: a chunk out of its place");
    }
    const auto bytes = targets_[target_index].raw.subspan(chunk->offset(), chunk->bytes());
    accepted_bytes_ += chunk->bytes();
    if (Crc32c(bytes) != chunk->crc32c()) {
      Damaged(target_index);
      break;
    }
    Advance(target_index, end_bytes);
  }
  return absl::OkStatus();
}

absl::Status FetchAssembly::AcceptResult(const v1::BlockResult& result) {
  if (result.block_index() >= attempt_.size()) {
    return absl::InternalError("fetch: a result of a block that was not asked for");
  }
  const std::uint32_t target_index = attempt_[result.block_index()];
  Progress& progress = progress_[target_index];
  if (progress.answered) return absl::InternalError("fetch: two results of one block");
  progress.answered = true;

  if (absl::Status status = FromItem(result.status()); !status.ok()) {
    if (IsRetriable(status)) {
      CloseInAttempt(progress);
    } else {
      FailBlock(target_index, std::move(status));
    }
    return absl::OkStatus();
  }
  if (!MakeRoom(target_index, result.bytes())) {
    FailBlock(target_index, absl::FailedPreconditionError(absl::StrCat(
                                "the block has ", result.bytes(), " bytes, its target ",
                                targets_[target_index].raw.size())));
    return absl::OkStatus();
  }
  FetchedBlock& block = blocks_[target_index];
  const FetchedBlock before = block;
  if (result.quality() != v1::QUALITY_UNSPECIFIED) {
    block.quality = static_cast<Quality>(result.quality());
  }
  if (result.rung() != v1::RUNG_UNSPECIFIED) block.rung = static_cast<Rung>(result.rung());
  if (result.codec() != v1::CODEC_UNSPECIFIED) block.codec = static_cast<CodecId>(result.codec());
  block.bytes = result.bytes();
  block.tokens.resize(result.tokens().size() / sizeof(TokenId));
  if (!block.tokens.empty()) {
    std::memcpy(block.tokens.data(), result.tokens().data(), block.tokens.size() * sizeof(TokenId));
  }
  if (progress.verified_bytes > 0) {
    // What an earlier attempt brought may have been of another frame of the block.
    const bool is_same = before.quality == block.quality && before.codec == block.codec &&
                         options_.form == BlockForm::kRaw;
    if (into_frames()) {
      // Its head will tell.
      if (result.bytes() != progress.total_bytes || before.quality != block.quality ||
          before.codec != block.codec) {
        StartFrameAnew(target_index);
        if (block.state == FetchedBlock::State::kMissed) return absl::OkStatus();
      }
    } else if (geometry_ != nullptr) {
      block.quality = LowerOf(block.quality, before.quality);  // layers were told of already
    } else if (!is_same) {
      progress.verified_bytes = 0;
    }
  }
  progress.total_bytes = result.bytes();
  return absl::OkStatus();
}

bool FetchAssembly::MakeRoom(std::uint32_t target_index, std::uint64_t bytes) {
  const std::size_t room = targets_[target_index].raw.size();
  if (!into_frames()) {
    return options_.form == BlockForm::kRaw ? bytes == room : bytes > 0 && bytes <= room;
  }
  if (bytes == 0 || bytes > room + kFrameHeaderBytesMax) return false;
  Progress& progress = progress_[target_index];
  if (progress.frame == nullptr || bytes > progress.total_bytes) {
    if (progress.keep_frame) return true;  // it will be missed
    progress.frame = std::make_unique_for_overwrite<std::byte[]>(bytes);
    progress.verified_bytes = 0;
  }
  return true;
}

void FetchAssembly::StartFrameAnew(std::uint32_t target_index) {
  Progress& progress = progress_[target_index];
  if (progress.keep_frame) {
    FailBlock(target_index,
              absl::UnavailableError("another frame of the block came after a loss of the "
                                     "connection; fetch it again"));
  } else {
    progress.verified_bytes = 0;
  }
}

std::span<const std::byte> FetchAssembly::frame(std::uint32_t target_index) const {
  const Progress& progress = progress_[target_index];
  return {progress.frame.get(), progress.frame == nullptr ? 0 : progress.total_bytes};
}

void FetchAssembly::Advance(std::uint32_t target_index, std::uint64_t end_bytes) {
  Progress& progress = progress_[target_index];
  progress.attempt_bytes = end_bytes;
  progress.verified_bytes = std::max(progress.verified_bytes, end_bytes);
  if (geometry_ != nullptr) {
    while (progress.layers < geometry_->layer_count() &&
           geometry_->layer_end(progress.layers) <= progress.verified_bytes) {
      --layer_lacks_[progress.layers++];
    }
  }
  if (progress.attempt_bytes < progress.total_bytes) return;
  blocks_[target_index].state = FetchedBlock::State::kLoaded;
  --pending_;
  CloseInAttempt(progress);
}

void FetchAssembly::Damaged(std::uint32_t target_index) {
  Progress& progress = progress_[target_index];
  ++damaged_blocks_;
  if (++progress.damaged_count >= kDamagedMax) {
    FailBlock(target_index, absl::DataLossError("the block's bytes failed their check twice"));
  } else {
    CloseInAttempt(progress);
  }
}

void FetchAssembly::CloseInAttempt(Progress& progress) {
  if (!progress.open) return;
  progress.open = false;
  --open_in_attempt_;
}

void FetchAssembly::FailBlock(std::uint32_t target_index, absl::Status why) {
  FetchedBlock& block = blocks_[target_index];
  if (block.state != FetchedBlock::State::kPending) return;
  block.state = FetchedBlock::State::kMissed;
  block.status = std::move(why);
  --pending_;
  Progress& progress = progress_[target_index];
  CloseInAttempt(progress);
  for (std::uint32_t layer = progress.layers; layer < layer_lacks_.size(); ++layer) {
    --layer_lacks_[layer];
  }
}

void FetchAssembly::RejectBlock(std::uint32_t target_index, absl::Status why) {
  FetchedBlock& block = blocks_[target_index];
  if (block.loaded()) {
    block.state = FetchedBlock::State::kMissed;
    block.status = std::move(why);
  } else {
    FailBlock(target_index, std::move(why));
  }
}

void FetchAssembly::FailRest(const absl::Status& why) {
  KV_CHECK(!why.ok());
  for (std::uint32_t i = 0; i < blocks_.size(); ++i) FailBlock(i, why);
  ReportLayers();
}

void FetchAssembly::ReportLayers() {
  while (next_layer_ < layer_lacks_.size() && layer_lacks_[next_layer_] == 0) {
    options_.on_layer(next_layer_++, blocks_);
  }
}

FetchReport FetchAssembly::TakeReport() {
  KV_CHECK(done());
  FetchReport report;
  for (std::size_t i = 0; into_frames() && i < blocks_.size(); ++i) {
    if (blocks_[i].loaded()) blocks_[i].bytes = targets_[i].raw.size();
  }
  report.loaded_blocks = static_cast<std::size_t>(std::count_if(
      blocks_.begin(), blocks_.end(), [](const FetchedBlock& block) { return block.loaded(); }));
  report.blocks = std::move(blocks_);
  return report;
}

}  // namespace kvtrie
