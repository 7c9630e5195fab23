#include "client/ctl/table.h"

#include <algorithm>
#include <utility>

#include "storage/base/check.h"

namespace kvtrie {
namespace {

// Characters, not bytes: names may hold any UTF-8.
std::size_t WidthOf(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

}  // namespace

void Table::AddRow(std::vector<std::string> cells) {
  KV_CHECK(cells.size() == columns_.size());
  rows_.push_back(std::move(cells));
}

void Table::Print(std::ostream& out) const {
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    std::size_t width = WidthOf(columns_[c].title);
    for (const auto& row : rows_) width = std::max(width, WidthOf(row[c]));
    widths.push_back(width);
  }
  const auto print = [&](std::size_t c, const std::string& cell, std::string* line) {
    const std::string blanks(widths[c] - WidthOf(cell), ' ');
    if (c > 0) *line += "  ";
    *line += columns_[c].align == Align::kRight ? blanks + cell : cell + blanks;
  };
  const auto end_line = [&](std::string line) {
    line.erase(line.find_last_not_of(' ') + 1);
    out << line << "\n";
  };
  std::string titles;
  for (std::size_t c = 0; c < columns_.size(); ++c) print(c, columns_[c].title, &titles);
  end_line(std::move(titles));
  for (const auto& row : rows_) {
    std::string line;
    for (std::size_t c = 0; c < columns_.size(); ++c) print(c, row[c], &line);
    end_line(std::move(line));
  }
}

}  // namespace kvtrie
