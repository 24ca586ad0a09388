//! A given workload as it unfolds: streams first, then arrivals one after the other, and streams again whenever one ends.

use baton_handoff::Time;

use crate::queue::{Event, RouterEvent};
use crate::world::{HEARD_OF, Source, World};

/// Until a stream begins again that broke off.
const AFTER_A_FAILURE: Time = Time::from_millis(200);

impl World {
    /// Streams begin; without any, arrivals do.
    pub(crate) fn begin(&mut self) {
        let Source::Given(given) = &mut self.source else { return };
        let num = given.workload().streams.num;
        for stream in 0..num {
            let router = self.context.random.index(self.routers.len());
            let request = given.turn(stream, 0, router);
            self.context.queue.push(HEARD_OF, Event::Router(router, RouterEvent::Request(request)));
        }
        if num == 0 {
            self.arrive_from(HEARD_OF);
        }
    }

    /// Requests arrive from this moment on.
    fn arrive_from(&mut self, start: Time) {
        if let Some(observer) = &mut self.context.observer {
            observer.will_arrive = Some(start);
        }
        self.plan_arrival(0);
    }

    /// One after the other, so that the queue holds what is near.
    fn plan_arrival(&mut self, nth: usize) {
        let Source::Given(given) = &self.source else { return };
        let start = self.context.observer.as_ref().and_then(|observer| observer.will_arrive);
        let (Some(arrival), Some(start)) = (given.workload().arrivals.get(nth), start) else { return };
        let router = self.context.random.index(self.routers.len());
        self.context.queue.push(start + arrival.at, Event::Router(router, RouterEvent::Request(nth)));
    }

    /// A request comes now.
    pub(crate) fn has_come(&mut self, nth: usize) {
        match &self.source {
            Source::Drawn(_) => self.num_to_come -= 1,
            Source::Given(given) if nth < given.num_arrivals() => {
                self.num_to_come -= 1;
                if let Some(observer) = &mut self.context.observer {
                    observer.arriving = observer.arriving.or(Some(self.context.now));
                }
                self.plan_arrival(nth + 1);
            }
            Source::Given(_) => {}
        }
    }

    /// After every event: what follows from requests that began or ended.
    pub(crate) fn follow(&mut self) {
        let Source::Given(given) = &mut self.source else { return };
        let Some(observer) = &mut self.context.observer else { return };
        let streams = given.workload().streams.num;
        if observer.will_arrive.is_none() && streams > 0 && observer.num_begun >= streams {
            let start = self.context.now + given.workload().quiet;
            return self.arrive_from(start);
        }
        if observer.ended.is_empty() {
            return;
        }
        for (request, finished) in std::mem::take(&mut observer.ended) {
            self.request_ended(request, finished);
        }
    }

    fn request_ended(&mut self, request: usize, finished: bool) {
        let Source::Given(given) = &mut self.source else { return };
        let now = self.context.now;
        let (turn, was_last) = given.ended(request);
        if let Some(observer) = self.context.observer.as_mut().filter(|_| turn.is_none() && finished) {
            observer.finished();
        }
        if was_last {
            if let Some(observer) = &mut self.context.observer {
                observer.answered(now);
            }
            for (request, router) in given.running() {
                self.context.queue.push(now, Event::Router(router, RouterEvent::ClientGone(request)));
            }
        }
        if let Some((stream, turn, router)) = turn
            && !given.is_over()
        {
            let request = given.turn(stream, turn + 1, router);
            // A cluster that refuses at once must not be asked in a tight loop.
            let again = if finished { now } else { now + AFTER_A_FAILURE };
            self.context.queue.push(again, Event::Router(router, RouterEvent::Request(request)));
        }
    }
}
