#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "storage/base/byte_order.h"
#include "storage/codec/reference_table.h"
#include "tests/storage/engine/engine_fixture.h"

namespace kvtrie {

// A profile for a model, with levels of all rated qualities; `seed` tells profiles apart.
inline std::vector<std::byte> TestProfile(const ModelSpec& spec, std::uint32_t seed = 1,
                                          std::size_t bytes = 2000) {
  ProfileHeader header;
  header.codec_key = spec.CodecKey();
  header.levels = {{Quality::kNearExact, 4, 0.0005f, 0.01f},
                   {Quality::kHigh, 3, 0.005f, 0.1f},
                   {Quality::kSmall, 2, 0.04f, 0.5f}};
  header.body_bytes = bytes - header.header_bytes();
  std::vector<std::byte> profile(bytes);
  const auto body = std::span(profile).subspan(header.header_bytes());
  std::mt19937 random(seed);
  for (std::byte& byte : body) byte = static_cast<std::byte>(random());
  header.body_crc32c = Crc32c(body);
  WriteProfileHeader(header, std::span(profile).first(header.header_bytes()));
  return profile;
}

// A number that names a block's pattern.
inline std::uint32_t PatternNumber(const PathView& path, std::uint32_t block_tokens,
                                   std::uint32_t block) {
  return LoadLittle<std::uint32_t>(PatternBlock(path, block_tokens, block, 4).data());
}

// A "codec": the body is the binding and a number that names the block's bytes.
inline std::vector<std::byte> CodedPattern(std::uint32_t number, std::size_t bytes) {
  std::mt19937 random(number);
  std::vector<std::byte> raw(bytes);
  for (std::byte& byte : raw) byte = static_cast<std::byte>(random());
  return raw;
}

// Puts a table of references where the body of a frame has it; where the number goes then.
inline std::size_t WriteReferences(const ReferenceTable& table, std::span<std::byte> body) {
  ByteWriter writer;
  // Flags, tokens kept exact, one section, with which both layers are complete.
  for (const int field : {0, 0, 1, 2}) writer.Write(static_cast<std::uint16_t>(field));
  table.Write(writer);
  const std::string& text = writer.text();
  std::memcpy(body.data() + kFrameBindingBytes, text.data(), text.size());
  return body.size() - 4;
}

// What the fake codec makes of a raw block: its number is that of the bytes.
inline std::vector<std::byte> FakeFrame(const ModelSpec& spec, const BlockToEncode& block,
                                        const ProfileId& profile, Quality quality, bool is_coded) {
  const bool is_referenced = is_coded && !block.references.empty();
  std::vector<std::byte> body(is_referenced ? 400 : 600);
  WriteFrameBinding({.first_position = block.first_position,
                     .tokens_crc32c = Crc32c(std::as_bytes(block.tokens)),
                     .profile = is_coded ? profile : ProfileId{}},
                    std::span(body).first(kFrameBindingBytes));
  std::size_t number_at = kFrameBindingBytes;
  if (is_referenced) {
    ReferenceTable table{.references = {}, .runs = {block.runs.begin(), block.runs.end()}};
    for (const ReferenceBlock& reference : block.references) {
      table.references.push_back(
          {reference.node, DigestOfKv(reference.raw), reference.first_position});
    }
    EXPECT_TRUE(table.Check(block.tokens.size()).ok()) << table.Check(block.tokens.size());
    number_at = WriteReferences(table, body);
  }
  StoreLittle(body.data() + number_at, LoadLittle<std::uint32_t>(block.raw.data()) * 8 +
                                           static_cast<std::uint32_t>(quality));
  const FrameSection section{static_cast<std::uint32_t>(body.size()), Crc32c(body)};
  std::vector<std::byte> frame(FrameHeaderBytes(1));
  const CodecId coded = is_referenced ? CodecId::kReferenced : CodecId::kResidual;
  WriteFrameHeader({.codec = is_coded ? coded : CodecId::kLossless,
                    .quality = is_coded ? quality : Quality::kExact,
                    .model = spec.Digest(),
                    .raw_bytes = block.raw.size(),
                    .sections = {&section, 1}},
                   frame);
  frame.insert(frame.end(), body.begin(), body.end());
  return frame;
}

class FakeCodec final : public BlockCodec {
 public:
  std::vector<absl::Status> Decode(const ModelSpec& spec, std::span<const FrameToDecode> blocks,
                                   ProfileStore& profiles) const override {
    std::vector<absl::Status> statuses;
    for (const FrameToDecode& block : blocks) {
      statuses.push_back(DecodeOne(spec, block, profiles));
    }
    return statuses;
  }
  absl::StatusOr<std::vector<EncodedFrame>> Encode(const ModelSpec& spec,
                                                   std::span<const BlockToEncode> blocks,
                                                   const ProfileId& profile, Quality quality,
                                                   ProfileStore& profiles) const override {
    if (const auto read = profiles.Read(profile); !read.ok()) {
      return absl::FailedPreconditionError(read.status().message());
    }
    std::vector<EncodedFrame> frames;
    for (const BlockToEncode& block : blocks) {
      encoded_blocks.fetch_add(1);
      const bool can_be_coded = !refuse || !refuse(block.first_position);
      frames.push_back({.bytes = FakeFrame(spec, block, profile, quality, can_be_coded),
                        .codec = !can_be_coded              ? CodecId::kLossless
                                 : block.references.empty() ? CodecId::kResidual
                                                            : CodecId::kReferenced,
                        .quality = can_be_coded ? quality : Quality::kExact});
    }
    return frames;
  }
  bool CodesDifferences(const ModelSpec&, const ProfileId&, ProfileStore&) const override {
    return codes_differences;
  }
  void Forget(const ProfileId&) const override {}
  BlockCodecStats Stats() const override { return {}; }

  mutable std::atomic<int> calls{0};
  mutable std::atomic<int> encoded_blocks{0};
  bool codes_differences = true;
  std::function<bool(std::uint32_t first_position)> refuse;  // to code a block
  std::function<absl::Status()> fail;                        // set before the engine uses it

 private:
  static absl::Status CheckReferences(const FrameToDecode& block) {
    const auto table = ReferencesOf(block.frame, block.tokens.size());
    if (!table.ok()) return table.status();
    for (const FrameReference& wanted : table->references) {
      const bool is_there =
          std::any_of(block.references.begin(), block.references.end(), [&](const auto& given) {
            return given.node == wanted.node && given.first_position == wanted.first_position &&
                   DigestOfKv(given.raw) == wanted.digest;
          });
      if (!is_there) return absl::InternalError("a reference is missing or another one");
    }
    return absl::OkStatus();
  }
  absl::Status DecodeOne(const ModelSpec& spec, const FrameToDecode& block,
                         ProfileStore& profiles) const {
    ++calls;
    const std::span<std::byte> raw = block.raw;
    if (fail) return fail();
    if (block.frame.tokens_crc32c() != Crc32c(std::as_bytes(block.tokens))) {
      return absl::InternalError("other tokens than the frame's");
    }
    if (raw.size() != KvGeometry(spec).raw_block_bytes()) return absl::InternalError("raw size");
    if (!block.frame.profile().empty()) {
      const auto profile = profiles.Read(block.frame.profile());
      if (!profile.ok()) return absl::FailedPreconditionError(profile.status().message());
    }
    const auto body = block.frame.body();
    std::size_t at = kFrameBindingBytes;
    if (block.frame.codec() == CodecId::kReferenced) {
      if (const absl::Status status = CheckReferences(block); !status.ok()) return status;
      at = body.size() - 4;
    }
    const auto pattern = CodedPattern(LoadLittle<std::uint32_t>(body.data() + at), raw.size());
    std::copy(pattern.begin(), pattern.end(), raw.begin());
    return absl::OkStatus();
  }
};

// An engine that decodes what MakeFrame makes.
class CodedFixture : public EngineFixture {
 protected:
  CodedFixture() { codec_ = fake_codec_; }

  ProfileId MustPutProfile(std::span<const std::byte> bytes, const ProfileId& expected = {}) {
    auto upload = engine_->BeginProfile(tenant_, bytes.size(), expected);
    EXPECT_TRUE(upload.ok()) << upload.status();
    if (!upload.ok()) return {};
    EXPECT_TRUE((*upload)->Append(bytes).ok());
    auto stored = (*upload)->Commit();
    EXPECT_TRUE(stored.ok()) << stored.status();
    return stored.ok() ? stored->info.id : ProfileId{};
  }
  void OpenWithProfile() {
    Open();
    profile_ = MustPutProfile(TestProfile(spec_));
  }

  struct FrameKind {
    CodecId codec = CodecId::kResidual;
    Quality quality = Quality::kHigh;
    std::size_t body_bytes = 600;
    std::vector<FrameReference> references = {};  // each of its own token
  };
  static FrameKind Referenced(Quality quality, std::vector<FrameReference> references) {
    return {CodecId::kReferenced, quality, 400, std::move(references)};
  }
  static FrameKind Residual(Quality quality) { return {CodecId::kResidual, quality, 600}; }
  static FrameKind Rotated() { return {CodecId::kRotated, Quality::kUnrated, 700}; }

  // Names the bytes that a frame of this kind decodes to: what is lossy is not the raw block.
  std::uint32_t NumberOf(const PathView& path, std::uint32_t block, const FrameKind& kind) const {
    return PatternNumber(path, spec_.block_tokens, block) * 8 +
           static_cast<std::uint32_t>(kind.quality);
  }
  std::vector<std::byte> DecodedBytes(const PathView& path, std::uint32_t block,
                                      const FrameKind& kind) const {
    return CodedPattern(NumberOf(path, block, kind), raw_block_bytes_);
  }

  std::vector<std::byte> MakeFrame(const PathView& path, std::uint32_t block,
                                   const FrameKind& kind) const {
    const auto tokens =
        path.tokens.subspan(std::size_t{block} * spec_.block_tokens, spec_.block_tokens);
    std::vector<std::byte> body(kind.body_bytes);
    WriteFrameBinding({.first_position = block * spec_.block_tokens,
                       .tokens_crc32c = Crc32c(std::as_bytes(tokens)),
                       .profile = kind.codec == CodecId::kRotated ? ProfileId{} : profile_},
                      std::span(body).first(kFrameBindingBytes));
    std::size_t number_at = kFrameBindingBytes;
    if (kind.codec == CodecId::kReferenced) {
      ReferenceTable table{.references = kind.references, .runs = {}};
      for (std::uint16_t i = 0; i < kind.references.size(); ++i) {
        table.runs.push_back({.first_token = i, .token_count = 1, .reference = i, .offset = i});
      }
      number_at = WriteReferences(table, body);
    }
    StoreLittle(body.data() + number_at, NumberOf(path, block, kind));
    const FrameSection section{static_cast<std::uint32_t>(body.size()), Crc32c(body)};
    std::vector<std::byte> frame(FrameHeaderBytes(1));
    WriteFrameHeader({.codec = kind.codec,
                      .quality = kind.quality,
                      .model = model_,
                      .raw_bytes = raw_block_bytes_,
                      .sections = {&section, 1}},
                     frame);
    frame.insert(frame.end(), body.begin(), body.end());
    return frame;
  }

  // Sends frames for the missing blocks of a put; the result of each.
  PutResults PutFrames(const PutAnnouncement& put, const FrameKind& kind,
                       std::vector<std::uint32_t>* sent = nullptr) {
    auto session = engine_->BeginPut(tenant_, put);
    if (!session.ok()) return {session.status()};
    const auto missing = (*session)->missing_blocks();
    if (sent != nullptr) *sent = missing;
    PutResults results(missing.size(), absl::UnknownError("no answer"));
    absl::Mutex mutex;
    std::size_t open = missing.size();
    for (std::size_t i = 0; i < missing.size(); ++i) {
      const auto frame = MakeFrame(put.path, missing[i], kind);
      auto writer = (*session)->StartFrame(missing[i], FrameView::Parse(frame).value());
      if (!writer.ok()) {
        results[i] = writer.status();
        (*session)->AbandonBlock(missing[i]);
        absl::MutexLock lock(&mutex);
        --open;
        continue;
      }
      const std::span<const std::byte> piece = frame;
      EXPECT_TRUE((*writer)->AppendChunk({&piece, 1}, Crc32c(frame)).ok());
      (*session)->FinishBlock(*std::move(writer), [&, i](absl::StatusOr<PutBlockResult> result) {
        absl::MutexLock lock(&mutex);
        results[i] = std::move(result);
        --open;
      });
    }
    absl::MutexLock lock(&mutex);
    const auto none_open = [&open] { return open == 0; };
    mutex.Await(absl::Condition(&none_open));
    return results;
  }
  // What a block is named by in frames that are coded against its frame of this kind.
  FrameReference ReferenceTo(const PathView& path, std::uint32_t block, const FrameKind& kind) {
    return {.node = NodesOf(LookupAt(path, Quality::kUnrated))[block],
            .digest = DigestOfKv(kind.codec == CodecId::kRaw ? Pattern(path, block)
                                                             : DecodedBytes(path, block, kind)),
            .first_position = block * spec_.block_tokens};
  }

  // Puts that must succeed.
  void MustPutFrames(const PathView& path, const FrameKind& kind, bool beside_exact = false) {
    PutAnnouncement put;
    put.path = path;
    put.quality = kind.quality;
    put.beside_exact = beside_exact;
    for (const auto& result : PutFrames(put, kind)) ASSERT_TRUE(result.ok()) << result.status();
  }

  LookupResult LookupAt(const PathView& path, Quality min_quality) {
    auto result = engine_->Lookup(
        tenant_,
        {.models = {path.model}, .path = path, .min_quality = min_quality, .want_blocks = true});
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *result : LookupResult{};
  }
  std::vector<TrieNodeId> NodesOf(const LookupResult& found) const {
    std::vector<TrieNodeId> ids;
    for (const MatchedBlock& block : found.blocks.front()) ids.push_back(block.node);
    return ids;
  }
  Engine::FoundFrames FramesAt(const PathView& path, Quality min_quality) {
    const auto frames = engine_->FindFrames(
        tenant_, path.model, NodesOf(LookupAt(path, Quality::kUnrated)), min_quality);
    EXPECT_TRUE(frames.ok()) << frames.status();
    return frames.ok() ? *frames : Engine::FoundFrames{};
  }
  // The bytes of a block as raw KV, or why not.
  absl::StatusOr<std::vector<std::byte>> RawBytes(const StoredFrame& frame) {
    const auto loaded = ReadBlock(frame, ReadAs::kRaw);
    if (!loaded.ok()) return loaded.status();
    EXPECT_EQ(loaded->view.codec(), CodecId::kRaw);
    EXPECT_TRUE(loaded->view.VerifyBody().ok());
    EXPECT_LE(loaded->bytes.view.size(), frame.loaded_bytes(ReadAs::kRaw));
    const auto body = loaded->view.body();
    return std::vector<std::byte>(body.begin(), body.end());
  }

  // Flips a bit of the stored frame, behind the back of an engine that is closed meanwhile.
  void DamageRecord(const PayloadLocation& at) {
    engine_.reset();
    char name[32];
    std::snprintf(name, sizeof name, "seg-%08u", at.segment);
    std::fstream file(options_.data_dir + "/payload/" + name,
                      std::ios::binary | std::ios::in | std::ios::out);
    const auto place = static_cast<std::streamoff>(at.offset_units * PayloadLocation::kUnitBytes +
                                                   at.record_bytes - 10);
    file.seekg(place);
    const char byte = static_cast<char>(file.get());
    file.seekp(place);
    file.put(static_cast<char>(byte ^ 1));
    file.close();
    ASSERT_TRUE(file) << name;
    Open();
  }

  const std::shared_ptr<FakeCodec> fake_codec_ = std::make_shared<FakeCodec>();
  ProfileId profile_;
};

}  // namespace kvtrie
