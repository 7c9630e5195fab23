#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvtrie {

// A flag that a command takes: "--name VALUE", "--name=VALUE", or "--name" alone for a switch.
struct FlagSpec {
  enum class Kind { kSwitch, kText, kNumber, kReal, kChoice };

  // kReal: 0, or from kRealMin on, so that a float holds it and its inverse.
  static constexpr double kRealMin = 1e-30;
  static constexpr double kRealMax = 1e30;

  std::string_view name;  // without the dashes
  Kind kind = Kind::kText;
  std::string_view help;
  // kNumber
  std::uint64_t min = 0;
  std::uint64_t max = 0;
  // kChoice: alternatives with '|' between them.
  std::string_view choices = {};
  // kReal
  double real_max = kRealMax;
  bool may_be_zero = true;

  bool required = false;

  constexpr FlagSpec Required() const {
    FlagSpec flag = *this;
    flag.required = true;
    return flag;
  }
  constexpr FlagSpec AtMost(double max_value) const {
    FlagSpec flag = *this;
    flag.real_max = max_value;
    return flag;
  }
  constexpr FlagSpec AboveZero() const {
    FlagSpec flag = *this;
    flag.may_be_zero = false;
    return flag;
  }
};

// A command line, split and checked. Every flag that is present has a well-formed value.
class CommandLine {
 public:
  // InvalidArgument names what is wrong, for people.
  static absl::StatusOr<CommandLine> Parse(std::span<const std::string> arguments,
                                           std::span<const FlagSpec> flags);

  bool Has(std::string_view name) const { return values_.find(name) != values_.end(); }
  std::string Text(std::string_view name, std::string_view otherwise = "") const;
  std::uint64_t Number(std::string_view name, std::uint64_t otherwise) const;
  double Real(std::string_view name, double otherwise) const;
  const std::vector<std::string>& positionals() const { return positionals_; }

 private:
  std::map<std::string, std::string, std::less<>> values_;
  std::vector<std::string> positionals_;
};

// An error whose message begins with what a flag named, with the flag before it.
absl::Status OfFlag(std::string_view flag, const absl::Status& status);
template <typename T>
absl::StatusOr<T> OfFlag(std::string_view flag, absl::StatusOr<T> value) {
  if (!value.ok()) return OfFlag(flag, value.status());
  return value;
}

}  // namespace kvtrie
