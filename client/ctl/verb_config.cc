#include "client/ctl/verb_config.h"

#include <string>
#include <vector>

#include "client/ctl/format.h"
#include "client/ctl/json_views.h"
#include "client/ctl/table.h"

namespace kvtrie {
namespace {

const FlagSpec kFlags[] = {
    {"changed", FlagSpec::Kind::kSwitch, "only what is not at its default"},
    {"explain", FlagSpec::Kind::kSwitch, "with what each setting is for"},
};

ExitCode Run(const VerbContext& context) {
  const auto config = context.Admin().GetConfig();
  if (!config.ok()) return context.Fail(config.status());
  const bool explain = context.line.Has("explain");
  nlohmann::ordered_json json = nlohmann::json::array();
  std::vector<Table::Column> columns = {{"SETTING"}, {"VALUE"}, {"SOURCE"}};
  if (explain) columns.push_back({"MEANING"});
  Table table(std::move(columns));
  for (const v1::Setting& setting : config->settings()) {
    if (context.line.Has("changed") &&
        (setting.source() == "default" || setting.source() == "limit")) {
      continue;
    }
    if (context.json) {
      json.push_back(nlohmann::ordered_json{{"name", setting.name()},
                                            {"value", setting.value()},
                                            {"source", setting.source()},
                                            {"help", setting.help()}});
      continue;
    }
    std::vector<std::string> cells = {FormatText(setting.name()), FormatText(setting.value()),
                                      FormatText(setting.source())};
    if (explain) cells.push_back(FormatText(setting.help()));
    table.AddRow(std::move(cells));
  }
  if (context.json) {
    context.out << DumpJson({{"settings", json}}) << "\n";
  } else {
    table.Print(context.out);
  }
  return ExitCode::kOk;
}

}  // namespace

const Verb kConfigVerb{
    .name = "config",
    .positionals = "",
    .positionals_min = 0,
    .positionals_max = 0,
    .summary = "every setting and limit of the server, and where it comes from",
    .details = "",
    .flags = kFlags,
    .run = Run,
};

}  // namespace kvtrie
