#include "storage/codec/lossless.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "storage/base/byte_reader.h"
#include "tests/golden/golden_file.h"
#include "tests/storage/codec/kernel_sets.h"
#include "tests/storage/codec/kv_codes.h"
#include "tests/storage/codec/test_random.h"

namespace kvtrie {
namespace {

KvGeometry GoldenGeometry(DType dtype) {
  return Geometry(dtype, {{1, 2, 20, 7}, {1, 1, 33, 0}, {1, 1, 5, 16}}, 64);
}
Bytes GoldenRaw(const DTypeCase& dtype) {
  return KvBlock(dtype, GoldenGeometry(dtype.dtype), /*noise_layer=*/2);
}
constexpr FrameBinding kGoldenBinding = {
    .first_position = 4000, .tokens_crc32c = 0xE3069283, .profile = {}};

// Encodes and decodes with each kernel set, holding all that is promised of a body. Returns its
// size.
std::size_t CheckRoundTrip(const KvGeometry& geometry, const Bytes& raw) {
  Bytes first;
  WithEachKernelSet([&] {
    const CodedBody body = EncodeLossless(geometry, raw, kGoldenBinding);
    if (first.empty()) first = body.bytes;
    EXPECT_TRUE(body.bytes == first);
    EXPECT_LE(body.bytes.size(), raw.size() + 64);
    EXPECT_EQ(std::accumulate(body.section_bytes.begin(), body.section_bytes.end(), std::size_t{0}),
              body.bytes.size());
    Bytes decoded(raw.size(), std::byte{0x5A});
    const absl::Status status = DecodeLossless(geometry, body.bytes, decoded);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(decoded == raw);
  });
  return first.size();
}

TEST(LosslessTest, BytesAreTheGoldenOnesOfEveryKernelSet) {
  for (const DTypeCase& dtype : kDTypes) {
    SCOPED_TRACE(dtype.name);
    const std::string golden = ReadGolden(std::string("v1/lossless_") + dtype.name + ".bin");
    const KvGeometry geometry = GoldenGeometry(dtype.dtype);
    const Bytes raw = GoldenRaw(dtype);
    WithEachKernelSet([&] {
      const CodedBody body = EncodeLossless(geometry, raw, kGoldenBinding);
      EXPECT_TRUE(AsText(body.bytes) == golden);
      Bytes decoded(raw.size());
      const absl::Status status = DecodeLossless(geometry, AsBytes(golden), decoded);
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_TRUE(decoded == raw);
    });
  }
}

TEST(LosslessTest, EveryShapeComesBack) {
  const std::vector<std::pair<std::vector<LayerRun>, std::uint32_t>> shapes = {
      {{{1, 1, 1, 0}}, 1},
      {{{1, 1, 1, 1}}, 1},
      {{{3, 1, 576, 0}}, 16},
      {{{2, 32, 8, 8}}, 7},
      {{{1, 3, 64, 64}, {1, 1, 31, 97}, {1, 5, 1, 2}}, 33},
      {{{1, 1, 16, 16}}, 1024}};
  for (const DTypeCase& dtype : kDTypes) {
    SCOPED_TRACE(dtype.name);
    for (const auto& [runs, tokens] : shapes) {
      const KvGeometry geometry = Geometry(dtype.dtype, runs, tokens);
      CheckRoundTrip(geometry, KvBlock(dtype, geometry, geometry.layer_count()));
    }
  }
}

TEST(LosslessTest, ExtremesComeBack) {
  for (const DTypeCase& dtype : kDTypes) {
    SCOPED_TRACE(dtype.name);
    const KvGeometry geometry = Geometry(dtype.dtype, {{2, 3, 40, 24}}, 64);
    const std::size_t size = geometry.raw_block_bytes();
    CheckRoundTrip(geometry, Noise(size, 1));
    // Every byte the same: zeros, NaN with all payload bits, and others.
    for (const int byte : {0x00, 0xFF, 0x80, 0x7F, 0x01}) {
      const std::size_t coded = CheckRoundTrip(geometry, Bytes(size, static_cast<std::byte>(byte)));
      EXPECT_LT(coded, 0.95 * static_cast<double>(size)) << byte;
    }
    // Two halves that have nothing in common, noise in between.
    Bytes mixed = Noise(size, 2);
    std::fill_n(mixed.begin(), size / 3, std::byte{0});
    std::fill_n(mixed.rbegin(), size / 3, std::byte{0xFF});
    CheckRoundTrip(geometry, mixed);
  }
}

TEST(LosslessTest, ZerosTakeNearlyNothing) {
  const KvGeometry geometry = Geometry(DType::kBfloat16, {{30, 3, 64, 64}}, 16);
  EXPECT_LT(CheckRoundTrip(geometry, Bytes(geometry.raw_block_bytes())),
            geometry.raw_block_bytes() / 50);
}

TEST(LosslessTest, KvTakesFewerBytes) {
  const KvGeometry geometry = Geometry(DType::kBfloat16, {{8, 3, 64, 64}}, 16);
  const DTypeCase& bfloat16 = kDTypes[2];
  const Bytes raw = KvBlock(bfloat16, geometry, geometry.layer_count());
  EXPECT_LT(CheckRoundTrip(geometry, raw), raw.size() * 4 / 5);
}

TEST(LosslessTest, FloatsOfABfloat16TakeLittleMoreThanThose) {
  const KvGeometry wide = Geometry(DType::kFloat32, {{4, 3, 64, 64}}, 16);
  const KvGeometry narrow = Geometry(DType::kBfloat16, {{4, 3, 64, 64}}, 16);
  const Bytes narrow_raw = KvBlock(kDTypes[2], narrow, 4);
  Bytes wide_raw(wide.raw_block_bytes());
  for (std::size_t i = 0; i < narrow_raw.size() / 2; ++i) {
    std::copy_n(&narrow_raw[2 * i], 2, &wide_raw[4 * i + 2]);
  }
  EXPECT_EQ(CheckRoundTrip(wide, wide_raw), CheckRoundTrip(narrow, narrow_raw));
}

TEST(LosslessTest, NoiseIsKeptRaw) {
  const KvGeometry geometry = Geometry(DType::kFloat8E4m3, {{2, 4, 64, 64}}, 16);
  EXPECT_EQ(CheckRoundTrip(geometry, Noise(geometry.raw_block_bytes(), 3)),
            geometry.raw_block_bytes() + 28);
}

TEST(LosslessTest, SectionsEndWithLayers) {
  const DTypeCase& bfloat16 = kDTypes[2];
  const KvGeometry geometry = Geometry(DType::kBfloat16, {{6, 3, 64, 64}}, 16);
  const CodedBody body = EncodeLossless(geometry, KvBlock(bfloat16, geometry, 6), {});
  const auto reader = LosslessReader::Parse(geometry, body.bytes);
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_EQ(body.section_bytes.size(), 6u);
  std::size_t end = 0;
  for (std::uint32_t layer = 0; layer < 6; ++layer) {
    end += body.section_bytes[layer];
    EXPECT_EQ(end, reader->layer_end(layer));
    EXPECT_GE(body.section_bytes[layer], 4096u);
  }
}

TEST(LosslessReaderTest, NeedsTheHeadAndALayersOwnBytes) {
  for (const DTypeCase& dtype : kDTypes) {
    SCOPED_TRACE(dtype.name);
    const KvGeometry geometry = GoldenGeometry(dtype.dtype);
    const Bytes raw = GoldenRaw(dtype);
    const CodedBody body = EncodeLossless(geometry, raw, {});
    const Bytes head(body.bytes.begin(), body.bytes.begin() + static_cast<std::ptrdiff_t>(
                                                                  LosslessHeadBytesMax(geometry)));
    const auto reader = LosslessReader::Parse(geometry, head);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(reader->body_bytes(), body.bytes.size());
    for (const std::uint32_t layer : {2u, 0u, 1u}) {
      const Bytes own(body.bytes.begin() + static_cast<std::ptrdiff_t>(reader->layer_begin(layer)),
                      body.bytes.begin() + static_cast<std::ptrdiff_t>(reader->layer_end(layer)));
      const std::size_t begin = geometry.layer_begin(layer);
      const std::size_t size = geometry.layer_end(layer) - begin;
      Bytes decoded(size);
      ASSERT_TRUE(reader->DecodeLayer(layer, own, decoded).ok());
      EXPECT_TRUE(std::equal(decoded.begin(), decoded.end(),
                             raw.begin() + static_cast<std::ptrdiff_t>(begin)));
      EXPECT_TRUE(absl::IsDataLoss(
          reader->DecodeLayer(layer, std::span(own).first(own.size() - 1), decoded)));
    }
  }
}

TEST(LosslessReaderTest, CutBytesAreDamage) {
  for (const DTypeCase& dtype : kDTypes) {
    const KvGeometry geometry = GoldenGeometry(dtype.dtype);
    const Bytes body = EncodeLossless(geometry, GoldenRaw(dtype), {}).bytes;
    Bytes decoded(geometry.raw_block_bytes());
    for (std::size_t size = 0; size < body.size(); size += size < 300 ? 1 : 37) {
      // A copy, so that a sanitizer sees a read past its end.
      const Bytes cut(body.begin(), body.begin() + static_cast<std::ptrdiff_t>(size));
      EXPECT_TRUE(absl::IsDataLoss(DecodeLossless(geometry, cut, decoded))) << size;
    }
    Bytes longer = body;
    longer.push_back(std::byte{0});
    EXPECT_TRUE(absl::IsDataLoss(DecodeLossless(geometry, longer, decoded)));
  }
}

TEST(LosslessReaderTest, DamageOfWhatIsCodedIsRefused) {
  const DTypeCase& bfloat16 = kDTypes[2];
  const KvGeometry geometry = GoldenGeometry(DType::kBfloat16);
  const Bytes raw = GoldenRaw(bfloat16);
  const Bytes body = EncodeLossless(geometry, raw, {}).bytes;
  const auto reader = LosslessReader::Parse(geometry, body).value();
  const std::size_t rans_begin = reader.layer_begin(0) + 16;
  std::uint32_t rans_bytes;
  std::memcpy(&rans_bytes, body.data() + rans_begin - 4, sizeof rans_bytes);
  Bytes decoded(raw.size());
  // Where two symbols of one frequency exchange, what follows is as before: a checksum sees more.
  int undetected = 0;
  for (std::size_t bit = 0; bit < 8 * rans_bytes; bit += 23) {
    Bytes damaged = body;
    damaged[rans_begin + bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    const absl::Status status = DecodeLossless(geometry, damaged, decoded);
    EXPECT_TRUE(status.ok() || absl::IsDataLoss(status)) << bit;
    undetected += status.ok() ? 1 : 0;
  }
  EXPECT_LT(undetected, static_cast<int>(rans_bytes) / 50);
  // Modes, sizes, means and planes that cannot be.
  const auto refuses = [&](std::size_t offset, std::uint32_t value, std::size_t size) {
    Bytes damaged = body;
    std::memcpy(damaged.data() + offset, &value, size);
    return absl::IsDataLoss(DecodeLossless(geometry, damaged, decoded));
  };
  EXPECT_TRUE(refuses(24, 0, 4));
  EXPECT_TRUE(refuses(24, 3, 4));
  EXPECT_TRUE(refuses(124, 0, 1));
  EXPECT_TRUE(refuses(236, 0, 4));
  EXPECT_TRUE(refuses(236, 0x80000000, 4));
  EXPECT_TRUE(refuses(236, 0x7FFFFFFF, 4));
  EXPECT_TRUE(refuses(236, 0xFFFFFFFF, 4));
  EXPECT_TRUE(refuses(rans_begin - 16, 4081, 2));
  EXPECT_TRUE(refuses(rans_begin - 12, 0xFF, 4));
  EXPECT_TRUE(refuses(rans_begin - 4, 0xFFFFFFFF, 4));
  EXPECT_TRUE(refuses(rans_begin - 4, 0, 4));
}

TEST(LosslessReaderTest, AnyDamageGivesTheSameInEveryKernelSet) {
  for (const DTypeCase& dtype : kDTypes) {
    SCOPED_TRACE(dtype.name);
    const KvGeometry geometry = GoldenGeometry(dtype.dtype);
    const Bytes body = EncodeLossless(geometry, GoldenRaw(dtype), {}).bytes;
    TestRandom random(7);
    for (int round = 0; round < 60; ++round) {
      Bytes damaged = body;
      for (int i = 0; i < 3; ++i) {
        damaged[28 + random.Below(static_cast<std::uint32_t>(body.size() - 28))] =
            static_cast<std::byte>(random.Below(256));
      }
      Bytes first;
      absl::StatusCode first_code{};
      WithEachKernelSet([&] {
        Bytes decoded(geometry.raw_block_bytes());
        const absl::StatusCode code = DecodeLossless(geometry, damaged, decoded).code();
        EXPECT_TRUE(code == absl::StatusCode::kOk || code == absl::StatusCode::kDataLoss);
        if (first.empty()) {
          first = decoded;
          first_code = code;
        }
        EXPECT_EQ(code, first_code);
        EXPECT_TRUE(decoded == first);
      });
    }
  }
}

}  // namespace
}  // namespace kvtrie
