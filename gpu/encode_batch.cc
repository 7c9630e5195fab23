#include "gpu/encode_batch.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "storage/base/byte_order.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/codec/importance.h"
#include "storage/codec/residual_body.h"

namespace kvtrie::gpu {
namespace {

template <typename T>
T* At(std::byte* memory, std::size_t offset) {
  return reinterpret_cast<T*>(memory + offset);
}

// Room for the words of a block: 16 bits for each number. Blocks that need more are not for lossy
// coding.
std::size_t WordsOfBlock(const DeviceModel& model) {
  const DeviceProfile& profile = *model.profile;
  return (profile.component_count() + profile.planes().size() * profile.exponent_groups()) *
         model.rows_of_block();
}

// What goes to the device, in one piece.
struct Input {
  std::size_t first_positions, table_entries, states, is_token, out_of_range, behind, given,
      exponents, raw;
  MemoryLayout layout;

  Input(const DeviceModel& model, std::size_t block_count) {
    const std::size_t rows = block_count * model.rows_of_block();
    first_positions = layout.Add<std::uint32_t>(block_count);
    table_entries = layout.Add<std::int32_t>(rows);
    states = layout.Add<std::uint32_t>(block_count * kLanes);
    is_token = layout.Add<std::uint8_t>(rows);
    out_of_range = layout.Add<std::uint16_t>(rows);
    behind = layout.Add<std::uint32_t>(rows);
    given = layout.Add<std::int8_t>(rows);
    exponents = layout.Add<std::int8_t>(model.profile->planes().size() *
                                        model.profile->exponent_groups() * rows);
    raw = layout.Add(block_count * model.geometry.raw_block_bytes());
  }
};

// What stays on the device.
struct Work {
  std::size_t active;  // copied there when it is known
  std::size_t zero_begin, extreme, shifts, put, impossible, zero_end;
  std::size_t marks;  // [layer][block]
  std::size_t packed, words, features;
  BatchMemory memory;

  Work(const DeviceModel& model, std::uint32_t block_count, MemoryLayout& layout)
      : active(layout.Add<std::uint16_t>(std::size_t{block_count} * model.row_groups())),
        zero_begin(layout.bytes()),
        extreme(layout.Add<std::uint8_t>(RowsOf(model, block_count))),
        shifts(layout.Add<std::int8_t>(RowsOf(model, block_count))),
        put(layout.Add<std::uint32_t>(block_count)),
        impossible(layout.Add<std::uint8_t>(block_count)),
        zero_end(layout.bytes()),
        marks(layout.Add<std::uint32_t>(std::size_t{model.geometry.layer_count()} * block_count)),
        packed(layout.Add<std::uint32_t>(RowsOf(model, block_count) *
                                         model.profile->component_count())),
        words(layout.Add<std::uint16_t>(block_count * WordsOfBlock(model))),
        features(layout.Add<float>(FeaturesOf(model, block_count))),
        memory(model, block_count, layout) {}

  static std::size_t FeaturesOf(const DeviceModel& model, std::uint32_t block_count) {
    const std::size_t layers = model.profile->importance().size();
    if (layers == 0) return 0;
    return (layers + 1) * RowsOf(model, block_count) *
           LayerFeatureCount(model.profile->heads_max());
  }
  static std::size_t RowsOf(const DeviceModel& model, std::uint32_t block_count) {
    return std::size_t{block_count} * model.rows_of_block();
  }
};

// What comes back.
struct Output {
  std::size_t extreme, out_of_range, active, states, put, impossible, marks, words;
  MemoryLayout layout;

  Output(const DeviceModel& model, std::size_t block_count) {
    const std::size_t rows = block_count * model.rows_of_block();
    extreme = layout.Add<std::uint8_t>(rows);
    out_of_range = layout.Add<std::uint16_t>(rows);
    active = layout.Add<std::uint16_t>(block_count * model.row_groups());
    states = layout.Add<std::uint32_t>(block_count * kLanes);
    put = layout.Add<std::uint32_t>(block_count);
    impossible = layout.Add<std::uint8_t>(block_count);
    marks = layout.Add<std::uint32_t>(model.geometry.layer_count() * block_count);
    words = layout.Add<std::uint16_t>(block_count * WordsOfBlock(model));
  }
};

}  // namespace

struct EncodeBatch::Parts {
  const DeviceModel& model;
  std::span<const BlockToEncode> blocks;
  Quality quality;
  int level;
  Input input;
  MemoryLayout layout;
  Work work;
  Output output;
  std::vector<CodedSymbols> coded;  // [block]
  std::vector<bool> lost;           // [block] too much of it would be exact
  WorkspacePool::Lease workspace;   // last: what is under way ends before the rest does

  Parts(const DeviceModel& of_model, std::span<const BlockToEncode> to_encode, Quality of_quality,
        WorkspacePool::Lease lease)
      : model(of_model),
        blocks(to_encode),
        quality(of_quality),
        level(model.profile->LevelOf(quality)),
        input(model, blocks.size()),
        layout(input.layout),
        work(model, static_cast<std::uint32_t>(blocks.size()), layout),
        output(model, blocks.size()),
        coded(blocks.size()),
        lost(blocks.size()),
        workspace(std::move(lease)) {}

  std::uint32_t block_count() const { return static_cast<std::uint32_t>(blocks.size()); }
  std::uint32_t row_count() const { return block_count() * model.rows_of_block(); }
  float Strength() const {
    return model.codec->profile().levels[static_cast<std::size_t>(level)].importance_strength;
  }
  std::size_t exponents_of_plane() const {
    return std::size_t{model.profile->exponent_groups()} * row_count();
  }

  // Step exponents, as callers give them or as they are without a model of importance.
  void FillExponents() const;
  void Fill() const;
  absl::Status AskForValues();
  bool IsFirstToken(std::size_t block) const;
  void ChooseExact();
  void AskForSymbols();
  EncodedBlock BodyOf(std::size_t block);
};

void EncodeBatch::Parts::FillExponents() const {
  std::byte* const to = workspace->in();
  std::int8_t* const given = At<std::int8_t>(to, input.given);
  std::uint32_t* const behind = At<std::uint32_t>(to, input.behind);
  const bool has_model = !model.profile->importance().empty();
  std::fill_n(given, row_count(), has_model ? kNoExponent : std::int8_t{0});
  std::fill_n(behind, row_count(), 1u);
  const float strength = Strength();
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    const BlockToEncode& block = blocks[b];
    const std::size_t first_row = b * model.rows_of_block();
    for (std::uint32_t t = 0; t < block.tokens.size(); ++t) {
      behind[first_row + t] = TokensBehind(block.first_position + t, block.session_tokens);
      if (block.importance.empty()) continue;
      given[first_row + t] = static_cast<std::int8_t>(ExponentOf(block.importance[t], strength));
    }
  }
  if (has_model) return;
  // The same in all planes and groups.
  std::int8_t* exponents = At<std::int8_t>(to, input.exponents);
  const std::size_t groups = model.profile->exponent_groups();
  for (std::size_t plane = 0; plane < model.profile->planes().size(); ++plane) {
    for (std::size_t first_row = 0; first_row < row_count(); first_row += kLanes) {
      for (std::size_t group = 0; group < groups; ++group) {
        exponents = std::copy_n(given + first_row, kLanes, exponents);
      }
    }
  }
}

void EncodeBatch::Parts::Fill() const {
  std::byte* const to = workspace->in();
  const std::size_t rows_of_block = model.rows_of_block();
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    const BlockToEncode& block = blocks[b];
    At<std::uint32_t>(to, input.first_positions)[b] = block.first_position;
    FindTableEntries(
        model.codec->profile(), block.tokens,
        {At<std::int32_t>(to, input.table_entries) + b * rows_of_block, rows_of_block});
    for (std::size_t t = 0; t < rows_of_block; ++t) {
      At<std::uint8_t>(to, input.is_token)[b * rows_of_block + t] = t < block.tokens.size() ? 1 : 0;
    }
    std::memcpy(to + input.raw + b * block.raw.size(), block.raw.data(), block.raw.size());
  }
  std::fill_n(At<std::uint32_t>(to, input.states), blocks.size() * kLanes, kRansStateMin);
  std::fill_n(At<std::uint16_t>(to, input.out_of_range), row_count(), kInRange);
  FillExponents();
}

absl::Status EncodeBatch::Parts::AskForValues() {
  const DeviceProfile& profile = *model.profile;
  const KvGeometry& geometry = model.geometry;
  KV_RETURN_IF_ERROR(
      workspace->Reserve(layout.bytes(), input.layout.bytes(), output.layout.bytes()));
  Fill();
  std::byte* const device = workspace->device();
  DeviceStream& stream = workspace->work();
  stream.CopyToDevice(device, workspace->in(), input.layout.bytes());
  stream.Zero(device + work.zero_begin, work.zero_end - work.zero_begin);
  BatchPlanes planes(model, work.memory, block_count(), device,
                     At<std::uint32_t>(device, input.first_positions),
                     At<std::int32_t>(device, input.table_entries), stream);
  if (!profile.importance().empty()) {
    planes.ChooseExponents(device + input.raw, At<std::uint32_t>(device, input.behind),
                           At<std::int8_t>(device, input.given), Strength(),
                           At<float>(device, work.features),
                           At<std::int8_t>(device, input.exponents));
  }
  std::size_t first_component = 0;
  for (std::uint32_t plane = 0; plane < profile.planes().size(); ++plane) {
    const DevicePlane& of = profile.planes()[plane];
    const RawPlane raw = planes.RawOf(
        plane, device + input.raw + geometry.kind_begin(of.shape.layer, of.shape.kind()),
        geometry.raw_block_bytes());
    FindExtremesArgs extremes;
    extremes.plane = raw;
    extremes.limit = kComponentLimit;
    extremes.extreme = At<std::uint8_t>(device, work.extreme);
    extremes.row_count = row_count();
    stream.Launch(extremes);

    ResidualArgs residual;
    residual.plane = raw;
    residual.prediction = planes.Predict(plane);
    residual.residual = planes.rows();
    stream.Launch(residual);

    FloatProductArgs analysis;
    analysis.rows = planes.rows();
    analysis.matrix = of.analysis;
    analysis.products = planes.values(plane);
    analysis.batch_count = of.block_count;
    analysis.row_count = row_count();
    analysis.size = of.block_components;
    stream.Multiply(analysis);

    QuantizePlaneArgs quantize;
    quantize.symbols = profile.SymbolsOf(plane, level);
    quantize.active = At<std::uint8_t>(device, input.is_token);
    quantize.exponents = At<std::int8_t>(device, input.exponents) + plane * exponents_of_plane();
    quantize.shifts = At<std::int8_t>(device, work.shifts);
    quantize.values = planes.values(plane);
    quantize.packed = At<std::uint32_t>(device, work.packed) + first_component * row_count();
    quantize.out_of_range = At<std::uint16_t>(device, input.out_of_range);
    quantize.plane = static_cast<std::uint16_t>(plane);
    quantize.inverse_step = 1 / profile.step(level);
    quantize.row_count = row_count();
    stream.Launch(quantize);

    planes.Restore(plane, level, residual.prediction, /*with_rows=*/false);
    first_component += of.shape.components();
  }
  stream.CopyFromDevice(workspace->out() + output.extreme, device + work.extreme, row_count());
  stream.CopyFromDevice(workspace->out() + output.out_of_range, device + input.out_of_range,
                        row_count() * sizeof(std::uint16_t));
  return absl::OkStatus();
}

bool EncodeBatch::Parts::IsFirstToken(std::size_t b) const {
  const ResidualProfile& profile = model.codec->profile();
  const BlockToEncode& block = blocks[b];
  if (block.first_position != 0 || !profile.has_first_token ||
      block.tokens[0] != profile.first_token) {
    return false;
  }
  const RopeAngles angles = model.raw_kv.AnglesAt(0);
  std::vector<std::vector<float>> rows;
  std::vector<const float*> first;
  for (const PlaneShape& plane : profile.planes) {
    std::vector<float>& of_plane = rows.emplace_back(block.tokens.size() * plane.components());
    model.raw_kv.ReadRows(block.raw, plane.layer, plane.kind(), angles, of_plane);
    first.push_back(of_plane.data());
  }
  return AreFirstRows(profile, first);
}

// Tokens that are kept as they are, in the order in which the processor's encoder finds them: what
// is extreme; then, plane by plane, what is out of range there, as long as the block is not lost.
void EncodeBatch::Parts::ChooseExact() {
  const std::uint8_t* const extreme = At<std::uint8_t>(workspace->out(), output.extreme);
  const std::uint16_t* const out_of_range =
      At<std::uint16_t>(workspace->out(), output.out_of_range);
  LaneMask* const active = At<LaneMask>(workspace->out(), output.active);
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    const std::size_t first_row = b * model.rows_of_block();
    const std::size_t tokens = blocks[b].tokens.size();
    std::vector<bool> exact(tokens);
    for (std::size_t t = 0; t < tokens; ++t) exact[t] = extreme[first_row + t] != 0;
    coded[b].first_from_profile = !exact[0] && IsFirstToken(b);
    if (blocks[b].first_position == 0 && !coded[b].first_from_profile) exact[0] = true;

    std::vector<std::pair<std::uint16_t, std::size_t>> found;  // plane, token
    for (std::size_t t = coded[b].first_from_profile ? 1 : 0; t < tokens; ++t) {
      const std::uint16_t plane = out_of_range[first_row + t];
      if (!exact[t] && plane != kInRange) found.emplace_back(plane, t);
    }
    std::sort(found.begin(), found.end());
    const auto is_lost = [&] {
      return KeepsTooMuchExact(
          model.geometry, static_cast<std::size_t>(std::count(exact.begin(), exact.end(), true)));
    };
    for (std::size_t i = 0; i < found.size(); ++i) {
      const bool is_next_plane = i == 0 || found[i].first != found[i - 1].first;
      if (is_next_plane && is_lost()) break;
      exact[found[i].second] = true;
    }
    lost[b] = is_lost();

    LaneMask* const of_block = active + b * model.row_groups();
    std::fill_n(of_block, model.row_groups(), LaneMask{0});
    for (std::size_t t = 0; t < tokens; ++t) {
      if (exact[t]) coded[b].exact.push_back(static_cast<std::uint16_t>(t));
      if (lost[b] || exact[t] || (t == 0 && coded[b].first_from_profile)) continue;
      of_block[t / kLanes] = static_cast<LaneMask>(of_block[t / kLanes] | 1u << t % kLanes);
    }
  }
}

void EncodeBatch::Parts::AskForSymbols() {
  const DeviceProfile& profile = *model.profile;
  std::byte* const device = workspace->device();
  std::byte* const out = workspace->out();
  DeviceStream& stream = workspace->work();
  stream.CopyToDevice(device + work.active, out + output.active,
                      block_count() * model.row_groups() * sizeof(LaneMask));
  EncodePlaneArgs encode;
  encode.active = At<LaneMask>(device, work.active);
  encode.states = At<std::uint32_t>(device, input.states);
  encode.words = At<std::uint16_t>(device, work.words);
  encode.capacity = static_cast<std::uint32_t>(WordsOfBlock(model));
  encode.put = At<std::uint32_t>(device, work.put);
  encode.impossible = At<std::uint8_t>(device, work.impossible);
  encode.row_groups = model.row_groups();
  encode.block_count = block_count();
  std::size_t component_end = profile.component_count();
  for (auto plane = static_cast<std::uint32_t>(profile.planes().size()); plane-- > 0;) {
    const PlaneShape& shape = profile.planes()[plane].shape;
    component_end -= shape.components();
    encode.symbols = profile.SymbolsOf(plane, level);
    encode.packed = At<std::uint32_t>(device, work.packed) + component_end * row_count();
    encode.exponents = At<std::int8_t>(device, input.exponents) + plane * exponents_of_plane();
    encode.exponents_before = plane == 0 ? nullptr : encode.exponents - exponents_of_plane();
    // Words that are there are those of the layers behind.
    const bool ends_layer = plane + 1 == profile.planes().size() ||
                            profile.planes()[plane + 1].shape.layer != shape.layer;
    encode.mark =
        ends_layer ? At<std::uint32_t>(device, work.marks) + shape.layer * block_count() : nullptr;
    stream.Launch(encode);
  }
  stream.CopyFromDevice(out + output.states, encode.states, block_count() * kRansStateBytes);
  stream.CopyFromDevice(out + output.put, encode.put, block_count() * sizeof(std::uint32_t));
  stream.CopyFromDevice(out + output.impossible, encode.impossible, block_count());
  stream.CopyFromDevice(
      out + output.marks, device + work.marks,
      std::size_t{model.geometry.layer_count()} * block_count() * sizeof(std::uint32_t));
}

EncodedBlock EncodeBatch::Parts::BodyOf(std::size_t b) {
  std::byte* const out = workspace->out();
  const std::size_t capacity = WordsOfBlock(model);
  const std::size_t word_bytes = 2 * std::size_t{At<std::uint32_t>(out, output.put)[b]};
  const std::byte* const states = out + output.states + b * kRansStateBytes;
  const std::byte* const end = out + output.words + 2 * (b + 1) * capacity;
  CodedSymbols& symbols = coded[b];
  symbols.symbols.assign(states, states + kRansStateBytes);
  symbols.symbols.insert(symbols.symbols.end(), end - word_bytes, end);
  const std::uint32_t* const marks = At<std::uint32_t>(out, output.marks);
  for (std::size_t layer = 0; layer < model.geometry.layer_count(); ++layer) {
    symbols.layer_bytes.push_back(symbols.symbols.size() -
                                  2 * std::size_t{marks[layer * block_count() + b]});
  }
  return WriteResidualBody(model.geometry, model.codec->id(), quality, blocks[b], symbols);
}

EncodeBatch::EncodeBatch(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
EncodeBatch::~EncodeBatch() = default;

std::size_t EncodeBatch::DeviceBytesOfBlock(const DeviceModel& model) {
  MemoryLayout layout = Input(model, 1).layout;
  const Work work(model, 1, layout);
  return layout.bytes();
}

absl::StatusOr<std::unique_ptr<EncodeBatch>> EncodeBatch::Start(
    const DeviceModel& model, std::span<const BlockToEncode> blocks, Quality quality,
    WorkspacePool::Lease workspace) {
  KV_CHECK(!blocks.empty());
  KV_CHECK(model.profile->LevelOf(quality) >= 0);
  auto parts = std::make_unique<Parts>(model, blocks, quality, std::move(workspace));
  KV_RETURN_IF_ERROR(parts->AskForValues());
  return std::unique_ptr<EncodeBatch>(new EncodeBatch(std::move(parts)));
}

absl::StatusOr<std::vector<EncodeBatch::Encoded>> EncodeBatch::Finish() {
  Parts& parts = *parts_;
  Workspace& workspace = *parts.workspace;
  KV_RETURN_IF_ERROR(workspace.Synchronize());
  parts.ChooseExact();
  parts.AskForSymbols();
  KV_RETURN_IF_ERROR(workspace.Synchronize());

  const std::size_t capacity = WordsOfBlock(parts.model);
  const std::uint32_t* const put = At<std::uint32_t>(workspace.out(), parts.output.put);
  const std::uint8_t* const impossible = At<std::uint8_t>(workspace.out(), parts.output.impossible);
  std::vector<Encoded> encoded(parts.blocks.size());
  for (std::size_t b = 0; b < encoded.size(); ++b) {
    encoded[b].is_missing = impossible[b] != 0 || put[b] > capacity;
    if (parts.lost[b] || encoded[b].is_missing) continue;
    const std::size_t at = 2 * ((b + 1) * capacity - put[b]);
    workspace.work().CopyFromDevice(workspace.out() + parts.output.words + at,
                                    workspace.device() + parts.work.words + at,
                                    2 * std::size_t{put[b]});
  }
  KV_RETURN_IF_ERROR(workspace.Synchronize());
  for (std::size_t b = 0; b < encoded.size(); ++b) {
    if (parts.lost[b]) {
      encoded[b].block = UncodedBlock(parts.coded[b].exact.size());
    } else if (!encoded[b].is_missing) {
      encoded[b].block = parts.BodyOf(b);
    }
  }
  return encoded;
}

}  // namespace kvtrie::gpu
