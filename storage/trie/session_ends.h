#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/node_hash_map.h"
#include "absl/status/status.h"
#include "storage/kv/ids.h"
#include "storage/trie/ref_table.h"

namespace kvtrie {

// Where in the trie named sessions end. What rows say of it (meta_keys.h) leads from the name to
// the node; this leads back.
//
// About 130 bytes and the name per session; at most kNamesPerEndMax for one node, the latest to be
// named. Not thread-safe; const methods are, beside one another.
class SessionEnds {
 public:
  static constexpr std::size_t kNamesPerEndMax = 16;

  // The session ends at `end` from now on, wherever it ended before.
  void Set(TenantId tenant, std::string_view session, NodeRef end);
  void Remove(TenantId tenant, std::string_view session);
  // The node goes, and with it the ends of all that end there.
  void RemoveAt(NodeRef end);

  // 0: not known, or one name too many at its node.
  NodeRef EndOf(TenantId tenant, std::string_view session) const;
  bool IsEnd(NodeRef ref) const { return by_end_.contains(ref); }
  // The latest to be named first.
  std::vector<std::string> SessionsAt(NodeRef end) const;

  std::size_t size() const { return sessions_.size(); }
  std::size_t memory_bytes() const { return sessions_.size() * kSessionBytes + name_bytes_; }

  // Both directions say the same. Internal names the first fault.
  absl::Status CheckInvariants() const;

 private:
  static constexpr std::size_t kSessionBytes = 130;

  struct Session;
  using Sessions = absl::node_hash_map<std::string, Session>;  // by tenant and name
  struct Session {
    NodeRef end = 0;
    std::pair<const std::string, Session>* next = nullptr;  // that ends there too
  };
  using Named = std::pair<const std::string, Session>;

  static std::string KeyOf(TenantId tenant, std::string_view session);
  void Unlink(Named* named);
  void Erase(Named* named);

  Sessions sessions_;
  absl::flat_hash_map<NodeRef, Named*> by_end_;
  std::size_t name_bytes_ = 0;
};

}  // namespace kvtrie
