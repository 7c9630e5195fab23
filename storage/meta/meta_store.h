#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/kv/ids.h"

namespace kvtrie {

// Tables of row keys; each is a column family in RocksDB. The rows of each are in meta_keys.h.
enum class MetaTable : std::uint8_t {
  kStore = 0,
  kModels = 1,
  kNodes = 2,
  kSessions = 3,
  kPins = 4
};
inline constexpr std::size_t kMetaTableCount = 5;

// Changes that are applied together or not at all. All rows belong to one tenant: that is the unit
// within which a store promises atomicity.
class MetaBatch {
 public:
  struct Change {
    MetaTable table;
    std::string row_key;
    std::optional<std::string> row_value;  // nullopt: delete
  };

  explicit MetaBatch(TenantId tenant) : tenant_(tenant) {}

  void Put(MetaTable table, std::string row_key, std::string row_value) {
    changes_.push_back({table, std::move(row_key), std::move(row_value)});
  }
  void Delete(MetaTable table, std::string row_key) {
    changes_.push_back({table, std::move(row_key), std::nullopt});
  }

  TenantId tenant() const { return tenant_; }
  const std::vector<Change>& changes() const { return changes_; }
  bool empty() const { return changes_.empty(); }

 private:
  TenantId tenant_;
  std::vector<Change> changes_;
};

// Ordered rows with atomic batches. Row keys come from meta_keys.h, which nobody else builds.
// Thread-safe. Errors of all calls: DataLoss when stored bytes fail their check; ResourceExhausted
// when the disk is full (writes work again once there is space, without a restart); Unavailable
// else.
class MetaStore {
 public:
  virtual ~MetaStore() = default;

  virtual absl::StatusOr<std::optional<std::string>> Get(MetaTable table,
                                                         std::string_view row_key) const = 0;

  // Rows whose key starts with `prefix`, in order, from the first key >= `from` on (or from the
  // start), until `visit` returns false.
  using RowVisitor = std::function<bool(std::string_view row_key, std::string_view row_value)>;
  virtual absl::Status Scan(MetaTable table, std::string_view prefix, std::string_view from,
                            const RowVisitor& visit) const = 0;

  // Applied on return, and with the operating system: survives the end of this process.
  virtual absl::Status Write(const MetaBatch& batch) = 0;

  // All batches written before are durable on OK.
  virtual absl::Status Sync() = 0;

  // What `du` shows of the store.
  virtual std::uint64_t DiskBytes() const = 0;
};

}  // namespace kvtrie
