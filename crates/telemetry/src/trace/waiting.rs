//! Spans of traces that nobody decided to keep yet, and decisions whose spans have not come yet.
//!
//! Both are bounded in number and in time; the oldest go first.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::Span;

/// Traces that wait, and decisions that are remembered, at most.
pub(super) const MAX_TRACES: usize = 4096;
/// Spans of all traces that wait, at most.
pub(super) const MAX_SPANS: usize = 65_536;
/// How long they do.
pub(super) const MAX_AGE: Duration = Duration::from_secs(60);

type TraceId = [u8; 16];

/// What became of spans that were put in.
#[derive(Debug, Default)]
pub(super) struct Put {
    /// They are to be exported now: their trace was decided on.
    pub(super) wanted: Option<Vec<Span>>,
    /// Spans that had waited too long and were let go.
    pub(super) num_expired: usize,
    /// Spans let go to make room.
    pub(super) num_evicted: usize,
}

/// The store. `now` never goes back by more than what several threads differ by.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    spans: HashMap<TraceId, Vec<Span>>,
    num_spans: usize,
    /// When each trace's first spans came; traces that were taken out meanwhile are passed over.
    order: VecDeque<(Instant, TraceId)>,
    wanted: HashMap<TraceId, Instant>,
    wanted_order: VecDeque<(Instant, TraceId)>,
}

impl Waiting {
    /// Adds spans of a trace that is not sampled.
    pub(super) fn put(&mut self, trace: TraceId, spans: Vec<Span>, now: Instant) -> Put {
        let mut put = Put { num_expired: self.expire(now), ..Put::default() };
        if self.wanted.contains_key(&trace) {
            put.wanted = Some(spans);
            return put;
        }
        self.num_spans += spans.len();
        match self.spans.get_mut(&trace) {
            Some(waiting) => waiting.extend(spans),
            None => {
                self.spans.insert(trace, spans);
                self.order.push_back((now, trace));
            }
        }
        while self.spans.len() > MAX_TRACES || self.num_spans > MAX_SPANS || self.order.len() > 2 * MAX_TRACES
        {
            put.num_evicted += self.drop_oldest();
        }
        put
    }

    /// Takes out what waits of a trace, and remembers that what comes later is wanted too.
    pub(super) fn keep(&mut self, trace: TraceId, now: Instant) -> Vec<Span> {
        if self.wanted.insert(trace, now).is_none() {
            self.wanted_order.push_back((now, trace));
        }
        while self.wanted_order.len() > MAX_TRACES {
            self.forget_oldest();
        }
        let spans = self.spans.remove(&trace).unwrap_or_default();
        self.num_spans -= spans.len();
        spans
    }

    /// Lets go of everything that is too old. Returns how many spans that were.
    pub(super) fn expire(&mut self, now: Instant) -> usize {
        let is_old = |at: Instant| now.saturating_duration_since(at) > MAX_AGE;
        while self.wanted_order.front().is_some_and(|(at, _)| is_old(*at)) {
            self.forget_oldest();
        }
        let mut num_expired = 0;
        while self.order.front().is_some_and(|(at, _)| is_old(*at)) {
            num_expired += self.drop_oldest();
        }
        num_expired
    }

    fn drop_oldest(&mut self) -> usize {
        let Some((_, trace)) = self.order.pop_front() else { return 0 };
        let num = self.spans.remove(&trace).map_or(0, |spans| spans.len());
        self.num_spans -= num;
        num
    }

    fn forget_oldest(&mut self) {
        if let Some((_, trace)) = self.wanted_order.pop_front() {
            self.wanted.remove(&trace);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::SpanKind;

    fn spans(num: usize, at: Instant) -> Vec<Span> {
        (0..num).map(|_| Span::new("s", SpanKind::Internal, None, at, at)).collect()
    }

    fn id(nth: usize) -> TraceId {
        (nth as u128 + 1).to_be_bytes()
    }

    #[test]
    fn what_is_kept_comes_out_once_and_later_spans_follow() {
        let now = Instant::now();
        let mut waiting = Waiting::default();
        assert!(waiting.put(id(1), spans(2, now), now).wanted.is_none());
        assert!(waiting.put(id(1), spans(1, now), now).wanted.is_none());
        assert_eq!(waiting.keep(id(1), now).len(), 3);
        assert_eq!(waiting.keep(id(1), now).len(), 0);
        assert_eq!(waiting.put(id(1), spans(4, now), now).wanted.map(|spans| spans.len()), Some(4));
        assert_eq!(waiting.num_spans, 0);
    }

    #[test]
    fn a_decision_may_come_before_its_spans_but_not_long_before() {
        let now = Instant::now();
        let mut waiting = Waiting::default();
        assert!(waiting.keep(id(1), now).is_empty() && waiting.keep(id(2), now).is_empty());
        assert!(waiting.put(id(1), spans(1, now), now + MAX_AGE).wanted.is_some());
        assert!(waiting.put(id(2), spans(1, now), now + MAX_AGE * 2).wanted.is_none());
    }

    #[test]
    fn the_old_expire_and_are_counted() {
        let now = Instant::now();
        let mut waiting = Waiting::default();
        waiting.put(id(1), spans(3, now), now);
        waiting.put(id(2), spans(1, now), now + MAX_AGE / 2);
        assert_eq!(waiting.expire(now + MAX_AGE), 0);
        let put = waiting.put(id(3), spans(1, now), now + MAX_AGE + Duration::from_millis(1));
        assert_eq!((put.num_expired, put.num_evicted), (3, 0));
        assert!(waiting.keep(id(1), now + MAX_AGE).is_empty());
        assert_eq!(waiting.keep(id(2), now + MAX_AGE).len(), 1);
    }

    #[test]
    fn the_number_of_traces_of_spans_and_of_decisions_is_bounded() {
        let now = Instant::now();
        let mut waiting = Waiting::default();
        let evicted: usize =
            (0..MAX_TRACES + 10).map(|nth| waiting.put(id(nth), spans(1, now), now).num_evicted).sum();
        assert_eq!(evicted, 10);
        assert_eq!((waiting.spans.len(), waiting.keep(id(9), now).len()), (MAX_TRACES, 0));
        assert_eq!(waiting.keep(id(10), now).len(), 1);

        let mut waiting = Waiting::default();
        let evicted: usize =
            (0..1000).map(|nth| waiting.put(id(nth), spans(128, now), now).num_evicted).sum();
        assert_eq!(evicted + waiting.num_spans, 128_000);
        assert!(waiting.num_spans <= MAX_SPANS);

        let mut waiting = Waiting::default();
        for nth in 0..3 * MAX_TRACES {
            waiting.keep(id(nth), now);
        }
        assert_eq!((waiting.wanted.len(), waiting.wanted_order.len()), (MAX_TRACES, MAX_TRACES));
    }

    #[test]
    fn traces_that_come_and_go_leave_nothing_behind() {
        let now = Instant::now();
        let mut waiting = Waiting::default();
        for nth in 0..10 * MAX_TRACES {
            waiting.put(id(nth), spans(1, now), now);
            waiting.keep(id(nth), now);
        }
        assert!(waiting.order.len() <= 2 * MAX_TRACES + 1, "{}", waiting.order.len());
        assert_eq!((waiting.num_spans, waiting.spans.len()), (0, 0));
    }
}
