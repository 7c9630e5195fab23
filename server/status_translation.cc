#include "server/status_translation.h"

#include <algorithm>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace kvtrie {
namespace {

std::string PrintableMessage(const absl::Status& status) {
  const absl::string_view message = status.message();
  const bool printable =
      std::all_of(message.begin(), message.end(), [](char c) { return c >= 0x20 && c < 0x7f; });
  return printable ? std::string(message) : absl::CHexEscape(message);
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), PrintableMessage(status));
}

void ToItemStatus(const absl::Status& status, v1::ItemStatus* item) {
  if (status.ok()) return;
  item->set_code(static_cast<std::uint32_t>(status.code()));
  item->set_message(PrintableMessage(status));
}

absl::Status Within(absl::string_view where, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(where, status.message()));
}

}  // namespace kvtrie
