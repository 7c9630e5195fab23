#include "storage/codec/predictor_fit.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "storage/codec/matrix_product.h"

namespace kvtrie {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Codes reach that many standard deviations of what they stand for.
constexpr float kInputDeviations = 6;
constexpr float kCodeUnit = kInputDeviations / 127;  // in deviations

Eigen::Index Index(std::size_t size) { return static_cast<Eigen::Index>(size); }

// Mean, and the unit of codes by the deviation from it.
void FitInputCodes(const FitRows& rows, std::span<const float> values, PlaneProfile& of) {
  const std::size_t components = of.bias.size();
  std::vector<double> mean(components), square(components);
  for (std::size_t row = 0; row < rows.row_count(); ++row) {
    if (!rows.counts(row)) continue;
    for (std::size_t c = 0; c < components; ++c) {
      const double x = values[row * components + c];
      mean[c] += x;
      square[c] += x * x;
    }
  }
  const auto n = static_cast<double>(rows.counted());
  for (std::size_t c = 0; c < components; ++c) {
    mean[c] /= n;
    const double variance = std::max(square[c] / n - mean[c] * mean[c], 0.0);
    of.bias[c] = static_cast<float>(mean[c]);
    const double scale = std::sqrt(variance) * kInputDeviations / 127;
    of.input_scales[c] = static_cast<float>(std::max(scale, 1e-12));
  }
}

// What inputs of one block give: planes, and how many components of each.
struct BlockInputs {
  std::vector<std::uint32_t> planes;
  std::vector<std::size_t> widths;
  std::size_t count = 0;  // of all components
};

// Sums over all rows, in units of the inputs' deviations, so that a ridge treats them alike.
struct NormalEquations {
  Eigen::MatrixXd gram;   // [input][input]
  Eigen::MatrixXd cross;  // [input][component of the block]
};

NormalEquations SumProducts(const FitRows& rows, std::span<const float> values,
                            const RestoredCodes& codes, const BlockInputs& inputs,
                            std::size_t block, const PlaneProfile& of,
                            const std::function<bool()>& is_cancelled) {
  const std::size_t components = of.bias.size();
  const std::size_t block_components = components / of.block_count;
  const std::size_t in = inputs.count;
  NormalEquations sums = {.gram = Eigen::MatrixXd::Zero(Index(in), Index(in)),
                          .cross = Eigen::MatrixXd::Zero(Index(in), Index(block_components))};
  Matrix x(kFitChunkRows, in), y(kFitChunkRows, block_components);
  Matrix chunk_gram(in, in), chunk_cross(in, block_components);
  std::size_t filled = 0;
  const auto add_chunk = [&] {
    const std::span<const float> x_rows(x.data(), filled * in);
    const std::span<const float> y_rows(y.data(), filled * block_components);
    TransposedProduct(x_rows, in, x_rows, in, {chunk_gram.data(), in * in});
    TransposedProduct(x_rows, in, y_rows, block_components,
                      {chunk_cross.data(), in * block_components});
    sums.gram += chunk_gram.cast<double>();
    sums.cross += chunk_cross.cast<double>();
    filled = 0;
  };
  for (std::size_t row = 0; row < rows.row_count(); ++row) {
    if (!rows.counts(row)) continue;
    Eigen::Index at = 0;
    for (std::size_t i = 0; i < inputs.planes.size(); ++i) {
      const std::uint8_t* const from =
          codes.Of(inputs.planes[i]).data() + (row * of.block_count + block) * inputs.widths[i];
      for (std::size_t c = 0; c < inputs.widths[i]; ++c) {
        x(Index(filled), at++) = (static_cast<float>(from[c]) - 128) * kCodeUnit;
      }
    }
    for (std::size_t c = 0; c < block_components; ++c) {
      const std::size_t component = block * block_components + c;
      y(Index(filled), Index(c)) = values[row * components + component] - of.bias[component];
    }
    if (++filled < kFitChunkRows) continue;
    add_chunk();
    if (is_cancelled && is_cancelled()) return sums;
  }
  add_chunk();
  return sums;
}

}  // namespace

void FitPredictor(const FitRows& rows, std::span<const float> values, const RestoredCodes& codes,
                  double ridge, std::uint32_t plane, ResidualProfile& profile,
                  const std::function<bool()>& is_cancelled) {
  PlaneProfile& of = profile.plane_profiles[plane];
  FitInputCodes(rows, values, of);

  const std::size_t components = of.bias.size();
  const std::size_t block_components = components / of.block_count;
  BlockInputs inputs{.planes = InputPlanes(profile.planes, plane, of.inputs), .widths = {}};
  for (const std::uint32_t input : inputs.planes) {
    inputs.widths.push_back(profile.planes[input].components() / of.block_count);
    inputs.count += inputs.widths.back();
  }
  const std::size_t in = inputs.count;
  of.weight_scales.assign(components, 0);
  of.weights.assign(components * in, 0);
  if (in == 0) return;
  for (std::size_t block = 0; block < of.block_count; ++block) {
    NormalEquations sums = SumProducts(rows, values, codes, inputs, block, of, is_cancelled);
    if (is_cancelled && is_cancelled()) return;
    sums.gram.diagonal().array() += ridge * sums.gram.trace() / static_cast<double>(in);
    const Eigen::MatrixXd solved = sums.gram.ldlt().solve(sums.cross);
    for (std::size_t c = 0; c < block_components; ++c) {
      const auto column = solved.col(Index(c));
      const double scale =
          std::max(column.cwiseAbs().maxCoeff() / IntegerProduct::kWeightMax, 1e-30);
      const std::size_t component = block * block_components + c;
      of.weight_scales[component] = static_cast<float>(scale * kCodeUnit);
      for (std::size_t i = 0; i < in; ++i) {
        of.weights[component * in + i] =
            static_cast<std::int8_t>(std::nearbyint(column(Index(i)) / scale));
      }
    }
  }
}

}  // namespace kvtrie
