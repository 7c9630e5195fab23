#define KV_CHECK_LANES CheckLanesAvx512
#define KV_RECORD_MIXED RecordMixedAvx512
#include "tests/storage/codec/lanes_check_impl.h"
