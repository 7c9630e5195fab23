#pragma once

#include <cuda_runtime_api.h>

#include "gpu/kernels.h"

namespace kvtrie::gpu {

// Launch the loops of kernels.h on `stream` and return at once; what the arguments point to stays
// until the stream has come behind them.
cudaError_t LaunchKernel(const AnglesArgs& args, cudaStream_t stream);
cudaError_t LaunchKernel(const WriteRawArgs& args, cudaStream_t stream);
cudaError_t LaunchKernel(const FindExtremesArgs& args, cudaStream_t stream);
cudaError_t LaunchKernel(const GatherArgs& args, cudaStream_t stream);
cudaError_t LaunchKernel(const RestoreRowsArgs& args, cudaStream_t stream);
cudaError_t LaunchKernel(const ResidualArgs& args, cudaStream_t stream);
cudaError_t LaunchKernel(const ReadRowsArgs& args, cudaStream_t stream);
cudaError_t LaunchKernel(const ImportanceLayerArgs& args, cudaStream_t stream);
cudaError_t LaunchKernel(const ExponentsArgs& args, cudaStream_t stream);
cudaError_t LaunchKernel(const DecodePlaneArgs& args, cudaStream_t stream);
cudaError_t LaunchKernel(const QuantizePlaneArgs& args, cudaStream_t stream);
cudaError_t LaunchKernel(const EncodePlaneArgs& args, cudaStream_t stream);

}  // namespace kvtrie::gpu
