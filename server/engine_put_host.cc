#include "server/engine_put_host.h"

namespace kvtrie {

void EnginePutHost::BeginPut(const PutAnnouncement& put, BeginCallback on_begun) {
  const bool queued = context_.engine.RunBlocking(
      [this, &put, on_begun] { on_begun(context_.engine.BeginPut(kBuiltInTenant, put)); });
  if (!queued) on_begun(BusyError());
}

}  // namespace kvtrie
