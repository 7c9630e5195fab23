#include "storage/trie/session_ends.h"

#include <utility>

#include "storage/base/check.h"

namespace kvtrie {
namespace {

constexpr std::size_t kTenantBytes = sizeof(TenantId::value);

}  // namespace

std::string SessionEnds::KeyOf(TenantId tenant, std::string_view session) {
  std::string key(reinterpret_cast<const char*>(&tenant.value), kTenantBytes);
  key.append(session);
  return key;
}

void SessionEnds::Unlink(Named* named) {
  const auto head = by_end_.find(named->second.end);
  KV_CHECK(head != by_end_.end());
  Named** link = &head->second;
  while (*link != named) link = &(*link)->second.next;
  *link = named->second.next;
  if (head->second == nullptr) by_end_.erase(head);
}

void SessionEnds::Erase(Named* named) {
  name_bytes_ -= named->first.size();
  sessions_.erase(sessions_.find(named->first));
}

void SessionEnds::Set(TenantId tenant, std::string_view session, NodeRef end) {
  KV_CHECK(end != 0);
  const auto [found, is_new] = sessions_.try_emplace(KeyOf(tenant, session));
  Named* const named = &*found;
  if (is_new) {
    name_bytes_ += named->first.size();
  } else {
    if (named->second.end == end) return;
    Unlink(named);
  }
  Named*& head = by_end_[end];
  named->second = {end, head};
  head = named;
  Named* last = head;
  for (std::size_t kept = 1; kept < kNamesPerEndMax && last != nullptr; ++kept) {
    last = last->second.next;
  }
  if (last == nullptr || last->second.next == nullptr) return;
  Erase(std::exchange(last->second.next, nullptr));
}

void SessionEnds::Remove(TenantId tenant, std::string_view session) {
  const auto found = sessions_.find(KeyOf(tenant, session));
  if (found == sessions_.end()) return;
  Unlink(&*found);
  Erase(&*found);
}

void SessionEnds::RemoveAt(NodeRef end) {
  const auto head = by_end_.find(end);
  if (head == by_end_.end()) return;
  Named* named = head->second;
  by_end_.erase(head);
  while (named != nullptr) Erase(std::exchange(named, named->second.next));
}

NodeRef SessionEnds::EndOf(TenantId tenant, std::string_view session) const {
  const auto found = sessions_.find(KeyOf(tenant, session));
  return found == sessions_.end() ? 0 : found->second.end;
}

std::vector<std::string> SessionEnds::SessionsAt(NodeRef end) const {
  std::vector<std::string> names;
  const auto head = by_end_.find(end);
  if (head == by_end_.end()) return names;
  for (const Named* named = head->second; named != nullptr; named = named->second.next) {
    names.push_back(named->first.substr(kTenantBytes));
  }
  return names;
}

absl::Status SessionEnds::CheckInvariants() const {
  std::size_t linked = 0;
  for (const auto& [end, head] : by_end_) {
    std::size_t here = 0;
    for (const Named* named = head; named != nullptr; named = named->second.next) {
      if (named->second.end != end) return absl::InternalError("session ends: a wrong list");
      if (++here > kNamesPerEndMax) return absl::InternalError("session ends: too many at a node");
    }
    if (here == 0) return absl::InternalError("session ends: an empty list");
    linked += here;
  }
  if (linked != sessions_.size())
    return absl::InternalError("session ends: a session is in no list");
  return absl::OkStatus();
}

}  // namespace kvtrie
