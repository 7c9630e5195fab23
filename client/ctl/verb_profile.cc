#include "client/ctl/verb_profile.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "client/ctl/format.h"
#include "client/ctl/json_views.h"
#include "storage/codec/profile_header.h"

namespace kvtrie {
namespace {

absl::StatusOr<std::vector<std::byte>> ReadFile(const std::string& name) {
  std::error_code error;
  const std::uintmax_t bytes = std::filesystem::file_size(name, error);
  if (error) return absl::InvalidArgumentError("cannot read " + name + ": " + error.message());
  if (bytes > kProfileBytesMax) {
    return absl::InvalidArgumentError(name + " is larger than any profile");
  }
  std::vector<std::byte> content(bytes);
  std::ifstream file(name, std::ios::binary);
  file.read(reinterpret_cast<char*>(content.data()), static_cast<std::streamsize>(bytes));
  if (!file) return absl::InvalidArgumentError("cannot read " + name);
  return content;
}

ExitCode Put(const VerbContext& context) {
  const auto content = ReadFile(context.positional(1));
  if (!content.ok()) {
    return context.RefuseUsage("profile put: " + std::string(content.status().message()));
  }
  const auto profile = context.Cache()->PutProfile(*content);
  if (!profile.ok()) return context.Fail(profile.status());
  if (context.json) {
    context.out << DumpJson(ProfileToJson(*profile)) << "\n";
  } else {
    context.out << IdToHex(profile->profile_id()) << "\n";
  }
  return ExitCode::kOk;
}

ExitCode Get(const VerbContext& context, const ProfileId& id) {
  const auto content = context.Cache()->GetProfile(id);
  if (!content.ok()) return context.Fail(content.status());
  const std::string& name = context.positional(2);
  std::ofstream file(name, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(content->data()),
             static_cast<std::streamsize>(content->size()));
  file.close();
  if (!file) return context.Fail(absl::UnknownError("cannot write " + name));
  return ExitCode::kOk;
}

ExitCode Remove(const VerbContext& context, const ProfileId& id) {
  const absl::Status status = context.Cache()->DeleteProfile(id);
  return status.ok() ? ExitCode::kOk : context.Fail(status);
}

ExitCode Run(const VerbContext& context) {
  const std::string& what = context.positional(0);
  const std::size_t arguments = context.line.positionals().size() - 1;
  if (what != "put" && what != "get" && what != "rm") {
    return context.RefuseUsage("profile: '" + what + "' is not put, get or rm");
  }
  if (arguments != (what == "get" ? 2u : 1u)) {
    return context.RefuseUsage("profile " + what + ": needs " +
                               (what == "put"   ? "a file"
                                : what == "get" ? "an id and a file"
                                                : "an id"));
  }
  if (what == "put") return Put(context);
  const auto bytes = IdFromHex(context.positional(1));
  const auto id = bytes ? ProfileId::FromBytes(*bytes) : std::nullopt;
  if (!id) {
    return context.RefuseUsage("profile " + what + ": '" + context.positional(1) +
                               "' is not an id");
  }
  return what == "get" ? Get(context, *id) : Remove(context, *id);
}

}  // namespace

const Verb kProfileVerb{
    .name = "profile",
    .positionals = "put FILE | get ID FILE | rm ID",
    .positionals_min = 1,
    .positionals_max = 3,
    .summary = "store, read or remove a codec profile",
    .details = "put prints the profile's id. A profile that stored frames name is not removed.",
    .flags = {},
    .run = Run,
};

}  // namespace kvtrie
