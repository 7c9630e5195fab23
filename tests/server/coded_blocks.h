#pragma once

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "server/wire_conversion.h"
#include "storage/base/byte_order.h"
#include "storage/base/byte_reader.h"
#include "storage/engine/engine.h"
#include "storage/kv/profile_digest.h"
#include "tests/server/running_server.h"

namespace kvtrie {

// A profile for the model of TestSpec; `seed` tells profiles apart.
inline std::string TestProfile(std::size_t bytes = 3000, std::uint32_t seed = 1) {
  ProfileHeader header;
  header.codec_key = FromProto(TestSpec())->CodecKey();
  header.levels = {{Quality::kHigh, 3, 0.005f, 0.1f}, {Quality::kSmall, 2, 0.04f, 0.5f}};
  header.body_bytes = bytes - header.header_bytes();
  std::string body(header.body_bytes, '\0');
  std::mt19937 random(seed);
  for (char& byte : body) byte = static_cast<char>(random());
  header.body_crc32c = CrcOf(body);
  std::string head(header.header_bytes(), '\0');
  WriteProfileHeader(header, std::as_writable_bytes(std::span(head)));
  return head + body;
}

inline ProfileId ProfileIdOf(const std::string& profile) {
  ProfileDigest digest;
  digest.Add(AsBytes(profile));
  return digest.Finish();
}

// What a frame of MakeCodedFrame decodes to.
inline std::string DecodedContent(std::uint32_t block_index, std::uint32_t seed = 1) {
  return BlockContent(block_index, seed + 5000);
}

// A "coded" frame of a block of PathTokens: its body names the block, FakeCodec makes the bytes.
inline std::string MakeCodedFrame(const std::string& model_id, const ProfileId& profile,
                                  std::uint32_t block_index, std::uint32_t seed = 1,
                                  Quality quality = Quality::kHigh) {
  const std::string tokens = PathTokens(block_index + 1, seed).substr(block_index * 32);
  std::string body(200, '\0');
  WriteFrameBinding({.first_position = block_index * kTestBlockTokens,
                     .tokens_crc32c = CrcOf(tokens),
                     .profile = profile},
                    std::as_writable_bytes(std::span(body).first(kFrameBindingBytes)));
  StoreLittle(body.data() + kFrameBindingBytes, block_index);
  StoreLittle(body.data() + kFrameBindingBytes + 4, seed);
  const FrameSection section{static_cast<std::uint32_t>(body.size()), CrcOf(body)};
  std::string head(FrameHeaderBytes(1), '\0');
  WriteFrameHeader({.codec = CodecId::kResidual,
                    .quality = quality,
                    .model = *ModelId::FromBytes(model_id),
                    .raw_bytes = kTestBlockBytes,
                    .sections = {&section, 1}},
                   std::as_writable_bytes(std::span(head)));
  return head + body;
}

class FakeCodec final : public BlockCodec {
 public:
  std::vector<absl::Status> Decode(const ModelSpec&, std::span<const FrameToDecode> to_decode,
                                   ProfileStore& profiles) const override {
    ++calls;
    blocks += to_decode.size();
    std::vector<absl::Status> statuses;
    for (const FrameToDecode& block : to_decode) statuses.push_back(DecodeOne(block, profiles));
    return statuses;
  }
  absl::StatusOr<std::vector<EncodedFrame>> Encode(const ModelSpec&, std::span<const BlockToEncode>,
                                                   const ProfileId&, Quality,
                                                   ProfileStore&) const override {
    return absl::FailedPreconditionError("only decodes");
  }
  bool CodesDifferences(const ModelSpec&, const ProfileId&, ProfileStore&) const override {
    return false;
  }
  void Forget(const ProfileId&) const override {}
  BlockCodecStats Stats() const override { return {}; }

  mutable std::atomic<int> calls{0};
  mutable std::atomic<std::size_t> blocks{0};

 private:
  static absl::Status DecodeOne(const FrameToDecode& block, ProfileStore& profiles) {
    const std::span<std::byte> raw = block.raw;
    if (block.frame.tokens_crc32c() != Crc32c(std::as_bytes(block.tokens))) {
      return absl::InternalError("other tokens than the frame's");
    }
    if (const auto profile = profiles.Read(block.frame.profile()); !profile.ok()) {
      return absl::FailedPreconditionError(profile.status().message());
    }
    const std::byte* const at = block.frame.body().data() + kFrameBindingBytes;
    const std::string content =
        DecodedContent(LoadLittle<std::uint32_t>(at), LoadLittle<std::uint32_t>(at + 4));
    if (content.size() != raw.size()) return absl::DataLossError("raw size");
    std::memcpy(raw.data(), content.data(), raw.size());
    return absl::OkStatus();
  }
};

// The answer, or the error.
inline grpc::Status PutProfile(v1::Cache::Stub& cache, const std::string& profile,
                               v1::PutProfileResponse* response, std::size_t chunk_bytes = 1000,
                               const std::string& expected_id = {}) {
  grpc::ClientContext context;
  auto stream = cache.PutProfile(&context, response);
  v1::PutProfileRequest request;
  request.set_total_bytes(profile.size());
  request.set_expected_profile_id(expected_id);
  for (std::size_t at = 0; at < profile.size(); at += chunk_bytes) {
    const std::string part = profile.substr(at, chunk_bytes);
    v1::Chunk* chunk = request.add_chunks();
    chunk->set_offset(at);
    chunk->set_bytes(static_cast<std::uint32_t>(part.size()));
    chunk->set_crc32c(CrcOf(part));
    request.set_data(part);
    if (!stream->Write(request)) break;
    request.Clear();
  }
  stream->WritesDone();
  return stream->Finish();
}

inline ProfileId MustPutProfile(v1::Cache::Stub& cache, const std::string& profile) {
  v1::PutProfileResponse response;
  const grpc::Status status = PutProfile(cache, profile, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return ProfileId::FromBytes(response.profile().profile_id()).value_or(ProfileId{});
}

// Puts coded frames of a whole path; returns all answers.
inline v1::PutResponse PutCodedPath(v1::Cache::Stub& cache, const std::string& model_id,
                                    const ProfileId& profile, std::uint32_t block_count,
                                    std::uint32_t seed = 1, bool beside_exact = false) {
  grpc::ClientContext context;
  auto stream = cache.Put(&context);
  v1::PutRequest request;
  v1::PutAnnounce* announce = Announce(1, model_id, PathTokens(block_count, seed), &request);
  announce->set_eager(true);
  announce->set_encoding(v1::ENCODING_FRAME);
  announce->set_quality(v1::QUALITY_HIGH);
  announce->set_beside_exact(beside_exact);
  for (std::uint32_t i = 0; i < block_count; ++i) {
    AddBlock(1, i, MakeCodedFrame(model_id, profile, i, seed), &request);
  }
  EXPECT_TRUE(stream->Write(request));
  stream->WritesDone();
  v1::PutResponse all;
  v1::PutResponse part;
  while (stream->Read(&part)) all.MergeFrom(part);
  const grpc::Status status = stream->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  return all;
}

}  // namespace kvtrie
