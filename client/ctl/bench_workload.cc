#include "client/ctl/bench_workload.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "storage/base/byte_order.h"

namespace kvtrie {
namespace {

constexpr std::uint64_t kHeadDimMax = 4096;
constexpr std::uint64_t kKvHeadsMax = 1024;
constexpr std::uint64_t kVocabulary = 128'000;

std::uint64_t Mix(std::uint64_t value) {  // splitmix64
  value += 0x9E3779B97F4A7C15ull;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

std::uint64_t Stamp(std::uint64_t session, std::uint64_t block_index) {
  return Mix(session * 0x100000001ull + block_index);
}

}  // namespace

absl::StatusOr<ModelSpec> BenchModel(std::uint64_t block_bytes) {
  ModelSpec spec;
  spec.name = "kvtrie-bench";
  spec.weights_revision = absl::StrCat("block-bytes-", block_bytes);
  spec.tokenizer_digest = "kvtrie-bench";
  spec.dtype = DType::kUint8;
  spec.block_tokens = kBenchBlockTokens;
  const std::uint64_t row_bytes = block_bytes / kBenchBlockTokens;
  for (std::uint64_t heads = 1; heads <= kKvHeadsMax && row_bytes > 0; ++heads) {
    if (row_bytes % heads != 0 || row_bytes / heads > 2 * kHeadDimMax) continue;
    LayerRun run;
    run.layer_count = 1;
    run.kv_heads = static_cast<std::uint32_t>(heads);
    run.v_head_dim = static_cast<std::uint32_t>(row_bytes / heads / 2);
    run.k_head_dim = static_cast<std::uint32_t>(row_bytes / heads - run.v_head_dim);
    spec.kv_groups = {{.layer_runs = {run}, .window_tokens = 0}};
    break;
  }
  if (block_bytes % kBenchBlockTokens != 0 || spec.kv_groups.empty() || !spec.Validate().ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("no model has blocks of ", block_bytes, " bytes"));
  }
  return spec;
}

std::vector<TokenId> BenchTokens(std::uint64_t seed, std::uint64_t session,
                                 std::size_t block_count) {
  std::mt19937_64 random(Mix(seed) ^ Mix(~session));
  std::vector<TokenId> tokens(block_count * kBenchBlockTokens);
  for (TokenId& token : tokens) token = static_cast<TokenId>(random() % kVocabulary);
  return tokens;
}

void FillIncompressible(std::span<std::byte> bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  while (!bytes.empty()) {
    const std::uint64_t value = random();
    const std::size_t count = std::min(bytes.size(), sizeof value);
    std::memcpy(bytes.data(), &value, count);
    bytes = bytes.subspan(count);
  }
}

void StampBlock(std::span<std::byte> block, std::uint64_t session, std::uint64_t block_index) {
  const std::uint64_t stamp = Stamp(session, block_index);
  StoreLittle(block.data(), stamp);
  StoreLittle(block.data() + block.size() - sizeof stamp, stamp);
}

bool HasStamp(std::span<const std::byte> block, std::uint64_t session, std::uint64_t block_index) {
  const std::uint64_t stamp = Stamp(session, block_index);
  return LoadLittle<std::uint64_t>(block.data()) == stamp &&
         LoadLittle<std::uint64_t>(block.data() + block.size() - sizeof stamp) == stamp;
}

}  // namespace kvtrie
