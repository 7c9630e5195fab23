#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "storage/base/byte_order.h"
#include "storage/base/byte_reader.h"
#include "storage/payload/payload_store.h"
#include "storage/payload/segment_store.h"

namespace kvtrie {

// A record whose payload is `payload`.
inline PayloadRecord MakeRecord(const std::string& payload,
                                const std::string& descriptor = "what it is") {
  PayloadRecord record(descriptor, payload.size());
  std::copy_n(reinterpret_cast<const std::byte*>(payload.data()), payload.size(),
              record.payload().begin());
  return record;
}

inline absl::StatusOr<std::vector<PayloadLocation>> AppendAll(PayloadStore& store,
                                                              std::vector<PayloadRecord>& records) {
  std::vector<PayloadRecord*> group;
  for (PayloadRecord& record : records) group.push_back(&record);
  return store.AppendGroup(group);
}

// Bytes that no other seed gives.
inline std::string RandomText(std::uint64_t seed, std::size_t bytes) {
  // splitmix64: tests make many of these.
  std::string text((bytes + 7) / 8 * 8, '\0');
  for (std::size_t at = 0; at < text.size(); at += 8) {
    std::uint64_t word = (seed << 32) + at * 0x9e3779b97f4a7c15;
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
    word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
    StoreLittle(text.data() + at, word ^ (word >> 31));
  }
  text.resize(bytes);
  return text;
}

inline std::string TextOf(const SharedBytes& bytes) { return std::string(AsText(bytes.view)); }

// Opens a store of which nothing has to be recovered, or whose records are all to be dropped.
inline std::unique_ptr<PayloadStore> OpenEmpty(FileSystem& file_system, const std::string& folder,
                                               const SegmentStoreOptions& options) {
  auto store = OpenSegmentStore(file_system, folder, options);
  EXPECT_TRUE(store.ok()) << store.status();
  if (!store.ok()) return nullptr;
  const auto stats = (*store)->FinishRecovery();
  EXPECT_TRUE(stats.ok()) << stats.status();
  return *std::move(store);
}

}  // namespace kvtrie
