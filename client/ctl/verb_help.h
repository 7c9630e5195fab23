#pragma once

#include <ostream>
#include <string>

#include "client/ctl/verb.h"

namespace kvtrie {

extern const Verb kHelpVerb;

void PrintHelp(std::ostream& out);
// `name`: of the command as it is typed, "profile fit", say.
void PrintVerbHelp(const std::string& name, const Verb& verb, std::ostream& out);

}  // namespace kvtrie
