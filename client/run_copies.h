#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/fetch_types.h"
#include "client/reuse_types.h"
#include "kvtrie/v1/cache.pb.h"
#include "storage/codec/rope_shift.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// The runs of one lookup on their way from source blocks into a prompt's blocks: which source
// blocks are needed, and the copy of each at its new position. Not thread-safe.
class RunCopies {
 public:
  // A stored block to fetch.
  struct Source {
    std::size_t run = 0;
    TrieNodeId node;
    // Of the block, where the prompt says all of them; else empty, and only the server can decode.
    std::span<const TokenId> tokens;
    std::uint32_t first_position = 0;  // in its own session
    // Its tokens [offset, offset + token_count) are those of the prompt from first_token on.
    std::uint32_t offset = 0;
    std::uint32_t token_count = 0;
    std::uint32_t first_token = 0;
  };

  // `spec` and what `target` points to outlive it. InvalidArgument names what of the runs, the
  // target or skip_tokens is wrong. FailedPrecondition: KV of this model cannot be moved.
  static absl::StatusOr<RunCopies> Plan(
      const ModelSpec& spec, const google::protobuf::RepeatedPtrField<v1::ReusableRun>& runs,
      const RunsTarget& target, std::uint32_t skip_tokens);

  std::span<const Source> sources() const { return sources_; }

  // The raw KV of a source has come, or `fetched` says why not.
  void Take(std::size_t source, const FetchedBlock& fetched, std::span<const std::byte> raw);

  // Once; the object is of no use then.
  RunsReport TakeReport();

 private:
  RunCopies(const ModelSpec& spec, const RunsTarget& target);

  // Tokens that lie in one block of the prompt, for which there is memory.
  std::span<std::byte> MemoryOf(std::uint32_t token) const;

  std::uint32_t block_tokens_;
  RunsTarget target_;
  std::vector<Source> sources_;
  std::vector<RopeShift> shifts_;  // by run
  RunsReport report_;
};

}  // namespace kvtrie
