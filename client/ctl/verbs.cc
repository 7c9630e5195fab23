#include "client/ctl/verb.h"
#include "client/ctl/verb_bench.h"
#include "client/ctl/verb_completion.h"
#include "client/ctl/verb_config.h"
#include "client/ctl/verb_drain.h"
#include "client/ctl/verb_groups.h"
#include "client/ctl/verb_help.h"
#include "client/ctl/verb_ls.h"
#include "client/ctl/verb_models.h"
#include "client/ctl/verb_pin.h"
#include "client/ctl/verb_pins.h"
#include "client/ctl/verb_profile.h"
#include "client/ctl/verb_profiles.h"
#include "client/ctl/verb_rm.h"
#include "client/ctl/verb_show.h"
#include "client/ctl/verb_similar.h"
#include "client/ctl/verb_status.h"
#include "client/ctl/verb_top.h"
#include "client/ctl/verb_unpin.h"
#include "client/ctl/verb_verify.h"
#include "client/ctl/verb_version.h"
#include "client/ctl/verb_worker.h"

namespace kvtrie {

std::span<const Verb* const> AllVerbs() {
  static const Verb* const verbs[] = {
      &kStatusVerb,     &kTopVerb,     &kModelsVerb, &kLsVerb,    &kShowVerb,     &kGroupsVerb,
      &kSimilarVerb,    &kPinsVerb,    &kPinVerb,    &kUnpinVerb, &kProfilesVerb, &kProfileVerb,
      &kRmVerb,         &kVerifyVerb,  &kConfigVerb, &kDrainVerb, &kWorkerVerb,   &kBenchVerb,
      &kCompletionVerb, &kVersionVerb, &kHelpVerb,
  };
  return verbs;
}

}  // namespace kvtrie
