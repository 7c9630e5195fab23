#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// The synthetic sessions that `kvtrie bench` writes and reads. Everything follows from (seed,
// session): a second process knows what a first one stored.
inline constexpr std::uint32_t kBenchBlockTokens = 16;

// A model whose raw block has exactly `block_bytes`: any power of two from 32 bytes to 64 MiB, and
// what else is a product of allowed sizes. InvalidArgument: there is none.
absl::StatusOr<ModelSpec> BenchModel(std::uint64_t block_bytes);

// Tokens of `block_count` blocks of a session.
std::vector<TokenId> BenchTokens(std::uint64_t seed, std::uint64_t session,
                                 std::size_t block_count);

// Bytes that no compressor makes smaller.
void FillIncompressible(std::span<std::byte> bytes, std::uint64_t seed);

// Both ends of a block say which one it is: shows that the right block came back whole.
void StampBlock(std::span<std::byte> block, std::uint64_t session, std::uint64_t block_index);
bool HasStamp(std::span<const std::byte> block, std::uint64_t session, std::uint64_t block_index);

}  // namespace kvtrie
