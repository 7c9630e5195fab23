#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "storage/engine/engine_core.h"
#include "storage/meta/meta_keys.h"

namespace kvtrie {
namespace {

bool IsInIndex(const NodeRow& row, const IndexNode& node) {
  const NodeFrames frames = FramesOf(row);
  return frames.frame == node.frame && frames.quality == node.quality() &&
         frames.codec == node.codec() && frames.other_quality.has_value() == node.has_other() &&
         (!node.has_other() || *frames.other_quality == node.other_quality());
}

// What the comparison of rows says at most: all of it is one answer.
constexpr std::uint64_t kFindingsMax = 10'000;

}  // namespace

absl::Status Engine::Core::Verify(bool structure_only, bool repair,
                                  const std::function<bool(const VerifyProgress&)>& report) {
  VerifyProgress progress;
  absl::Time told = absl::Now();
  const auto tell = [&](bool now_or_never) {
    if (!now_or_never && absl::Now() - told < absl::Seconds(1)) return true;
    told = absl::Now();
    const bool go_on = report(progress);
    progress.findings.clear();
    return go_on;
  };

  // The trie in memory against itself, and against its rows. Changes stand still meanwhile.
  {
    std::uint64_t count = 0;
    const auto found = [&](VerifyFinding finding) {
      if (++count <= kFindingsMax) progress.findings.push_back(std::move(finding));
    };
    absl::MutexLock change(&change_mutex_);
    absl::ReaderMutexLock lock(&index_mutex_);
    progress.nodes_total = index_.node_count();
    if (const absl::Status status = index_.CheckInvariants(); !status.ok()) {
      found({TrieNodeId{}, std::string(status.message())});
    }
    const absl::Status runs = runs_->table().CheckInvariants(
        [this](NodeRef ref) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) { return index_.alive(ref); });
    for (const absl::Status& status :
         {runs, session_ends_.CheckInvariants(), groups_.CheckInvariants()}) {
      if (!status.ok()) {
        found({TrieNodeId{}, std::string(status.message())});
      }
    }
    std::uint64_t row_count = 0;
    FrameCensus census;
    ReferenceCounts references;
    const absl::Status scanned = meta_->Scan(
        MetaTable::kNodes, "", "",
        [&](std::string_view key, std::string_view value) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
          ++row_count;
          const auto row_key = NodeRowKey::Decode(key);
          const auto row = NodeRow::Decode(value);
          if (!row_key || !row.ok()) {
            found({TrieNodeId{}, "a row is damaged"});
            return true;
          }
          const NodeRef ref = index_.FindById(row_key->node);
          if (ref == 0) {
            found({row_key->node, "a row without a node in the index"});
            return true;
          }
          const IndexNode& node = index_.node(ref);
          for (const RungRow& rung : row->rungs) {
            census.Add(node.model, rung);
            references.Add(row_key->node, rung.references);
            for (const RungReference& reference : rung.references) {
              const NodeRef named = index_.FindById(reference.node);
              if (named == 0 || index_.node(named).model != node.model ||
                  !index_.node(named).quality_on(reference.rung)) {
                found(
                    {row_key->node, absl::StrCat("was coded against block ", reference.node.ToHex(),
                                                 ", which is not stored")});
              } else if (references_.IsMember(reference.node)) {
                found({row_key->node, "was coded against one that was too"});
              }
            }
          }
          const NodeRef parent = index_.parent(ref);
          if (!IsInIndex(*row, node) || row->depth != node.depth ||
              row->parent != (parent == 0 ? TrieNodeId{} : index_.node(parent).id)) {
            found({row_key->node, "row and index differ"});
          }
          return true;
        });
    if (!scanned.ok()) found({TrieNodeId{}, scanned.ToString()});
    if (row_count != index_.node_count()) {
      found({TrieNodeId{}, absl::StrCat(row_count, " rows for ", index_.node_count(), " nodes")});
    }
    if (!(census == census_)) {
      found({TrieNodeId{}, "the sums of frames are not those of the rows"});
    }
    if (!(references == references_)) {
      found({TrieNodeId{}, "the counts of references are not the rows'"});
    }
    for (const auto& [id, frames] : census.profiles()) {
      if (profiles_->Find(id)) continue;
      found({TrieNodeId{}, absl::StrCat(frames, " frames name the profile ", id.ToHex(),
                                        ", which is not stored; put it again")});
    }
    if (count > kFindingsMax) {
      progress.findings.push_back(
          {TrieNodeId{}, absl::StrCat(count - kFindingsMax, " more of these")});
    }
  }
  if (!tell(true)) return absl::CancelledError("verify: stopped");

  // Every profile and every frame, read from the disk.
  for (const ProfileInfo& profile : profiles_->List()) {
    if (structure_only) break;
    const absl::Status bad = profiles_->OpenToRead(profile.id).status();
    if (absl::IsDataLoss(bad)) {
      progress.findings.push_back({TrieNodeId{}, std::string(bad.message())});
    }
    if (!tell(false)) return absl::CancelledError("verify: stopped");
  }
  if (structure_only) progress.nodes_checked = progress.nodes_total;
  for (NodeRef ref = 1; !structure_only; ++ref) {
    std::vector<StoredFrame> frames;
    TenantId tenant;
    bool has_other;
    {
      absl::ReaderMutexLock lock(&index_mutex_);
      if (ref >= index_.ref_end()) break;
      if (!index_.alive(ref) || !index_.node(ref).has_frame()) continue;
      const IndexNode& node = index_.node(ref);
      frames.push_back(FrameInIndex(node));
      has_other = node.has_other();
      tenant = index_.model(node.model).tenant;
    }
    if (has_other) {
      const auto row = ReadRow(tenant, frames.front().node);
      for (const RungRow& rung : row.ok() ? row->rungs : std::vector<RungRow>()) {
        if (LocationOf(rung) == frames.front().at) continue;
        frames.push_back(
            FrameInRow(frames.front().node, *row, rung, frames.front().raw_frame_bytes));
      }
    }
    for (const StoredFrame& frame : frames) {
      const absl::Status bad = LoadFrame(frame).status();
      if (!bad.ok() && IsCurrent(frame)) {
        progress.findings.push_back({frame.node, std::string(bad.message())});
        if (absl::IsDataLoss(bad)) {
          counters_.corrupt_frames.fetch_add(1, std::memory_order_relaxed);
          if (repair) DropDamagedFrame(frame);
        }
      }
      progress.bytes_read += frame.at.record_bytes;
    }
    ++progress.nodes_checked;
    if (!tell(false)) return absl::CancelledError("verify: stopped");
  }
  progress.done = true;
  tell(true);
  return absl::OkStatus();
}

}  // namespace kvtrie
