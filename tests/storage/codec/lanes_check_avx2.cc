#define KV_CHECK_LANES CheckLanesAvx2
#define KV_RECORD_MIXED RecordMixedAvx2
#include "tests/storage/codec/lanes_check_impl.h"
