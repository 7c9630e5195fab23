#pragma once

#include "client/ctl/verb.h"

namespace kvtrie {

extern const Verb kTopVerb;

}  // namespace kvtrie
