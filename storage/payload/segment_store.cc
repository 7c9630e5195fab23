#include "storage/payload/segment_store.h"

#include <algorithm>
#include <charconv>
#include <list>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/file_system.h"
#include "storage/base/status_macros.h"
#include "storage/payload/segment_format.h"
#include "storage/payload/unit_bitmap.h"

namespace kvtrie {
namespace {

constexpr std::uint64_t kPageBytes = PayloadLocation::kPageBytes;
constexpr std::uint64_t kUnitBytes = PayloadLocation::kUnitBytes;
constexpr std::uint64_t kUnitsPerPage = PayloadLocation::kUnitsPerPage;
// A place within counts units in 32 bits.
constexpr std::uint64_t kSegmentBytesMax = std::uint64_t{1} << 40;
constexpr std::uint64_t kGroupBytesMax = std::uint64_t{1} << 32;
// Beyond, the file that was used longest ago is closed.
constexpr std::size_t kOpenFilesMax = 512;

constexpr char kStoreFile[] = "STORE";
constexpr char kStoreFileInMaking[] = "STORE.tmp";

std::uint64_t RoundUpToPages(std::uint64_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

std::uint64_t RoundDownToPages(std::uint64_t bytes) { return bytes / kPageBytes * kPageBytes; }

std::string SegmentName(std::uint32_t number) { return absl::StrFormat("seg-%08u", number); }

std::optional<std::uint32_t> SegmentNumber(const std::string& name) {
  constexpr std::string_view kPrefix = "seg-";
  std::uint32_t number = 0;
  if (!name.starts_with(kPrefix)) return std::nullopt;
  std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), number);
  // Numbers have one spelling; every other file is a foreign one.
  if (number == 0 || SegmentName(number) != name) return std::nullopt;
  return number;
}

std::uint64_t OffsetOf(const PayloadLocation& at) { return at.offset_units * kUnitBytes; }

UnitBitmap::Range UnitsOf(const PayloadLocation& at) {
  return {at.offset_units, at.offset_units + at.disk_bytes() / kUnitBytes};
}

// Bytes of a file.
struct Extent {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// The whole pages within a range of dead units.
Extent PagesWithin(const UnitBitmap::Range& units) {
  const std::uint64_t first = (units.first + kUnitsPerPage - 1) / kUnitsPerPage;
  const std::uint64_t end = std::max(first, units.end / kUnitsPerPage);
  return {first * kPageBytes, (end - first) * kPageBytes};
}

// The pages of a range of units that just died, those that it shares with other records only if
// these are dead as well: so the last record of a page takes it along, and no other one does.
Extent DeadPages(const UnitBitmap& live_units, const UnitBitmap::Range& units) {
  UnitBitmap::Range dead = {units.first / kUnitsPerPage * kUnitsPerPage,
                            (units.end + kUnitsPerPage - 1) / kUnitsPerPage * kUnitsPerPage};
  if (live_units.HoldsAny({dead.first, units.first})) dead.first = units.first;
  if (live_units.HoldsAny({units.end, dead.end})) dead.end = units.end;
  return PagesWithin(dead);
}

std::uint64_t NewStoreId() {
  std::random_device random;
  std::uint64_t id = 0;
  while (id == 0) id = (std::uint64_t{random()} << 32) | random();
  return id;
}

// A segment file. All but the constants is guarded by the store's mutex_ (before FinishRecovery one
// thread has it all).
struct Segment {
  Segment(std::uint32_t segment_number, std::string file_path)
      : number(segment_number), path(std::move(file_path)) {}

  const std::uint32_t number;
  const std::string path;

  std::shared_ptr<File> file;  // null while closed
  std::list<Segment*>::iterator place_in_open_files;

  std::uint64_t end = kPageBytes;  // records lie below
  std::uint64_t allocated_bytes = 0;
  std::uint64_t live_bytes = 0;
  UnitBitmap live_units;
  std::uint32_t writes_in_flight = 0;
  std::uint32_t punches_in_flight = 0;
  bool header_intact = true;
  bool sealed = false;   // takes no more records
  bool dirty = false;    // holds records that were not synced
  bool removed = false;  // no longer in the table
};

class SegmentStore final : public PayloadStore {
 public:
  SegmentStore(FileSystem& file_system, std::string folder, const SegmentStoreOptions& options)
      : file_system_(file_system),
        folder_(std::move(folder)),
        segment_bytes_(
            std::clamp(RoundUpToPages(options.segment_bytes), 2 * kPageBytes, kSegmentBytesMax)),
        allocate_ahead_bytes_(RoundUpToPages(options.allocate_ahead_bytes)) {}

  ~SegmentStore() override;

  absl::Status Load();

  absl::Status MarkLive(const PayloadLocation& at) override;
  absl::StatusOr<PayloadRecoveryStats> FinishRecovery() override;
  absl::Status Scan(const RecordVisitor& visit) override;
  absl::StatusOr<std::vector<PayloadLocation>> AppendGroup(
      std::span<PayloadRecord* const> records) override;
  absl::StatusOr<StoredPayload> Read(const PayloadLocation& at) override;
  void Free(const PayloadLocation& at) override;
  absl::Status Sync() override;
  PayloadUsage Usage() const override;

 private:
  using SegmentPtr = std::shared_ptr<Segment>;

  struct Reservation {
    SegmentPtr segment;
    std::shared_ptr<File> file;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    bool allocated = false;  // disk space was taken before the write
  };

  // The segment that takes records.
  struct OpenSegment {
    SegmentPtr segment;  // null: none yet
    std::shared_ptr<File> file;
    std::uint64_t tail = 0;
    std::uint64_t allocated_end = 0;
    std::uint64_t ahead_bytes = 0;  // less while the disk is nearly full
  };

  std::string PathOf(const std::string& name) const { return absl::StrCat(folder_, "/", name); }

  // Loading.
  absl::Status LoadSegment(std::uint32_t number);
  absl::Status LoadStoreId(bool store_file_exists);
  absl::Status WriteStoreFile();
  absl::Status ScanSegment(const Segment& segment, File& file, const RecordVisitor& visit) const;
  absl::Status FreeUnreferenced(Segment& segment, File& file);

  // Appending.
  absl::StatusOr<Reservation> Reserve(std::uint64_t bytes);
  absl::StatusOr<Reservation> ReserveIn(OpenSegment& open, std::uint64_t bytes);
  absl::StatusOr<OpenSegment> CreateSegment() ABSL_EXCLUSIVE_LOCKS_REQUIRED(append_mutex_);
  absl::Status AllocateUpTo(OpenSegment& open, std::uint64_t needed_end);
  void Seal(const OpenSegment& open);
  void Commit(const Reservation& reservation, const std::vector<PayloadLocation>& places);
  void GiveUp(const Reservation& reservation);

  // The open file of a segment.
  absl::StatusOr<std::shared_ptr<File>> FileOf(const SegmentPtr& segment);
  std::shared_ptr<File> Install(Segment& segment, std::shared_ptr<File> file)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  SegmentPtr Find(const PayloadLocation& at) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddAllocated(Segment& segment, std::uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SubtractAllocated(Segment& segment, std::uint64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Asks the system how much the segments take that changed: a file in many pieces takes space for
  // their list too, and a failed write leaves nobody knows what.
  void RecountSpace();
  // Notes a segment for removal when nothing will ever be read from it again.
  void NoteIfDead(const Segment& segment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RemoveDead();

  FileSystem& file_system_;
  const std::string folder_;
  const std::uint64_t segment_bytes_;
  const std::uint64_t allocate_ahead_bytes_;
  std::uint64_t store_id_ = 0;              // constant after Load
  std::uint64_t store_file_bytes_ = 0;      // constant after Load
  std::vector<std::string> foreign_files_;  // constant after Load
  std::vector<std::string> notes_;          // until FinishRecovery

  // Held while space is reserved, which now and then allocates or creates a file; never while a
  // record is written. Locked before mutex_.
  absl::Mutex append_mutex_;
  OpenSegment open_ ABSL_GUARDED_BY(append_mutex_);
  std::uint32_t next_number_ ABSL_GUARDED_BY(append_mutex_) = 1;

  // Held for the length of a Sync, so that those who come meanwhile share the next one. Locked
  // before mutex_.
  absl::Mutex sync_mutex_;
  // Segments whose pages the system may have dropped in a failed sync: a second sync would not
  // tell.
  std::set<std::uint32_t> lost_ ABSL_GUARDED_BY(sync_mutex_);

  // Never held across I/O.
  mutable absl::Mutex mutex_;
  bool recovered_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<std::uint32_t, SegmentPtr> segments_ ABSL_GUARDED_BY(mutex_);
  std::list<Segment*> open_files_ ABSL_GUARDED_BY(mutex_);  // last used first
  std::vector<SegmentPtr> dirty_ ABSL_GUARDED_BY(mutex_);
  std::set<std::uint32_t> to_recount_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t disk_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t live_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Sealed segments without live records. One is removed only while a newer one's folder entry is
  // durable: the highest number ever used stays visible, so that no number comes back and an old
  // location never names a new record.
  std::set<std::uint32_t> dead_ ABSL_GUARDED_BY(mutex_);
  std::uint32_t newest_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint32_t newest_durable_ ABSL_GUARDED_BY(mutex_) = 0;
};

// ---- Loading and recovery

absl::StatusOr<AlignedBuffer> ReadFirstPage(File& file, std::size_t& bytes_read) {
  AlignedBuffer page(kPageBytes);
  KV_ASSIGN_OR_RETURN(bytes_read, file.Read(0, {page.data(), kPageBytes}));
  return page;
}

absl::Status SegmentStore::Load() {
  KV_RETURN_IF_ERROR(file_system_.CreateFolder(folder_));
  KV_ASSIGN_OR_RETURN(const std::vector<std::string> names, file_system_.List(folder_));
  bool store_file_exists = false;
  std::vector<std::uint32_t> numbers;
  for (const std::string& name : names) {
    if (const auto number = SegmentNumber(name)) {
      numbers.push_back(*number);
    } else if (name == kStoreFile) {
      store_file_exists = true;
    } else if (name == kStoreFileInMaking) {
      KV_RETURN_IF_ERROR(file_system_.Remove(PathOf(name)));
    } else {
      foreign_files_.push_back(name);
    }
  }
  std::sort(numbers.begin(), numbers.end());
  for (const std::uint32_t number : numbers) KV_RETURN_IF_ERROR(LoadSegment(number));
  KV_RETURN_IF_ERROR(LoadStoreId(store_file_exists));

  // What an earlier process wrote without a sync is ours to make durable, and nothing tells where
  // it is.
  KV_RETURN_IF_ERROR(file_system_.SyncAll(folder_));
  absl::MutexLock append_lock(&append_mutex_);
  absl::MutexLock lock(&mutex_);
  disk_bytes_ += store_file_bytes_;
  newest_ = newest_durable_ = numbers.empty() ? 0 : numbers.back();
  next_number_ = newest_ + 1;
  return absl::OkStatus();
}

absl::Status SegmentStore::LoadSegment(std::uint32_t number) {
  auto segment = std::make_shared<Segment>(number, PathOf(SegmentName(number)));
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<File> file, FileOf(segment));
  KV_ASSIGN_OR_RETURN(const std::uint64_t size, file->Size());
  KV_ASSIGN_OR_RETURN(const std::uint64_t allocated_bytes, file->AllocatedBytes());
  std::size_t head_bytes = 0;
  KV_ASSIGN_OR_RETURN(const AlignedBuffer page, ReadFirstPage(*file, head_bytes));
  const auto head = std::span(page.data(), head_bytes);
  const auto header = ParseSegmentHeader(head);
  if (absl::IsFailedPrecondition(header.status())) return header.status();
  segment->header_intact = header.ok() && header->segment == number;
  if (!segment->header_intact) {
    // A crash while a segment is made leaves zeros; everything else is worth a word.
    const bool unfinished =
        std::all_of(head.begin(), head.end(), [](std::byte byte) { return byte == std::byte{}; });
    if (!unfinished) {
      notes_.push_back(absl::StrCat(
          SegmentName(number), ": ",
          header.ok() ? "header names another segment" : std::string(header.status().message())));
    }
  } else if (store_id_ == 0) {
    store_id_ = header->store_id;
  } else if (store_id_ != header->store_id) {
    return absl::FailedPreconditionError(
        absl::StrCat(segment->path, " belongs to another store than the segments before it"));
  }
  segment->end = size;
  segment->live_units.Reserve(std::min(size, segment_bytes_) / kUnitBytes);
  segment->sealed = true;
  absl::MutexLock lock(&mutex_);
  AddAllocated(*segment, allocated_bytes);
  segments_.emplace(number, std::move(segment));
  return absl::OkStatus();
}

// The id is in the STORE file and in each segment header: either heals the other.
absl::Status SegmentStore::LoadStoreId(bool store_file_exists) {
  if (store_file_exists) {
    KV_ASSIGN_OR_RETURN(
        const auto file,
        file_system_.Open(PathOf(kStoreFile), FileSystem::Mode::kReadOnly, /*direct=*/false));
    std::size_t bytes_read = 0;
    KV_ASSIGN_OR_RETURN(const AlignedBuffer page, ReadFirstPage(*file, bytes_read));
    const auto header = ParseSegmentHeader({page.data(), bytes_read});
    if (absl::IsFailedPrecondition(header.status())) return header.status();
    if (header.ok() && header->segment == 0) {
      if (store_id_ != 0 && store_id_ != header->store_id) {
        return absl::FailedPreconditionError(
            absl::StrCat(folder_, " holds segments of another store"));
      }
      store_id_ = header->store_id;
      KV_ASSIGN_OR_RETURN(store_file_bytes_, file->AllocatedBytes());
      return absl::OkStatus();
    }
  }
  if (store_id_ == 0) {
    absl::MutexLock lock(&mutex_);
    const bool holds_records =
        std::any_of(segments_.begin(), segments_.end(),
                    [](const auto& entry) { return entry.second->end > kPageBytes; });
    if (holds_records) {
      return absl::DataLossError(
          absl::StrCat(folder_, ": neither the STORE file nor any segment header is intact"));
    }
    store_id_ = NewStoreId();
  } else {
    notes_.push_back("the STORE file was missing or damaged; made anew from the segments");
  }
  return WriteStoreFile();
}

absl::Status SegmentStore::WriteStoreFile() {
  AlignedBuffer page(kPageBytes);
  WriteSegmentHeader({store_id_, 0}, {page.data(), kPageBytes});
  const std::string in_making = PathOf(kStoreFileInMaking);
  KV_ASSIGN_OR_RETURN(const auto file,
                      file_system_.Open(in_making, FileSystem::Mode::kCreateNew, /*direct=*/false));
  KV_RETURN_IF_ERROR(file->Write(0, {page.data(), kPageBytes}));
  KV_RETURN_IF_ERROR(file->SyncData());
  KV_RETURN_IF_ERROR(file_system_.Rename(in_making, PathOf(kStoreFile)));
  KV_RETURN_IF_ERROR(file_system_.SyncFolder(folder_));
  KV_ASSIGN_OR_RETURN(store_file_bytes_, file->AllocatedBytes());
  return absl::OkStatus();
}

absl::Status SegmentStore::MarkLive(const PayloadLocation& at) {
  absl::MutexLock lock(&mutex_);
  KV_CHECK(!recovered_);
  const SegmentPtr segment = Find(at);
  if (segment == nullptr) {
    return absl::NotFoundError(absl::StrCat(SegmentName(at.segment), " has no such range"));
  }
  if (segment->live_units.HoldsAny(UnitsOf(at))) {
    return absl::DataLossError(
        absl::StrCat(SegmentName(at.segment), " unit ", at.offset_units, " was marked before"));
  }
  segment->live_units.Add(UnitsOf(at));
  segment->live_bytes += at.disk_bytes();
  live_bytes_ += at.disk_bytes();
  return absl::OkStatus();
}

absl::StatusOr<PayloadRecoveryStats> SegmentStore::FinishRecovery() {
  std::vector<SegmentPtr> segments;
  {
    absl::MutexLock lock(&mutex_);
    KV_CHECK(!recovered_);
    for (const auto& [number, segment] : segments_) segments.push_back(segment);
  }
  PayloadRecoveryStats stats;
  stats.foreign_files = foreign_files_;
  stats.notes = std::exchange(notes_, {});
  for (const SegmentPtr& segment : segments) {
    if (!segment->header_intact && segment->live_bytes > 0) {
      stats.notes.push_back(
          absl::StrCat(SegmentName(segment->number),
                       ": served without an intact header; its records are checked one by one"));
    }
    KV_ASSIGN_OR_RETURN(const auto file, FileOf(segment));
    const std::uint64_t bytes_before = segment->allocated_bytes;
    if (absl::Status status = FreeUnreferenced(*segment, *file); !status.ok()) {
      stats.notes.push_back(absl::StrCat(SegmentName(segment->number),
                                         ": unreferenced bytes stay: ", status.message()));
    }
    absl::MutexLock lock(&mutex_);
    stats.unreferenced_bytes += bytes_before - std::min(bytes_before, segment->allocated_bytes);
    NoteIfDead(*segment);
  }
  RemoveDead();
  absl::MutexLock lock(&mutex_);
  recovered_ = true;
  return stats;
}

absl::Status SegmentStore::FreeUnreferenced(Segment& segment, File& file) {
  // The tail goes with all that a crashed store allocated ahead.
  const std::uint64_t live_end =
      std::max(RoundUpToPages(segment.live_units.End() * kUnitBytes), kPageBytes);
  if (segment.end > live_end) {
    KV_RETURN_IF_ERROR(file.Truncate(live_end));
    segment.end = live_end;
  }
  KV_ASSIGN_OR_RETURN(std::uint64_t allocated_bytes, file.AllocatedBytes());
  absl::Status status;
  std::vector<Extent> holes;
  std::uint64_t hole_bytes = 0;
  const std::uint64_t end = live_end / kUnitBytes;
  for (auto gap = segment.live_units.NextGap(kUnitsPerPage, end); gap.first < gap.end;
       gap = segment.live_units.NextGap(gap.end, end)) {
    const Extent hole = PagesWithin(gap);
    if (hole.bytes == 0) continue;
    holes.push_back(hole);
    hole_bytes += hole.bytes;
  }
  if (allocated_bytes > live_end - hole_bytes && segment.live_bytes > 0) {
    for (const Extent& hole : holes) {
      if (status = file.PunchHole(hole.offset, hole.bytes); !status.ok()) break;
    }
    KV_ASSIGN_OR_RETURN(allocated_bytes, file.AllocatedBytes());
  }
  absl::MutexLock lock(&mutex_);
  SubtractAllocated(segment, segment.allocated_bytes);
  AddAllocated(segment, allocated_bytes);
  return status;
}

absl::Status SegmentStore::Scan(const RecordVisitor& visit) {
  std::vector<SegmentPtr> segments;
  {
    absl::MutexLock lock(&mutex_);
    KV_CHECK(!recovered_);
    for (const auto& [number, segment] : segments_) segments.push_back(segment);
  }
  for (const SegmentPtr& segment : segments) {
    KV_ASSIGN_OR_RETURN(const auto file, FileOf(segment));
    KV_RETURN_IF_ERROR(ScanSegment(*segment, *file, visit));
  }
  return absl::OkStatus();
}

absl::Status SegmentStore::ScanSegment(const Segment& segment, File& file,
                                       const RecordVisitor& visit) const {
  // The pages that were read last.
  AlignedBuffer pages(kPageBytes + PayloadOffset(PayloadRecord::kDescriptorBytesMax));
  std::uint64_t pages_begin = 0;
  std::uint64_t pages_end = 0;
  // What can be read from `offset` on: `bytes`, often more, at the end of the file less.
  const auto head_at = [&](std::uint64_t offset, std::size_t bytes) -> std::span<const std::byte> {
    if (offset < pages_begin || offset + bytes > pages_end) {
      pages_begin = RoundDownToPages(offset);
      const auto count =
          file.Read(pages_begin, {pages.data(), RoundUpToPages(offset + bytes) - pages_begin});
      pages_end = pages_begin + count.value_or(0);
    }
    if (pages_end <= offset) return {};
    return {pages.data() + (offset - pages_begin), pages_end - offset};
  };
  // Records start on units, so after damage the next unit is as good a guess as any.
  for (std::uint64_t offset = kPageBytes; offset < segment.end;) {
    if (offset % kPageBytes == 0) {
      KV_ASSIGN_OR_RETURN(const std::uint64_t data, file.NextData(offset));
      offset = std::max(offset, RoundDownToPages(data));
      if (offset >= segment.end) break;
    }
    auto head = head_at(offset, PayloadRecord::kHeaderBytes);
    if (head.size() < PayloadRecord::kHeaderBytes) {
      // A page that cannot be read is no reason to give up those behind it.
      offset = RoundDownToPages(offset) + kPageBytes;
      continue;
    }
    if (const std::size_t head_bytes = RecordHeadBytes(head); head_bytes > head.size()) {
      head = head_at(offset, head_bytes);
    }
    const auto header = ParseRecordHeader(head);
    const bool at_home =
        header.ok() && header->store_id == store_id_ && header->segment == segment.number &&
        OffsetOf(header->location()) == offset && offset + header->record_bytes() <= segment.end;
    if (!at_home) {
      offset += kUnitBytes;
      continue;
    }
    // The head of a freed record stays where it shares a page with one that lives.
    const Extent own_pages = PagesWithin(UnitsOf(header->location()));
    std::uint64_t data = own_pages.offset;
    if (own_pages.bytes > 0) {
      KV_ASSIGN_OR_RETURN(data, file.NextData(own_pages.offset));
    }
    if (data == own_pages.offset) {
      const auto descriptor = head.subspan(PayloadRecord::kHeaderBytes, header->descriptor_bytes);
      visit(header->location(),
            {reinterpret_cast<const char*>(descriptor.data()), descriptor.size()});
    }
    offset += header->location().disk_bytes();
  }
  return absl::OkStatus();
}

// ---- Appending

absl::StatusOr<std::vector<PayloadLocation>> SegmentStore::AppendGroup(
    std::span<PayloadRecord* const> records) {
  KV_CHECK(!records.empty());
  KV_CHECK(records.size() <= kGroupRecordsMax);
  std::vector<RecordHeader> headers;
  headers.reserve(records.size());
  for (PayloadRecord* const record : records) {
    RecordHeader& header = headers.emplace_back();
    header.store_id = store_id_;
    header.descriptor_bytes = static_cast<std::uint32_t>(record->descriptor().size());
    header.payload_bytes = static_cast<std::uint32_t>(record->payload().size());
    const auto known_crc = record->payload_crc32c();
    header.payload_crc32c = known_crc ? *known_crc : Crc32c(record->payload());
  }
  const std::uint64_t group_bytes = GroupDiskBytes(records);
  KV_CHECK(group_bytes <= kGroupBytesMax);
  KV_ASSIGN_OR_RETURN(const Reservation reservation, Reserve(group_bytes));

  std::vector<PayloadLocation> places;
  places.reserve(records.size());
  std::vector<std::span<const std::byte>> pieces;
  pieces.reserve(records.size() + 1);
  std::uint64_t at = reservation.offset;
  for (std::size_t i = 0; i < records.size(); ++i) {
    headers[i].segment = reservation.segment->number;
    headers[i].offset_units = static_cast<std::uint32_t>(at / kUnitBytes);
    const auto memory = records[i]->memory();
    WriteRecordHeader(headers[i], memory.first(records[i]->payload_offset()));
    places.push_back(headers[i].location());
    pieces.push_back(memory.first(places[i].disk_bytes()));
    at += places[i].disk_bytes();
  }
  // The rest of the last page; a single record brings its own.
  alignas(kPageBytes) static constexpr std::byte kZeros[kPageBytes] = {};
  const std::uint64_t padding = reservation.offset + reservation.bytes - at;
  if (records.size() == 1) {
    pieces[0] = records[0]->memory();
  } else if (padding > 0) {
    pieces.emplace_back(kZeros, padding);
  }

  if (absl::Status status = reservation.file->WritePieces(reservation.offset, pieces);
      !status.ok()) {
    GiveUp(reservation);
    return status;
  }
  Commit(reservation, places);
  return places;
}

absl::StatusOr<SegmentStore::Reservation> SegmentStore::Reserve(std::uint64_t bytes) {
  OpenSegment full;
  absl::StatusOr<Reservation> reservation;
  {
    absl::MutexLock append_lock(&append_mutex_);
    if (kPageBytes + bytes > segment_bytes_) {
      // A segment of its own; the open one goes on.
      KV_ASSIGN_OR_RETURN(full, CreateSegment());
      reservation = ReserveIn(full, bytes);
    } else {
      if (open_.segment == nullptr || open_.tail + bytes > segment_bytes_) {
        KV_ASSIGN_OR_RETURN(OpenSegment fresh, CreateSegment());
        full = std::exchange(open_, std::move(fresh));
      }
      reservation = ReserveIn(open_, bytes);
    }
  }
  if (full.segment != nullptr) Seal(full);
  return reservation;
}

absl::StatusOr<SegmentStore::Reservation> SegmentStore::ReserveIn(OpenSegment& open,
                                                                  std::uint64_t bytes) {
  if (open.tail + bytes > open.allocated_end) {
    KV_RETURN_IF_ERROR(AllocateUpTo(open, open.tail + bytes));
  }
  const Reservation reservation{open.segment, open.file, open.tail, bytes,
                                open.tail + bytes <= open.allocated_end};
  open.tail += bytes;
  absl::MutexLock lock(&mutex_);
  open.segment->end = open.tail;
  ++open.segment->writes_in_flight;
  return reservation;
}

absl::StatusOr<SegmentStore::OpenSegment> SegmentStore::CreateSegment() {
  if (next_number_ == 0) return absl::ResourceExhaustedError("no segment number is left");
  auto segment = std::make_shared<Segment>(next_number_, PathOf(SegmentName(next_number_)));
  KV_ASSIGN_OR_RETURN(
      std::shared_ptr<File> file,
      file_system_.Open(segment->path, FileSystem::Mode::kCreateNew, /*direct=*/true));
  AlignedBuffer page(kPageBytes);
  WriteSegmentHeader({store_id_, segment->number}, {page.data(), kPageBytes});
  if (absl::Status status = file->Write(0, {page.data(), kPageBytes}); !status.ok()) {
    // Where the file stays, its number is taken.
    if (!file_system_.Remove(segment->path).ok()) ++next_number_;
    return status;
  }
  ++next_number_;
  std::shared_ptr<File> closed;  // outlives the lock
  absl::MutexLock lock(&mutex_);
  newest_ = segment->number;
  AddAllocated(*segment, kPageBytes);
  segment->live_units.Reserve(segment_bytes_ / kUnitBytes);
  segments_.emplace(segment->number, segment);
  closed = Install(*segment, file);
  return OpenSegment{std::move(segment), std::move(file), kPageBytes, kPageBytes,
                     allocate_ahead_bytes_};
}

absl::Status SegmentStore::AllocateUpTo(OpenSegment& open, std::uint64_t needed_end) {
  const std::uint64_t from = std::max(open.allocated_end, open.tail);
  absl::Status status;
  while (true) {
    const std::uint64_t end =
        std::max(needed_end, std::min(segment_bytes_, open.tail + open.ahead_bytes));
    status = open.file->Allocate(from, end - from);
    if (absl::IsUnimplemented(status)) return absl::OkStatus();
    if (status.ok()) {
      open.allocated_end = end;
      absl::MutexLock lock(&mutex_);
      AddAllocated(*open.segment, end - from);
      return absl::OkStatus();
    }
    // What was allocated in spite of the error goes back.
    static_cast<void>(open.file->Truncate(from));
    if (!absl::IsResourceExhausted(status) || end == needed_end) return status;
    open.ahead_bytes = open.ahead_bytes / 2 / kPageBytes * kPageBytes;
  }
}

// Ends a segment: what was allocated behind its last record goes back.
void SegmentStore::Seal(const OpenSegment& open) {
  const bool cut = open.allocated_end > open.tail && open.file->Truncate(open.tail).ok();
  {
    absl::MutexLock lock(&mutex_);
    if (cut) SubtractAllocated(*open.segment, open.allocated_end - open.tail);
    open.segment->sealed = true;
    to_recount_.insert(open.segment->number);
    NoteIfDead(*open.segment);
  }
  RemoveDead();
}

void SegmentStore::Commit(const Reservation& reservation,
                          const std::vector<PayloadLocation>& places) {
  Segment& segment = *reservation.segment;
  absl::MutexLock lock(&mutex_);
  KV_CHECK(recovered_);
  --segment.writes_in_flight;
  if (!reservation.allocated) AddAllocated(segment, reservation.bytes);
  const UnitBitmap::Range group = {UnitsOf(places.front()).first, UnitsOf(places.back()).end};
  segment.live_units.Add(group);
  segment.live_bytes += (group.end - group.first) * kUnitBytes;
  live_bytes_ += (group.end - group.first) * kUnitBytes;
  if (!segment.dirty) {
    segment.dirty = true;
    dirty_.push_back(reservation.segment);
  }
}

// After a failed write. The range is not used again, since nobody knows what is in it.
void SegmentStore::GiveUp(const Reservation& reservation) {
  Segment& segment = *reservation.segment;
  const bool punched = reservation.file->PunchHole(reservation.offset, reservation.bytes).ok();
  {
    absl::MutexLock lock(&mutex_);
    --segment.writes_in_flight;
    if (punched && reservation.allocated) SubtractAllocated(segment, reservation.bytes);
    to_recount_.insert(segment.number);
    NoteIfDead(segment);
  }
  RemoveDead();
}

// ---- Reading, freeing, syncing

absl::StatusOr<StoredPayload> SegmentStore::Read(const PayloadLocation& at) {
  SegmentPtr segment;
  {
    absl::MutexLock lock(&mutex_);
    segment = Find(at);
  }
  const auto broken = [&at](absl::string_view what) {
    return absl::DataLossError(
        absl::StrCat(SegmentName(at.segment), " unit ", at.offset_units, ": ", what));
  };
  if (segment == nullptr) return broken("there is no such range");
  KV_ASSIGN_OR_RETURN(const auto file, FileOf(segment));

  // Direct I/O reads whole pages; the record stays where it lies in them.
  const std::uint64_t first_page = RoundDownToPages(OffsetOf(at));
  const std::size_t lead_bytes = OffsetOf(at) - first_page;
  auto buffer = std::make_shared<AlignedBuffer>(lead_bytes + at.record_bytes);
  KV_ASSIGN_OR_RETURN(const std::size_t count,
                      file->Read(first_page, {buffer->data(), buffer->size()}));
  if (count < lead_bytes + at.record_bytes) return broken("record is cut short");
  const auto record = std::span<const std::byte>(buffer->data(), buffer->size())
                          .subspan(lead_bytes, at.record_bytes);
  const auto header = ParseRecordHeader(record);
  if (!header.ok()) return broken(header.status().message());
  if (header->store_id != store_id_ || header->location() != at) {
    return broken("the record there is another one");
  }
  const auto payload = record.subspan(header->payload_offset());
  if (Crc32c(payload) != header->payload_crc32c) return broken("payload fails its checksum");
  const auto descriptor = record.subspan(PayloadRecord::kHeaderBytes, header->descriptor_bytes);
  return StoredPayload{{std::move(buffer), payload}, descriptor};
}

void SegmentStore::Free(const PayloadLocation& at) {
  SegmentPtr segment;
  bool goes_with_its_segment = false;
  Extent hole;
  {
    absl::MutexLock lock(&mutex_);
    KV_CHECK(recovered_);
    segment = Find(at);
    if (segment == nullptr || !segment->live_units.HoldsAll(UnitsOf(at))) return;
    segment->live_units.Remove(UnitsOf(at));
    segment->live_bytes -= at.disk_bytes();
    live_bytes_ -= at.disk_bytes();
    NoteIfDead(*segment);
    goes_with_its_segment = dead_.contains(at.segment) && at.segment < newest_durable_;
    hole = DeadPages(segment->live_units, UnitsOf(at));
    if (!goes_with_its_segment && hole.bytes > 0) ++segment->punches_in_flight;
  }
  if (goes_with_its_segment) {
    RemoveDead();
    return;
  }
  if (hole.bytes == 0) return;
  // Where holes cannot be punched, the space comes back with the last record of the segment.
  const auto file = FileOf(segment);
  const bool punched = file.ok() && (*file)->PunchHole(hole.offset, hole.bytes).ok();
  absl::MutexLock lock(&mutex_);
  --segment->punches_in_flight;
  if (punched) {
    SubtractAllocated(*segment, hole.bytes);
    to_recount_.insert(segment->number);
  }
}

absl::Status SegmentStore::Sync() {
  absl::MutexLock sync_lock(&sync_mutex_);
  std::vector<SegmentPtr> dirty;
  std::uint32_t newest = 0;
  bool sync_folder = false;
  {
    absl::MutexLock lock(&mutex_);
    dirty = std::exchange(dirty_, {});
    for (const SegmentPtr& segment : dirty) {
      segment->dirty = false;
      to_recount_.insert(segment->number);
    }
    newest = newest_;
    sync_folder = newest != newest_durable_;
    std::erase_if(lost_, [this](std::uint32_t number) ABSL_NO_THREAD_SAFETY_ANALYSIS {
      return !segments_.contains(number);
    });
  }
  absl::Status result;
  for (const SegmentPtr& segment : dirty) {
    const auto file = FileOf(segment);
    const absl::Status status = file.ok() ? (*file)->SyncData() : file.status();
    if (status.ok()) continue;
    absl::MutexLock lock(&mutex_);
    if (segment->removed) continue;
    result = status;
    if (file.ok() && !(*file)->direct()) lost_.insert(segment->number);
    if (!segment->dirty) {
      segment->dirty = true;
      dirty_.push_back(segment);
    }
  }
  if (sync_folder) {
    if (absl::Status status = file_system_.SyncFolder(folder_); status.ok()) {
      absl::MutexLock lock(&mutex_);
      newest_durable_ = newest;
    } else {
      result = status;
    }
  }
  RemoveDead();
  RecountSpace();
  if (result.ok() && !lost_.empty()) {
    return absl::UnavailableError(absl::StrCat(SegmentName(*lost_.begin()),
                                               " failed a sync; its records may not be durable"));
  }
  return result;
}

void SegmentStore::RecountSpace() {
  std::vector<SegmentPtr> segments;
  {
    absl::MutexLock lock(&mutex_);
    for (const std::uint32_t number : std::exchange(to_recount_, {})) {
      if (const auto found = segments_.find(number); found != segments_.end()) {
        segments.push_back(found->second);
      }
    }
  }
  for (const SegmentPtr& segment : segments) {
    const auto file = FileOf(segment);
    // Nothing is allocated meanwhile.
    absl::MutexLock append_lock(&append_mutex_);
    const bool open = open_.segment == segment;
    const auto quiet = [&] {
      return (open || segment->sealed) && segment->punches_in_flight == 0 &&
             segment->writes_in_flight == 0;
    };
    std::optional<std::uint64_t> known_bytes;
    {
      absl::MutexLock lock(&mutex_);
      if (quiet()) known_bytes = segment->allocated_bytes;
    }
    const auto allocated_bytes = file.ok() ? (*file)->AllocatedBytes() : file.status();
    absl::MutexLock lock(&mutex_);
    if (segment->removed) continue;
    // What changed meanwhile may or may not be in the system's answer: then the next time will do.
    if (allocated_bytes.ok() && quiet() && segment->allocated_bytes == known_bytes) {
      SubtractAllocated(*segment, *known_bytes);
      AddAllocated(*segment, *allocated_bytes);
    } else {
      to_recount_.insert(segment->number);
    }
  }
}

PayloadUsage SegmentStore::Usage() const {
  absl::MutexLock lock(&mutex_);
  return {disk_bytes_, live_bytes_, segments_.size()};
}

SegmentStore::~SegmentStore() {
  OpenSegment open;
  {
    absl::MutexLock append_lock(&append_mutex_);
    open = std::exchange(open_, {});
  }
  if (open.segment != nullptr) Seal(open);
}

// ---- The table of segments

absl::StatusOr<std::shared_ptr<File>> SegmentStore::FileOf(const SegmentPtr& segment) {
  {
    absl::MutexLock lock(&mutex_);
    if (segment->file != nullptr) {
      open_files_.splice(open_files_.begin(), open_files_, segment->place_in_open_files);
      return segment->file;
    }
  }
  auto opened = file_system_.Open(segment->path, FileSystem::Mode::kReadWrite, /*direct=*/true);
  if (absl::IsNotFound(opened.status())) {
    return absl::DataLossError(absl::StrCat(segment->path, " is gone"));
  }
  if (!opened.ok()) {
    // A file system that turned read-only still serves.
    opened = file_system_.Open(segment->path, FileSystem::Mode::kReadOnly, /*direct=*/true);
    if (!opened.ok()) return opened.status();
    return std::shared_ptr<File>(*std::move(opened));
  }
  std::shared_ptr<File> closed;  // outlives the lock
  absl::MutexLock lock(&mutex_);
  if (segment->file != nullptr) {
    closed = *std::move(opened);
    return segment->file;
  }
  std::shared_ptr<File> file = *std::move(opened);
  if (!segment->removed) closed = Install(*segment, file);
  return file;
}

// Returns the file that has to make room, if any: to be closed outside the lock.
std::shared_ptr<File> SegmentStore::Install(Segment& segment, std::shared_ptr<File> file) {
  segment.file = std::move(file);
  segment.place_in_open_files = open_files_.insert(open_files_.begin(), &segment);
  if (open_files_.size() <= kOpenFilesMax) return nullptr;
  Segment* const oldest = open_files_.back();
  open_files_.pop_back();
  return std::exchange(oldest->file, nullptr);
}

SegmentStore::SegmentPtr SegmentStore::Find(const PayloadLocation& at) const {
  const auto found = segments_.find(at.segment);
  if (found == segments_.end() || at.offset_units < kUnitsPerPage ||
      at.record_bytes <= PayloadRecord::kHeaderBytes ||
      OffsetOf(at) + at.record_bytes > found->second->end) {
    return nullptr;
  }
  return found->second;
}

void SegmentStore::AddAllocated(Segment& segment, std::uint64_t bytes) {
  if (segment.removed) return;
  segment.allocated_bytes += bytes;
  disk_bytes_ += bytes;
}

void SegmentStore::SubtractAllocated(Segment& segment, std::uint64_t bytes) {
  if (segment.removed) return;
  // Never more than there is: what was allocated before this process started was counted by the
  // system.
  bytes = std::min(bytes, segment.allocated_bytes);
  segment.allocated_bytes -= bytes;
  disk_bytes_ -= bytes;
}

void SegmentStore::NoteIfDead(const Segment& segment) {
  if (segment.sealed && segment.live_bytes == 0 && segment.writes_in_flight == 0 &&
      !segment.removed) {
    dead_.insert(segment.number);
  }
}

void SegmentStore::RemoveDead() {
  while (true) {
    SegmentPtr segment;
    {
      absl::MutexLock lock(&mutex_);
      if (dead_.empty() || *dead_.begin() >= newest_durable_) return;
      segment = segments_.at(*dead_.begin());
      dead_.erase(dead_.begin());
    }
    const absl::Status status = file_system_.Remove(segment->path);
    std::shared_ptr<File> closed;  // outlives the lock
    absl::MutexLock lock(&mutex_);
    if (!status.ok() && !absl::IsNotFound(status)) {
      dead_.insert(segment->number);  // the next Sync tries again
      return;
    }
    SubtractAllocated(*segment, segment->allocated_bytes);
    segment->removed = true;
    if (segment->file != nullptr) {
      open_files_.erase(segment->place_in_open_files);
      closed = std::exchange(segment->file, nullptr);
    }
    segments_.erase(segment->number);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<PayloadStore>> OpenSegmentStore(FileSystem& file_system,
                                                               const std::string& folder,
                                                               const SegmentStoreOptions& options) {
  auto store = std::make_unique<SegmentStore>(file_system, folder, options);
  KV_RETURN_IF_ERROR(store->Load());
  return store;
}

}  // namespace kvtrie
