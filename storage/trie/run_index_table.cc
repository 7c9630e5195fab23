#include "storage/trie/run_index_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"

namespace kvtrie {
namespace {

// Slots looked at for each entry that was removed: a table of which all is removed is swept whole
// before the last one goes.
constexpr std::size_t kSweepPace = 4;

// Part of the slots that a part gains when it grows, at least: less would be spent on moving.
constexpr std::size_t kGrowthParts = 8;

}  // namespace

RunIndexTable::RunIndexTable(std::size_t limit_bytes)
    : limit_bytes_(limit_bytes), parts_(std::size_t{1} << kPartBits) {}

std::size_t RunIndexTable::memory_bytes() const {
  return parts_.capacity() * sizeof(Part) + slot_count_ * sizeof(std::uint64_t) +
         generations_.capacity();
}

void RunIndexTable::Place(Part* part, std::uint64_t slot) {
  std::size_t at = Home(*part, slot >> kCheckShift);
  while (part->slots[at] != 0) at = Next(*part, at);
  part->slots[at] = slot;
  ++part->used;
}

// Leaves out what is stale. With room for `more`, as far as the limit allows; without, the part
// does not grow.
void RunIndexTable::Rebuild(Part* part, std::size_t more) {
  std::vector<std::uint64_t> kept;
  kept.reserve(part->used);
  for (const std::uint64_t slot : part->slots) {
    if (slot != 0 && !IsStale(slot)) kept.push_back(slot);
  }
  const std::size_t count = kept.size() + more;
  std::size_t slots = count == 0 ? 0 : std::max(kSlotsMin, (count * 8 + 4) / 5);
  if (more == 0) slots = std::min(slots, part->slots.size());
  if (slots > part->slots.size()) {
    const std::size_t used_bytes = memory_bytes();
    const std::size_t room =
        used_bytes >= limit_bytes_ ? 0 : (limit_bytes_ - used_bytes) / sizeof(std::uint64_t);
    slots = std::min(slots, part->slots.size() + room);
  }
  slot_count_ += slots;
  slot_count_ -= part->slots.size();
  size_ -= part->used;
  size_ += kept.size();
  part->slots = std::vector<std::uint64_t>(slots);
  part->used = 0;
  part->hand = 0;
  for (const std::uint64_t slot : kept) Place(part, slot);
}

void RunIndexTable::Erase(Part* part, std::size_t at) {
  // What was pushed behind this slot moves up.
  const std::size_t slots = part->slots.size();
  const auto distance = [slots](std::size_t from, std::size_t to) {
    return to >= from ? to - from : to + slots - from;
  };
  std::size_t hole = at;
  for (std::size_t next = Next(*part, at); part->slots[next] != 0; next = Next(*part, next)) {
    const std::size_t home = Home(*part, part->slots[next] >> kCheckShift);
    if (distance(home, next) < distance(hole, next)) continue;
    part->slots[hole] = part->slots[next];
    hole = next;
  }
  part->slots[hole] = 0;
  --part->used;
  --size_;
}

bool RunIndexTable::MakeRoom(Part* part) {
  const std::size_t used_bytes = memory_bytes();
  const std::size_t growth = std::max(kSlotsMin, part->slots.size() / kGrowthParts);
  if (used_bytes + growth * sizeof(std::uint64_t) <= limit_bytes_) Rebuild(part, 1);
  if (!IsFull(*part)) return true;
  if (part->used == 0) return false;
  // Two rounds at most: the first one spares whom it meets.
  while (true) {
    if (part->hand >= part->slots.size()) part->hand = 0;
    std::uint64_t& slot = part->slots[part->hand];
    if (slot != 0) {
      if (IsStale(slot)) {
        Erase(part, part->hand);
        return true;
      }
      if ((slot & kUsedBit) == 0) {
        Erase(part, part->hand);
        ++forgotten_total_;
        return true;
      }
      slot &= ~kUsedBit;
    }
    ++part->hand;
  }
}

void RunIndexTable::Insert(std::uint64_t hash, NodeRef ref) {
  KV_CHECK(ref != 0 && ref < kUsedBit);
  if (limit_bytes_ == 0) return;
  if (ref >= generations_.size()) {
    const std::size_t size = std::size_t{ref} + 1;
    if (size > generations_.capacity()) {
      generations_.reserve(std::max(size, generations_.size() + generations_.size() / 4));
    }
    generations_.resize(size);
  }
  Part& part = parts_[PartOf(hash)];
  const std::uint64_t check = CheckOf(hash);
  const std::uint64_t added =
      check << kCheckShift | std::uint64_t{generations_[ref]} << kGenerationShift | ref;
  if (!part.slots.empty()) {
    std::size_t places = 0;
    std::uint64_t* stale = nullptr;
    for (std::size_t at = Home(part, check); part.slots[at] != 0; at = Next(part, at)) {
      std::uint64_t& slot = part.slots[at];
      if (slot >> kCheckShift != check) continue;
      if (IsStale(slot)) {
        stale = &slot;
        continue;
      }
      if (RefOf(slot) == ref) return;
      ++places;
    }
    if (places >= kPlacesMax) {
      ++crowded_total_;
      return;
    }
    if (stale != nullptr) {
      *stale = added;
      return;
    }
  }
  if (IsFull(part) && !MakeRoom(&part)) {
    ++forgotten_total_;
    return;
  }
  Place(&part, added);
  ++size_;
}

void RunIndexTable::Remove(NodeRef ref, std::size_t entry_count) {
  if (ref >= generations_.size()) return;  // nothing was inserted of it
  ++generations_[ref];
  sweep_debt_ += entry_count * kSweepPace;
  while (sweep_debt_ > parts_[sweep_part_].slots.size()) {
    sweep_debt_ -= parts_[sweep_part_].slots.size() + 1;
    Rebuild(&parts_[sweep_part_], 0);
    sweep_part_ = (sweep_part_ + 1) % parts_.size();
  }
}

absl::Status RunIndexTable::CheckInvariants(const std::function<bool(NodeRef)>& is_alive) const {
  std::size_t slot_count = 0;
  std::size_t size = 0;
  for (const Part& part : parts_) {
    slot_count += part.slots.size();
    size += part.used;
    std::size_t used = 0;
    for (std::size_t i = 0; i < part.slots.size(); ++i) {
      const std::uint64_t slot = part.slots[i];
      if (slot == 0) continue;
      ++used;
      for (std::size_t at = Home(part, slot >> kCheckShift); at != i; at = Next(part, at)) {
        if (part.slots[at] == 0) return absl::InternalError("run index: an entry is not found");
      }
      if (!IsStale(slot) && !is_alive(RefOf(slot))) {
        return absl::InternalError(
            absl::StrCat("run index: names trie node ", RefOf(slot), ", which is gone"));
      }
    }
    if (used != part.used) return absl::InternalError("run index: the count of a part is off");
    if (used != 0 && used >= part.slots.size()) {
      return absl::InternalError("run index: a part has no empty slot");
    }
  }
  if (slot_count != slot_count_ || size != size_) {
    return absl::InternalError("run index: the counts of all parts are off");
  }
  return absl::OkStatus();
}

}  // namespace kvtrie
