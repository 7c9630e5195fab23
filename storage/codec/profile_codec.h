#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "storage/codec/residual_codec.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// The codec that a profile makes for a model, once all of it agrees: head and body, the levels of
// both, the codec key and the layers of the model. Takes seconds for a large profile, and memory of
// about twice its size.
//
// REQUIRES: `profile` are the bytes that `id` was made of.
// Errors name the profile and what is wrong with it; the same bytes fail for ever. InvalidArgument:
// not a profile for this model. DataLoss: damaged. Unimplemented: of a newer version.
absl::StatusOr<std::unique_ptr<const ResidualCodec>> CodecOfProfile(
    const ModelSpec& spec, const ProfileId& id, std::span<const std::byte> profile);

}  // namespace kvtrie
