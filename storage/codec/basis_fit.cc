#include "storage/codec/basis_fit.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "storage/codec/fit_rows.h"
#include "storage/codec/matrix_product.h"

namespace kvtrie {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

Eigen::Index Index(std::size_t size) { return static_cast<Eigen::Index>(size); }

// Of `size` components from `first` on.
Eigen::MatrixXd Covariance(std::span<const float> residual, std::size_t components,
                           std::size_t first, std::size_t size, std::size_t counted_rows) {
  const std::size_t row_count = residual.size() / components;
  Eigen::MatrixXd covariance = Eigen::MatrixXd::Zero(Index(size), Index(size));
  Matrix chunk(kFitChunkRows, size), chunk_covariance(size, size);
  for (std::size_t row = 0; row < row_count; row += kFitChunkRows) {
    const std::size_t count = std::min(kFitChunkRows, row_count - row);
    for (std::size_t i = 0; i < count; ++i) {
      std::copy_n(residual.data() + (row + i) * components + first, size, chunk.data() + i * size);
    }
    const std::span<const float> rows(chunk.data(), count * size);
    TransposedProduct(rows, size, rows, size, {chunk_covariance.data(), size * size});
    covariance += chunk_covariance.cast<double>();
  }
  covariance /= static_cast<double>(counted_rows);
  return covariance;
}

// The metric of the same components, shrunk.
Eigen::MatrixXd ShrunkMetric(std::span<const float> metric, std::size_t components,
                             std::size_t first, std::size_t size, double shrinkage) {
  Eigen::MatrixXd shrunk(Index(size), Index(size));
  for (std::size_t i = 0; i < size; ++i) {
    for (std::size_t j = 0; j < size; ++j) {
      shrunk(Index(i), Index(j)) = metric[(first + i) * components + first + j];
    }
  }
  shrunk.diagonal().array() += shrinkage * shrunk.trace() / static_cast<double>(size);
  shrunk /= 1 + shrinkage;
  return shrunk;
}

// Rows in which values of 1 stand for errors of the same cost: [value][component].
Eigen::MatrixXd PrincipalBasis(const Eigen::MatrixXd& covariance, const Eigen::MatrixXd& metric) {
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> of_metric(metric);
  const Eigen::VectorXd floor =
      of_metric.eigenvalues().cwiseMax(of_metric.eigenvalues().maxCoeff() * 1e-9).cwiseMax(1e-30);
  const Eigen::MatrixXd root =
      of_metric.eigenvectors() * floor.cwiseSqrt().asDiagonal();  // metric = root root^T
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> principal(root.transpose() * covariance *
                                                                 root);
  // Values = residual . analysis.
  const Eigen::MatrixXd analysis = root * principal.eigenvectors().rowwise().reverse();
  return analysis.inverse();
}

}  // namespace

void FitBasis(std::span<const float> residual, std::size_t counted_rows,
              std::span<const float> metric, double shrinkage, PlaneProfile& of, double variance) {
  const std::size_t components = of.basis_scales.size();
  const std::size_t size = components / of.block_count;
  if (variance == 0) {
    for (const float value : residual) variance += double{value} * value;
    variance /= static_cast<double>(counted_rows * components);
  }

  for (std::size_t first = 0; first < components; first += size) {
    Eigen::MatrixXd of_block;
    if (metric.empty()) {
      of_block.setIdentity(Index(size), Index(size));
      of_block /= std::max(variance, 1e-30);
    } else {
      of_block = ShrunkMetric(metric, components, first, size, shrinkage);
    }
    const Eigen::MatrixXd basis =
        PrincipalBasis(Covariance(residual, components, first, size, counted_rows), of_block);
    for (std::size_t v = 0; v < size; ++v) {
      const auto row = basis.row(Index(v));
      const double scale = std::max(row.cwiseAbs().maxCoeff() / 127, 1e-30);
      of.basis_scales[first + v] = static_cast<float>(scale);
      for (std::size_t c = 0; c < size; ++c) {
        of.basis[(first + v) * size + c] =
            static_cast<std::int8_t>(std::nearbyint(row(Index(c)) / scale));
      }
    }
  }
}

double VarianceOfBasis(const PlaneProfile& of) {
  const std::size_t components = of.basis_scales.size();
  const std::size_t size = components / of.block_count;
  double sum = 0;
  for (std::size_t v = 0; v < components; ++v) {
    for (std::size_t c = 0; c < size; ++c) {
      const double of_component = double{of.basis_scales[v]} * of.basis[v * size + c];
      sum += of_component * of_component;
    }
  }
  return sum / static_cast<double>(components);
}

}  // namespace kvtrie
