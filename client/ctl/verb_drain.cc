#include "client/ctl/verb_drain.h"

#include "client/ctl/json_views.h"

namespace kvtrie {
namespace {

constexpr std::uint64_t kDeadlineSeconds = 60;

const FlagSpec kFlags[] = {
    {"deadline", FlagSpec::Kind::kNumber, "seconds to wait for what runs (60)", 0, 86'400},
};

ExitCode Run(const VerbContext& context) {
  v1::DrainRequest request;
  request.set_deadline_ms(
      static_cast<std::uint32_t>(context.line.Number("deadline", kDeadlineSeconds) * 1000));
  const auto drained = context.Admin().Drain(request);
  if (!drained.ok()) return context.Fail(drained.status());
  if (context.json) {
    context.out << DumpJson({{"clean", drained->clean()}}) << "\n";
  } else {
    context.out << (drained->clean() ? "drained: nothing runs any more\n"
                                     : "draining: some work still runs\n");
  }
  return drained->clean() ? ExitCode::kOk : ExitCode::kFailed;
}

}  // namespace

const Verb kDrainVerb{
    .name = "drain",
    .positionals = "",
    .positionals_min = 0,
    .positionals_max = 0,
    .summary = "stop taking work, finish what runs, write everything down",
    .details =
        "The process goes on; the server answers UNAVAILABLE from now on. Exit code 1 when work "
        "still ran at the deadline.",
    .flags = kFlags,
    .run = Run,
};

}  // namespace kvtrie
