#include "storage/meta/log_space.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <string>

#include "rocksdb/file_system.h"

namespace kvtrie {
namespace {

// More than most batches take; after its first one a log is synced, and safe.
constexpr off_t kLogBeginBytes = off_t{256} << 10;

class LogSpaceFileSystem final : public rocksdb::FileSystemWrapper {
 public:
  using FileSystemWrapper::FileSystemWrapper;
  const char* Name() const override { return "kvtrie.LogSpaceFileSystem"; }

  rocksdb::IOStatus NewWritableFile(const std::string& path, const rocksdb::FileOptions& options,
                                    std::unique_ptr<rocksdb::FSWritableFile>* file,
                                    rocksdb::IODebugContext* debug) override {
    rocksdb::IOStatus status = FileSystemWrapper::NewWritableFile(path, options, file, debug);
    if (!status.ok() || !path.ends_with(".log") || TakeSpace(path)) return status;
    file->reset();
    FileSystemWrapper::DeleteFile(path, options.io_options, debug).PermitUncheckedError();
    return rocksdb::IOStatus::NoSpace(path, "no room for the beginning of a log");
  }

 private:
  // False: the disk is full. What else goes wrong, writing will tell.
  static bool TakeSpace(const std::string& path) {
    const int descriptor = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (descriptor < 0) return true;
    const bool is_full =
        ::fallocate(descriptor, FALLOC_FL_KEEP_SIZE, 0, kLogBeginBytes) != 0 && errno == ENOSPC;
    ::close(descriptor);
    return !is_full;
  }
};

}  // namespace

rocksdb::Env* EnvWithLogSpace() {
  // Outlives every database, those of other static objects too.
  static rocksdb::Env* const env =
      rocksdb::NewCompositeEnv(std::make_shared<LogSpaceFileSystem>(rocksdb::FileSystem::Default()))
          .release();
  return env;
}

}  // namespace kvtrie
