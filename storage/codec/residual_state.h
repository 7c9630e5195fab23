#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "storage/codec/importance.h"
#include "storage/codec/plane_transform.h"
#include "storage/codec/predicted_entropy.h"
#include "storage/codec/rans.h"
#include "storage/codec/raw_kv.h"
#include "storage/codec/reference_table.h"
#include "storage/codec/residual_body.h"
#include "storage/codec/residual_codec.h"
#include "storage/codec/residual_entropy.h"
#include "storage/codec/residual_level.h"

// What residual_encoder.cc and residual_decoder.cc share. For no one else.
namespace kvtrie {

// One level of a profile, ready to code.
struct PreparedLevel {
  Quality quality;
  float step;
  float importance_strength;
  std::vector<float> thresholds;
  std::vector<LevelPlane> planes;
};

// How the rows of a token are coded: as they are, or as what they differ by from its reference's.
// Each way has its own part of the profile.
enum Way : std::size_t { kWhole = 0, kDifference = 1, kWayCount = 2 };

// A block among those that are coded together, for either direction.
struct BatchedBlock {
  // What codes its tokens in one of the ways.
  struct Lanes {
    std::vector<LaneMask> active;      // [group] lanes that are coded
    std::vector<ResidualCarry> carry;  // [group]
    bool any = false;
  };

  std::span<const TokenId> tokens;
  RopeAngles angles;
  std::size_t first_row = 0;         // in rows of the batch
  std::vector<std::uint16_t> exact;  // tokens that are kept as they are, ascending
  bool first_from_profile = false;   // the first token's KV is the profile's
  std::span<const ReferenceBlock> references;
  std::vector<ReferenceRun> runs;  // of tokens that are coded as differences
  std::vector<RopeAngles> reference_angles;
  std::array<Lanes, kWayCount> lanes;

  // Sets the lanes for the first plane. Those beyond the block's tokens, and those of tokens that
  // come from elsewhere, code nothing.
  void StartCoding();
};

// A profile, ready to code with. Prepare() comes first, then all is immutable.
struct ResidualCodec::State {
  State(const ModelSpec& spec, const ProfileId& profile_id, const ResidualProfile& from);

  absl::Status Prepare(const ModelSpec& spec);
  const PreparedLevel* FindLevel(Quality quality) const;
  std::size_t BlocksAtOnce() const;
  ResidualTables TablesOf(const PreparedLevel& level) const {
    return symbols->Tables(level.thresholds.data());
  }

  // Rows of a plane are those of a whole batch, [row][component]; these are one block's.
  std::span<float> RowsOf(const BatchedBlock& block, std::uint32_t plane,
                          std::vector<float>& rows) const;
  // Those of the references of a block's runs, [token of the block][component]; the other rows of
  // the block stay as they are.
  void ReadReferences(const BatchedBlock& block, std::uint32_t plane,
                      std::span<float> block_rows) const;

  // What is known of a plane's rows before they are coded: planes below say it, and of layer 0 the
  // tokens.
  template <typename Block>  // a BatchedBlock
  std::vector<float> Predict(std::uint32_t plane, const RestoredCodes& codes,
                             const std::vector<Block>& blocks) const {
    std::vector<float> rows(codes.row_count() * profile.planes[plane].components());
    transforms[plane].Predict(codes, rows);
    for (const Block& block : blocks) {
      PredictFromTokens(profile, plane, block.tokens, RowsOf(block, plane, rows));
    }
    return rows;
  }

  // For exact frames, whose numbers are those of raw KV: K after RoPE.
  void RotateRows(const BatchedBlock& block, std::uint32_t plane, std::vector<float>& rows) const;
  PredictedPlane CellsOf(std::uint32_t plane) const;
  // A number of a raw block, as bits.
  std::size_t NumberAt(std::uint32_t plane, std::size_t token, std::size_t component) const;
  std::uint32_t LoadNumber(std::span<const std::byte> raw, std::uint32_t plane, std::size_t token,
                           std::size_t component) const;
  void StoreNumber(std::span<std::byte> raw, std::uint32_t plane, std::size_t token,
                   std::size_t component, std::uint32_t bits) const;
  bool IsInCells(std::uint32_t plane, std::size_t component, std::uint32_t bits) const;

  const KvGeometry geometry;
  const RawKv raw_kv;
  const std::vector<RopePairs> rope_pairs;  // of each layer
  const ProfileId id;
  const ResidualProfile profile;
  // For exact frames; no value: the dtype is not one of those.
  const std::optional<PredictedFormat> exact_format;
  std::vector<std::vector<std::int8_t>> cell_exponents;  // [plane], within the format
  std::optional<SymbolTables> symbols;
  std::vector<PlaneTransform> transforms;  // [plane]
  std::vector<PreparedLevel> levels;
  std::optional<ImportanceEstimator> importance;
  std::unique_ptr<State> differences;  // of the profile's, if it has them
};

// Digests of references' raw KV, each made once: a reference serves several blocks.
class KvDigests {
 public:
  const KvDigest& Of(std::span<const std::byte> raw);

 private:
  std::map<const std::byte*, KvDigest> digests_;  // by where it lies
};

// InvalidArgument unless the tokens of the runs are those of their references.
// REQUIRES: runs within both blocks.
absl::Status CheckSharedTokens(std::span<const TokenId> tokens,
                               std::span<const ReferenceBlock> references,
                               std::span<const ReferenceRun> runs);

// Rows of a block in groups of 16 tokens.
inline std::size_t GroupsOf(std::size_t tokens) { return (tokens + kLanes - 1) / kLanes; }

// The rows of 16 tokens in the kernels' order, [component][token].
void ToLanes(const float* rows, std::size_t components, std::span<float> lanes);

}  // namespace kvtrie
