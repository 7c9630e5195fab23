#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "storage/codec/frame_codec.h"
#include "storage/codec/shared_runs.h"
#include "tests/storage/codec/residual_fixture.h"

// Texts that hold tokens of another one behind another prefix, as blocks that can be coded against
// that one's.
namespace kvtrie {

// A text of so many tokens, in which those from `first` on are `count` of another from `offset` on.
// Their K (before RoPE) and V differ from the other's by noise.
inline SyntheticText ShareTokens(const ModelSpec& spec, const SyntheticText& other,
                                 std::uint32_t offset, std::uint32_t count, std::uint32_t first,
                                 std::uint32_t token_count, std::uint64_t seed, float noise) {
  SyntheticText text = MakeText(spec, token_count, seed);
  TestRandom random(seed + 1000);
  const auto other_tokens = static_cast<std::uint32_t>(other.tokens.size());
  const RawKv raw_kv(KvGeometry(WithBlocks(spec, token_count)), spec.rope);
  const RawKv other_kv(KvGeometry(WithBlocks(spec, other_tokens)), spec.rope);
  std::copy_n(other.tokens.begin() + offset, count, text.tokens.begin() + first);
  std::vector<std::byte> raw = text.raw;
  for (const PlaneShape& plane : PlanesOf(spec)) {
    const std::size_t components = plane.components();
    std::vector<float> rows(token_count * components), from(other_tokens * components);
    raw_kv.ReadRows(text.raw, plane.layer, plane.kind(), raw_kv.AnglesAt(0), rows);
    other_kv.ReadRows(other.raw, plane.layer, plane.kind(), other_kv.AnglesAt(0), from);
    for (std::size_t i = 0; i < count * components; ++i) {
      rows[first * components + i] = from[offset * components + i] + noise * DrawNormal(random);
    }
    raw_kv.WriteRows(rows, plane.layer, plane.kind(), raw_kv.AnglesAt(0), raw);
  }
  text.raw = std::move(raw);
  return text;
}

// How differences are coded, for a profile that nothing is fitted to: predicted by one component
// of the layer below, in steps of the profile's levels.
inline ResidualProfile WithDifferences(ResidualProfile profile, const ModelSpec& spec) {
  ResidualProfile of = PlainProfile(spec);
  of.table_tokens.clear();
  of.table_rows.clear();
  of.levels = profile.levels;
  for (PlaneProfile& plane : of.plane_profiles) {
    std::fill(plane.bias.begin(), plane.bias.end(), 0.0f);
    std::fill(plane.input_scales.begin(), plane.input_scales.end(), 0.01f);
    plane.scales.assign(of.levels.size(),
                        std::vector<std::uint8_t>(plane.bias.size(), std::uint8_t{56}));
  }
  profile.differences = {std::move(of)};
  return profile;
}

// Blocks of a text that can be coded against those of another. Not to be moved.
struct SharedBlocks {
  ModelSpec spec;
  std::vector<std::vector<std::byte>> reference_raw, raw;  // [block]
  std::vector<std::vector<TokenId>> reference_tokens, tokens;
  std::vector<ReferenceBlock> references;             // all blocks of the other text
  std::vector<std::vector<ReferenceBlock>> of_block;  // those that a block has runs of
  std::vector<std::vector<ReferenceRun>> runs;
  std::vector<BlockToEncode> blocks;

  SharedBlocks(const ModelSpec& of, const SyntheticText& other, const SyntheticText& text)
      : spec(of) {
    Cut(other, reference_raw, reference_tokens);
    Cut(text, raw, tokens);
    const std::uint32_t size = spec.block_tokens;
    for (std::size_t b = 0; b < reference_raw.size(); ++b) {
      TrieNodeId node;
      node.bytes.fill(static_cast<std::uint8_t>(0xA0 + b));
      references.push_back({.node = node,
                            .first_position = static_cast<std::uint32_t>(b) * size,
                            .tokens = reference_tokens[b],
                            .raw = reference_raw[b]});
    }
    of_block.resize(raw.size());
    runs.resize(raw.size());
    const std::span<const TokenId> texts[] = {other.tokens, text.tokens};
    for (const SharedRun& shared : FindSharedRuns(texts, 8)) {
      if (shared.earlier_text == shared.text) continue;
      for (std::size_t i = 0; i < shared.token_count; ++i) {
        Add(shared.first_token + i, shared.offset + i);
      }
    }
    for (std::size_t b = 0; b < raw.size(); ++b) {
      blocks.push_back({.first_position = static_cast<std::uint32_t>(b) * size,
                        .session_tokens = static_cast<std::uint32_t>(text.tokens.size()),
                        .tokens = tokens[b],
                        .raw = raw[b],
                        .references = of_block[b],
                        .runs = runs[b]});
    }
  }
  SharedBlocks(const SharedBlocks&) = delete;

  std::vector<BlockToEncode> Alone() const {
    std::vector<BlockToEncode> alone = blocks;
    for (BlockToEncode& block : alone) {
      block.references = {};
      block.runs = {};
    }
    return alone;
  }

  BlockToDecode ToDecode(const EncodedBlock& encoded, std::size_t block, Quality quality,
                         std::span<std::byte> to) const {
    return {.body = encoded.body,
            .section_bytes = encoded.section_bytes,
            .quality = quality,
            .tokens = tokens[block],
            .raw = to,
            .is_referenced = encoded.referenced_tokens > 0,
            .references = references};
  }

 private:
  void Cut(const SyntheticText& text, std::vector<std::vector<std::byte>>& of_raw,
           std::vector<std::vector<TokenId>>& of_tokens) const {
    for (std::uint32_t first = 0; first + spec.block_tokens <= text.tokens.size();
         first += spec.block_tokens) {
      of_raw.push_back(CutBlock(spec, text, first));
      const auto from = text.tokens.begin() + static_cast<std::ptrdiff_t>(first);
      of_tokens.emplace_back(from, from + static_cast<std::ptrdiff_t>(spec.block_tokens));
    }
  }

  void Add(std::size_t token, std::size_t other) {
    const std::size_t size = spec.block_tokens;
    if (token / size >= raw.size() || other / size >= reference_raw.size()) return;
    std::vector<ReferenceBlock>& own = of_block[token / size];
    std::vector<ReferenceRun>& own_runs = runs[token / size];
    const ReferenceBlock& reference = references[other / size];
    if (own.empty() || own.back().node != reference.node) {
      own.push_back(reference);
      own_runs.push_back({.first_token = static_cast<std::uint16_t>(token % size),
                          .token_count = 0,
                          .reference = static_cast<std::uint16_t>(own.size() - 1),
                          .offset = static_cast<std::uint16_t>(other % size)});
    }
    ++own_runs.back().token_count;
  }
};

}  // namespace kvtrie
