#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/flags/reflection.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/flag_reader.h"
#include "server/listen_address.h"

namespace kvtrie {

// A flag's value: "512MiB", "10GiB" or plain bytes. Powers of 1000 are refused: too many programs
// take GB for GiB.
struct ByteSize {
  std::uint64_t bytes = 0;
};
bool AbslParseFlag(absl::string_view text, ByteSize* size, std::string* error);
std::string AbslUnparseFlag(ByteSize size);

// A setting as the operator sees it.
struct EffectiveSetting {
  std::string name;
  std::string value;
  std::string source;  // "default", "flag" or "flagfile"
  std::string help;
};

// Where each setting that is not at its default was made.
using SettingSources = std::map<std::string, FlagSetting>;

// The flags of one program: those that one of its source files defines. Libraries bring flags of
// their own.
class FlagSet {
 public:
  // `file`: how the name of that file ends.
  constexpr explicit FlagSet(absl::string_view file) : file_(file) {}

  // Sets the flags to what the arguments (without the program's name) and the flag file that they
  // name say. InvalidArgument says where the fault stands (file and line, or command line), which
  // setting it is, and what would be right; so it does of environment variables that look like
  // settings.
  absl::StatusOr<SettingSources> Read(std::span<const char* const> arguments,
                                      std::span<const std::string> environment) const;

  // All of them, as they are set.
  std::vector<EffectiveSetting> Effective(const SettingSources& sources) const;

  // For --help, below a line that says what the program is.
  std::string Describe(absl::string_view title) const;

 private:
  std::vector<absl::CommandLineFlag*> Flags() const;
  std::vector<std::string> Names() const;
  absl::CommandLineFlag* Find(absl::string_view name) const;
  bool TakesValue(absl::string_view name) const;
  absl::Status Apply(const FlagSetting& setting, SettingSources* sources) const;
  absl::Status ApplyAll(std::span<const char* const> arguments, SettingSources* sources) const;

  absl::string_view file_;
};

// Holds values against what is right for them. The first fault stays, and says where the setting
// was made.
class SettingChecks {
 public:
  explicit SettingChecks(const SettingSources& sources) : sources_(sources) {}

  const absl::Status& status() const { return status_; }
  void Fail(absl::string_view name, absl::string_view what);
  // A fault that was found elsewhere.
  void Keep(absl::Status status);

  // An address that is this machine's alone, unless others are allowed.
  ListenAddress Address(const char* name, const std::string& text, bool allow_remote);
  std::string OneOf(const char* name, const std::string& value,
                    std::initializer_list<absl::string_view> choices);
  std::uint32_t Between(const char* name, std::uint32_t value, std::uint32_t low,
                        std::uint32_t high);
  std::size_t Size(const char* name, ByteSize value, std::uint64_t low);
  std::chrono::milliseconds Milliseconds(const char* name, absl::Duration value, absl::Duration low,
                                         absl::Duration high);

 private:
  const SettingSources& sources_;
  absl::Status status_;
};

}  // namespace kvtrie
