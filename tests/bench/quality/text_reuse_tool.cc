// Puts one session's KV into a server, looks another session up that holds the same text behind
// another prefix, and fetches what of it may be reused, as any client does.
//
//   text_reuse_tool --spec SPEC.json --block-tokens N --server HOST:PORT --jobs JOBS.json
//
// JOBS.json: [{"first": BASE, "second": BASE, "salt": TEXT, "skip": N, "level": LEVEL, "out":
// FILE}], where BASE.tokens and BASE.kv are a session as `kvtrie profile` has them. The first is
// put at the level (with --profile FILE, where that is not exact), and answers at it. FILE gets the
// KV of the second one as far as it was reused, one run; the rest of it is zeros. Prints as JSON,
// for each job, which tokens were reused ("reused": [[begin, end], ...]) and what was found before
// them.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "client/client.h"
#include "client/ctl/profile_code.h"
#include "client/ctl/profile_files.h"
#include "storage/base/byte_reader.h"

namespace kvtrie {
namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "text_reuse_tool: %s\n", what.c_str());
  std::exit(1);
}

template <typename T>
T OrFail(absl::StatusOr<T> value) {
  if (!value.ok()) Fail(value.status().ToString());
  return *std::move(value);
}

// A session's files.
struct Session {
  explicit Session(const std::string& base)
      : tokens_file(OrFail(MappedFile::Open(base + ".tokens"))),
        tokens(OrFail(NumbersOf<TokenId>(tokens_file, base + ".tokens"))) {}

  MappedFile tokens_file;
  std::span<const TokenId> tokens;
};

class Tool {
 public:
  Tool(Client& client, const ModelSpec& spec)
      : client_(client), spec_(spec), model_(OrFail(client.RegisterModel(spec))) {}

  Json Run(const Json& job) {
    const std::string salt = job.at("salt").get<std::string>();
    const Quality level =
        LevelFromText(job.at("level").get<std::string>()).value_or(Quality::kExact);
    Put(job.at("first").get<std::string>(), salt, level);

    const Session second(job.at("second").get<std::string>());
    LookupOptions lookup;
    lookup.salt = salt;
    lookup.min_quality = level;
    lookup.lease = std::chrono::seconds(60);
    lookup.allow_text_reuse = true;
    const v1::LookupResult found = OrFail(client_.Lookup(model_.id, second.tokens, lookup));
    if (found.text_reuse_forbidden() != v1::TEXT_REUSE_FORBIDDEN_UNSPECIFIED) {
      Fail("this server forbids text reuse (--text_reuse)");
    }
    const std::size_t block_count =
        (second.tokens.size() + spec_.block_tokens - 1) / spec_.block_tokens;
    std::vector<std::vector<std::byte>> blocks(block_count,
                                               std::vector<std::byte>(model_.raw_block_bytes));
    const std::vector<std::span<std::byte>> memory(blocks.begin(), blocks.end());
    FetchRunsOptions options;
    options.min_quality = level;
    options.skip_tokens = job.at("skip").get<std::uint32_t>();
    const RunsReport report = OrFail(
        client_.FetchRuns(model_.id, found, {.tokens = second.tokens, .blocks = memory}, options));
    for (const FetchedRun& run : report.runs) {
      if (!run.status.ok()) Fail(run.status.ToString());
    }

    const std::vector<std::byte> run = RunOfBlocks(spec_, blocks);
    const absl::Status written = WriteFile(job.at("out").get<std::string>(), AsText(run));
    if (!written.ok()) Fail(written.ToString());
    Json reused = Json::array();
    for (std::size_t at = 0; at < report.reused.size();) {
      const auto begin = std::find(report.reused.begin() + static_cast<std::ptrdiff_t>(at),
                                   report.reused.end(), true);
      if (begin == report.reused.end()) break;
      const auto end = std::find(begin, report.reused.end(), false);
      at = static_cast<std::size_t>(end - report.reused.begin());
      reused.push_back({begin - report.reused.begin(), at});
    }
    return {{"matched_tokens", found.matched_tokens()},
            {"run_count", found.reusable_runs_size()},
            {"reused", reused}};
  }

 private:
  void Put(const std::string& base, const std::string& salt, Quality level) {
    const Session session(base);
    const MappedFile kv = OrFail(MappedFile::Open(base + ".kv"));
    const std::vector<std::vector<std::byte>> blocks = BlocksOfRun(spec_, kv.bytes());
    const std::vector<std::span<const std::byte>> raw(blocks.begin(), blocks.end());
    PutPath path;
    path.path = {.model = model_.id, .tokens = session.tokens, .salt = salt, .extra_keys = {}};
    path.blocks = raw;
    path.quality = level;
    const PutReport put = client_.Put({&path, 1})[0];
    for (const PutBlockReport& block : put.blocks) {
      if (!block.status.ok()) Fail(block.status.ToString());
    }
  }

  Client& client_;
  const ModelSpec spec_;
  const ModelHandle model_;
};

int Main(int argc, char** argv) {
  std::map<std::string, std::string> flags;
  for (int i = 1; i + 1 < argc; i += 2) flags[std::string(argv[i]).substr(2)] = argv[i + 1];
  for (const char* flag : {"spec", "block-tokens", "server", "jobs"}) {
    if (!flags.contains(flag)) Fail(std::string("--") + flag + " is missing");
  }
  ModelSpec spec = OrFail(ReadModelSpec(flags.at("spec")));
  spec.block_tokens = static_cast<std::uint32_t>(std::stoul(flags.at("block-tokens")));
  ClientOptions options;
  options.targets = {flags.at("server")};
  const auto client = OrFail(Client::Create(options));
  if (flags.contains("profile")) {
    const MappedFile profile = OrFail(MappedFile::Open(flags.at("profile")));
    OrFail(client->PutProfile(profile.bytes()));
  }
  std::ifstream file(flags.at("jobs"));
  const Json jobs = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!jobs.is_array()) Fail("--jobs is no JSON array");
  Tool tool(*client, spec);
  Json results = Json::array();
  for (const Json& job : jobs) results.push_back(tool.Run(job));
  std::cout << results << std::endl;
  return 0;
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) { return kvtrie::Main(argc, argv); }
