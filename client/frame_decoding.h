#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/fetch_assembly.h"
#include "client/fetch_types.h"
#include "client/member_decoding.h"
#include "storage/codec/frame.h"
#include "storage/codec/frame_codec.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// Frames of one Fetch, on their way from a FetchAssembly to raw KV in the targets. Blocks are
// decoded together while others arrive; with FetchOptions::on_layer layer by layer, over all
// blocks.
//
// What a frame says of itself is held against the target and against what the server said of it:
// anything doubtful is a miss. Not thread-safe.
class FrameDecoding {
 public:
  // `targets` and `options` outlive this; targets have tokens and raw memory of the model's sizes.
  FrameDecoding(const ModelSpec& spec, std::span<const FetchTarget> targets,
                const FetchOptions& options, CodecOf codec_of, int threads);

  // Decodes what can be and pays. Frames that are decoded are given back; blocks that cannot be
  // decoded are missed from then on. With `last`, nothing more arrives.
  void Advance(FetchAssembly& assembly, bool last);

  // Blocks that came as they were coded against others: intact, and not decoded. Without
  // FetchOptions::on_layer only.
  std::vector<MemberFrame> TakeMembers() { return std::move(members_); }
  // The codec for frames that name this profile.
  absl::StatusOr<std::shared_ptr<const FrameCodec>> CodecOfProfile(const ProfileId& profile);
  // What decoding took so far, by the codec of the frames; a group that is decoded together counts
  // as its first frame's.
  struct DecodeTime {
    double tokens = 0;
    double seconds = 0;
  };
  const std::map<CodecId, DecodeTime>& decode_times() const { return decode_times_; }

  std::uint64_t decoded_blocks() const { return decoded_blocks_; }
  std::uint64_t undecodable_blocks() const { return undecodable_blocks_; }

 private:
  struct Block {
    bool opened = false;  // its frame has passed Open
    bool closed = false;  // decoded or missed
    std::optional<FrameView> frame;
    std::shared_ptr<const FrameCodec> codec;
    // Layer by layer.
    std::vector<std::uint32_t> section_bytes;
    std::vector<std::uint32_t> layers;  // LayersOfSections
    std::size_t sections = 0;           // that are here and intact
    std::size_t section_end = 0;        // their end in the body
  };
  // Blocks whose layers are decoded together.
  struct Batch {
    std::vector<std::size_t> blocks;
    std::optional<ResidualCodec::Decoder> decoder;  // none: each block by itself
  };

  // Parses a frame whose first section is there, and compares it with what it ought to be.
  absl::Status Open(std::size_t i, const FetchedBlock& said, std::span<const std::byte> bytes);
  void Miss(std::size_t i, absl::Status why, FetchAssembly& assembly);

  // It is decoded, if it is not missed.
  void Close(std::size_t i);

  void AdvanceBlocks(FetchAssembly& assembly, bool last);
  // False: there is nothing to do before more arrives.
  bool DecodeSome(FetchAssembly& assembly, bool last);
  void DecodeWhole(std::span<const std::size_t> blocks, FetchAssembly& assembly);

  void AdvanceLayers(FetchAssembly& assembly, bool last);
  // False: its first section is still to come.
  bool OpenInLayers(std::size_t i, FetchAssembly& assembly);
  void CountSections(std::size_t i, FetchAssembly& assembly);
  void MakeBatches();
  // The next layer of a batch.
  absl::Status DecodeLayer(Batch& batch) const;
  // A decoder of the blocks, after so many layers.
  absl::StatusOr<ResidualCodec::Decoder> StartDecoder(std::span<const std::size_t> blocks,
                                                      std::uint32_t layers) const;
  // That a layer of all batches took.
  void CountLayer(double seconds);
  // Without blocks that are missed, and with one block each where something in it is bad.
  void Repair(Batch batch, bool split, FetchAssembly& assembly, std::vector<Batch>* repaired);
  FrameToDecode ToDecode(std::size_t i) const;

  const ModelSpec& spec_;
  const ModelId model_;
  const KvGeometry geometry_;
  const std::span<const FetchTarget> targets_;
  const FetchOptions& options_;
  const CodecOf codec_of_;
  // Asked for once, misses too: each may be a call to the server.
  std::map<ProfileId, absl::StatusOr<std::shared_ptr<const FrameCodec>>> codecs_;
  const int threads_;

  std::vector<Block> blocks_;
  std::vector<MemberFrame> members_;
  std::size_t first_open_ = 0;  // all before it are closed
  std::vector<Batch> batches_;
  bool batched_ = false;
  std::uint32_t next_layer_ = 0;
  std::map<CodecId, DecodeTime> decode_times_;
  std::uint64_t decoded_blocks_ = 0;
  std::uint64_t undecodable_blocks_ = 0;
};

}  // namespace kvtrie
