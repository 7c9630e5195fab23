#include "client/ctl/profile_files.h"

#include <fcntl.h>
#include <google/protobuf/util/json_util.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/ctl/format.h"
#include "client/model_spec_from_proto.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

constexpr std::string_view kProfileMagic = "KVP1";
constexpr std::size_t kJsonBytesMax = std::size_t{1} << 20;

absl::Status Bad(const std::string& path, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", std::string(what)));
}

absl::Status FromErrno(const std::string& path, const char* what, int error) {
  const std::string message =
      absl::StrCat(path, ": ", what, ": ", std::generic_category().message(error));
  return error == ENOENT ? absl::NotFoundError(message) : absl::InvalidArgumentError(message);
}

// Where WriteFile writes, until all is there.
std::string Unfinished(const std::string& path) {
  return absl::StrCat(path, ".unfinished.", getpid());
}

absl::Status CannotWrite(const std::string& path, const std::error_code& error) {
  return Bad(path, absl::StrCat("cannot be written: ", error.message()));
}

absl::StatusOr<MappedFile> OpenJson(const std::string& path) {
  KV_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
  if (file.bytes().size() > kJsonBytesMax) return Bad(path, "larger than 1 MiB, so not this JSON");
  return file;
}

// What is wrong with a sample's files, in words of CheckSamples.
absl::Status OfSample(const std::string& path, const absl::Status& status) {
  constexpr absl::string_view kPrefix = "sample 0: ";
  absl::string_view what = status.message();
  if (what.substr(0, kPrefix.size()) == kPrefix) what.remove_prefix(kPrefix.size());
  return Bad(path, std::string(what));
}

}  // namespace

void MappedFile::Unmap::operator()(const std::byte* at) const {
  munmap(const_cast<std::byte*>(at), bytes);
}

std::string_view MappedFile::text() const {
  return {reinterpret_cast<const char*>(at_.get()), bytes().size()};
}

absl::StatusOr<MappedFile> MappedFile::Open(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return FromErrno(path, "cannot be opened", errno);
  struct stat about = {};
  MappedFile file;
  absl::Status status;
  if (fstat(descriptor, &about) != 0) {
    status = FromErrno(path, "cannot be read", errno);
  } else if (!S_ISREG(about.st_mode)) {
    status = Bad(path, "is no regular file");
  } else if (about.st_size == 0) {
    status = Bad(path, "is empty: write it again, or name another");
  } else {
    const auto bytes = static_cast<std::size_t>(about.st_size);
    void* const at = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (at == MAP_FAILED) {
      status = FromErrno(path, "cannot be mapped", errno);
    } else {
      file.at_ = {static_cast<const std::byte*>(at), Unmap{bytes}};
    }
  }
  close(descriptor);
  if (!status.ok()) return status;
  return file;
}

template <typename T>
absl::StatusOr<std::span<const T>> NumbersOf(const MappedFile& file, const std::string& path) {
  const std::span<const std::byte> bytes = file.bytes();
  if (bytes.size() % sizeof(T) != 0) {
    return Bad(path, absl::StrCat("has ", bytes.size(), " bytes, must have a multiple of ",
                                  sizeof(T), ": it is cut, or holds other numbers"));
  }
  return std::span<const T>(reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T));
}
template absl::StatusOr<std::span<const float>> NumbersOf(const MappedFile&, const std::string&);
template absl::StatusOr<std::span<const TokenId>> NumbersOf(const MappedFile&, const std::string&);

absl::Status CheckCanWrite(const std::string& path) {
  if (path.empty()) return Bad("''", "is no name of a file");
  std::error_code error;
  if (std::filesystem::exists(path, error) && !std::filesystem::is_regular_file(path, error)) {
    return Bad(path, "cannot be written: it is there, and is no regular file: name another");
  }
  const std::string unfinished = Unfinished(path);
  const int descriptor = open(unfinished.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor < 0 && (errno == ENOENT || errno == ENOTDIR)) {
    return Bad(path, absl::StrCat("cannot be written: there is no folder ",
                                  std::filesystem::path(path).parent_path().string(),
                                  ": make it, or name another"));
  }
  if (descriptor < 0) return CannotWrite(path, std::error_code(errno, std::generic_category()));
  close(descriptor);
  std::filesystem::remove(unfinished, error);
  return absl::OkStatus();
}

absl::Status WriteFile(const std::string& path, std::string_view bytes) {
  KV_RETURN_IF_ERROR(CheckCanWrite(path));
  const std::string unfinished = Unfinished(path);
  std::ofstream file(unfinished, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  std::error_code error(file ? 0 : errno != 0 ? errno : EIO, std::generic_category());
  if (!error) std::filesystem::rename(unfinished, path, error);
  if (!error) return absl::OkStatus();
  std::error_code ignored;
  std::filesystem::remove(unfinished, ignored);
  return CannotWrite(path, error);
}

absl::StatusOr<ModelSpec> ReadModelSpec(const std::string& path) {
  KV_ASSIGN_OR_RETURN(const MappedFile file, OpenJson(path));
  v1::ModelSpec proto;
  const auto parsed = google::protobuf::util::JsonStringToMessage(std::string(file.text()), &proto);
  if (!parsed.ok()) {
    return Bad(path, absl::StrCat("is not the JSON of a kvtrie.v1.ModelSpec: ",
                                  parsed.message().ToString()));
  }
  absl::StatusOr<ModelSpec> spec = ModelSpecFromProto(proto);
  if (!spec.ok()) return Bad(path, std::string(spec.status().message()));
  if (const absl::Status valid = spec->Validate(); !valid.ok()) {
    return Bad(path, std::string(valid.message()));
  }
  if (!spec->layout_tag.empty()) {
    return Bad(path,
               "layout_tag: KV of another layout has no profile; convert it, and leave it out");
  }
  return spec;
}

absl::StatusOr<SampleFolder> ReadSamples(const ModelSpec& spec, const std::string& folder) {
  std::error_code error;
  std::vector<std::filesystem::path> paths;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->path().extension() == ".tokens") paths.push_back(entry->path());
  }
  if (error) return FromErrno(folder, "cannot be read", error.value());
  if (paths.empty()) return Bad(folder, "has no samples: no file NAME.tokens");
  std::sort(paths.begin(), paths.end());

  SampleFolder found;
  for (std::filesystem::path path : paths) {
    KvSample& sample = found.samples.emplace_back();
    found.names.push_back(path.stem());
    KV_ASSIGN_OR_RETURN(MappedFile tokens, MappedFile::Open(path));
    KV_ASSIGN_OR_RETURN(sample.tokens, NumbersOf<TokenId>(tokens, path));
    found.files.push_back(std::move(tokens));
    path.replace_extension(".kv");
    KV_ASSIGN_OR_RETURN(MappedFile raw, MappedFile::Open(path));
    sample.raw = raw.bytes();
    found.files.push_back(std::move(raw));
    if (const auto with = path.parent_path() / (path.stem().string() + ".importance");
        std::filesystem::exists(with, error)) {
      KV_ASSIGN_OR_RETURN(MappedFile importance, MappedFile::Open(with));
      KV_ASSIGN_OR_RETURN(sample.importance, NumbersOf<float>(importance, with));
      found.files.push_back(std::move(importance));
    }
    if (const absl::Status status = CheckSamples(spec, {&sample, 1}); !status.ok()) {
      return OfSample(path.replace_extension().string() + ".*", status);
    }
  }
  return found;
}

absl::StatusOr<ProfileFile> ReadProfileFile(const std::string& path) {
  ProfileFile profile;
  KV_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
  const std::string_view text = file.text();
  if (text.size() > kProfileBytesMax) return Bad(path, "is larger than any profile");
  if (text.substr(0, kProfileMagic.size()) == kProfileMagic) {
    const absl::StatusOr<ProfileHeader> header = ParseProfileHeader(file.bytes());
    if (!header.ok()) return Bad(path, std::string(header.status().message()));
    profile.body = text.substr(header->header_bytes());
    if (profile.body.size() != header->body_bytes ||
        Crc32c(AsBytes(profile.body)) != header->body_crc32c) {
      return Bad(path, "is a profile whose body is damaged");
    }
    profile.codec_key = header->codec_key;
    profile.levels = header->levels;
  } else {
    const auto draft = DecodeDraft(text);
    if (!draft.ok()) {
      return Bad(path, absl::StrCat("is neither a profile nor a draft of one, or damaged: ",
                                    draft.status().message()));
    }
    profile.codec_key = draft->codec_key;
    profile.body = draft->body;
  }
  profile.file = std::move(file);
  return profile;
}

absl::StatusOr<MeasuredFigures> ReadMeasuredFigures(const std::string& path) {
  KV_ASSIGN_OR_RETURN(const MappedFile file, OpenJson(path));
  const auto json = nlohmann::json::parse(file.text(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return Bad(path, "is no JSON object");
  MeasuredFigures figures;
  const auto digest = json.find("body_digest");
  const auto id = digest != json.end() && digest->is_string()
                      ? IdFromHex(digest->get<std::string>())
                      : std::nullopt;
  if (!id) return Bad(path, "body_digest: must be 32 hexadecimal digits, as `profile code` says");
  figures.body_digest = *ProfileId::FromBytes(*id);
  const auto levels = json.find("levels");
  if (levels == json.end() || !levels->is_array() || levels->empty()) {
    return Bad(path, "levels: must be a list of objects");
  }
  for (const auto& of_level : *levels) {
    const std::string name = absl::StrCat("levels[", figures.levels.size(), "]");
    if (!of_level.is_object()) return Bad(path, name + ": must be an object");
    const auto text = of_level.find("quality");
    const auto quality = text != of_level.end() && text->is_string()
                             ? LevelFromText(text->get<std::string>())
                             : std::nullopt;
    if (!quality) return Bad(path, name + ".quality: must be near-exact, high or small");
    ProfileLevel& level = figures.levels.emplace_back();
    level.quality = *quality;
    for (const auto& [field, value] :
         {std::pair{"bits_per_component", &level.bits_per_component},
          std::pair{"mean_kl", &level.mean_kl}, std::pair{"kl_p99", &level.kl_p99}}) {
      const auto number = of_level.find(field);
      if (number == of_level.end() || !number->is_number()) {
        return Bad(path, absl::StrCat(name, ".", field, ": must be a number, and is ",
                                      number == of_level.end() ? "missing" : number->type_name(),
                                      ": measure the level, and write what it gave"));
      }
      *value = number->get<float>();
    }
  }
  return figures;
}

absl::StatusOr<std::string> SealProfile(const CodecKey& codec_key, std::string_view body,
                                        std::span<const ResidualLevel> levels,
                                        const MeasuredFigures& measured) {
  const auto bad = [](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(what...));
  };
  const ProfileId digest = BodyDigest(body);
  if (digest != measured.body_digest) {
    return bad("the figures are of body ", measured.body_digest.ToHex(), ", this one is ",
               digest.ToHex(), ": measure it again");
  }
  ProfileHeader header;
  header.codec_key = codec_key;
  header.body_bytes = body.size();
  header.body_crc32c = Crc32c(AsBytes(body));
  for (const ResidualLevel& level : levels) {
    const std::string name(QualityText(level.quality));
    const auto of_level = [&](const ProfileLevel& figures) {
      return figures.quality == level.quality;
    };
    const auto found = std::find_if(measured.levels.begin(), measured.levels.end(), of_level);
    const auto count = std::count_if(measured.levels.begin(), measured.levels.end(), of_level);
    if (count != 1) {
      return bad("level ", name, ": ", count,
                 " figures, must be one: measure it, or fit without it");
    }
    // Written so that what is not a number fails.
    if (!(found->bits_per_component > 0 && found->bits_per_component <= 32)) {
      return bad("level ", name, ": bits_per_component is ", found->bits_per_component,
                 ", must be above 0 and at most 32: measure it again");
    }
    const double bound = MeanKlMax(level.quality);
    if (!(found->mean_kl >= 0)) {
      return bad("level ", name, ": mean_kl is ", found->mean_kl,
                 ", must be 0 or above: measure it again");
    }
    if (found->mean_kl > static_cast<float>(bound)) {
      return bad("level ", name, ": mean_kl is ", found->mean_kl,
                 ", and the level promises at most ", bound, ": fit with a smaller step");
    }
    if (!(found->kl_p99 >= 0 && std::isfinite(found->kl_p99))) {
      return bad("level ", name, ": kl_p99 is ", found->kl_p99,
                 ", must be finite and not negative: measure it again");
    }
    header.levels.push_back(*found);
  }
  for (const ProfileLevel& level : measured.levels) {
    if (std::none_of(levels.begin(), levels.end(), [&](const ResidualLevel& of_body) {
          return of_body.quality == level.quality;
        })) {
      return bad("level ", std::string(QualityText(level.quality)), ": the profile has none");
    }
  }
  if (header.profile_bytes() < kProfileBytesMin || header.profile_bytes() > kProfileBytesMax) {
    return bad("the profile has ", header.profile_bytes(), " bytes, must have ", kProfileBytesMin,
               " to ", kProfileBytesMax, ": fit with a smaller --table");
  }
  std::string bytes(header.header_bytes(), '\0');
  WriteProfileHeader(header, std::as_writable_bytes(std::span(bytes)));
  bytes += body;
  KV_CHECK(ParseProfileHeader(AsBytes(bytes)).ok());
  return bytes;
}

std::optional<Quality> LevelFromText(std::string_view text) {
  for (const Quality quality : {Quality::kNearExact, Quality::kHigh, Quality::kSmall}) {
    if (QualityText(quality) == text) return quality;
  }
  return std::nullopt;
}

std::string_view QualityText(Quality quality) {
  return QualityName(static_cast<v1::Quality>(quality));
}

}  // namespace kvtrie
