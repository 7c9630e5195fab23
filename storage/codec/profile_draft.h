#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "storage/kv/ids.h"

namespace kvtrie {

// A fitted profile without figures of what its levels cost the model: tools take it, and no server
// does, because a level that was not measured promises nothing. A draft is sealed (sealed_bytes.h,
// version 1): 16 bytes of codec key, then the body of the profile.

struct ProfileDraft {
  CodecKey codec_key;
  std::string_view body;  // points into what was decoded
};

std::string EncodeDraft(const CodecKey& codec_key, std::string_view body);
// Errors: DataLoss, Unimplemented (sealed_bytes.h). The body is not looked at.
absl::StatusOr<ProfileDraft> DecodeDraft(std::string_view draft);

// Names a body by its content, so that figures cannot be taken for those of another fit.
ProfileId BodyDigest(std::string_view body);

}  // namespace kvtrie
