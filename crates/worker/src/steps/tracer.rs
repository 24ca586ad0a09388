//! A span for one step in many, in a trace of its own, with links to the requests in it.

use std::time::Instant;

use baton_telemetry::names;
use baton_telemetry::trace::{Recorder, Span, SpanKind, TraceContext, Tracing};

/// One step of this many has a span.
const EVERY: u32 = 256;

/// Links of a span, at most.
const MAX_LINKS: usize = 64;

/// Chooses steps; costs a look at a counter where nothing is traced.
pub(super) struct StepTracer {
    tracing: Tracing,
    num_steps: u32,
}

/// A step that was chosen.
pub(super) struct TracedStep {
    recorder: Recorder,
    links: Vec<TraceContext>,
    num_dropped: usize,
}

impl StepTracer {
    pub(super) const fn new(tracing: Tracing) -> Self {
        Self { tracing, num_steps: 0 }
    }

    /// Whether the next step is to have a span; `members` are the traces of its rows.
    pub(super) fn next(&mut self, members: impl Iterator<Item = TraceContext>) -> Option<TracedStep> {
        if !self.tracing.is_on() {
            return None;
        }
        self.num_steps = self.num_steps.wrapping_add(1);
        if !self.num_steps.is_multiple_of(EVERY) {
            return None;
        }
        let trace = self.tracing.root(None);
        // Nobody can ask for it later.
        if !trace.sampled {
            return None;
        }
        let mut step =
            TracedStep { recorder: self.tracing.recorder(trace), links: Vec::new(), num_dropped: 0 };
        for member in members {
            if step.links.len() < MAX_LINKS {
                step.links.push(member);
            } else {
                step.num_dropped += 1;
            }
        }
        Some(step)
    }
}

impl TracedStep {
    /// The step was computed.
    pub(super) fn end(mut self, start: Instant, num_rows: usize, num_tokens: usize) {
        let trace = self.recorder.trace();
        let mut span = Span::new(names::span::ENGINE_STEP, SpanKind::Internal, None, start, Instant::now())
            .with_id(trace.span_id)
            .with(names::STEP_ROWS, num_rows)
            .with(names::TOKENS, num_tokens)
            .with(names::STEP_LINKS_DROPPED, self.num_dropped);
        for link in self.links {
            span = span.linked(link);
        }
        self.recorder.record(span);
    }
}

#[cfg(test)]
mod tests {
    use baton_telemetry::trace::{Sampler, Value};

    use super::*;

    fn member() -> TraceContext {
        Tracing::off().root(None)
    }

    #[test]
    fn one_step_of_many_has_a_span_with_links_to_its_members() {
        let (tracing, mut spans) = Tracing::collecting(Sampler::default());
        let mut tracer = StepTracer::new(tracing);
        for nth in 1..=2 * EVERY {
            let members: Vec<TraceContext> = (0..70).map(|_| member()).collect();
            let step = tracer.next(members.iter().copied());
            assert_eq!(step.is_some(), nth % EVERY == 0);
            let Some(step) = step else { continue };
            step.end(Instant::now(), 70, 300);
            let finished = spans.try_recv().unwrap().remove(0);
            let span = finished.span;
            assert_eq!((span.name(), span.parent()), (names::span::ENGINE_STEP, None));
            assert_eq!(span.links(), &members[..MAX_LINKS]);
            assert_eq!(span.attribute(names::STEP_LINKS_DROPPED), Some(&Value::Int(6)));
            assert_eq!(span.attribute(names::STEP_ROWS), Some(&Value::Int(70)));
            assert!(members.iter().all(|member| member.trace_id != finished.trace_id));
        }
    }

    #[test]
    fn without_tracing_or_sampling_no_step_has_one() {
        let (tracing, _spans) = Tracing::collecting(Sampler { parent_based: true, ratio: 0.0 });
        for tracing in [Tracing::off(), tracing] {
            let mut tracer = StepTracer::new(tracing);
            assert!((0..1000).all(|_| tracer.next(std::iter::once(member())).is_none()));
        }
    }
}
