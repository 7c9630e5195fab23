// The inner loops of the codecs, once for each instruction set: codec_kernels_*.cc define
// KV_KERNELS and include this. A file that is built with -mavx512f may leave no function behind
// that another file could be linked to, so everything here is in unnamed namespaces or inlined, and
// the standard library is not used.
#include "storage/codec/codec_kernel_table.h"
#include "storage/codec/rans_kernels.h"

namespace kvtrie {

extern const CodecKernels KV_KERNELS;
const CodecKernels KV_KERNELS = {
    .rans_encode = RansEncode,
    .rans_record_symbols = RansRecordSymbols,
    .rans_record_bits = RansRecordBits,
    .rans_decode_symbols = RansDecodeSymbols,
    .rans_decode_bits = RansDecodeBits,
};

}  // namespace kvtrie
