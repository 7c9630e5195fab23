#include "server/status_translation.h"

#include <gtest/gtest.h>

namespace kvtrie {
namespace {

TEST(StatusTranslationTest, CodesKeepTheirNumbers) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "why");
    EXPECT_EQ(ToGrpc(status).error_code(), code);
    EXPECT_EQ(ToGrpc(status).error_message(), "why");
    v1::ItemStatus item;
    ToItemStatus(status, &item);
    EXPECT_EQ(item.code(), static_cast<std::uint32_t>(code));
  }
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).ok());
}

TEST(StatusTranslationTest, MessagesAreAlwaysValidText) {
  v1::ItemStatus item;
  ToItemStatus(absl::InternalError("bytes \xff\x01"), &item);
  EXPECT_EQ(item.message(), "bytes \\xff\\x01");
}

TEST(StatusTranslationTest, WithinPutsThePlaceInFront) {
  EXPECT_EQ(Within("prefix.", absl::InvalidArgumentError("salt: too long")).message(),
            "prefix.salt: too long");
  EXPECT_TRUE(Within("prefix.", absl::OkStatus()).ok());
}

}  // namespace
}  // namespace kvtrie
