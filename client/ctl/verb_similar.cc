#include "client/ctl/verb_similar.h"

#include <string>
#include <utility>

#include "client/ctl/format.h"
#include "client/ctl/json_views.h"
#include "client/ctl/selection.h"
#include "client/ctl/table.h"

namespace kvtrie {
namespace {

constexpr std::uint64_t kCountDefault = 8;

const FlagSpec kFlags[] = {
    kModelFlag,
    kTokensFlag,
    kTokensFileFlag,
    kSaltFlag,
    {"count", FlagSpec::Kind::kNumber, "at most so many sessions (8)", 1, 64},
};

void Print(const v1::SimilarResponse& similar, std::ostream& out) {
  using Align = Table::Align;
  Table table({{"SESSION"},
               {"LAST BLOCK"},
               {"BLOCKS", Align::kRight},
               {"PREFIX BLOCKS", Align::kRight},
               {"PREFIX BITS", Align::kRight},
               {"RUNS", Align::kRight},
               {"RUN TOKENS", Align::kRight},
               {"RUN BITS", Align::kRight}});
  for (const v1::SimilarSession& session : similar.sessions()) {
    const std::string more =
        session.session_ids_size() > 1
            ? " (+" + FormatCount(static_cast<std::uint64_t>(session.session_ids_size() - 1)) + ")"
            : "";
    table.AddRow({session.session_ids_size() == 0 ? "-" : FormatText(session.session_ids(0)) + more,
                  IdToHex(session.node_id()), FormatCount(session.blocks()),
                  FormatCount(session.shared_prefix_blocks()),
                  FormatBits(session.shared_prefix_bits()),
                  FormatCount(static_cast<std::uint64_t>(session.runs_size())),
                  FormatCount(session.shared_run_tokens()), FormatBits(session.shared_run_bits())});
  }
  table.Print(out);
  if (similar.work_limit_reached()) {
    out << "The search was cut short: there may be nearer ones.\n";
  }
}

ExitCode Run(const VerbContext& context) {
  AdminClient admin = context.Admin();
  v1::SimilarRequest request;
  auto prefix = ReadPrefix(admin, context.line);
  if (!prefix.ok()) return context.Fail(prefix.status());
  *request.mutable_prefix() = *std::move(prefix);
  request.set_session_count(
      static_cast<std::uint32_t>(context.line.Number("count", kCountDefault)));
  const auto similar = context.Cache()->Similar(request, context.timeout);
  if (!similar.ok()) return context.Fail(similar.status());
  if (context.json) {
    context.out << DumpJson(SimilarToJson(*similar)) << "\n";
  } else {
    Print(*similar, context.out);
  }
  return ExitCode::kOk;
}

}  // namespace

const Verb kSimilarVerb{
    .name = "similar",
    .positionals = "",
    .positionals_min = 0,
    .positionals_max = 0,
    .summary = "the stored sessions that have most in common with a text",
    .details =
        "Names the text by --model with its tokens. Nearest first, by the bits of surprisal that a "
        "session shares: of the longest common prefix, and of equal text behind it (runs of 32 "
        "tokens or more, under whatever prefix).",
    .flags = kFlags,
    .run = Run,
};

}  // namespace kvtrie
