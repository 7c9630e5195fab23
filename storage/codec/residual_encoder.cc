#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/codec/codec_kernels.h"
#include "storage/codec/residual_state.h"

namespace kvtrie {
namespace {

absl::Status CheckReferences(const KvGeometry& geometry, const BlockToEncode& block) {
  if (block.references.empty() && block.runs.empty()) return absl::OkStatus();
  ReferenceTable table;
  for (const ReferenceBlock& reference : block.references) {
    KV_CHECK(reference.tokens.size() == geometry.block_tokens());
    KV_CHECK(reference.raw.size() == geometry.raw_block_bytes());
    table.references.push_back(
        {.node = reference.node, .digest = {}, .first_position = reference.first_position});
  }
  table.runs.assign(block.runs.begin(), block.runs.end());
  KV_RETURN_IF_ERROR(table.Check(geometry.block_tokens()));
  return CheckSharedTokens(block.tokens, block.references, block.runs);
}

}  // namespace

// Codes blocks that share a batch.
class ResidualCodec::Encoder {
 public:
  Encoder(const State& state, const PreparedLevel& level, std::span<const BlockToEncode> blocks);
  absl::StatusOr<std::vector<EncodedBlock>> Run();

 private:
  struct Coded : BatchedBlock {
    const BlockToEncode* block = nullptr;
    std::vector<bool> unreferenced;  // [token] that no reference is used for
    RansEncoder encoder;
    std::size_t steps = 0;
    std::vector<std::size_t> layer_steps;  // steps up to the end of each layer
  };

  // A part of the profile at work.
  struct Worker {
    const State* state = nullptr;
    const PreparedLevel* level = nullptr;
    std::vector<std::vector<std::int32_t>> exponents;  // [plane][row group][group][lane]
    bool used = false;                                 // by any token of the batch
    // Of one plane:
    std::vector<float> rows;    // [row][component] predicted, then restored
    std::vector<float> values;  // [row][value] of the residual, then as they are restored
  };

  bool FirstTokenIsOfProfile(const Coded& coded) const;
  void KeepExact(Coded& coded, std::size_t token);
  // Tokens of references that are no use.
  void LeaveReferences(Coded& coded);
  // The runs of a block but for what was left, which splits them.
  std::vector<ReferenceRun> LiveRuns(const Coded& coded) const;
  // False: tokens were found whose values are out of range; they are coded otherwise from now on.
  bool CodePlanes();
  // The same for one plane. Makes restored rows of predicted ones.
  bool CodeResidual(std::uint32_t plane);
  // What there is to code of a plane in one way, less what is predicted.
  void Analyze(Way way, std::uint32_t plane);
  // Whether 16 tokens have values in range.
  bool CodeGroup(Way way, std::uint32_t plane, Coded& coded, std::size_t group);
  // The same for exact frames, where all rows come back as they are.
  bool CodeNumbers(std::uint32_t plane, std::vector<float>& predicted);
  void StartCoding();
  // Of records_, to what is coded of the block.
  void AddSteps(Coded& coded, std::size_t steps);
  void ChooseExponents();
  // What the frame says of references: those that are used.
  ReferenceTable TableOf(const Coded& coded);
  // Whether so many tokens are exact that the block is better stored losslessly.
  bool IsLost(const Coded& coded) const;
  absl::StatusOr<EncodedBlock> Finish(Coded& coded);

  const State& state_;
  const PreparedLevel& level_;
  std::vector<Coded> coded_;
  std::size_t row_count_ = 0;
  std::vector<std::vector<float>> rows_;  // [plane][row][component]
  std::array<Worker, kWayCount> workers_;
  std::vector<std::uint32_t> records_;  // of one plane for 16 tokens
  KvDigests digests_;
};

ResidualCodec::Encoder::Encoder(const State& state, const PreparedLevel& level,
                                std::span<const BlockToEncode> blocks)
    : state_(state), level_(level) {
  workers_[kWhole].state = &state;
  workers_[kWhole].level = &level;
  if (state.differences != nullptr && level.quality != Quality::kExact) {
    workers_[kDifference].state = state.differences.get();
    workers_[kDifference].level = state.differences->FindLevel(level.quality);
  }
  const bool with_references = workers_[kDifference].state != nullptr;
  const KvGeometry& geometry = state.geometry;
  for (const BlockToEncode& block : blocks) {
    Coded& coded = coded_.emplace_back();
    coded.block = &block;
    coded.tokens = block.tokens;
    coded.first_row = row_count_;
    coded.angles = state.raw_kv.AnglesAt(block.first_position);
    coded.unreferenced.assign(geometry.block_tokens(), !with_references);
    coded.references = block.references;
    if (with_references) LeaveReferences(coded);
    row_count_ += GroupsOf(geometry.block_tokens()) * kLanes;
  }
  std::vector<std::vector<bool>> extreme(coded_.size(), std::vector<bool>(geometry.block_tokens()));
  for (std::uint32_t index = 0; index < state.profile.planes.size(); ++index) {
    const PlaneShape& plane = state.profile.planes[index];
    std::vector<float>& rows = rows_.emplace_back(row_count_ * plane.components());
    for (std::size_t b = 0; b < coded_.size(); ++b) {
      const Coded& coded = coded_[b];
      state.raw_kv.ReadRows(coded.block->raw, plane.layer, plane.kind(), coded.angles,
                            state.RowsOf(coded, index, rows));
      for (const std::uint32_t token :
           state.raw_kv.ExtremeTokens(coded.block->raw, plane.layer, plane.kind())) {
        extreme[b][token] = true;
      }
    }
  }
  for (std::size_t b = 0; b < coded_.size(); ++b) {
    Coded& coded = coded_[b];
    coded.first_from_profile =
        level.quality != Quality::kExact && !extreme[b][0] && FirstTokenIsOfProfile(coded);
    if (coded.first_from_profile) coded.unreferenced[0] = true;
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
  std::vector<const float*> rows;
  for (std::uint32_t plane = 0; plane < profile.planes.size(); ++plane) {
    rows.push_back(rows_[plane].data() + coded.first_row * profile.planes[plane].components());
  }
  return AreFirstRows(profile, rows);
}

void ResidualCodec::Encoder::KeepExact(Coded& coded, std::size_t token) {
  const auto at = static_cast<std::uint16_t>(token);
  const auto place = std::lower_bound(coded.exact.begin(), coded.exact.end(), at);
  if (place != coded.exact.end() && *place == at) return;
  coded.exact.insert(place, at);
  coded.unreferenced[token] = true;
  for (std::size_t plane = 0; plane < rows_.size(); ++plane) {
    const std::size_t components = state_.profile.planes[plane].components();
    std::fill_n(
        rows_[plane].begin() + static_cast<std::ptrdiff_t>((coded.first_row + token) * components),
        components, 0.0f);
  }
}

void ResidualCodec::Encoder::LeaveReferences(Coded& coded) {
  const ResidualProfile& profile = state_.profile;
  for (const ReferenceBlock& reference : coded.references) {
    coded.reference_angles.push_back(state_.raw_kv.AnglesAt(reference.first_position));
  }
  for (std::size_t i = 0; i < coded.references.size(); ++i) {
    const bool finer = QualityRank(coded.references[i].quality) > QualityRank(level_.quality);
    std::vector<bool> extreme(state_.geometry.block_tokens(), !finer);
    for (const PlaneShape& plane : profile.planes) {
      for (const std::uint32_t token :
           state_.raw_kv.ExtremeTokens(coded.references[i].raw, plane.layer, plane.kind())) {
        extreme[token] = true;
      }
    }
    for (const ReferenceRun& run : coded.block->runs) {
      for (std::size_t t = 0; run.reference == i && t < run.token_count; ++t) {
        if (extreme[run.offset + t]) coded.unreferenced[run.first_token + t] = true;
      }
    }
  }
}

std::vector<ReferenceRun> ResidualCodec::Encoder::LiveRuns(const Coded& coded) const {
  std::vector<ReferenceRun> live;
  for (const ReferenceRun& run : coded.block->runs) {
    bool goes_on = false;
    for (std::uint16_t t = 0; t < run.token_count; ++t) {
      const auto token = static_cast<std::uint16_t>(run.first_token + t);
      if (coded.unreferenced[token]) {
        goes_on = false;
      } else if (goes_on) {
        ++live.back().token_count;
      } else {
        live.push_back({.first_token = token,
                        .token_count = 1,
                        .reference = run.reference,
                        .offset = static_cast<std::uint16_t>(run.offset + t)});
        goes_on = true;
      }
    }
  }
  return live;
}

void ResidualCodec::Encoder::StartCoding() {
  for (Worker& worker : workers_) worker.used = false;
  workers_[kWhole].used = level_.quality == Quality::kExact;
  for (Coded& coded : coded_) {
    coded.runs = LiveRuns(coded);
    coded.StartCoding();
    for (std::size_t way = 0; way < kWayCount; ++way) {
      BatchedBlock::Lanes& lanes = coded.lanes[way];
      if (IsLost(coded)) {
        std::fill(lanes.active.begin(), lanes.active.end(), LaneMask{0});
        lanes.any = false;
      }
      workers_[way].used |= lanes.any;
    }
    coded.encoder = {};
    coded.steps = 0;
    coded.layer_steps.assign(state_.geometry.layer_count(), 0);
  }
}

bool ResidualCodec::Encoder::CodePlanes() {
  const std::vector<PlaneShape>& planes = state_.profile.planes;
  const bool exact = level_.quality == Quality::kExact;
  StartCoding();
  std::vector<RestoredCodes> codes(kWayCount, RestoredCodes(planes.size(), row_count_));
  for (std::uint32_t plane = 0; plane < planes.size(); ++plane) {
    for (std::size_t way = 0; way < kWayCount; ++way) {
      Worker& worker = workers_[way];
      if (worker.used) worker.rows = worker.state->Predict(plane, codes[way], coded_);
    }
    if (!(exact ? CodeNumbers(plane, workers_[kWhole].rows) : CodeResidual(plane))) return false;
    for (Coded& coded : coded_) coded.layer_steps[planes[plane].layer] = coded.steps;
    for (std::size_t way = 0; way < kWayCount; ++way) {
      const Worker& worker = workers_[way];
      if (!worker.used) continue;
      codes[way].Add(plane, worker.state->profile.plane_profiles[plane], planes[plane],
                     exact ? rows_[plane] : worker.rows);
    }
  }
  return true;
}

void ResidualCodec::Encoder::Analyze(Way way, std::uint32_t plane) {
  Worker& worker = workers_[way];
  std::vector<float> residual(worker.rows.size());
  if (way == kWhole) {
    for (std::size_t i = 0; i < residual.size(); ++i)
      residual[i] = rows_[plane][i] - worker.rows[i];
  } else {
    const std::size_t components = state_.profile.planes[plane].components();
    for (const Coded& coded : coded_) {
      if (!coded.lanes[way].any) continue;
      state_.ReadReferences(coded, plane, state_.RowsOf(coded, plane, residual));
      for (const ReferenceRun& run : coded.runs) {
        const std::size_t begin = (coded.first_row + run.first_token) * components;
        for (std::size_t i = begin; i < begin + run.token_count * components; ++i) {
          residual[i] = rows_[plane][i] - residual[i] - worker.rows[i];
        }
      }
    }
  }
  worker.values.resize(residual.size());
  worker.state->transforms[plane].Analyze(residual, worker.values);
}

bool ResidualCodec::Encoder::CodeGroup(Way way, std::uint32_t plane, Coded& coded,
                                       std::size_t group) {
  Worker& worker = workers_[way];
  const PreparedLevel& level = *worker.level;
  const LevelPlane& coded_plane = level.planes[plane];
  const std::size_t coded_count = coded_plane.coded_count();
  const std::size_t group_count = worker.state->profile.group_count;
  const std::size_t components = state_.profile.planes[plane].components();
  const std::size_t first_row = coded.first_row + group * kLanes;
  BatchedBlock::Lanes& lanes = coded.lanes[way];
  float* const values = worker.values.data() + first_row * components;
  std::vector<float> targets(coded_count * kLanes), coded_values(coded_count * kLanes);
  coded_plane.Gather(values, components, 1 / level.step, targets.data());
  bool in_range = true;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    if ((lanes.active[group] >> lane & 1) == 0) continue;
    bool fits = coded_plane.MayDrop(values + lane * components, level.step * kDroppedMax);
    for (std::size_t c = 0; fits && c < coded_count; ++c) {
      fits = std::abs(targets[c * kLanes + lane]) < kTargetMax;
    }
    if (fits) continue;
    if (way == kDifference) {
      coded.unreferenced[group * kLanes + lane] = true;
    } else {
      KeepExact(coded, group * kLanes + lane);
    }
    in_range = false;
  }
  records_.resize((group_count + coded_count * kResidualStepsMax) * kLanes);
  AddSteps(coded, Kernels().residual_encode(
                      worker.state->TablesOf(level), coded_plane.Symbols(), lanes.active[group],
                      worker.exponents[plane].data() + first_row * group_count, targets.data(),
                      &lanes.carry[group], coded_values.data(), records_.data()));
  std::fill_n(values, kLanes * components, 0.0f);
  coded_plane.Scatter(coded_values.data(), level.step, values, components);
  return in_range;
}

bool ResidualCodec::Encoder::CodeResidual(std::uint32_t plane) {
  bool in_range = true;
  for (const Way way : {kWhole, kDifference}) {
    if (workers_[way].used) Analyze(way, plane);
  }
  for (Coded& coded : coded_) {
    for (std::size_t group = 0; group < coded.lanes[kWhole].active.size(); ++group) {
      for (const Way way : {kWhole, kDifference}) {
        if (coded.lanes[way].active[group] != 0) in_range &= CodeGroup(way, plane, coded, group);
      }
    }
  }
  for (Worker& worker : workers_) {
    if (in_range && worker.used) {
      worker.state->transforms[plane].AddResidual(worker.values, worker.rows);
    }
  }
  return in_range;
}

bool ResidualCodec::Encoder::CodeNumbers(std::uint32_t plane, std::vector<float>& predicted) {
  const ResidualTables tables = state_.TablesOf(level_);
  const std::size_t components = state_.profile.planes[plane].components();
  const PredictedPlane cells = state_.CellsOf(plane);
  bool in_range = true;
  std::vector<float> predictions(components * kLanes);
  std::vector<std::uint32_t> numbers(components * kLanes);
  records_.resize(components * kPredictedStepsMax * kLanes);
  for (Coded& coded : coded_) {
    state_.RotateRows(coded, plane, predicted);
    for (std::size_t group = 0; group < coded.lanes[kWhole].active.size(); ++group) {
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        const std::size_t token = group * kLanes + lane;
        const bool active = (coded.lanes[kWhole].active[group] >> lane & 1) != 0;
        for (std::size_t c = 0; c < components; ++c) {
          const std::uint32_t number =
              active ? state_.LoadNumber(coded.block->raw, plane, token, c) : 0;
          numbers[c * kLanes + lane] = number;
          if (active && !state_.IsInCells(plane, c, number)) {
            KeepExact(coded, token);
            in_range = false;
          }
        }
      }
      if (!in_range) continue;
      ToLanes(predicted.data() + (coded.first_row + group * kLanes) * components, components,
              predictions);
      AddSteps(coded, Kernels().predicted_encode(
                          tables, *state_.exact_format, cells, coded.lanes[kWhole].active[group],
                          coded.lanes[kWhole].carry[group].shift, predictions.data(),
                          numbers.data(), records_.data()));
    }
  }
  return in_range;
}

void ResidualCodec::Encoder::AddSteps(Coded& coded, std::size_t steps) {
  std::copy_n(records_.data(), steps * kLanes, coded.encoder.AddSteps(steps));
  coded.steps += steps;
}

bool ResidualCodec::Encoder::IsLost(const Coded& coded) const {
  return KeepsTooMuchExact(state_.geometry, coded.exact.size());
}

ReferenceTable ResidualCodec::Encoder::TableOf(const Coded& coded) {
  ReferenceTable table = {.references = {}, .runs = coded.runs};
  std::vector<std::optional<std::uint16_t>> places(coded.references.size());
  for (ReferenceRun& run : table.runs) {
    std::optional<std::uint16_t>& place = places[run.reference];
    if (!place.has_value()) {
      const ReferenceBlock& block = coded.references[run.reference];
      place = static_cast<std::uint16_t>(table.references.size());
      table.references.push_back({.node = block.node,
                                  .digest = digests_.Of(block.raw),
                                  .first_position = block.first_position});
    }
    run.reference = *place;
  }
  return table;
}

absl::StatusOr<EncodedBlock> ResidualCodec::Encoder::Finish(Coded& coded) {
  if (IsLost(coded)) return UncodedBlock(coded.exact.size());
  CodedSymbols symbols = {.first_from_profile = coded.first_from_profile, .exact = coded.exact};
  KV_RETURN_IF_ERROR(coded.encoder.Finish(symbols.symbols, coded.layer_steps, symbols.layer_bytes));
  if (!coded.runs.empty()) symbols.references = TableOf(coded);
  return WriteResidualBody(state_.geometry, state_.id, level_.quality, *coded.block, symbols);
}

void ResidualCodec::Encoder::ChooseExponents() {
  if (level_.quality == Quality::kExact) return;
  std::vector<std::vector<float>> features;
  if (state_.importance.has_value()) {
    std::vector<std::uint32_t> tokens_behind(row_count_, 1);
    for (const Coded& coded : coded_) {
      const BlockToEncode& block = *coded.block;
      for (std::uint32_t t = 0; t < block.tokens.size(); ++t) {
        tokens_behind[coded.first_row + t] =
            TokensBehind(block.first_position + t, block.session_tokens);
      }
    }
    features = state_.importance->Features(rows_, tokens_behind);
  }
  for (Worker& worker : workers_) {
    if (worker.state == nullptr) continue;
    const std::size_t groups = worker.state->profile.group_count;
    const float strength = worker.level->importance_strength;
    if (groups > 0 && state_.importance.has_value()) {
      worker.exponents = state_.importance->Exponents(features, row_count_, strength);
    } else {
      worker.exponents.assign(rows_.size(), std::vector<std::int32_t>(row_count_ * groups));
    }
    for (const Coded& coded : coded_) {
      SetExponents(coded.block->importance, coded.first_row, static_cast<std::uint32_t>(groups),
                   strength, worker.exponents);
    }
  }
}

absl::StatusOr<std::vector<EncodedBlock>> ResidualCodec::Encoder::Run() {
  ChooseExponents();
  // Each time over, a token more is exact.
  while (!CodePlanes()) {
  }
  std::vector<EncodedBlock> encoded;
  for (Coded& coded : coded_) {
    KV_ASSIGN_OR_RETURN(encoded.emplace_back(), Finish(coded));
  }
  return encoded;
}

absl::StatusOr<std::vector<EncodedBlock>> ResidualCodec::Encode(
    std::span<const BlockToEncode> blocks, Quality quality) const {
  const PreparedLevel* const level = state_->FindLevel(quality);
  if (level == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("profile ", state_->id.ToHex(), " has no level of this quality"));
  }
  const KvGeometry& geometry = state_->geometry;
  for (const BlockToEncode& block : blocks) {
    KV_RETURN_IF_ERROR(CheckReferences(geometry, block));
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
}  // namespace kvtrie
