#include "client/ctl/profile_code.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/profile_files.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/codec/frame.h"
#include "storage/codec/frame_codec.h"

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

absl::StatusOr<std::string> Code(const VerbContext& context) {
  const CommandLine& line = context.line;
  const std::string level = line.Text("level");
  const Quality quality = LevelFromText(level).value_or(Quality::kExact);
  if (quality == Quality::kExact && line.Has("token-importance")) {
    return UsageError(
        "--token-importance: level exact has no steps for it to change: leave it out");
  }
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
  const auto codec = ResidualCodec::Create(spec, BodyDigest(profile.body), *body);
  if (!codec.ok()) return bad("profile", codec.status().message());
  if (quality != Quality::kExact && !(*codec)->HasLevel(quality)) {
    return bad("profile", "has no level ", level);
  }
  if (line.Has("token-importance") && !FollowsImportance(*body, quality)) {
    return bad("profile", "steps of level ", level,
               " follow no importance, so that --token-importance changes nothing: leave it out, "
               "or fit with --queries (or a --material that was made with them) and --importance "
               "above 0");
  }

  KV_ASSIGN_OR_RETURN(const MappedFile tokens_file,
                      OfFlag("tokens", MappedFile::Open(line.Text("tokens"))));
  KV_ASSIGN_OR_RETURN(const auto tokens,
                      OfFlag("tokens", NumbersOf<TokenId>(tokens_file, line.Text("tokens"))));
  if (tokens.size() < spec.block_tokens) {
    return bad("tokens", "has ", tokens.size(), " tokens, and a block has ", spec.block_tokens);
  }
  KV_ASSIGN_OR_RETURN(const MappedFile kv, OfFlag("kv", MappedFile::Open(line.Text("kv"))));
  const std::size_t bytes = TokenBytes(spec) * tokens.size();
  if (kv.bytes().size() != bytes) {
    return bad("kv", "has ", kv.bytes().size(), " bytes, and KV of ", tokens.size(), " tokens has ",
               bytes);
  }

  MappedFile importance_file;
  std::span<const float> importance;
  if (line.Has("token-importance")) {
    const std::string path = line.Text("token-importance");
    KV_ASSIGN_OR_RETURN(importance_file, OfFlag("token-importance", MappedFile::Open(path)));
    KV_ASSIGN_OR_RETURN(importance,
                        OfFlag("token-importance", NumbersOf<float>(importance_file, path)));
    if (importance.size() != tokens.size()) {
      return bad("token-importance", "has ", importance.size(), " numbers, and there are ",
                 tokens.size(), " tokens: write one for each");
    }
    for (std::size_t i = 0; i < importance.size(); ++i) {
      if (std::isfinite(importance[i]) && importance[i] > 0) continue;
      return bad("token-importance", "number ", i, " (from 0 on) is ", importance[i],
                 ": write a finite one above 0, 1 for an average token");
    }
  }

  KV_ASSIGN_OR_RETURN(const CodedRun run,
                      CodeRun(spec, **codec, tokens, kv.bytes(), importance, quality,
                              static_cast<int>(line.Number("rounds", 1))));
  if (line.Has("out")) {
    KV_RETURN_IF_ERROR(OfFlag("out", WriteFile(line.Text("out"), AsText(run.restored))));
  }

  const auto mb_per_second = [&](double seconds) {
    return static_cast<double>(run.raw_bytes) / std::max(seconds, 1e-9) / 1e6;
  };
  nlohmann::ordered_json json;
  json["body_digest"] = BodyDigest(profile.body).ToHex();
  json["level"] = level;
  json["tokens"] = tokens.size() / spec.block_tokens * spec.block_tokens;
  json["blocks"] = run.block_bytes.size();
  json["block_bytes"] = run.block_bytes;
  json["bytes"] = run.frame_bytes();
  json["raw_bytes"] = run.raw_bytes;
  json["components"] = run.components;
  json["bits_per_component"] = run.bits_per_component();
  json["exact_tokens"] = run.exact_tokens;
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

absl::StatusOr<CodedRun> CodeRun(const ModelSpec& spec, const ResidualCodec& codec,
                                 std::span<const TokenId> tokens, std::span<const std::byte> raw,
                                 std::span<const float> importance, Quality quality, int rounds) {
  const KvGeometry geometry(spec);
  const std::size_t block_tokens = spec.block_tokens;
  const std::size_t block_count = tokens.size() / block_tokens;
  KV_CHECK(block_count > 0);
  KV_CHECK(raw.size() == TokenBytes(spec) * tokens.size());

  const std::vector<std::vector<std::byte>> blocks = BlocksOfRun(spec, raw);
  std::vector<std::vector<std::byte>> restored = blocks;
  std::vector<BlockToEncode> to_encode;
  for (std::size_t b = 0; b < block_count; ++b) {
    to_encode.push_back({.first_position = static_cast<std::uint32_t>(b * block_tokens),
                         .session_tokens = static_cast<std::uint32_t>(tokens.size()),
                         .tokens = tokens.subspan(b * block_tokens, block_tokens),
                         .raw = blocks[b],
                         .importance = importance.empty()
                                           ? importance
                                           : importance.subspan(b * block_tokens, block_tokens)});
  }

  CodedRun run;
  run.encode_seconds = run.decode_seconds = std::numeric_limits<double>::max();
  // A dtype that profiles have no exact coding for leaves all blocks to the lossless codec.
  const bool declines_all = quality == Quality::kExact && !codec.HasLevel(quality);
  std::vector<EncodedBlock> encoded(block_count);
  for (int round = 0; round < rounds; ++round) {
    SteadyClock::time_point begin = SteadyClock::now();
    if (!declines_all) {
      KV_ASSIGN_OR_RETURN(encoded, codec.Encode(to_encode, quality));
    }
    run.encode_seconds = std::min(run.encode_seconds, SecondsSince(begin));
    std::vector<BlockToDecode> to_decode;
    for (std::size_t b = 0; b < block_count; ++b) {
      if (encoded[b].body.empty()) continue;
      to_decode.push_back({.body = encoded[b].body,
                           .section_bytes = encoded[b].section_bytes,
                           .quality = quality,
                           .tokens = to_encode[b].tokens,
                           .raw = restored[b]});
    }
    begin = SteadyClock::now();
    if (!to_decode.empty()) KV_RETURN_IF_ERROR(codec.Decode(to_decode));
    run.decode_seconds = std::min(run.decode_seconds, SecondsSince(begin));
  }

  const FrameCodec without_profile(spec, nullptr);
  for (std::size_t b = 0; b < block_count; ++b) {
    if (encoded[b].body.empty()) {
      KV_ASSIGN_OR_RETURN(const std::vector<EncodedFrame> frames,
                          without_profile.Encode({&to_encode[b], 1}, Quality::kExact));
      run.block_bytes.push_back(frames[0].bytes.size());
      run.exact_tokens += block_tokens;
      restored[b] = blocks[b];
    } else {
      run.block_bytes.push_back(FrameHeaderBytes(encoded[b].section_bytes.size()) +
                                encoded[b].body.size());
      run.exact_tokens += encoded[b].exact_tokens;
    }
  }
  if (quality == Quality::kExact && restored != blocks) {
    return absl::InternalError("exact frames did not give back the same KV");
  }
  run.raw_bytes = block_count * geometry.raw_block_bytes();
  run.components = run.raw_bytes / DTypeBytes(spec.dtype);
  run.restored = RunOfBlocks(spec, restored);
  return run;
}

ExitCode RunProfileCode(const VerbContext& context) {
  const absl::StatusOr<std::string> json = Code(context);
  if (!json.ok()) return context.Fail(json.status());
  context.out << *json << "\n";
  return ExitCode::kOk;
}

}  // namespace kvtrie
