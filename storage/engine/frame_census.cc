#include "storage/engine/frame_census.h"

#include <algorithm>

#include "storage/base/check.h"

namespace kvtrie {

std::size_t FrameCensus::Index(CodecId codec) {
  KV_CHECK(IsCodec(codec));
  return static_cast<std::size_t>(codec) - 1;
}

void FrameCensus::Add(ModelSlot model, const RungRow& rung) {
  if (models_.size() <= model) models_.resize(std::size_t{model} + 1);
  for (Usage* usage : {&models_[model], &codecs_[Index(rung.codec)]}) {
    ++usage->frames;
    usage->bytes += rung.record_bytes;
  }
  if (!rung.profile.empty()) ++profiles_[rung.profile];
}

void FrameCensus::Remove(ModelSlot model, const RungRow& rung) {
  KV_CHECK(model < models_.size());
  for (Usage* usage : {&models_[model], &codecs_[Index(rung.codec)]}) {
    KV_CHECK(usage->frames > 0);
    KV_CHECK(usage->bytes >= rung.record_bytes);
    --usage->frames;
    usage->bytes -= rung.record_bytes;
  }
  if (rung.profile.empty()) return;
  const auto named = profiles_.find(rung.profile);
  KV_CHECK(named != profiles_.end());
  if (--named->second == 0) profiles_.erase(named);
}

FrameCensus::Usage FrameCensus::OfModel(ModelSlot model) const {
  return model < models_.size() ? models_[model] : Usage{};
}

FrameCensus::Usage FrameCensus::OfCodec(CodecId codec) const { return codecs_[Index(codec)]; }

FrameCensus::Usage FrameCensus::Total() const {
  Usage total;
  for (const Usage& usage : codecs_) {
    total.frames += usage.frames;
    total.bytes += usage.bytes;
  }
  return total;
}

std::uint64_t FrameCensus::FramesOf(const ProfileId& profile) const {
  const auto found = profiles_.find(profile);
  return found == profiles_.end() ? 0 : found->second;
}

bool FrameCensus::operator==(const FrameCensus& other) const {
  if (codecs_ != other.codecs_ || profiles_ != other.profiles_) return false;
  for (std::size_t slot = 0; slot < std::max(models_.size(), other.models_.size()); ++slot) {
    const auto model = static_cast<ModelSlot>(slot);
    if (!(OfModel(model) == other.OfModel(model))) return false;
  }
  return true;
}

}  // namespace kvtrie
