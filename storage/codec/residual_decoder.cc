#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/codec/codec_kernels.h"
#include "storage/codec/frame.h"
#include "storage/codec/residual_state.h"

namespace kvtrie {
namespace {

absl::Status Damaged(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("residual frame: ", what));
}

}  // namespace

struct ResidualCodec::Decoder::Run {
  struct Coded : BatchedBlock {
    BlockToDecode block;
    const PreparedLevel* level = nullptr;
    std::vector<std::uint16_t> layers_of_section;
    std::vector<std::uint32_t> raw_crcs;  // [layer], of exact frames
    const std::byte* exact_bytes = nullptr;
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
  // Makes restored rows of predicted ones.
  void AddResidual(std::uint32_t plane, std::vector<float>& rows);
  // The same for exact frames; writes raw KV, of which the rows are made.
  void DecodeNumbers(std::uint32_t plane, std::vector<float>& rows);
  void WriteRows(std::uint32_t plane, std::vector<float>& rows) const;
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
  for (std::uint32_t i = 0; i < geometry.layer_count() && block.quality == Quality::kExact; ++i) {
    to.raw_crcs.push_back(reader.Read<std::uint32_t>());
  }
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
  if (to.first_from_profile && (!state->profile.has_first_token || binding.first_position != 0 ||
                                block.tokens[0] != state->profile.first_token ||
                                (!to.exact.empty() && to.exact.front() == 0))) {
    return Damaged("no first token of the profile");
  }
  to.StartCoding();
  const std::size_t at = block.section_bytes[0] - reader.remaining_bytes();
  const auto entropy = block.body.subspan(at);
  Kernels().residual_start(reinterpret_cast<const std::uint8_t*>(entropy.data()), entropy.size(),
                           &to.entropy);
  return absl::OkStatus();
}

void ResidualCodec::Decoder::Run::DecodePlane() {
  const std::uint32_t plane = next_plane++;
  std::vector<float> rows = state->Predict(plane, codes, coded);
  if (exact) {
    DecodeNumbers(plane, rows);
  } else {
    AddResidual(plane, rows);
  }
  codes.Add(plane, state->profile.plane_profiles[plane], state->profile.planes[plane], rows);
  if (!exact) WriteRows(plane, rows);
}

void ResidualCodec::Decoder::Run::AddResidual(std::uint32_t plane, std::vector<float>& rows) {
  const std::size_t components = state->profile.planes[plane].components();
  std::vector<float> values(rows.size());
  std::vector<float> coded_values;
  for (Coded& of_block : coded) {
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
  state->transforms[plane].AddResidual(values, rows);
}

void ResidualCodec::Decoder::Run::DecodeNumbers(std::uint32_t plane, std::vector<float>& rows) {
  const PlaneShape& shape = state->profile.planes[plane];
  const std::size_t components = shape.components();
  const PredictedPlane cells = state->CellsOf(plane);
  std::vector<float> predictions(components * kLanes);
  std::vector<std::uint32_t> numbers(components * kLanes);
  for (Coded& of_block : coded) {
    state->RotateRows(of_block, plane, rows);
    const ResidualTables tables = state->TablesOf(*of_block.level);
    for (std::size_t group = 0; group < of_block.active.size(); ++group) {
      ToLanes(rows.data() + (of_block.first_row + group * kLanes) * components, components,
              predictions);
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
    state->raw_kv.ReadRows(of_block.block.raw, shape.layer, shape.kind(), of_block.angles,
                           state->RowsOf(of_block, plane, rows));
  }
}

void ResidualCodec::Decoder::Run::WriteRows(std::uint32_t plane, std::vector<float>& rows) const {
  const ResidualProfile& profile = state->profile;
  const PlaneShape& shape = profile.planes[plane];
  for (const Coded& of_block : coded) {
    const std::span<float> block_rows = state->RowsOf(of_block, plane, rows);
    if (of_block.first_from_profile) {
      std::size_t at = 0;
      for (std::uint32_t i = 0; i < plane; ++i) at += profile.planes[i].components();
      std::copy_n(profile.first_rows.begin() + static_cast<std::ptrdiff_t>(at), shape.components(),
                  block_rows.begin());
    }
    state->raw_kv.WriteRows(block_rows, shape.layer, shape.kind(), of_block.angles,
                            of_block.block.raw);
  }
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
    run->coded[i].tokens = blocks[i].tokens;
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
    run.DecodePlane();
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
    if (run.exact) {
      const auto raw = RawOfLayer(geometry, run.next_layer, coded.block.raw);
      if (Crc32c(raw) != coded.raw_crcs[run.next_layer]) {
        return Damaged("it decodes to other KV than was encoded");
      }
    }
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
}  // namespace kvtrie
