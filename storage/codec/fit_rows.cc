#include "storage/codec/fit_rows.h"

#include <algorithm>
#include <cstdint>

namespace kvtrie {

FitRows::FitRows(const ModelSpec& spec, std::span<const KvSample> samples) {
  const std::vector<PlaneShape> planes = PlanesOf(spec);
  for (const KvSample& kv : samples) {
    const std::size_t token_count = kv.tokens.size();
    ModelSpec of_sample = spec;
    of_sample.block_tokens = static_cast<std::uint32_t>(token_count);
    const RawKv& raw_kv =
        raw_kv_.try_emplace(token_count, KvGeometry(of_sample), spec.rope).first->second;
    const std::size_t first_row = tokens_.size();
    samples_.push_back(
        {.kv = kv, .raw_kv = &raw_kv, .angles = raw_kv.AnglesAt(0), .first_row = first_row});

    tokens_.insert(tokens_.end(), kv.tokens.begin(), kv.tokens.end());
    tokens_.resize((tokens_.size() + kLanes - 1) / kLanes * kLanes);
    active_.resize(tokens_.size() / kLanes);
    std::vector<bool> apart(token_count);
    apart[0] = true;
    for (const PlaneShape& plane : planes) {
      for (const std::uint32_t t : raw_kv.ExtremeTokens(kv.raw, plane.layer, plane.kind())) {
        apart[t] = true;
      }
    }
    for (std::size_t t = 0; t < token_count; ++t) {
      if (apart[t]) continue;
      LaneMask& group = active_[(first_row + t) / kLanes];
      group = static_cast<LaneMask>(group | 1u << (first_row + t) % kLanes);
      ++counted_;
    }
  }
}

void FitRows::ReadSample(std::size_t sample, const PlaneShape& plane, std::span<float> rows) const {
  const Sample& from = samples_[sample];
  from.raw_kv->ReadRows(from.kv.raw, plane.layer, plane.kind(), from.angles,
                        rows.first(from.kv.tokens.size() * plane.components()));
}

void FitRows::ReadCounted(std::size_t sample, const PlaneShape& plane,
                          std::span<float> rows) const {
  ReadSample(sample, plane, rows);
  const std::size_t components = plane.components();
  for (std::size_t t = 0; t < samples_[sample].kv.tokens.size(); ++t) {
    if (counts(samples_[sample].first_row + t)) continue;
    std::fill_n(rows.begin() + static_cast<std::ptrdiff_t>(t * components), components, 0.0f);
  }
}

std::vector<float> FitRows::ReadPlane(const PlaneShape& plane) const {
  std::vector<float> rows(row_count() * plane.components());
  for (std::size_t i = 0; i < samples_.size(); ++i) {
    ReadCounted(i, plane, RowsOf(samples_[i], plane, rows));
  }
  return rows;
}

void FitRows::Rotate(const PlaneShape& plane, std::span<float> rows) const {
  for (const Sample& sample : samples_) {
    sample.raw_kv->RotateRows(RowsOf(sample, plane, rows), plane.layer, plane.kind(),
                              sample.angles);
  }
}

std::span<float> FitRows::RowsOf(const Sample& sample, const PlaneShape& plane,
                                 std::span<float> rows) const {
  return rows.subspan(sample.first_row * plane.components(),
                      sample.kv.tokens.size() * plane.components());
}

}  // namespace kvtrie
