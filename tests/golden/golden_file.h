#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace kvtrie {

// tests/golden; a test that uses this sets KV_GOLDEN_FOLDER in its CMakeLists.txt.
inline std::filesystem::path GoldenFolder() { return KV_GOLDEN_FOLDER; }

// A file of tests/golden; fails the test when it is missing or empty.
inline std::string ReadGolden(const std::filesystem::path& name) {
  std::ifstream file(GoldenFolder() / name, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  EXPECT_FALSE(bytes.empty()) << name;
  return bytes;
}

// The files of tests/golden/corrupt whose name starts with `prefix`, with their names.
inline std::vector<std::pair<std::string, std::string>> ReadCorrupt(const std::string& prefix) {
  std::vector<std::pair<std::string, std::string>> files;
  for (const auto& entry : std::filesystem::directory_iterator(GoldenFolder() / "corrupt")) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(prefix)) {
      files.emplace_back(name, ReadGolden(std::filesystem::path("corrupt") / name));
    }
  }
  std::sort(files.begin(), files.end());
  EXPECT_FALSE(files.empty()) << prefix;
  return files;
}

}  // namespace kvtrie
