#pragma once

#include <ostream>

#include "client/ctl/verb.h"

namespace kvtrie {

extern const Verb kHelpVerb;

void PrintHelp(std::ostream& out);
void PrintVerbHelp(const Verb& verb, std::ostream& out);

}  // namespace kvtrie
