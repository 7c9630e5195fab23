#include "storage/codec/lossless.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "gtest/gtest.h"
#include "storage/base/byte_reader.h"
#include "tests/golden/golden_file.h"
#include "tests/storage/codec/body_checks.h"
#include "tests/storage/codec/kernel_sets.h"
#include "tests/storage/codec/kv_codes.h"
#include "tests/storage/codec/test_random.h"

namespace kvtrie {
namespace {

Bytes GoldenRaw(const DTypeCase& dtype) {
  return KvBlock(dtype, LosslessGoldenGeometry(dtype.dtype), /*noise_layer=*/2);
}
constexpr FrameBinding kGoldenBinding = {
    .first_position = 4000, .tokens_crc32c = 0xE3069283, .profile = {}};

// Holds all that is promised of a body; returns its size.
std::size_t CheckRoundTrip(const KvGeometry& geometry, const Bytes& raw) {
  const RoundTrip trip = RoundTripOfEachKernelSet(
      geometry, [&] { return EncodeLossless(geometry, raw, kGoldenBinding); }, DecodeLossless);
  EXPECT_LE(trip.body.size(), raw.size() + 64);
  EXPECT_TRUE(trip.decoded == raw);
  return trip.body.size();
}

TEST(LosslessTest, BytesAreTheGoldenOnesOfEveryKernelSet) {
  for (const DTypeCase& dtype : kDTypes) {
    SCOPED_TRACE(dtype.name);
    const std::string golden = ReadGolden(std::string("v1/lossless_") + dtype.name + ".bin");
    const KvGeometry geometry = LosslessGoldenGeometry(dtype.dtype);
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
  for (const DTypeCase& dtype : kDTypes) {
    SCOPED_TRACE(dtype.name);
    for (const KvGeometry& geometry : VariedGeometries(dtype.dtype)) {
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
  const Bytes raw = KvBlock(kBfloat16Case, geometry, geometry.layer_count());
  EXPECT_LT(CheckRoundTrip(geometry, raw), raw.size() * 4 / 5);
}

TEST(LosslessTest, FloatsOfABfloat16TakeLittleMoreThanThose) {
  const KvGeometry wide = Geometry(DType::kFloat32, {{4, 3, 64, 64}}, 16);
  const KvGeometry narrow = Geometry(DType::kBfloat16, {{4, 3, 64, 64}}, 16);
  const Bytes narrow_raw = KvBlock(kBfloat16Case, narrow, 4);
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
  const KvGeometry geometry = Geometry(DType::kBfloat16, {{6, 3, 64, 64}}, 16);
  const CodedBody body = EncodeLossless(geometry, KvBlock(kBfloat16Case, geometry, 6), {});
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
    const KvGeometry geometry = LosslessGoldenGeometry(dtype.dtype);
    const Bytes raw = GoldenRaw(dtype);
    ExpectLayersDecodeAlone<LosslessReader>(geometry, EncodeLossless(geometry, raw, {}).bytes,
                                            LosslessHeadBytesMax(geometry), raw);
  }
}

TEST(LosslessReaderTest, CutBytesAreDamage) {
  for (const DTypeCase& dtype : kDTypes) {
    const KvGeometry geometry = LosslessGoldenGeometry(dtype.dtype);
    const Bytes body = EncodeLossless(geometry, GoldenRaw(dtype), {}).bytes;
    DamagedBody(geometry, body, DecodeLossless).ExpectOtherLengthsAreRefused(/*stride=*/37);
  }
}

TEST(LosslessReaderTest, DamageOfWhatIsCodedIsRefused) {
  const KvGeometry geometry = LosslessGoldenGeometry(DType::kBfloat16);
  const Bytes raw = GoldenRaw(kBfloat16Case);
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
  const DamagedBody damaged_body(geometry, body, DecodeLossless);
  EXPECT_TRUE(damaged_body.Refuses(24, 0, 4));
  EXPECT_TRUE(damaged_body.Refuses(24, 3, 4));
  EXPECT_TRUE(damaged_body.Refuses(124, 0, 1));
  EXPECT_TRUE(damaged_body.Refuses(236, 0, 4));
  EXPECT_TRUE(damaged_body.Refuses(236, 0x80000000, 4));
  EXPECT_TRUE(damaged_body.Refuses(236, 0x7FFFFFFF, 4));
  EXPECT_TRUE(damaged_body.Refuses(236, 0xFFFFFFFF, 4));
  EXPECT_TRUE(damaged_body.Refuses(rans_begin - 16, 4081, 2));
  EXPECT_TRUE(damaged_body.Refuses(rans_begin - 12, 0xFF, 4));
  EXPECT_TRUE(damaged_body.Refuses(rans_begin - 4, 0xFFFFFFFF, 4));
  EXPECT_TRUE(damaged_body.Refuses(rans_begin - 4, 0, 4));
}

TEST(LosslessReaderTest, AnyDamageGivesTheSameInEveryKernelSet) {
  for (const DTypeCase& dtype : kDTypes) {
    SCOPED_TRACE(dtype.name);
    const KvGeometry geometry = LosslessGoldenGeometry(dtype.dtype);
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
