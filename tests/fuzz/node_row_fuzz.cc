#include <cstddef>
#include <cstdint>
#include <string>

#include "storage/base/check.h"
#include "storage/meta/node_row.h"
#include "tests/fuzz/mend_seal.h"

namespace kvtrie {
namespace {

template <typename Row>
void TryRow(const std::string& bytes) {
  const auto row = Row::Decode(bytes);
  if (row.ok()) KV_CHECK(row->Encode() == bytes);
}

// Rows of version 1 with rungs are read and not written.
template <>
void TryRow<NodeRow>(const std::string& bytes) {
  const auto row = NodeRow::Decode(bytes);
  if (!row.ok()) return;
  const std::string written = row->Encode();
  if (bytes[0] == 1 && !row->rungs.empty()) {
    const auto again = NodeRow::Decode(written);
    KV_CHECK(again.ok());
    KV_CHECK(*again == *row);
  } else {
    KV_CHECK(written == bytes);
  }
}

void TryAllRows(const std::string& bytes) {
  TryRow<NodeRow>(bytes);
  TryRow<NodeDescriptor>(bytes);
  TryRow<PinRow>(bytes);
  TryRow<StoreConfig>(bytes);
}

}  // namespace
}  // namespace kvtrie

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  kvtrie::TryAllRows(bytes);
  kvtrie::TryAllRows(kvtrie::MendSeal(bytes));
  return 0;
}
