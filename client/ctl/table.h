#pragma once

#include <ostream>
#include <string>
#include <vector>

namespace kvtrie {

// Text in columns as wide as their widest cell, two spaces apart. Numbers (columns that are aligned
// right) end in line.
class Table {
 public:
  enum class Align { kLeft, kRight };
  struct Column {
    std::string title;
    Align align = Align::kLeft;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // REQUIRES: one cell per column.
  void AddRow(std::vector<std::string> cells);
  // No trailing blanks. A table without rows is its titles.
  void Print(std::ostream& out) const;

 private:
  const std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace kvtrie
