#include "client/ctl/verb_pins.h"

#include <string>

#include "client/ctl/format.h"
#include "client/ctl/json_views.h"
#include "client/ctl/table.h"

namespace kvtrie {
namespace {

ExitCode Run(const VerbContext& context) {
  const auto pins = context.Admin().ListPins();
  if (!pins.ok()) return context.Fail(pins.status());
  if (context.json) {
    nlohmann::ordered_json json = nlohmann::json::array();
    for (const v1::PinEntry& pin : pins->pins()) json.push_back(PinToJson(pin));
    context.out << DumpJson({{"pins", json}}) << "\n";
    return ExitCode::kOk;
  }
  Table table({{"PIN"}, {"NODE"}, {"PINNED", Table::Align::kRight}, {"UNTIL (UTC)"}});
  for (const v1::PinEntry& pin : pins->pins()) {
    table.AddRow({IdToHex(pin.pin_id()), IdToHex(pin.node_id()), FormatBytes(pin.pinned_bytes()),
                  FormatTime(pin.end_unix_seconds())});
  }
  table.Print(context.out);
  return ExitCode::kOk;
}

}  // namespace

const Verb kPinsVerb{
    .name = "pins",
    .positionals = "",
    .positionals_min = 0,
    .positionals_max = 0,
    .summary = "pins that have not ended",
    .details = "",
    .flags = {},
    .run = Run,
};

}  // namespace kvtrie
