#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/codec/residual_entropy.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"
#include "storage/kv/quality.h"

namespace kvtrie {

// What the codec knows of one model: how K and V of a layer follow from what is decoded before
// them, what an error in them costs, and how the symbols that are left are distributed. Fitted once
// (residual_fit.h), then immutable. PROFILE.md describes its bytes.
//
// A *plane* is K or V of one layer; planes are numbered in decode order, K before V. Its components
// are [KV head][dim], K before RoPE. A plane is cut into blocks of equal size (one, or one per KV
// head), and matrices join components of the same block only.

// What a prediction reads; each stands for the planes that are named, in that order.
enum class PredictorInput : std::uint8_t {
  kLayerBelow = 1,  // K and V of the layer below
  kTwoBelow = 2,    // K and V of the layer below that
  kFirstLayer = 3,  // K and V of layer 0: what there is of the token itself
  kSameLayerK = 4,  // K of this layer, for its V
};

struct PlaneShape {
  std::uint32_t layer = 0;
  bool is_v = false;
  std::uint32_t heads = 0;
  std::uint32_t head_dim = 0;

  std::uint32_t components() const { return heads * head_dim; }
  KvKind kind() const { return is_v ? KvKind::kV : KvKind::kK; }
  bool operator==(const PlaneShape&) const = default;
};

struct PlaneProfile {
  std::uint32_t block_count = 1;  // divides heads, or is 1
  std::vector<PredictorInput> inputs;

  // Prediction: bias + weight_scales * (weights . codes of the inputs), codes being what
  // input_scales make of a restored row: clamp(round((x - bias) / input_scale), -127, 127).
  std::vector<float> bias;           // [components]
  std::vector<float> input_scales;   // [components], this plane as an input of others
  std::vector<std::int8_t> weights;  // [block][component of it][input of it], |w| <= 63
  std::vector<float> weight_scales;  // [components]

  // Residual: sum over values of value * basis_scale * basis row. A block has as many values as
  // components; they come in falling order of what they carry.
  std::vector<std::int8_t> basis;   // [block][value][component]
  std::vector<float> basis_scales;  // [values]

  // For exact frames, whose numbers are coded in cells (predicted_entropy.h): exponent of the
  // width, and scale index of the difference of cells.
  std::vector<std::int8_t> cell_exponents;  // [components]
  std::vector<std::uint8_t> cell_scales;    // [components]

  std::uint32_t exponent_table = 0;  // below exponent_table_count
  // Per level: scale index of each value, or kNotCoded where all are zero.
  std::vector<std::vector<std::uint8_t>> scales;
};

struct ResidualLevel {
  Quality quality = Quality::kHigh;
  float step = 0;                 // base step, in units of the metric
  float rate_weight = 0;          // of bits against squared error in steps, when values are chosen
  float importance_strength = 0;  // exponent = strength * log2(importance) * 2, rounded
  // As measured at calibration, on texts that nothing was fitted to.
  float bits_per_component = 0;
  float mean_kl = 0;
  float kl_p99 = 0;
};

// Log importance of a token for one plane and group: weights . features (importance.h).
struct ImportanceModel {
  std::uint32_t query_heads = 0;  // 0: none, all exponents are 0
  // [layer][query head][k_head_dim]: mean of the queries before RoPE; and factors of their
  // covariance, [layer][query head][rank][k_head_dim].
  std::uint32_t covariance_rank = 0;
  std::vector<float> query_means;
  std::vector<float> query_factors;
  std::vector<float> normalizers;  // [layer][distance][query head]
  std::vector<float> weights;      // [plane][group][feature]
};

struct ResidualProfile {
  CodecKey codec_key;
  std::vector<PlaneShape> planes;
  std::uint32_t group_count = 0;  // of step exponents per plane: 0, 1, or block_count
  std::vector<ResidualLevel> levels;
  std::vector<PlaneProfile> plane_profiles;  // [plane]

  // Frequencies out of 4096.
  std::vector<std::uint16_t> class_frequencies;     // [kScaleClasses][kResidualSymbols]
  std::vector<std::uint16_t> exponent_frequencies;  // [table][kExponentSymbols]
  std::vector<std::uint16_t> expected;              // [kScaleIndexMax + 1]
  std::vector<float> offsets;                       // [kScaleClasses][kRestoredOffsets]
  std::vector<std::uint16_t> carried;               // [2 * kScaleShiftMax + 1]
  std::uint16_t prior = 0;

  // Rows of layer 0 for frequent tokens, ascending ids; the others are predicted by the bias.
  std::vector<TokenId> table_tokens;
  std::vector<std::int8_t>
      table_rows;  // [token][K components, V components of layer 0], input codes

  // K and V of all planes for this token at position 0, where it depends on nothing else.
  bool has_first_token = false;
  TokenId first_token = 0;
  std::vector<float> first_rows;  // [component of all planes]

  ImportanceModel importance;

  // How differences to references are coded, or nothing: a profile whose rows are not K and V but
  // what they differ by from the reference's. It has these planes and qualities, no token table, no
  // first token, no importance model and no differences of its own; its group_count is 0, or this
  // one's.
  std::vector<ResidualProfile> differences;  // one at most

  // The body of a profile's bytes, behind the header (profile_header.h).
  // REQUIRES: CheckConsistency() is OK.
  std::string EncodeBody() const;
  // Levels come without their measured figures, which are in the header. DataLoss unless `body` is
  // exactly one consistent profile. Memory is taken in proportion to the bytes that are there.
  static absl::StatusOr<ResidualProfile> DecodeBody(std::string_view body);

  // InvalidArgument names what does not fit together.
  absl::Status CheckConsistency() const;

  std::size_t component_count() const;  // of all planes
};

// The planes of a model, in decode order.
std::vector<PlaneShape> PlanesOf(const ModelSpec& spec);
// Of K and V of layer 0: the width of a row of the token table.
std::size_t FirstLayerComponents(std::span<const PlaneShape> planes);

// Sum over the planes that an input stands for, given the planes before; 0 where there are none.
// `plane` reads nothing that is decoded after it.
std::vector<std::uint32_t> InputPlanes(std::span<const PlaneShape> planes, std::uint32_t plane,
                                       std::span<const PredictorInput> inputs);

}  // namespace kvtrie
