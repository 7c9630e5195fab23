// Writes tests/fuzz/corpus/codec_stream/: streams that are as they should be.
//
//   codec_stream_corpus FOLDER
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/codec/frame_codec.h"
#include "storage/codec/profile_codec.h"
#include "tests/fuzz/codec_stream_target.h"

namespace kvtrie {
namespace {

class Corpus {
 public:
  explicit Corpus(std::string folder)
      : folder_(std::move(folder)),
        spec_(FuzzedSpec()),
        profile_(ProfileBytes(PlainProfile(spec_))),
        codec_(spec_, CodecOfProfile(spec_, ProfileIdOf(profile_), profile_).value()),
        text_(MakeText(spec_, 32, 1)) {
    for (std::uint32_t i = 0; i < 2; ++i) raw_.push_back(CutBlock(spec_, text_, 16 * i));
  }

  void WriteAll() {
    for (const v1::Quality quality : {v1::QUALITY_HIGH, v1::QUALITY_EXACT, v1::QUALITY_UNRATED}) {
      Begin(kClosesInput, false);
      for (std::uint32_t i = 0; i < 2; ++i) {
        v1::CodecItem item = Item(i, raw_[i].size());
        item.set_quality(quality);
        if (quality == v1::QUALITY_HIGH) {
          item.set_profile_id(std::string(ProfileIdOf(profile_).view()));
          item.set_importance(std::string(64, '?'));
        }
        Add(item, raw_[i], 200);
      }
      Write("encode_" + std::to_string(quality));
    }
    for (const bool layer_major : {false, true}) {
      Begin(kClosesInput | kDecodes | kMendsChecksums, layer_major);
      for (std::uint32_t i = 0; i < 2; ++i) {
        const auto frame = Frame(i, i == 0 ? Quality::kHigh : Quality::kExact);
        Add(Item(i, frame.size()), frame, 1000);
      }
      Write(layer_major ? "decode_layers" : "decode");
    }
    Begin(kClosesInput | kMendsChecksums, false);
    v1::CodecItem item = Item(1, raw_[1].size());
    item.set_quality(v1::QUALITY_HIGH);
    item.set_profile_id(std::string(ProfileIdOf(profile_).view()));
    const auto frame = Frame(1, Quality::kExact);
    v1::CodecReference* const reference = item.add_references();
    reference->set_node_id(std::string(16, 'r'));
    reference->set_first_position(16);
    reference->set_tokens(item.tokens());
    reference->set_frame_bytes(frame.size());
    item.add_runs()->set_token_count(16);
    std::vector<std::byte> both = raw_[1];
    both.insert(both.end(), frame.begin(), frame.end());
    Add(item, both, 700);
    Write("references");
  }

 private:
  std::vector<std::byte> Frame(std::uint32_t i, Quality quality) const {
    const BlockToEncode block{.first_position = 16 * i,
                              .session_tokens = 32,
                              .tokens = std::span(text_.tokens).subspan(16 * i, 16),
                              .raw = raw_[i]};
    return codec_.Encode({&block, 1}, quality).value().front().bytes;
  }
  v1::CodecItem Item(std::uint32_t i, std::size_t bytes) const {
    v1::CodecItem item;
    item.set_item_id(i);
    item.set_first_position(16 * i);
    const std::span tokens = std::as_bytes(std::span(text_.tokens).subspan(16 * i, 16));
    item.set_tokens(tokens.data(), tokens.size());
    item.set_block_bytes(bytes);
    return item;
  }

  void Begin(int flags, bool layer_major) {
    input_.assign(1, static_cast<char>(flags));
    v1::CodecRequest request;
    *request.mutable_open()->mutable_model() = ModelSpecToProto(spec_);
    request.mutable_open()->set_tenant("t");
    request.mutable_open()->set_layer_major(layer_major);
    AppendMessage(request, &input_);
  }
  void Add(const v1::CodecItem& item, std::span<const std::byte> bytes, std::size_t piece) {
    v1::CodecRequest request;
    *request.mutable_item() = item;
    for (std::size_t at = 0; at < bytes.size(); at += piece) {
      const auto part = bytes.subspan(at, std::min(piece, bytes.size() - at));
      request.set_crc32c(Crc32c(part));
      request.set_data(part.data(), part.size());
      AppendMessage(request, &input_);
      request.clear_item();
    }
  }
  void Write(const std::string& name) const {
    std::ofstream file(folder_ + "/" + name, std::ios::binary);
    file << input_;
    KV_CHECK(file.good());
  }

  const std::string folder_;
  const ModelSpec spec_;
  const std::vector<std::byte> profile_;
  const FrameCodec codec_;
  const SyntheticText text_;
  std::vector<std::vector<std::byte>> raw_;
  std::string input_;
};

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) {
  KV_CHECK(argc == 2);
  kvtrie::Corpus(argv[1]).WriteAll();
  return 0;
}
