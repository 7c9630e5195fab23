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
