#include "client/ctl/process_cpu.h"

#include <time.h>

#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string_view>

#include "client/local_lane.h"

namespace kvtrie {
namespace {

constexpr char kListenState[] = "0A";

std::optional<double> ClockSeconds(clockid_t clock) {
  timespec now;
  if (clock_gettime(clock, &now) != 0) return std::nullopt;
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Inodes of the sockets that listen at a TCP port, from /proc/net/tcp and tcp6.
std::set<std::string> ListeningInodes(unsigned port) {
  std::set<std::string> inodes;
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(table);
    std::string line;
    std::getline(file, line);
    while (std::getline(file, line)) {
      std::istringstream fields(line);
      std::string slot, local, remote, state, queues, timer, retransmits, uid, timeout, inode;
      fields >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> uid >>
          timeout >> inode;
      const std::size_t colon = local.rfind(':');
      if (state != kListenState || colon == std::string::npos) continue;
      if (std::stoul(local.substr(colon + 1), nullptr, 16) == port) inodes.insert(inode);
    }
  }
  return inodes;
}

std::set<std::string> ListeningInodes(const std::string& unix_path) {
  std::set<std::string> inodes;
  std::ifstream file("/proc/net/unix");
  std::string line;
  std::getline(file, line);
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::string number, references, protocol, flags, type, state, inode, path;
    fields >> number >> references >> protocol >> flags >> type >> state >> inode >> path;
    if (path == unix_path) inodes.insert(inode);
  }
  return inodes;
}

}  // namespace

double OwnCpuSeconds() { return ClockSeconds(CLOCK_PROCESS_CPUTIME_ID).value_or(0); }

std::optional<double> CpuSecondsOf(pid_t pid) {
  clockid_t clock;
  if (clock_getcpuclockid(pid, &clock) != 0) return std::nullopt;
  return ClockSeconds(clock);
}

std::optional<pid_t> ListeningProcess(const std::string& target) {
  if (!IsLocalTarget(target)) return std::nullopt;
  std::set<std::string> inodes;
  if (target.compare(0, 5, "unix:") == 0) {
    inodes = ListeningInodes(target.substr(5));
  } else {
    const std::size_t colon = target.rfind(':');
    unsigned port = 0;
    const char* const end = target.data() + target.size();
    if (std::from_chars(target.data() + colon + 1, end, port).ec != std::errc())
      return std::nullopt;
    inodes = ListeningInodes(port);
  }
  std::error_code error;
  for (const auto& process : std::filesystem::directory_iterator("/proc", error)) {
    const std::string name = process.path().filename();
    pid_t pid = 0;
    const auto [end, parsed] = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (parsed != std::errc() || end != name.data() + name.size()) continue;
    std::error_code denied;
    for (const auto& entry : std::filesystem::directory_iterator(process.path() / "fd", denied)) {
      const std::string link = std::filesystem::read_symlink(entry.path(), denied);
      if (link.compare(0, 8, "socket:[") == 0 &&
          inodes.count(link.substr(8, link.size() - 9)) > 0) {
        return pid;
      }
    }
  }
  return std::nullopt;
}

}  // namespace kvtrie
