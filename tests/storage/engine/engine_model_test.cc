// Random operations on the engine and on a model of it that is a map.

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/storage/engine/coded_fixture.h"

namespace kvtrie {
namespace {

using std::chrono::seconds;

constexpr std::uint32_t kDepthMax = 6;

// A path by the choices that it is made of: salt, then one of few blocks at each depth.
using Choices = std::vector<int>;

struct ModelNode {
  std::int64_t expires = 0;  // 0 = never
  std::uint32_t priority = 0;
  bool exact = false;
  std::optional<Quality> coded;

  bool Serves(Quality quality) const { return exact || HasCoded(quality); }
  bool HasCoded(Quality quality) const { return coded && IsAtLeast(*coded, quality); }
};

class EngineModelTest : public CodedFixture {
 protected:
  EngineModelTest() {
    options_.segment_bytes = std::uint64_t{1} << 20;
    options_.memory_tier_bytes = std::uint64_t{64} << 10;  // most reads go to the disk
    options_.token_cache_bytes = std::uint64_t{1} << 20;
  }

  std::uint32_t Below(std::uint32_t end) { return static_cast<std::uint32_t>(random_()) % end; }

  Choices RandomChoices() {
    Choices choices = {static_cast<int>(Below(2))};
    const std::uint32_t depth = 1 + Below(kDepthMax);
    while (choices.size() <= depth) choices.push_back(static_cast<int>(Below(2)));
    return choices;
  }

  // What a path's views point into.
  struct Path {
    std::vector<TokenId> tokens;
    std::vector<ExtraKey> extra_keys;
    std::string salt;
  };
  static Path PathFrom(const Choices& choices) {
    Path path;
    path.salt = choices[0] == 0 ? "" : "salt";
    for (std::size_t depth = 1; depth < choices.size(); ++depth) {
      const auto block =
          SessionTokens(10 * depth + static_cast<std::uint64_t>(choices[depth]), kTestBlockTokens);
      path.tokens.insert(path.tokens.end(), block.begin(), block.end());
      if (depth % 3 == 0 && choices[depth] == 1) {
        path.extra_keys.push_back({static_cast<std::uint32_t>(depth - 1), "image"});
      }
    }
    return path;
  }
  PathView View(const Path& path) const { return PathOf(path.tokens, path.salt, path.extra_keys); }

  bool Expired(const ModelNode& node) const {
    return node.expires != 0 && node.expires <= clock_.UnixSeconds();
  }
  Quality RandomQuality() { return kAllQualities[Below(std::size(kAllQualities))]; }
  // The deepest block that a lookup finds.
  std::uint32_t ExpectedBlocks(const Choices& choices, Quality quality) const {
    std::uint32_t blocks = 0;
    for (std::size_t size = 2; size <= choices.size(); ++size) {
      const auto found = nodes_.find(Choices(choices.begin(), choices.begin() + size));
      if (found == nodes_.end() || Expired(found->second)) break;
      if (!found->second.Serves(quality)) break;
      ++blocks;
    }
    return blocks;
  }
  static bool IsAtOrBelow(const Choices& node, const Choices& root) {
    return node.size() >= root.size() && std::equal(root.begin(), root.end(), node.begin());
  }
  // Removes a node and all below it, with their pins; how many nodes that were.
  std::uint64_t Remove(const Choices& root) {
    std::erase_if(pins_, [&root](const auto& pin) { return IsAtOrBelow(pin.second, root); });
    std::uint64_t count = 0;
    for (auto at = nodes_.lower_bound(root); at != nodes_.end();) {
      if (!IsAtOrBelow(at->first, root)) break;
      at = nodes_.erase(at);
      ++count;
    }
    return count;
  }

  static Choices NodeAt(const Choices& choices, std::uint32_t block) {
    return Choices(choices.begin(), choices.begin() + static_cast<int>(block) + 2);
  }
  // The node that a stored frame belongs to: a new one, if there is none that lives.
  ModelNode& Touched(const Choices& choices, std::uint32_t block, const PutAnnouncement& put) {
    const Choices name = NodeAt(choices, block);
    const auto found = nodes_.find(name);
    if (found != nodes_.end() && !Expired(found->second)) return found->second;
    ModelNode& node = nodes_[name];
    node = {};
    node.expires = put.ttl.count() == 0 ? 0 : clock_.UnixSeconds() + put.ttl.count();
    node.priority = put.priority;
    return node;
  }

  void DoPut() {
    const Choices choices = RandomChoices();
    const Path path = PathFrom(choices);
    const auto block_count = static_cast<std::uint32_t>(choices.size() - 1);
    PutAnnouncement put;
    put.path = View(path);
    put.ttl = seconds(Below(3) == 0 ? 1 + Below(50) : 0);
    put.priority = Below(3);
    const std::string name = absl::StrCat("session ", Below(6));
    if (Below(2) == 0) put.session_id = name;
    const std::size_t sent = Below(3) == 0 ? Below(block_count + 1) : block_count;
    std::vector<std::uint32_t> missing;
    for (std::uint32_t block = 0; block < block_count; ++block) {
      const auto found = nodes_.find(NodeAt(choices, block));
      const bool has_it = found != nodes_.end() && !Expired(found->second) && found->second.exact;
      if (!has_it) missing.push_back(block);
    }
    blocks_per_write_ = 1 + Below(8);
    const PutResults results = Put(put, sent);
    ASSERT_EQ(results.size(), std::min(sent, missing.size()));
    for (std::size_t i = 0; i < results.size(); ++i) {
      ASSERT_TRUE(results[i].ok()) << results[i].status();
      ASSERT_EQ(results[i]->outcome, PutOutcome::kStored);
      Touched(choices, missing[i], put).exact = true;
    }
    AwaitNoOpenPuts();
  }

  void DoPutCoded() {
    const Choices choices = RandomChoices();
    const Path path = PathFrom(choices);
    const FrameKind kinds[] = {Rotated(), Residual(Quality::kSmall), Residual(Quality::kHigh),
                               Residual(Quality::kNearExact)};
    const FrameKind kind = kinds[Below(4)];
    PutAnnouncement put;
    put.path = View(path);
    put.quality = kind.quality;
    put.beside_exact = Below(2) == 0;
    put.ttl = seconds(Below(3) == 0 ? 1 + Below(50) : 0);
    put.priority = Below(3);
    std::vector<std::uint32_t> missing;
    for (std::uint32_t block = 0; block + 1 < choices.size(); ++block) {
      const auto found = nodes_.find(NodeAt(choices, block));
      const bool has_it = found != nodes_.end() && !Expired(found->second) &&
                          (put.beside_exact ? found->second.HasCoded(kind.quality)
                                            : found->second.Serves(kind.quality));
      if (!has_it) missing.push_back(block);
    }
    std::vector<std::uint32_t> sent;
    const PutResults results = PutFrames(put, kind, &sent);
    ASSERT_EQ(sent, missing);
    for (std::size_t i = 0; i < results.size(); ++i) {
      ASSERT_TRUE(results[i].ok()) << results[i].status();
      ASSERT_EQ(results[i]->outcome, PutOutcome::kStored);
      Touched(choices, missing[i], put).coded = kind.quality;
    }
    AwaitNoOpenPuts();
  }

  void DoLookup() {
    const Choices choices = RandomChoices();
    const Path path = PathFrom(choices);
    const Quality quality = RandomQuality();
    const std::uint32_t expected = ExpectedBlocks(choices, quality);
    const seconds lease(Below(4) == 0 ? 1 + Below(30) : 0);
    const auto found = engine_->Lookup(tenant_, {.models = {model_},
                                                 .path = View(path),
                                                 .min_quality = quality,
                                                 .lease = lease,
                                                 .want_blocks = true});
    ASSERT_TRUE(found.ok()) << found.status();
    ASSERT_EQ(found->matched_blocks, expected);
    ASSERT_EQ(found->lease.empty(), lease.count() == 0 || expected == 0);
    ASSERT_TRUE(expected == 0 || IsAtLeast(found->quality, quality));
    if (!found->lease.empty() && Below(2) == 0) engine_->ReleaseLease(tenant_, found->lease);
  }

  void DoRead() { ReadAll(RandomChoices(), RandomQuality()); }

  // What is served is good enough, the smallest that is, and its own.
  void ReadAll(const Choices& choices, Quality quality) {
    const Path path = PathFrom(choices);
    ASSERT_EQ(ExpectOwnBytes(View(path)), ExpectedBlocks(choices, Quality::kExact));
    const std::uint32_t expected = ExpectedBlocks(choices, quality);
    ASSERT_EQ(LookupAt(View(path), quality).matched_blocks, expected);
    const auto frames = FramesAt(View(path), quality);
    for (std::uint32_t block = 0; block < expected; ++block) {
      const ModelNode& node = nodes_.at(NodeAt(choices, block));
      ASSERT_TRUE(frames[block].has_value());
      const Quality served = node.HasCoded(quality) ? *node.coded : Quality::kExact;
      ASSERT_EQ(frames[block]->quality, served);
      const auto raw = RawBytes(*frames[block]);
      ASSERT_TRUE(raw.ok()) << raw.status();
      ASSERT_EQ(*raw, served == Quality::kExact
                          ? Pattern(View(path), block)
                          : DecodedBytes(View(path), block, Residual(served)));
    }
  }

  void DoDelete() {
    const Choices choices = RandomChoices();
    const Path path = PathFrom(choices);
    const std::uint32_t reachable = ExpectedBlocks(choices, Quality::kUnrated);
    const bool whole = reachable == choices.size() - 1;
    Selection selection;
    if (Below(2) == 0) {
      selection.path = View(path);
    } else {
      const LookupResult found = LookupAt(View(path), Quality::kUnrated);
      if (!whole) return;
      selection.node = found.blocks.front().back().node;
    }
    const auto deleted = engine_->Delete(tenant_, selection);
    ASSERT_TRUE(deleted.ok()) << deleted.status();
    const std::uint64_t expected = Remove(choices);
    if (whole) {
      ASSERT_EQ(deleted->blocks, expected);
    } else {
      // Behind something that has expired, and that may have been removed with all below it.
      ASSERT_LE(deleted->blocks, expected);
    }
  }

  void DoPin() {
    const Choices choices = RandomChoices();
    const Path path = PathFrom(choices);
    const std::uint32_t reachable = ExpectedBlocks(choices, Quality::kUnrated);
    const seconds duration(1 + Below(60));
    const auto pin = engine_->Pin(tenant_, SelectionOf(View(path)), duration);
    ASSERT_EQ(pin.ok(), reachable > 0) << pin.status();
    if (!pin.ok()) return;
    ASSERT_EQ(pin->blocks, reachable);
    pins_[pin->id] = Choices(choices.begin(), choices.begin() + static_cast<int>(reachable) + 1);
  }
  void DoChangePin() {
    if (pins_.empty()) return;
    auto at = pins_.begin();
    std::advance(at, Below(static_cast<std::uint32_t>(pins_.size())));
    if (Below(2) == 0) {
      ASSERT_TRUE(*engine_->Unpin(tenant_, at->first));
      ASSERT_FALSE(*engine_->Unpin(tenant_, at->first));
      pins_.erase(at);
    } else {
      const seconds duration(1 + Below(60));
      const auto extended = engine_->ExtendPin(tenant_, at->first, duration);
      ASSERT_TRUE(extended.ok()) << extended.status();
    }
  }

  void DoSetRetention() {
    const Choices choices = RandomChoices();
    const Path path = PathFrom(choices);
    const std::uint32_t reachable = ExpectedBlocks(choices, Quality::kUnrated);
    Retention retention;
    if (Below(3) > 0) retention.ttl = seconds(Below(2) == 0 ? 0 : 1 + Below(40));
    if (Below(2) == 0) retention.quality = RandomQuality();
    if (Below(2) == 0 || (!retention.ttl && !retention.quality)) retention.priority = Below(16);
    const std::optional<Quality> level = retention.quality;
    const auto change = engine_->SetRetention(tenant_, SelectionOf(View(path)), retention);
    ASSERT_EQ(change.ok(), reachable > 0) << change.status();
    if (!change.ok()) return;
    std::uint64_t dropped = 0;
    std::uint64_t unchanged = 0;
    for (std::uint32_t block = 0; block < reachable; ++block) {
      ModelNode& node = nodes_.at(NodeAt(choices, block));
      if (const auto ttl = retention.ttl) {
        node.expires = ttl->count() == 0 ? 0 : clock_.UnixSeconds() + ttl->count();
      }
      if (retention.priority) node.priority = *retention.priority;
      if (!level || *level == Quality::kExact) continue;
      if (node.exact && node.HasCoded(*level)) {
        node.exact = false;
        ++dropped;
      } else if (node.exact || !IsAtLeast(*level, *node.coded)) {
        ++unchanged;
      }
    }
    ASSERT_EQ(change->dropped_frames, dropped);
    ASSERT_EQ(change->unchanged_blocks, unchanged);
    ASSERT_EQ(change->changed_blocks, reachable - unchanged);
  }

  // Time passes; nothing that has expired meanwhile may be found. What maintenance removes with it
  // depends on who holds it, so the model settles at the end of a round only.
  void DoAdvance() { clock_.Advance(seconds(Below(4))); }

  // Expired nodes that are held stay for a while, unseen: the model's nodes are those that the
  // engine has, less what was removed with something expired above it.
  void Settle() {
    for (const auto& pin : pins_) {
      ASSERT_TRUE(engine_->Unpin(tenant_, pin.first).ok());
    }
    pins_.clear();
    clock_.Advance(seconds(61));  // leases end
    engine_->RunMaintenance();
    clock_.Advance(seconds(1));
    engine_->RunMaintenance();
    std::vector<Choices> expired;
    for (const auto& [choices, node] : nodes_) {
      if (Expired(node)) expired.push_back(choices);
    }
    for (const Choices& choices : expired) Remove(choices);
    ASSERT_EQ(engine_->Stats().node_count, nodes_.size());
    ASSERT_EQ(engine_->Stats().lease_count, 0u);
    ASSERT_EQ(engine_->Stats().pinned_bytes, 0u);
  }

  const std::uint32_t seed_ = std::random_device()();
  std::mt19937 random_{seed_};
  std::map<Choices, ModelNode> nodes_;
  std::map<PinId, Choices> pins_;  // the deepest node of each
};

TEST_F(EngineModelTest, AgreesWithAMapOverRandomOperations) {
  SCOPED_TRACE(testing::Message() << "seed " << seed_);
  OpenWithProfile();
  for (int round = 0; round < 12; ++round) {
    for (int step = 0; step < 80; ++step) {
      switch (Below(17)) {
        case 13:
        case 14:
        case 15:
        case 16:
          DoPutCoded();
          break;
        case 0:
        case 1:
        case 2:
        case 3:
          DoPut();
          break;
        case 4:
        case 5:
          DoLookup();
          break;
        case 6:
        case 7:
          DoRead();
          break;
        case 8:
          DoDelete();
          break;
        case 9:
          DoPin();
          break;
        case 10:
          DoChangePin();
          break;
        case 11:
          DoAdvance();
          break;
        default:
          DoSetRetention();
      }
      ASSERT_FALSE(HasFailure()) << "round " << round << " step " << step;
    }
    Settle();
    ASSERT_FALSE(HasFailure()) << "round " << round;
    if (round % 3 == 2) Reopen();
    ASSERT_EQ(engine_->Stats().node_count, nodes_.size());
    // All of it, block by block.
    for (const auto& [choices, node] : nodes_) {
      const Path path = PathFrom(choices);
      ReadAll(choices, RandomQuality());
      ASSERT_FALSE(HasFailure());
      ASSERT_EQ(LookupAt(View(path), Quality::kUnrated).matched_blocks, choices.size() - 1);
      const auto described = engine_->DescribePath(tenant_, SelectionOf(View(path)));
      ASSERT_TRUE(described.ok());
      ASSERT_EQ(described->back().priority, node.priority);
      ASSERT_EQ(described->back().expires_unix_seconds, node.expires);
      ASSERT_FALSE(described->back().pinned);
    }
    ExpectSound();
    ASSERT_FALSE(HasFailure()) << "round " << round;
  }
  Selection everything;
  everything.all = true;
  EXPECT_EQ(engine_->Delete(tenant_, everything)->blocks, nodes_.size());
  engine_->RunMaintenance();
  EXPECT_EQ(engine_->Stats().live_bytes, 0u);
  ExpectSound();
}

}  // namespace
}  // namespace kvtrie
