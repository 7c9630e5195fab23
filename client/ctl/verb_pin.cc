#include "client/ctl/verb_pin.h"

#include <string>

#include "client/ctl/format.h"
#include "client/ctl/json_views.h"
#include "client/ctl/selection.h"

namespace kvtrie {
namespace {

constexpr std::uint64_t kSecondsDefault = 3600;

const FlagSpec kFlags[] = {
    {"seconds", FlagSpec::Kind::kNumber, "how long (3600)", 1, UINT32_MAX},
    {"extend", FlagSpec::Kind::kText, "id of a pin to extend instead"},
    kModelFlag,
    kTokensFlag,
    kTokensFileFlag,
    kSaltFlag,
};

ExitCode Run(const VerbContext& context) {
  const CommandLine& line = context.line;
  const int named = (line.positionals().empty() ? 0 : 1) + (NamesPrefix(line) ? 1 : 0) +
                    (line.Has("extend") ? 1 : 0);
  if (named != 1) return context.RefuseUsage("needs one of: a node, a prefix, --extend");
  v1::PinRequest request;
  request.set_seconds(static_cast<std::uint32_t>(line.Number("seconds", kSecondsDefault)));
  if (NamesPrefix(line)) {
    AdminClient admin = context.Admin();
    auto prefix = ReadPrefix(admin, line);
    if (!prefix.ok()) return context.Fail(prefix.status());
    *request.mutable_selection()->mutable_prefix() = *std::move(prefix);
  } else {
    const std::string text = line.Has("extend") ? line.Text("extend") : context.positional(0);
    const auto id = IdFromHex(text);
    if (!id) return context.RefuseUsage("'" + text + "' is not an id");
    if (line.Has("extend")) {
      request.set_pin_id(*id);
    } else {
      request.mutable_selection()->set_node_id(*id);
    }
  }
  const auto pin = context.Cache()->Pin(request);
  if (!pin.ok()) return context.Fail(pin.status());
  if (context.json) {
    context.out << DumpJson({{"pin_id", IdToHex(pin->pin_id())},
                             {"pinned_blocks", pin->pinned_blocks()},
                             {"pinned_bytes", pin->pinned_bytes()},
                             {"end_unix_seconds", pin->end_unix_seconds()}})
                << "\n";
  } else {
    context.out << "pin " << IdToHex(pin->pin_id()) << ": " << FormatCount(pin->pinned_blocks())
                << " blocks, " << FormatBytes(pin->pinned_bytes()) << ", until "
                << FormatTime(pin->end_unix_seconds()) << " UTC\n";
  }
  return ExitCode::kOk;
}

}  // namespace

const Verb kPinVerb{
    .name = "pin",
    .positionals = "[NODE]",
    .positionals_min = 0,
    .positionals_max = 1,
    .summary = "keep a path from eviction for a time",
    .details = "",
    .flags = kFlags,
    .run = Run,
};

}  // namespace kvtrie
