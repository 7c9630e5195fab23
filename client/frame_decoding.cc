#include "client/frame_decoding.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/coding_threads.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/codec/section_layers.h"

namespace kvtrie {
namespace {

absl::Status NotTheBlock(const char* what) {
  return absl::DataLossError(absl::StrCat("the frame that came is not the block's: ", what));
}

double SecondsSince(std::chrono::steady_clock::time_point began) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

ProfileId ProfileOf(const FrameView& frame) {
  return frame.codec() == CodecId::kRaw ? ProfileId{} : frame.profile();
}

}  // namespace

FrameDecoding::FrameDecoding(const ModelSpec& spec, std::span<const FetchTarget> targets,
                             const FetchOptions& options, CodecOf codec_of, int threads)
    : spec_(spec),
      model_(spec.Digest()),
      geometry_(spec),
      targets_(targets),
      options_(options),
      codec_of_(std::move(codec_of)),
      threads_(threads),
      blocks_(targets.size()) {}

void FrameDecoding::Advance(FetchAssembly& assembly, bool last) {
  if (options_.on_layer) {
    AdvanceLayers(assembly, last);
  } else {
    AdvanceBlocks(assembly, last);
  }
}

absl::Status FrameDecoding::Open(std::size_t i, const FetchedBlock& said,
                                 std::span<const std::byte> bytes) {
  Block& block = blocks_[i];
  KV_ASSIGN_OR_RETURN(const FrameView frame, FrameView::Parse(bytes));
  if (frame.frame_bytes() != bytes.size()) return NotTheBlock("its size");
  if (frame.model() != model_) return NotTheBlock("it is of another model");
  KV_RETURN_IF_ERROR(frame.CheckGeometry(geometry_));
  if (frame.codec() != said.codec || !IsAtLeast(frame.quality(), said.quality)) {
    return NotTheBlock("the server said another codec or quality");
  }
  if (!IsAtLeast(said.quality, options_.min_quality)) return NotTheBlock("less than was asked for");
  if (frame.codec() != CodecId::kRaw) {
    const FrameBinding binding = frame.binding();
    if (binding.first_position != targets_[i].first_position) return NotTheBlock("its position");
    if (binding.tokens_crc32c != Crc32c(std::as_bytes(targets_[i].tokens))) {
      return NotTheBlock("its tokens");
    }
    const auto codec = CodecOfProfile(binding.profile);
    if (absl::IsNotFound(codec.status())) {
      return absl::FailedPreconditionError(
          absl::StrCat("its profile ", binding.profile.ToHex(),
                       " is not stored at the server any more: put it again (PutProfile)"));
    }
    KV_RETURN_IF_ERROR(codec.status());
    block.codec = *codec;
  }
  block.frame = frame;
  block.opened = true;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const FrameCodec>> FrameDecoding::CodecOfProfile(
    const ProfileId& profile) {
  auto found = codecs_.find(profile);
  if (found == codecs_.end()) found = codecs_.emplace(profile, codec_of_(profile)).first;
  return found->second;
}

void FrameDecoding::Miss(std::size_t i, absl::Status why, FetchAssembly& assembly) {
  if (blocks_[i].closed) return;
  blocks_[i].closed = true;
  ++undecodable_blocks_;
  assembly.RejectBlock(static_cast<std::uint32_t>(i), std::move(why));
}

void FrameDecoding::Close(std::size_t i) {
  if (blocks_[i].closed) return;
  blocks_[i].closed = true;
  if (blocks_[i].codec != nullptr) ++decoded_blocks_;
}

FrameToDecode FrameDecoding::ToDecode(std::size_t i) const {
  return {.frame = *blocks_[i].frame, .tokens = targets_[i].tokens, .raw = targets_[i].raw};
}

// --- whole blocks ---

void FrameDecoding::AdvanceBlocks(FetchAssembly& assembly, bool last) {
  while (DecodeSome(assembly, last)) {
  }
}

bool FrameDecoding::DecodeSome(FetchAssembly& assembly, bool last) {
  while (first_open_ < blocks_.size() && blocks_[first_open_].closed) ++first_open_;
  const std::size_t at_once =
      CodingBlocks(geometry_.block_tokens()) * static_cast<std::size_t>(threads_);
  std::vector<std::size_t> here;
  for (std::size_t i = first_open_; i < blocks_.size() && here.size() < at_once; ++i) {
    if (blocks_[i].closed) continue;
    const FetchedBlock& said = assembly.block(static_cast<std::uint32_t>(i));
    if (said.state == FetchedBlock::State::kMissed) blocks_[i].closed = true;
    if (said.loaded()) here.push_back(i);
  }
  if (here.empty() || (here.size() < at_once && !last)) return false;

  std::map<ProfileId, std::vector<std::size_t>> by_profile;
  for (const std::size_t i : here) {
    const auto index = static_cast<std::uint32_t>(i);
    absl::Status status = Open(i, assembly.block(index), assembly.frame(index));
    if (status.ok()) status = blocks_[i].frame->VerifyBody();
    if (!status.ok()) {
      Miss(i, std::move(status), assembly);
    } else if (blocks_[i].frame->codec() == CodecId::kReferenced) {
      const FrameView frame = *blocks_[i].frame;
      members_.push_back({i, frame, assembly.TakeFrame(index), blocks_[i].codec});
      blocks_[i].closed = true;
    } else if (blocks_[i].codec == nullptr) {
      const auto body = blocks_[i].frame->body();
      std::memcpy(targets_[i].raw.data(), body.data(), body.size());
    } else {
      by_profile[ProfileOf(*blocks_[i].frame)].push_back(i);
    }
  }
  for (const auto& [profile, of_profile] : by_profile) DecodeWhole(of_profile, assembly);
  for (const std::size_t i : here) {
    assembly.DropFrame(static_cast<std::uint32_t>(i));
    blocks_[i].frame.reset();
    Close(i);
  }
  return true;
}

void FrameDecoding::DecodeWhole(std::span<const std::size_t> blocks, FetchAssembly& assembly) {
  const FrameCodec& codec = *blocks_[blocks.front()].codec;
  const std::size_t at_once = CodingBlocks(geometry_.block_tokens());
  const std::size_t parts = (blocks.size() + at_once - 1) / at_once;
  std::vector<absl::Status> statuses(blocks.size());
  const auto began = std::chrono::steady_clock::now();
  OnThreads(threads_, parts, [&](std::size_t part) {
    std::vector<FrameToDecode> together;
    const std::size_t end = std::min(blocks.size(), (part + 1) * at_once);
    for (std::size_t b = part * at_once; b < end; ++b) together.push_back(ToDecode(blocks[b]));
    if (codec.Decode(together).ok()) return;
    // One of them at least is bad: which?
    for (std::size_t b = part * at_once; b < end; ++b) {
      const FrameToDecode alone = ToDecode(blocks[b]);
      statuses[b] = codec.Decode({&alone, 1});
    }
  });
  DecodeTime& time = decode_times_[blocks_[blocks.front()].frame->codec()];
  time.tokens += static_cast<double>(blocks.size() * geometry_.block_tokens());
  time.seconds += SecondsSince(began);
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    if (!statuses[b].ok()) Miss(blocks[b], std::move(statuses[b]), assembly);
  }
}

// --- layers ---

bool FrameDecoding::OpenInLayers(std::size_t i, FetchAssembly& assembly) {
  const auto index = static_cast<std::uint32_t>(i);
  Block& block = blocks_[i];
  const auto memory = assembly.frame(index);
  const std::size_t here = assembly.verified_bytes(index);
  if (here == 0) return false;
  const auto head = FrameView::Parse(memory.first(here));
  if (here < memory.size() && head.ok() && here < head->header_bytes() + head->section(0).bytes) {
    return false;
  }
  absl::Status status = Open(i, assembly.block(index), memory);
  if (status.ok()) {
    auto layers = LayersOfSections(*block.frame, geometry_);
    if (layers.ok()) {
      block.layers = *std::move(layers);
    } else {
      status = layers.status();
    }
  }
  if (!status.ok()) {
    Miss(i, std::move(status), assembly);
    return true;
  }
  for (std::size_t s = 0; s < block.frame->section_count(); ++s) {
    block.section_bytes.push_back(block.frame->section(s).bytes);
  }
  // What is decoded of it stays; another frame cannot take its place any more.
  assembly.KeepFrame(index);
  return true;
}

void FrameDecoding::CountSections(std::size_t i, FetchAssembly& assembly) {
  Block& block = blocks_[i];
  const std::size_t here =
      assembly.verified_bytes(static_cast<std::uint32_t>(i)) - block.frame->header_bytes();
  while (block.sections < block.section_bytes.size() &&
         block.section_end + block.section_bytes[block.sections] <= here) {
    const auto bytes =
        block.frame->body().subspan(block.section_end, block.section_bytes[block.sections]);
    if (Crc32c(bytes) != block.frame->section(block.sections).crc32c) {
      Miss(i, absl::DataLossError("the block's frame fails its own check"), assembly);
      return;
    }
    block.section_end += bytes.size();
    ++block.sections;
  }
}

void FrameDecoding::MakeBatches() {
  const std::size_t at_once = CodingBlocks(geometry_.block_tokens());
  // Frames of a profile decode together, exact and lossy ones apart.
  std::map<std::pair<ProfileId, bool>, Batch> filling;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    if (blocks_[i].closed) continue;
    const FrameView& frame = *blocks_[i].frame;
    const ProfileId profile = ProfileOf(frame);
    Batch& batch = filling[{profile, frame.quality() == Quality::kExact}];
    batch.blocks.push_back(i);
    if (batch.blocks.size() < at_once) continue;
    batches_.push_back(std::move(batch));
    batch = Batch{};
  }
  for (auto& [key, batch] : filling) {
    if (!batch.blocks.empty()) batches_.push_back(std::move(batch));
  }
}

absl::StatusOr<ResidualCodec::Decoder> FrameDecoding::StartDecoder(
    std::span<const std::size_t> blocks, std::uint32_t layers) const {
  std::vector<BlockToDecode> to_decode;
  for (const std::size_t i : blocks) {
    to_decode.push_back({.body = blocks_[i].frame->body(),
                         .section_bytes = blocks_[i].section_bytes,
                         .quality = blocks_[i].frame->quality(),
                         .tokens = targets_[i].tokens,
                         .raw = targets_[i].raw});
  }
  const ResidualCodec* const codec = blocks_[blocks.front()].codec->residual();
  KV_CHECK(codec != nullptr);
  KV_ASSIGN_OR_RETURN(ResidualCodec::Decoder decoder,
                      ResidualCodec::Decoder::Start(*codec, to_decode));
  while (decoder.decoded_layers() < layers) KV_RETURN_IF_ERROR(decoder.DecodeLayer());
  return decoder;
}

absl::Status FrameDecoding::DecodeLayer(Batch& batch) const {
  const Block& first = blocks_[batch.blocks.front()];
  if (!ProfileOf(*first.frame).empty()) {
    if (!batch.decoder.has_value()) {
      KV_ASSIGN_OR_RETURN(batch.decoder, StartDecoder(batch.blocks, next_layer_));
    }
    return batch.decoder->DecodeLayer();
  }
  for (const std::size_t i : batch.blocks) {
    const FrameView& frame = *blocks_[i].frame;
    if (frame.codec() == CodecId::kRaw) {
      const std::size_t begin = geometry_.layer_begin(next_layer_);
      const std::size_t bytes = geometry_.layer_end(next_layer_) - begin;
      std::memcpy(targets_[i].raw.data() + begin, frame.body().data() + begin, bytes);
    } else if (next_layer_ == 0) {
      const FrameToDecode whole = ToDecode(i);
      KV_RETURN_IF_ERROR(blocks_[i].codec->Decode({&whole, 1}));
    }
  }
  return absl::OkStatus();
}

void FrameDecoding::CountLayer(double seconds) {
  double blocks = 0;
  for (const Batch& batch : batches_) blocks += static_cast<double>(batch.blocks.size());
  for (const Batch& batch : batches_) {
    const auto of_batch = static_cast<double>(batch.blocks.size());
    DecodeTime& time = decode_times_[blocks_[batch.blocks.front()].frame->codec()];
    time.tokens += of_batch * geometry_.block_tokens() / geometry_.layer_count();
    time.seconds += seconds * of_batch / blocks;
  }
}

void FrameDecoding::Repair(Batch batch, bool split, FetchAssembly& assembly,
                           std::vector<Batch>* repaired) {
  std::erase_if(batch.blocks, [this](std::size_t i) { return blocks_[i].closed; });
  if (batch.blocks.empty()) return;
  batch.decoder.reset();
  if (!split) {
    repaired->push_back(std::move(batch));
    return;
  }
  for (const std::size_t i : batch.blocks) {
    Batch alone{.blocks = {i}, .decoder = {}};
    if (absl::Status status = DecodeLayer(alone); status.ok()) {
      repaired->push_back(std::move(alone));
    } else {
      Miss(i, std::move(status), assembly);
    }
  }
}

void FrameDecoding::AdvanceLayers(FetchAssembly& assembly, bool last) {
  bool any_missed = false;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    Block& block = blocks_[i];
    if (block.closed) continue;
    if (assembly.block(static_cast<std::uint32_t>(i)).state == FetchedBlock::State::kMissed) {
      block.closed = true;
    } else if (block.opened || OpenInLayers(i, assembly)) {
      if (!block.closed) CountSections(i, assembly);
    } else {
      KV_CHECK(!last);
      return;
    }
    any_missed = any_missed || block.closed;
  }
  if (!batched_) {
    MakeBatches();
    batched_ = true;
  } else if (any_missed) {
    std::vector<Batch> repaired;
    for (Batch& batch : batches_) {
      const bool whole = std::none_of(batch.blocks.begin(), batch.blocks.end(),
                                      [this](std::size_t i) { return blocks_[i].closed; });
      if (whole) {
        repaired.push_back(std::move(batch));
      } else {
        Repair(std::move(batch), /*split=*/false, assembly, &repaired);
      }
    }
    batches_ = std::move(repaired);
  }

  for (; next_layer_ < geometry_.layer_count(); ++next_layer_) {
    for (const Block& block : blocks_) {
      if (block.closed) continue;
      if (block.sections == 0 || block.layers[block.sections - 1] <= next_layer_) return;
    }
    std::vector<absl::Status> statuses(batches_.size());
    const auto began = std::chrono::steady_clock::now();
    OnThreads(threads_, batches_.size(),
              [&](std::size_t b) { statuses[b] = DecodeLayer(batches_[b]); });
    CountLayer(SecondsSince(began));
    std::vector<Batch> good;
    for (std::size_t b = 0; b < batches_.size(); ++b) {
      if (statuses[b].ok()) {
        good.push_back(std::move(batches_[b]));
      } else {
        Repair(std::move(batches_[b]), /*split=*/true, assembly, &good);
      }
    }
    batches_ = std::move(good);
    std::vector<FetchedBlock> so_far;
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      so_far.push_back(assembly.block(static_cast<std::uint32_t>(i)));
      if (so_far.back().loaded()) so_far.back().state = FetchedBlock::State::kPending;
    }
    options_.on_layer(next_layer_, so_far);
  }
  for (std::size_t i = 0; i < blocks_.size(); ++i) Close(i);
}

}  // namespace kvtrie
