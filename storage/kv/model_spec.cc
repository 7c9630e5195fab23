// Stored form of a ModelSpec, little-endian, sealed (sealed_bytes.h), version 1: one field after
// the other, each
//   u8 tag | u32 bytes | value
// with the tags of types.proto in ascending order, none left out.
//
//   tag  field                value
//     1  name                 text
//     2  weights_revision     text
//     3  tokenizer_digest     bytes
//     4  dtype                u8
//     5  kv_groups            per group: u32 window_tokens | u32 runs | per run: u32 layer_count,
//     kv_heads,
//                             k_head_dim, v_head_dim
//     6  rope                 u8 pairing | f64 theta | u32 rotary_dims | scaling as text
//     7  tensor_parallel_rank u32
//     8  tensor_parallel_size u32
//     9  adapter              text
//    10  block_tokens         u32
//    11  layout_tag           text
#include "storage/kv/model_spec.h"

#include <openssl/evp.h>

#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/kv/sealed_bytes.h"

namespace kvtrie {
namespace {

constexpr std::uint8_t kVersion = 1;

constexpr std::size_t kTextBytesMax = 256;
constexpr std::size_t kTokenizerDigestBytesMax = 64;
constexpr std::uint32_t kKvHeadsMax = 1024;
constexpr std::uint32_t kHeadDimMax = 4096;
constexpr std::uint32_t kTensorParallelSizeMax = 1024;

enum class FieldTag : std::uint8_t {
  kName = 1,
  kWeightsRevision = 2,
  kTokenizerDigest = 3,
  kDType = 4,
  kKvGroups = 5,
  kRope = 6,
  kTensorParallelRank = 7,
  kTensorParallelSize = 8,
  kAdapter = 9,
  kBlockTokens = 10,
  kLayoutTag = 11,
};

bool IsDType(DType dtype) { return dtype >= DType::kFloat32 && dtype <= DType::kUint8; }

bool IsRopePairing(RopePairing pairing) {
  return pairing >= RopePairing::kNone && pairing <= RopePairing::kInterleaved;
}

std::size_t LayerBytes(const LayerRun& run, std::uint32_t block_tokens, DType dtype) {
  return (std::size_t{run.k_head_dim} + run.v_head_dim) * run.kv_heads * block_tokens *
         DTypeBytes(dtype);
}

absl::Status CheckRange(const char* field, std::uint64_t value, std::uint64_t least,
                        std::uint64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", value, ", must be ", least, " to ", most));
}

absl::Status CheckBytes(const char* field, std::string_view value, std::size_t least,
                        std::size_t most) {
  if (value.size() >= least && value.size() <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " has ", value.size(), " bytes, must have ", least, " to ", most));
}

absl::Status CheckRope(const RopeSpec& rope) {
  if (!IsRopePairing(rope.pairing)) return absl::InvalidArgumentError("rope.pairing is unknown");
  // Minus zero equals zero, but would make another digest.
  if (!std::isfinite(rope.theta) || std::signbit(rope.theta)) {
    return absl::InvalidArgumentError("rope.theta must be finite and not negative");
  }
  KV_RETURN_IF_ERROR(CheckRange("rope.rotary_dims", rope.rotary_dims, 0, kHeadDimMax));
  return CheckBytes("rope.scaling", rope.scaling, 0, kTextBytesMax);
}

// The number of layers is checked before anything is multiplied by it.
absl::Status CheckGroups(const ModelSpec& spec) {
  std::uint64_t layers = 0;
  std::uint64_t raw_block_bytes = 0;
  for (const KvGroup& group : spec.kv_groups) {
    if (group.layer_runs.empty()) {
      return absl::InvalidArgumentError("kv_groups.layer_runs must not be empty");
    }
    for (const LayerRun& run : group.layer_runs) {
      KV_RETURN_IF_ERROR(
          CheckRange("kv_groups.layer_runs.layer_count", run.layer_count, 1, kLayersMax));
      KV_RETURN_IF_ERROR(CheckRange("kv_groups.layer_runs.kv_heads", run.kv_heads, 1, kKvHeadsMax));
      KV_RETURN_IF_ERROR(
          CheckRange("kv_groups.layer_runs.k_head_dim", run.k_head_dim, 1, kHeadDimMax));
      KV_RETURN_IF_ERROR(
          CheckRange("kv_groups.layer_runs.v_head_dim", run.v_head_dim, 0, kHeadDimMax));
      layers += run.layer_count;
      KV_RETURN_IF_ERROR(CheckRange("the number of layers in kv_groups", layers, 1, kLayersMax));
      raw_block_bytes += run.layer_count * LayerBytes(run, spec.block_tokens, spec.dtype);
    }
  }
  KV_RETURN_IF_ERROR(CheckRange("the number of layers in kv_groups", layers, 1, kLayersMax));
  return CheckRange("the raw size of a block in bytes", raw_block_bytes, 1, kRawBlockBytesMax);
}

void WriteField(ByteWriter& writer, FieldTag tag, std::string_view value) {
  writer.Write(tag);
  writer.Write(static_cast<std::uint32_t>(value.size()));
  writer.WriteText(value);
}

template <typename T>
void WriteNumberField(ByteWriter& writer, FieldTag tag, T value) {
  ByteWriter field;
  field.Write(value);
  WriteField(writer, tag, field.text());
}

// A missing field and one of another tag both end in a reader that is not Done.
ByteReader ReadField(ByteReader& reader, FieldTag tag) {
  const auto stored_tag = reader.Read<FieldTag>();
  const std::string_view value = reader.ReadText(reader.Read<std::uint32_t>());
  if (stored_tag != tag) reader.ReadBytes(reader.remaining_bytes() + 1);
  return ByteReader(value);
}

std::string ReadTextField(ByteReader& reader, FieldTag tag) {
  ByteReader field = ReadField(reader, tag);
  return std::string(field.ReadText(field.remaining_bytes()));
}

// False when the field has another size.
template <typename T>
bool ReadNumberField(ByteReader& reader, FieldTag tag, T& value) {
  ByteReader field = ReadField(reader, tag);
  value = field.Read<T>();
  return field.Done();
}

bool ReadGroups(ByteReader field, std::vector<KvGroup>& groups) {
  while (field.remaining_bytes() > 0) {
    KvGroup& group = groups.emplace_back();
    group.window_tokens = field.Read<std::uint32_t>();
    const auto run_count = field.Read<std::uint32_t>();
    for (std::uint32_t i = 0; i < run_count && field.ok(); ++i) {
      LayerRun& run = group.layer_runs.emplace_back();
      run.layer_count = field.Read<std::uint32_t>();
      run.kv_heads = field.Read<std::uint32_t>();
      run.k_head_dim = field.Read<std::uint32_t>();
      run.v_head_dim = field.Read<std::uint32_t>();
    }
  }
  return field.Done();
}

// The first 128 bits of the digest.
template <typename Id>
Id Sha256Id(const std::string& bytes) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  KV_CHECK(EVP_Digest(bytes.data(), bytes.size(), digest, nullptr, EVP_sha256(), nullptr) == 1);
  Id id;
  std::memcpy(id.bytes.data(), digest, Id::kBytes);
  return id;
}

}  // namespace

std::size_t DTypeBytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kFloat16:
    case DType::kBfloat16:
      return 2;
    case DType::kFloat8E4m3:
    case DType::kFloat8E5m2:
    case DType::kInt8:
    case DType::kUint8:
      return 1;
  }
  CheckFailed(__FILE__, __LINE__, "dtype is one of the enumeration");
}

absl::Status ModelSpec::Validate() const {
  KV_RETURN_IF_ERROR(CheckBytes("name", name, 1, kTextBytesMax));
  KV_RETURN_IF_ERROR(CheckBytes("weights_revision", weights_revision, 1, kTextBytesMax));
  KV_RETURN_IF_ERROR(CheckBytes("tokenizer_digest", tokenizer_digest, 1, kTokenizerDigestBytesMax));
  if (!IsDType(dtype)) return absl::InvalidArgumentError("dtype is unknown");
  KV_RETURN_IF_ERROR(CheckRange("block_tokens", block_tokens, 1, kBlockTokensMax));
  KV_RETURN_IF_ERROR(CheckGroups(*this));
  KV_RETURN_IF_ERROR(CheckRope(rope));
  KV_RETURN_IF_ERROR(
      CheckRange("tensor_parallel_size", tensor_parallel_size, 1, kTensorParallelSizeMax));
  KV_RETURN_IF_ERROR(
      CheckRange("tensor_parallel_rank", tensor_parallel_rank, 0, tensor_parallel_size - 1));
  KV_RETURN_IF_ERROR(CheckBytes("adapter", adapter, 0, kTextBytesMax));
  return CheckBytes("layout_tag", layout_tag, 0, kTextBytesMax);
}

std::string ModelSpec::Encode() const {
  ByteWriter groups;
  for (const KvGroup& group : kv_groups) {
    groups.Write(group.window_tokens);
    groups.Write(static_cast<std::uint32_t>(group.layer_runs.size()));
    for (const LayerRun& run : group.layer_runs) {
      groups.Write(run.layer_count);
      groups.Write(run.kv_heads);
      groups.Write(run.k_head_dim);
      groups.Write(run.v_head_dim);
    }
  }
  ByteWriter rope_field;
  rope_field.Write(rope.pairing);
  rope_field.Write(rope.theta);
  rope_field.Write(rope.rotary_dims);
  rope_field.WriteText(rope.scaling);

  ByteWriter writer = StartSealed(kVersion);
  WriteField(writer, FieldTag::kName, name);
  WriteField(writer, FieldTag::kWeightsRevision, weights_revision);
  WriteField(writer, FieldTag::kTokenizerDigest, tokenizer_digest);
  WriteNumberField(writer, FieldTag::kDType, dtype);
  WriteField(writer, FieldTag::kKvGroups, groups.text());
  WriteField(writer, FieldTag::kRope, rope_field.text());
  WriteNumberField(writer, FieldTag::kTensorParallelRank, tensor_parallel_rank);
  WriteNumberField(writer, FieldTag::kTensorParallelSize, tensor_parallel_size);
  WriteField(writer, FieldTag::kAdapter, adapter);
  WriteNumberField(writer, FieldTag::kBlockTokens, block_tokens);
  WriteField(writer, FieldTag::kLayoutTag, layout_tag);
  return Seal(std::move(writer));
}

absl::StatusOr<ModelSpec> ModelSpec::Decode(std::string_view bytes) {
  KV_ASSIGN_OR_RETURN(ByteReader reader, Unseal("model spec", kVersion, bytes));

  ModelSpec spec;
  spec.name = ReadTextField(reader, FieldTag::kName);
  spec.weights_revision = ReadTextField(reader, FieldTag::kWeightsRevision);
  spec.tokenizer_digest = ReadTextField(reader, FieldTag::kTokenizerDigest);
  bool ok = ReadNumberField(reader, FieldTag::kDType, spec.dtype);
  ok &= ReadGroups(ReadField(reader, FieldTag::kKvGroups), spec.kv_groups);
  ByteReader rope_field = ReadField(reader, FieldTag::kRope);
  spec.rope.pairing = rope_field.Read<RopePairing>();
  spec.rope.theta = rope_field.Read<double>();
  spec.rope.rotary_dims = rope_field.Read<std::uint32_t>();
  spec.rope.scaling = std::string(rope_field.ReadText(rope_field.remaining_bytes()));
  ok &= rope_field.Done();
  ok &= ReadNumberField(reader, FieldTag::kTensorParallelRank, spec.tensor_parallel_rank);
  ok &= ReadNumberField(reader, FieldTag::kTensorParallelSize, spec.tensor_parallel_size);
  spec.adapter = ReadTextField(reader, FieldTag::kAdapter);
  ok &= ReadNumberField(reader, FieldTag::kBlockTokens, spec.block_tokens);
  spec.layout_tag = ReadTextField(reader, FieldTag::kLayoutTag);
  if (!ok || !reader.Done()) return absl::DataLossError("model spec: malformed");

  if (absl::Status status = spec.Validate(); !status.ok()) {
    return absl::DataLossError(absl::StrCat("model spec: ", status.message()));
  }
  return spec;
}

ModelId ModelSpec::Digest() const { return Sha256Id<ModelId>(Encode()); }

CodecKey ModelSpec::CodecKey() const {
  ModelSpec seen = *this;
  seen.block_tokens = 1;
  seen.dtype = DType::kFloat32;
  seen.layout_tag.clear();
  return Sha256Id<kvtrie::CodecKey>("kvtrie codec key 1" + seen.Encode());
}

KvGeometry::KvGeometry(const ModelSpec& spec)
    : dtype_(spec.dtype), block_tokens_(spec.block_tokens) {
  std::size_t end = 0;
  for (const KvGroup& group : spec.kv_groups) {
    for (const LayerRun& run : group.layer_runs) {
      for (std::uint32_t layer = 0; layer < run.layer_count; ++layer) {
        end += LayerBytes(run, spec.block_tokens, spec.dtype);
        layers_.push_back({run.kv_heads, run.k_head_dim, run.v_head_dim, end});
      }
    }
  }
}

}  // namespace kvtrie
