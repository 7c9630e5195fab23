#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace kvtrie {

// A flag that a command takes: "--name VALUE", "--name=VALUE", or "--name" alone for a switch.
struct FlagSpec {
  enum class Kind { kSwitch, kText, kNumber, kReal, kChoice };  // kReal: finite, not negative

  std::string_view name;  // without the dashes
  Kind kind = Kind::kText;
  std::string_view help;
  // kNumber
  std::uint64_t min = 0;
  std::uint64_t max = 0;
  // kChoice: alternatives with '|' between them.
  std::string_view choices = {};
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

}  // namespace kvtrie
