#define KV_KERNELS kBaselineKernels
#include "storage/codec/codec_kernels_impl.h"
