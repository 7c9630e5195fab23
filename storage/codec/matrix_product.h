#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace kvtrie {

// Products of a batch of rows [n, in] with a matrix [in, out] that stays the same and is packed
// once; row-major. By oneDNN, on the calling thread alone. n is a multiple of kProductRows.
//
// Thread-safe: running changes nothing that two callers share.
inline constexpr std::size_t kProductRows = 16;

// Exact: the same integers on every machine.
class IntegerProduct {
 public:
  // So bounded, sums of two products fit 16 bits, which processors without VNNI need.
  static constexpr int kWeightMax = 63;
  // So that a sum fits 31 bits.
  static constexpr std::size_t kInputsMax = 131'072;

  // matrix: [out, in], within +-kWeightMax. REQUIRES: in <= kInputsMax.
  IntegerProduct(std::size_t in, std::size_t out, std::span<const std::int8_t> matrix);
  ~IntegerProduct();
  IntegerProduct(IntegerProduct&&) noexcept;
  IntegerProduct& operator=(IntegerProduct&&) noexcept;

  // REQUIRES: the sizes of both are those of one n.
  void Run(std::span<const std::uint8_t> rows, std::span<std::int32_t> products) const;

 private:
  struct Packed;
  std::unique_ptr<Packed> packed_;
};

// Float32: sums round as the machine's kernels order them.
class FloatProduct {
 public:
  // matrix: [in, out].
  FloatProduct(std::size_t in, std::size_t out, std::span<const float> matrix);
  ~FloatProduct();
  FloatProduct(FloatProduct&&) noexcept;
  FloatProduct& operator=(FloatProduct&&) noexcept;

  // REQUIRES: the sizes of both are those of one n.
  void Run(std::span<const float> rows, std::span<float> products) const;

 private:
  struct Packed;
  std::unique_ptr<Packed> packed_;
};

// product[columns_a, columns_b] = a[n, columns_a]^T * b[n, columns_b]; for fitting: on all cores.
void TransposedProduct(std::span<const float> a, std::size_t columns_a, std::span<const float> b,
                       std::size_t columns_b, std::span<float> product);

}  // namespace kvtrie
