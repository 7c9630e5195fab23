#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/admin_client.h"
#include "client/ctl/command_line.h"
#include "kvtrie/v1/types.pb.h"

namespace kvtrie {

// How commands name models and paths.

// A model by its id in hexadecimal digits, or by a name that one model alone has.
// NotFound: there is none. InvalidArgument: several have the name.
absl::StatusOr<std::string> ResolveModel(AdminClient& admin, const std::string& text);

// The path of --model with --tokens (numbers with commas between) or --tokens-file (u32le), and
// --salt. UsageError: the command line is not well-formed. InvalidArgument, NotFound: the file.
inline constexpr FlagSpec kTokensFlag{"tokens", FlagSpec::Kind::kText,
                                      "tokens of a prefix, from position 0, with commas between"};
inline constexpr FlagSpec kTokensFileFlag{"tokens-file", FlagSpec::Kind::kText,
                                          "file with the tokens, 4 bytes each, little-endian"};
inline constexpr FlagSpec kSaltFlag{"salt", FlagSpec::Kind::kText, "salt of the prefix"};
inline constexpr FlagSpec kModelFlag{"model", FlagSpec::Kind::kText, "model, by id or name"};

bool NamesPrefix(const CommandLine& line);
absl::StatusOr<v1::Prefix> ReadPrefix(AdminClient& admin, const CommandLine& line);

}  // namespace kvtrie
