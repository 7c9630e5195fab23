#include "client/ctl/profile_code.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
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

absl::StatusOr<std::unique_ptr<const ResidualCodec>> MakeCodec(const ModelSpec& spec,
                                                               const ProfileFile& profile) {
  KV_ASSIGN_OR_RETURN(const ResidualProfile body, ResidualProfile::DecodeBody(profile.body));
  return ResidualCodec::Create(spec, BodyDigest(profile.body), body);
}

absl::StatusOr<std::string> Code(const VerbContext& context) {
  const CommandLine& line = context.line;
  KV_ASSIGN_OR_RETURN(ModelSpec spec, ReadModelSpec(line.Text("spec")));
  spec.block_tokens = static_cast<std::uint32_t>(line.Number("block-tokens", spec.block_tokens));
  KV_RETURN_IF_ERROR(spec.Validate());

  const std::string profile_path = line.Text("profile");
  KV_ASSIGN_OR_RETURN(const ProfileFile profile, ReadProfileFile(profile_path));
  if (profile.codec_key != spec.CodecKey()) {
    return absl::InvalidArgumentError(
        absl::StrCat(profile_path, ": is of another model than ", line.Text("spec"),
                     ": all fields count but block_tokens, dtype and layout_tag"));
  }
  const auto codec = MakeCodec(spec, profile);
  if (!codec.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(profile_path, ": ", codec.status().message()));
  }

  const std::string tokens_path = line.Text("tokens");
  KV_ASSIGN_OR_RETURN(const MappedFile tokens_file, MappedFile::Open(tokens_path));
  KV_ASSIGN_OR_RETURN(const auto tokens, NumbersOf<TokenId>(tokens_file, tokens_path));
  if (tokens.size() < spec.block_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(tokens_path, ": has ", tokens.size(),
                                                   " tokens, and a block has ", spec.block_tokens));
  }
  const std::string kv_path = line.Text("kv");
  KV_ASSIGN_OR_RETURN(const MappedFile kv, MappedFile::Open(kv_path));
  const std::size_t bytes = TokenBytes(spec) * tokens.size();
  if (kv.bytes().size() != bytes) {
    return absl::InvalidArgumentError(absl::StrCat(kv_path, ": has ", kv.bytes().size(),
                                                   " bytes, and KV of ", tokens.size(),
                                                   " tokens has ", bytes));
  }

  MappedFile importance_file;
  std::span<const float> importance;
  if (line.Has("token-importance")) {
    const std::string path = line.Text("token-importance");
    KV_ASSIGN_OR_RETURN(importance_file, MappedFile::Open(path));
    KV_ASSIGN_OR_RETURN(importance, NumbersOf<float>(importance_file, path));
    if (importance.size() != tokens.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": has ", importance.size(), " numbers, and there are ", tokens.size(), " tokens"));
    }
  }

  const std::string level = line.Text("level");
  const Quality quality = LevelFromText(level).value_or(Quality::kExact);
  if (quality != Quality::kExact && !(*codec)->HasLevel(quality)) {
    return absl::InvalidArgumentError(absl::StrCat(profile_path, ": has no level ", level));
  }
  KV_ASSIGN_OR_RETURN(const CodedRun run,
                      CodeRun(spec, **codec, tokens, kv.bytes(), importance, quality,
                              static_cast<int>(line.Number("rounds", 1))));
  if (line.Has("out")) KV_RETURN_IF_ERROR(WriteFile(line.Text("out"), AsText(run.restored)));

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
