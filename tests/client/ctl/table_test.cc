#include "client/ctl/table.h"

#include <gtest/gtest.h>

#include <sstream>

namespace kvtrie {
namespace {

std::string Printed(const Table& table) {
  std::ostringstream out;
  table.Print(out);
  return out.str();
}

TEST(TableTest, ColumnsAreAsWideAsTheirWidestCell) {
  Table table({{"NAME"}, {"BYTES", Table::Align::kRight}, {"NOTE"}});
  table.AddRow({"a", "5", "first"});
  table.AddRow({"longer", "1234567", ""});
  EXPECT_EQ(Printed(table),
            "NAME      BYTES  NOTE\n"
            "a             5  first\n"
            "longer  1234567\n");
}

TEST(TableTest, WithoutRowsItIsItsTitles) { EXPECT_EQ(Printed(Table({{"A"}, {"B"}})), "A  B\n"); }

TEST(TableTest, WidthCountsCharactersNotBytes) {
  Table table({{"N"}, {"X"}});
  table.AddRow({"äö", "1"});
  table.AddRow({"abc", "2"});
  EXPECT_EQ(Printed(table), "N    X\näö   1\nabc  2\n");
}

}  // namespace
}  // namespace kvtrie
