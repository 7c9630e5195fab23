#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/codec/fit_material.h"
#include "storage/codec/profile_draft.h"
#include "storage/codec/profile_header.h"
#include "storage/codec/residual_profile.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// Files of `kvtrie profile`. Every error names the file, and what of it is wrong: InvalidArgument,
// or NotFound where there is no such file.

// A file as it lies on disk, mapped; an empty one is refused. Shrinking it while it is mapped ends
// the process.
class MappedFile {
 public:
  MappedFile() = default;  // of no bytes
  static absl::StatusOr<MappedFile> Open(const std::string& path);

  std::span<const std::byte> bytes() const { return {at_.get(), at_.get_deleter().bytes}; }
  std::string_view text() const;

 private:
  struct Unmap {
    std::size_t bytes;
    void operator()(const std::byte* at) const;
  };

  std::unique_ptr<const std::byte[], Unmap> at_;
};

// The numbers of a file: whole ones.
template <typename T>
absl::StatusOr<std::span<const T>> NumbersOf(const MappedFile& file, const std::string& path);

// Whether WriteFile can write there, as far as it can be told before the bytes are known: to be
// asked before work that takes long. Leaves nothing behind.
absl::Status CheckCanWrite(const std::string& path);

// Appears under its name whole, or not at all. What is there and is no regular file stays.
absl::Status WriteFile(const std::string& path, std::string_view bytes);

// proto3's JSON of kvtrie.v1.ModelSpec, all of it, valid, and of the standard layout.
absl::StatusOr<ModelSpec> ReadModelSpec(const std::string& path);

// The texts of a folder: NAME.tokens (u32), NAME.kv (raw KV of these tokens, as one block from
// position 0 on) and, where there are gradients, NAME.importance (f32, [plane][KV head][token]).
struct SampleFolder {
  std::vector<std::string> names;  // sorted
  std::vector<KvSample> samples;   // point into `files`
  std::vector<MappedFile> files;
};
absl::StatusOr<SampleFolder> ReadSamples(const ModelSpec& spec, const std::string& folder);

// What `profile fit` writes: without measured figures a draft (profile_draft.h).
struct ProfileFile {
  CodecKey codec_key;
  std::string_view body;             // points into `file`
  std::vector<ProfileLevel> levels;  // as measured; a draft has none
  MappedFile file;
};
absl::StatusOr<ProfileFile> ReadProfileFile(const std::string& path);

// What was measured of a body: a JSON object with `body_digest`, 32 hexadecimal digits, and
// `levels`, objects with `quality` ("near-exact", "high" or "small"), `bits_per_component`,
// `mean_kl` and `kl_p99` in nats. Other fields are for people.
struct MeasuredFigures {
  ProfileId body_digest;
  std::vector<ProfileLevel> levels;
};
absl::StatusOr<MeasuredFigures> ReadMeasuredFigures(const std::string& path);

// The whole profile. InvalidArgument: figures of another body, not those of exactly the body's
// levels, or beyond what a level promises.
absl::StatusOr<std::string> SealProfile(const CodecKey& codec_key, std::string_view body,
                                        std::span<const ResidualLevel> levels,
                                        const MeasuredFigures& measured);

// As in ReadMeasuredFigures, and "exact".
std::string_view QualityText(Quality quality);

// "near-exact", "high" or "small"; no value: none of them.
std::optional<Quality> LevelFromText(std::string_view text);

}  // namespace kvtrie
