#include "client/put_progress.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/retry.h"
#include "client/status_from_grpc.h"
#include "storage/base/byte_order.h"
#include "storage/base/check.h"
#include "storage/codec/frame.h"

namespace kvtrie {
namespace {

constexpr std::size_t kChunkBytesMax = std::size_t{1} << 20;
constexpr std::size_t kFrameBytesMax = kFrameHeaderBytesMax + kRawBlockBytesMax;

}  // namespace

std::vector<std::uint32_t> PutChunkBytes(const KvGeometry& geometry) {
  std::vector<std::uint32_t> sizes;
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    std::size_t left = geometry.layer_end(layer) - geometry.layer_begin(layer);
    while (left > 0) {
      const std::size_t bytes = std::min(left, kChunkBytesMax);
      sizes.push_back(static_cast<std::uint32_t>(bytes));
      left -= bytes;
    }
  }
  return sizes;
}

PutProgress::PutProgress(const PutPath& path, const KvGeometry& geometry,
                         std::shared_ptr<const FrameCodec> codec, int coding_threads,
                         PathEncoder::ReferencesOf references_of)
    : path_(path),
      geometry_(geometry),
      references_of_(std::move(references_of)),
      chunk_bytes_(PutChunkBytes(geometry)),
      blocks_(path.blocks.size()),
      settled_(path.blocks.size(), false),
      missing_(path.blocks.size(), true),
      offered_(path.blocks.size()),
      unsettled_(path.blocks.size()) {
  std::size_t chunk_offset = 0;
  for (const std::uint32_t bytes : chunk_bytes_) {
    chunk_offsets_.push_back(chunk_offset);
    chunk_offset += bytes;
  }
  const std::size_t full_blocks = path.path.tokens.size() / geometry.block_tokens();
  const std::size_t with_tokens =
      full_blocks > path.first_block ? full_blocks - path.first_block : 0;
  for (std::size_t i = 0; i < path.blocks.size(); ++i) {
    if (i < with_tokens && HasRightSize(path.blocks[i].size())) continue;
    offered_ = i;
    break;
  }
  if (codec != nullptr) {
    encoder_.emplace(path_, geometry.block_tokens(), std::move(codec), coding_threads);
  }
  for (std::size_t i = offered_; i < path.blocks.size(); ++i) {
    std::string what = "it follows a block that was refused";
    if (i >= with_tokens) {
      what = "the path has no tokens for it";
    } else if (!HasRightSize(path.blocks[i].size())) {
      what = path.form == BlockForm::kRaw
                 ? absl::StrCat("it has ", path.blocks[i].size(),
                                " bytes, the model's blocks have ", geometry.raw_block_bytes())
                 : absl::StrCat("it has ", path.blocks[i].size(), " bytes; a frame has 1 to ",
                                kFrameBytesMax);
    }
    Settle(static_cast<std::uint32_t>(i),
           absl::InvalidArgumentError(absl::StrCat("block ", path.first_block + i, ": ", what)),
           /*duplicate=*/false);
  }
}

bool PutProgress::HasRightSize(std::size_t bytes) const {
  return path_.form == BlockForm::kRaw ? bytes == geometry_.raw_block_bytes()
                                       : bytes > 0 && bytes <= kFrameBytesMax;
}

bool PutProgress::asks_for_references() const {
  return path_.use_references && encoder_.has_value() && references_of_ != nullptr && !eager_ &&
         path_.quality != Quality::kExact && path_.quality != Quality::kUnrated;
}

std::span<const std::byte> PutProgress::SendingBytes() {
  return encoder_.has_value() ? std::span<const std::byte>(encoder_->Frame(to_send_).bytes)
                              : path_.blocks[to_send_.front()];
}

std::uint32_t PutProgress::ChunkBytesAt(std::uint32_t i, std::size_t offset) const {
  const EncodedFrame* const frame = encoder_.has_value() ? encoder_->frame(i) : nullptr;
  const std::size_t left =
      (frame != nullptr ? frame->bytes.size() : path_.blocks[i].size()) - offset;
  if (sends_frames()) {
    return static_cast<std::uint32_t>(std::min(left, kChunkBytesMax));
  }
  const auto at = std::lower_bound(chunk_offsets_.begin(), chunk_offsets_.end(), offset);
  KV_CHECK(at != chunk_offsets_.end());
  KV_CHECK(*at == offset);
  return chunk_bytes_[static_cast<std::size_t>(at - chunk_offsets_.begin())];
}

v1::PutAnnounce PutProgress::Announce(std::uint64_t put_id) {
  attempt_done_ = false;
  planned_ = false;
  blocks_to_retry_ = false;
  coded_anew_ = false;
  to_send_.clear();

  v1::PutAnnounce announce;
  announce.set_put_id(put_id);
  v1::Prefix* prefix = announce.mutable_prefix();
  prefix->set_model_id(std::string(path_.path.model.view()));
  const std::size_t token_count =
      (path_.first_block + offered_) * std::size_t{geometry_.block_tokens()};
  prefix->set_tokens(path_.path.tokens.data(), token_count * sizeof(TokenId));
  prefix->set_salt(std::string(path_.path.salt));
  for (const ExtraKey& extra : path_.path.extra_keys) {
    if (extra.block_index >= path_.first_block + offered_) break;
    v1::BlockExtraKey* key = prefix->add_extra_keys();
    key->set_block_index(extra.block_index);
    key->set_key(std::string(extra.key));
  }
  announce.set_first_block(path_.first_block);
  announce.set_session_id(std::string(path_.session_id));
  if (path_.probabilities != nullptr) *announce.mutable_probabilities() = *path_.probabilities;
  // The prefix of a piece may end within what these count; what counts more than the path has is
  // the server's to refuse.
  const auto in_prefix = [this](std::uint32_t blocks) {
    const bool is_of_path = blocks <= path_.path.tokens.size() / geometry_.block_tokens();
    return is_of_path ? std::min(blocks, static_cast<std::uint32_t>(path_.first_block + offered_))
                      : blocks;
  };
  announce.set_restored_blocks(in_prefix(path_.restored_blocks));
  announce.set_restored_quality(static_cast<v1::Quality>(path_.restored_quality));
  if (path_.first_reused_block) {
    announce.set_first_reused_block(in_prefix(*path_.first_reused_block));
  }
  announce.set_encoding(sends_frames() ? v1::ENCODING_FRAME : v1::ENCODING_RAW);
  announce.set_quality(static_cast<v1::Quality>(path_.quality));
  announce.set_beside_exact(path_.beside_exact);
  // Only the first attempt is sent blindly: a later one asks what has arrived.
  eager_ = path_.eager && attempts_++ == 0;
  announce.set_eager(eager_);
  announce.set_want_references(asks_for_references());
  announce.set_durable(path_.durable);
  announce.set_ttl_seconds(static_cast<std::uint32_t>(path_.ttl.count()));
  announce.set_priority(path_.priority);
  announce.set_compute_seconds_per_token(path_.compute_seconds_per_token);
  if (eager_) {
    for (std::uint32_t i = 0; i < offered_; ++i) to_send_.push_back(i);
  }
  return announce;
}

void PutProgress::Accept(const v1::PutPlan& plan) {
  if (absl::Status status = FromItem(plan.status()); !status.ok()) {
    attempt_done_ = true;
    to_send_.clear();
    if (IsRetriable(status)) {
      blocks_to_retry_ = true;
    } else {
      FailRest(status);
    }
    return;
  }
  if (plan.block_bytes() != 0 && plan.block_bytes() != geometry_.raw_block_bytes()) {
    FailRest(absl::FailedPreconditionError("the server has another block size for this model"));
    return;
  }
  planned_ = true;
  if (asks_for_references()) encoder_->Follow(plan, references_of_);
  std::fill(missing_.begin(), missing_.end(), false);
  const std::string& wanted = plan.missing_blocks();
  for (std::size_t at = 0; at + sizeof(std::uint32_t) <= wanted.size();
       at += sizeof(std::uint32_t)) {
    const auto index = LoadLittle<std::uint32_t>(wanted.data() + at);
    if (index < path_.first_block || index - path_.first_block >= offered_) continue;
    const std::uint32_t i = index - path_.first_block;
    missing_[i] = true;
    if (!eager_ && !settled_[i]) to_send_.push_back(i);
  }
}

void PutProgress::Accept(const v1::PutAck& ack) {
  if (ack.block_index() < path_.first_block ||
      ack.block_index() - path_.first_block >= blocks_.size()) {
    return;
  }
  const std::uint32_t i = ack.block_index() - path_.first_block;
  if (settled_[i]) return;
  absl::Status status = FromItem(ack.status());
  // What blocks were coded against is no more: once more, without.
  if (absl::IsFailedPrecondition(status) && asks_for_references()) {
    refused_references_ = encoder_->ForgetReferences();
    if (!refused_references_.empty()) {
      references_of_ = nullptr;
      coded_anew_ = true;
    }
  }
  if (IsRetriable(status) || (coded_anew_ && !attempt_done_ && !status.ok())) {
    blocks_to_retry_ = true;
    return;
  }
  if (auto node = TrieNodeId::FromBytes(ack.node_id())) blocks_[i].node = *node;
  Settle(i, std::move(status), ack.duplicate());
}

void PutProgress::Accept(const v1::PutDone&) {
  attempt_done_ = true;
  to_send_.clear();
  for (std::uint32_t i = 0; i < offered_; ++i) {
    if (settled_[i]) continue;
    if (planned_ && !missing_[i]) {
      Settle(i, absl::OkStatus(), /*duplicate=*/true);
    } else if (!blocks_to_retry_) {
      Settle(i, absl::InternalError("the server ended the put without a word on this block"),
             /*duplicate=*/false);
    }
  }
}

void PutProgress::FailRest(const absl::Status& why) {
  KV_CHECK(!why.ok());
  to_send_.clear();
  attempt_done_ = true;
  for (std::uint32_t i = 0; i < blocks_.size(); ++i) {
    if (!settled_[i]) Settle(i, why, /*duplicate=*/false);
  }
}

void PutProgress::Settle(std::uint32_t i, absl::Status status, bool duplicate) {
  blocks_[i].status = std::move(status);
  blocks_[i].duplicate = duplicate;
  settled_[i] = true;
  --unsettled_;
}

PutReport PutProgress::TakeReport() {
  KV_CHECK(done());
  PutReport report;
  report.blocks = std::move(blocks_);
  for (std::uint32_t i = 0; encoder_.has_value() && i < report.blocks.size(); ++i) {
    const EncodedFrame* const frame = encoder_->frame(i);
    if (frame == nullptr) continue;
    report.blocks[i].frame_bytes = frame->bytes.size();
    report.blocks[i].quality = frame->quality;
    report.blocks[i].codec = frame->codec;
  }
  for (const PutBlockReport& block : report.blocks) {
    if (!block.status.ok()) continue;
    ++report.stored_blocks;
    if (block.duplicate) ++report.duplicate_blocks;
  }
  return report;
}

}  // namespace kvtrie
