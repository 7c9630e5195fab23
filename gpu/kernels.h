#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "gpu/scalar_math.h"
#include "gpu/symbol_math.h"
#include "storage/codec/host_device_code.h"
#include "storage/codec/importance_constants.h"
#include "storage/codec/portable_math.h"
#include "storage/codec/symbol_constants.h"

// The loops of a device, each written once: cuda_kernels.cu runs the bodies in threads,
// host_device.cc in loops. C++17, no Abseil.
//
// Pointers are to device memory. A *row* is a token of a batch: each block has `row_groups` groups
// of 16 rows, of which the first block_tokens are tokens. Sizes are the caller's word; bytes that
// come from bodies are the words of symbols alone, and no address depends on more than their
// number.
namespace kvtrie::gpu {

// Cosines and sines by which RoPE turns each row: [row][pair].
struct AnglesArgs {
  const double* frequencies = nullptr;             // [pair] radians per position
  const std::uint32_t* first_positions = nullptr;  // [block]
  float* cosines = nullptr;
  float* sines = nullptr;
  std::uint32_t pairs = 0;
  std::uint32_t rows_of_block = 0;
  std::uint32_t row_count = 0;
};
KV_HOST_DEVICE inline void AnglesStep(const AnglesArgs& args, std::uint32_t row,
                                      std::uint32_t pair) {
  const double position = static_cast<double>(args.first_positions[row / args.rows_of_block]) +
                          static_cast<double>(row % args.rows_of_block);
  const SineAndCosine of = PortableSineAndCosine(position * args.frequencies[pair]);
  const std::size_t at = std::size_t{row} * args.pairs + pair;
  args.cosines[at] = static_cast<float>(of.cosine);
  args.sines[at] = static_cast<float>(of.sine);
}

// Where a plane's numbers lie in raw KV, and how its rows become them.
struct RawPlane {
  std::uint8_t* raw = nullptr;     // of the first block
  std::size_t block_stride = 0;    // bytes from one block to the next
  const float* cosines = nullptr;  // [row][pair]; null: rows are not turned
  const float* sines = nullptr;
  std::uint32_t pairs = 0;
  std::uint32_t components = 0;
  std::uint32_t head_dim = 0;
  std::uint32_t rows_of_block = 0;
  std::uint32_t block_tokens = 0;
  NumberType type = NumberType::kFloat32;
  bool interleaved = false;
};

// A component of a row, turned. at(component): those of the row.
template <typename At>
KV_HOST_DEVICE inline float Turned(const RawPlane& plane, std::uint32_t row,
                                   std::uint32_t component, float direction, const At& at) {
  const float x = at(component);
  const std::uint32_t dim = component % plane.head_dim;
  if (plane.cosines == nullptr || dim >= 2 * plane.pairs) return x;
  const PairOfDimension of = PairOf(dim, plane.pairs, plane.interleaved);
  const std::size_t angle = std::size_t{row} * plane.pairs + of.pair;
  return TurnedComponent(x, at(component - dim + of.partner), of.is_first, plane.cosines[angle],
                         plane.sines[angle], direction);
}

// Rows to raw KV.
struct WriteRawArgs {
  RawPlane plane;
  const float* rows = nullptr;                // [row][component]
  const float* first_row = nullptr;           // of the profile's first token
  const std::uint8_t* first_flags = nullptr;  // [block] whether token 0 is that
  std::uint32_t row_count = 0;
};
struct RowReader {
  const float* row;
  KV_HOST_DEVICE float operator()(std::uint32_t component) const { return row[component]; }
};
KV_HOST_DEVICE inline void WriteRawStep(const WriteRawArgs& args, std::uint32_t row,
                                        std::uint32_t component) {
  const RawPlane& plane = args.plane;
  const std::uint32_t block = row / plane.rows_of_block;
  const std::uint32_t token = row % plane.rows_of_block;
  if (token >= plane.block_tokens) return;
  const bool is_first = token == 0 && args.first_flags[block] != 0;
  const RowReader at{is_first ? args.first_row : args.rows + std::size_t{row} * plane.components};
  StoreNumber(plane.type, Turned(plane, row, component, -1.0f, at),
              plane.raw + block * plane.block_stride,
              std::size_t{token} * plane.components + component);
}

struct RawReader {
  const std::uint8_t* raw;
  std::size_t first;
  NumberType type;
  KV_HOST_DEVICE float operator()(std::uint32_t component) const {
    return LoadNumber(type, raw, first + component);
  }
};

// Marks rows with a number that is not finite or not below the limit.
struct FindExtremesArgs {
  RawPlane plane;
  float limit = 0;
  std::uint8_t* extreme = nullptr;  // [row], left as it was where there is none
  std::uint32_t row_count = 0;
};
KV_HOST_DEVICE inline void FindExtremesStep(const FindExtremesArgs& args, std::uint32_t row,
                                            std::uint32_t component) {
  const RawPlane& plane = args.plane;
  const std::uint32_t token = row % plane.rows_of_block;
  if (token >= plane.block_tokens) return;
  const float x = LoadNumber(plane.type, plane.raw + row / plane.rows_of_block * plane.block_stride,
                             std::size_t{token} * plane.components + component);
  if (!(FloatOf(BitsOf(x) & (kFloatSignBit - 1)) < args.limit)) args.extreme[row] = 1;
}

// Codes of a plane's inputs, block by block and one input behind the other: [block of the plane]
// [row][input of it], with zeros up to `in_stride`. One call makes four bytes.
inline constexpr std::uint32_t kInputPlanesMax = 16;
struct GatherArgs {
  const std::int8_t* codes[kInputPlanesMax] = {};  // [row][component] of each input
  std::uint32_t widths[kInputPlanesMax] = {};      // components of one block
  std::uint32_t input_count = 0;
  std::uint32_t in_stride = 0;  // a multiple of 4
  std::uint32_t plane_blocks = 0;
  std::uint32_t row_count = 0;
  std::int8_t* gathered = nullptr;
};
KV_HOST_DEVICE inline void GatherStep(const GatherArgs& args, std::uint32_t plane_block,
                                      std::uint32_t row, std::uint32_t quad) {
  const std::uint32_t from = quad * 4;
  std::int8_t* const to =
      args.gathered + (std::size_t{plane_block} * args.row_count + row) * args.in_stride + from;
  const std::size_t block = std::size_t{row} * args.plane_blocks + plane_block;
  std::uint32_t input = 0, at = from;
  while (input < args.input_count && at >= args.widths[input]) at -= args.widths[input++];
  if (input < args.input_count && args.widths[input] % 4 == 0 && at % 4 == 0) {
    const std::int8_t* const codes = args.codes[input] + block * args.widths[input] + at;
    *reinterpret_cast<std::uint32_t*>(to) = *reinterpret_cast<const std::uint32_t*>(codes);
    return;
  }
  // One by one: parts of an input that is no multiple of 4 wide, or what is behind the last.
  for (std::uint32_t i = 0; i < 4; ++i) {
    while (input < args.input_count && at == args.widths[input]) {
      at = 0;
      ++input;
    }
    to[i] = input < args.input_count ? args.codes[input][block * args.widths[input] + at++]
                                     : std::int8_t{0};
  }
}

// What is known of a plane's rows before they are decoded.
struct Prediction {
  const std::int32_t* products = nullptr;  // [block of the plane][row][component of it]; or null
  std::uint32_t out_stride = 0;            // from one row of products to the next
  const std::int32_t* sums = nullptr;      // [component]; RowOfProduct
  const float* offset = nullptr;           // [component]
  const float* scale = nullptr;            // [component]
  // In layer 0: rows of the token table, and which of them a row begins with (-1: none).
  const std::int32_t* table_entries = nullptr;  // [row], or null
  const std::int8_t* table_rows = nullptr;      // from this plane's first component on
  std::uint32_t table_width = 0;
  const float* input_scales = nullptr;  // [component]
  std::uint32_t components = 0;
  std::uint32_t block_components = 0;
  std::uint32_t row_count = 0;
};
KV_HOST_DEVICE inline float Predicted(const Prediction& of, std::uint32_t row,
                                      std::uint32_t component) {
  float x = of.offset[component];
  if (of.products != nullptr) {
    const std::uint32_t block = component / of.block_components;
    const std::size_t at = (std::size_t{block} * of.row_count + row) * of.out_stride +
                           (component - block * of.block_components);
    x = RowOfProduct(of.products[at], of.sums[component], x, of.scale[component]);
  }
  if (of.table_entries != nullptr && of.table_entries[row] >= 0) {
    const std::size_t at =
        static_cast<std::size_t>(of.table_entries[row]) * of.table_width + component;
    x += of.input_scales[component] * static_cast<float>(of.table_rows[at]);
  }
  return x;
}

// Restored rows, and their codes: what is predicted and, value by value, the residual. One call
// makes a component of kTileRows rows.
inline constexpr std::uint32_t kTileRows = 8;
struct alignas(16) FourFloats {
  float x[4];
};
struct RestoreRowsArgs {
  Prediction prediction;
  const float* values = nullptr;          // [value][row], aligned to 16 bytes
  const std::uint8_t* scales = nullptr;   // [value]; where kNotCoded stands, values are 0
  const std::int8_t* basis = nullptr;     // [block of the plane][value of it][component of it]
  const float* basis_scales = nullptr;    // [value]
  const float* bias = nullptr;            // [component]
  const float* inverse_scales = nullptr;  // [component]
  float* rows = nullptr;                  // [row][component], or null
  std::int8_t* codes = nullptr;           // [row][component]
};
KV_HOST_DEVICE inline void RestoreRowsStep(const RestoreRowsArgs& args, std::uint32_t tile,
                                           std::uint32_t component) {
  const Prediction& of = args.prediction;
  const std::uint32_t row = tile * kTileRows;
  float x[kTileRows];
  for (std::uint32_t i = 0; i < kTileRows; ++i) x[i] = Predicted(of, row + i, component);
  const std::uint32_t first = component / of.block_components * of.block_components;
  const std::int8_t* direction =
      args.basis + std::size_t{first} * of.block_components + (component - first);
  for (std::uint32_t v = 0; v < of.block_components; ++v) {
    if (args.scales[first + v] == kNotCoded) continue;
    const float along = args.basis_scales[first + v] *
                        static_cast<float>(direction[std::size_t{v} * of.block_components]);
    // Of all rows of the tile, as a device reads them: in pieces of 16 bytes.
    const auto* const values = reinterpret_cast<const FourFloats*>(
        args.values + std::size_t{first + v} * of.row_count + row);
    for (std::uint32_t i = 0; i < kTileRows / 4; ++i) {
      const FourFloats four = values[i];
      for (std::uint32_t j = 0; j < 4; ++j) {
        // Adding nothing would make +0 of -0.
        if (four.x[j] != 0) x[4 * i + j] += four.x[j] * along;
      }
    }
  }
  for (std::uint32_t i = 0; i < kTileRows; ++i) {
    const std::size_t at = std::size_t{row + i} * of.components + component;
    if (args.rows != nullptr) args.rows[at] = x[i];
    args.codes[at] = CodeOfRow(x[i], args.bias[component], args.inverse_scales[component]);
  }
}

// What there is to code: the raw KV's rows, K before RoPE, less what is predicted.
struct ResidualArgs {
  RawPlane plane;
  Prediction prediction;
  float* residual = nullptr;  // [row][component]
};
KV_HOST_DEVICE inline void ResidualStep(const ResidualArgs& args, std::uint32_t row,
                                        std::uint32_t component) {
  const RawPlane& plane = args.plane;
  const std::uint32_t token = row % plane.rows_of_block;
  float residual = 0;
  if (token < plane.block_tokens) {
    const RawReader at{plane.raw + row / plane.rows_of_block * plane.block_stride,
                       std::size_t{token} * plane.components, plane.type};
    residual = Turned(plane, row, component, 1.0f, at) - Predicted(args.prediction, row, component);
  }
  args.residual[std::size_t{row} * plane.components + component] = residual;
}

// Raw KV as rows, K before RoPE.
struct ReadRowsArgs {
  RawPlane plane;
  float* rows = nullptr;  // [row][component], 0 behind a block's tokens
  std::uint32_t row_count = 0;
};
KV_HOST_DEVICE inline void ReadRowsStep(const ReadRowsArgs& args, std::uint32_t row,
                                        std::uint32_t component) {
  const RawPlane& plane = args.plane;
  const std::uint32_t token = row % plane.rows_of_block;
  float x = 0;
  if (token < plane.block_tokens) {
    const RawReader at{plane.raw + row / plane.rows_of_block * plane.block_stride,
                       std::size_t{token} * plane.components, plane.type};
    x = Turned(plane, row, component, 1.0f, at);
  }
  args.rows[std::size_t{row} * plane.components + component] = x;
}

// The features of importance of one layer, as ImportanceEstimator has them: [row][feature], first
// those of attention, [distance][all heads, each head], then those of energy, [K, V][all heads,
// each head]. Heads that the layer has not are left as they are.
inline constexpr std::uint32_t kImportanceItems = kImportanceDistanceCount + 2;  // of a head
struct ImportanceLayerArgs {
  const float* k_rows = nullptr;       // [row][component]
  const float* v_rows = nullptr;       // likewise; null: the layer has no V
  const float* matrix = nullptr;       // [KV head][column][k_head_dim], ScoreMatrix's columns
  const float* normalizers = nullptr;  // [distance][query head]
  float* features = nullptr;
  float* mean = nullptr;  // [row][feature of attention] over layers, which add to it one by one
  std::uint32_t layer_count = 0;
  std::uint32_t k_head_dim = 0;
  std::uint32_t v_head_dim = 0;
  std::uint32_t heads = 0;
  std::uint32_t heads_max = 0;  // of any layer
  std::uint32_t query_heads = 0;
  std::uint32_t rank = 0;
  std::uint32_t row_count = 0;
};
KV_HOST_DEVICE inline std::uint32_t LayerFeatureCount(std::uint32_t heads_max) {
  return kImportanceItems * (1 + heads_max);
}
// Of one head: the expected attention at one distance, or an energy, before their logarithms.
KV_HOST_DEVICE inline void ImportanceItemStep(const ImportanceLayerArgs& args, std::uint32_t row,
                                              std::uint32_t head_item) {
  const std::uint32_t head = head_item / kImportanceItems;
  const std::uint32_t item = head_item % kImportanceItems;
  float result = 0;
  if (item < kImportanceDistanceCount) {
    const std::uint32_t dim = args.k_head_dim;
    const std::uint32_t queries = args.query_heads / args.heads;
    const std::uint32_t columns = queries * (1 + args.rank);  // of a distance
    const float* const k = args.k_rows + (std::size_t{row} * args.heads + head) * dim;
    const float* column =
        args.matrix + (std::size_t{head} * kImportanceDistanceCount + item) * columns * dim;
    for (std::uint32_t q = 0; q < queries; ++q) {
      float score = 0;
      for (std::uint32_t r = 0; r < 1 + args.rank; ++r, column += dim) {
        float product = 0;
        for (std::uint32_t i = 0; i < dim; ++i) product += k[i] * column[i];
        score += r == 0 ? product - args.normalizers[item * args.query_heads + head * queries + q]
                        : product * product;
      }
      score = score < kScoreMin ? kScoreMin : score;
      result += std::exp(score > kScoreMax ? kScoreMax : score);
    }
  } else {
    const bool is_v = item != kImportanceDistanceCount;
    const float* const rows = is_v ? args.v_rows : args.k_rows;
    const std::uint32_t dim = is_v ? args.v_head_dim : args.k_head_dim;
    for (std::uint32_t i = 0; rows != nullptr && i < dim; ++i) {
      const float x = rows[(std::size_t{row} * args.heads + head) * dim + i];
      result += x * x;
    }
  }
  args.features[std::size_t{row} * LayerFeatureCount(args.heads_max) + item * (1 + args.heads_max) +
                1 + head] = result;
}
// Of one item: the sum over heads, and the logarithms.
KV_HOST_DEVICE inline void ImportanceLogStep(const ImportanceLayerArgs& args, std::uint32_t row,
                                             std::uint32_t item) {
  float* const of_item = args.features + std::size_t{row} * LayerFeatureCount(args.heads_max) +
                         item * (1 + args.heads_max);
  const bool is_attention = item < kImportanceDistanceCount;
  const bool is_there = item != kImportanceItems - 1 || args.v_rows != nullptr;
  const float floor = is_attention ? kAttentionFloor : kEnergyFloor;
  float sum = 0;
  for (std::uint32_t head = 0; head < args.heads; ++head) {
    float& own = of_item[1 + head];
    sum += own;
    const float mean = is_attention ? own / static_cast<float>(args.query_heads / args.heads) : own;
    own = is_there ? std::log(mean + floor) : 0.0f;
  }
  of_item[0] = std::log((is_attention ? sum / static_cast<float>(args.query_heads) : sum) + floor);
  if (!is_attention) return;
  float* const mean =
      args.mean + (std::size_t{row} * kImportanceDistanceCount + item) * (1 + args.heads_max);
  for (std::uint32_t i = 0; i < 1 + args.heads_max; ++i) {
    mean[i] += of_item[i] / static_cast<float>(args.layer_count);
  }
}

// Step exponents of one plane, from the features of all layers.
struct ExponentsArgs {
  const float* features = nullptr;        // [layer][row][feature]
  const float* mean = nullptr;            // [row][feature of attention]
  const float* weights = nullptr;         // [group][feature], as ImportanceModel has them
  const std::uint32_t* behind = nullptr;  // [row] tokens
  const std::int8_t* given = nullptr;     // [row] an exponent, or kNoExponent
  std::int8_t* exponents = nullptr;       // [row / 16][group][row % 16]
  float strength = 0;
  std::uint32_t layer = 0;
  std::uint32_t layer_count = 0;
  std::uint32_t heads_max = 0;
  std::uint32_t groups = 0;
  std::uint32_t row_count = 0;
};
inline constexpr std::int8_t kNoExponent = 127;
KV_HOST_DEVICE inline void ExponentsStep(const ExponentsArgs& args, std::uint32_t row,
                                         std::uint32_t group) {
  const std::uint32_t own_count = LayerFeatureCount(args.heads_max);
  const std::uint32_t shared_count = kImportanceDistanceCount * (1 + args.heads_max);
  const auto of_layer = [&](std::uint32_t layer) {
    return args.features + (std::size_t{layer} * args.row_count + row) * own_count;
  };
  std::int8_t exponent = args.given[row];
  if (exponent == kNoExponent) {
    const float* weight = args.weights + std::size_t{group} * (own_count + 3 * shared_count + 3);
    float log_importance = 0;
    const float* const own = of_layer(args.layer);
    for (std::uint32_t f = 0; f < own_count; ++f) log_importance += *weight++ * own[f];
    const float* const mean = args.mean + std::size_t{row} * shared_count;
    for (std::uint32_t f = 0; f < shared_count; ++f) log_importance += *weight++ * mean[f];
    const float* const below = of_layer(args.layer == 0 ? 0 : args.layer - 1);
    for (std::uint32_t f = 0; f < shared_count; ++f) log_importance += *weight++ * below[f];
    const float* const above =
        of_layer(args.layer + 1 < args.layer_count ? args.layer + 1 : args.layer_count - 1);
    for (std::uint32_t f = 0; f < shared_count; ++f) log_importance += *weight++ * above[f];
    const float behind = std::log(static_cast<float>(args.behind[row] < 1 ? 1 : args.behind[row]));
    log_importance += *weight++ * behind;
    log_importance += *weight++ * (behind * behind);
    log_importance += *weight;
    constexpr auto kMost = static_cast<float>(kExponentMax);
    // A number that is none is the least important.
    float quarters = 2 * args.strength * log_importance / 0.693147182f;  // float32 of ln 2
    quarters = quarters > -kMost ? quarters : -kMost;
    quarters = quarters < kMost ? quarters : kMost;
    exponent = static_cast<std::int8_t>(std::rint(quarters));
  }
  args.exponents[(std::size_t{row} / kLanes * args.groups + group) * kLanes + row % kLanes] =
      exponent;
}

// The part of a profile that chooses symbols, for one plane at one level.
struct PlaneSymbols {
  const SymbolTable* tables = nullptr;      // [kScaleClasses], then those of exponents
  const std::uint16_t* expected = nullptr;  // [kScaleIndexMax + 1]
  const std::uint16_t* carried = nullptr;   // [2 * kScaleShiftMax + 1]
  const float* offsets = nullptr;           // [kScaleClasses][kRestoredOffsets]
  const float* thresholds = nullptr;        // the same, to encode
  const std::uint8_t* scales = nullptr;     // [value], or kNotCoded
  std::uint32_t components = 0;
  std::uint32_t block_components = 0;
  std::uint32_t exponent_groups = 0;
  std::uint32_t exponent_table = 0;  // among tables
  std::int32_t prior = 1;
  float step = 0;
};
KV_HOST_DEVICE inline std::uint32_t ExponentGroupOf(const PlaneSymbols& of, std::uint32_t value) {
  return of.exponent_groups > 1 ? value / of.block_components : 0;
}

// One of the 16 lanes of a block while a plane is decoded or encoded.
struct Lane {
  std::uint32_t index = 0;
  std::uint32_t state = kRansStateMin;
  bool active = false;  // of the tokens at hand
  bool with_bits = false;
  bool escaped = false;
  bool negative = false;
  std::int32_t exponent = 0;
  std::int32_t scale = 0;
  std::int32_t half = 0;
  std::int32_t value = 0;
  std::int32_t shift = 0;
  Energy energy;
  RansSlots slots;
  bool puts = false;  // codes `slots` next
};

// Decodes a plane of one block. A Team is 16 lanes that go together:
//   Each(f)       f(lane) for each lane
//   Any(f)        whether f(lane) holds in any lane; of other blocks too, where these go along
//   TakeWords()   lanes whose state is below kRansStateMin take words, in the order of lanes
struct DecodePlaneArgs {
  PlaneSymbols symbols;
  const std::uint16_t* words = nullptr;        // of all blocks
  const std::uint32_t* word_begins = nullptr;  // [block + 1]
  const std::uint16_t* active = nullptr;       // [block][row group]
  std::uint32_t* states = nullptr;             // [block][16]
  std::uint32_t* taken = nullptr;              // [block] words; more than there are: damaged
  std::int8_t* exponents = nullptr;            // [block][row group][exponent group][16]
  std::int8_t* shifts = nullptr;               // [block][row group][16]
  float* values = nullptr;                     // [value][row]
  std::uint32_t row_groups = 0;
  std::uint32_t block_count = 0;
};
template <typename Team>
KV_DEVICE_CODE void DecodePlaneStep(const DecodePlaneArgs& args, const SymbolTable* classes,
                                    std::uint32_t block, Team& team) {
  const PlaneSymbols& of = args.symbols;
  for (std::uint32_t group = 0; group < args.row_groups; ++group) {
    const std::uint32_t row_group = block * args.row_groups + group;
    const std::uint32_t mask = block < args.block_count ? args.active[row_group] : 0;
    team.Each([&](Lane& lane) { lane.active = (mask >> lane.index & 1) != 0; });
    if (!team.Any([](const Lane& lane) { return lane.active; })) continue;
    std::int8_t* const exponents =
        args.exponents + std::size_t{row_group} * of.exponent_groups * kLanes;
    std::int8_t* const shifts = args.shifts + std::size_t{row_group} * kLanes;
    float* const values = args.values + std::size_t{row_group} * kLanes;
    const std::size_t row_count = std::size_t{args.block_count} * args.row_groups * kLanes;

    for (std::uint32_t j = 0; j < of.exponent_groups; ++j) {
      team.Each([&](Lane& lane) {
        if (!lane.active) return;
        const RansStep step = DecodeSymbol(of.tables[of.exponent_table], lane.state);
        lane.state = step.state;
        std::int8_t& exponent = exponents[j * kLanes + lane.index];
        exponent = static_cast<std::int8_t>(
            Clamp(exponent + static_cast<std::int32_t>(step.symbol) - kExponentDeltaMax,
                  -kExponentMax, kExponentMax));
      });
      team.TakeWords();
    }

    team.Each([&](Lane& lane) {
      if (!lane.active) return;
      lane.energy.seen = of.carried[shifts[lane.index] + kScaleShiftMax];
      lane.energy.expected = of.prior;
      lane.exponent = 0;
    });
    for (std::uint32_t v = 0; v < of.components; ++v) {
      const std::uint32_t scale = of.scales[v];
      if (scale == kNotCoded) continue;
      team.Each([&](Lane& lane) {
        lane.with_bits = lane.escaped = false;
        if (!lane.active) return;
        if (of.exponent_groups > 0) {
          lane.exponent = exponents[ExponentGroupOf(of, v) * kLanes + lane.index];
        }
        lane.scale = ClampScale(static_cast<std::int32_t>(scale) + 2 * lane.exponent);
        lane.half = ClampScale(lane.scale + ShiftOf(lane.energy)) / 2;
        const RansStep step = DecodeSymbol(classes[TableOf(lane.half)], lane.state);
        lane.state = step.state;
        lane.value = static_cast<std::int32_t>(step.symbol) - kSymbolMax;
        lane.escaped = step.symbol == kEscape;
        lane.with_bits = !lane.escaped && lane.half >= kScaleClasses;
      });
      team.TakeWords();
      if (team.Any([](const Lane& lane) { return lane.with_bits; })) {
        team.Each([&](Lane& lane) {
          if (!lane.with_bits) return;
          const std::int32_t low = LowBitsOf(lane.half);
          const RansStep step = DecodeBits(static_cast<std::uint32_t>(low), lane.state);
          lane.state = step.state;
          lane.value = lane.value * (1 << low) + static_cast<std::int32_t>(step.symbol);
        });
        team.TakeWords();
      }
      if (team.Any([](const Lane& lane) { return lane.escaped; })) {
        // Sign, low bits, high bits.
        for (std::uint32_t part = 0; part < 3; ++part) {
          team.Each([&](Lane& lane) {
            if (!lane.escaped) return;
            const RansStep step = DecodeBits(part == 0 ? 1 : 12, lane.state);
            lane.state = step.state;
            const auto bits = static_cast<std::int32_t>(step.symbol);
            if (part == 0) {
              lane.negative = bits != 0;
            } else {
              lane.value = part == 1 ? bits : bits * 4096 + lane.value;
            }
          });
          team.TakeWords();
        }
        team.Each([&](Lane& lane) {
          if (lane.escaped && lane.negative) lane.value = -lane.value;
        });
      }
      team.Each([&](Lane& lane) {
        float y = 0;
        if (lane.active) {
          AddEnergy(lane.value, of.expected[lane.scale], lane.energy);
          y = (RestoredValue(of.offsets, lane.half, lane.value) * QuarterOctaves(-lane.exponent)) *
              of.step;
        }
        if (mask != 0) values[v * row_count + lane.index] = y;
      });
    }
    team.Each([&](Lane& lane) {
      if (lane.active) shifts[lane.index] = static_cast<std::int8_t>(ShiftOf(lane.energy));
    });
  }
}

// Quantizes a plane of one row, and leaves the values as they are restored in the place of those
// that were analyzed.
struct QuantizePlaneArgs {
  PlaneSymbols symbols;
  const std::uint8_t* active = nullptr;    // [row]
  const std::int8_t* exponents = nullptr;  // [row group][exponent group][16] of this plane
  std::int8_t* shifts = nullptr;           // [row]
  float* values = nullptr;                 // [value][row]
  std::uint32_t* packed = nullptr;         // [row group][value][16]; PackValue
  // [row] the first plane with values that are out of range, kInRange at first.
  std::uint16_t* out_of_range = nullptr;
  std::uint16_t plane = 0;
  float inverse_step = 0;
  std::uint32_t row_count = 0;
};
inline constexpr std::uint16_t kInRange = 0xFFFF;
KV_HOST_DEVICE inline void QuantizePlaneStep(const QuantizePlaneArgs& args, std::uint32_t row) {
  const PlaneSymbols& of = args.symbols;
  if (args.active[row] == 0) return;
  const std::size_t group = row / kLanes;
  const std::uint32_t lane = row % kLanes;
  const std::int8_t* const exponents = args.exponents + group * of.exponent_groups * kLanes + lane;
  std::uint32_t* const packed = args.packed + group * of.components * kLanes + lane;
  Energy energy;
  energy.seen = of.carried[args.shifts[row] + kScaleShiftMax];
  energy.expected = of.prior;
  bool fits = true;
  for (std::uint32_t v = 0; v < of.components; ++v) {
    float& at = args.values[std::size_t{v} * args.row_count + row];
    const float analyzed = at;
    if (of.scales[v] == kNotCoded) {
      // Written so that NaN does not fit.
      fits &= FloatOf(BitsOf(analyzed) & (kFloatSignBit - 1)) <= of.step * kDroppedMax;
      at = 0;
      continue;
    }
    const float target = analyzed * args.inverse_step;
    fits &= FloatOf(BitsOf(target) & (kFloatSignBit - 1)) < kTargetMax;
    const std::int32_t exponent =
        of.exponent_groups > 0 ? exponents[ExponentGroupOf(of, v) * kLanes] : 0;
    const std::int32_t scale = ClampScale(static_cast<std::int32_t>(of.scales[v]) + 2 * exponent);
    const std::int32_t half = ClampScale(scale + ShiftOf(energy)) / 2;
    const std::int32_t value =
        QuantizeTarget(of.thresholds, half, target * QuarterOctaves(exponent));
    AddEnergy(value, of.expected[scale], energy);
    packed[v * kLanes] = PackValue(value, half);
    at = (RestoredValue(of.offsets, half, value) * QuarterOctaves(-exponent)) * of.step;
  }
  args.shifts[row] = static_cast<std::int8_t>(ShiftOf(energy));
  if (!fits && args.out_of_range[row] == kInRange) args.out_of_range[row] = args.plane;
}

// Encodes a plane of one block, from its last symbol to its first. A Team goes as above, with
//   PutSlots()  lanes that put code their slots; those that are full give a word first, in the
//               order of lanes, in front of the words that are there
struct EncodePlaneArgs {
  PlaneSymbols symbols;
  const std::uint16_t* active = nullptr;   // [block][row group]
  const std::int8_t* exponents = nullptr;  // [block][row group][exponent group][16] of this plane
  const std::int8_t* exponents_before = nullptr;  // of the plane before, or null
  const std::uint32_t* packed = nullptr;          // [block][row group][value][16] of this plane
  std::uint32_t* states = nullptr;                // [block][16]
  std::uint16_t* words = nullptr;                 // [block][capacity], filled from the end
  std::uint32_t capacity = 0;
  std::uint32_t* put = nullptr;  // [block] words; more than the capacity: not all were written
  // [block] set where a table has not a symbol.
  std::uint8_t* impossible = nullptr;
  // [block], how many words there were before this plane; or null.
  std::uint32_t* mark = nullptr;
  std::uint32_t row_groups = 0;
  std::uint32_t block_count = 0;
};
template <typename Team>
KV_DEVICE_CODE void EncodePlaneStep(const EncodePlaneArgs& args, const SymbolTable* classes,
                                    std::uint32_t block, Team& team) {
  const PlaneSymbols& of = args.symbols;
  const auto put_symbol = [&](Lane& lane, const SymbolTable& table, std::uint32_t symbol) {
    lane.slots = SlotsOfSymbol(table, symbol);
    lane.puts = lane.slots.frequency != 0;
    if (!lane.puts) args.impossible[block] = 1;
  };
  for (std::uint32_t group = args.row_groups; group-- > 0;) {
    const std::uint32_t row_group = block * args.row_groups + group;
    const std::uint32_t mask = block < args.block_count ? args.active[row_group] : 0;
    team.Each([&](Lane& lane) { lane.active = (mask >> lane.index & 1) != 0; });
    if (!team.Any([](const Lane& lane) { return lane.active; })) continue;
    const std::uint32_t* const packed =
        args.packed + std::size_t{row_group} * of.components * kLanes;

    for (std::uint32_t v = of.components; v-- > 0;) {
      if (of.scales[v] == kNotCoded) continue;
      team.Each([&](Lane& lane) {
        lane.with_bits = lane.escaped = false;
        if (!lane.active) return;
        const std::uint32_t both = packed[v * kLanes + lane.index];
        lane.value = PackedValue(both);
        lane.half = PackedHalf(both);
        // Of the short value: symbols of the table, or an escape.
        const std::int32_t low = LowBitsOf(lane.half);
        lane.scale = lane.value >> low;
        const SymbolTable& table = classes[TableOf(lane.half)];
        lane.escaped = Magnitude(lane.scale) > table.limit;
        lane.with_bits = !lane.escaped && low > 0;
      });
      if (team.Any([](const Lane& lane) { return lane.escaped; })) {
        for (std::uint32_t part = 3; part-- > 0;) {
          team.Each([&](Lane& lane) {
            lane.puts = lane.escaped;
            if (!lane.escaped) return;
            const auto magnitude = static_cast<std::uint32_t>(Magnitude(lane.value));
            lane.slots = part == 0   ? SlotsOfBits(lane.value < 0 ? 1 : 0, 1)
                         : part == 1 ? SlotsOfBits(magnitude & 0xFFF, 12)
                                     : SlotsOfBits(magnitude >> 12, 12);
          });
          team.PutSlots();
        }
      }
      if (team.Any([](const Lane& lane) { return lane.with_bits; })) {
        team.Each([&](Lane& lane) {
          lane.puts = lane.with_bits;
          if (!lane.with_bits) return;
          const std::int32_t low = LowBitsOf(lane.half);
          lane.slots = SlotsOfBits(static_cast<std::uint32_t>(lane.value) & ((1u << low) - 1),
                                   static_cast<std::uint32_t>(low));
        });
        team.PutSlots();
      }
      team.Each([&](Lane& lane) {
        lane.puts = false;
        if (!lane.active) return;
        put_symbol(lane, classes[TableOf(lane.half)],
                   lane.escaped ? kEscape : static_cast<std::uint32_t>(lane.scale + kSymbolMax));
      });
      team.PutSlots();
    }

    for (std::uint32_t j = of.exponent_groups; j-- > 0;) {
      const std::size_t at = (std::size_t{row_group} * of.exponent_groups + j) * kLanes;
      team.Each([&](Lane& lane) {
        lane.puts = false;
        if (!lane.active) return;
        const std::int32_t before =
            args.exponents_before == nullptr ? 0 : args.exponents_before[at + lane.index];
        put_symbol(lane, of.tables[of.exponent_table],
                   static_cast<std::uint32_t>(args.exponents[at + lane.index] - before +
                                              kExponentDeltaMax));
      });
      team.PutSlots();
    }
  }
}

}  // namespace kvtrie::gpu
