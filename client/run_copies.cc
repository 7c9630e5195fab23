#include "client/run_copies.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

absl::Status CheckRun(const v1::ReusableRun& run, std::uint64_t end_before,
                      std::uint64_t token_count, std::uint32_t block_tokens) {
  const std::uint64_t first = run.first_token();
  const std::uint64_t blocks =
      (std::uint64_t{run.node_offset()} + run.token_count() + block_tokens - 1) / block_tokens;
  if (run.token_count() == 0 || first < end_before || first + run.token_count() > token_count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tokens ", first, " and ", run.token_count(),
        " more: runs ascend, apart from each other, within the ", token_count, " of the target"));
  }
  if (run.node_offset() >= block_tokens ||
      run.first_position() % block_tokens != run.node_offset()) {
    return absl::InvalidArgumentError(absl::StrCat("node_offset: ", run.node_offset(),
                                                   " is not where position ", run.first_position(),
                                                   " lies in a block of ", block_tokens));
  }
  if (run.node_ids().size() != blocks * TrieNodeId::kBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "node_ids: ", run.node_ids().size(), " bytes; its tokens lie in ", blocks, " blocks"));
  }
  return absl::OkStatus();
}

}  // namespace

RunCopies::RunCopies(const ModelSpec& spec, const RunsTarget& target)
    : block_tokens_(spec.block_tokens), target_(target) {
  report_.reused.resize(target.tokens.size());
}

absl::StatusOr<RunCopies> RunCopies::Plan(
    const ModelSpec& spec, const google::protobuf::RepeatedPtrField<v1::ReusableRun>& runs,
    const RunsTarget& target, std::uint32_t skip_tokens) {
  KV_RETURN_IF_ERROR(RopeShift::Check(spec));
  if (skip_tokens > kSkipTokensMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("skip_tokens: ", skip_tokens, "; 0 to ", kSkipTokensMax, " are allowed"));
  }
  const std::size_t block_bytes = KvGeometry(spec).raw_block_bytes();
  for (const std::span<std::byte> block : target.blocks) {
    if (!block.empty() && block.size() != block_bytes) {
      return absl::InvalidArgumentError(absl::StrCat("blocks: memory of ", block.size(),
                                                     " bytes; a raw block has ", block_bytes));
    }
  }
  RunCopies copies(spec, target);
  const std::uint32_t block_tokens = spec.block_tokens;
  std::uint64_t end = 0;
  for (int i = 0; i < runs.size(); ++i) {
    const v1::ReusableRun& run = runs[i];
    if (absl::Status checked = CheckRun(run, end, target.tokens.size(), block_tokens);
        !checked.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("reusable_runs[", i, "].", std::string(checked.message())));
    }
    end = std::uint64_t{run.first_token()} + run.token_count();
    copies.report_.runs.emplace_back();
    copies.shifts_.emplace_back(spec, std::int64_t{run.first_token()} - run.first_position());
    const std::size_t block_count = run.node_ids().size() / TrieNodeId::kBytes;
    for (std::size_t block = 0; block < block_count; ++block) {
      // The block's tokens, as places in the prompt; the first ones may lie before it.
      const std::int64_t block_begin = std::int64_t{run.first_token()} - run.node_offset() +
                                       static_cast<std::int64_t>(block * block_tokens);
      const std::int64_t block_end = block_begin + block_tokens;
      const std::int64_t begin =
          std::max(block_begin, std::int64_t{run.first_token()} + skip_tokens);
      const std::int64_t stop = std::min(block_end, static_cast<std::int64_t>(end));
      if (begin >= stop) continue;
      Source source;
      source.run = static_cast<std::size_t>(i);
      source.node = *TrieNodeId::FromBytes(
          std::string_view(run.node_ids()).substr(block * TrieNodeId::kBytes, TrieNodeId::kBytes));
      if (block_begin >= run.first_token() && block_end <= static_cast<std::int64_t>(end)) {
        source.tokens = target.tokens.subspan(static_cast<std::size_t>(block_begin), block_tokens);
      }
      source.first_position = run.first_position() - run.node_offset() +
                              static_cast<std::uint32_t>(block * block_tokens);
      source.offset = static_cast<std::uint32_t>(begin - block_begin);
      source.token_count = static_cast<std::uint32_t>(stop - begin);
      source.first_token = static_cast<std::uint32_t>(begin);
      if (copies.MemoryOf(source.first_token).empty() &&
          copies.MemoryOf(source.first_token + source.token_count - 1).empty()) {
        continue;  // it lies in two blocks at most
      }
      copies.sources_.push_back(source);
    }
  }
  return copies;
}

std::span<std::byte> RunCopies::MemoryOf(std::uint32_t token) const {
  const std::uint32_t block = token / block_tokens_;
  if (block < target_.first_block || block - target_.first_block >= target_.blocks.size())
    return {};
  return target_.blocks[block - target_.first_block];
}

void RunCopies::Take(std::size_t source, const FetchedBlock& fetched,
                     std::span<const std::byte> raw) {
  const Source& from = sources_[source];
  FetchedRun& run = report_.runs[from.run];
  if (!fetched.loaded()) {
    if (run.status.ok()) run.status = fetched.status;
    return;
  }
  run.source_quality = LowerOf(run.source_quality, fetched.quality);
  std::uint32_t count = 0;
  for (std::uint32_t done = 0; done < from.token_count; done += count) {
    const std::uint32_t token = from.first_token + done;
    count = std::min(from.token_count - done, block_tokens_ - token % block_tokens_);
    const std::span<std::byte> to = MemoryOf(token);
    if (to.empty()) continue;
    const std::vector<std::uint32_t> left_out =
        shifts_[from.run].Copy(raw, from.offset + done, to, token % block_tokens_, count);
    for (std::uint32_t i = 0; i < count; ++i) {
      if (std::binary_search(left_out.begin(), left_out.end(), i)) continue;
      report_.reused[token + i] = true;
      ++report_.reused_tokens;
      ++run.reused_tokens;
    }
    if (!left_out.empty() && run.status.ok()) {
      run.status = absl::DataLossError("K of a token has no finite number, and cannot be moved");
    }
  }
}

RunsReport RunCopies::TakeReport() {
  const auto first = std::find(report_.reused.begin(), report_.reused.end(), true);
  if (first != report_.reused.end()) {
    report_.first_reused_block =
        static_cast<std::uint32_t>(first - report_.reused.begin()) / block_tokens_;
  }
  return std::move(report_);
}

}  // namespace kvtrie
