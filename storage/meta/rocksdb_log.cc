#include "storage/meta/rocksdb_log.h"

#include <spdlog/logger.h>
#include <spdlog/sinks/null_sink.h>
#include <spdlog/sinks/rotating_file_sink.h>

#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <utility>

namespace kvtrie {
namespace {

constexpr std::size_t kFileBytesMax = std::size_t{1} << 20;
constexpr std::size_t kOlderFiles = 1;
constexpr std::size_t kLineBytesMax = 1024;

spdlog::level::level_enum LevelOf(rocksdb::InfoLogLevel level) {
  switch (level) {
    case rocksdb::DEBUG_LEVEL:
      return spdlog::level::debug;
    case rocksdb::WARN_LEVEL:
      return spdlog::level::warn;
    case rocksdb::ERROR_LEVEL:
      return spdlog::level::err;
    case rocksdb::FATAL_LEVEL:
      return spdlog::level::critical;
    default:
      return spdlog::level::info;
  }
}

class RocksDbLog final : public rocksdb::Logger {
 public:
  explicit RocksDbLog(spdlog::sink_ptr sink)
      : Logger(rocksdb::WARN_LEVEL), lines_("rocksdb", std::move(sink)) {
    lines_.set_level(spdlog::level::warn);
    lines_.flush_on(spdlog::level::warn);
    lines_.set_error_handler([](const std::string&) {});
  }

  // A description of the options at each start, which the folder's OPTIONS file holds too.
  void LogHeader(const char*, va_list) override {}
  void Logv(const char* format, va_list arguments) override {
    Logv(rocksdb::INFO_LEVEL, format, arguments);
  }
  void Logv(rocksdb::InfoLogLevel level, const char* format, va_list arguments) override {
    if (!lines_.should_log(LevelOf(level))) return;
    char line[kLineBytesMax];
    if (std::vsnprintf(line, sizeof(line), format, arguments) < 0) return;
    lines_.log(LevelOf(level), spdlog::string_view_t(line));
  }

 private:
  spdlog::logger lines_;
};

}  // namespace

std::shared_ptr<rocksdb::Logger> OpenRocksDbLog(const std::string& folder) {
  spdlog::sink_ptr sink;
  try {
    sink = std::make_shared<spdlog::sinks::rotating_file_sink_mt>(folder + "/LOG", kFileBytesMax,
                                                                  kOlderFiles);
  } catch (const spdlog::spdlog_ex&) {
    sink = std::make_shared<spdlog::sinks::null_sink_mt>();
  }
  return std::make_shared<RocksDbLog>(std::move(sink));
}

}  // namespace kvtrie
