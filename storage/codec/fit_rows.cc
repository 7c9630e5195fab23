#include "storage/codec/fit_rows.h"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace kvtrie {

FitRows::FitRows(const ModelSpec& spec, std::span<const KvSample> samples) : spec_(spec) {
  const std::vector<PlaneShape> planes = PlanesOf(spec);
  for (const KvSample& kv : samples) {
    const std::size_t token_count = kv.tokens.size();
    const RawKv& raw_kv = RawKvOf(token_count);
    const std::size_t first_row = tokens_.size();
    samples_.push_back(
        {.kv = kv, .raw_kv = &raw_kv, .angles = raw_kv.AnglesAt(0), .first_row = first_row});

    tokens_.insert(tokens_.end(), kv.tokens.begin(), kv.tokens.end());
    tokens_.resize((tokens_.size() + kLanes - 1) / kLanes * kLanes);
    active_.resize(tokens_.size() / kLanes);
    std::vector<bool> apart = ExtremeTokens(raw_kv, kv, planes);
    apart[0] = true;
    for (std::size_t t = 0; t < token_count; ++t) {
      if (apart[t]) continue;
      LaneMask& group = active_[(first_row + t) / kLanes];
      group = static_cast<LaneMask>(group | 1u << (first_row + t) % kLanes);
      ++counted_;
    }
  }
}

const RawKv& FitRows::RawKvOf(std::size_t token_count) {
  ModelSpec of_sample = spec_;
  of_sample.block_tokens = static_cast<std::uint32_t>(token_count);
  return raw_kv_.try_emplace(token_count, KvGeometry(of_sample), spec_.rope).first->second;
}

std::vector<bool> FitRows::ExtremeTokens(const RawKv& raw_kv, const KvSample& kv,
                                         std::span<const PlaneShape> planes) {
  std::vector<bool> extreme(kv.tokens.size());
  for (const PlaneShape& plane : planes) {
    for (const std::uint32_t t : raw_kv.ExtremeTokens(kv.raw, plane.layer, plane.kind())) {
      extreme[t] = true;
    }
  }
  return extreme;
}

void FitRows::TakeDifferences(std::span<const ReferencedRun> runs) {
  const std::vector<PlaneShape> planes = PlanesOf(spec_);
  std::vector<LaneMask> referenced(active_.size());
  for (const ReferencedRun& run : runs) {
    Sample& sample = samples_[run.sample];
    const RawKv& raw_kv = RawKvOf(run.reference.tokens.size());
    const std::vector<bool> extreme = ExtremeTokens(raw_kv, run.reference, planes);
    for (std::size_t t = 0; t < run.token_count; ++t) {
      if (extreme[run.offset + t]) continue;
      const std::size_t row = sample.first_row + run.first_token + t;
      LaneMask& group = referenced[row / kLanes];
      group = static_cast<LaneMask>(group | 1u << row % kLanes);
    }
    sample.runs.push_back({.run = run, .raw_kv = &raw_kv, .angles = raw_kv.AnglesAt(0)});
  }
  counted_ = 0;
  for (std::size_t group = 0; group < active_.size(); ++group) {
    active_[group] = static_cast<LaneMask>(active_[group] & referenced[group]);
    counted_ += static_cast<std::size_t>(std::popcount(active_[group]));
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
  std::vector<float> of_reference;
  for (const Sample::Run& of : samples_[sample].runs) {
    of_reference.resize(of.run.reference.tokens.size() * components);
    of.raw_kv->ReadRows(of.run.reference.raw, plane.layer, plane.kind(), of.angles, of_reference);
    for (std::size_t i = 0; i < of.run.token_count * components; ++i) {
      rows[of.run.first_token * components + i] -= of_reference[of.run.offset * components + i];
    }
  }
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
