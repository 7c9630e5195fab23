#include "storage/kv/model_spec.h"

#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>

#include "absl/strings/escaping.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/golden/golden_file.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

ModelSpec PlainSpec() {
  ModelSpec spec;
  spec.name = "smollm2-135m";
  spec.weights_revision = "main";
  spec.tokenizer_digest = "\x01\x02\x03";
  spec.dtype = DType::kBfloat16;
  spec.kv_groups = {{.layer_runs = {{30, 3, 64, 64}}, .window_tokens = 0}};
  spec.rope = {.pairing = RopePairing::kHalfSplit, .theta = 10000, .rotary_dims = 0, .scaling = ""};
  spec.block_tokens = 16;
  return spec;
}

// Uses every field: latent attention, a sliding window, an adapter, one of two ranks.
ModelSpec RichSpec() {
  ModelSpec spec;
  spec.name = "rich";
  spec.weights_revision = "r2";
  spec.tokenizer_digest.resize(32);
  std::iota(spec.tokenizer_digest.begin(), spec.tokenizer_digest.end(), '\0');
  spec.dtype = DType::kFloat16;
  spec.kv_groups = {{.layer_runs = {{2, 1, 576, 0}}, .window_tokens = 0},
                    {.layer_runs = {{3, 8, 128, 128}, {1, 4, 64, 32}}, .window_tokens = 4096}};
  spec.rope = {RopePairing::kInterleaved, 500000, 64, "yarn:factor=4"};
  spec.tensor_parallel_rank = 1;
  spec.tensor_parallel_size = 2;
  spec.adapter = "lora-7@3";
  spec.block_tokens = 32;
  spec.layout_tag = "paged-v2";
  return spec;
}

TEST(ModelSpecTest, BytesAreTheGoldenOnes) {
  EXPECT_EQ(PlainSpec().Encode(), ReadGolden("v1/model_spec_plain.bin"));
  EXPECT_EQ(RichSpec().Encode(), ReadGolden("v1/model_spec_rich.bin"));
}

// Expected values: Python's hashlib (tests/golden/make_v1.py).
TEST(ModelSpecTest, DigestIsSha256OfTheBytes) {
  EXPECT_EQ(PlainSpec().Digest().view(),
            absl::HexStringToBytes("5cb58815db583a30c182f5aef6f8d858"));
  EXPECT_EQ(RichSpec().Digest().view(), absl::HexStringToBytes("a29261da82dd24922338bc0f8621eab1"));
}

TEST(ModelSpecTest, DecodesWhatItEncodes) {
  for (const ModelSpec& spec : {PlainSpec(), RichSpec()}) {
    ASSERT_TRUE(spec.Validate().ok()) << spec.Validate();
    const auto decoded = ModelSpec::Decode(spec.Encode());
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(*decoded, spec);
  }
}

TEST(ModelSpecTest, RefusesEveryByteFlipAndCut) {
  const std::string bytes = RichSpec().Encode();
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (const int mask : {0x01, 0x80, 0xff}) {
      std::string damaged = bytes;
      damaged[i] = static_cast<char>(damaged[i] ^ mask);
      EXPECT_TRUE(absl::IsDataLoss(ModelSpec::Decode(damaged).status())) << i;
    }
    EXPECT_TRUE(absl::IsDataLoss(ModelSpec::Decode(bytes.substr(0, i)).status())) << i;
  }
}

TEST(ModelSpecTest, RefusesTheCorruptFiles) {
  for (const auto& [name, bytes] : ReadCorrupt("model_spec_")) {
    EXPECT_TRUE(absl::IsDataLoss(ModelSpec::Decode(bytes).status())) << name;
  }
}

TEST(ModelSpecTest, DigestKeepsNeighbouringFieldsApart) {
  ModelSpec left = PlainSpec();
  left.name = "a";
  left.weights_revision = "bc";
  ModelSpec right = left;
  right.name = "ab";
  right.weights_revision = "c";
  EXPECT_NE(left.Digest(), right.Digest());
}

using Change = std::function<void(ModelSpec&)>;

TEST(ModelSpecTest, DigestDependsOnEveryField) {
  const Change changes[] = {
      [](ModelSpec& s) { s.name += 'x'; },
      [](ModelSpec& s) { s.weights_revision += 'x'; },
      [](ModelSpec& s) { s.tokenizer_digest += 'x'; },
      [](ModelSpec& s) { s.dtype = DType::kFloat16; },
      [](ModelSpec& s) { s.kv_groups[0].window_tokens = 1; },
      [](ModelSpec& s) { s.kv_groups[0].layer_runs[0].layer_count = 29; },
      [](ModelSpec& s) { s.kv_groups[0].layer_runs[0].kv_heads = 2; },
      [](ModelSpec& s) { s.kv_groups[0].layer_runs[0].k_head_dim = 32; },
      [](ModelSpec& s) { s.kv_groups[0].layer_runs[0].v_head_dim = 32; },
      [](ModelSpec& s) { s.kv_groups.push_back(s.kv_groups[0]); },
      [](ModelSpec& s) { s.kv_groups[0].layer_runs.push_back(s.kv_groups[0].layer_runs[0]); },
      [](ModelSpec& s) { s.rope.pairing = RopePairing::kInterleaved; },
      [](ModelSpec& s) { s.rope.theta = 20000; },
      [](ModelSpec& s) { s.rope.rotary_dims = 32; },
      [](ModelSpec& s) { s.rope.scaling += 'x'; },
      [](ModelSpec& s) { s.tensor_parallel_size = 2; },
      [](ModelSpec& s) { s.adapter += 'x'; },
      [](ModelSpec& s) { s.block_tokens = 8; },
      [](ModelSpec& s) { s.layout_tag += 'x'; },
  };
  const ModelId plain = PlainSpec().Digest();
  for (std::size_t i = 0; i < std::size(changes); ++i) {
    ModelSpec spec = PlainSpec();
    changes[i](spec);
    ASSERT_TRUE(spec.Validate().ok()) << i << spec.Validate();
    EXPECT_NE(spec.Digest(), plain) << i;
  }
  ModelSpec second_rank = PlainSpec();
  second_rank.tensor_parallel_size = 2;
  const ModelId first = second_rank.Digest();
  second_rank.tensor_parallel_rank = 1;
  EXPECT_NE(second_rank.Digest(), first);
}

// Expected value: Python's hashlib (tests/golden/make_v1.py).
TEST(ModelSpecTest, CodecKeyIsThatOfTheValues) {
  EXPECT_EQ(PlainSpec().CodecKey().view(),
            absl::HexStringToBytes("2e05e53ed614425165bb611f02f8861e"));
  EXPECT_EQ(RichSpec().CodecKey().view(),
            absl::HexStringToBytes("24fefe38ca9c8a0e452b361d23b747a1"));
  const Change same[] = {
      [](ModelSpec& s) { s.block_tokens = 8; },
      [](ModelSpec& s) { s.dtype = DType::kFloat16; },
      [](ModelSpec& s) { s.layout_tag += 'x'; },
  };
  for (const Change& change : same) {
    ModelSpec spec = PlainSpec();
    change(spec);
    EXPECT_EQ(spec.CodecKey(), PlainSpec().CodecKey());
    EXPECT_NE(spec.Digest(), PlainSpec().Digest());
  }
  const Change other[] = {
      [](ModelSpec& s) { s.name += 'x'; },
      [](ModelSpec& s) { s.weights_revision += 'x'; },
      [](ModelSpec& s) { s.tokenizer_digest += 'x'; },
      [](ModelSpec& s) { s.kv_groups[0].window_tokens = 1; },
      [](ModelSpec& s) { s.kv_groups[0].layer_runs[0].v_head_dim = 32; },
      [](ModelSpec& s) { s.rope.theta = 20000; },
      [](ModelSpec& s) { s.tensor_parallel_size = 2; },
      [](ModelSpec& s) { s.adapter += 'x'; },
  };
  for (const Change& change : other) {
    ModelSpec spec = PlainSpec();
    change(spec);
    EXPECT_NE(spec.CodecKey(), PlainSpec().CodecKey());
  }
}

TEST(ModelSpecTest, LimitsAreAllowed) {
  ModelSpec spec = PlainSpec();
  spec.name.assign(256, 'n');
  spec.weights_revision.assign(256, 'w');
  spec.tokenizer_digest.assign(64, 't');
  spec.adapter.assign(256, 'a');
  spec.layout_tag.assign(256, 'l');
  spec.rope.scaling.assign(256, 's');
  spec.rope.rotary_dims = 4096;
  spec.dtype = DType::kUint8;
  spec.block_tokens = 1;
  spec.tensor_parallel_size = 1024;
  spec.tensor_parallel_rank = 1023;
  // 1024 layers of 64 KiB: as many layers and as many bytes as there may be.
  spec.kv_groups = {{.layer_runs = {{1024, 16, 2048, 2048}}, .window_tokens = 0xFFFFFFFF}};
  EXPECT_TRUE(spec.Validate().ok()) << spec.Validate();
  EXPECT_EQ(KvGeometry(spec).raw_block_bytes(), kRawBlockBytesMax);
  EXPECT_EQ(ModelSpec::Decode(spec.Encode()).value(), spec);
}

TEST(ModelSpecTest, NamesTheFirstFieldThatIsOutOfRange) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::pair<const char*, Change> cases[] = {
      {"name", [](ModelSpec& s) { s.name.clear(); }},
      {"name", [](ModelSpec& s) { s.name.assign(257, 'n'); }},
      {"weights_revision", [](ModelSpec& s) { s.weights_revision.clear(); }},
      {"weights_revision", [](ModelSpec& s) { s.weights_revision.assign(257, 'w'); }},
      {"tokenizer_digest", [](ModelSpec& s) { s.tokenizer_digest.clear(); }},
      {"tokenizer_digest", [](ModelSpec& s) { s.tokenizer_digest.assign(65, 't'); }},
      {"dtype", [](ModelSpec& s) { s.dtype = DType{0}; }},
      {"dtype", [](ModelSpec& s) { s.dtype = DType{8}; }},
      {"block_tokens", [](ModelSpec& s) { s.block_tokens = 0; }},
      {"block_tokens", [](ModelSpec& s) { s.block_tokens = 1025; }},
      {"layers", [](ModelSpec& s) { s.kv_groups.clear(); }},
      {"layer_runs", [](ModelSpec& s) { s.kv_groups[0].layer_runs.clear(); }},
      {"layer_count", [](ModelSpec& s) { s.kv_groups[0].layer_runs[0].layer_count = 0; }},
      {"layer_count", [](ModelSpec& s) { s.kv_groups[0].layer_runs[0].layer_count = 1025; }},
      {"layers",
       [](ModelSpec& s) {
         s.kv_groups[0].layer_runs = {{1000, 1, 1, 1}, {25, 1, 1, 1}};
       }},
      {"kv_heads", [](ModelSpec& s) { s.kv_groups[0].layer_runs[0].kv_heads = 0; }},
      {"kv_heads", [](ModelSpec& s) { s.kv_groups[0].layer_runs[0].kv_heads = 1025; }},
      {"k_head_dim", [](ModelSpec& s) { s.kv_groups[0].layer_runs[0].k_head_dim = 0; }},
      {"k_head_dim", [](ModelSpec& s) { s.kv_groups[0].layer_runs[0].k_head_dim = 4097; }},
      {"v_head_dim", [](ModelSpec& s) { s.kv_groups[0].layer_runs[0].v_head_dim = 4097; }},
      {"raw size",
       [](ModelSpec& s) {
         s.kv_groups[0].layer_runs = {{1024, 1024, 4096, 4096}};
       }},
      {"rope.pairing", [](ModelSpec& s) { s.rope.pairing = RopePairing{0}; }},
      {"rope.pairing", [](ModelSpec& s) { s.rope.pairing = RopePairing{4}; }},
      {"rope.theta", [](ModelSpec& s) { s.rope.theta = -1; }},
      {"rope.theta", [](ModelSpec& s) { s.rope.theta = -0.0; }},
      {"rope.theta", [](ModelSpec& s) { s.rope.theta = std::nan(""); }},
      {"rope.theta", [kInfinity](ModelSpec& s) { s.rope.theta = kInfinity; }},
      {"rope.rotary_dims", [](ModelSpec& s) { s.rope.rotary_dims = 4097; }},
      {"rope.scaling", [](ModelSpec& s) { s.rope.scaling.assign(257, 's'); }},
      {"tensor_parallel_size", [](ModelSpec& s) { s.tensor_parallel_size = 0; }},
      {"tensor_parallel_size", [](ModelSpec& s) { s.tensor_parallel_size = 1025; }},
      {"tensor_parallel_rank", [](ModelSpec& s) { s.tensor_parallel_rank = 1; }},
      {"adapter", [](ModelSpec& s) { s.adapter.assign(257, 'a'); }},
      {"layout_tag", [](ModelSpec& s) { s.layout_tag.assign(257, 'l'); }},
  };
  for (const auto& [field, change] : cases) {
    ModelSpec spec = PlainSpec();
    change(spec);
    const absl::Status status = spec.Validate();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << field;
    EXPECT_THAT(std::string(status.message()), HasSubstr(field));
    EXPECT_TRUE(absl::IsDataLoss(ModelSpec::Decode(spec.Encode()).status())) << field;
  }
}

TEST(KvGeometryTest, LayersFollowOneAnotherAcrossGroups) {
  const KvGeometry geometry(RichSpec());
  EXPECT_EQ(geometry.block_tokens(), 32u);
  ASSERT_EQ(geometry.layer_count(), 6u);
  constexpr std::size_t kRowBytes = 32 * 2;  // tokens of a block, times bytes of an element
  const std::size_t layer_bytes[] = {576 * kRowBytes,     576 * kRowBytes,
                                     8 * 256 * kRowBytes, 8 * 256 * kRowBytes,
                                     8 * 256 * kRowBytes, 4 * (64 + 32) * kRowBytes};
  std::size_t begin = 0;
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    EXPECT_EQ(geometry.layer_begin(layer), begin);
    begin += layer_bytes[layer];
    EXPECT_EQ(geometry.layer_end(layer), begin);
  }
  EXPECT_EQ(geometry.raw_block_bytes(), begin);
}

TEST(KvGeometryTest, KAndVOfALayerFollowOneAnother) {
  const KvGeometry geometry(RichSpec());
  EXPECT_EQ(geometry.dtype(), DType::kFloat16);
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    EXPECT_EQ(geometry.kind_begin(layer, KvKind::kK), geometry.layer_begin(layer));
    EXPECT_EQ(geometry.kind_begin(layer, KvKind::kV),
              geometry.layer_begin(layer) + geometry.kind_bytes(layer, KvKind::kK));
    EXPECT_EQ(geometry.kind_begin(layer, KvKind::kV) + geometry.kind_bytes(layer, KvKind::kV),
              geometry.layer_end(layer));
  }
  EXPECT_EQ(geometry.kv_heads(0), 1u);
  EXPECT_EQ(geometry.head_dim(1, KvKind::kK), 576u);
  EXPECT_EQ(geometry.head_dim(1, KvKind::kV), 0u);
  EXPECT_EQ(geometry.kind_bytes(1, KvKind::kV), 0u);
  EXPECT_EQ(geometry.row_components(4, KvKind::kV), 8u * 128);
  EXPECT_EQ(geometry.row_components(5, KvKind::kK), 4u * 64);
  EXPECT_EQ(geometry.row_components(5, KvKind::kV), 4u * 32);
  EXPECT_EQ(geometry.kind_bytes(5, KvKind::kV), 4u * 32 * 32 * 2);
}

TEST(DTypeTest, BytesOfAnElement) {
  EXPECT_EQ(DTypeBytes(DType::kFloat32), 4u);
  EXPECT_EQ(DTypeBytes(DType::kFloat16), 2u);
  EXPECT_EQ(DTypeBytes(DType::kBfloat16), 2u);
  EXPECT_EQ(DTypeBytes(DType::kFloat8E4m3), 1u);
  EXPECT_EQ(DTypeBytes(DType::kFloat8E5m2), 1u);
  EXPECT_EQ(DTypeBytes(DType::kInt8), 1u);
  EXPECT_EQ(DTypeBytes(DType::kUint8), 1u);
}

}  // namespace
}  // namespace kvtrie
