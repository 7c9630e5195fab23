#define KV_CHECK_LANES CheckLanesBaseline
#define KV_RECORD_MIXED RecordMixedBaseline
#include "tests/storage/codec/lanes_check_impl.h"
