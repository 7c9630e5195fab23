// ROTATED.md has the layout.
#include "storage/codec/rotated.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numbers>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "storage/base/byte_order.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/codec/codec_kernels.h"
#include "storage/codec/lanes.h"
#include "storage/codec/lloyd_max.h"
#include "storage/codec/portable_math.h"

namespace kvtrie {
namespace {

constexpr std::uint32_t kTransform = 1;  // the rotation of ROTATED.md
constexpr std::size_t kHeadBytes = kFrameBindingBytes + 4;
constexpr std::size_t kKindHeadBytes = 4;
constexpr std::uint32_t kBitsMin = 2;
constexpr std::uint32_t kBitsMax = 5;
constexpr std::uint16_t kScaleMax = 0x7BFF;  // the largest float16

constexpr KvKind kKinds[] = {KvKind::kK, KvKind::kV};

absl::Status Damaged(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("rotated body: ", what));
}

// The n-th number of SplitMix64 (Steele, Lea, Flood 2014).
std::uint64_t SplitMix64(std::uint64_t n) {
  constexpr std::uint64_t kSeed = 0x4B56524F54415445;
  std::uint64_t z = kSeed + (n + 1) * 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

struct Rotation {
  std::vector<float> signs;
  std::vector<float> cas;
  LloydMaxCodebook books[kBitsMax + 1];
};

// Made once per process, for each head size and number of bits that it meets.
RotatedShape ShapeOf(std::uint32_t head_dim, std::uint32_t bits) {
  static absl::Mutex mutex;
  static auto* const rotations = new std::map<std::uint32_t, std::unique_ptr<Rotation>>;

  const std::uint32_t hadamard_dim = head_dim & (0 - head_dim);
  const std::uint32_t hartley_dim = head_dim / hadamard_dim;
  absl::MutexLock lock(&mutex);
  std::unique_ptr<Rotation>& rotation = (*rotations)[head_dim];
  if (rotation == nullptr) {
    rotation = std::make_unique<Rotation>();
    for (std::uint32_t i = 0; i < head_dim; ++i) {
      rotation->signs.push_back((SplitMix64(i / 64) >> i % 64 & 1) != 0 ? -1.0f : 1.0f);
    }
    for (std::uint32_t i = 0; i < hartley_dim; ++i) {
      const double angle = 2 * std::numbers::pi * i / hartley_dim;
      const SineAndCosine of = PortableSineAndCosine(angle);
      rotation->cas.push_back(static_cast<float>(of.cosine + of.sine));
    }
  }
  LloydMaxCodebook& book = rotation->books[bits];
  if (book.codewords.empty()) book = MakeLloydMaxCodebook(head_dim, bits);
  return {.head_dim = head_dim,
          .hadamard_dim = hadamard_dim,
          .hartley_dim = hartley_dim,
          .cas = rotation->cas.data(),
          .signs = rotation->signs.data(),
          .inverse_root_dim = static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim))),
          .bits = bits,
          .codewords = book.codewords.data(),
          .bounds = book.bounds.data()};
}

// One kind of one layer: vectors in the order of the raw KV, [token][KV head].
struct Vectors {
  std::size_t count;
  std::uint32_t head_dim;
  std::size_t component_bytes;

  Vectors(const KvGeometry& geometry, std::uint32_t layer, KvKind kind)
      : count(std::size_t{geometry.block_tokens()} * geometry.kv_heads(layer)),
        head_dim(geometry.head_dim(layer, kind)),
        component_bytes(DTypeBytes(geometry.dtype())) {}

  std::size_t vector_bytes() const { return head_dim * component_bytes; }
  std::size_t raw_bytes() const { return count * vector_bytes(); }
  std::size_t group_count() const { return (count + kLanes - 1) / kLanes; }
  std::size_t group_plane_bytes(std::uint32_t bits) const {
    return 2 * std::size_t{head_dim} * bits;
  }
};

const std::uint8_t* Bytes(const std::byte* bytes) {
  return reinterpret_cast<const std::uint8_t*>(bytes);
}
std::uint8_t* Bytes(std::byte* bytes) { return reinterpret_cast<std::uint8_t*>(bytes); }

constexpr auto kHalf = static_cast<std::size_t>(DType::kFloat16);

// Appends the kind; returns how many vectors could not be quantized. The first `exact_count` are
// not.
std::uint64_t AppendKind(const Vectors& vectors, DType dtype, std::span<const std::byte> raw,
                         std::uint32_t bits, std::size_t exact_count, std::vector<std::byte>& to) {
  const RotatedShape shape = ShapeOf(vectors.head_dim, bits);
  const auto load_floats = Kernels().load_floats[static_cast<std::size_t>(dtype)];
  std::vector<float> rows(kLanes * vectors.head_dim);
  std::vector<float> work(2 * kLanes * vectors.head_dim);
  std::vector<float> scales(vectors.group_count() * kLanes);

  const std::size_t begin = to.size();
  const std::size_t scales_begin = begin + kKindHeadBytes + 4;
  const std::size_t planes_begin = scales_begin + 2 * vectors.count;
  to.resize(planes_begin + vectors.group_count() * vectors.group_plane_bytes(bits));
  std::uint64_t not_quantized = 0;
  std::vector<std::uint32_t> exact;
  for (std::size_t group = 0; group < vectors.group_count(); ++group) {
    const std::size_t first = group * kLanes;
    const std::size_t in_group = std::min(vectors.count - first, kLanes);
    load_floats(Bytes(raw.data()) + first * vectors.vector_bytes(), in_group * vectors.head_dim,
                rows.data());
    std::fill(rows.begin() + static_cast<std::ptrdiff_t>(in_group * vectors.head_dim), rows.end(),
              0.0f);
    const std::uint16_t failed = Kernels().rotated_encode(
        shape, rows.data(), work.data(), scales.data() + first,
        Bytes(to.data()) + planes_begin + group * vectors.group_plane_bytes(bits));
    not_quantized += static_cast<std::uint64_t>(__builtin_popcount(failed));
    for (std::size_t i = 0; i < in_group; ++i) {
      if ((failed >> i & 1) != 0 || first + i < exact_count) {
        exact.push_back(static_cast<std::uint32_t>(first + i));
      }
    }
  }
  Kernels().store_floats[kHalf](scales.data(), vectors.count, Bytes(to.data()) + scales_begin);
  StoreLittle(to.data() + begin, bits);
  StoreLittle(to.data() + begin + kKindHeadBytes, static_cast<std::uint32_t>(exact.size()));
  for (const std::uint32_t index : exact) {
    const std::size_t at = to.size();
    to.resize(at + 4);
    StoreLittle(to.data() + at, index);
  }
  for (const std::uint32_t index : exact) {
    const auto vector = raw.subspan(index * vectors.vector_bytes(), vectors.vector_bytes());
    to.insert(to.end(), vector.begin(), vector.end());
  }

  if (to.size() - begin < kKindHeadBytes + raw.size()) return not_quantized;
  to.resize(begin);
  to.resize(begin + kKindHeadBytes);
  to.insert(to.end(), raw.begin(), raw.end());
  return not_quantized;
}

absl::Status DecodeKind(const Vectors& vectors, DType dtype, ByteReader& bytes,
                        std::span<std::byte> raw) {
  const auto bits = bytes.Read<std::uint32_t>();
  if (bits == 0) {
    const auto stored = bytes.ReadBytes(raw.size());
    if (!bytes.ok()) return Damaged("cut off in raw vectors");
    std::copy(stored.begin(), stored.end(), raw.begin());
    return absl::OkStatus();
  }
  if (bits < kBitsMin || bits > kBitsMax) return Damaged("no such number of bits");
  const auto exact_count = bytes.Read<std::uint32_t>();
  const auto stored_scales = bytes.ReadBytes(2 * vectors.count);
  const auto planes = bytes.ReadBytes(vectors.group_count() * vectors.group_plane_bytes(bits));
  const auto exact_indexes = bytes.ReadBytes(std::size_t{4} * exact_count);
  const auto exact_values = bytes.ReadBytes(exact_count * vectors.vector_bytes());
  if (!bytes.ok() || exact_count > vectors.count) return Damaged("cut off in vectors");

  for (std::size_t i = 0; i < vectors.count; ++i) {
    if (LoadLittle<std::uint16_t>(stored_scales.data() + 2 * i) > kScaleMax) {
      return Damaged("a scale that is none");
    }
  }
  std::vector<float> scales(vectors.group_count() * kLanes);
  Kernels().load_floats[kHalf](Bytes(stored_scales.data()), vectors.count, scales.data());

  const RotatedShape shape = ShapeOf(vectors.head_dim, bits);
  const auto store_floats = Kernels().store_floats[static_cast<std::size_t>(dtype)];
  std::vector<float> rows(kLanes * vectors.head_dim);
  std::vector<float> work(2 * kLanes * vectors.head_dim);
  for (std::size_t group = 0; group < vectors.group_count(); ++group) {
    const std::size_t first = group * kLanes;
    const std::size_t in_group = std::min(vectors.count - first, kLanes);
    Kernels().rotated_decode(shape, Bytes(planes.data()) + group * vectors.group_plane_bytes(bits),
                             scales.data() + first, work.data(), rows.data());
    store_floats(rows.data(), in_group * vectors.head_dim,
                 Bytes(raw.data()) + first * vectors.vector_bytes());
  }
  std::uint64_t next_least = 0;
  for (std::uint32_t i = 0; i < exact_count; ++i) {
    const auto index = LoadLittle<std::uint32_t>(exact_indexes.data() + std::size_t{4} * i);
    if (index < next_least || index >= vectors.count) return Damaged("indexes of exact vectors");
    next_least = std::uint64_t{index} + 1;
    std::copy_n(exact_values.begin() + static_cast<std::ptrdiff_t>(i * vectors.vector_bytes()),
                vectors.vector_bytes(),
                raw.begin() + static_cast<std::ptrdiff_t>(index * vectors.vector_bytes()));
  }
  return absl::OkStatus();
}

absl::Status CheckBits(const char* option, std::uint32_t bits) {
  if (bits >= kBitsMin && bits <= kBitsMax) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rotated codec: ", option, " is ", bits, ", must be 2 to 5"));
}

}  // namespace

absl::StatusOr<RotatedBlock> EncodeRotated(const KvGeometry& geometry,
                                           std::span<const std::byte> raw,
                                           const FrameBinding& binding,
                                           const RotatedOptions& options) {
  KV_CHECK(raw.size() == geometry.raw_block_bytes());
  KV_RETURN_IF_ERROR(CheckBits("k_bits", options.k_bits));
  KV_RETURN_IF_ERROR(CheckBits("v_bits", options.v_bits));
  const std::size_t exact_tokens =
      options.exact_session_tokens > binding.first_position
          ? std::min(options.exact_session_tokens - binding.first_position, geometry.block_tokens())
          : 0;

  RotatedBlock block;
  std::vector<std::byte>& bytes = block.body.bytes;
  bytes.resize(RotatedHeadBytesMax(geometry));
  WriteFrameBinding(binding, std::span(bytes).first(kFrameBindingBytes));
  StoreLittle(bytes.data() + kFrameBindingBytes, kTransform);
  std::vector<std::size_t> layer_ends;
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    const std::size_t begin = bytes.size();
    for (const KvKind kind : kKinds) {
      if (geometry.head_dim(layer, kind) == 0) continue;
      block.exact_vectors += AppendKind(
          Vectors(geometry, layer, kind), geometry.dtype(),
          raw.subspan(geometry.kind_begin(layer, kind), geometry.kind_bytes(layer, kind)),
          kind == KvKind::kK ? options.k_bits : options.v_bits,
          exact_tokens * geometry.kv_heads(layer), bytes);
    }
    StoreLittle(bytes.data() + kHeadBytes + std::size_t{4} * layer,
                static_cast<std::uint32_t>(bytes.size() - begin));
    layer_ends.push_back(bytes.size());
  }
  block.body.section_bytes = CutSections(layer_ends);
  return block;
}

std::size_t RotatedHeadBytesMax(const KvGeometry& geometry) {
  return kHeadBytes + std::size_t{4} * geometry.layer_count();
}

absl::StatusOr<RotatedReader> RotatedReader::Parse(const KvGeometry& geometry,
                                                   std::span<const std::byte> body) {
  RotatedReader reader(geometry);
  ByteReader head(body);
  head.ReadBytes(kFrameBindingBytes);
  const auto transform = head.Read<std::uint32_t>();
  if (!head.ok() || transform != kTransform) return Damaged("no such rotation");
  reader.layer_begins_[0] = RotatedHeadBytesMax(geometry);
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    const auto bytes = head.Read<std::uint32_t>();
    const std::size_t raw_bytes = geometry.layer_end(layer) - geometry.layer_begin(layer);
    if (bytes > raw_bytes + 2 * kKindHeadBytes) return Damaged("size of a layer");
    reader.layer_begins_[layer + 1] = reader.layer_begins_[layer] + bytes;
  }
  if (!head.ok()) return Damaged("cut off in its layer table");
  return reader;
}

absl::Status RotatedReader::DecodeLayer(std::uint32_t layer, std::span<const std::byte> bytes,
                                        std::span<std::byte> raw) const {
  KV_CHECK(layer < geometry_.layer_count());
  KV_CHECK(raw.size() == geometry_.layer_end(layer) - geometry_.layer_begin(layer));
  if (bytes.size() != layer_end(layer) - layer_begin(layer)) {
    return Damaged(absl::StrCat("layer ", layer, " is cut off"));
  }
  ByteReader reader(bytes);
  for (const KvKind kind : kKinds) {
    if (geometry_.head_dim(layer, kind) == 0) continue;
    const std::size_t begin = geometry_.kind_begin(layer, kind) - geometry_.layer_begin(layer);
    KV_RETURN_IF_ERROR(DecodeKind(Vectors(geometry_, layer, kind), geometry_.dtype(), reader,
                                  raw.subspan(begin, geometry_.kind_bytes(layer, kind))));
  }
  return reader.Done() ? absl::OkStatus() : Damaged(absl::StrCat("sizes within layer ", layer));
}

absl::Status DecodeRotated(const KvGeometry& geometry, std::span<const std::byte> body,
                           std::span<std::byte> raw) {
  KV_CHECK(raw.size() == geometry.raw_block_bytes());
  KV_ASSIGN_OR_RETURN(const RotatedReader reader, RotatedReader::Parse(geometry, body));
  if (body.size() != reader.body_bytes()) return Damaged("its layers do not cover it");
  return DecodeEveryLayer(geometry, reader, body, raw);
}

}  // namespace kvtrie
