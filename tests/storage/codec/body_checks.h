#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "storage/codec/coded_body.h"
#include "tests/storage/codec/kernel_sets.h"
#include "tests/storage/codec/kv_codes.h"

// What is held of every body that a codec without a profile writes. `decode` is DecodeLossless or
// DecodeRotated, and Reader the class beside it.
namespace kvtrie {

using DecodeBody = absl::Status(const KvGeometry&, std::span<const std::byte>,
                                std::span<std::byte>);

struct RoundTrip {
  Bytes body;
  Bytes decoded;
};

// Encodes (a CodedBody) and decodes with each kernel set: all write the same and read the same, and
// sections cover the body.
template <typename Encode>
RoundTrip RoundTripOfEachKernelSet(const KvGeometry& geometry, Encode encode, DecodeBody decode) {
  RoundTrip first;
  WithEachKernelSet([&] {
    const CodedBody body = encode();
    EXPECT_EQ(std::accumulate(body.section_bytes.begin(), body.section_bytes.end(), std::size_t{0}),
              body.bytes.size());
    Bytes decoded(geometry.raw_block_bytes(), std::byte{0x5A});
    const absl::Status status = decode(geometry, body.bytes, decoded);
    EXPECT_TRUE(status.ok()) << status;
    if (first.body.empty()) first = {.body = body.bytes, .decoded = decoded};
    EXPECT_TRUE(body.bytes == first.body);
    EXPECT_TRUE(decoded == first.decoded);
  });
  return first;
}

// Layers come back from the head and their own bytes, in whatever order.
template <typename Reader>
void ExpectLayersDecodeAlone(const KvGeometry& geometry, const Bytes& body, std::size_t head_bytes,
                             const Bytes& raw) {
  const Bytes head(body.begin(), body.begin() + static_cast<std::ptrdiff_t>(head_bytes));
  const auto reader = Reader::Parse(geometry, head);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(reader->body_bytes(), body.size());
  for (std::uint32_t layer = geometry.layer_count(); layer-- > 0;) {
    const Bytes own(body.begin() + static_cast<std::ptrdiff_t>(reader->layer_begin(layer)),
                    body.begin() + static_cast<std::ptrdiff_t>(reader->layer_end(layer)));
    const std::size_t begin = geometry.layer_begin(layer);
    Bytes decoded(geometry.layer_end(layer) - begin);
    ASSERT_TRUE(reader->DecodeLayer(layer, own, decoded).ok());
    EXPECT_TRUE(std::equal(decoded.begin(), decoded.end(),
                           raw.begin() + static_cast<std::ptrdiff_t>(begin)));
    EXPECT_TRUE(absl::IsDataLoss(
        reader->DecodeLayer(layer, std::span(own).first(own.size() - 1), decoded)));
  }
}

// A body that is changed before it is decoded.
class DamagedBody {
 public:
  DamagedBody(const KvGeometry& geometry, Bytes body, DecodeBody* decode)
      : geometry_(geometry), body_(std::move(body)), decode_(decode) {}

  // Whether it is refused with this value in the `size` bytes at `offset`.
  bool Refuses(std::size_t offset, std::uint32_t value, std::size_t size) const {
    Bytes damaged = body_;
    std::memcpy(damaged.data() + offset, &value, size);
    return IsRefused(damaged);
  }

  // Cut anywhere in its first 300 bytes and at every `stride` behind them, or with a byte more.
  void ExpectOtherLengthsAreRefused(std::size_t stride) const {
    for (std::size_t size = 0; size < body_.size(); size += size < 300 ? 1 : stride) {
      // A copy, so that a sanitizer sees a read past its end.
      const Bytes cut(body_.begin(), body_.begin() + static_cast<std::ptrdiff_t>(size));
      EXPECT_TRUE(IsRefused(cut)) << size;
    }
    Bytes longer = body_;
    longer.push_back(std::byte{0});
    EXPECT_TRUE(IsRefused(longer));
  }

 private:
  bool IsRefused(const Bytes& body) const {
    Bytes decoded(geometry_.raw_block_bytes());
    return absl::IsDataLoss(decode_(geometry_, body, decoded));
  }

  const KvGeometry geometry_;
  const Bytes body_;
  DecodeBody* const decode_;
};

}  // namespace kvtrie
