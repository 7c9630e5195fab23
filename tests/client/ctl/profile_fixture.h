#pragma once

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "client/ctl/cli.h"
#include "gtest/gtest.h"
#include "tests/storage/base/scratch_folder.h"
#include "tests/storage/codec/residual_fixture.h"
#include "tests/storage/codec/shared_text.h"

namespace kvtrie {

// A folder with all that `kvtrie profile` reads, of the synthetic model of residual_fixture.h.
class ProfileFolder {
 public:
  static constexpr std::string_view kSpecJson = R"({
    "name": "synthetic", "weights_revision": "synthetic", "tokenizer_digest": "c3ludGhldGlj",
    "dtype": "DTYPE_FLOAT32",
    "kv_groups": [{"layer_runs": [
        {"layer_count": 4, "kv_heads": 2, "k_head_dim": 8, "v_head_dim": 8}]}],
    "rope": {"pairing": "ROPE_PAIRING_HALF_SPLIT", "theta": 10000},
    "block_tokens": 16})";

  ProfileFolder() : spec_(SyntheticSpec()), texts_(FitTexts(spec_)) {
    Write("spec.json", kSpecJson);
    std::filesystem::create_directory(*this / "samples");
    for (std::size_t i = 0; i < texts_.size(); ++i) {
      const std::string name = "samples/" + std::to_string(i);
      Write(name + ".tokens", BytesOf<TokenId>(texts_[i].tokens));
      Write(name + ".kv", BytesOf<std::byte>(texts_[i].raw));
      Write(name + ".importance", BytesOf<float>(texts_[i].importance));
    }
    const SyntheticQueries queries = MakeQueries(spec_, 4);
    Write("queries.f32", BytesOf<float>(queries.means) + BytesOf<float>(queries.covariances));
    // Every component counts the same.
    std::vector<float> metrics;
    for (const PlaneShape& plane : PlanesOf(spec_)) {
      for (std::uint32_t row = 0; row < plane.components(); ++row) {
        for (std::uint32_t c = 0; c < plane.head_dim; ++c) {
          metrics.push_back(c == row % plane.head_dim ? 1 : 0);
        }
      }
    }
    Write("metrics.f32", BytesOf<float>(metrics));
  }

  const ModelSpec& spec() const { return spec_; }
  const std::vector<SyntheticText>& texts() const { return texts_; }
  std::string operator/(const std::string& name) const { return folder_ / name; }

  template <typename T>
  static std::string BytesOf(std::span<const T> values) {
    return {reinterpret_cast<const char*>(values.data()), values.size_bytes()};
  }
  void Write(const std::string& name, std::string_view bytes) const {
    std::ofstream(*this / name, std::ios::binary | std::ios::trunc) << bytes;
  }
  std::string Read(const std::string& name) const {
    std::ifstream file(*this / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  // A folder of so many sessions that hold 88 tokens of these texts behind other prefixes.
  void WriteRepeated(const std::string& name, std::uint32_t count) const {
    std::filesystem::create_directory(*this / name);
    for (std::uint32_t i = 0; i < count; ++i) {
      const SyntheticText text =
          ShareTokens(spec_, texts_[i % texts_.size()], 12, 88, 10, 100, 500 + i, 0.05f);
      Write(name + "/" + std::to_string(i) + ".tokens", BytesOf<TokenId>(text.tokens));
      Write(name + "/" + std::to_string(i) + ".kv", BytesOf<std::byte>(text.raw));
    }
  }

  // The flags of a fit of this folder. Steps are those of SmallFitOptions.
  std::vector<std::string> FitArguments(const std::string& out) const {
    return {"profile",      "fit",
            "--spec",       *this / "spec.json",
            "--samples",    *this / "samples",
            "--high",       "0.25",
            "--near-exact", "0.02",
            "--small",      "0.8",
            "--table",      "30",
            "--out",        *this / out};
  }

 private:
  ScratchFolder folder_;
  ModelSpec spec_;
  std::vector<SyntheticText> texts_;
};

struct CliOutcome {
  ExitCode code;
  std::string out;
  std::string err;
};

// Without a server.
inline CliOutcome RunKvtrie(const std::vector<std::string>& arguments) {
  std::ostringstream out, err;
  const CliEnvironment environment{
      .out = out, .err = err, .variable = [](const std::string&) {
        return std::optional<std::string>("unix:/nonexistent/kvtrie.sock");
      }};
  const ExitCode code = RunCli(arguments, environment);
  return {code, out.str(), err.str()};
}

// `more` replaces flags that are there, and adds others.
inline std::vector<std::string> With(std::vector<std::string> arguments,
                                     const std::vector<std::string>& more) {
  for (std::size_t i = 0; i + 1 < more.size(); i += 2) {
    const auto at = std::find(arguments.begin(), arguments.end(), more[i]);
    if (at == arguments.end()) {
      arguments.insert(arguments.end(), {more[i], more[i + 1]});
    } else {
      *(at + 1) = more[i + 1];
    }
  }
  return arguments;
}

}  // namespace kvtrie
