#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Returns from the enclosing function when `expression` is not OK.
#define KV_RETURN_IF_ERROR(expression)                              \
  do {                                                              \
    if (absl::Status kv_status_ = (expression); !kv_status_.ok()) { \
      return kv_status_;                                            \
    }                                                               \
  } while (false)

#define KV_STATUS_CONCAT_INNER_(a, b) a##b
#define KV_STATUS_CONCAT_(a, b) KV_STATUS_CONCAT_INNER_(a, b)

// KV_ASSIGN_OR_RETURN(auto value, Function()): the value, or return its error.
#define KV_ASSIGN_OR_RETURN(declaration, expression) \
  KV_ASSIGN_OR_RETURN_(KV_STATUS_CONCAT_(kv_statusor_, __LINE__), declaration, expression)
#define KV_ASSIGN_OR_RETURN_(statusor, declaration, expression) \
  auto statusor = (expression);                                 \
  if (!statusor.ok()) return std::move(statusor).status();      \
  declaration = *std::move(statusor)
