#define KV_KERNELS kAvx2Kernels
#include "storage/codec/codec_kernels_impl.h"
