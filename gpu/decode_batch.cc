#include "gpu/decode_batch.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "storage/base/byte_order.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/codec/residual_body.h"

namespace kvtrie::gpu {
namespace {

// What goes to the device, in one piece.
struct Input {
  std::size_t first_positions, word_begins, active, states, table_entries, first_flags, words;
  MemoryLayout layout;

  Input(const DeviceModel& model, std::size_t block_count, std::size_t word_count) {
    const std::size_t groups = block_count * model.row_groups();
    first_positions = layout.Add<std::uint32_t>(block_count);
    word_begins = layout.Add<std::uint32_t>(block_count + 1);
    active = layout.Add<std::uint16_t>(groups);
    states = layout.Add<std::uint32_t>(block_count * kLanes);
    table_entries = layout.Add<std::int32_t>(groups * kLanes);
    first_flags = layout.Add<std::uint8_t>(block_count);
    words = layout.Add<std::uint16_t>(word_count);
  }
};

// Zeros at first.
struct Carried {
  std::size_t taken, exponents, shifts;
  std::size_t begin, end;

  Carried(const DeviceModel& model, std::size_t block_count, MemoryLayout& layout) {
    const std::size_t rows = block_count * model.rows_of_block();
    begin = layout.bytes();
    taken = layout.Add<std::uint32_t>(block_count);
    exponents = layout.Add<std::int8_t>(rows * model.profile->exponent_groups());
    shifts = layout.Add<std::int8_t>(rows);
    end = layout.bytes();
  }
};

template <typename T>
T* At(std::byte* memory, std::size_t offset) {
  return reinterpret_cast<T*>(memory + offset);
}

}  // namespace

struct DecodeBatch::Parts {
  const DeviceModel& model;
  std::span<const BlockToDecode> blocks;
  std::vector<ResidualBody> bodies;
  std::vector<std::uint32_t> word_counts;
  std::size_t out_states = 0, out_taken = 0;  // raw KV lies in front: [layer][block]
  WorkspacePool::Lease workspace;             // last: what is under way ends before the rest does

  absl::Status Open();
  void Fill(const Input& input) const;
  absl::Status Ask();
};

absl::Status DecodeBatch::Parts::Open() {
  for (const BlockToDecode& block : blocks) {
    KV_ASSIGN_OR_RETURN(bodies.emplace_back(), ReadResidualBody(model.geometry, model.codec->id(),
                                                                model.codec->profile(), block));
    const std::span<const std::byte> symbols = bodies.back().symbols;
    if (symbols.size() < kRansStateBytes) return DamagedBody("its symbols end early");
    if (symbols.size() % 2 != 0) return DamagedBody("its symbols do not end");
    for (std::size_t i = 0; i < kLanes; ++i) {
      if (LoadLittle<std::uint32_t>(symbols.data() + 4 * i) < kRansStateMin) {
        return DamagedBody("its symbols begin with no states");
      }
    }
    word_counts.push_back(static_cast<std::uint32_t>((symbols.size() - kRansStateBytes) / 2));
  }
  return absl::OkStatus();
}

void DecodeBatch::Parts::Fill(const Input& input) const {
  std::byte* const to = workspace->in();
  const std::size_t block_tokens = model.geometry.block_tokens();
  const std::size_t rows = model.rows_of_block();
  std::uint32_t word = 0;
  At<std::uint32_t>(to, input.word_begins)[0] = 0;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    const ResidualBody& body = bodies[b];
    At<std::uint32_t>(to, input.first_positions)[b] = body.first_position;
    At<std::uint8_t>(to, input.first_flags)[b] = body.first_from_profile ? 1 : 0;
    LaneMask* const active = At<LaneMask>(to, input.active) + b * model.row_groups();
    std::fill_n(active, model.row_groups(), LaneMask{0});
    for (std::size_t t = 0; t < block_tokens; ++t) {
      active[t / kLanes] = static_cast<LaneMask>(active[t / kLanes] | 1u << t % kLanes);
    }
    const auto leave = [active](std::size_t t) {
      active[t / kLanes] = static_cast<LaneMask>(active[t / kLanes] & ~(1u << t % kLanes));
    };
    for (const std::uint16_t token : body.exact) leave(token);
    if (body.first_from_profile) leave(0);
    FindTableEntries(model.codec->profile(), blocks[b].tokens,
                     {At<std::int32_t>(to, input.table_entries) + b * rows, rows});
    std::memcpy(to + input.states + b * kRansStateBytes, body.symbols.data(), kRansStateBytes);
    const std::span<const std::byte> words = body.symbols.subspan(kRansStateBytes);
    if (!words.empty()) {
      std::memcpy(to + input.words + std::size_t{word} * 2, words.data(), words.size());
    }
    word += word_counts[b];
    At<std::uint32_t>(to, input.word_begins)[b + 1] = word;
  }
}

absl::Status DecodeBatch::Parts::Ask() {
  const DeviceProfile& profile = *model.profile;
  const KvGeometry& geometry = model.geometry;
  const auto block_count = static_cast<std::uint32_t>(blocks.size());
  std::size_t word_count = 0;
  for (const std::uint32_t count : word_counts) word_count += count;

  const Input input(model, block_count, word_count);
  MemoryLayout layout = input.layout;
  const Carried carried(model, block_count, layout);
  const std::size_t raw = layout.Add(block_count * geometry.raw_block_bytes());
  const BatchMemory memory(model, block_count, layout);
  MemoryLayout out;
  out.Add(block_count * geometry.raw_block_bytes());
  out_states = out.Add<std::uint32_t>(block_count * kLanes);
  out_taken = out.Add<std::uint32_t>(block_count);
  KV_RETURN_IF_ERROR(workspace->Reserve(layout.bytes(), input.layout.bytes(), out.bytes()));
  Fill(input);

  std::byte* const device = workspace->device();
  DeviceStream& work = workspace->work();
  DeviceStream& symbols = workspace->symbols();
  DeviceStream& copies = workspace->copies();
  work.CopyToDevice(device, workspace->in(), input.layout.bytes());
  work.Zero(device + carried.begin, carried.end - carried.begin);
  BatchPlanes planes(model, memory, block_count, device,
                     At<std::uint32_t>(device, input.first_positions),
                     At<std::int32_t>(device, input.table_entries), work);

  DecodePlaneArgs decode;
  decode.words = At<std::uint16_t>(device, input.words);
  decode.word_begins = At<std::uint32_t>(device, input.word_begins);
  decode.active = At<std::uint16_t>(device, input.active);
  decode.states = At<std::uint32_t>(device, input.states);
  decode.taken = At<std::uint32_t>(device, carried.taken);
  decode.exponents = At<std::int8_t>(device, carried.exponents);
  decode.shifts = At<std::int8_t>(device, carried.shifts);
  decode.row_groups = model.row_groups();
  decode.block_count = block_count;
  WriteRawArgs write;
  write.rows = planes.rows();
  write.first_flags = At<std::uint8_t>(device, input.first_flags);
  write.row_count = planes.row_count();

  const int level = profile.LevelOf(blocks[0].quality);
  const auto decode_symbols = [&](std::uint32_t plane) {
    decode.symbols = profile.SymbolsOf(plane, level);
    decode.values = planes.values(plane);
    symbols.WaitFor(work);  // which may read the values before in the same place
    symbols.Launch(decode);
  };
  for (std::uint32_t plane = 0; plane < profile.planes().size(); ++plane) {
    const DevicePlane& of = profile.planes()[plane];
    const std::uint32_t layer = of.shape.layer;
    // Symbols depend on no rows: those of the next plane are decoded beside the rest of this one.
    if (plane == 0) decode_symbols(0);
    work.WaitFor(symbols);
    if (plane + 1 < profile.planes().size()) decode_symbols(plane + 1);
    planes.Restore(plane, level, planes.Predict(plane), /*with_rows=*/true);

    const std::size_t layer_begin = geometry.layer_begin(layer);
    const std::size_t layer_bytes = geometry.layer_end(layer) - layer_begin;
    const std::size_t of_layer = raw + block_count * layer_begin;
    write.plane = planes.RawOf(
        plane, device + of_layer + geometry.kind_begin(layer, of.shape.kind()) - layer_begin,
        layer_bytes);
    write.first_row = of.first_row;
    work.Launch(write);
    if (plane + 1 == profile.planes().size() || profile.planes()[plane + 1].shape.layer != layer) {
      // Goes back while the layers behind it are made.
      copies.WaitFor(work);
      copies.CopyFromDevice(workspace->out() + block_count * layer_begin, device + of_layer,
                            block_count * layer_bytes);
    }
  }
  symbols.CopyFromDevice(workspace->out() + out_states, decode.states,
                         block_count * kRansStateBytes);
  symbols.CopyFromDevice(workspace->out() + out_taken, decode.taken,
                         block_count * sizeof(std::uint32_t));
  return absl::OkStatus();
}

DecodeBatch::DecodeBatch(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
DecodeBatch::~DecodeBatch() = default;

std::size_t DecodeBatch::DeviceBytesOfBlock(const DeviceModel& model) {
  MemoryLayout layout = Input(model, 1, model.geometry.raw_block_bytes() / 2).layout;
  const Carried carried(model, 1, layout);
  layout.Add(model.geometry.raw_block_bytes());
  const BatchMemory memory(model, 1, layout);
  return layout.bytes();
}

absl::StatusOr<std::unique_ptr<DecodeBatch>> DecodeBatch::Start(
    const DeviceModel& model, std::span<const BlockToDecode> blocks,
    WorkspacePool::Lease workspace) {
  KV_CHECK(!blocks.empty());
  if (model.profile->LevelOf(blocks[0].quality) < 0) {
    return DamagedBody("its profile has no such level");
  }
  auto parts = std::unique_ptr<Parts>(new Parts{.model = model,
                                                .blocks = blocks,
                                                .bodies = {},
                                                .word_counts = {},
                                                .workspace = std::move(workspace)});
  KV_RETURN_IF_ERROR(parts->Open());
  KV_RETURN_IF_ERROR(parts->Ask());
  return std::unique_ptr<DecodeBatch>(new DecodeBatch(std::move(parts)));
}

absl::Status DecodeBatch::Finish() {
  const Parts& parts = *parts_;
  const KvGeometry& geometry = parts.model.geometry;
  KV_RETURN_IF_ERROR(parts.workspace->Synchronize());
  const std::byte* const out = parts.workspace->out();
  const std::size_t block_count = parts.blocks.size();
  for (std::size_t b = 0; b < block_count; ++b) {
    const auto taken = LoadLittle<std::uint32_t>(out + parts.out_taken + 4 * b);
    if (taken > parts.word_counts[b]) return DamagedBody("its symbols end early");
    bool finished = taken == parts.word_counts[b];
    for (std::size_t i = 0; i < kLanes; ++i) {
      finished &=
          LoadLittle<std::uint32_t>(out + parts.out_states + 4 * (b * kLanes + i)) == kRansStateMin;
    }
    if (!finished) return DamagedBody("its symbols do not end");
  }
  for (std::size_t b = 0; b < block_count; ++b) {
    const std::span<std::byte> raw = parts.blocks[b].raw;
    for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
      const std::size_t begin = geometry.layer_begin(layer);
      const std::size_t bytes = geometry.layer_end(layer) - begin;
      std::memcpy(raw.data() + begin, out + block_count * begin + b * bytes, bytes);
    }
    const std::byte* from = parts.bodies[b].exact_rows.data();
    for (const std::uint16_t token : parts.bodies[b].exact) {
      ForEachPiece(geometry, token, [&](std::size_t offset, std::size_t bytes) {
        std::memcpy(raw.data() + offset, from, bytes);
        from += bytes;
      });
    }
  }
  return absl::OkStatus();
}

}  // namespace kvtrie::gpu
