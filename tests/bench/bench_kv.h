#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "storage/base/check.h"
#include "storage/codec/raw_kv.h"
#include "storage/kv/model_spec.h"

// The KV that benches of codecs run on.
namespace kvtrie {

// Ends the process when there is nothing in it.
inline std::vector<std::byte> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file),
                                std::istreambuf_iterator<char>()};
  if (bytes.empty()) {
    std::fprintf(stderr, "cannot read %s\n", path.c_str());
    std::exit(1);
  }
  const auto* const first = reinterpret_cast<const std::byte*>(bytes.data());
  return {first, first + bytes.size()};
}

inline ModelSpec BenchSpec(DType dtype, const LayerRun& layers, std::uint32_t block_tokens) {
  ModelSpec spec;
  spec.name = spec.weights_revision = spec.tokenizer_digest = "bench";
  spec.dtype = dtype;
  spec.kv_groups = {{.layer_runs = {layers}, .window_tokens = 0}};
  spec.block_tokens = block_tokens;
  KV_CHECK(spec.Validate().ok());
  return spec;
}

// body(layer, kind) in the order of raw KV.
template <typename Body>
void ForEachKind(const KvGeometry& geometry, Body body) {
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    body(layer, KvKind::kK);
    body(layer, KvKind::kV);
  }
}

// A block of normal values (seed 1); channels differ in scale by exp of normal values times
// `spread`.
inline std::vector<std::byte> NormalBlock(const RawKv& raw_kv, float scale, float spread) {
  const KvGeometry& geometry = raw_kv.geometry();
  std::vector<std::byte> raw(geometry.raw_block_bytes());
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  ForEachKind(geometry, [&](std::uint32_t layer, KvKind kind) {
    const std::size_t components = geometry.row_components(layer, kind);
    std::vector<float> scales(components);
    for (float& of_channel : scales) of_channel = scale * std::exp(spread * normal(random));
    std::vector<float> rows(components * geometry.block_tokens());
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = scales[i % components] * normal(random);
    raw_kv.WriteRows(rows, layer, kind, raw_kv.AnglesAt(0), raw);
  });
  return raw;
}

}  // namespace kvtrie
