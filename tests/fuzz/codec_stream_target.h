#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "client/model_spec_to_proto.h"
#include "kvtrie/v1/codec.pb.h"
#include "tests/storage/codec/plain_profile_bytes.h"
#include "tests/storage/codec/residual_fixture.h"

// What codec_stream_fuzz.cc and the writer of its corpus share.
namespace kvtrie {

// A model whose blocks are small enough for mutations to matter.
inline ModelSpec FuzzedSpec() { return SyntheticSpec({{2, 1, 8, 8}}, DType::kBfloat16); }

// An input: a byte of flags, then messages, each with its length in two bytes before it.
inline constexpr std::uint8_t kDecodes = 1;
inline constexpr std::uint8_t kMendsChecksums = 2;
inline constexpr std::uint8_t kClosesInput = 4;

inline void AppendMessage(const v1::CodecRequest& request, std::string* input) {
  const std::string message = request.SerializeAsString();
  input->push_back(static_cast<char>(message.size() & 0xff));
  input->push_back(static_cast<char>(message.size() >> 8));
  *input += message;
}

}  // namespace kvtrie
