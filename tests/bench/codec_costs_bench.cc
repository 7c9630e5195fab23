// What encoding and decoding at level high take, step by step: operations as they are counted, and
// CPU seconds of this thread, both per token. One JSON object; tests/bench/costs/costs.py reads it.
//
//   codec_costs_bench [--layers N] [--heads N] [--head-dim N] [--v-head-dim N] [--per-head 1]
//                     [--inputs N] [--query-heads N] [--coded-share X] [--nonzero-share X]
//                     [--rounds N]
//   codec_costs_bench --profile FILE --tokens FILE --kv FILE [--rounds N]
//
// Without a profile: normal KV, and a profile that nothing was fitted to, whose planes read the
// first N of layer below, layer below that, layer 0, and K for V. So many values are coded, and
// about so many of all are not zero: work depends on nothing else that a fit decides. With one:
// that of SmolLM2's shape, and raw KV of these tokens (as one run, bfloat16, RoPE of theta
// 100,000).
//
// The steps are run as residual_encoder.cc and residual_decoder.cc run them, from the same parts;
// their bytes are held against those of the codec itself, so that what is counted is what it does.
#include <time.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "client/ctl/profile_files.h"
#include "nlohmann/json.hpp"
#include "storage/base/check.h"
#include "storage/codec/codec_kernels.h"
#include "storage/codec/importance.h"
#include "storage/codec/plane_transform.h"
#include "storage/codec/rans.h"
#include "storage/codec/residual_level.h"
#include "tests/bench/bench_kv.h"
#include "tests/bench/best_cpu_seconds.h"
#include "tests/storage/codec/residual_fixture.h"

namespace kvtrie {
namespace {

constexpr std::size_t kHigh = 0;  // index of the level
constexpr std::uint32_t kBlockTokens = kLanes;

// One batch of the codec (residual_codec.cc).
constexpr std::size_t kBatchRows = 256;
constexpr std::size_t kBatchBytes = std::size_t{32} << 20;

// By name: of operations, or of seconds.
using Amounts = std::map<std::string, double>;

// CPU seconds of this thread by kind of step, the least of several rounds.
class StepClock {
 public:
  template <typename Body>
  void Time(const char* kind, Body body) {
    const double start = Now();
    body();
    round_[kind] += Now() - start;
  }
  void EndRound() {
    for (const auto& [kind, seconds] : round_) {
      const auto [at, is_new] = best_.try_emplace(kind, seconds);
      if (!is_new) at->second = std::min(at->second, seconds);
    }
    round_.clear();
  }
  const Amounts& best() const { return best_; }

 private:
  static double Now() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }

  Amounts round_, best_;
};

struct Options {
  std::uint32_t inputs = 4;
  bool per_head = false;
  std::uint32_t query_heads = 0;
  double coded_share = 1;
  double nonzero_share = 0.1;
};

// Of the coded values of a block, each has `kSpread` times less than the first at the end. Returns
// the first one's deviation, in steps, at which so many of them are not rounded to zero.
constexpr double kSpread = 16;
double FirstDeviation(double share_of_coded) {
  const auto share_at = [](double first) {
    double share = 0;
    for (int i = 0; i < 100; ++i) {
      const double deviation = first * std::pow(kSpread, -(i + 0.5) / 100);
      share += std::erfc(0.6 / deviation / std::sqrt(2.0)) / 100;
    }
    return share;
  };
  double low = 1e-3, high = 1e3;
  for (int i = 0; i < 60; ++i) {
    const double middle = std::sqrt(low * high);
    (share_at(middle) < share_of_coded ? low : high) = middle;
  }
  return low;
}

// Its predictions tell little, and its bases are almost diagonal; neither changes the work.
// KV has a deviation of 1.
ResidualProfile MadeProfile(const ModelSpec& spec, const Options& options) {
  constexpr std::array kInputs = {PredictorInput::kLayerBelow, PredictorInput::kTwoBelow,
                                  PredictorInput::kFirstLayer, PredictorInput::kSameLayerK};
  ResidualProfile profile = PlainProfile(WithBlocks(SyntheticSpec({{1, 1, 2, 2}}, spec.dtype),
                                                    kBlockTokens));  // for its tables of symbols
  profile.codec_key = spec.CodecKey();
  profile.planes = PlanesOf(spec);
  profile.levels = {{.quality = Quality::kHigh, .step = 1, .rate_weight = 0.08f}};
  profile.levels[kHigh].importance_strength = 0.5f;
  profile.plane_profiles.clear();
  profile.table_tokens.clear();
  profile.table_rows.clear();
  profile.group_count = 1;
  profile.exponent_frequencies.assign(kExponentSymbols, 64);
  profile.exponent_frequencies[kExponentDeltaMax] += 4096 - 64 * kExponentSymbols;

  TestRandom random(3);
  const double first = FirstDeviation(options.nonzero_share / options.coded_share);
  for (std::uint32_t p = 0; p < profile.planes.size(); ++p) {
    const PlaneShape& shape = profile.planes[p];
    const std::size_t components = shape.components();
    PlaneProfile& plane = profile.plane_profiles.emplace_back();
    plane.block_count = options.per_head ? shape.heads : 1;
    const std::size_t size = components / plane.block_count;
    if (shape.layer > 0) {
      plane.inputs.assign(kInputs.begin(), kInputs.begin() + options.inputs);
    }
    // Near the bottom, layer 0 is one of those below already; a fit leaves it out too.
    const auto planes_read = InputPlanes(profile.planes, p, plane.inputs);
    if (std::count(planes_read.begin(), planes_read.end(), 0u) > 1) {
      std::erase(plane.inputs, PredictorInput::kFirstLayer);
    }
    std::size_t in = 0;
    for (const std::uint32_t input : InputPlanes(profile.planes, p, plane.inputs)) {
      in += profile.planes[input].components() / plane.block_count;
    }
    plane.bias.assign(components, 0);
    plane.input_scales.assign(components, 1.0f / 32);
    for (std::size_t i = 0; i < components * in; ++i) {
      plane.weights.push_back(static_cast<std::int8_t>(random.Below(127)) - 63);
    }
    // Weights have a deviation of 36, codes one of 32.
    plane.weight_scales.assign(components, 0.1f / 36 / 32 / std::sqrt(static_cast<float>(in) + 1));
    plane.basis.assign(components * size, 0);
    std::vector<std::uint8_t>& scales = plane.scales.emplace_back();
    for (std::size_t v = 0; v < components; ++v) {
      const std::size_t of_block = v % size;
      std::int8_t* const row = plane.basis.data() + v * size;
      row[of_block] = 127;
      if (of_block % 2 == 0 && of_block + 1 < size) row[of_block + 1] = -31;
      const double place = static_cast<double>(of_block) / static_cast<double>(size);
      const double deviation = first * std::pow(kSpread, -place / options.coded_share);
      plane.basis_scales.push_back(static_cast<float>(1 / 127.0 / deviation));
      const double index = std::clamp(8 * (8 + std::log2(deviation)), 0.0, 159.0);
      scales.push_back(place < options.coded_share ? static_cast<std::uint8_t>(std::lround(index))
                                                   : kNotCoded);
    }
    // Numbers are some 32 cells from what is predicted.
    plane.cell_exponents.assign(components, -5);
    plane.cell_scales.assign(components, 8 * (8 + 5));
  }

  ImportanceModel& importance = profile.importance;
  importance.query_heads = options.query_heads;
  importance.covariance_rank = options.query_heads > 0 ? 8 : 0;
  const ImportanceSizes sizes = SizesOf(profile.planes, profile.group_count, importance);
  const auto draw = [&](std::size_t count, float size) {
    std::vector<float> drawn(count);
    for (float& x : drawn) x = size * DrawNormal(random);
    return drawn;
  };
  importance.query_means = draw(sizes.query_means, 0.2f);
  importance.query_factors = draw(sizes.query_factors, 0.1f);
  importance.normalizers.assign(sizes.normalizers, 1.0f);
  importance.weights = draw(sizes.weights, 0.01f);
  return profile;
}

// A batch of blocks of one text, each behind the first, whose first token is special.
struct Batch {
  std::vector<std::vector<std::byte>> raw;
  std::vector<std::vector<TokenId>> tokens;
  std::vector<BlockToEncode> blocks;

  std::size_t row_count() const { return blocks.size() * kBlockTokens; }
};

Batch CutBatch(const ModelSpec& spec, const SyntheticText& text, std::size_t component_count) {
  const std::size_t rows = std::min(kBatchRows, kBatchBytes / (sizeof(float) * component_count));
  const std::size_t count = std::min(rows, text.tokens.size() - kBlockTokens) / kBlockTokens;
  Batch batch;
  for (std::uint32_t b = 1; b <= count; ++b) {
    const std::uint32_t first = b * kBlockTokens;
    batch.raw.push_back(CutBlock(spec, text, first));
    batch.tokens.emplace_back(text.tokens.begin() + first,
                              text.tokens.begin() + first + kBlockTokens);
  }
  for (std::size_t b = 0; b < count; ++b) {
    batch.blocks.push_back({.first_position = static_cast<std::uint32_t>(b + 1) * kBlockTokens,
                            .session_tokens = static_cast<std::uint32_t>(text.tokens.size()),
                            .tokens = batch.tokens[b],
                            .raw = batch.raw[b]});
  }
  return batch;
}

// Runs the steps of both directions on one batch.
class Steps {
 public:
  Steps(const ModelSpec& spec, const ResidualProfile& profile, const Batch& batch)
      : profile_(profile),
        batch_(batch),
        geometry_(spec),
        raw_kv_(geometry_, spec.rope),
        symbols_(SymbolTables::Of(profile).value()),
        thresholds_(RateThresholds(profile, profile.levels[kHigh].rate_weight)),
        row_count_(batch.row_count()) {
    for (std::uint32_t p = 0; p < profile.planes.size(); ++p) {
      transforms_.emplace_back(profile, p);
      levels_.emplace_back(profile, p, kHigh);
    }
    if (profile.importance.query_heads > 0) {
      importance_.emplace(profile, RopePairs::OfLayers(spec));
    }
  }

  // [block] the entropy-coded bytes.
  std::vector<std::vector<std::byte>> Encode(StepClock& clock);
  // [block] raw KV.
  std::vector<std::vector<std::byte>> Decode(StepClock& clock,
                                             const std::vector<std::vector<std::byte>>& entropy);
  // Operations per token of what was encoded last.
  Amounts Operations() const;

 private:
  std::span<float> RowsOf(std::size_t block, std::uint32_t plane, std::vector<float>& rows) const {
    const std::size_t components = profile_.planes[plane].components();
    return std::span(rows).subspan(block * kBlockTokens * components, kBlockTokens * components);
  }
  std::vector<float> Predict(StepClock& clock, std::uint32_t plane, const RestoredCodes& codes) {
    std::vector<float> rows(row_count_ * profile_.planes[plane].components());
    clock.Time("predict", [&] {
      transforms_[plane].Predict(codes, rows);
      for (std::size_t b = 0; b < batch_.blocks.size(); ++b) {
        PredictFromTokens(profile_, plane, batch_.tokens[b], RowsOf(b, plane, rows));
      }
    });
    return rows;
  }
  bool InRange(const LevelPlane& level, const float* values, std::size_t components,
               const std::vector<float>& targets) const;

  const ResidualProfile& profile_;
  const Batch& batch_;
  const KvGeometry geometry_;
  const RawKv raw_kv_;
  const SymbolTables symbols_;
  const std::vector<float> thresholds_;
  const std::size_t row_count_;
  std::vector<PlaneTransform> transforms_;
  std::vector<LevelPlane> levels_;
  std::optional<ImportanceEstimator> importance_;
  std::size_t step_count_ = 0;
  double nonzero_count_ = 0;
  double add_macs_ = 0;
};

bool Steps::InRange(const LevelPlane& level, const float* values, std::size_t components,
                    const std::vector<float>& targets) const {
  constexpr float kDroppedMax = 16, kTargetMax = 1 << 22;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    bool fits =
        level.MayDrop(values + lane * components, profile_.levels[kHigh].step * kDroppedMax);
    for (std::size_t c = 0; fits && c < level.coded_count(); ++c) {
      fits = std::abs(targets[c * kLanes + lane]) < kTargetMax;
    }
    if (!fits) return false;
  }
  return true;
}

std::vector<std::vector<std::byte>> Steps::Encode(StepClock& clock) {
  step_count_ = 0;
  nonzero_count_ = add_macs_ = 0;
  const std::size_t plane_count = profile_.planes.size();
  const float step = profile_.levels[kHigh].step;
  std::vector<std::vector<float>> given(plane_count);
  clock.Time("read", [&] {
    for (std::size_t b = 0; b < batch_.blocks.size(); ++b) {
      const RopeAngles angles = raw_kv_.AnglesAt(batch_.blocks[b].first_position);
      for (std::uint32_t p = 0; p < plane_count; ++p) {
        const PlaneShape& plane = profile_.planes[p];
        given[p].resize(row_count_ * plane.components());
        raw_kv_.ReadRows(batch_.raw[b], plane.layer, plane.kind(), angles, RowsOf(b, p, given[p]));
        KV_CHECK(raw_kv_.ExtremeTokens(batch_.raw[b], plane.layer, plane.kind()).empty());
      }
    }
  });
  std::vector<std::vector<std::int32_t>> exponents(
      plane_count, std::vector<std::int32_t>(row_count_ * profile_.group_count));
  if (importance_.has_value()) {
    clock.Time("importance", [&] {
      std::vector<std::uint32_t> behind;
      for (const BlockToEncode& block : batch_.blocks) {
        for (std::uint32_t t = 0; t < kBlockTokens; ++t) {
          behind.push_back(block.session_tokens - block.first_position - t);
        }
      }
      exponents = importance_->Exponents(importance_->Features(given, behind), row_count_,
                                         profile_.levels[kHigh].importance_strength);
    });
  }
  const ResidualTables tables = symbols_.Tables(thresholds_.data());
  RestoredCodes codes(plane_count, row_count_);
  std::vector<RansEncoder> encoders(batch_.blocks.size());
  std::vector<ResidualCarry> carries(batch_.blocks.size());
  std::vector<float> residual, values, targets, restored;
  std::vector<std::uint32_t> records;
  for (std::uint32_t p = 0; p < plane_count; ++p) {
    const PlaneShape& shape = profile_.planes[p];
    const std::size_t components = shape.components();
    const LevelPlane& level = levels_[p];
    std::vector<float> rows = Predict(clock, p, codes);
    residual.resize(rows.size());
    values.resize(rows.size());
    clock.Time("analyze", [&] {
      for (std::size_t i = 0; i < rows.size(); ++i) residual[i] = given[p][i] - rows[i];
      transforms_[p].Analyze(residual, values);
    });
    for (std::size_t b = 0; b < batch_.blocks.size(); ++b) {
      float* const of_block = values.data() + b * kBlockTokens * components;
      targets.resize(level.coded_count() * kLanes);
      restored.resize(targets.size());
      clock.Time("targets", [&] {
        level.Gather(of_block, components, 1 / step, targets.data());
        KV_CHECK(InRange(level, of_block, components, targets));
      });
      records.resize((profile_.group_count + level.coded_count() * kResidualStepsMax) * kLanes);
      std::size_t steps = 0;
      clock.Time("encode_symbols", [&] {
        steps =
            Kernels().residual_encode(tables, level.Symbols(), kAllLanes,
                                      exponents[p].data() + b * kBlockTokens * profile_.group_count,
                                      targets.data(), &carries[b], restored.data(), records.data());
      });
      step_count_ += steps;
      clock.Time("rans",
                 [&] { std::copy_n(records.data(), steps * kLanes, encoders[b].AddSteps(steps)); });
      clock.Time("scatter", [&] {
        std::fill_n(of_block, kLanes * components, 0.0f);
        level.Scatter(restored.data(), step, of_block, components);
      });
    }
    const auto nonzero = static_cast<double>(
        std::count_if(values.begin(), values.end(), [](float value) { return value != 0; }));
    nonzero_count_ += nonzero;
    add_macs_ += nonzero * static_cast<double>(components) / profile_.plane_profiles[p].block_count;
    clock.Time("add_values", [&] { transforms_[p].AddResidual(values, rows); });
    clock.Time("codes", [&] { codes.Add(p, profile_.plane_profiles[p], shape, rows); });
  }
  std::vector<std::vector<std::byte>> entropy(batch_.blocks.size());
  clock.Time("rans", [&] {
    for (std::size_t b = 0; b < entropy.size(); ++b) {
      KV_CHECK(encoders[b].Finish(entropy[b]).ok());
    }
  });
  return entropy;
}

std::vector<std::vector<std::byte>> Steps::Decode(
    StepClock& clock, const std::vector<std::vector<std::byte>>& entropy) {
  std::vector<std::vector<std::byte>> raw(batch_.raw.size());
  std::vector<RopeAngles> angles(raw.size());
  std::vector<RansState> states(raw.size());
  std::vector<ResidualCarry> carries(raw.size());
  for (std::size_t b = 0; b < raw.size(); ++b) {
    raw[b].resize(geometry_.raw_block_bytes());
    Kernels().residual_start(reinterpret_cast<const std::uint8_t*>(entropy[b].data()),
                             entropy[b].size(), &states[b]);
    clock.Time("write", [&] { angles[b] = raw_kv_.AnglesAt(batch_.blocks[b].first_position); });
  }
  const ResidualTables tables = symbols_.Tables();
  RestoredCodes codes(profile_.planes.size(), row_count_);
  std::vector<float> coded_values;
  for (std::uint32_t p = 0; p < profile_.planes.size(); ++p) {
    const PlaneShape& shape = profile_.planes[p];
    const std::size_t components = shape.components();
    const LevelPlane& level = levels_[p];
    std::vector<float> rows = Predict(clock, p, codes);
    std::vector<float> values;
    clock.Time("scatter", [&] { values.resize(rows.size()); });
    for (std::size_t b = 0; b < raw.size(); ++b) {
      coded_values.resize(level.coded_count() * kLanes);
      clock.Time("decode_symbols", [&] {
        Kernels().residual_decode(tables, level.Symbols(), kAllLanes, &states[b], &carries[b],
                                  coded_values.data());
      });
      clock.Time("scatter", [&] {
        level.Scatter(coded_values.data(), profile_.levels[kHigh].step,
                      values.data() + b * kBlockTokens * components, components);
      });
    }
    clock.Time("add_values", [&] { transforms_[p].AddResidual(values, rows); });
    clock.Time("codes", [&] { codes.Add(p, profile_.plane_profiles[p], shape, rows); });
    clock.Time("write", [&] {
      for (std::size_t b = 0; b < raw.size(); ++b) {
        raw_kv_.WriteRows(RowsOf(b, p, rows), shape.layer, shape.kind(), angles[b], raw[b]);
      }
    });
  }
  for (const RansState& state : states) KV_CHECK(Kernels().residual_finished(&state));
  return raw;
}

Amounts Steps::Operations() const {
  Amounts of_token;
  for (std::uint32_t p = 0; p < profile_.planes.size(); ++p) {
    const PlaneShape& shape = profile_.planes[p];
    const PlaneProfile& plane = profile_.plane_profiles[p];
    const auto components = static_cast<double>(shape.components());
    double inputs = 0;
    for (const std::uint32_t input : InputPlanes(profile_.planes, p, plane.inputs)) {
      inputs += profile_.planes[input].components();
    }
    of_token["components"] += components;
    if (raw_kv_.unrotates_k(shape.layer) && !shape.is_v) of_token["rope_components"] += components;
    of_token["predict_macs"] += components * inputs / plane.block_count;
    of_token["input_codes"] += inputs;
    of_token["predict_products"] += inputs > 0 ? components : 0;
    of_token["analyze_macs"] += components * components / plane.block_count;
    // Of each exponent, and of what they are made of.
    if (profile_.importance.query_heads > 0) {
      of_token["importance_features"] +=
          static_cast<double>(ImportanceFeatureCount(profile_.planes));
    }
    of_token["coded_values"] += static_cast<double>(levels_[p].coded_count());
    if (profile_.importance.query_heads > 0 && !shape.is_v) {
      const double scores = 5.0 * profile_.importance.query_heads;
      of_token["importance_scores"] += scores;
      of_token["importance_macs"] +=
          scores * (1 + profile_.importance.covariance_rank) * shape.head_dim;
    }
  }
  const auto tokens = static_cast<double>(row_count_);
  // A step is of 16 tokens.
  of_token["entropy_steps"] = static_cast<double>(step_count_) * kLanes / tokens;
  of_token["nonzero_values"] = nonzero_count_ / tokens;
  of_token["add_macs"] = add_macs_ / tokens;
  return of_token;
}

// Of one product alone, with its matrix in the cache: multiply-adds per second.
template <typename Product, typename Weight, typename Row, typename Result>
double MacsPerSecond(std::size_t in, std::size_t out, std::size_t row_count, int rounds) {
  const std::vector<Weight> matrix(in * out, Weight{1});
  const Product product(in, out, matrix);
  const std::vector<Row> rows(row_count * in, Row{1});
  std::vector<Result> products(row_count * out);
  const double seconds = BestCpuSeconds(rounds, [&] { product.Run(rows, products); });
  return static_cast<double>(row_count * in * out) / seconds;
}

nlohmann::json PerToken(const Amounts& amounts, std::size_t tokens) {
  nlohmann::json of_token;
  for (const auto& [kind, amount] : amounts) of_token[kind] = amount / static_cast<double>(tokens);
  return of_token;
}

int Run(const ModelSpec& spec, const ResidualProfile& profile, const SyntheticText& text,
        int rounds, nlohmann::json row) {
  const Batch batch = CutBatch(spec, text, profile.component_count());
  const auto codec = MakeCodec(spec, profile);
  KV_CHECK(codec != nullptr);
  const std::size_t tokens = batch.row_count();

  // Rounds of all take turns, so that what disturbs the machine for a while spoils none of them.
  Steps steps(spec, profile, batch);
  StepClock encode_clock, decode_clock, whole_clock;
  double entropy_bytes = 0;
  for (int round = 0; round < rounds; ++round) {
    std::vector<EncodedBlock> encoded, exact;
    const auto encode = [&](Quality quality) {
      auto result = codec->Encode(batch.blocks, quality);
      KV_CHECK(result.ok());
      return *std::move(result);
    };
    const auto decode = [&](const std::vector<EncodedBlock>& bodies, Quality quality) {
      std::vector<std::vector<std::byte>> raw(bodies.size());
      std::vector<BlockToDecode> to_decode;
      for (std::size_t b = 0; b < bodies.size(); ++b) {
        raw[b].resize(batch.raw[b].size());
        to_decode.push_back({.body = bodies[b].body,
                             .section_bytes = bodies[b].section_bytes,
                             .quality = quality,
                             .tokens = batch.tokens[b],
                             .raw = raw[b]});
      }
      whole_clock.Time(quality == Quality::kHigh ? "decode" : "decode_exact",
                       [&] { KV_CHECK(codec->Decode(to_decode).ok()); });
      return raw;
    };
    whole_clock.Time("encode", [&] { encoded = encode(Quality::kHigh); });
    const auto decoded = decode(encoded, Quality::kHigh);
    whole_clock.Time("encode_exact", [&] { exact = encode(Quality::kExact); });
    KV_CHECK(decode(exact, Quality::kExact) == batch.raw);
    const auto entropy = steps.Encode(encode_clock);
    KV_CHECK(steps.Decode(decode_clock, entropy) == decoded);
    for (std::size_t b = 0; b < encoded.size(); ++b) {
      KV_CHECK(encoded[b].exact_tokens == 0);
      KV_CHECK(encoded[b].body.size() > entropy[b].size());
      KV_CHECK(std::equal(entropy[b].rbegin(), entropy[b].rend(), encoded[b].body.rbegin()));
      if (round == 0) entropy_bytes += static_cast<double>(encoded[b].body.size());
    }
    encode_clock.EndRound();
    decode_clock.EndRound();
    whole_clock.EndRound();
  }

  const PlaneShape& last = profile.planes.back();
  const PlaneProfile& of_last = profile.plane_profiles.back();
  std::size_t in = 0;
  for (const std::uint32_t input : InputPlanes(
           profile.planes, static_cast<std::uint32_t>(profile.planes.size() - 1), of_last.inputs)) {
    in += profile.planes[input].components() / of_last.block_count;
  }
  const std::size_t out = last.components() / of_last.block_count;
  row["kernels"] = KernelSetName(UsedKernelSet());
  row["batch_tokens"] = tokens;
  row["bits_per_component"] =
      8 * entropy_bytes / static_cast<double>(tokens * profile.component_count());
  row["operations"] = PerToken(steps.Operations(), 1);
  row["encode_steps"] = PerToken(encode_clock.best(), tokens);
  row["decode_steps"] = PerToken(decode_clock.best(), tokens);
  row["seconds"] = PerToken(whole_clock.best(), tokens);
  row["alone"] = {
      {"integer_macs_per_second",
       MacsPerSecond<IntegerProduct, std::int8_t, std::uint8_t, std::int32_t>(in, out, tokens,
                                                                              4 * rounds)},
      {"float_macs_per_second",
       MacsPerSecond<FloatProduct, float, float, float>(out, out, tokens, 4 * rounds)},
      // As large as those of a transformer's layer: what computing KV again can count on.
      {"gemm_macs_per_second",
       MacsPerSecond<FloatProduct, float, float, float>(2048, 2048, 256, rounds)}};
  std::printf("%s\n", row.dump().c_str());
  return 0;
}

int Main(int argc, char** argv) {
  std::map<std::string, std::string> options = {
      {"--layers", "30"},     {"--heads", "3"},          {"--head-dim", "64"},
      {"--v-head-dim", ""},   {"--per-head", "0"},       {"--inputs", "4"},
      {"--query-heads", "9"}, {"--coded-share", "0.97"}, {"--nonzero-share", "0.11"},
      {"--rounds", "5"}};
  for (int i = 1; i + 1 < argc; i += 2) options[argv[i]] = argv[i + 1];
  const auto number = [&](const char* name) {
    return static_cast<std::uint32_t>(std::strtoul(options[name].c_str(), nullptr, 10));
  };
  if (options["--v-head-dim"].empty()) options["--v-head-dim"] = options["--head-dim"];
  ModelSpec spec = SyntheticSpec(
      {{number("--layers"), number("--heads"), number("--head-dim"), number("--v-head-dim")}},
      DType::kBfloat16);
  spec.rope.theta = 1e5;
  spec.block_tokens = kBlockTokens;
  // A latent is turned only in dimensions of its own (its spec says none here).
  if (number("--v-head-dim") == 0) spec.rope = {};
  KV_CHECK(spec.Validate().ok());
  const int rounds = static_cast<int>(number("--rounds"));
  nlohmann::json row = {
      {"layers", number("--layers")},          {"kv_heads", number("--heads")},
      {"k_head_dim", number("--head-dim")},    {"v_head_dim", number("--v-head-dim")},
      {"per_head", number("--per-head") != 0}, {"inputs", number("--inputs")},
      {"query_heads", number("--query-heads")}};

  if (options.contains("--profile")) {
    const auto file = ReadProfileFile(options["--profile"]);
    KV_CHECK(file.ok());
    const auto profile = ResidualProfile::DecodeBody(file->body);
    KV_CHECK(profile.ok());
    const std::vector<std::byte> tokens = ReadFile(options["--tokens"]);
    SyntheticText text;
    text.tokens.resize(tokens.size() / sizeof(TokenId));
    std::memcpy(text.tokens.data(), tokens.data(), text.tokens.size() * sizeof(TokenId));
    text.raw = ReadFile(options["--kv"]);
    row["fitted"] = true;
    return Run(spec, *profile, text, rounds, row);
  }

  const Options made = {.inputs = number("--inputs"),
                        .per_head = number("--per-head") != 0,
                        .query_heads = number("--query-heads"),
                        .coded_share = std::stod(options["--coded-share"]),
                        .nonzero_share = std::stod(options["--nonzero-share"])};
  std::size_t component_count = 0;
  for (const PlaneShape& plane : PlanesOf(spec)) component_count += plane.components();
  const auto text_tokens = static_cast<std::uint32_t>(
      kBlockTokens + std::min(kBatchRows, kBatchBytes / (sizeof(float) * component_count)));
  SyntheticText text;
  for (std::uint32_t t = 0; t < text_tokens; ++t) text.tokens.push_back(t);
  text.raw = NormalBlock(RawKv(KvGeometry(WithBlocks(spec, text_tokens)), spec.rope), 1, 0);
  row["fitted"] = false;
  return Run(spec, MadeProfile(spec, made), text, rounds, row);
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) { return kvtrie::Main(argc, argv); }
