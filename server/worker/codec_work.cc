#include "server/worker/codec_work.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/codec/frame.h"
#include "storage/codec/reference_table.h"

namespace kvtrie {
namespace {

absl::Status MissingProfile(const absl::Status& not_found) {
  return absl::FailedPreconditionError(not_found.message());
}

}  // namespace

absl::Status CodecWork::Open(CodecJob& job) {
  KV_ASSIGN_OR_RETURN(const FrameView frame, FrameView::Parse(job.block.view()));
  if (frame.frame_bytes() != job.block.bytes) {
    return absl::DataLossError(absl::StrCat("frame: has ", frame.frame_bytes(), " bytes, and ",
                                            job.block.bytes, " were sent"));
  }
  if (frame.model() != job.model->id) {
    return absl::InvalidArgumentError(absl::StrCat("frame: is of model ", frame.model().ToHex(),
                                                   ", and the stream is of ",
                                                   job.model->id.ToHex()));
  }
  KV_RETURN_IF_ERROR(frame.CheckGeometry(job.model->geometry));
  KV_RETURN_IF_ERROR(frame.VerifyBody());
  job.quality = frame.quality();
  if (frame.codec() == CodecId::kRaw) return absl::OkStatus();
  const FrameBinding binding = frame.binding();
  if (binding.first_position != job.first_position) {
    return absl::InvalidArgumentError(absl::StrCat("first_position: ", job.first_position,
                                                   "; the frame was made for ",
                                                   binding.first_position));
  }
  if (binding.tokens_crc32c != Crc32c(std::as_bytes(std::span(job.tokens)))) {
    return absl::InvalidArgumentError("tokens: the frame was made for other ones");
  }
  job.profile = binding.profile;
  return absl::OkStatus();
}

absl::StatusOr<CodecWork::Codec> CodecWork::CodecFor(const CodecModel& model,
                                                     const ProfileId& profile) {
  return codecs_.Get(
      model.spec, model.id, profile, [&]() -> absl::StatusOr<CodecCache::ProfileBytes> {
        ProfileShelf::Bytes bytes = shelf_.Find(profile);
        if (bytes == nullptr) {
          return absl::NotFoundError(absl::StrCat("profile_id: profile ", profile.ToHex(),
                                                  " is not here; send it with PutProfile"));
        }
        const std::span<const std::byte> view = *bytes;
        return CodecCache::ProfileBytes{std::move(bytes), view};
      });
}

absl::StatusOr<std::vector<ReferenceBlock>> CodecWork::References(CodecJob& job,
                                                                  DecodedReferences* decoded) {
  ReferenceFrames frames;
  std::vector<TrieNodeId> nodes;
  for (const CodecJob::Reference& reference : job.references) {
    nodes.push_back(reference.node);
    frames.emplace(reference.node, reference.frame);
  }
  absl::Status missing;
  *decoded = DecodeReferences(job.model->geometry, job.model->id, nodes, frames,
                              [&](const ProfileId& profile) {
                                auto codec = CodecFor(*job.model, profile);
                                if (absl::IsNotFound(codec.status())) {
                                  missing = MissingProfile(codec.status());
                                  job.missing_profile = profile;
                                }
                                return codec;
                              });
  if (!missing.ok()) return missing;
  std::vector<ReferenceBlock> blocks;
  for (const CodecJob::Reference& reference : job.references) {
    const auto found = decoded->find(reference.node);
    if (found == decoded->end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("references: the frame of block ", reference.node.ToHex(),
                       " is damaged, of another model, or itself coded against others"));
    }
    blocks.push_back({.node = reference.node,
                      .first_position = reference.first_position,
                      .tokens = reference.frame->tokens,
                      .raw = {found->second.raw.get(), job.model->geometry.raw_block_bytes()},
                      .quality = found->second.quality});
  }
  return blocks;
}

void CodecWork::Encode(const FrameCodec& codec, std::span<const Ready> jobs) {
  std::vector<BlockToEncode> blocks;
  for (const auto& [job, decoded, references] : jobs) {
    blocks.push_back({.first_position = job->first_position,
                      .session_tokens = job->session_tokens,
                      .tokens = job->tokens,
                      .raw = job->block.view(),
                      .importance = job->importance,
                      .references = references,
                      .runs = job->runs});
  }
  auto frames = codec.Encode(blocks, jobs.front().job->quality);
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    CodecJob& job = *jobs[i].job;
    if (frames.ok()) {
      job.frame = std::move((*frames)[i]);
      continue;
    }
    // One of them at least is at fault: which?
    auto alone = codec.Encode({&blocks[i], 1}, job.quality);
    if (alone.ok()) {
      job.frame = std::move(alone->front());
    } else {
      job.status = alone.status();
    }
  }
}

void CodecWork::Decode(const FrameCodec& codec, std::span<const Ready> jobs) {
  std::vector<FrameToDecode> frames;
  for (const auto& [job, decoded, references] : jobs) {
    const std::size_t raw_bytes = job->model->geometry.raw_block_bytes();
    job->raw = AlignedBuffer(raw_bytes);
    // Was parsed by Open().
    frames.push_back({.frame = FrameView::Parse(job->block.view()).value(),
                      .tokens = job->tokens,
                      .raw = {job->raw.data(), raw_bytes},
                      .references = references});
  }
  const absl::Status all = codec.Decode(frames);
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    jobs[i].job->status = all.ok() || jobs.size() == 1 ? all : codec.Decode({&frames[i], 1});
  }
}

void CodecWork::Run(std::span<const std::unique_ptr<CodecJob>> jobs) {
  const CodecJob& first = *jobs.front();
  const auto codec = CodecFor(*first.model, first.profile);
  std::vector<Ready> ready;
  for (const std::unique_ptr<CodecJob>& job : jobs) {
    if (absl::IsNotFound(codec.status())) {
      job->status = MissingProfile(codec.status());
      job->missing_profile = first.profile;
    } else {
      job->status = codec.status();
    }
    if (!codec.ok()) continue;
    DecodedReferences decoded;
    auto references = References(*job, &decoded);
    job->status = references.status();
    if (!references.ok()) continue;
    ready.push_back(
        {.job = job.get(), .decoded = std::move(decoded), .references = *std::move(references)});
  }
  if (ready.empty()) return;
  if (first.op == CodecOp::kEncode) {
    Encode(**codec, ready);
  } else {
    Decode(**codec, ready);
  }
  if (first.profile.empty()) return;
  const ProfileLevel level = shelf_.LevelOf(first.profile, first.quality);
  for (const Ready& coded : ready) {
    coded.job->mean_kl = level.mean_kl;
    coded.job->kl_p99 = level.kl_p99;
  }
}

}  // namespace kvtrie
