// Layout of the file, little-endian, sealed (sealed_bytes.h), version 1:
//   u64 sync_count | u64 sequence | u32 file_count | per file: u16 name_bytes | name | u64 bytes |
//   u32 crc32c
#include "storage/meta/sync_record.h"

#include <algorithm>
#include <filesystem>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/byte_reader.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/kv/sealed_bytes.h"

namespace kvtrie {
namespace {

constexpr std::uint8_t kVersion = 1;
constexpr std::size_t kRecordBytesMax = std::size_t{1} << 20;
constexpr std::size_t kReadBytes = std::size_t{256} << 10;

std::string PathOf(const std::string& folder, const std::string& name) {
  return absl::StrCat(folder, "/", name);
}

// Takes in what lies between file.bytes and `end`, or the end of the file.
absl::Status Extend(File& opened, std::uint64_t end, SyncedFile& file) {
  std::vector<std::byte> buffer(kReadBytes);
  while (file.bytes < end) {
    const auto piece = std::span(buffer).first(
        static_cast<std::size_t>(std::min<std::uint64_t>(kReadBytes, end - file.bytes)));
    KV_ASSIGN_OR_RETURN(const std::size_t count, opened.Read(file.bytes, piece));
    file.crc32c = Crc32c(piece.first(count), file.crc32c);
    file.bytes += count;
    if (count < piece.size()) break;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<File>> OpenToRead(FileSystem& file_system, const std::string& path) {
  return file_system.Open(path, FileSystem::Mode::kReadOnly, /*direct=*/false);
}

}  // namespace

std::string SyncRecord::Encode() const {
  ByteWriter writer = StartSealed(kVersion);
  writer.Write(sync_count);
  writer.Write(sequence);
  writer.Write(static_cast<std::uint32_t>(files.size()));
  for (const SyncedFile& file : files) {
    writer.Write(static_cast<std::uint16_t>(file.name.size()));
    writer.WriteText(file.name);
    writer.Write(file.bytes);
    writer.Write(file.crc32c);
  }
  return Seal(std::move(writer));
}

absl::StatusOr<SyncRecord> SyncRecord::Decode(std::string_view bytes) {
  KV_ASSIGN_OR_RETURN(ByteReader reader, Unseal("sync record", kVersion, bytes));
  SyncRecord record;
  record.sync_count = reader.Read<std::uint64_t>();
  record.sequence = reader.Read<std::uint64_t>();
  const auto file_count = reader.Read<std::uint32_t>();
  for (std::uint32_t i = 0; i < file_count && reader.ok(); ++i) {
    SyncedFile& file = record.files.emplace_back();
    file.name = reader.ReadText(reader.Read<std::uint16_t>());
    file.bytes = reader.Read<std::uint64_t>();
    file.crc32c = reader.Read<std::uint32_t>();
  }
  if (!reader.Done()) return absl::DataLossError("sync record: wrong length");
  return record;
}

absl::StatusOr<std::optional<SyncRecord>> ReadSyncRecord(FileSystem& file_system,
                                                         const std::string& path) {
  auto file = OpenToRead(file_system, path);
  if (absl::IsNotFound(file.status())) return std::nullopt;
  KV_RETURN_IF_ERROR(file.status());
  KV_ASSIGN_OR_RETURN(const std::uint64_t size, (*file)->Size());
  if (size > kRecordBytesMax) return absl::DataLossError("sync record: too long");
  std::string bytes(static_cast<std::size_t>(size), '\0');
  KV_ASSIGN_OR_RETURN(const std::size_t count,
                      (*file)->Read(0, std::as_writable_bytes(std::span(bytes))));
  bytes.resize(count);
  KV_ASSIGN_OR_RETURN(SyncRecord record, SyncRecord::Decode(bytes));
  return record;
}

absl::Status WriteSyncRecord(FileSystem& file_system, const std::string& path,
                             const SyncRecord& record) {
  const std::string temporary = absl::StrCat(path, ".tmp");
  if (absl::Status status = file_system.Remove(temporary);
      !status.ok() && !absl::IsNotFound(status)) {
    return status;
  }
  {
    KV_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                        file_system.Open(temporary, FileSystem::Mode::kCreateNew,
                                         /*direct=*/false));
    KV_RETURN_IF_ERROR(file->Write(0, AsBytes(record.Encode())));
    KV_RETURN_IF_ERROR(file->SyncData());
  }
  KV_RETURN_IF_ERROR(file_system.Rename(temporary, path));
  return file_system.SyncFolder(std::filesystem::path(path).parent_path().string());
}

absl::Status CheckSyncedFile(FileSystem& file_system, const std::string& folder,
                             const SyncedFile& file) {
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<File> opened,
                      OpenToRead(file_system, PathOf(folder, file.name)));
  SyncedFile found{.name = file.name};
  KV_RETURN_IF_ERROR(Extend(*opened, file.bytes, found));
  if (found.bytes < file.bytes) {
    return absl::DataLossError(absl::StrCat(file.name, " has lost its end: ", found.bytes, " of ",
                                            file.bytes, " bytes are there"));
  }
  if (found.crc32c != file.crc32c) {
    return absl::DataLossError(absl::StrCat(file.name, " has changed since it was synced"));
  }
  return absl::OkStatus();
}

GrowingFiles::GrowingFiles(FileSystem& file_system, std::string folder, NameFilter is_growing)
    : file_system_(file_system), folder_(std::move(folder)), is_growing_(is_growing) {}

absl::StatusOr<std::vector<SyncedFile>> GrowingFiles::Sync() {
  KV_ASSIGN_OR_RETURN(const std::vector<std::string> names, file_system_.List(folder_));
  std::map<std::string, SyncedFile> synced;
  for (const std::string& name : names) {
    if (!is_growing_(name)) continue;
    const auto opened = OpenToRead(file_system_, PathOf(folder_, name));
    if (absl::IsNotFound(opened.status())) continue;
    KV_RETURN_IF_ERROR(opened.status());
    const auto known = synced_.find(name);
    SyncedFile file = known == synced_.end() ? SyncedFile{.name = name} : known->second;
    KV_ASSIGN_OR_RETURN(const std::uint64_t size, (*opened)->Size());
    if (known == synced_.end() || file.bytes < size) {
      KV_RETURN_IF_ERROR(Extend(**opened, size, file));
      KV_RETURN_IF_ERROR((*opened)->SyncData());
    }
    synced.emplace(name, std::move(file));
  }
  KV_RETURN_IF_ERROR(file_system_.SyncFolder(folder_));
  synced_ = std::move(synced);

  std::vector<SyncedFile> files;
  for (const auto& [name, file] : synced_) files.push_back(file);
  return files;
}

}  // namespace kvtrie
