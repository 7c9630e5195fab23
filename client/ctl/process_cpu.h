#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

namespace kvtrie {

// User and system time of this process, in seconds.
double OwnCpuSeconds();
// The same of another process on this host; nullopt when there is none or it may not be asked.
std::optional<double> CpuSecondsOf(pid_t pid);

// The process on this host that listens at `target` ("127.0.0.1:50051", "unix:/path"); nullopt when
// it is not found.
std::optional<pid_t> ListeningProcess(const std::string& target);

}  // namespace kvtrie
