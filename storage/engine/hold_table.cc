#include "storage/engine/hold_table.h"

#include <algorithm>
#include <utility>

namespace kvtrie {

void HoldTable::Take(Hold& hold) {
  Holders& holders = holders_[hold.ref];
  if (holders.count == 0) holders.serial = next_serial_++;
  ++holders.count;
  hold.serial = holders.serial;
}

bool HoldTable::IsCurrent(const Hold& hold) const {
  const auto holders = holders_.find(hold.ref);
  return holders != holders_.end() && holders->second.serial == hold.serial;
}

void HoldTable::Release(const Hold& hold) {
  if (!IsCurrent(hold)) return;
  const auto holders = holders_.find(hold.ref);
  if (--holders->second.count == 0) holders_.erase(holders);
}

std::vector<NodeRef> HoldTable::HeldNodes() const {
  std::vector<NodeRef> refs;
  refs.reserve(holders_.size());
  for (const auto& [ref, holders] : holders_) refs.push_back(ref);
  return refs;
}

void HoldTable::AddLease(const LeaseId& id, Lease lease) {
  for (Hold& hold : lease.holds) Take(hold);
  lease_ends_.emplace(lease.end, id);
  leases_.emplace(id, std::move(lease));
}

bool HoldTable::DropLease(TenantId tenant, const LeaseId& id) {
  const auto found = leases_.find(id);
  if (found == leases_.end() || found->second.tenant != tenant) return false;
  for (const Hold& hold : found->second.holds) Release(hold);
  auto [first, last] = lease_ends_.equal_range(found->second.end);
  const auto end = std::find_if(first, last, [&](const auto& entry) { return entry.second == id; });
  lease_ends_.erase(end);
  leases_.erase(found);
  return true;
}

std::size_t HoldTable::DropEndedLeases(Clock::Duration now) {
  std::size_t dropped = 0;
  while (!lease_ends_.empty() && lease_ends_.begin()->first <= now) {
    const LeaseId id = lease_ends_.begin()->second;
    DropLease(leases_.find(id)->second.tenant, id);
    ++dropped;
  }
  return dropped;
}

bool HoldTable::IsLeased(NodeRef ref) const {
  return std::any_of(leases_.begin(), leases_.end(), [&](const auto& entry) {
    const auto& holds = entry.second.holds;
    return std::any_of(holds.begin(), holds.end(),
                       [&](const Hold& hold) { return hold.ref == ref && IsCurrent(hold); });
  });
}

void HoldTable::AddPin(const PinId& id, Pin pin) {
  Take(pin.hold);
  pinned_bytes_ += pin.bytes;
  pins_.emplace(id, pin);
}

const HoldTable::Pin* HoldTable::FindPin(TenantId tenant, const PinId& id) const {
  const auto found = pins_.find(id);
  if (found == pins_.end() || found->second.tenant != tenant) return nullptr;
  return &found->second;
}

void HoldTable::DropPin(const PinId& id) {
  const auto found = pins_.find(id);
  if (found == pins_.end()) return;
  Release(found->second.hold);
  pinned_bytes_ -= found->second.bytes;
  pins_.erase(found);
}

std::vector<PinId> HoldTable::EndedPins(std::int64_t now_unix_seconds) const {
  std::vector<PinId> ended;
  for (const auto& [id, pin] : pins_) {
    if (pin.end_unix_seconds <= now_unix_seconds) ended.push_back(id);
  }
  return ended;
}

bool HoldTable::IsPinned(NodeRef ref) const { return !PinsOn(ref).empty(); }

std::vector<PinId> HoldTable::PinsOn(NodeRef ref) const {
  std::vector<PinId> ids;
  if (!IsHeld(ref)) return ids;
  for (const auto& [id, pin] : pins_) {
    if (pin.hold.ref == ref && IsCurrent(pin.hold)) ids.push_back(id);
  }
  return ids;
}

}  // namespace kvtrie
