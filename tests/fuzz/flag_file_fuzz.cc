#include <cstddef>
#include <cstdint>
#include <string>

#include "server/flag_reader.h"
#include "server/listen_address.h"
#include "storage/base/check.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto settings = kvtrie::ParseFlagFile("file", text);
  if (settings.ok()) {
    for (const auto& setting : *settings) {
      KV_CHECK(!setting.name.empty());
      const std::string names[] = {"listen", "data_dir"};
      if (setting.name.size() < 100) kvtrie::NearestName(setting.name, names);
    }
  }
  const auto address = kvtrie::ParseListenAddress(text);
  KV_CHECK(!address.ok() || address->is_unix() || !address->host.empty());
  return 0;
}
