#include "storage/codec/profile_draft.h"

#include <cstdint>
#include <utility>

#include "storage/base/byte_reader.h"
#include "storage/base/status_macros.h"
#include "storage/kv/profile_digest.h"
#include "storage/kv/sealed_bytes.h"

namespace kvtrie {
namespace {

constexpr std::uint8_t kDraftVersion = 1;

}  // namespace

std::string EncodeDraft(const CodecKey& codec_key, std::string_view body) {
  ByteWriter writer = StartSealed(kDraftVersion);
  writer.Write(codec_key);
  writer.WriteText(body);
  return Seal(std::move(writer));
}

absl::StatusOr<ProfileDraft> DecodeDraft(std::string_view draft) {
  KV_ASSIGN_OR_RETURN(ByteReader reader, Unseal("profile draft", kDraftVersion, draft));
  ProfileDraft decoded;
  decoded.codec_key = reader.Read<CodecKey>();
  decoded.body = reader.ReadText(reader.remaining_bytes());
  if (!reader.ok()) return absl::DataLossError("profile draft: too short");
  return decoded;
}

ProfileId BodyDigest(std::string_view body) {
  ProfileDigest digest;
  digest.Add(std::as_bytes(std::span(body)));
  return digest.Finish();
}

}  // namespace kvtrie
