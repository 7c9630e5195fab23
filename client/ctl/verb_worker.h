#pragma once

#include "client/ctl/verb.h"

namespace kvtrie {

extern const Verb kWorkerVerb;

}  // namespace kvtrie
