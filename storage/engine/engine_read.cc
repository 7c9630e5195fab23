#include <algorithm>
#include <map>
#include <utility>

#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"
#include "storage/meta/meta_keys.h"

namespace kvtrie {

const RungRow* Engine::Core::Choose(const NodeRow& row, Quality min_quality, ReadAs as) const {
  const RungRow* best = nullptr;
  for (const RungRow& rung : row.rungs) {
    if (!IsAtLeast(ServedQuality(row, rung), min_quality)) continue;
    const bool is_better =
        best == nullptr || (IsReadable(rung.codec, as) == IsReadable(best->codec, as)
                                ? rung.record_bytes < best->record_bytes
                                : IsReadable(rung.codec, as));
    if (is_better) best = &rung;
  }
  return best;
}

absl::StatusOr<NodeRow> Engine::Core::ReadRow(TenantId tenant, const TrieNodeId& node) {
  KV_ASSIGN_OR_RETURN(const auto text,
                      meta_->Get(MetaTable::kNodes, NodeRowKey{tenant, node}.Encode()));
  if (!text.has_value()) return absl::DataLossError("the row of a trie node is gone");
  return NodeRow::Decode(*text);
}

StoredFrame Engine::Core::FrameInIndex(const IndexNode& node) const {
  return {.node = node.id,
          .rung = RungOf(node.codec()),
          .quality = node.quality(),
          .codec = node.codec(),
          .at = LocationOf(node.frame),
          .raw_frame_bytes = RawFrameBytes(node.model)};
}

StoredFrame Engine::Core::FrameInRow(const TrieNodeId& node, const NodeRow& row,
                                     const RungRow& rung, std::uint64_t raw_frame_bytes) {
  return {.node = node,
          .rung = rung.rung,
          .quality = ServedQuality(row, rung),
          .codec = rung.codec,
          .at = LocationOf(rung),
          .raw_frame_bytes = raw_frame_bytes};
}

std::optional<absl::StatusOr<Engine::FoundFrames>> Engine::Core::FindFrames(
    TenantId tenant, const ModelId& model, std::span<const TrieNodeId> nodes, Quality min_quality,
    ReadAs as, bool may_block) {
  FoundFrames frames(nodes.size());
  std::vector<std::size_t> in_rows;  // the larger of two frames may be the one
  std::size_t missed = 0;
  std::uint64_t raw_frame_bytes;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    const auto slot = FindRegistered(tenant, model);
    if (!slot.ok()) return slot.status();
    raw_frame_bytes = RawFrameBytes(*slot);
    const std::uint32_t now = NowSeconds();
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      const NodeRef ref = index_.FindById(nodes[i]);
      if (ref == 0 || index_.node(ref).model != *slot || index_.node(ref).expired(now)) {
        ++missed;
        continue;
      }
      const IndexNode& node = index_.node(ref);
      const bool in_index =
          node.serves(min_quality) && (IsReadable(node.codec(), as) || !node.has_other());
      if (in_index) {
        frames[i] = FrameInIndex(node);
      } else if (node.any_serves(min_quality)) {
        if (!may_block) return std::nullopt;
        in_rows.push_back(i);
      } else {
        ++missed;
      }
    }
  }
  for (const std::size_t i : in_rows) {
    const auto row = ReadRow(tenant, nodes[i]);
    const RungRow* rung = row.ok() ? Choose(*row, min_quality, as) : nullptr;
    if (rung == nullptr) {
      ++missed;
      continue;
    }
    frames[i] = FrameInRow(nodes[i], *row, *rung, raw_frame_bytes);
  }
  counters_.missed_reads.fetch_add(missed, std::memory_order_relaxed);
  return frames;
}

absl::StatusOr<Engine::FoundFrames> Engine::Core::FindFramesOfPath(TenantId tenant,
                                                                   const PathView& path,
                                                                   std::uint32_t first_block,
                                                                   std::uint32_t block_count,
                                                                   Quality min_quality, ReadAs as) {
  ModelSlot slot;
  std::uint32_t block_tokens;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    KV_ASSIGN_OR_RETURN(slot, FindRegistered(tenant, path.model));
    block_tokens = index_.model(slot).block_tokens;
  }
  const auto walked = Walk(slot, tenant, path, block_tokens, min_quality, /*may_block=*/true);
  const std::uint32_t last_block = block_count == 0
                                       ? walked->block_count
                                       : std::min(walked->block_count, first_block + block_count);
  if (first_block > last_block) {
    return absl::InvalidArgumentError("first_block: lies behind the prefix's last full block");
  }
  std::vector<TrieNodeId> ids;
  for (std::uint32_t block = first_block; block < last_block; ++block) {
    ids.push_back(block < walked->nodes.size() ? walked->nodes[block].second : TrieNodeId{});
  }
  return *FindFrames(tenant, path.model, ids, min_quality, as, /*may_block=*/true);
}

std::optional<LoadedFrame> Engine::Core::TryReadFrame(const StoredFrame& frame, ReadAs as) {
  return frame.needs_decoding(as) ? std::nullopt : FromMemory(frame);
}

std::optional<LoadedFrame> Engine::Core::FromMemory(const StoredFrame& frame) {
  SharedBytes bytes = tier_.Get(frame.at);
  if (!bytes) return std::nullopt;
  auto view = FrameView::Parse(bytes.view);
  KV_CHECK(view.ok());  // it was checked on its way into the tier
  counters_.memory_reads.fetch_add(1, std::memory_order_relaxed);
  return LoadedFrame{std::move(bytes), *view};
}

absl::StatusOr<LoadedFrame> Engine::Core::LoadFrame(const StoredFrame& frame) {
  ThroughputMeter& meter = read_meters_.Of(frame.codec);
  meter.Begin();
  absl::StatusOr<StoredPayload> read = payload_->Read(frame.at);
  meter.End(read.ok() ? frame.at.record_bytes : 0);
  KV_ASSIGN_OR_RETURN(StoredPayload stored, std::move(read));
  const auto descriptor = NodeDescriptor::Decode(AsText(stored.descriptor));
  if (!descriptor.ok() || descriptor->node != frame.node) {
    return absl::DataLossError("the record belongs to another trie node");
  }
  const auto view = FrameView::Parse(stored.view);
  if (!view.ok() || view->frame_bytes() != stored.view.size() ||
      view->model() != descriptor->row.model || view->codec() != descriptor->codec) {
    return absl::DataLossError("the record holds no frame of its model");
  }
  if (view->codec() != CodecId::kRaw) {
    const NodeRow& row = descriptor->row;
    const FrameBinding binding = view->binding();
    if (binding.first_position != std::uint64_t{row.depth - 1} * row.tokens.size() ||
        binding.tokens_crc32c != Crc32c(std::as_bytes(std::span(row.tokens))) ||
        binding.profile != descriptor->profile) {
      return absl::DataLossError("the record's frame is bound to another block");
    }
  }
  return LoadedFrame{std::move(stored), *view};
}

bool Engine::Core::IsCurrent(const StoredFrame& frame) {
  TenantId tenant;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    const NodeRef ref = index_.FindById(frame.node);
    if (ref == 0) return false;
    if (LocationOf(index_.node(ref).frame) == frame.at) return true;
    if (!index_.node(ref).has_other()) return false;
    tenant = index_.model(index_.node(ref).model).tenant;
  }
  const auto row = ReadRow(tenant, frame.node);
  return row.ok() && std::any_of(row->rungs.begin(), row->rungs.end(),
                                 [&](const RungRow& rung) { return LocationOf(rung) == frame.at; });
}

absl::StatusOr<LoadedFrame> Engine::Core::ReadFromDisk(const StoredFrame& frame) {
  auto loaded = LoadFrame(frame);
  if (loaded.ok()) {
    counters_.disk_reads.fetch_add(1, std::memory_order_relaxed);
    counters_.disk_read_bytes.fetch_add(frame.at.record_bytes, std::memory_order_relaxed);
    return loaded;
  }
  // It may have been unlinked and freed while it was read: a miss then, not a fault.
  if (!IsCurrent(frame)) {
    counters_.missed_reads.fetch_add(1, std::memory_order_relaxed);
    return absl::NotFoundError("block: not stored any more");
  }
  if (absl::IsDataLoss(loaded.status())) {
    OnDamagedFrame(frame, loaded.status());
  } else {
    counters_.read_errors.fetch_add(1, std::memory_order_relaxed);
  }
  return loaded.status();
}

absl::StatusOr<std::vector<TokenId>> Engine::Core::TokensOf(const TrieNodeId& node,
                                                            const ModelId& model) {
  TenantId tenant;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    const NodeRef ref = index_.FindById(node);
    if (ref == 0 || index_.model(index_.node(ref).model).model != model) {
      return absl::NotFoundError("block: not stored any more");
    }
    tenant = index_.model(index_.node(ref).model).tenant;
    const auto cached = index_.CachedTokens(ref);
    if (!cached.empty()) return std::vector<TokenId>(cached.begin(), cached.end());
  }
  KV_ASSIGN_OR_RETURN(NodeRow row, ReadRow(tenant, node));
  return std::move(row.tokens);
}

std::vector<std::vector<TokenId>> Engine::Core::TokensOfBlocks(TenantId tenant,
                                                               const ModelId& model,
                                                               std::span<const TrieNodeId> nodes) {
  std::vector<std::vector<TokenId>> tokens(nodes.size());
  std::vector<bool> is_own(nodes.size());
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    const auto slot = index_.FindModel(tenant, model);
    for (std::size_t i = 0; slot && i < nodes.size(); ++i) {
      const NodeRef ref = index_.FindById(nodes[i]);
      is_own[i] = ref != 0 && index_.node(ref).model == *slot;
    }
  }
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (!is_own[i]) continue;
    auto of_block = TokensOf(nodes[i], model);
    if (of_block.ok()) tokens[i] = *std::move(of_block);
  }
  return tokens;
}

// Each comes out as if it were stored raw: what is served in layers and chunks needs nothing else.
std::vector<absl::StatusOr<LoadedFrame>> Engine::Core::DecodeFrames(
    std::span<const StoredFrame> stored, std::span<const LoadedFrame> loaded) {
  std::vector<absl::StatusOr<LoadedFrame>> results(
      stored.size(), absl::NotFoundError("block: not stored any more"));
  const ModelId model_id = loaded.front().view.model();
  std::shared_ptr<const RegisteredModel> model;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    for (const auto& [slot, registered] : models_) {
      if (index_.model(slot).model == model_id) model = registered;
    }
  }
  KV_CHECK(model != nullptr);  // its frames are found by its model

  const std::vector<std::uint32_t> section_bytes = RawSectionBytes(model->geometry);
  const std::size_t header_bytes = FrameHeaderBytes(section_bytes.size());
  struct Decoding {
    std::size_t index;
    std::vector<TokenId> tokens;
    std::shared_ptr<AlignedBuffer> buffer;
  };
  std::vector<Decoding> decodings;
  std::vector<FrameToDecode> to_decode;
  for (std::size_t i = 0; i < stored.size(); ++i) {
    auto tokens = TokensOf(stored[i].node, model_id);
    if (!tokens.ok()) {
      results[i] = tokens.status();
      continue;
    }
    decodings.push_back(
        {i, *std::move(tokens), std::make_shared<AlignedBuffer>(model->raw_frame_bytes)});
  }
  for (const Decoding& decoding : decodings) {
    to_decode.push_back(
        {.frame = loaded[decoding.index].view,
         .tokens = decoding.tokens,
         .raw = std::span(decoding.buffer->data(), model->raw_frame_bytes).subspan(header_bytes)});
  }
  if (to_decode.empty()) return results;

  // What some of them were coded against.
  std::vector<ReferenceTable> tables(to_decode.size());
  std::vector<FrameReference> wanted;
  for (std::size_t d = 0; d < to_decode.size(); ++d) {
    if (to_decode[d].frame.codec() != CodecId::kReferenced) continue;
    if (auto table = ReferencesOf(to_decode[d].frame, model->geometry.block_tokens()); table.ok()) {
      tables[d] = *std::move(table);
      wanted.insert(wanted.end(), tables[d].references.begin(), tables[d].references.end());
    }
  }
  const DecodedReferences references = DecodeReferences(model_id, wanted);
  std::vector<std::vector<ReferenceBlock>> reference_blocks(to_decode.size());
  for (std::size_t d = 0; d < to_decode.size(); ++d) {
    for (const FrameReference& reference : tables[d].references) {
      const auto found = references.find({reference.node, reference.digest});
      if (found == references.end()) continue;  // the codec will miss it
      reference_blocks[d].push_back({.node = reference.node,
                                     .first_position = reference.first_position,
                                     .tokens = found->second.tokens,
                                     .raw = found->second.raw.view.body()});
    }
    to_decode[d].references = reference_blocks[d];
  }
  // Each codec of a group is taken to have needed all the time of it: groups are of one, mostly.
  std::map<CodecId, double> raw_bytes;
  for (const FrameToDecode& decoding : to_decode) {
    raw_bytes[decoding.frame.codec()] += static_cast<double>(model->raw_frame_bytes);
  }
  for (const auto& [codec, bytes] : raw_bytes) decode_meters_.Of(codec).Begin();
  const auto began = clock_.Monotonic();
  const std::vector<absl::Status> statuses = codec_->Decode(model->spec, to_decode, *profiles_);
  counters_.decode_nanoseconds.fetch_add(
      std::chrono::duration_cast<std::chrono::nanoseconds>(clock_.Monotonic() - began).count(),
      std::memory_order_relaxed);
  for (const auto& [codec, bytes] : raw_bytes) decode_meters_.Of(codec).End(bytes);

  for (std::size_t d = 0; d < decodings.size(); ++d) {
    absl::StatusOr<LoadedFrame>& result = results[decodings[d].index];
    if (reference_blocks[d].size() < tables[d].references.size()) {
      // Gone together with what it was needed for, or the store is damaged.
      result = IsCurrent(stored[decodings[d].index])
                   ? absl::DataLossError("a block that it was coded against is not stored any more")
                   : absl::NotFoundError("block: not stored any more");
      continue;
    }
    if (!statuses[d].ok()) {
      result = statuses[d];
      continue;
    }
    const std::span<const std::byte> raw = to_decode[d].raw;
    std::vector<FrameSection> sections;
    std::size_t begin = 0;
    for (const std::uint32_t bytes : section_bytes) {
      sections.push_back({bytes, Crc32c(raw.subspan(begin, bytes))});
      begin += bytes;
    }
    const std::span<std::byte> frame(decodings[d].buffer->data(), model->raw_frame_bytes);
    WriteFrameHeader({.model = model_id, .raw_bytes = raw.size(), .sections = sections},
                     frame.first(header_bytes));
    auto view = FrameView::Parse(frame);
    KV_CHECK(view.ok());
    result = LoadedFrame{{std::move(decodings[d].buffer), frame}, *view};
  }
  return results;
}

void Engine::Core::ReadDecoded(std::span<const StoredFrame> frames, const OnFrameRead& on_read) {
  std::vector<std::size_t> indexes;
  std::vector<StoredFrame> stored;
  std::vector<LoadedFrame> loaded;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    auto frame = FromMemory(frames[i]);
    if (!frame) {
      auto read = ReadFromDisk(frames[i]);
      if (!read.ok()) {
        on_read(i, read.status());
        continue;
      }
      frame = *std::move(read);
      tier_.Insert(frames[i].at, frame->bytes);
    }
    indexes.push_back(i);
    stored.push_back(frames[i]);
    loaded.push_back(*std::move(frame));
  }
  if (stored.empty()) return;
  std::vector<absl::StatusOr<LoadedFrame>> decoded = DecodeFrames(stored, loaded);
  loaded.clear();
  for (std::size_t i = 0; i < stored.size(); ++i) {
    const absl::Status& status = decoded[i].status();
    if (status.ok()) {
      counters_.decoded_blocks.fetch_add(1, std::memory_order_relaxed);
    } else if (!absl::IsNotFound(status)) {
      counters_.decode_errors.fetch_add(1, std::memory_order_relaxed);
      if (absl::IsDataLoss(status)) {
        counters_.undecodable_frames.fetch_add(1, std::memory_order_relaxed);
        OnDamagedFrame(stored[i], status);
      }
    }
    on_read(indexes[i], std::move(decoded[i]));
  }
}

// Raw KV, one after the other and without waiting for a pool's turn.
std::vector<absl::StatusOr<LoadedFrame>> Engine::Core::ReadRawNow(
    std::span<const StoredFrame> frames) {
  std::vector<absl::StatusOr<LoadedFrame>> raw(frames.size(), absl::NotFoundError(""));
  std::vector<std::size_t> coded_indexes;
  std::vector<StoredFrame> coded;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    if (frames[i].codec != CodecId::kRaw) {
      coded_indexes.push_back(i);
      coded.push_back(frames[i]);
    } else if (auto loaded = TryReadFrame(frames[i], ReadAs::kRaw)) {
      raw[i] = *std::move(loaded);
    } else {
      raw[i] = ReadFromDisk(frames[i]);
    }
  }
  ReadDecoded(coded, [&](std::size_t i, absl::StatusOr<LoadedFrame> loaded) {
    raw[coded_indexes[i]] = std::move(loaded);
  });
  return raw;
}

void Engine::Core::ReadFrames(std::span<const StoredFrame> frames, ReadAs as, OnFrameRead on_read) {
  const auto shared = std::make_shared<OnFrameRead>(std::move(on_read));
  struct ToDecode {
    std::vector<std::size_t> indexes;
    std::vector<StoredFrame> frames;
  };
  auto to_decode = std::make_shared<ToDecode>();
  for (std::size_t i = 0; i < frames.size(); ++i) {
    if (auto loaded = TryReadFrame(frames[i], as)) {
      (*shared)(i, *std::move(loaded));
      continue;
    }
    if (frames[i].needs_decoding(as)) {
      if (codec_ == nullptr) {
        counters_.undecoded_blocks.fetch_add(1, std::memory_order_relaxed);
        (*shared)(i, absl::FailedPreconditionError("stored coded; fetch it as ENCODING_FRAME"));
      } else {
        to_decode->indexes.push_back(i);
        to_decode->frames.push_back(frames[i]);
      }
      continue;
    }
    const bool posted = read_pool_->TryPost([this, i, frame = frames[i], shared] {
      // It may have been read ahead while this waited, or be on its way.
      if (prefetcher_ != nullptr) prefetcher_->AwaitReading(frame.at);
      if (auto in_memory = FromMemory(frame)) {
        (*shared)(i, *std::move(in_memory));
        return;
      }
      auto loaded = ReadFromDisk(frame);
      if (loaded.ok()) tier_.Insert(frame.at, loaded->bytes);
      (*shared)(i, std::move(loaded));
    });
    if (!posted) {
      (*shared)(i, absl::UnavailableError("too many reads are waiting for the disk"));
    }
  }
  if (to_decode->frames.empty()) return;
  const auto on_decoded = [shared, to_decode](std::size_t i, absl::StatusOr<LoadedFrame> loaded) {
    (*shared)(to_decode->indexes[i], std::move(loaded));
  };
  const bool posted = decode_pool_->TryPost(
      [this, to_decode, on_decoded] { ReadDecoded(to_decode->frames, on_decoded); });
  if (posted) return;
  for (std::size_t i = 0; i < to_decode->frames.size(); ++i) {
    on_decoded(i, absl::UnavailableError("too many blocks are waiting to be decoded"));
  }
}

}  // namespace kvtrie
