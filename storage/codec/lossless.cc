// LOSSLESS.md has the layout.
#include "storage/codec/lossless.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "storage/base/byte_order.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/codec/codec_kernels.h"

namespace kvtrie {
namespace {

enum class Mode : std::uint32_t { kPacked = 1, kRaw = 2 };

constexpr std::size_t kModeBytes = 4;

// Tables: [kind][same signs 2][spread 4][half 2]; a distribution of classes for each spread and
// half, a probability of a change of sign for each same signs and spread.
constexpr std::size_t kKinds = 2;
constexpr std::size_t kTables = 16;
constexpr std::size_t kSymbols = 2 * kLosslessClasses;
constexpr std::size_t kDistributions = 8;
constexpr std::size_t kSignContexts = 8;
constexpr unsigned kWeightBits = 6;
constexpr std::uint32_t kWeightMax = (1u << kWeightBits) - 1;
constexpr std::size_t kWeightBytes = kDistributions * kLosslessClasses * kWeightBits / 8;
constexpr std::size_t kKindTableBytes = kWeightBytes + kSignContexts;

constexpr std::uint32_t kLayerIsRaw = 1u << 31;
constexpr std::size_t kLayerHeadBytes = 16;
constexpr std::uint32_t kExponentMeanMax = 16 * 255;

constexpr std::size_t DistributionOf(std::size_t table) { return table % 8; }
constexpr std::size_t SignContextOf(std::size_t table) { return table / 2; }

absl::Status Damaged(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("lossless body: ", what));
}

// In quarters of an octave; 0 for what never comes.
std::uint32_t Weight(std::uint32_t code) {
  constexpr std::uint32_t kQuarters[] = {16, 19, 23, 27};
  return code == 0 ? 0 : kQuarters[(code - 1) % 4] << (code - 1) / 4;
}

struct KindModel {
  std::array<std::array<std::uint8_t, kLosslessClasses>, kDistributions> weights = {};
  std::array<std::uint8_t, kSignContexts> sign_changes = {};  // of 256
};

using Counts = std::array<std::array<std::uint32_t, kSymbols>, kTables>;

std::uint8_t NearestWeight(std::uint64_t count, std::uint64_t count_max) {
  if (count == 0) return 0;
  const auto distance = [&](std::uint32_t code) {
    const std::uint64_t a = Weight(code) * count_max;
    const std::uint64_t b = Weight(kWeightMax) * count;
    return a > b ? a - b : b - a;
  };
  std::uint32_t best = kWeightMax;
  while (best > 1 && distance(best - 1) <= distance(best)) --best;
  return static_cast<std::uint8_t>(best);
}

KindModel FitModel(const Counts& counts) {
  std::array<std::array<std::uint64_t, kLosslessClasses>, kDistributions> classes = {};
  std::array<std::array<std::uint64_t, 2>, kSignContexts> signs = {};
  for (std::size_t table = 0; table < kTables; ++table) {
    for (std::size_t symbol = 0; symbol < kSymbols; ++symbol) {
      classes[DistributionOf(table)][symbol / 2] += counts[table][symbol];
      signs[SignContextOf(table)][symbol % 2] += counts[table][symbol];
    }
  }
  KindModel model;
  for (std::size_t d = 0; d < kDistributions; ++d) {
    const std::uint64_t count_max = *std::max_element(classes[d].begin(), classes[d].end());
    for (std::size_t c = 0; c < kLosslessClasses; ++c) {
      model.weights[d][c] = NearestWeight(classes[d][c], count_max);
    }
  }
  for (std::size_t s = 0; s < kSignContexts; ++s) {
    const std::uint64_t total = signs[s][0] + signs[s][1];
    const std::uint64_t share = total == 0 ? 128 : (256 * signs[s][1] + total / 2) / total;
    model.sign_changes[s] = static_cast<std::uint8_t>(std::clamp<std::uint64_t>(share, 1, 255));
  }
  return model;
}

void WriteModel(const KindModel& model, std::byte* to) {
  std::size_t bit = 0;
  for (const auto& weights : model.weights) {
    for (const std::uint8_t weight : weights) {
      const auto two = static_cast<std::uint16_t>(weight << bit % 8);
      to[bit / 8] |= static_cast<std::byte>(two & 0xFF);
      if (bit % 8 + kWeightBits > 8) to[bit / 8 + 1] |= static_cast<std::byte>(two >> 8);
      bit += kWeightBits;
    }
  }
  std::memcpy(to + kWeightBytes, model.sign_changes.data(), kSignContexts);
}

KindModel ReadModel(const std::byte* from) {
  KindModel model;
  std::size_t bit = 0;
  for (auto& weights : model.weights) {
    for (std::uint8_t& weight : weights) {
      auto bits = static_cast<std::uint32_t>(from[bit / 8]);
      if (bit % 8 + kWeightBits > 8) bits |= static_cast<std::uint32_t>(from[bit / 8 + 1]) << 8;
      weight = static_cast<std::uint8_t>(bits >> bit % 8 & kWeightMax);
      bit += kWeightBits;
    }
  }
  std::memcpy(model.sign_changes.data(), from + kWeightBytes, kSignContexts);
  return model;
}

// Distributions that are all 0 are of contexts that never come.
void SetTables(const KindModel& model, std::size_t first_table, RansTables& tables) {
  std::array<std::uint32_t, kSymbols> counts;
  std::array<std::uint16_t, kSymbols> frequencies;
  for (std::size_t table = 0; table < kTables; ++table) {
    const std::uint32_t change = model.sign_changes[SignContextOf(table)];
    std::uint32_t any = 0;
    for (std::size_t c = 0; c < kLosslessClasses; ++c) {
      const std::uint32_t weight = Weight(model.weights[DistributionOf(table)][c]);
      counts[2 * c] = weight * (256 - change);
      counts[2 * c + 1] = weight * change;
      any |= weight;
    }
    if (any == 0) continue;
    NormalizeCounts(counts, frequencies);
    KV_CHECK(tables.Set(first_table + table, frequencies).ok());
  }
}

std::vector<LosslessRates> RatesOf(std::uint32_t token_count) {
  std::vector<LosslessRates> rates(token_count);
  for (std::uint32_t t = 0; t < token_count; ++t) {
    rates[t] = {.mean = static_cast<std::int32_t>(256 / std::min(t + 3, 16u)),
                .spread = static_cast<std::int32_t>(256 / std::min(t + 2, 16u))};
  }
  return rates;
}

constexpr KvKind kKindOf[kKinds] = {KvKind::kK, KvKind::kV};

std::size_t StepsPerRow(const KvGeometry& geometry, std::uint32_t layer, KvKind kind) {
  return (geometry.row_components(layer, kind) + kLanes - 1) / kLanes;
}

// Of a layer's kind: 16 values share two bytes of each plane.
std::size_t PlaneBytes(const KvGeometry& geometry, std::uint32_t layer, KvKind kind,
                       std::uint32_t planes) {
  return StepsPerRow(geometry, layer, kind) * geometry.block_tokens() * 2 *
         static_cast<std::size_t>(__builtin_popcount(planes));
}

// The mantissa bits that may have a plane; integers have none.
std::uint32_t PlanesOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return (1u << 23) - 1;
    case DType::kFloat16:
      return (1u << 10) - 1;
    case DType::kBfloat16:
      return (1u << 7) - 1;
    case DType::kFloat8E4m3:
      return (1u << 3) - 1;
    case DType::kFloat8E5m2:
      return (1u << 2) - 1;
    case DType::kInt8:
    case DType::kUint8:
      return 0;
  }
  CheckFailed(__FILE__, __LINE__, "dtype is one of the enumeration");
}

std::size_t MaxRowComponents(const KvGeometry& geometry) {
  std::size_t most = 0;
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    for (const KvKind kind : kKindOf) {
      most = std::max<std::size_t>(most, geometry.row_components(layer, kind));
    }
  }
  return most;
}

std::vector<std::uint32_t> StatesFor(std::size_t row_components) {
  return std::vector<std::uint32_t>((row_components + kLanes - 1) / kLanes * kLanes *
                                    kLosslessStateWords);
}

const std::uint8_t* Bytes(std::span<const std::byte> bytes) {
  return reinterpret_cast<const std::uint8_t*>(bytes.data());
}

// Where the model's first pass over a block leaves what its second pass codes.
class Encoder {
 public:
  Encoder(const KvGeometry& geometry, std::span<const std::byte> raw)
      : geometry_(geometry),
        raw_(raw),
        dtype_(static_cast<std::size_t>(geometry.dtype())),
        rates_(RatesOf(geometry.block_tokens())),
        rans_tables_(kKinds * kTables) {}

  CodedBody Encode(const FrameBinding& binding) {
    Model();
    const std::size_t table_begin = kFrameBindingBytes + kModeBytes;
    const std::size_t layer_table_begin = table_begin + kKinds * kKindTableBytes;
    CodedBody body;
    body.bytes.resize(layer_table_begin + 4 * geometry_.layer_count());
    StoreLittle(body.bytes.data() + kFrameBindingBytes, Mode::kPacked);
    for (std::size_t k = 0; k < kKinds; ++k) {
      const KindModel model = FitModel(counts_[k]);
      WriteModel(model, body.bytes.data() + table_begin + k * kKindTableBytes);
      SetTables(model, k * kTables, rans_tables_);
    }
    std::vector<std::size_t> layer_ends;
    for (std::uint32_t layer = 0; layer < geometry_.layer_count(); ++layer) {
      const std::uint32_t word = AppendLayer(layer, body.bytes);
      StoreLittle(body.bytes.data() + layer_table_begin + 4 * layer, word);
      layer_ends.push_back(body.bytes.size());
    }
    if (body.bytes.size() >= kFrameBindingBytes + kModeBytes + raw_.size()) {
      body.bytes.resize(kFrameBindingBytes + kModeBytes);
      StoreLittle(body.bytes.data() + kFrameBindingBytes, Mode::kRaw);
      body.bytes.insert(body.bytes.end(), raw_.begin(), raw_.end());
      layer_ends.clear();
      for (std::uint32_t layer = 0; layer < geometry_.layer_count(); ++layer) {
        layer_ends.push_back(kFrameBindingBytes + kModeBytes + geometry_.layer_end(layer));
      }
    }
    WriteFrameBinding(binding, std::span(body.bytes).first(kFrameBindingBytes));
    body.section_bytes = CutSections(layer_ends);
    return body;
  }

 private:
  struct Coded {
    LosslessKind kind;
    const std::uint8_t* raw;
    std::size_t begin;  // in tables_ and symbols_
  };

  // Chooses means and planes, and finds the context and the symbol of each value.
  void Model() {
    std::size_t total = 0;
    for (std::uint32_t layer = 0; layer < geometry_.layer_count(); ++layer) {
      for (const KvKind kind : kKindOf) {
        total += StepsPerRow(geometry_, layer, kind) * geometry_.block_tokens() * kLanes;
      }
    }
    tables_.resize(total);
    symbols_.resize(total);
    std::vector<std::uint32_t> states = StatesFor(MaxRowComponents(geometry_));
    std::size_t begin = 0;
    for (std::uint32_t layer = 0; layer < geometry_.layer_count(); ++layer) {
      for (std::size_t k = 0; k < kKinds; ++k) {
        const std::size_t components = geometry_.row_components(layer, kKindOf[k]);
        const std::size_t count = components * geometry_.block_tokens();
        Coded& coded = coded_.emplace_back();
        coded.raw = Bytes(raw_) + geometry_.kind_begin(layer, kKindOf[k]);
        coded.begin = begin;
        const LosslessSums sums = Kernels().lossless_sum[dtype_](coded.raw, count);
        const std::uint64_t mean = count == 0 ? 0 : 16 * sums.exponents / count;
        coded.kind = {.token_count = geometry_.block_tokens(),
                      .row_components = components,
                      .rates = rates_.data(),
                      .mean = static_cast<std::int32_t>(mean),
                      .planes = sums.mantissa_bits};
        Kernels().lossless_model[dtype_](coded.kind, coded.raw, states.data(),
                                         tables_.data() + begin, symbols_.data() + begin);
        Count(begin, components, counts_[k]);
        begin += StepsPerRow(geometry_, layer, kKindOf[k]) * kLanes * geometry_.block_tokens();
      }
    }
  }

  // The padding of a row is not counted, nor coded.
  void Count(std::size_t begin, std::size_t components, Counts& counts) const {
    const std::size_t padded = (components + kLanes - 1) / kLanes * kLanes;
    for (std::uint32_t token = 0; token < geometry_.block_tokens(); ++token, begin += padded) {
      for (std::size_t i = begin; i < begin + components; ++i) ++counts[tables_[i]][symbols_[i]];
    }
  }

  // Returns the layer's word of the layer table.
  std::uint32_t AppendLayer(std::uint32_t layer, std::vector<std::byte>& to) {
    const std::size_t begin = to.size();
    const Coded* const coded = &coded_[layer * kKinds];
    const auto raw = raw_.subspan(geometry_.layer_begin(layer),
                                  geometry_.layer_end(layer) - geometry_.layer_begin(layer));
    std::size_t steps = 0;
    std::size_t plane_bytes[kKinds];
    for (std::size_t k = 0; k < kKinds; ++k) {
      steps += StepsPerRow(geometry_, layer, kKindOf[k]) * geometry_.block_tokens();
      plane_bytes[k] = PlaneBytes(geometry_, layer, kKindOf[k], coded[k].kind.planes);
    }
    // A step codes a symbol, and at most exponents that escaped and mantissas.
    if (records_.size() < 3 * steps * kLanes) records_.resize(3 * steps * kLanes);
    if (planes_.size() < plane_bytes[0] + plane_bytes[1]) {
      planes_.resize(plane_bytes[0] + plane_bytes[1]);
    }
    std::uint32_t* records_end = records_.data();
    for (std::size_t k = 0; k < kKinds; ++k) {
      records_end = Kernels().lossless_record[dtype_](
          coded[k].kind, coded[k].raw, rans_tables_.encode() + k * kTables * kRansTableSymbols,
          tables_.data() + coded[k].begin, symbols_.data() + coded[k].begin, records_end,
          planes_.data() + (k == 0 ? 0 : plane_bytes[0]));
    }
    const auto record_count = static_cast<std::size_t>(records_end - records_.data());
    std::copy_n(records_.data(), record_count, rans_.AddSteps(record_count / kLanes));

    to.resize(begin + kLayerHeadBytes);
    KV_CHECK(rans_.Finish(to).ok());
    const std::size_t rans_bytes = to.size() - begin - kLayerHeadBytes;
    std::byte* const head = to.data() + begin;
    for (std::size_t k = 0; k < kKinds; ++k) {
      StoreLittle(head + 2 * k, static_cast<std::uint16_t>(coded[k].kind.mean));
      StoreLittle(head + 4 + 4 * k, coded[k].kind.planes);
    }
    StoreLittle(head + 12, static_cast<std::uint32_t>(rans_bytes));
    const auto* const planes = reinterpret_cast<const std::byte*>(planes_.data());
    to.insert(to.end(), planes, planes + plane_bytes[0] + plane_bytes[1]);
    if (to.size() - begin < raw.size()) return static_cast<std::uint32_t>(to.size() - begin);
    to.resize(begin);
    to.insert(to.end(), raw.begin(), raw.end());
    return static_cast<std::uint32_t>(raw.size()) | kLayerIsRaw;
  }

  const KvGeometry& geometry_;
  const std::span<const std::byte> raw_;
  const std::size_t dtype_;
  const std::vector<LosslessRates> rates_;
  std::vector<Coded> coded_;           // [layer][kind]
  std::vector<std::uint8_t> tables_;   // [layer][kind][token][component], rows padded to 16
  std::vector<std::uint8_t> symbols_;  // the same
  std::array<Counts, kKinds> counts_ = {};
  RansTables rans_tables_;
  RansEncoder rans_;
  std::vector<std::uint32_t> records_;
  std::vector<std::uint8_t> planes_;
};

}  // namespace

CodedBody EncodeLossless(const KvGeometry& geometry, std::span<const std::byte> raw,
                         const FrameBinding& binding) {
  KV_CHECK(raw.size() == geometry.raw_block_bytes());
  return Encoder(geometry, raw).Encode(binding);
}

std::size_t LosslessHeadBytesMax(const KvGeometry& geometry) {
  return kFrameBindingBytes + kModeBytes + kKinds * kKindTableBytes + 4 * geometry.layer_count();
}

LosslessReader::LosslessReader(const KvGeometry& geometry)
    : LayeredBody(geometry), layer_is_raw_(geometry.layer_count()), tables_(0) {}

absl::StatusOr<LosslessReader> LosslessReader::Parse(const KvGeometry& geometry,
                                                     std::span<const std::byte> body) {
  LosslessReader reader(geometry);
  ByteReader head(body);
  head.ReadBytes(kFrameBindingBytes);
  const auto mode = head.Read<Mode>();
  if (!head.ok() || (mode != Mode::kPacked && mode != Mode::kRaw)) return Damaged("no such mode");
  if (mode == Mode::kRaw) {
    for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
      reader.layer_is_raw_[layer] = true;
      reader.layer_begins_[layer + 1] = kFrameBindingBytes + kModeBytes + geometry.layer_end(layer);
    }
    reader.layer_begins_[0] = kFrameBindingBytes + kModeBytes;
    return reader;
  }

  reader.tables_ = RansTables(kKinds * kTables);
  for (std::size_t k = 0; k < kKinds; ++k) {
    const auto stored = head.ReadBytes(kKindTableBytes);
    if (!head.ok()) return Damaged("cut off in its tables");
    const KindModel model = ReadModel(stored.data());
    if (std::count(model.sign_changes.begin(), model.sign_changes.end(), 0) != 0) {
      return Damaged("a sign that never changes");
    }
    SetTables(model, k * kTables, reader.tables_);
  }
  reader.layer_begins_[0] = LosslessHeadBytesMax(geometry);
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    const auto word = head.Read<std::uint32_t>();
    const std::size_t raw_bytes = geometry.layer_end(layer) - geometry.layer_begin(layer);
    const std::size_t bytes = word & ~kLayerIsRaw;
    const bool is_raw = (word & kLayerIsRaw) != 0;
    if (is_raw ? bytes != raw_bytes : bytes >= raw_bytes) return Damaged("size of a layer");
    reader.layer_is_raw_[layer] = is_raw;
    reader.layer_begins_[layer + 1] = reader.layer_begins_[layer] + bytes;
  }
  if (!head.ok()) return Damaged("cut off in its layer table");
  return reader;
}

absl::Status LosslessReader::DecodeLayer(std::uint32_t layer, std::span<const std::byte> bytes,
                                         std::span<std::byte> raw) const {
  KV_CHECK(layer < geometry_.layer_count());
  KV_CHECK(raw.size() == geometry_.layer_end(layer) - geometry_.layer_begin(layer));
  if (bytes.size() != layer_end(layer) - layer_begin(layer)) {
    return Damaged(absl::StrCat("layer ", layer, " is cut off"));
  }
  if (layer_is_raw_[layer]) {
    std::copy(bytes.begin(), bytes.end(), raw.begin());
    return absl::OkStatus();
  }
  const std::uint32_t planes_most = PlanesOf(geometry_.dtype());
  const std::vector<LosslessRates> rates = RatesOf(geometry_.block_tokens());
  ByteReader reader(bytes);
  std::uint16_t means[kKinds];
  for (std::uint16_t& mean : means) mean = reader.Read<std::uint16_t>();
  LosslessKind kinds[kKinds];
  std::size_t plane_bytes[kKinds];
  for (std::size_t k = 0; k < kKinds; ++k) {
    kinds[k] = {.token_count = geometry_.block_tokens(),
                .row_components = geometry_.row_components(layer, kKindOf[k]),
                .rates = rates.data(),
                .mean = means[k],
                .planes = reader.Read<std::uint32_t>()};
    if (means[k] > kExponentMeanMax || (kinds[k].planes & ~planes_most) != 0) {
      return Damaged(absl::StrCat("head of layer ", layer));
    }
    plane_bytes[k] = PlaneBytes(geometry_, layer, kKindOf[k], kinds[k].planes);
  }
  const auto rans = reader.ReadBytes(reader.Read<std::uint32_t>());
  const auto k_planes = reader.ReadBytes(plane_bytes[0]);
  const auto v_planes = reader.ReadBytes(plane_bytes[1]);
  if (!reader.Done()) return Damaged(absl::StrCat("sizes within layer ", layer));

  std::vector<std::uint32_t> states =
      StatesFor(std::max(kinds[0].row_components, kinds[1].row_components));
  const std::uint32_t* const tables[kKinds] = {tables_.decode(),
                                               tables_.decode() + kTables * kRansTableSlots};
  const std::uint8_t* const planes[kKinds] = {Bytes(k_planes), Bytes(v_planes)};
  auto* const k_raw = reinterpret_cast<std::uint8_t*>(raw.data());
  std::uint8_t* const raws[kKinds] = {k_raw, k_raw + geometry_.kind_bytes(layer, KvKind::kK)};
  const bool intact = Kernels().lossless_decode[static_cast<std::size_t>(geometry_.dtype())](
      kinds, tables, Bytes(rans), rans.size(), planes, states.data(), raws);
  return intact ? absl::OkStatus() : Damaged(absl::StrCat("symbols of layer ", layer));
}

absl::Status DecodeLossless(const KvGeometry& geometry, std::span<const std::byte> body,
                            std::span<std::byte> raw) {
  KV_CHECK(raw.size() == geometry.raw_block_bytes());
  KV_ASSIGN_OR_RETURN(const LosslessReader reader, LosslessReader::Parse(geometry, body));
  if (body.size() != reader.body_bytes()) return Damaged("its layers do not cover it");
  return DecodeEveryLayer(geometry, reader, body, raw);
}

}  // namespace kvtrie
