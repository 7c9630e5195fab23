#include "client/ctl/profile_code.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/profile_files.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/codec/frame.h"
#include "storage/codec/residual_profile.h"
#include "storage/codec/shared_runs.h"

namespace kvtrie {
namespace {

using SteadyClock = std::chrono::steady_clock;

double SecondsSince(SteadyClock::time_point begin) {
  return std::chrono::duration<double>(SteadyClock::now() - begin).count();
}

std::size_t TokenBytes(const ModelSpec& spec) {
  return KvGeometry(spec).raw_block_bytes() / spec.block_tokens;
}

// Calls copy(block, offset in the block, offset in the run, bytes) for each piece that lies
// together in both: K or V of one layer. The run may end in the middle of a block.
template <typename Copy>
void ForEachPiece(const ModelSpec& spec, std::size_t run_tokens, Copy copy) {
  const KvGeometry geometry(spec);
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
      const std::size_t begin = geometry.kind_begin(layer, kind);
      const std::size_t bytes = geometry.kind_bytes(layer, kind);
      for (std::size_t block = 0; block < run_tokens / spec.block_tokens; ++block) {
        copy(block, begin, begin / spec.block_tokens * run_tokens + block * bytes, bytes);
      }
    }
  }
}

bool FollowsImportance(const ResidualProfile& profile, Quality quality) {
  return profile.importance.query_heads > 0 &&
         std::any_of(profile.levels.begin(), profile.levels.end(), [&](const ResidualLevel& level) {
           return level.quality == quality && level.importance_strength != 0;
         });
}

// The tokens and KV that two flags name.
struct Session {
  MappedFile tokens_file, kv_file;
  std::span<const TokenId> tokens;  // point into the files
  std::span<const std::byte> raw;
};
absl::StatusOr<Session> ReadSession(const ModelSpec& spec, const CommandLine& line,
                                    const char* tokens_flag, const char* kv_flag) {
  const auto bad = [&](const char* flag, const auto&... what) {
    return OfFlag(flag, absl::InvalidArgumentError(absl::StrCat(line.Text(flag), ": ", what...)));
  };
  Session session;
  KV_ASSIGN_OR_RETURN(session.tokens_file,
                      OfFlag(tokens_flag, MappedFile::Open(line.Text(tokens_flag))));
  KV_ASSIGN_OR_RETURN(
      session.tokens,
      OfFlag(tokens_flag, NumbersOf<TokenId>(session.tokens_file, line.Text(tokens_flag))));
  if (session.tokens.size() < spec.block_tokens) {
    return bad(tokens_flag, "has ", session.tokens.size(), " tokens, and a block has ",
               spec.block_tokens);
  }
  KV_ASSIGN_OR_RETURN(session.kv_file, OfFlag(kv_flag, MappedFile::Open(line.Text(kv_flag))));
  session.raw = session.kv_file.bytes();
  const std::size_t bytes = TokenBytes(spec) * session.tokens.size();
  if (session.raw.size() != bytes) {
    return bad(kv_flag, "has ", session.raw.size(), " bytes, and KV of ", session.tokens.size(),
               " tokens has ", bytes);
  }
  return session;
}

// The level of the session that this one is coded against; no value: it is coded alone.
absl::StatusOr<std::optional<Quality>> AgainstLevel(const CommandLine& line, Quality quality) {
  constexpr const char* kFlags[] = {"against-tokens", "against-kv", "against-level"};
  const auto given = std::count_if(std::begin(kFlags), std::end(kFlags),
                                   [&](const char* flag) { return line.Has(flag); });
  if (given == 0) return std::optional<Quality>();
  if (given != std::ssize(kFlags)) {
    return UsageError(
        "--against-tokens, --against-kv and --against-level say what to code against: give all of "
        "them, or none");
  }
  if (quality == Quality::kExact) {
    return UsageError("--against-level: level exact is coded against nothing: leave it out");
  }
  const Quality against = LevelFromText(line.Text("against-level")).value_or(Quality::kExact);
  if (!IsAtLeast(against, quality) || against == quality) {
    return UsageError(absl::StrCat("--against-level ", line.Text("against-level"),
                                   ": must be finer than --level ", line.Text("level"),
                                   ", which inherits its error"));
  }
  return std::optional(against);
}

bool HasLevel(const ResidualCodec& codec, Quality quality) {
  return quality == Quality::kExact || codec.HasLevel(quality);
}

absl::StatusOr<std::string> Code(const VerbContext& context) {
  const CommandLine& line = context.line;
  const std::string level = line.Text("level");
  const Quality quality = LevelFromText(level).value_or(Quality::kExact);
  if (quality == Quality::kExact && line.Has("token-importance")) {
    return UsageError(
        "--token-importance: level exact has no steps for it to change: leave it out");
  }
  KV_ASSIGN_OR_RETURN(const std::optional<Quality> against_level, AgainstLevel(line, quality));
  if (line.Has("out")) KV_RETURN_IF_ERROR(OfFlag("out", CheckCanWrite(line.Text("out"))));
  KV_ASSIGN_OR_RETURN(ModelSpec spec, OfFlag("spec", ReadModelSpec(line.Text("spec"))));
  spec.block_tokens = static_cast<std::uint32_t>(line.Number("block-tokens", spec.block_tokens));
  if (const absl::Status valid = spec.Validate(); !valid.ok()) {
    return UsageError(absl::StrCat("--block-tokens ", spec.block_tokens, ": ", valid.message()));
  }

  const auto bad = [&](const char* flag, const auto&... what) {
    return OfFlag(flag, absl::InvalidArgumentError(absl::StrCat(line.Text(flag), ": ", what...)));
  };
  KV_ASSIGN_OR_RETURN(const ProfileFile profile,
                      OfFlag("profile", ReadProfileFile(line.Text("profile"))));
  if (profile.codec_key != spec.CodecKey()) {
    return bad("profile", "is of another model than ", line.Text("spec"),
               ": all fields count but block_tokens, dtype and layout_tag");
  }
  const absl::StatusOr<ResidualProfile> body = ResidualProfile::DecodeBody(profile.body);
  if (!body.ok()) return bad("profile", body.status().message());
  auto residual = ResidualCodec::Create(spec, BodyDigest(profile.body), *body);
  if (!residual.ok()) return bad("profile", residual.status().message());
  const FrameCodec codec(spec, *std::move(residual));
  if (!HasLevel(*codec.residual(), quality)) return bad("profile", "has no level ", level);
  if (line.Has("token-importance") && !FollowsImportance(*body, quality)) {
    return bad("profile", "steps of level ", level,
               " follow no importance, so that --token-importance changes nothing: leave it out, "
               "or fit with --queries (or a --material that was made with them) and --importance "
               "above 0");
  }
  if (against_level && !HasLevel(*codec.residual(), *against_level)) {
    return bad("profile", "has no level ", line.Text("against-level"),
               ", which --against-level names");
  }
  if (against_level && !codec.residual()->HasDifferences()) {
    return bad("profile",
               "cannot code a text against another: leave --against-tokens, --against-kv and "
               "--against-level out, or fit with --repeated");
  }

  KV_ASSIGN_OR_RETURN(const Session session, ReadSession(spec, line, "tokens", "kv"));
  CodeRunOptions options{.quality = quality, .rounds = static_cast<int>(line.Number("rounds", 1))};
  MappedFile importance_file;
  if (line.Has("token-importance")) {
    const std::string path = line.Text("token-importance");
    KV_ASSIGN_OR_RETURN(importance_file, OfFlag("token-importance", MappedFile::Open(path)));
    KV_ASSIGN_OR_RETURN(options.importance,
                        OfFlag("token-importance", NumbersOf<float>(importance_file, path)));
    if (options.importance.size() != session.tokens.size()) {
      return bad("token-importance", "has ", options.importance.size(), " numbers, and there are ",
                 session.tokens.size(), " tokens: write one for each");
    }
    for (std::size_t i = 0; i < options.importance.size(); ++i) {
      if (std::isfinite(options.importance[i]) && options.importance[i] > 0) continue;
      return bad("token-importance", "number ", i, " (from 0 on) is ", options.importance[i],
                 ": write a finite one above 0, 1 for an average token");
    }
  }
  Session as_it_was;
  RestoredSession other;
  if (against_level) {
    KV_ASSIGN_OR_RETURN(as_it_was, ReadSession(spec, line, "against-tokens", "against-kv"));
    KV_ASSIGN_OR_RETURN(CodedRun run, CodeRun(spec, codec, as_it_was.tokens, as_it_was.raw,
                                              {.quality = *against_level}));
    other = {
        .tokens = as_it_was.tokens, .blocks = std::move(run.restored), .quality = *against_level};
    options.against = &other;
  }

  KV_ASSIGN_OR_RETURN(const CodedRun run,
                      CodeRun(spec, codec, session.tokens, session.raw, options));
  if (line.Has("out")) {
    KV_RETURN_IF_ERROR(
        OfFlag("out", WriteFile(line.Text("out"), AsText(RunOfBlocks(spec, run.restored)))));
  }

  const auto mb_per_second = [&](double seconds) {
    return static_cast<double>(run.raw_bytes) / std::max(seconds, 1e-9) / 1e6;
  };
  nlohmann::ordered_json json;
  json["body_digest"] = BodyDigest(profile.body).ToHex();
  json["level"] = level;
  json["tokens"] = session.tokens.size() / spec.block_tokens * spec.block_tokens;
  json["blocks"] = run.block_bytes.size();
  json["block_bytes"] = run.block_bytes;
  json["bytes"] = run.frame_bytes();
  json["raw_bytes"] = run.raw_bytes;
  json["components"] = run.components;
  json["bits_per_component"] = run.bits_per_component();
  json["exact_tokens"] = run.exact_tokens;
  if (against_level) {
    std::size_t tokens = 0, blocks = 0, bytes = 0;
    for (std::size_t b = 0; b < run.block_bytes.size(); ++b) {
      if (run.block_referenced_tokens[b] == 0) continue;
      tokens += run.block_referenced_tokens[b];
      ++blocks;
      bytes += run.block_bytes[b];
    }
    json["against_level"] = line.Text("against-level");
    json["referenced_tokens"] = tokens;
    json["referenced_blocks"] = blocks;  // that have such tokens
    json["referenced_bytes"] = bytes;    // of these blocks
    json["referenced_share_of_bytes"] =
        static_cast<double>(bytes) / static_cast<double>(run.frame_bytes());
  }
  json["encode_mb_per_second"] = mb_per_second(run.encode_seconds);
  json["decode_mb_per_second"] = mb_per_second(run.decode_seconds);
  return json.dump();
}

}  // namespace

std::vector<std::vector<std::byte>> BlocksOfRun(const ModelSpec& spec,
                                                std::span<const std::byte> run) {
  const std::size_t run_tokens = run.size() / TokenBytes(spec);
  std::vector<std::vector<std::byte>> blocks(
      run_tokens / spec.block_tokens, std::vector<std::byte>(KvGeometry(spec).raw_block_bytes()));
  ForEachPiece(spec, run_tokens,
               [&](std::size_t b, std::size_t in_block, std::size_t in_run, std::size_t bytes) {
                 std::memcpy(blocks[b].data() + in_block, run.data() + in_run, bytes);
               });
  return blocks;
}

std::vector<std::byte> RunOfBlocks(const ModelSpec& spec,
                                   std::span<const std::vector<std::byte>> blocks) {
  std::vector<std::byte> run(blocks.size() * KvGeometry(spec).raw_block_bytes());
  ForEachPiece(spec, blocks.size() * spec.block_tokens,
               [&](std::size_t b, std::size_t in_block, std::size_t in_run, std::size_t bytes) {
                 std::memcpy(run.data() + in_run, blocks[b].data() + in_block, bytes);
               });
  return run;
}

std::size_t CodedRun::frame_bytes() const {
  return std::accumulate(block_bytes.begin(), block_bytes.end(), std::size_t{0});
}

double CodedRun::bits_per_component() const {
  return 8 * static_cast<double>(frame_bytes()) / static_cast<double>(components);
}

std::vector<BlockReferences> FindReferences(const ModelSpec& spec, const RestoredSession& other,
                                            std::span<const TokenId> tokens) {
  const std::size_t size = spec.block_tokens;
  std::vector<BlockReferences> found(tokens.size() / size);
  const std::span<const TokenId> texts[] = {other.tokens.first(other.blocks.size() * size),
                                            tokens.first(found.size() * size)};
  std::size_t count = 0;
  for (const SharedRun& shared : FindSharedRuns(texts, kSharedTokensMin)) {
    if (shared.earlier_text != 0 || shared.text != 1) continue;
    for (std::size_t i = 0; i < shared.token_count; i += count) {
      const std::size_t token = shared.first_token + i, there = shared.offset + i;
      // To the end of the run, of the block, or of the reference's block.
      count = std::min({shared.token_count - i, size - token % size, size - there % size});
      TrieNodeId node;  // any one, as long as it is another for each block
      node.bytes.fill(0xEE);
      const std::size_t block = there / size;
      std::memcpy(node.bytes.data(), &block, sizeof block);
      auto& [references, runs] = found[token / size];
      const auto known =
          std::find_if(references.begin(), references.end(),
                       [&](const ReferenceBlock& reference) { return reference.node == node; });
      const auto number = static_cast<std::uint16_t>(known - references.begin());
      if (known == references.end()) {
        if (references.size() == kReferencesMax) continue;
        references.push_back({.node = node,
                              .first_position = static_cast<std::uint32_t>(block * size),
                              .tokens = other.tokens.subspan(block * size, size),
                              .raw = other.blocks[block],
                              .quality = other.quality});
      }
      runs.push_back({.first_token = static_cast<std::uint16_t>(token % size),
                      .token_count = static_cast<std::uint16_t>(count),
                      .reference = number,
                      .offset = static_cast<std::uint16_t>(there % size)});
    }
  }
  return found;
}

absl::StatusOr<CodedRun> CodeRun(const ModelSpec& spec, const FrameCodec& codec,
                                 std::span<const TokenId> tokens, std::span<const std::byte> raw,
                                 const CodeRunOptions& options) {
  const std::size_t block_tokens = spec.block_tokens;
  const std::size_t block_count = tokens.size() / block_tokens;
  const std::size_t block_bytes = KvGeometry(spec).raw_block_bytes();
  KV_CHECK(block_count > 0);
  KV_CHECK(raw.size() == TokenBytes(spec) * tokens.size());

  const std::vector<std::vector<std::byte>> blocks = BlocksOfRun(spec, raw);
  std::vector<BlockReferences> references(block_count);
  if (options.against != nullptr) references = FindReferences(spec, *options.against, tokens);
  std::vector<BlockToEncode> to_encode;
  for (std::size_t b = 0; b < block_count; ++b) {
    const std::size_t first = b * block_tokens;
    to_encode.push_back({.first_position = static_cast<std::uint32_t>(first),
                         .session_tokens = static_cast<std::uint32_t>(tokens.size()),
                         .tokens = tokens.subspan(first, block_tokens),
                         .raw = blocks[b],
                         .references = references[b].references,
                         .runs = references[b].runs});
    if (!options.importance.empty()) {
      to_encode[b].importance = options.importance.subspan(first, block_tokens);
    }
  }

  CodedRun run;
  run.restored.assign(block_count, std::vector<std::byte>(block_bytes));
  run.encode_seconds = run.decode_seconds = std::numeric_limits<double>::max();
  std::vector<EncodedFrame> frames;
  for (int round = 0; round < options.rounds; ++round) {
    SteadyClock::time_point begin = SteadyClock::now();
    KV_ASSIGN_OR_RETURN(frames, options.quality == Quality::kExact
                                    ? codec.EncodeSmallestExact(to_encode)
                                    : codec.Encode(to_encode, options.quality));
    run.encode_seconds = std::min(run.encode_seconds, SecondsSince(begin));
    std::vector<FrameToDecode> to_decode;
    for (std::size_t b = 0; b < block_count; ++b) {
      KV_ASSIGN_OR_RETURN(const FrameView frame, FrameView::Parse(frames[b].bytes));
      to_decode.push_back({.frame = frame,
                           .tokens = to_encode[b].tokens,
                           .raw = run.restored[b],
                           .references = to_encode[b].references});
    }
    begin = SteadyClock::now();
    KV_RETURN_IF_ERROR(codec.Decode(to_decode));
    run.decode_seconds = std::min(run.decode_seconds, SecondsSince(begin));
  }

  for (const EncodedFrame& frame : frames) {
    run.block_bytes.push_back(frame.bytes.size());
    run.block_referenced_tokens.push_back(frame.referenced_tokens);
    run.exact_tokens += frame.exact_tokens;
  }
  if (options.quality == Quality::kExact && run.restored != blocks) {
    return absl::InternalError("exact frames did not give back the same KV");
  }
  run.raw_bytes = block_count * block_bytes;
  run.components = run.raw_bytes / DTypeBytes(spec.dtype);
  return run;
}

ExitCode RunProfileCode(const VerbContext& context) {
  const absl::StatusOr<std::string> json = Code(context);
  if (!json.ok()) return context.Fail(json.status());
  context.out << *json << "\n";
  return ExitCode::kOk;
}

}  // namespace kvtrie
