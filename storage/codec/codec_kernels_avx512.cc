#define KV_KERNELS kAvx512Kernels
#include "storage/codec/codec_kernels_impl.h"
