#include "gpu/cuda_products.h"

#include <dlfcn.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gpu/cuda_status.h"
#include "storage/base/status_macros.h"

namespace kvtrie::gpu {
namespace {

// Batches have few sizes, but for the last of each call.
constexpr std::size_t kPlansMax = 512;

// Sizes go in as they are; attributes of a layout take them as int64.
std::int64_t Signed(std::size_t size) { return static_cast<std::int64_t>(size); }

}  // namespace

struct CublasLt {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  absl::Status status;

  // Loaded once, and never unloaded.
  static const CublasLt& Get() {
    static const CublasLt library;
    return library;
  }

 private:
  CublasLt() {
    const std::string name = absl::StrCat("libcublasLt.so.", CUBLAS_VER_MAJOR);
    void* const loaded = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (loaded == nullptr) {
      status = absl::UnavailableError(absl::StrCat("CUDA: no cuBLASLt: ", dlerror()));
      return;
    }
    const auto find = [&](const char* symbol, auto& function) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(loaded, symbol));
      if (function == nullptr) {
        status = absl::UnavailableError(absl::StrCat("CUDA: ", name, " has no ", symbol));
      }
    };
    find("cublasLtCreate", create);
    find("cublasLtDestroy", destroy);
    find("cublasLtMatmul", matmul);
    find("cublasLtMatmulAlgoGetHeuristic", heuristic);
    find("cublasLtMatmulDescCreate", desc_create);
    find("cublasLtMatmulDescDestroy", desc_destroy);
    find("cublasLtMatmulDescSetAttribute", desc_set);
    find("cublasLtMatrixLayoutCreate", layout_create);
    find("cublasLtMatrixLayoutDestroy", layout_destroy);
    find("cublasLtMatrixLayoutSetAttribute", layout_set);
    find("cublasLtMatmulPreferenceCreate", preference_create);
    find("cublasLtMatmulPreferenceDestroy", preference_destroy);
    find("cublasLtMatmulPreferenceSetAttribute", preference_set);
  }
};

struct CudaProducts::Plan {
  explicit Plan(const CublasLt& of) : library(of) {}
  ~Plan() {
    for (const cublasLtMatrixLayout_t layout : {a, b, c}) {
      if (layout != nullptr) library.layout_destroy(layout);
    }
    if (product != nullptr) library.desc_destroy(product);
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const CublasLt& library;
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t a = nullptr;
  cublasLtMatrixLayout_t b = nullptr;
  cublasLtMatrixLayout_t c = nullptr;
  cublasLtMatmulAlgo_t algorithm = {};
};

struct CudaProducts::Description {
  struct Matrix {
    cudaDataType type;
    std::size_t rows, columns, leading, batch_stride;
  };
  cublasComputeType_t compute;
  cudaDataType scale;
  cublasOperation_t of_a;
  cublasOperation_t of_b;
  Matrix a, b, c;
  std::size_t batch_count;
  std::size_t scratch_bytes;
};

absl::StatusOr<std::unique_ptr<CudaProducts>> CudaProducts::Create() {
  const CublasLt& library = CublasLt::Get();
  KV_RETURN_IF_ERROR(library.status);
  auto products = std::unique_ptr<CudaProducts>(new CudaProducts(library));
  KV_RETURN_IF_ERROR(CublasStatus(library.create(&products->handle_), "starting"));
  return products;
}

CudaProducts::CudaProducts(const CublasLt& library) : library_(library) {}
CudaProducts::~CudaProducts() {
  plans_.clear();
  if (handle_ != nullptr) library_.destroy(handle_);
}

absl::StatusOr<const CudaProducts::Plan*> CudaProducts::PlanOf(const Key& key,
                                                               const Description& of) {
  if (const auto found = plans_.find(key); found != plans_.end()) return found->second.get();
  if (plans_.size() >= kPlansMax) plans_.clear();
  auto plan = std::make_unique<Plan>(library_);
  KV_RETURN_IF_ERROR(
      CublasStatus(library_.desc_create(&plan->product, of.compute, of.scale), "a product"));
  for (const auto& [attribute, operation] : {std::pair(CUBLASLT_MATMUL_DESC_TRANSA, of.of_a),
                                             std::pair(CUBLASLT_MATMUL_DESC_TRANSB, of.of_b)}) {
    KV_RETURN_IF_ERROR(
        CublasStatus(library_.desc_set(plan->product, attribute, &operation, sizeof operation),
                     "a product's order"));
  }
  const auto describe = [&](const Description::Matrix& matrix,
                            cublasLtMatrixLayout_t& layout) -> absl::Status {
    KV_RETURN_IF_ERROR(CublasStatus(library_.layout_create(&layout, matrix.type, matrix.rows,
                                                           matrix.columns, Signed(matrix.leading)),
                                    "a matrix"));
    const auto batches = static_cast<std::int32_t>(of.batch_count);
    const std::int64_t stride = Signed(matrix.batch_stride);
    KV_RETURN_IF_ERROR(CublasStatus(
        library_.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batches, sizeof batches),
        "a batch"));
    return CublasStatus(library_.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                            &stride, sizeof stride),
                        "a batch's stride");
  };
  KV_RETURN_IF_ERROR(describe(of.a, plan->a));
  KV_RETURN_IF_ERROR(describe(of.b, plan->b));
  KV_RETURN_IF_ERROR(describe(of.c, plan->c));

  cublasLtMatmulPreference_t preference = nullptr;
  KV_RETURN_IF_ERROR(CublasStatus(library_.preference_create(&preference), "a preference"));
  const std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, decltype(library_.preference_destroy)>
      owned(preference, library_.preference_destroy);
  KV_RETURN_IF_ERROR(
      CublasStatus(library_.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                           &of.scratch_bytes, sizeof of.scratch_bytes),
                   "the scratch memory"));
  cublasLtMatmulHeuristicResult_t best = {};
  int found = 0;
  KV_RETURN_IF_ERROR(
      CublasStatus(library_.heuristic(handle_, plan->product, plan->a, plan->b, plan->c, plan->c,
                                      preference, 1, &best, &found),
                   "choosing an algorithm"));
  if (found == 0) return absl::UnavailableError("cuBLASLt: no algorithm for a product");
  plan->algorithm = best.algo;
  return plans_.emplace(key, std::move(plan)).first->second.get();
}

// Row-major matrices are column-major ones of their transposes. Here products^T = matrix rows^T,
// which is how integers have to come; below, products themselves are of transposes.
absl::Status CudaProducts::Multiply(const IntegerProductArgs& args, void* scratch,
                                    std::size_t scratch_bytes, cudaStream_t stream) {
  const std::size_t in = args.in, out = args.out, rows = args.row_count;
  if (args.batch_count == 0 || rows == 0) return absl::OkStatus();
  const Key key = {0, args.batch_count, rows, in, out, scratch_bytes};
  const Description description = {.compute = CUBLAS_COMPUTE_32I,
                                   .scale = CUDA_R_32I,
                                   .of_a = CUBLAS_OP_T,
                                   .of_b = CUBLAS_OP_N,
                                   .a = {CUDA_R_8I, in, out, in, in * out},
                                   .b = {CUDA_R_8I, in, rows, in, in * rows},
                                   .c = {CUDA_R_32I, out, rows, out, out * rows},
                                   .batch_count = args.batch_count,
                                   .scratch_bytes = scratch_bytes};
  KV_ASSIGN_OR_RETURN(const Plan* const plan, PlanOf(key, description));
  const std::int32_t one = 1, zero = 0;
  return CublasStatus(library_.matmul(handle_, plan->product, &one, args.matrix, plan->a, args.rows,
                                      plan->b, &zero, args.products, plan->c, args.products,
                                      plan->c, &plan->algorithm, scratch, scratch_bytes, stream),
                      "a product of integers");
}

absl::Status CudaProducts::Multiply(const FloatProductArgs& args, void* scratch,
                                    std::size_t scratch_bytes, cudaStream_t stream) {
  const std::size_t size = args.size, rows = args.row_count;
  if (args.batch_count == 0 || rows == 0) return absl::OkStatus();
  const std::size_t width = size * args.batch_count;
  const Key key = {1, args.batch_count, rows, size, size, scratch_bytes};
  const Description description = {.compute = CUBLAS_COMPUTE_32F,
                                   .scale = CUDA_R_32F,
                                   .of_a = CUBLAS_OP_T,
                                   .of_b = CUBLAS_OP_T,
                                   .a = {CUDA_R_32F, size, rows, width, size},
                                   .b = {CUDA_R_32F, size, size, size, size * size},
                                   .c = {CUDA_R_32F, rows, size, rows, rows * size},
                                   .batch_count = args.batch_count,
                                   .scratch_bytes = scratch_bytes};
  KV_ASSIGN_OR_RETURN(const Plan* const plan, PlanOf(key, description));
  const float one = 1, zero = 0;
  return CublasStatus(library_.matmul(handle_, plan->product, &one, args.rows, plan->a, args.matrix,
                                      plan->b, &zero, args.products, plan->c, args.products,
                                      plan->c, &plan->algorithm, scratch, scratch_bytes, stream),
                      "a product of floats");
}

}  // namespace kvtrie::gpu
