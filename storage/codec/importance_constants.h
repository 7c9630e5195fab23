#pragma once

#include <cstdint>

// Of the features of importance (importance.h), on whatever device they are computed.
namespace kvtrie {

inline constexpr std::uint32_t kImportanceDistances[] = {4, 16, 64, 256, 1024};
inline constexpr std::uint32_t kImportanceDistanceCount = 5;

// Scores are bounded, so that no exponential overflows, and logs start above their noise.
inline constexpr float kScoreMin = -15;
inline constexpr float kScoreMax = 12;
inline constexpr float kAttentionFloor = 1e-4f;
inline constexpr float kEnergyFloor = 1e-6f;

}  // namespace kvtrie
