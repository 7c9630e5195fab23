#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "client/model_spec_to_proto.h"
#include "kvtrie/v1/codec.pb.h"
#include "storage/codec/frame_codec.h"
#include "storage/codec/profile_codec.h"
#include "storage/kv/model_spec.h"
#include "tests/storage/codec/plain_profile_bytes.h"
#include "tests/storage/codec/residual_fixture.h"

namespace kvtrie {

// A small model with a real profile, of 16 tokens per block.
inline ModelSpec WorkerSpec() { return SectionedSpec(); }

inline std::string TextOf(std::span<const TokenId> tokens) {
  return {reinterpret_cast<const char*>(tokens.data()), tokens.size_bytes()};
}

// KV of a text of that model, in blocks, with all that it takes to code them here.
class WorkerBlocks {
 public:
  explicit WorkerBlocks(std::size_t block_count, std::uint64_t seed = 7)
      : spec_(WorkerSpec()),
        profile_(ProfileBytes(PlainProfile(spec_))),
        profile_id_(ProfileIdOf(profile_)),
        codec_(spec_, CodecOfProfile(spec_, profile_id_, profile_).value()),
        text_(MakeText(spec_, static_cast<std::uint32_t>(16 * block_count), seed)) {
    for (std::size_t i = 0; i < block_count; ++i) {
      raw_.push_back(CutBlock(spec_, text_, static_cast<std::uint32_t>(16 * i)));
    }
  }

  const ModelSpec& spec() const { return spec_; }
  const std::vector<std::byte>& profile() const { return profile_; }
  const ProfileId& profile_id() const { return profile_id_; }
  const FrameCodec& codec() const { return codec_; }
  std::size_t count() const { return raw_.size(); }
  const std::vector<std::byte>& raw(std::size_t i) const { return raw_[i]; }
  std::size_t raw_bytes() const { return raw_[0].size(); }
  std::span<const TokenId> tokens(std::size_t i) const {
    return std::span(text_.tokens).subspan(16 * i, 16);
  }

  // What a codec in this process makes of a block.
  BlockToEncode Block(std::size_t i) const {
    return {.first_position = static_cast<std::uint32_t>(16 * i),
            .session_tokens = static_cast<std::uint32_t>(16 * (i + 1)),
            .tokens = tokens(i),
            .raw = raw_[i]};
  }
  EncodedFrame Frame(std::size_t i, Quality quality = Quality::kHigh) const {
    const BlockToEncode block = Block(i);
    return codec_.Encode({&block, 1}, quality).value().front();
  }
  std::vector<std::byte> Decoded(std::size_t i, std::span<const std::byte> frame) const {
    std::vector<std::byte> raw(raw_bytes());
    const FrameToDecode to_decode{
        .frame = FrameView::Parse(frame).value(), .tokens = tokens(i), .raw = raw};
    const absl::Status decoded = codec_.Decode({&to_decode, 1});
    EXPECT_TRUE(decoded.ok()) << decoded;
    return raw;
  }

  v1::CodecOpen Open(const std::string& tenant = "") const {
    v1::CodecOpen open;
    *open.mutable_model() = ModelSpecToProto(spec_);
    open.set_tenant(tenant);
    return open;
  }
  v1::CodecItem ToEncode(std::size_t i, v1::Quality quality = v1::QUALITY_HIGH) const {
    v1::CodecItem item;
    item.set_item_id(i);
    item.set_first_position(static_cast<std::uint32_t>(16 * i));
    item.set_tokens(TextOf(tokens(i)));
    item.set_block_bytes(raw_bytes());
    item.set_quality(quality);
    if (quality != v1::QUALITY_EXACT) item.set_profile_id(std::string(profile_id_.view()));
    return item;
  }
  v1::CodecItem ToDecode(std::size_t i, std::size_t frame_bytes) const {
    v1::CodecItem item;
    item.set_item_id(i);
    item.set_first_position(static_cast<std::uint32_t>(16 * i));
    item.set_tokens(TextOf(tokens(i)));
    item.set_block_bytes(frame_bytes);
    return item;
  }

 private:
  const ModelSpec spec_;
  const std::vector<std::byte> profile_;
  const ProfileId profile_id_;
  const FrameCodec codec_;
  const SyntheticText text_;
  std::vector<std::vector<std::byte>> raw_;
};

}  // namespace kvtrie
