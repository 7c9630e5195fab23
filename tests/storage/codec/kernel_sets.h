#pragma once

#include "gtest/gtest.h"
#include "storage/base/check.h"
#include "storage/codec/codec_kernels.h"

namespace kvtrie {

// Calls body() with each kernel set that the machine has, and puts the one before back.
template <typename Body>
void WithEachKernelSet(Body body) {
  const KernelSet before = UsedKernelSet();
  for (const KernelSet set : kKernelSets) {
    if (!HasKernelSet(set)) continue;
    SCOPED_TRACE(KernelSetName(set));
    KV_CHECK(UseKernelSet(set).ok());
    body();
  }
  KV_CHECK(UseKernelSet(before).ok());
}

}  // namespace kvtrie
