#include "client/ctl/verb.h"
#include "client/ctl/verb_bench.h"
#include "client/ctl/verb_help.h"

namespace kvtrie {

std::span<const Verb* const> AllVerbs() {
  static const Verb* const verbs[] = {&kBenchVerb, &kHelpVerb};
  return verbs;
}

}  // namespace kvtrie
