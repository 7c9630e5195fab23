#include <algorithm>
#include <cstddef>
#include <utility>

#include "storage/engine/engine_core.h"
#include "storage/trie/trie_probability.h"

namespace kvtrie {
namespace {

// Runs that tell apart what is in memory; a path can have so much as one per block.
constexpr std::size_t kRunsByMemoryMax = 256;
// Blocks that are read ahead behind those of a lookup.
constexpr std::size_t kNextBlocksMax = 16;

}  // namespace

std::vector<bool> Engine::Core::InMemory(const ServingFrames& frames) const {
  std::vector<PayloadLocation> places;
  places.reserve(frames.size());
  for (const StoredFrame& frame : frames) places.push_back(frame.at);
  return tier_.Contains(places);
}

std::vector<BlockRun> Engine::Core::RunsOf(std::span<const ServingFrames> models,
                                           const std::vector<std::vector<bool>>& in_memory) const {
  const ThroughputMeters::PerCodec read_seconds = read_meters_.SecondsPerUnit();
  const ThroughputMeters::PerCodec decode_seconds = decode_meters_.SecondsPerUnit();
  std::vector<BlockRun> runs;
  const auto is_alike = [&](std::size_t block) {
    for (std::size_t m = 0; m < models.size(); ++m) {
      const StoredFrame& frame = models[m][block];
      const StoredFrame& before = models[m][block - 1];
      if (frame.codec != before.codec || frame.quality != before.quality) return false;
      if (in_memory[m][block] != in_memory[m][block - 1] && runs.size() < kRunsByMemoryMax) {
        return false;
      }
    }
    return true;
  };
  for (std::size_t block = 0; block < models.front().size(); ++block) {
    if (block == 0 || !is_alike(block)) {
      runs.push_back({.first_block = static_cast<std::uint32_t>(block),
                      .codec = models.front()[block].codec,
                      .quality = models.front()[block].quality});
    }
    BlockRun& run = runs.back();
    ++run.block_count;
    for (std::size_t m = 0; m < models.size(); ++m) {
      const StoredFrame& frame = models[m][block];
      const std::uint64_t bytes = frame.at.record_bytes;
      run.quality = LowerOf(run.quality, frame.quality);
      run.bytes += bytes;
      if (in_memory[m][block]) {
        run.memory_bytes += bytes;
      } else {
        run.read_seconds +=
            static_cast<double>(bytes) * read_seconds[static_cast<std::size_t>(frame.codec) - 1];
      }
      if (frame.codec == CodecId::kRaw) continue;
      run.decode_seconds += static_cast<double>(frame.raw_frame_bytes) *
                            decode_seconds[static_cast<std::size_t>(frame.codec) - 1];
    }
  }
  return runs;
}

std::vector<StoredFrame> Engine::Core::LikelyNextFrames(const TrieNodeId& last,
                                                        std::span<const TokenId> tail,
                                                        Quality min_quality) {
  std::vector<StoredFrame> frames;
  if (options_.prefetch_percent_min == 100) return frames;
  const double least = options_.prefetch_percent_min / 100.0;
  absl::ReaderMutexLock lock(&index_mutex_);
  const std::uint32_t now = NowSeconds();
  NodeRef ref = index_.FindById(last);
  double probability = 1;
  while (ref != 0 && frames.size() < kNextBlocksMax) {
    const auto next = LikelyNextBlock(index_, ref, least);
    if (!next) break;
    // That all of them follow.
    probability *= next->probability;
    if (probability < least) break;
    ref = next->child;
    const IndexNode& node = index_.node(ref);
    const auto tokens = index_.CachedTokens(ref);
    const std::size_t known = std::min(tail.size(), tokens.size());
    if (!std::equal(tail.begin(), tail.begin() + static_cast<std::ptrdiff_t>(known),
                    tokens.begin())) {
      break;
    }
    tail = {};
    if (node.expired(now) || !node.serves(min_quality)) break;
    frames.push_back(FrameInIndex(node));
  }
  return frames;
}

void Engine::Core::Prefetch(const LookupQuery& query, std::span<const ServingFrames> models,
                            const std::vector<std::vector<bool>>& in_memory,
                            std::optional<std::span<const TokenId>> tail) {
  std::vector<StoredFrame> wanted;
  for (std::size_t block = 0; block < models.front().size(); ++block) {
    for (std::size_t m = 0; m < models.size(); ++m) {
      const StoredFrame& frame = models[m][block];
      if (frame.at && !in_memory[m][block]) wanted.push_back(frame);
    }
  }
  if (!wanted.empty()) prefetcher_->Want(wanted, MemoryTier::MayReplace::kOldest);
  if (!tail) return;
  for (const ServingFrames& frames : models) {
    const ServingFrames next = LikelyNextFrames(frames.back().node, *tail, query.min_quality);
    const std::vector<bool> are_in_memory = InMemory(next);
    wanted.clear();
    for (std::size_t i = 0; i < next.size(); ++i) {
      if (!are_in_memory[i]) wanted.push_back(next[i]);
    }
    if (!wanted.empty()) prefetcher_->Want(wanted, MemoryTier::MayReplace::kNeverRead);
  }
}

std::optional<SharedBytes> Engine::Core::ReadAhead(const StoredFrame& frame) {
  auto loaded = LoadFrame(frame);
  if (loaded.ok()) return std::move(loaded->bytes);
  if (absl::IsDataLoss(loaded.status()) && IsCurrent(frame)) {
    OnDamagedFrame(frame, loaded.status());
  }
  return std::nullopt;
}

}  // namespace kvtrie
