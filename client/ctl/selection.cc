#include "client/ctl/selection.h"

#include <charconv>
#include <fstream>
#include <sstream>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "client/ctl/format.h"
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
      return absl::InvalidArgumentError(
          absl::StrCat("--tokens: '", std::string(number), "' is not a token"));
    }
    packed.append(reinterpret_cast<const char*>(&token), sizeof token);
    if (comma == std::string_view::npos) return packed;
    text.remove_prefix(comma + 1);
  }
}

absl::StatusOr<std::string> ReadTokensFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::InvalidArgumentError(absl::StrCat("--tokens-file: cannot open ", path));
  std::ostringstream content;
  content << file.rdbuf();
  std::string packed = content.str();
  if (packed.empty() || packed.size() % sizeof(TokenId) != 0) {
    return absl::InvalidArgumentError("--tokens-file: not a whole number of tokens");
  }
  return packed;
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
    return absl::InvalidArgumentError("a prefix needs --tokens or --tokens-file");
  }
  if (!line.Has("model")) return absl::InvalidArgumentError("a prefix needs --model");
  v1::Prefix prefix;
  if (line.Has("tokens")) {
    KV_ASSIGN_OR_RETURN(*prefix.mutable_tokens(), ParseTokens(line.Text("tokens")));
  } else {
    KV_ASSIGN_OR_RETURN(*prefix.mutable_tokens(), ReadTokensFile(line.Text("tokens-file")));
  }
  KV_ASSIGN_OR_RETURN(*prefix.mutable_model_id(), ResolveModel(admin, line.Text("model")));
  prefix.set_salt(line.Text("salt"));
  return prefix;
}

}  // namespace kvtrie
