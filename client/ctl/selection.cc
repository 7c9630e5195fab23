#include "client/ctl/selection.h"

#include <charconv>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/format.h"
#include "client/ctl/profile_files.h"
#include "storage/base/status_macros.h"
#include "storage/kv/ids.h"

namespace kvtrie {
namespace {

absl::StatusOr<std::string> ParseTokens(std::string_view text) {
  std::string packed;
  while (true) {
    const std::size_t comma = text.find(',');
    const std::string_view number = text.substr(0, comma);
    TokenId token = 0;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), token);
    if (error != std::errc() || end != number.data() + number.size()) {
      return UsageError(absl::StrCat("--tokens: '", std::string(number), "' is not a token"));
    }
    packed.append(reinterpret_cast<const char*>(&token), sizeof token);
    if (comma == std::string_view::npos) return packed;
    text.remove_prefix(comma + 1);
  }
}

absl::StatusOr<std::string> ReadTokensFile(const std::string& path) {
  KV_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  KV_RETURN_IF_ERROR(NumbersOf<TokenId>(file, path).status());
  return std::string(file.text());
}

}  // namespace

absl::StatusOr<std::string> ResolveModel(AdminClient& admin, const std::string& text) {
  if (auto id = IdFromHex(text)) return *id;
  KV_ASSIGN_OR_RETURN(const v1::ListModelsResponse models, admin.ListModels());
  std::string found;
  for (const v1::ModelEntry& model : models.models()) {
    if (model.spec().name() != text) continue;
    if (!found.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("several models have the name '", text, "': name one by its id"));
    }
    found = model.model_id();
  }
  if (found.empty()) return absl::NotFoundError(absl::StrCat("there is no model '", text, "'"));
  return found;
}

bool NamesPrefix(const CommandLine& line) { return line.Has("tokens") || line.Has("tokens-file"); }

absl::StatusOr<v1::Prefix> ReadPrefix(AdminClient& admin, const CommandLine& line) {
  if (line.Has("tokens") == line.Has("tokens-file")) {
    return UsageError("a prefix needs --tokens or --tokens-file, and not both");
  }
  if (!line.Has("model")) return UsageError("a prefix needs --model");
  v1::Prefix prefix;
  if (line.Has("tokens")) {
    KV_ASSIGN_OR_RETURN(*prefix.mutable_tokens(), ParseTokens(line.Text("tokens")));
  } else {
    KV_ASSIGN_OR_RETURN(*prefix.mutable_tokens(),
                        OfFlag("tokens-file", ReadTokensFile(line.Text("tokens-file"))));
  }
  KV_ASSIGN_OR_RETURN(*prefix.mutable_model_id(), ResolveModel(admin, line.Text("model")));
  prefix.set_salt(line.Text("salt"));
  return prefix;
}

}  // namespace kvtrie
