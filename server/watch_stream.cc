#include "server/watch_stream.h"

#include <limits>
#include <utility>

#include "server/status_translation.h"
#include "server/wire_conversion.h"

namespace kvtrie {
namespace {

// A place that no log has reached.
constexpr std::uint64_t kNoSequence = std::numeric_limits<std::uint64_t>::max();

void ToProto(const StoreEvent& event, std::uint64_t epoch, bool want_tokens, v1::Event* proto) {
  proto->set_sequence(event.sequence);
  proto->set_epoch(epoch);
  proto->set_kind(static_cast<v1::EventKind>(event.kind));
  proto->set_model_id(std::string(event.model.view()));
  proto->set_node_id(std::string(event.node.view()));
  proto->set_parent_id(std::string(event.parent.view()));
  proto->set_depth(event.depth);
  if (want_tokens) {
    proto->set_tokens(event.tokens.data(), event.tokens.size() * sizeof(TokenId));
  }
}

}  // namespace

grpc::ServerWriteReactor<v1::WatchResponse>* WatchStream::Start(ServiceContext& context,
                                                                grpc::CallbackServerContext* call,
                                                                const v1::WatchRequest& request) {
  const std::shared_ptr<WatchStream> watch(new WatchStream(context, call));
  const EventLog& events = context.engine.events();
  {
    absl::MutexLock lock(&watch->mutex_);
    watch->self_ = watch;
    watch->model_filter_ = IdFromProto<ModelId>(request.model_id());
    watch->want_tokens_ = request.want_tokens();
    watch->next_sequence_ =
        request.from_sequence() == 0 ? events.next_sequence() : request.from_sequence();
    // Ahead of any log: a gap.
    const bool is_of_now = request.from_epoch() == 0 || request.from_epoch() == events.epoch();
    if (request.from_sequence() != 0 && !is_of_now) watch->next_sequence_ = kNoSequence;
  }
  absl::Status status = context.streams.Add(watch);
  if (status.ok()) status = CheckWatch(request);
  if (!status.ok()) {
    watch->FinishWith(status);
    return watch.get();
  }
  {
    // The first page says where the watcher stands, even when nothing has happened.
    absl::MutexLock lock(&watch->mutex_);
    if (!watch->FillPage()) {
      watch->page_.set_next_sequence(watch->next_sequence_);
      watch->page_.set_epoch(events.epoch());
    }
    watch->writing_ = true;
    watch->ArmStall(context.streams.clock().Monotonic());
    watch->StartWrite(&watch->page_);
  }
  return watch.get();
}

bool WatchStream::FillPage() {
  const EventLog& events = context_.engine.events();
  while (true) {
    EventLog::Page page = events.Read(kBuiltInTenant, next_sequence_, kEventsPerPage);
    const bool advanced = page.next_sequence > next_sequence_;
    next_sequence_ = page.next_sequence;
    page_.Clear();
    page_.set_next_sequence(next_sequence_);
    page_.set_epoch(events.epoch());
    if (page.gap) {
      v1::Event* cleared = page_.add_events();
      cleared->set_kind(v1::EVENT_KIND_CLEARED);
      cleared->set_epoch(events.epoch());
      cleared->set_gap(true);
    }
    for (const StoreEvent& event : page.events) {
      const bool wanted = model_filter_.empty() || event.kind == StoreEventKind::kCleared ||
                          event.model == model_filter_;
      if (wanted) ToProto(event, events.epoch(), want_tokens_, page_.add_events());
    }
    if (page_.events_size() > 0) return true;
    if (!advanced) return false;  // nothing more; else all of the page was filtered away
  }
}

void WatchStream::Pump() {
  std::uint64_t wait_for = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (finished_ || writing_ || waiting_) return;
    if (FillPage()) {
      writing_ = true;
      ArmStall(context_.streams.clock().Monotonic());
      StartWrite(&page_);
      return;
    }
    waiting_ = true;
    wait_for = next_sequence_;
  }
  // The log calls from the thread that publishes a block: go on elsewhere.
  const std::uint64_t notification =
      context_.engine.events().NotifyAt(wait_for, [weak = weak_from_this(), &context = context_] {
        context.timer.Post([weak] {
          const auto self = weak.lock();
          if (self == nullptr) return;
          {
            absl::MutexLock lock(&self->mutex_);
            self->waiting_ = false;
          }
          self->Pump();
        });
      });
  bool finished;
  {
    absl::MutexLock lock(&mutex_);
    notification_ = notification;
    finished = finished_;
  }
  if (finished) context_.engine.events().Cancel(notification);
}

void WatchStream::OnWriteDone(bool ok) {
  DisarmStall();
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
  }
  if (!ok) {
    FinishWith(absl::CancelledError("the watcher has gone"));
    return;
  }
  Pump();
}

void WatchStream::OnCancel() { FinishWith(absl::CancelledError("cancelled by the client")); }

void WatchStream::OnDrain() { Abort(absl::UnavailableError("the server drains; use another one")); }

void WatchStream::Abort(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    if (writing_) CancelCall(*call_, status);
  }
  FinishWith(status);
}

void WatchStream::FinishWith(const absl::Status& status) {
  std::uint64_t notification;
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    finished_ = true;
    notification = std::exchange(notification_, 0);
    probe_.Finish(static_cast<int>(status.code()));
    Finish(ToGrpc(status));
  }
  DisarmStall();
  if (notification != 0) context_.engine.events().Cancel(notification);
}

void WatchStream::OnDone() {
  DisarmStall();
  context_.streams.Remove(this);
  std::shared_ptr<WatchStream> self;
  {
    absl::MutexLock lock(&mutex_);
    self = std::move(self_);
  }
}

}  // namespace kvtrie
