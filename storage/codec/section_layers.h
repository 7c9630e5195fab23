#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/codec/frame.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// How many layers of the block can be made of the first n + 1 sections of a frame, for each n: what
// a reader of layers has to wait for. Never falls, and ends with all of the model's. Frames of
// codecs whose bodies do not say so are whole or nothing.
//
// REQUIRES: the memory of the whole frame, of which the first section is there; CheckGeometry
// passed. DataLoss: the frame's own table is not one.
absl::StatusOr<std::vector<std::uint32_t>> LayersOfSections(const FrameView& frame,
                                                            const KvGeometry& geometry);

}  // namespace kvtrie
