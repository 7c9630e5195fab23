#include "client/ctl/verb_models.h"

#include <string>

#include "client/ctl/format.h"
#include "client/ctl/json_views.h"
#include "client/ctl/table.h"

namespace kvtrie {
namespace {

ExitCode Run(const VerbContext& context) {
  const auto usage = context.Admin().GetUsage();
  if (!usage.ok()) return context.Fail(usage.status());
  if (context.json) {
    nlohmann::ordered_json json;
    json["models"] = nlohmann::json::array();
    for (const v1::ModelEntry& model : usage->models())
      json["models"].push_back(ModelToJson(model));
    json["stored_bytes"] = usage->stored_bytes();
    json["raw_bytes"] = usage->raw_bytes();
    json["disk_bytes"] = usage->disk_bytes();
    context.out << DumpJson(json) << "\n";
    return ExitCode::kOk;
  }
  Table table({{"MODEL"},
               {"NAME"},
               {"REVISION"},
               {"DTYPE"},
               {"TOKENS/BLOCK", Table::Align::kRight},
               {"RAW BLOCK", Table::Align::kRight},
               {"NODES", Table::Align::kRight},
               {"STORED", Table::Align::kRight}});
  for (const v1::ModelEntry& model : usage->models()) {
    std::string name = FormatText(model.spec().name());
    if (model.spec().tensor_parallel_size() > 1) {
      name += " (rank " + std::to_string(model.spec().tensor_parallel_rank()) + "/" +
              std::to_string(model.spec().tensor_parallel_size()) + ")";
    }
    table.AddRow({IdToHex(model.model_id()), std::move(name),
                  FormatText(model.spec().weights_revision()),
                  std::string(DTypeName(model.spec().dtype())),
                  FormatCount(model.spec().block_tokens()), FormatBytes(model.raw_block_bytes()),
                  FormatCount(model.node_count()), FormatBytes(model.stored_bytes())});
  }
  table.Print(context.out);
  return ExitCode::kOk;
}

}  // namespace

const Verb kModelsVerb{
    .name = "models",
    .positionals = "",
    .positionals_min = 0,
    .positionals_max = 0,
    .summary = "registered models with what is stored of each",
    .details = "",
    .flags = {},
    .run = Run,
};

}  // namespace kvtrie
