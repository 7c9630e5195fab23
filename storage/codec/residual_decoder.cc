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
  struct Coded {
    BlockToDecode block;
    const PreparedLevel* level = nullptr;
    std::size_t first_row = 0;
    RopeAngles angles;
    bool first_from_profile = false;
    std::vector<std::uint16_t> layers_of_section;
    std::vector<std::uint32_t> raw_crcs;  // [layer], of exact frames
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
