#pragma once

#include "client/ctl/exit_code.h"
#include "client/ctl/verb.h"

namespace kvtrie {

// `kvtrie profile material`: what is known of a model beside its KV, as one file.
ExitCode RunProfileMaterial(const VerbContext& context);

// `kvtrie profile fit`: a profile from KV, without the model. Without --measured it is a draft.
ExitCode RunProfileFit(const VerbContext& context);

// `kvtrie profile seal`: a profile from a draft, or from another profile, and measured figures.
ExitCode RunProfileSeal(const VerbContext& context);

}  // namespace kvtrie
