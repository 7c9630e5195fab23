#include "storage/kv/sealed_bytes.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

constexpr std::size_t kVersionBytes = sizeof(std::uint8_t);
constexpr std::size_t kChecksumBytes = sizeof(std::uint32_t);

}  // namespace

ByteWriter StartSealed(std::uint8_t version) {
  ByteWriter writer;
  writer.Write(version);
  return writer;
}

std::string Seal(ByteWriter writer) {
  writer.Write(Crc32c(AsBytes(writer.text())));
  return writer.Take();
}

absl::StatusOr<ByteReader> Unseal(const char* what, std::uint8_t version, std::string_view bytes) {
  KV_ASSIGN_OR_RETURN(const UnsealedBytes unsealed, UnsealUpTo(what, version, bytes));
  if (unsealed.version != version) {
    return absl::DataLossError(absl::StrCat(what, ": no such version: ", unsealed.version));
  }
  return unsealed.reader;
}

absl::StatusOr<UnsealedBytes> UnsealUpTo(const char* what, std::uint8_t newest,
                                         std::string_view bytes) {
  if (bytes.size() < kVersionBytes + kChecksumBytes) {
    return absl::DataLossError(absl::StrCat(what, ": ", bytes.size(), " bytes are too few"));
  }
  const std::string_view sealed = bytes.substr(0, bytes.size() - kChecksumBytes);
  if (Crc32c(AsBytes(sealed)) != LoadLittle<std::uint32_t>(bytes.data() + sealed.size())) {
    return absl::DataLossError(absl::StrCat(what, ": wrong checksum"));
  }
  ByteReader reader(sealed);
  const auto version = reader.Read<std::uint8_t>();
  if (version > newest) {
    return absl::UnimplementedError(
        absl::StrCat(what, ": version ", version, " was written by a newer release"));
  }
  if (version == 0) return absl::DataLossError(absl::StrCat(what, ": no such version: 0"));
  return UnsealedBytes{version, reader};
}

}  // namespace kvtrie
