// Speed of the residual codec on one core, for each kernel set that the machine has: encoding,
// decoding, and of that the entropy decoding alone. MB/s of raw KV, by this thread's CPU time.
//
//   residual_bench [--profile FILE --tokens FILE --kv FILE] [--layers N --heads N --head-dim N]
//                  [--per-head 1] [--inputs N] [--step X] [--block-tokens N]
//
// With a profile, or a draft of one: raw KV of these tokens (as one run, bfloat16, RoPE of theta 100,000), as
// blocks, at level high. Without it: synthetic KV (seed 1 and on), and a profile that is fitted to
// it, whose planes read the first N of layer below, layer below that, layer 0, and K for V.
#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "client/ctl/profile_files.h"
#include "storage/base/byte_order.h"
#include "storage/codec/codec_kernels.h"
#include "storage/codec/frame.h"
#include "storage/codec/residual_level.h"
#include "tests/bench/bench_kv.h"
#include "tests/bench/best_cpu_seconds.h"
#include "tests/storage/codec/residual_fixture.h"

namespace kvtrie {
namespace {

constexpr int kRounds = 5;

// The symbols of coded blocks, decoded without anything that is computed from them.
class SymbolReader {
 public:
  explicit SymbolReader(const ResidualProfile& profile)
      : symbols_(SymbolTables::Of(profile).value()) {
    for (std::uint32_t p = 0; p < profile.planes.size(); ++p) planes_.emplace_back(profile, p, 0);
  }

  // RESIDUAL.md: the entropy-coded rest lies behind a head whose length its counts say. REQUIRES:
  // no exact token but those that bodies name; a block of at most 16 tokens.
  void Read(std::span<const std::byte> body, std::size_t token_bytes, LaneMask active) {
    const std::byte* const head = body.data() + kFrameBindingBytes;
    const std::size_t exact = LoadLittle<std::uint16_t>(head + 2);
    const std::size_t sections = LoadLittle<std::uint16_t>(head + 4);
    const std::size_t at =
        kFrameBindingBytes + 6 + 2 * sections + exact * (sizeof(std::uint16_t) + token_bytes);
    for (std::size_t i = 0; i < exact; ++i) {
      active &= static_cast<LaneMask>(
          ~(1u << LoadLittle<std::uint16_t>(head + 6 + 2 * sections + 2 * i)));
    }
    if ((static_cast<unsigned>(head[0]) & 1) != 0) active &= static_cast<LaneMask>(~1u);
    const ResidualTables tables = symbols_.Tables();
    RansState state;
    Kernels().residual_start(reinterpret_cast<const std::uint8_t*>(body.data()) + at,
                             body.size() - at, &state);
    ResidualCarry carry;
    for (const LevelPlane& plane : planes_) {
      values_.resize(std::max(values_.size(), plane.coded_count() * kLanes));
      Kernels().residual_decode(tables, plane.Symbols(), active, &state, &carry, values_.data());
    }
    KV_CHECK(Kernels().residual_finished(&state));
  }

 private:
  const SymbolTables symbols_;
  std::vector<LevelPlane> planes_;
  std::vector<float> values_;
};

void Run(const ModelSpec& spec, const ResidualProfile& profile, const SyntheticText& text) {
  const auto codec = MakeCodec(spec, profile);
  const KvGeometry geometry(spec);
  const std::size_t token_bytes = geometry.raw_block_bytes() / geometry.block_tokens();
  for (const KernelSet set : kKernelSets) {
    if (!UseKernelSet(set).ok()) continue;
    CodedText coded = EncodeText(*codec, spec, text, Quality::kHigh);
    const double encode_seconds = BestCpuSeconds(
        kRounds, [&] { KV_CHECK(codec->Encode(coded.blocks, Quality::kHigh).ok()); });
    std::vector<std::vector<std::byte>> raw = coded.raw;
    std::vector<BlockToDecode> to_decode;
    for (std::size_t b = 0; b < raw.size(); ++b) {
      to_decode.push_back(coded.ToDecode(b, Quality::kHigh, raw[b]));
    }
    const double decode_seconds =
        BestCpuSeconds(kRounds, [&] { KV_CHECK(codec->Decode(to_decode).ok()); });
    SymbolReader reader(profile);
    double symbol_seconds = 0;
    if (spec.block_tokens <= kLanes) {
      const auto active = static_cast<LaneMask>((1u << spec.block_tokens) - 1);
      symbol_seconds = BestCpuSeconds(kRounds, [&] {
        for (const EncodedBlock& block : coded.encoded) {
          reader.Read(block.body, token_bytes, active);
        }
      });
    }
    std::size_t bytes = 0;
    for (const EncodedBlock& block : coded.encoded) {
      bytes += FrameHeaderBytes(block.section_bytes.size()) + block.body.size();
    }
    const auto raw_bytes = static_cast<double>(raw.size() * geometry.raw_block_bytes());
    const double components = raw_bytes / static_cast<double>(DTypeBytes(spec.dtype));
    std::printf("%-8s %zu blocks  %.3f bit  encode %4.0f MB/s  decode %4.0f MB/s",
                KernelSetName(set), raw.size(), 8 * static_cast<double>(bytes) / components,
                raw_bytes / encode_seconds / 1e6, raw_bytes / decode_seconds / 1e6);
    if (symbol_seconds > 0) {
      std::printf("  entropy decoding alone %5.0f MB/s", raw_bytes / symbol_seconds / 1e6);
    }
    std::printf("\n");
  }
}

int Main(int argc, char** argv) {
  std::map<std::string, std::string> options = {
      {"--layers", "30"}, {"--heads", "3"},  {"--head-dim", "64"},     {"--per-head", "0"},
      {"--inputs", "4"},  {"--step", "1.2"}, {"--block-tokens", "16"}, {"--run-tokens", "256"}};
  for (int i = 1; i + 1 < argc; i += 2) options[argv[i]] = argv[i + 1];
  const auto number = [&](const char* name) {
    return static_cast<std::uint32_t>(std::strtoul(options[name].c_str(), nullptr, 10));
  };
  ModelSpec spec = SyntheticSpec(
      {{number("--layers"), number("--heads"), number("--head-dim"), number("--head-dim")}},
      DType::kBfloat16);
  spec.rope.theta = 1e5;
  spec.block_tokens = number("--block-tokens");
  KV_CHECK(spec.Validate().ok());

  if (options.contains("--profile")) {
    const auto file = ReadProfileFile(options["--profile"]);
    KV_CHECK(file.ok());
    const auto profile = ResidualProfile::DecodeBody(file->body);
    KV_CHECK(profile.ok());
    const std::vector<std::byte> tokens = ReadFile(options["--tokens"]);
    SyntheticText text;
    text.tokens.resize(tokens.size() / sizeof(TokenId));
    std::memcpy(text.tokens.data(), tokens.data(), text.tokens.size() * sizeof(TokenId));
    text.raw = ReadFile(options["--kv"]);
    Run(spec, *profile, text);
    return 0;
  }
  ResidualFitOptions fit;
  fit.inputs.resize(number("--inputs"));
  fit.block_per_head = number("--per-head") != 0;
  fit.levels = {
      {.quality = Quality::kHigh, .step = std::stof(options["--step"]), .rate_weight = 0.08f}};
  fit.rounds = 1;
  Run(spec, FitSynthetic(spec, fit), MakeText(spec, number("--run-tokens"), 99));
  return 0;
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) { return kvtrie::Main(argc, argv); }
