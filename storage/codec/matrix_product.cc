#include "storage/codec/matrix_product.h"

#include <array>
#include <oneapi/dnnl/dnnl.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "storage/base/check.h"

// Of the OpenMP runtime that oneDNN brings; its header comes with some compilers only.
extern "C" {
int omp_get_max_threads(void);
void omp_set_num_threads(int count);
}

namespace kvtrie {
namespace {

using dnnl::memory;

const dnnl::engine& Engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

// oneDNN takes its threads from OpenMP; the codec has none of its own.
class OneThread {
 public:
  OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  const int before_;
};

memory::dim Dim(std::size_t size) { return static_cast<memory::dim>(size); }

// One kernel per batch size; a batch is cut into these.
constexpr std::array<std::size_t, 5> kBatchRows = {256, 128, 64, 32, kProductRows};
constexpr std::size_t kPackedFor = 2;  // index of the size whose packing all share

// Multiplications from which on a product for fitting is shared among cores.
constexpr std::size_t kShareAtLeast = std::size_t{1} << 24;

class Product {
 public:
  Product(std::size_t in, std::size_t out, memory::data_type rows, memory::data_type matrix,
          memory::data_type products, memory::format_tag matrix_order, const void* from)
      : in_(in), out_(out), row_type_(rows), product_type_(products) {
    const OneThread one_thread;
    const memory::dims matrix_dims = {Dim(in), Dim(out)};
    const memory::desc free_order(matrix_dims, matrix, memory::format_tag::any);
    const memory::desc packed = Describe(kBatchRows[kPackedFor], free_order).weights_desc();

    dnnl::stream stream(Engine());
    memory plain({matrix_dims, matrix, matrix_order}, Engine(), const_cast<void*>(from));
    matrix_ = memory(packed, Engine());
    dnnl::reorder(plain, matrix_).execute(stream, plain, matrix_);
    stream.wait();

    for (std::size_t i = 0; i < kBatchRows.size(); ++i) {
      const dnnl::matmul::primitive_desc described = Describe(kBatchRows[i], packed);
      scratch_[i] = described.scratchpad_desc();
      kernels_[i] = dnnl::matmul(described);
    }
  }

  template <typename Row, typename Result>
  void Run(std::span<const Row> rows, std::span<Result> products) const {
    const OneThread one_thread;
    std::size_t row_count = rows.size() / in_;
    KV_CHECK(rows.size() == row_count * in_);
    KV_CHECK(products.size() == row_count * out_);
    KV_CHECK(row_count % kProductRows == 0);
    const Row* from = rows.data();
    Result* to = products.data();
    dnnl::stream stream(Engine());
    for (std::size_t i = 0; i < kBatchRows.size(); ++i) {
      const std::size_t batch = kBatchRows[i];
      if (row_count < batch) continue;
      memory scratch(scratch_[i], Engine());
      for (; row_count >= batch; row_count -= batch) {
        const memory source({{Dim(batch), Dim(in_)}, row_type_, memory::format_tag::ab}, Engine(),
                            const_cast<Row*>(from));
        const memory result({{Dim(batch), Dim(out_)}, product_type_, memory::format_tag::ab},
                            Engine(), to);
        kernels_[i].execute(stream, {{DNNL_ARG_SRC, source},
                                     {DNNL_ARG_WEIGHTS, matrix_},
                                     {DNNL_ARG_DST, result},
                                     {DNNL_ARG_SCRATCHPAD, scratch}});
        from += batch * in_;
        to += batch * out_;
      }
    }
    stream.wait();
  }

 private:
  dnnl::matmul::primitive_desc Describe(std::size_t batch, const memory::desc& matrix) const {
    dnnl::primitive_attr attributes;
    // The library's own scratch memory is not for callers on several threads.
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    return {{{{Dim(batch), Dim(in_)}, row_type_, memory::format_tag::ab},
             matrix,
             {{Dim(batch), Dim(out_)}, product_type_, memory::format_tag::ab}},
            attributes,
            Engine()};
  }

  std::size_t in_;
  std::size_t out_;
  memory::data_type row_type_;
  memory::data_type product_type_;
  memory matrix_;
  std::array<memory::desc, kBatchRows.size()> scratch_;
  std::array<dnnl::matmul, kBatchRows.size()> kernels_;
};

}  // namespace

struct IntegerProduct::Packed : Product {
  using Product::Product;
};
struct FloatProduct::Packed : Product {
  using Product::Product;
};

IntegerProduct::IntegerProduct(std::size_t in, std::size_t out,
                               std::span<const std::int8_t> matrix) {
  KV_CHECK(in <= kInputsMax);
  KV_CHECK(matrix.size() == in * out);
  packed_ = std::make_unique<Packed>(in, out, memory::data_type::u8, memory::data_type::s8,
                                     memory::data_type::s32, memory::format_tag::ba, matrix.data());
}
IntegerProduct::~IntegerProduct() = default;
IntegerProduct::IntegerProduct(IntegerProduct&&) noexcept = default;
IntegerProduct& IntegerProduct::operator=(IntegerProduct&&) noexcept = default;

void IntegerProduct::Run(std::span<const std::uint8_t> rows,
                         std::span<std::int32_t> products) const {
  packed_->Run(rows, products);
}

FloatProduct::FloatProduct(std::size_t in, std::size_t out, std::span<const float> matrix) {
  KV_CHECK(matrix.size() == in * out);
  packed_ = std::make_unique<Packed>(in, out, memory::data_type::f32, memory::data_type::f32,
                                     memory::data_type::f32, memory::format_tag::ab, matrix.data());
}
FloatProduct::~FloatProduct() = default;
FloatProduct::FloatProduct(FloatProduct&&) noexcept = default;
FloatProduct& FloatProduct::operator=(FloatProduct&&) noexcept = default;

void FloatProduct::Run(std::span<const float> rows, std::span<float> products) const {
  packed_->Run(rows, products);
}

void TransposedProduct(std::span<const float> a, std::size_t columns_a, std::span<const float> b,
                       std::size_t columns_b, std::span<float> product) {
  const std::size_t rows = a.size() / columns_a;
  KV_CHECK(a.size() == rows * columns_a);
  KV_CHECK(b.size() == rows * columns_b);
  KV_CHECK(product.size() == columns_a * columns_b);
  // Waking threads takes longer than a small product does.
  std::optional<OneThread> one_thread;
  if (rows * columns_a * columns_b < kShareAtLeast) one_thread.emplace();
  const dnnl_status_t status =
      dnnl_sgemm('T', 'N', Dim(columns_a), Dim(columns_b), Dim(rows), 1, a.data(), Dim(columns_a),
                 b.data(), Dim(columns_b), 0, product.data(), Dim(columns_b));
  KV_CHECK(status == dnnl_success);
}

}  // namespace kvtrie
