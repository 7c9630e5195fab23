#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/kv/ids.h"

namespace kvtrie {

// Values equal those of the protos and are stored. Zero is never valid.
enum class DType : std::uint8_t {
  kFloat32 = 1,
  kFloat16 = 2,
  kBfloat16 = 3,
  kFloat8E4m3 = 4,
  kFloat8E5m2 = 5,
  kInt8 = 6,
  kUint8 = 7,
};
std::size_t DTypeBytes(DType dtype);

enum class RopePairing : std::uint8_t { kNone = 1, kHalfSplit = 2, kInterleaved = 3 };

struct RopeSpec {
  RopePairing pairing = RopePairing::kNone;
  double theta = 0;
  std::uint32_t rotary_dims = 0;  // 0 = all
  std::string scaling;

  bool operator==(const RopeSpec&) const = default;
};

// `layer_count` consecutive layers of one shape. MLA: kv_heads = 1, k_head_dim = latent, v_head_dim
// = 0.
struct LayerRun {
  std::uint32_t layer_count = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t k_head_dim = 0;
  std::uint32_t v_head_dim = 0;

  bool operator==(const LayerRun&) const = default;
};

// Layers that share one attention span (0 = full attention).
struct KvGroup {
  std::vector<LayerRun> layer_runs;
  std::uint32_t window_tokens = 0;

  bool operator==(const KvGroup&) const = default;
};

// Identity of what computed a KV cache (types.proto, ModelSpec, has the meaning and limit of each
// field). One thing has one spec: "not split" is a tensor_parallel_size of 1 here, never 0.
struct ModelSpec {
  std::string name;
  std::string weights_revision;
  std::string tokenizer_digest;
  DType dtype = DType::kBfloat16;
  std::vector<KvGroup> kv_groups;
  RopeSpec rope;
  std::uint32_t tensor_parallel_rank = 0;
  std::uint32_t tensor_parallel_size = 1;
  std::string adapter;
  std::uint32_t block_tokens = 0;
  std::string layout_tag;

  bool operator==(const ModelSpec&) const = default;

  // InvalidArgument names the first field that is out of range.
  absl::Status Validate() const;

  // The bytes that are digested and stored: each field tagged and length-prefixed, so that no two
  // specs have the same bytes.
  std::string Encode() const;

  // DataLoss unless `bytes` is exactly one encoded, valid spec; Unimplemented when a newer release
  // wrote it.
  static absl::StatusOr<ModelSpec> Decode(std::string_view bytes);

  // First 128 bits of SHA-256 of Encode().
  ModelId Digest() const;

  // Digest of what decides the KV values that a codec sees: all fields but block_tokens, dtype and
  // layout_tag, so that one profile serves every way to cut and to store the same KV. First 128
  // bits of SHA-256 of "kvtrie codec key 1" and Encode() of the spec with block_tokens 1, dtype
  // FLOAT32 and no layout_tag.
  kvtrie::CodecKey CodecKey() const;
};

inline constexpr std::uint32_t kLayersMax = 1024;
inline constexpr std::uint32_t kBlockTokensMax = 1024;
inline constexpr std::size_t kRawBlockBytesMax = std::size_t{64} << 20;

// What of a layer a vector is.
enum class KvKind : std::uint8_t { kK = 1, kV = 2 };

// Where the vectors lie in the raw KV of one block: [layer][K, V][token][KV head][dim]. Immutable
// after construction.
class KvGeometry {
 public:
  // REQUIRES: spec.Validate() is OK.
  explicit KvGeometry(const ModelSpec& spec);

  DType dtype() const { return dtype_; }
  std::uint32_t block_tokens() const { return block_tokens_; }
  std::uint32_t layer_count() const { return static_cast<std::uint32_t>(layers_.size()); }
  std::size_t raw_block_bytes() const { return layers_.empty() ? 0 : layers_.back().end; }
  // [begin, end) of a layer within a block.
  std::size_t layer_begin(std::uint32_t layer) const {
    return layer == 0 ? 0 : layers_[layer - 1].end;
  }
  std::size_t layer_end(std::uint32_t layer) const { return layers_[layer].end; }

  std::uint32_t kv_heads(std::uint32_t layer) const { return layers_[layer].kv_heads; }
  // V of a layer with one latent per token (MLA) has no dimension, and no bytes.
  std::uint32_t head_dim(std::uint32_t layer, KvKind kind) const {
    return kind == KvKind::kK ? layers_[layer].k_head_dim : layers_[layer].v_head_dim;
  }
  // Of all KV heads of one token.
  std::uint32_t row_components(std::uint32_t layer, KvKind kind) const {
    return kv_heads(layer) * head_dim(layer, kind);
  }
  // [begin, begin + bytes) of the rows of all tokens of one kind within a block.
  std::size_t kind_begin(std::uint32_t layer, KvKind kind) const {
    return layer_begin(layer) + (kind == KvKind::kV ? kind_bytes(layer, KvKind::kK) : 0);
  }
  std::size_t kind_bytes(std::uint32_t layer, KvKind kind) const {
    return std::size_t{row_components(layer, kind)} * block_tokens_ * DTypeBytes(dtype_);
  }

 private:
  struct Layer {
    std::uint32_t kv_heads;
    std::uint32_t k_head_dim;
    std::uint32_t v_head_dim;
    std::size_t end;
  };

  DType dtype_;
  std::uint32_t block_tokens_;
  std::vector<Layer> layers_;
};

}  // namespace kvtrie
