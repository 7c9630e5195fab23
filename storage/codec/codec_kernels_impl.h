// The inner loops of the codecs, once for each instruction set: codec_kernels_*.cc define
// KV_KERNELS and include this. A file that is built with -mavx512f may leave no function behind
// that another file could be linked to, and nothing that runs at start-up. So everything here is in
// unnamed namespaces or inlined, and the standard library is not used; kernel_symbols_test.py holds
// that.
#include "storage/codec/codec_kernel_table.h"
#include "storage/codec/lossless_kernels.h"
#include "storage/codec/predicted_kernels.h"
#include "storage/codec/rans_kernels.h"
#include "storage/codec/raw_kv_kernels.h"
#include "storage/codec/residual_kernels.h"
#include "storage/codec/rotated_kernels.h"

namespace kvtrie {

extern const CodecKernels KV_KERNELS;
const CodecKernels KV_KERNELS = {
    .rans_encode = RansEncode,
    .rans_record_symbols = RansRecordSymbols,
    .rans_record_bits = RansRecordBits,
    .rans_decode_symbols = RansDecodeSymbols,
    .rans_decode_bits = RansDecodeBits,
    .load_floats = {nullptr, LoadFloat32, LoadTwoBytes<Float16>, LoadTwoBytes<Bfloat16>,
                    LoadOneByte<Float8E4m3>, LoadOneByte<Float8E5m2>, LoadOneByte<Int8>,
                    LoadOneByte<Uint8>},
    .store_floats = {nullptr, StoreFloat32, StoreTwoBytes<Float16>, StoreTwoBytes<Bfloat16>,
                     StoreOneByte<Float8E4m3>, StoreOneByte<Float8E5m2>, StoreOneByte<Int8>,
                     StoreOneByte<Uint8>},
    .rotate_half_split = RotateHalfSplit,
    .rotate_interleaved = RotateInterleaved,
    .all_below = AllBelow,
    .residual_start = ResidualStart,
    .residual_finished = ResidualFinished,
    .residual_decode = ResidualDecodePlane,
    .residual_encode = ResidualEncodePlane,
    .predicted_decode = PredictedDecodePlane,
    .predicted_encode = PredictedEncodePlane,
    .residual_codes_of_rows = ResidualCodesOfRows,
    .residual_rows_of_products = ResidualRowsOfProducts,
    .residual_add_values = ResidualAddValues,
    .lossless_sum = {nullptr, LosslessSum<SplitFloat32>, LosslessSum<SplitFloat16>,
                     LosslessSum<SplitBfloat16>, LosslessSum<SplitFloat8E4m3>,
                     LosslessSum<SplitFloat8E5m2>, LosslessSum<SplitInt8>, LosslessSum<SplitUint8>},
    .lossless_model = {nullptr, LosslessModel<SplitFloat32>, LosslessModel<SplitFloat16>,
                       LosslessModel<SplitBfloat16>, LosslessModel<SplitFloat8E4m3>,
                       LosslessModel<SplitFloat8E5m2>, LosslessModel<SplitInt8>,
                       LosslessModel<SplitUint8>},
    .lossless_record = {nullptr, LosslessRecord<SplitFloat32>, LosslessRecord<SplitFloat16>,
                        LosslessRecord<SplitBfloat16>, LosslessRecord<SplitFloat8E4m3>,
                        LosslessRecord<SplitFloat8E5m2>, LosslessRecord<SplitInt8>,
                        LosslessRecord<SplitUint8>},
    .lossless_decode = {nullptr, LosslessDecode<SplitFloat32>, LosslessDecode<SplitFloat16>,
                        LosslessDecode<SplitBfloat16>, LosslessDecode<SplitFloat8E4m3>,
                        LosslessDecode<SplitFloat8E5m2>, LosslessDecode<SplitInt8>,
                        LosslessDecode<SplitUint8>},
    .rotated_encode = RotatedEncode,
    .rotated_decode = RotatedDecode,
};

}  // namespace kvtrie
