#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/codec/codec_kernels.h"
#include "storage/codec/residual_state.h"

namespace kvtrie {
struct ResidualCodec::Decoder::Run {
  struct Coded : BatchedBlock {
    BlockToDecode block;
    std::array<const PreparedLevel*, kWayCount> levels = {};
    std::vector<ReferenceBlock> own_references;  // in the order of the frame
    std::vector<std::uint16_t> layers_of_section;
    std::vector<std::uint32_t> raw_crcs;  // [layer], of exact frames
    const std::byte* exact_bytes = nullptr;
    RansState entropy;
  };

  const State* state;
  std::vector<Coded> coded;
  std::size_t row_count = 0;
  std::vector<RestoredCodes> codes;       // [way]
  std::array<bool, kWayCount> used = {};  // ways of any token
  bool exact = false;                     // all blocks are, or none
  std::uint32_t next_plane = 0;
  std::uint32_t next_layer = 0;

  absl::Status Open(Coded& to, KvDigests& digests) const;
  absl::Status OpenReferences(const ReferenceTable& table, Coded& to, KvDigests& digests) const;
  const State& StateOf(std::size_t way) const {
    return way == kWhole ? *state : *state->differences;
  }
  void DecodePlane();
  // Makes restored rows of predicted ones, of both ways.
  void AddResidual(std::uint32_t plane, std::array<std::vector<float>, kWayCount>& rows);
  // Rows of tokens that are differences take the place of what is there.
  void AddReferences(std::uint32_t plane, const std::vector<float>& differences,
                     std::vector<float>& rows) const;
  // The same for exact frames; writes raw KV, of which the rows are made.
  void DecodeNumbers(std::uint32_t plane, std::vector<float>& rows);
  void WriteRows(std::uint32_t plane, std::vector<float>& rows) const;
};

absl::Status ResidualCodec::Decoder::Run::OpenReferences(const ReferenceTable& table, Coded& to,
                                                         KvDigests& digests) const {
  const auto refused = [](const FrameReference& named, absl::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat("referenced frame: block ", named.node.ToHex(), " ", what));
  };
  std::vector<ReferenceBlock> references;
  for (const FrameReference& named : table.references) {
    const auto given =
        std::find_if(to.block.references.begin(), to.block.references.end(),
                     [&](const ReferenceBlock& block) { return block.node == named.node; });
    if (given == to.block.references.end())
      return refused(named, "was coded against, and is missing");
    KV_CHECK(given->tokens.size() == state->geometry.block_tokens());
    KV_CHECK(given->raw.size() == state->geometry.raw_block_bytes());
    if (given->first_position != named.first_position) {
      return refused(named, "was coded against at another position");
    }
    references.push_back(*given);
  }
  KV_RETURN_IF_ERROR(CheckSharedTokens(to.block.tokens, references, table.runs));
  for (std::size_t i = 0; i < references.size(); ++i) {
    if (digests.Of(references[i].raw) != table.references[i].digest) {
      return refused(table.references[i], "holds other KV than was coded against");
    }
  }
  to.runs = table.runs;
  to.own_references = std::move(references);
  to.references = to.own_references;
  for (const ReferenceBlock& block : to.references) {
    to.reference_angles.push_back(state->raw_kv.AnglesAt(block.first_position));
  }
  return absl::OkStatus();
}

absl::Status ResidualCodec::Decoder::Run::Open(Coded& to, KvDigests& digests) const {
  const BlockToDecode& block = to.block;
  to.levels[kWhole] = state->FindLevel(block.quality);
  if (to.levels[kWhole] == nullptr) return DamagedBody("its profile has no such level");
  if (block.is_referenced) {
    if (block.quality == Quality::kExact) return DamagedBody("exact, but coded against references");
    if (state->differences == nullptr) {
      return DamagedBody("coded against references, of which its profile knows nothing");
    }
    to.levels[kDifference] = state->differences->FindLevel(block.quality);
  }
  KV_ASSIGN_OR_RETURN(ResidualBody body,
                      ReadResidualBody(state->geometry, state->id, state->profile, block));
  to.angles = state->raw_kv.AnglesAt(body.first_position);
  to.layers_of_section = std::move(body.layers_of_section);
  to.raw_crcs = std::move(body.raw_crcs);
  to.exact = std::move(body.exact);
  to.exact_bytes = body.exact_rows.data();
  to.first_from_profile = body.first_from_profile;
  if (block.is_referenced) KV_RETURN_IF_ERROR(OpenReferences(body.references, to, digests));
  to.StartCoding();
  Kernels().residual_start(reinterpret_cast<const std::uint8_t*>(body.symbols.data()),
                           body.symbols.size(), &to.entropy);
  return absl::OkStatus();
}

void ResidualCodec::Decoder::Run::DecodePlane() {
  const std::uint32_t plane = next_plane++;
  const PlaneShape& shape = state->profile.planes[plane];
  std::array<std::vector<float>, kWayCount> rows;
  for (std::size_t way = 0; way < kWayCount; ++way) {
    if (used[way]) rows[way] = StateOf(way).Predict(plane, codes[way], coded);
  }
  if (exact) {
    DecodeNumbers(plane, rows[kWhole]);
  } else {
    AddResidual(plane, rows);
  }
  for (std::size_t way = 0; way < kWayCount; ++way) {
    if (!used[way]) continue;
    codes[way].Add(plane, StateOf(way).profile.plane_profiles[plane], shape, rows[way]);
  }
  if (exact) return;
  rows[kWhole].resize(row_count * shape.components());
  if (used[kDifference]) AddReferences(plane, rows[kDifference], rows[kWhole]);
  WriteRows(plane, rows[kWhole]);
}

void ResidualCodec::Decoder::Run::AddResidual(std::uint32_t plane,
                                              std::array<std::vector<float>, kWayCount>& rows) {
  const std::size_t components = state->profile.planes[plane].components();
  std::array<std::vector<float>, kWayCount> values;
  for (std::size_t way = 0; way < kWayCount; ++way) values[way].resize(rows[way].size());
  std::vector<float> coded_values;
  for (Coded& of_block : coded) {
    for (std::size_t group = 0; group < of_block.lanes[kWhole].active.size(); ++group) {
      for (std::size_t way = 0; way < kWayCount; ++way) {
        BatchedBlock::Lanes& lanes = of_block.lanes[way];
        if (lanes.active[group] == 0) continue;
        const PreparedLevel& level = *of_block.levels[way];
        const LevelPlane& coded_plane = level.planes[plane];
        coded_values.resize(coded_plane.coded_count() * kLanes);
        Kernels().residual_decode(StateOf(way).TablesOf(level), coded_plane.Symbols(),
                                  lanes.active[group], &of_block.entropy, &lanes.carry[group],
                                  coded_values.data());
        coded_plane.Scatter(coded_values.data(), level.step,
                            values[way].data() + (of_block.first_row + group * kLanes) * components,
                            components);
      }
    }
  }
  for (std::size_t way = 0; way < kWayCount; ++way) {
    if (used[way]) StateOf(way).transforms[plane].AddResidual(values[way], rows[way]);
  }
}

void ResidualCodec::Decoder::Run::AddReferences(std::uint32_t plane,
                                                const std::vector<float>& differences,
                                                std::vector<float>& rows) const {
  const std::size_t components = state->profile.planes[plane].components();
  for (const Coded& of_block : coded) {
    if (of_block.runs.empty()) continue;
    state->ReadReferences(of_block, plane, state->RowsOf(of_block, plane, rows));
    for (const ReferenceRun& run : of_block.runs) {
      const std::size_t begin = (of_block.first_row + run.first_token) * components;
      for (std::size_t i = begin; i < begin + run.token_count * components; ++i) {
        rows[i] += differences[i];
      }
    }
  }
}

void ResidualCodec::Decoder::Run::DecodeNumbers(std::uint32_t plane, std::vector<float>& rows) {
  const PlaneShape& shape = state->profile.planes[plane];
  const std::size_t components = shape.components();
  const PredictedPlane cells = state->CellsOf(plane);
  std::vector<float> predictions(components * kLanes);
  std::vector<std::uint32_t> numbers(components * kLanes);
  for (Coded& of_block : coded) {
    state->RotateRows(of_block, plane, rows);
    const ResidualTables tables = state->TablesOf(*of_block.levels[kWhole]);
    for (std::size_t group = 0; group < of_block.lanes[kWhole].active.size(); ++group) {
      ToLanes(rows.data() + (of_block.first_row + group * kLanes) * components, components,
              predictions);
      Kernels().predicted_decode(tables, *state->exact_format, cells,
                                 of_block.lanes[kWhole].active[group], &of_block.entropy,
                                 of_block.lanes[kWhole].carry[group].shift, predictions.data(),
                                 numbers.data());
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        if ((of_block.lanes[kWhole].active[group] >> lane & 1) == 0) continue;
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
  auto run = std::unique_ptr<Run>(new Run{
      .state = &state,
      .coded = {},
      .row_count = blocks.size() * rows_of_block,
      .codes = {kWayCount,
                RestoredCodes(state.profile.planes.size(), blocks.size() * rows_of_block)}});
  run->exact = !blocks.empty() && blocks[0].quality == Quality::kExact;
  run->used[kWhole] = run->exact;
  run->coded.resize(blocks.size());
  KvDigests digests;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    run->coded[i].block = blocks[i];
    run->coded[i].tokens = blocks[i].tokens;
    run->coded[i].first_row = i * rows_of_block;
    KV_CHECK((blocks[i].quality == Quality::kExact) == run->exact);
    KV_RETURN_IF_ERROR(run->Open(run->coded[i], digests));
    for (std::size_t way = 0; way < kWayCount; ++way) {
      run->used[way] |= run->coded[i].lanes[way].any;
    }
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
    if (coded.entropy.damaged) return DamagedBody("its symbols end early");
    if (run.exact) {
      const auto raw = RawOfLayer(geometry, run.next_layer, coded.block.raw);
      if (Crc32c(raw) != coded.raw_crcs[run.next_layer]) {
        return DamagedBody("it decodes to other KV than was encoded");
      }
    }
  }
  ++run.next_layer;
  if (run.next_layer == geometry.layer_count()) {
    for (const Run::Coded& coded : run.coded) {
      if (!Kernels().residual_finished(&coded.entropy))
        return DamagedBody("its symbols do not end");
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
