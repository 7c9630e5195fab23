#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "kvtrie/v1/admin.pb.h"
#include "kvtrie/v1/cache.pb.h"

namespace kvtrie {

// Answers of the server as JSON: field names of admin.proto and cache.proto, ids in hexadecimal
// digits, enums by name.
nlohmann::ordered_json StatusToJson(const v1::GetStatusResponse& status);
nlohmann::ordered_json ModelToJson(const v1::ModelEntry& model);
nlohmann::ordered_json NodeToJson(const v1::NodeEntry& node);
nlohmann::ordered_json ProfileToJson(const v1::ProfileEntry& profile);
nlohmann::ordered_json SimilarToJson(const v1::SimilarResponse& similar);
nlohmann::ordered_json GroupToJson(const v1::GroupEntry& group);
nlohmann::ordered_json GroupBranchToJson(const v1::GroupBranch& branch);
nlohmann::ordered_json PinToJson(const v1::PinEntry& pin);

// Text of a JSON value; bytes that are not UTF-8 are replaced.
std::string DumpJson(const nlohmann::ordered_json& json);

}  // namespace kvtrie
