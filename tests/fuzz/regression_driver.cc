// Drives a fuzz target without a fuzzing engine: every file of a corpus folder, then a bounded
// number of seeded mutations of each.
//
//   frame_fuzz CORPUS_FOLDER
//   KV_FUZZ_SEED       seed of the mutations (default 1)
//   KV_FUZZ_MUTATIONS  mutations per file (default 3000)
//
// A target that crashes leaves the last input in KV_FUZZ_LAST_INPUT, when that names a file.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Input = std::vector<std::uint8_t>;

constexpr std::size_t kInputBytesMax = std::size_t{1} << 20;

std::uint64_t FromEnvironment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

void Run(const Input& input) {
  static const char* const last_input = std::getenv("KV_FUZZ_LAST_INPUT");
  if (last_input != nullptr) {
    std::ofstream(last_input, std::ios::binary)
        .write(reinterpret_cast<const char*>(input.data()),
               static_cast<std::streamsize>(input.size()));
  }
  LLVMFuzzerTestOneInput(input.data(), input.size());
}

class Mutator {
 public:
  Mutator(std::uint64_t seed, const std::vector<Input>& corpus) : random_(seed), corpus_(corpus) {}

  Input Mutate(Input input) {
    for (std::size_t steps = 1 + Below(4); steps > 0; --steps) Step(input);
    input.resize(std::min(input.size(), kInputBytesMax));
    return input;
  }

 private:
  std::size_t Below(std::size_t bound) { return static_cast<std::size_t>(random_() % bound); }

  void Step(Input& input) {
    // Values at which lengths and counts go wrong.
    static constexpr std::uint8_t kBytes[] = {0x00, 0x01, 0x7f, 0x80, 0xfe, 0xff};
    if (input.empty()) {
      input.push_back(static_cast<std::uint8_t>(random_()));
      return;
    }
    const std::size_t at = Below(input.size());
    const auto position = input.begin() + static_cast<std::ptrdiff_t>(at);
    const std::size_t length = 1 + Below(std::min<std::size_t>(input.size() - at, 32));
    const auto end = position + static_cast<std::ptrdiff_t>(length);
    switch (Below(7)) {
      case 0:
        *position = static_cast<std::uint8_t>(*position ^ (1u << Below(8)));
        break;
      case 1:
        *position = kBytes[Below(std::size(kBytes))];
        break;
      case 2:
        input.resize(at);
        break;
      case 3:
        input.erase(position, end);
        break;
      case 4: {
        const Input run(position, end);
        input.insert(position, run.begin(), run.end());
        break;
      }
      case 5:
        std::fill(position, end, kBytes[Below(std::size(kBytes))]);
        break;
      default: {
        // The head of this input and the tail of another.
        const Input& other = corpus_[Below(corpus_.size())];
        if (at < other.size()) {
          input.resize(at);
          input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(at), other.end());
        }
        break;
      }
    }
  }

  std::mt19937_64 random_;
  const std::vector<Input>& corpus_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s CORPUS_FOLDER\n", argv[0]);
    return 2;
  }
  std::vector<std::filesystem::path> paths;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1], error)) {
    if (entry.is_regular_file()) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  if (paths.empty()) {
    std::fprintf(stderr, "no corpus in %s\n", argv[1]);
    return 1;
  }

  std::vector<Input> corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }

  const std::uint64_t seed = FromEnvironment("KV_FUZZ_SEED", 1);
  const std::uint64_t mutations = FromEnvironment("KV_FUZZ_MUTATIONS", 3000);
  std::printf("%zu files, seed %llu, %llu mutations per file\n", corpus.size(),
              static_cast<unsigned long long>(seed), static_cast<unsigned long long>(mutations));
  Run({});
  for (const Input& input : corpus) Run(input);
  Mutator mutator(seed, corpus);
  for (std::size_t i = 0; i < corpus.size(); ++i) {
    std::printf("%s\n", paths[i].filename().c_str());
    std::fflush(stdout);
    for (std::uint64_t n = 0; n < mutations; ++n) Run(mutator.Mutate(corpus[i]));
  }
  return 0;
}
