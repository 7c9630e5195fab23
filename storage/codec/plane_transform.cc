#include "storage/codec/plane_transform.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstring>

#include "storage/base/check.h"
#include "storage/codec/codec_kernels.h"

namespace kvtrie {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr int kCodeOfZero = 128;

// [value][component]
Matrix BasisOf(const PlaneProfile& of, std::size_t block_components, std::uint32_t block) {
  const std::size_t first = block * block_components;
  Matrix basis(block_components, block_components);
  for (std::size_t v = 0; v < block_components; ++v) {
    for (std::size_t c = 0; c < block_components; ++c) {
      basis(static_cast<Eigen::Index>(v), static_cast<Eigen::Index>(c)) =
          of.basis_scales[first + v] *
          static_cast<float>(of.basis[(first + v) * block_components + c]);
    }
  }
  return basis;
}

}  // namespace

std::vector<float> AnalysisMatrix(const ResidualProfile& profile, std::uint32_t plane,
                                  std::uint32_t block) {
  const PlaneProfile& of = profile.plane_profiles[plane];
  const Matrix analysis =
      BasisOf(of, profile.planes[plane].components() / of.block_count, block).inverse();
  return {analysis.data(), analysis.data() + analysis.size()};
}

void RestoredCodes::Add(std::uint32_t plane, const PlaneProfile& profile, const PlaneShape& shape,
                        std::span<const float> rows) {
  const std::size_t components = shape.components();
  KV_CHECK(rows.size() == row_count_ * components);
  std::vector<std::uint8_t>& codes = codes_[plane];
  codes.resize(rows.size());
  std::vector<float> inverse(components);
  for (std::size_t c = 0; c < components; ++c) inverse[c] = 1 / profile.input_scales[c];
  Kernels().residual_codes_of_rows(rows.data(), row_count_, components, profile.bias.data(),
                                   inverse.data(), codes.data());
  // The layer below and the one below that, and layer 0, are all that a plane reads.
  if (!shape.is_v && plane >= 2) {
    for (std::uint32_t old = 2; old < plane; ++old) {
      if (old + 6 < plane) codes_[old] = {};
    }
  }
}

PlaneTransform::PlaneTransform(const ResidualProfile& profile, std::uint32_t plane)
    : components_(profile.planes[plane].components()) {
  const PlaneProfile& of = profile.plane_profiles[plane];
  block_components_ = components_ / of.block_count;
  inputs_ = InputPlanes(profile.planes, plane, of.inputs);
  std::size_t in = 0;
  for (const std::uint32_t input : inputs_) {
    input_components_.push_back(profile.planes[input].components() / of.block_count);
    in += input_components_.back();
  }
  offset_ = of.bias;
  scale_ = of.weight_scales;
  if (in > 0) {
    for (std::size_t c = 0; c < components_; ++c) {
      std::int32_t sum = 0;
      for (std::size_t i = 0; i < in; ++i) sum += of.weights[c * in + i];
      offset_[c] -= of.weight_scales[c] * static_cast<float>(kCodeOfZero * sum);
    }
  }

  for (std::uint32_t b = 0; b < of.block_count; ++b) {
    const std::size_t first = b * block_components_;
    Block block;
    if (in > 0) {
      block.predict.emplace_back(in, block_components_,
                                 std::span(of.weights).subspan(first * in, block_components_ * in));
    }
    const Matrix basis = BasisOf(of, block_components_, b);
    block.basis.assign(basis.data(), basis.data() + basis.size());
    const Matrix analysis = basis.inverse();
    block.analyze.emplace_back(
        block_components_, block_components_,
        std::span<const float>(analysis.data(), static_cast<std::size_t>(analysis.size())));
    blocks_.push_back(std::move(block));
  }
}

void PlaneTransform::Predict(const RestoredCodes& codes, std::span<float> rows) const {
  const std::size_t row_count = codes.row_count();
  KV_CHECK(rows.size() == row_count * components_);
  if (inputs_.empty()) {
    for (std::size_t row = 0; row < row_count; ++row) {
      std::copy(offset_.begin(), offset_.end(),
                rows.begin() + static_cast<std::ptrdiff_t>(row * components_));
    }
    return;
  }
  std::size_t in = 0;
  for (const std::size_t count : input_components_) in += count;
  std::vector<std::uint8_t> gathered(row_count * in);
  std::vector<std::int32_t> products(row_count * block_components_);
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    std::size_t at = 0;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      const std::size_t width = input_components_[i];
      const std::uint8_t* from = codes.Of(inputs_[i]).data() + b * width;
      const std::size_t stride = width * blocks_.size();
      for (std::size_t row = 0; row < row_count; ++row) {
        std::memcpy(gathered.data() + row * in + at, from + row * stride, width);
      }
      at += width;
    }
    blocks_[b].predict.front().Run(gathered, products);
    const std::size_t first = b * block_components_;
    Kernels().residual_rows_of_products(products.data(), row_count, block_components_,
                                        offset_.data() + first, scale_.data() + first,
                                        rows.data() + first, components_);
  }
}

void PlaneTransform::AddResidual(std::span<const float> values, std::span<float> rows) const {
  const std::size_t row_count = rows.size() / components_;
  KV_CHECK(values.size() == rows.size());
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    const Block& block = blocks_[b];
    const std::size_t first = b * block_components_;
    Kernels().residual_add_values(values.data() + first, block_components_, components_,
                                  block.basis.data(), row_count, block_components_,
                                  rows.data() + first, components_);
  }
}

void PlaneTransform::Analyze(std::span<const float> residual, std::span<float> values) const {
  const std::size_t row_count = residual.size() / components_;
  KV_CHECK(values.size() == residual.size());
  std::vector<float> of_block(row_count * block_components_);
  std::vector<float> result(of_block.size());
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    const std::size_t first = b * block_components_;
    for (std::size_t row = 0; row < row_count; ++row) {
      std::copy_n(residual.data() + row * components_ + first, block_components_,
                  of_block.data() + row * block_components_);
    }
    blocks_[b].analyze.front().Run(of_block, result);
    for (std::size_t row = 0; row < row_count; ++row) {
      std::copy_n(result.data() + row * block_components_, block_components_,
                  values.data() + row * components_ + first);
    }
  }
}

}  // namespace kvtrie
