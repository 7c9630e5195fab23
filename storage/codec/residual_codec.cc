// RESIDUAL.md has the layout of a body.
#include "storage/codec/residual_codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/byte_order.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/codec/codec_kernels.h"
#include "storage/codec/coded_body.h"
#include "storage/codec/frame.h"
#include "storage/codec/importance.h"
#include "storage/codec/plane_transform.h"
#include "storage/codec/rans.h"
#include "storage/codec/raw_kv.h"
#include "storage/codec/residual_entropy.h"
#include "storage/codec/residual_level.h"

namespace kvtrie {
namespace {

// Behind the prologue that all coded bodies share: u8 flags, u8 zero, u16 tokens kept exact, u16
// sections; then for each section u16 layers that are complete with it; then the exact tokens, u16
// each; their raw bytes; the entropy-coded rest.
constexpr std::uint8_t kFirstTokenFromProfile = 1;

// Flags, zero, and two counts.
constexpr std::size_t kFixedHeadBytes = 6;
constexpr std::size_t kExactBytesMax = kSectionBytesMax / 4;

// Targets beyond it are taken for out of range.
constexpr float kTargetMax = 1 << 22;

// So many base steps may a value have that its level does not code. Most are far below one; at this
// bound one adds a tenth to the error of its token.
constexpr float kDroppedMax = 16;

// Blocks whose rows are computed together: more rows make products faster, up to a point.
constexpr std::size_t kBatchRows = 256;
constexpr std::size_t kBatchBytes = std::size_t{32} << 20;  // of float32 rows of all planes

absl::Status Damaged(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("residual frame: ", what));
}

std::size_t GroupsOf(std::size_t tokens) { return (tokens + kLanes - 1) / kLanes; }

std::uint32_t TokensCrc(std::span<const TokenId> tokens) { return Crc32c(std::as_bytes(tokens)); }

std::optional<PredictedFormat> FormatOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return PredictedFormat{.mantissa_bits = 10, .bias = 15, .sign_shift = 15};
    case DType::kBfloat16:
      return PredictedFormat{.mantissa_bits = 7, .bias = 127, .sign_shift = 15};
    case DType::kFloat8E4m3:
      return PredictedFormat{.mantissa_bits = 3, .bias = 7, .sign_shift = 7};
    case DType::kFloat8E5m2:
      return PredictedFormat{.mantissa_bits = 2, .bias = 15, .sign_shift = 7};
    default:
      return std::nullopt;
  }
}

// One level of a profile, ready to code.
struct Level {
  Quality quality;
  float step;
  float importance_strength;
  std::vector<float> thresholds;
  std::vector<LevelPlane> planes;
};

}  // namespace

struct ResidualCodec::State {
  State(const ModelSpec& spec, const ProfileId& profile_id, const ResidualProfile& from)
      : geometry(spec),
        raw_kv(geometry, spec.rope),
        rope_pairs(RopePairs::Of(spec)),
        id(profile_id),
        profile(from),
        exact_format(FormatOf(spec.dtype)) {}

  absl::Status Prepare(const ModelSpec& spec);
  const Level* FindLevel(Quality quality) const;
  std::size_t BlocksAtOnce() const;
  ResidualTables TablesOf(const Level& level) const;

  PredictedPlane CellsOf(std::uint32_t plane) const;
  // Turns predictions of a block's rows, [row][component] of a batch, into those of its numbers.
  void PredictExact(std::uint32_t plane, std::span<const TokenId> tokens, const RopeAngles& angles,
                    std::size_t first_row, std::vector<float>& rows) const;
  // A number of a raw block, as bits.
  std::size_t NumberAt(std::uint32_t plane, std::size_t token, std::size_t component) const;
  std::uint32_t LoadNumber(std::span<const std::byte> raw, std::uint32_t plane, std::size_t token,
                           std::size_t component) const;
  void StoreNumber(std::span<std::byte> raw, std::uint32_t plane, std::size_t token,
                   std::size_t component, std::uint32_t bits) const;
  bool IsInCells(std::uint32_t plane, std::size_t component, std::uint32_t bits) const;

  const KvGeometry geometry;
  const RawKv raw_kv;
  const RopePairs rope_pairs;
  const ProfileId id;
  const ResidualProfile profile;
  // For exact frames; no value: the dtype is not one of those.
  const std::optional<PredictedFormat> exact_format;
  std::vector<std::vector<std::int8_t>> cell_exponents;  // [plane], within the format
  RansTables tables{0};
  std::vector<std::uint32_t> expected;
  std::vector<std::uint32_t> carried;
  std::vector<std::uint32_t> limits;
  std::vector<PlaneTransform> transforms;
  std::vector<Level> levels;
  std::optional<ImportanceEstimator> importance;
};

absl::Status ResidualCodec::State::Prepare(const ModelSpec& spec) {
  if (profile.planes != PlanesOf(spec)) {
    return absl::InvalidArgumentError("profile: layers differ from those of the model");
  }
  KV_RETURN_IF_ERROR(profile.CheckConsistency());

  tables = RansTables(kScaleClasses + profile.exponent_frequencies.size() / kExponentSymbols);
  for (std::size_t c = 0; c < kScaleClasses; ++c) {
    KV_RETURN_IF_ERROR(tables.Set(
        c, std::span(profile.class_frequencies).subspan(c * kResidualSymbols, kResidualSymbols)));
  }
  for (std::size_t t = 0; t + kScaleClasses < tables.table_count(); ++t) {
    KV_RETURN_IF_ERROR(tables.Set(
        kScaleClasses + t,
        std::span(profile.exponent_frequencies).subspan(t * kExponentSymbols, kExponentSymbols)));
  }
  expected.assign(profile.expected.begin(), profile.expected.end());
  carried.assign(profile.carried.begin(), profile.carried.end());
  limits = SymbolLimits(profile);

  for (std::uint32_t i = 0; i < profile.planes.size(); ++i) transforms.emplace_back(profile, i);
  for (std::size_t l = 0; l < profile.levels.size(); ++l) {
    Level level{.quality = profile.levels[l].quality,
                .step = profile.levels[l].step,
                .importance_strength = profile.levels[l].importance_strength,
                .thresholds = RateThresholds(profile, profile.levels[l].rate_weight),
                .planes = {}};
    for (std::uint32_t i = 0; i < profile.planes.size(); ++i) {
      level.planes.emplace_back(profile, i, l);
    }
    levels.push_back(std::move(level));
  }
  if (exact_format.has_value()) {
    // Cells are those of normal numbers.
    const int least = 1 - exact_format->bias;
    for (const PlaneProfile& of : profile.plane_profiles) {
      std::vector<std::int8_t>& exponents = cell_exponents.emplace_back();
      for (const int exponent : of.cell_exponents) {
        exponents.push_back(static_cast<std::int8_t>(std::clamp(exponent, least, -least)));
      }
    }
    levels.push_back(
        {.quality = Quality::kExact,
         .step = 1,
         .importance_strength = 0,
         .thresholds = std::vector<float>(std::size_t{kScaleClasses} * kRestoredOffsets, 0.5f),
         .planes = {}});
  }
  if (profile.importance.query_heads > 0) importance.emplace(profile, rope_pairs);
  return absl::OkStatus();
}

const Level* ResidualCodec::State::FindLevel(Quality quality) const {
  for (const Level& level : levels) {
    if (level.quality == quality) return &level;
  }
  return nullptr;
}

std::size_t ResidualCodec::State::BlocksAtOnce() const {
  const std::size_t rows_of_block = GroupsOf(geometry.block_tokens()) * kLanes;
  const std::size_t rows =
      std::min(kBatchRows, kBatchBytes / (sizeof(float) * profile.component_count()));
  return std::max<std::size_t>(rows / rows_of_block, 1);
}

PredictedPlane ResidualCodec::State::CellsOf(std::uint32_t plane) const {
  return {.cell_exponents = cell_exponents[plane].data(),
          .scales = profile.plane_profiles[plane].cell_scales.data(),
          .components = profile.planes[plane].components()};
}

void ResidualCodec::State::PredictExact(std::uint32_t plane, std::span<const TokenId> tokens,
                                        const RopeAngles& angles, std::size_t first_row,
                                        std::vector<float>& rows) const {
  const PlaneShape& shape = profile.planes[plane];
  const std::span<float> of_block =
      std::span(rows).subspan(first_row * shape.components(), tokens.size() * shape.components());
  if (shape.layer == 0) PredictFromTokens(profile, plane, tokens, of_block);
  raw_kv.RotateRows(of_block, shape.layer, shape.is_v ? KvKind::kV : KvKind::kK, angles);
}

std::size_t ResidualCodec::State::NumberAt(std::uint32_t plane, std::size_t token,
                                           std::size_t component) const {
  const PlaneShape& shape = profile.planes[plane];
  return geometry.kind_begin(shape.layer, shape.is_v ? KvKind::kV : KvKind::kK) +
         (token * shape.components() + component) * DTypeBytes(geometry.dtype());
}

std::uint32_t ResidualCodec::State::LoadNumber(std::span<const std::byte> raw, std::uint32_t plane,
                                               std::size_t token, std::size_t component) const {
  const std::byte* const at = raw.data() + NumberAt(plane, token, component);
  return DTypeBytes(geometry.dtype()) == 2 ? LoadLittle<std::uint16_t>(at)
                                           : LoadLittle<std::uint8_t>(at);
}

void ResidualCodec::State::StoreNumber(std::span<std::byte> raw, std::uint32_t plane,
                                       std::size_t token, std::size_t component,
                                       std::uint32_t bits) const {
  std::byte* const at = raw.data() + NumberAt(plane, token, component);
  if (DTypeBytes(geometry.dtype()) == 2) {
    StoreLittle(at, static_cast<std::uint16_t>(bits));
  } else {
    StoreLittle(at, static_cast<std::uint8_t>(bits));
  }
}

bool ResidualCodec::State::IsInCells(std::uint32_t plane, std::size_t component,
                                     std::uint32_t bits) const {
  const std::uint32_t magnitude = bits & ((1u << exact_format->sign_shift) - 1);
  const int field = static_cast<int>(magnitude >> exact_format->mantissa_bits);
  return field - (cell_exponents[plane][component] + exact_format->bias) <= 20;
}

ResidualTables ResidualCodec::State::TablesOf(const Level& level) const {
  return {.decode = tables.decode(),
          .encode = tables.encode(),
          .expected = expected.data(),
          .offsets = profile.offsets.data(),
          .thresholds = level.thresholds.data(),
          .limits = limits.data(),
          .carried = carried.data(),
          .prior = profile.prior};
}

namespace {

// Lanes beyond the block's tokens, and those of `kept_out`, code nothing.
std::vector<LaneMask> ActiveLanes(std::size_t token_count,
                                  std::span<const std::uint16_t> kept_out) {
  std::vector<LaneMask> active(GroupsOf(token_count), 0);
  for (std::size_t t = 0; t < token_count; ++t) {
    active[t / kLanes] = static_cast<LaneMask>(active[t / kLanes] | 1u << t % kLanes);
  }
  for (const std::uint16_t t : kept_out) {
    active[t / kLanes] = static_cast<LaneMask>(active[t / kLanes] & ~(1u << t % kLanes));
  }
  return active;
}

// The bytes of one token, layer by layer, K then V.
std::size_t TokenBytes(const KvGeometry& geometry) {
  return geometry.raw_block_bytes() / geometry.block_tokens();
}
template <typename Copy>  // copy(offset in the block, bytes)
void ForEachPiece(const KvGeometry& geometry, std::size_t token, Copy copy) {
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
      const std::size_t bytes = geometry.kind_bytes(layer, kind) / geometry.block_tokens();
      copy(geometry.kind_begin(layer, kind) + token * bytes, bytes);
    }
  }
}

}  // namespace

// Codes blocks that share a batch.
class ResidualCodec::Encoder {
 public:
  Encoder(const State& state, const Level& level, std::span<const BlockToEncode> blocks);
  absl::StatusOr<std::vector<EncodedBlock>> Run();

 private:
  struct Coded {
    const BlockToEncode* block = nullptr;
    std::size_t first_row = 0;
    RopeAngles angles;
    std::vector<std::uint16_t> exact;  // tokens that are kept as they are, ascending
    bool first_from_profile = false;
    std::vector<LaneMask> active;      // [group]
    std::vector<ResidualCarry> carry;  // [group]
    RansEncoder encoder;
    std::size_t steps = 0;
    std::vector<std::size_t> layer_steps;  // steps up to the end of each layer
  };

  bool FirstTokenIsOfProfile(const Coded& coded) const;
  void KeepExact(Coded& coded, std::size_t token);
  // False: tokens were found whose values are out of range; they are exact from now on.
  bool CodePlanes();
  bool CodeExactPlanes();
  void StartCoding();
  void ChooseExponents();
  // Whether so many tokens are exact that the block is better stored losslessly.
  bool IsLost(const Coded& coded) const;
  absl::StatusOr<EncodedBlock> Finish(Coded& coded);

  const State& state_;
  const Level& level_;
  std::vector<Coded> coded_;
  std::size_t row_count_ = 0;
  std::vector<std::vector<float>> rows_;              // [plane][row][component]
  std::vector<std::vector<std::int32_t>> exponents_;  // [plane][row group][group][lane]
};

ResidualCodec::Encoder::Encoder(const State& state, const Level& level,
                                std::span<const BlockToEncode> blocks)
    : state_(state), level_(level) {
  const KvGeometry& geometry = state.geometry;
  for (const BlockToEncode& block : blocks) {
    Coded& coded = coded_.emplace_back();
    coded.block = &block;
    coded.first_row = row_count_;
    coded.angles = state.raw_kv.AnglesAt(block.first_position);
    row_count_ += GroupsOf(geometry.block_tokens()) * kLanes;
  }
  std::vector<std::vector<bool>> extreme(coded_.size(), std::vector<bool>(geometry.block_tokens()));
  for (const PlaneShape& plane : state.profile.planes) {
    const KvKind kind = plane.is_v ? KvKind::kV : KvKind::kK;
    std::vector<float>& rows = rows_.emplace_back(row_count_ * plane.components());
    for (std::size_t b = 0; b < coded_.size(); ++b) {
      const Coded& coded = coded_[b];
      state.raw_kv.ReadRows(
          coded.block->raw, plane.layer, kind, coded.angles,
          std::span(rows).subspan(coded.first_row * plane.components(),
                                  std::size_t{geometry.block_tokens()} * plane.components()));
      for (const std::uint32_t token :
           state.raw_kv.ExtremeTokens(coded.block->raw, plane.layer, kind)) {
        extreme[b][token] = true;
      }
    }
  }
  for (std::size_t b = 0; b < coded_.size(); ++b) {
    Coded& coded = coded_[b];
    coded.first_from_profile =
        level.quality != Quality::kExact && !extreme[b][0] && FirstTokenIsOfProfile(coded);
    if (coded.block->first_position == 0 && !coded.first_from_profile) extreme[b][0] = true;
    for (std::size_t t = 0; t < extreme[b].size(); ++t) {
      if (extreme[b][t]) KeepExact(coded, t);
    }
  }
}

// The first token attends to itself only, so its KV is a constant of the model.
bool ResidualCodec::Encoder::FirstTokenIsOfProfile(const Coded& coded) const {
  const ResidualProfile& profile = state_.profile;
  if (coded.block->first_position != 0 || !profile.has_first_token ||
      coded.block->tokens[0] != profile.first_token) {
    return false;
  }
  std::size_t at = 0;
  double error = 0, energy = 0;
  for (std::uint32_t plane = 0; plane < profile.planes.size(); ++plane) {
    const std::size_t components = profile.planes[plane].components();
    const float* const row = rows_[plane].data() + coded.first_row * components;
    for (std::size_t c = 0; c < components; ++c, ++at) {
      const double difference = double{row[c]} - profile.first_rows[at];
      error += difference * difference;
      energy += double{row[c]} * row[c];
    }
  }
  // The roundings of one dtype in two engines differ by that much.
  return error <= 1e-4 * energy;
}

void ResidualCodec::Encoder::KeepExact(Coded& coded, std::size_t token) {
  const auto at = static_cast<std::uint16_t>(token);
  const auto place = std::lower_bound(coded.exact.begin(), coded.exact.end(), at);
  if (place != coded.exact.end() && *place == at) return;
  coded.exact.insert(place, at);
  for (std::size_t plane = 0; plane < rows_.size(); ++plane) {
    const std::size_t components = state_.profile.planes[plane].components();
    std::fill_n(
        rows_[plane].begin() + static_cast<std::ptrdiff_t>((coded.first_row + token) * components),
        components, 0.0f);
  }
}

void ResidualCodec::Encoder::StartCoding() {
  for (Coded& coded : coded_) {
    std::vector<std::uint16_t> kept_out = coded.exact;
    if (coded.first_from_profile) kept_out.push_back(0);
    coded.active = ActiveLanes(state_.geometry.block_tokens(), kept_out);
    if (IsLost(coded)) std::fill(coded.active.begin(), coded.active.end(), LaneMask{0});
    coded.carry.assign(coded.active.size(), {});
    coded.encoder = {};
    coded.steps = 0;
    coded.layer_steps.assign(state_.geometry.layer_count(), 0);
  }
}

bool ResidualCodec::Encoder::CodePlanes() {
  const ResidualProfile& profile = state_.profile;
  const ResidualTables tables = state_.TablesOf(level_);
  StartCoding();

  RestoredCodes codes(profile.planes.size(), row_count_);
  bool in_range = true;
  std::vector<std::uint32_t> records;
  for (std::uint32_t plane = 0; plane < profile.planes.size(); ++plane) {
    const PlaneShape& shape = profile.planes[plane];
    const PlaneProfile& of = profile.plane_profiles[plane];
    const PlaneTransform& transform = state_.transforms[plane];
    const LevelPlane& coded_plane = level_.planes[plane];
    const ResidualPlane symbols = coded_plane.Symbols();
    const std::size_t components = shape.components();

    std::vector<float> restored(row_count_ * components);
    transform.Predict(codes, restored);
    if (shape.layer == 0) {
      for (const Coded& coded : coded_) {
        PredictFromTokens(profile, plane, coded.block->tokens,
                          std::span(restored).subspan(coded.first_row * components));
      }
    }
    std::vector<float> residual(restored.size());
    for (std::size_t i = 0; i < residual.size(); ++i) residual[i] = rows_[plane][i] - restored[i];
    std::vector<float> values(row_count_ * components);
    transform.Analyze(residual, values);

    const std::size_t coded_count = coded_plane.coded_count();
    std::vector<float> targets(coded_count * kLanes), coded_values(coded_count * kLanes);
    records.resize((profile.group_count + coded_count * kResidualStepsMax) * kLanes);
    for (Coded& coded : coded_) {
      for (std::size_t group = 0; group < coded.active.size(); ++group) {
        const std::size_t first_row = coded.first_row + group * kLanes;
        float* const group_values = values.data() + first_row * components;
        coded_plane.Gather(group_values, components, 1 / level_.step, targets.data());
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
          if ((coded.active[group] >> lane & 1) == 0) continue;
          bool fits =
              coded_plane.MayDrop(group_values + lane * components, level_.step * kDroppedMax);
          for (std::size_t c = 0; fits && c < coded_count; ++c) {
            fits = std::abs(targets[c * kLanes + lane]) < kTargetMax;
          }
          if (fits) continue;
          KeepExact(coded, group * kLanes + lane);
          in_range = false;
        }
        const std::size_t steps = Kernels().residual_encode(
            tables, symbols, coded.active[group],
            exponents_[plane].data() + first_row * profile.group_count, targets.data(),
            &coded.carry[group], coded_values.data(), records.data());
        std::copy_n(records.data(), steps * kLanes, coded.encoder.AddSteps(steps));
        coded.steps += steps;
        std::fill_n(group_values, kLanes * components, 0.0f);
        coded_plane.Scatter(coded_values.data(), level_.step, group_values, components);
      }
      coded.layer_steps[shape.layer] = coded.steps;
    }
    if (!in_range) return false;
    transform.AddResidual(values, restored);
    codes.Add(plane, of, shape, restored);
  }
  return true;
}

bool ResidualCodec::Encoder::CodeExactPlanes() {
  const ResidualProfile& profile = state_.profile;
  const ResidualTables tables = state_.TablesOf(level_);
  const PredictedFormat& format = *state_.exact_format;
  StartCoding();
  RestoredCodes codes(profile.planes.size(), row_count_);
  bool in_range = true;
  std::vector<std::uint32_t> records;
  for (std::uint32_t plane = 0; plane < profile.planes.size(); ++plane) {
    const PlaneShape& shape = profile.planes[plane];
    const PlaneProfile& of = profile.plane_profiles[plane];
    const std::size_t components = shape.components();
    const PredictedPlane cells = state_.CellsOf(plane);
    std::vector<float> predicted(row_count_ * components);
    state_.transforms[plane].Predict(codes, predicted);
    std::vector<float> predictions(components * kLanes);
    std::vector<std::uint32_t> numbers(components * kLanes);
    records.resize(components * kPredictedStepsMax * kLanes);
    for (Coded& coded : coded_) {
      state_.PredictExact(plane, coded.block->tokens, coded.angles, coded.first_row, predicted);
      for (std::size_t group = 0; group < coded.active.size(); ++group) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
          const std::size_t token = group * kLanes + lane;
          const bool active = (coded.active[group] >> lane & 1) != 0;
          const float* const row = predicted.data() + (coded.first_row + token) * components;
          for (std::size_t c = 0; c < components; ++c) {
            const std::uint32_t number =
                active ? state_.LoadNumber(coded.block->raw, plane, token, c) : 0;
            numbers[c * kLanes + lane] = number;
            predictions[c * kLanes + lane] = row[c];
            if (active && !state_.IsInCells(plane, c, number)) {
              KeepExact(coded, token);
              in_range = false;
            }
          }
        }
        if (!in_range) continue;
        const std::size_t steps = Kernels().predicted_encode(
            tables, format, cells, coded.active[group], coded.carry[group].shift,
            predictions.data(), numbers.data(), records.data());
        std::copy_n(records.data(), steps * kLanes, coded.encoder.AddSteps(steps));
        coded.steps += steps;
      }
      coded.layer_steps[shape.layer] = coded.steps;
    }
    if (!in_range) return false;
    codes.Add(plane, of, shape, rows_[plane]);
  }
  return true;
}

bool ResidualCodec::Encoder::IsLost(const Coded& coded) const {
  const KvGeometry& geometry = state_.geometry;
  // The first section holds the exact tokens.
  return coded.exact.size() * (TokenBytes(geometry) + sizeof(std::uint16_t)) > kExactBytesMax ||
         coded.exact.size() > std::max<std::size_t>(geometry.block_tokens() / 4, 1);
}

absl::StatusOr<EncodedBlock> ResidualCodec::Encoder::Finish(Coded& coded) {
  const KvGeometry& geometry = state_.geometry;
  if (IsLost(coded)) {
    return EncodedBlock{.body = {},
                        .section_bytes = {},
                        .exact_tokens = static_cast<std::uint32_t>(coded.exact.size())};
  }
  std::vector<std::byte> entropy;
  std::vector<std::size_t> layer_bytes;
  KV_RETURN_IF_ERROR(coded.encoder.Finish(entropy, coded.layer_steps, layer_bytes));

  EncodedBlock encoded;
  encoded.exact_tokens = static_cast<std::uint32_t>(coded.exact.size());
  const std::size_t exact_bytes =
      coded.exact.size() * (sizeof(std::uint16_t) + TokenBytes(geometry));
  layer_bytes.back() = entropy.size();
  encoded.section_bytes = CutSections(layer_bytes);
  std::vector<std::uint16_t> layers_of_section;
  std::size_t section_end = 0;
  for (const std::uint32_t bytes : encoded.section_bytes) {
    section_end += bytes;
    layers_of_section.push_back(static_cast<std::uint16_t>(
        std::upper_bound(layer_bytes.begin(), layer_bytes.end(), section_end) -
        layer_bytes.begin()));
  }
  // The head goes with the first section, or is one of its own where both are too long for that.
  const auto head_bytes = [&] {
    return kFrameBindingBytes + kFixedHeadBytes + 2 * layers_of_section.size() + exact_bytes;
  };
  if (head_bytes() + encoded.section_bytes[0] > kSectionBytesMax) {
    encoded.section_bytes.insert(encoded.section_bytes.begin(), 0);
    layers_of_section.insert(layers_of_section.begin(), 0);
  }
  encoded.section_bytes[0] += static_cast<std::uint32_t>(head_bytes());

  ByteWriter writer;
  writer.Write(static_cast<std::uint8_t>(coded.first_from_profile ? kFirstTokenFromProfile : 0));
  writer.Write(std::uint8_t{0});
  writer.Write(static_cast<std::uint16_t>(coded.exact.size()));
  writer.Write(static_cast<std::uint16_t>(layers_of_section.size()));
  for (const std::uint16_t layers : layers_of_section) writer.Write(layers);
  for (const std::uint16_t token : coded.exact) writer.Write(token);
  for (const std::uint16_t token : coded.exact) {
    ForEachPiece(geometry, token, [&](std::size_t offset, std::size_t bytes) {
      writer.WriteText(AsText(coded.block->raw.subspan(offset, bytes)));
    });
  }
  const std::string head = writer.Take();
  encoded.body.resize(kFrameBindingBytes + head.size() + entropy.size());
  WriteFrameBinding({.first_position = coded.block->first_position,
                     .tokens_crc32c = TokensCrc(coded.block->tokens),
                     .profile = state_.id},
                    std::span(encoded.body).first(kFrameBindingBytes));
  std::memcpy(encoded.body.data() + kFrameBindingBytes, head.data(), head.size());
  std::memcpy(encoded.body.data() + kFrameBindingBytes + head.size(), entropy.data(),
              entropy.size());
  return encoded;
}

void ResidualCodec::Encoder::ChooseExponents() {
  if (state_.importance.has_value() && level_.quality != Quality::kExact) {
    std::vector<std::uint32_t> tokens_behind(row_count_, 1);
    for (const Coded& coded : coded_) {
      const BlockToEncode& block = *coded.block;
      for (std::uint32_t t = 0; t < block.tokens.size(); ++t) {
        const std::uint32_t position = block.first_position + t;
        tokens_behind[coded.first_row + t] =
            block.session_tokens > position ? block.session_tokens - position : 1;
      }
    }
    const auto features = state_.importance->Features(rows_, tokens_behind);
    exponents_ = state_.importance->Exponents(features, row_count_, level_.importance_strength);
  } else {
    for (std::uint32_t plane = 0; plane < rows_.size(); ++plane) {
      exponents_.emplace_back(row_count_ * state_.profile.group_count, 0);
    }
  }
  if (level_.quality == Quality::kExact) return;
  const std::size_t groups = state_.profile.group_count;
  for (const Coded& coded : coded_) {
    for (std::size_t t = 0; t < coded.block->importance.size(); ++t) {
      const std::int32_t exponent =
          ExponentOf(coded.block->importance[t], level_.importance_strength);
      const std::size_t row = coded.first_row + t;
      for (std::vector<std::int32_t>& of_plane : exponents_) {
        for (std::size_t group = 0; group < groups; ++group) {
          of_plane[(row / kLanes * groups + group) * kLanes + row % kLanes] = exponent;
        }
      }
    }
  }
}

absl::StatusOr<std::vector<EncodedBlock>> ResidualCodec::Encoder::Run() {
  ChooseExponents();
  // Each time over, a token more is exact.
  while (!(level_.quality == Quality::kExact ? CodeExactPlanes() : CodePlanes())) {
  }
  std::vector<EncodedBlock> encoded;
  for (Coded& coded : coded_) {
    KV_ASSIGN_OR_RETURN(encoded.emplace_back(), Finish(coded));
  }
  return encoded;
}

absl::StatusOr<std::vector<EncodedBlock>> ResidualCodec::Encode(
    std::span<const BlockToEncode> blocks, Quality quality) const {
  const Level* const level = state_->FindLevel(quality);
  if (level == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("profile ", state_->id.ToHex(), " has no level of this quality"));
  }
  const KvGeometry& geometry = state_->geometry;
  for (const BlockToEncode& block : blocks) {
    KV_CHECK(block.tokens.size() == geometry.block_tokens());
    KV_CHECK(block.raw.size() == geometry.raw_block_bytes());
    KV_CHECK(block.importance.empty() || block.importance.size() == block.tokens.size());
  }
  std::vector<EncodedBlock> encoded;
  const std::size_t at_once = state_->BlocksAtOnce();
  for (std::size_t at = 0; at < blocks.size(); at += at_once) {
    KV_ASSIGN_OR_RETURN(
        std::vector<EncodedBlock> batch,
        Encoder(*state_, *level, blocks.subspan(at, std::min(at_once, blocks.size() - at))).Run());
    std::move(batch.begin(), batch.end(), std::back_inserter(encoded));
  }
  return encoded;
}

struct ResidualCodec::Decoder::Run {
  struct Coded {
    BlockToDecode block;
    const Level* level = nullptr;
    std::size_t first_row = 0;
    RopeAngles angles;
    bool first_from_profile = false;
    std::vector<std::uint16_t> layers_of_section;
    std::vector<std::uint16_t> exact;
    const std::byte* exact_bytes = nullptr;
    std::vector<LaneMask> active;
    std::vector<ResidualCarry> carry;
    RansState entropy;
  };

  const State* state;
  std::vector<Coded> coded;
  std::size_t row_count = 0;
  RestoredCodes codes;
  bool exact = false;  // all blocks are, or none
  std::uint32_t next_plane = 0;
  std::uint32_t next_layer = 0;

  absl::Status Open(Coded& to) const;
  void DecodePlane();
  void DecodeExactPlane();
};

absl::Status ResidualCodec::Decoder::Run::Open(Coded& to) const {
  const KvGeometry& geometry = state->geometry;
  const BlockToDecode& block = to.block;
  KV_CHECK(block.tokens.size() == geometry.block_tokens());
  KV_CHECK(block.raw.size() == geometry.raw_block_bytes());
  KV_CHECK(!block.section_bytes.empty());
  std::size_t section_bytes = 0;
  for (const std::uint32_t bytes : block.section_bytes) section_bytes += bytes;
  if (section_bytes != block.body.size()) return Damaged("sections do not cover the body");
  if (block.section_bytes[0] < kFrameBindingBytes) return Damaged("too short");

  to.level = state->FindLevel(block.quality);
  if (to.level == nullptr) return Damaged("its profile has no such level");
  const FrameBinding binding = ReadFrameBinding(block.body);
  if (binding.profile != state->id) {
    return absl::InvalidArgumentError(
        absl::StrCat("residual frame: made with profile ", binding.profile.ToHex()));
  }
  if (binding.tokens_crc32c != TokensCrc(block.tokens)) {
    return absl::InvalidArgumentError("residual frame: made for other tokens");
  }
  to.angles = state->raw_kv.AnglesAt(binding.first_position);

  // All of this lies in the first section.
  ByteReader reader(
      AsText(block.body.subspan(kFrameBindingBytes, block.section_bytes[0] - kFrameBindingBytes)));
  const auto flags = reader.Read<std::uint8_t>();
  const auto zero = reader.Read<std::uint8_t>();
  const std::size_t exact_count = reader.Read<std::uint16_t>();
  const std::size_t section_count = reader.Read<std::uint16_t>();
  if ((flags & ~kFirstTokenFromProfile) != 0 || zero != 0) return Damaged("reserved bits");
  if (section_count != block.section_bytes.size()) return Damaged("sections");
  std::uint16_t layers = 0;
  for (std::size_t i = 0; i < section_count; ++i) {
    to.layers_of_section.push_back(reader.Read<std::uint16_t>());
    if (to.layers_of_section.back() < layers) return Damaged("layers of a section");
    layers = to.layers_of_section.back();
  }
  if (layers != geometry.layer_count()) return Damaged("layers of the last section");
  if (exact_count > geometry.block_tokens()) return Damaged("exact tokens");
  for (std::size_t i = 0; i < exact_count; ++i) {
    const auto token = reader.Read<std::uint16_t>();
    if (token >= geometry.block_tokens() || (i > 0 && token <= to.exact.back())) {
      return Damaged("exact tokens");
    }
    to.exact.push_back(token);
  }
  const auto exact_bytes = reader.ReadBytes(exact_count * TokenBytes(geometry));
  if (!reader.ok()) return Damaged("the first section is too short");
  to.exact_bytes = exact_bytes.data();

  to.first_from_profile = (flags & kFirstTokenFromProfile) != 0;
  std::vector<std::uint16_t> kept_out = to.exact;
  if (to.first_from_profile) {
    if (!state->profile.has_first_token || binding.first_position != 0 ||
        block.tokens[0] != state->profile.first_token ||
        (!to.exact.empty() && to.exact.front() == 0)) {
      return Damaged("no first token of the profile");
    }
    kept_out.push_back(0);
  }
  to.active = ActiveLanes(geometry.block_tokens(), kept_out);
  to.carry.assign(to.active.size(), {});
  const std::size_t at = block.section_bytes[0] - reader.remaining_bytes();
  const auto entropy = block.body.subspan(at);
  Kernels().residual_start(reinterpret_cast<const std::uint8_t*>(entropy.data()), entropy.size(),
                           &to.entropy);
  return absl::OkStatus();
}

void ResidualCodec::Decoder::Run::DecodePlane() {
  const ResidualProfile& profile = state->profile;
  const std::uint32_t plane = next_plane++;
  const PlaneShape& shape = profile.planes[plane];
  const PlaneProfile& of = profile.plane_profiles[plane];
  const PlaneTransform& transform = state->transforms[plane];
  const std::size_t components = shape.components();
  const std::size_t block_tokens = state->geometry.block_tokens();

  std::vector<float> rows(row_count * components);
  transform.Predict(codes, rows);
  std::vector<float> values(row_count * components);
  std::vector<float> coded_values;
  for (Coded& of_block : coded) {
    if (shape.layer == 0) {
      PredictFromTokens(profile, plane, of_block.block.tokens,
                        std::span(rows).subspan(of_block.first_row * components));
    }
    const LevelPlane& coded_plane = of_block.level->planes[plane];
    const ResidualPlane symbols = coded_plane.Symbols();
    const ResidualTables tables = state->TablesOf(*of_block.level);
    coded_values.resize(coded_plane.coded_count() * kLanes);
    for (std::size_t group = 0; group < of_block.active.size(); ++group) {
      Kernels().residual_decode(tables, symbols, of_block.active[group], &of_block.entropy,
                                &of_block.carry[group], coded_values.data());
      coded_plane.Scatter(coded_values.data(), of_block.level->step,
                          values.data() + (of_block.first_row + group * kLanes) * components,
                          components);
    }
  }
  transform.AddResidual(values, rows);
  codes.Add(plane, of, shape, rows);

  const KvKind kind = shape.is_v ? KvKind::kV : KvKind::kK;
  for (Coded& of_block : coded) {
    const std::span<float> block_rows =
        std::span(rows).subspan(of_block.first_row * components, block_tokens * components);
    if (of_block.first_from_profile) {
      std::size_t at = 0;
      for (std::uint32_t i = 0; i < plane; ++i) at += profile.planes[i].components();
      std::copy_n(profile.first_rows.begin() + static_cast<std::ptrdiff_t>(at), components,
                  block_rows.begin());
    }
    state->raw_kv.WriteRows(block_rows, shape.layer, kind, of_block.angles, of_block.block.raw);
  }
}

void ResidualCodec::Decoder::Run::DecodeExactPlane() {
  const ResidualProfile& profile = state->profile;
  const std::uint32_t plane = next_plane++;
  const PlaneShape& shape = profile.planes[plane];
  const std::size_t components = shape.components();
  const std::size_t block_tokens = state->geometry.block_tokens();
  const PredictedPlane cells = state->CellsOf(plane);
  std::vector<float> rows(row_count * components);
  state->transforms[plane].Predict(codes, rows);
  std::vector<float> predictions(components * kLanes);
  std::vector<std::uint32_t> numbers(components * kLanes);
  for (Coded& of_block : coded) {
    state->PredictExact(plane, of_block.block.tokens, of_block.angles, of_block.first_row, rows);
    const ResidualTables tables = state->TablesOf(*of_block.level);
    for (std::size_t group = 0; group < of_block.active.size(); ++group) {
      const float* const from = rows.data() + (of_block.first_row + group * kLanes) * components;
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        for (std::size_t c = 0; c < components; ++c) {
          predictions[c * kLanes + lane] = from[lane * components + c];
        }
      }
      Kernels().predicted_decode(tables, *state->exact_format, cells, of_block.active[group],
                                 &of_block.entropy, of_block.carry[group].shift, predictions.data(),
                                 numbers.data());
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        if ((of_block.active[group] >> lane & 1) == 0) continue;
        for (std::size_t c = 0; c < components; ++c) {
          state->StoreNumber(of_block.block.raw, plane, group * kLanes + lane, c,
                             numbers[c * kLanes + lane]);
        }
      }
    }
    state->raw_kv.ReadRows(
        of_block.block.raw, shape.layer, shape.is_v ? KvKind::kV : KvKind::kK, of_block.angles,
        std::span(rows).subspan(of_block.first_row * components, block_tokens * components));
  }
  codes.Add(plane, profile.plane_profiles[plane], shape, rows);
}

ResidualCodec::Decoder::Decoder(std::unique_ptr<Run> run) : run_(std::move(run)) {}
ResidualCodec::Decoder::Decoder(Decoder&&) noexcept = default;
ResidualCodec::Decoder& ResidualCodec::Decoder::operator=(Decoder&&) noexcept = default;
ResidualCodec::Decoder::~Decoder() = default;

absl::StatusOr<ResidualCodec::Decoder> ResidualCodec::Decoder::Start(
    const ResidualCodec& codec, std::span<const BlockToDecode> blocks) {
  const State& state = *codec.state_;
  const std::size_t rows_of_block = GroupsOf(state.geometry.block_tokens()) * kLanes;
  auto run = std::unique_ptr<Run>(
      new Run{.state = &state,
              .coded = {},
              .row_count = blocks.size() * rows_of_block,
              .codes = RestoredCodes(state.profile.planes.size(), blocks.size() * rows_of_block)});
  run->exact = !blocks.empty() && blocks[0].quality == Quality::kExact;
  run->coded.resize(blocks.size());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    run->coded[i].block = blocks[i];
    run->coded[i].first_row = i * rows_of_block;
    KV_CHECK((blocks[i].quality == Quality::kExact) == run->exact);
    KV_RETURN_IF_ERROR(run->Open(run->coded[i]));
  }
  return Decoder(std::move(run));
}

std::uint32_t ResidualCodec::Decoder::LayersIn(std::size_t block, std::size_t section_count) const {
  return section_count == 0 ? 0 : run_->coded[block].layers_of_section[section_count - 1];
}

std::uint32_t ResidualCodec::Decoder::decoded_layers() const { return run_->next_layer; }

absl::Status ResidualCodec::Decoder::DecodeLayer() {
  Run& run = *run_;
  const KvGeometry& geometry = run.state->geometry;
  const std::vector<PlaneShape>& planes = run.state->profile.planes;
  KV_CHECK(run.next_layer < geometry.layer_count());
  while (run.next_plane < planes.size() && planes[run.next_plane].layer == run.next_layer) {
    if (run.exact) {
      run.DecodeExactPlane();
    } else {
      run.DecodePlane();
    }
  }
  for (const Run::Coded& coded : run.coded) {
    for (std::size_t i = 0; i < coded.exact.size(); ++i) {
      const std::byte* from = coded.exact_bytes + i * TokenBytes(geometry);
      ForEachPiece(geometry, coded.exact[i], [&](std::size_t offset, std::size_t bytes) {
        if (offset >= geometry.layer_begin(run.next_layer) &&
            offset < geometry.layer_end(run.next_layer)) {
          std::memcpy(coded.block.raw.data() + offset, from, bytes);
        }
        from += bytes;
      });
    }
    if (coded.entropy.damaged) return Damaged("its symbols end early");
  }
  ++run.next_layer;
  if (run.next_layer == geometry.layer_count()) {
    for (const Run::Coded& coded : run.coded) {
      if (!Kernels().residual_finished(&coded.entropy)) return Damaged("its symbols do not end");
    }
  }
  return absl::OkStatus();
}

absl::Status ResidualCodec::Decode(std::span<const BlockToDecode> blocks) const {
  const std::size_t at_once = state_->BlocksAtOnce();
  for (std::size_t at = 0; at < blocks.size(); at += at_once) {
    KV_ASSIGN_OR_RETURN(
        Decoder decoder,
        Decoder::Start(*this, blocks.subspan(at, std::min(at_once, blocks.size() - at))));
    while (decoder.decoded_layers() < state_->geometry.layer_count()) {
      KV_RETURN_IF_ERROR(decoder.DecodeLayer());
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<const ResidualCodec>> ResidualCodec::Create(
    const ModelSpec& spec, const ProfileId& id, const ResidualProfile& profile) {
  auto state = std::make_unique<State>(spec, id, profile);
  KV_RETURN_IF_ERROR(state->Prepare(spec));
  return std::unique_ptr<const ResidualCodec>(new ResidualCodec(std::move(state)));
}

ResidualCodec::ResidualCodec(std::unique_ptr<const State> state) : state_(std::move(state)) {}
ResidualCodec::~ResidualCodec() = default;

const ProfileId& ResidualCodec::id() const { return state_->id; }
bool ResidualCodec::HasLevel(Quality quality) const {
  return state_->FindLevel(quality) != nullptr;
}

}  // namespace kvtrie
