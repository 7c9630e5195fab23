#include "storage/codec/residual_codec.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/byte_order.h"
#include "storage/base/status_macros.h"
#include "storage/codec/residual_state.h"

namespace kvtrie {
namespace {

// Blocks whose rows are computed together: more rows make products faster, up to a point.
constexpr std::size_t kBatchRows = 256;
constexpr std::size_t kBatchBytes = std::size_t{32} << 20;  // of float32 rows of all planes

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

}  // namespace

ResidualCodec::State::State(const ModelSpec& spec, const ProfileId& profile_id,
                            const ResidualProfile& from)
    : geometry(spec),
      raw_kv(geometry, spec.rope),
      rope_pairs(RopePairs::OfLayers(spec)),
      id(profile_id),
      profile(from),
      exact_format(FormatOf(spec.dtype)) {}

absl::Status ResidualCodec::State::Prepare(const ModelSpec& spec) {
  if (profile.planes != PlanesOf(spec)) {
    return absl::InvalidArgumentError("profile: layers differ from those of the model");
  }
  KV_RETURN_IF_ERROR(profile.CheckConsistency());

  KV_ASSIGN_OR_RETURN(symbols, SymbolTables::Of(profile));
  for (std::uint32_t i = 0; i < profile.planes.size(); ++i) transforms.emplace_back(profile, i);
  for (std::size_t l = 0; l < profile.levels.size(); ++l) {
    PreparedLevel level{.quality = profile.levels[l].quality,
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
  for (const ResidualProfile& of_differences : profile.differences) {
    differences = std::make_unique<State>(spec, id, of_differences);
    KV_RETURN_IF_ERROR(differences->Prepare(spec));
  }
  return absl::OkStatus();
}

const PreparedLevel* ResidualCodec::State::FindLevel(Quality quality) const {
  for (const PreparedLevel& level : levels) {
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

std::span<float> ResidualCodec::State::RowsOf(const BatchedBlock& block, std::uint32_t plane,
                                              std::vector<float>& rows) const {
  const std::size_t components = profile.planes[plane].components();
  return std::span(rows).subspan(block.first_row * components,
                                 geometry.block_tokens() * components);
}

void ResidualCodec::State::RotateRows(const BatchedBlock& block, std::uint32_t plane,
                                      std::vector<float>& rows) const {
  const PlaneShape& shape = profile.planes[plane];
  raw_kv.RotateRows(RowsOf(block, plane, rows), shape.layer, shape.kind(), block.angles);
}

void ResidualCodec::State::ReadReferences(const BatchedBlock& block, std::uint32_t plane,
                                          std::span<float> block_rows) const {
  const PlaneShape& shape = profile.planes[plane];
  const std::size_t components = shape.components();
  std::vector<float> rows(geometry.block_tokens() * components);
  for (std::size_t i = 0; i < block.references.size(); ++i) {
    bool was_read = false;
    for (const ReferenceRun& run : block.runs) {
      if (run.reference != i) continue;
      if (!was_read) {
        raw_kv.ReadRows(block.references[i].raw, shape.layer, shape.kind(),
                        block.reference_angles[i], rows);
        was_read = true;
      }
      std::copy_n(rows.data() + run.offset * components, run.token_count * components,
                  block_rows.data() + run.first_token * components);
    }
  }
}

PredictedPlane ResidualCodec::State::CellsOf(std::uint32_t plane) const {
  return {.cell_exponents = cell_exponents[plane].data(),
          .scales = profile.plane_profiles[plane].cell_scales.data(),
          .components = profile.planes[plane].components()};
}

std::size_t ResidualCodec::State::NumberAt(std::uint32_t plane, std::size_t token,
                                           std::size_t component) const {
  const PlaneShape& shape = profile.planes[plane];
  return geometry.kind_begin(shape.layer, shape.kind()) +
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

void BatchedBlock::StartCoding() {
  const auto move = [](std::size_t t, std::vector<LaneMask>* from, std::vector<LaneMask>* to) {
    const auto lane = static_cast<LaneMask>(1u << t % kLanes);
    if (from != nullptr) (*from)[t / kLanes] = static_cast<LaneMask>((*from)[t / kLanes] & ~lane);
    if (to != nullptr) (*to)[t / kLanes] = static_cast<LaneMask>((*to)[t / kLanes] | lane);
  };
  for (Lanes& of_way : lanes) {
    of_way.active.assign(GroupsOf(tokens.size()), 0);
    of_way.carry.assign(of_way.active.size(), {});
  }
  std::vector<LaneMask>* const whole = &lanes[kWhole].active;
  for (std::size_t t = 0; t < tokens.size(); ++t) move(t, nullptr, whole);
  for (const std::uint16_t token : exact) move(token, whole, nullptr);
  if (first_from_profile) move(0, whole, nullptr);
  for (const ReferenceRun& run : runs) {
    for (std::size_t i = 0; i < run.token_count; ++i) {
      move(run.first_token + i, whole, &lanes[kDifference].active);
    }
  }
  for (Lanes& of_way : lanes) {
    of_way.any = std::any_of(of_way.active.begin(), of_way.active.end(),
                             [](LaneMask mask) { return mask != 0; });
  }
}

const KvDigest& KvDigests::Of(std::span<const std::byte> raw) {
  const auto [found, is_new] = digests_.try_emplace(raw.data());
  if (is_new) found->second = DigestOfKv(raw);
  return found->second;
}

absl::Status CheckSharedTokens(std::span<const TokenId> tokens,
                               std::span<const ReferenceBlock> references,
                               std::span<const ReferenceRun> runs) {
  for (const ReferenceRun& run : runs) {
    const auto own = tokens.subspan(run.first_token, run.token_count);
    const auto other = references[run.reference].tokens.subspan(run.offset, run.token_count);
    if (!std::equal(own.begin(), own.end(), other.begin())) {
      return absl::InvalidArgumentError(
          absl::StrCat("references: tokens from ", run.first_token, " on are not those of block ",
                       references[run.reference].node.ToHex(), " from ", run.offset, " on"));
    }
  }
  return absl::OkStatus();
}

void ToLanes(const float* rows, std::size_t components, std::span<float> lanes) {
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    for (std::size_t c = 0; c < components; ++c) {
      lanes[c * kLanes + lane] = rows[lane * components + c];
    }
  }
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
const ResidualProfile& ResidualCodec::profile() const { return state_->profile; }
bool ResidualCodec::HasLevel(Quality quality) const {
  return state_->FindLevel(quality) != nullptr;
}
bool ResidualCodec::HasDifferences() const { return state_->differences != nullptr; }

}  // namespace kvtrie
