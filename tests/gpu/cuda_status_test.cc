#include "gpu/cuda_status.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvtrie::gpu {
namespace {

TEST(CudaStatusTest, SuccessIsOk) {
  EXPECT_TRUE(CudaStatus(cudaSuccess, "x").ok());
  EXPECT_TRUE(CublasStatus(CUBLAS_STATUS_SUCCESS, "x").ok());
}

TEST(CudaStatusTest, WhatTheProcessorCanDoInsteadIsUnavailable) {
  for (const cudaError_t error :
       {cudaErrorNoDevice, cudaErrorInsufficientDriver, cudaErrorMemoryAllocation,
        cudaErrorDevicesUnavailable, cudaErrorIllegalAddress, cudaErrorECCUncorrectable,
        cudaErrorNoKernelImageForDevice, cudaErrorLaunchFailure, cudaErrorInitializationError}) {
    const absl::Status status = CudaStatus(error, "doing this");
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("doing this"));
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(cudaGetErrorName(error)));
  }
  EXPECT_TRUE(absl::IsUnavailable(CublasStatus(CUBLAS_STATUS_NOT_INITIALIZED, "x")));
  EXPECT_TRUE(absl::IsUnavailable(CublasStatus(CUBLAS_STATUS_ALLOC_FAILED, "x")));
  EXPECT_TRUE(absl::IsUnavailable(CublasStatus(CUBLAS_STATUS_ARCH_MISMATCH, "x")));
}

TEST(CudaStatusTest, WrongCallsAreOurFault) {
  EXPECT_TRUE(absl::IsInternal(CudaStatus(cudaErrorInvalidValue, "x")));
  EXPECT_TRUE(absl::IsInternal(CudaStatus(cudaErrorInvalidConfiguration, "x")));
  EXPECT_TRUE(absl::IsInternal(CublasStatus(CUBLAS_STATUS_INVALID_VALUE, "x")));
}

}  // namespace
}  // namespace kvtrie::gpu
