//! The steps that computed one prompt, as spans: the same on whichever worker computes it.

use std::time::Instant;

use super::{Span, SpanKind, after};
use crate::names;

/// Spans of one prompt, at most; the last one stands for all that follow.
const MAX_CHUNKS: usize = 16;

/// Steps that each computed some of a prompt, in order.
#[derive(Debug, Default)]
pub struct Chunks {
    steps: Vec<Step>,
}

#[derive(Debug)]
struct Step {
    began: Instant,
    ended: Instant,
    /// Computed, or found, when it had ended.
    until: usize,
    /// Steps that this one stands for.
    num: usize,
}

impl Chunks {
    /// A step computed the prompt up to its token number `until`.
    pub fn add(&mut self, (began, ended): (Instant, Instant), until: usize) {
        let is_full = self.steps.len() == MAX_CHUNKS;
        match self.steps.last_mut() {
            Some(last) if is_full => {
                (last.ended, last.until) = (ended, until);
                last.num += 1;
            }
            _ => self.steps.push(Step { began, ended, until, num: 1 }),
        }
    }

    /// Their spans below `parent`, of a prompt whose first `cached` tokens were found. The first begins after `queued`, and none touches the
    /// one before.
    pub fn spans(self, parent: [u8; 8], queued: Instant, cached: usize) -> impl Iterator<Item = Span> {
        let (mut context, mut free) = (cached, queued);
        self.steps.into_iter().enumerate().map(move |(nth, step)| {
            let began = step.began.max(after(free));
            free = step.ended.max(began);
            // A prompt that lost its blocks meanwhile began again.
            let num_tokens = step.until.saturating_sub(context);
            let span = Span::new(names::span::PREFILL_CHUNK, SpanKind::Internal, Some(parent), began, free)
                .with(names::TOKENS, num_tokens)
                .with(names::CONTEXT, context)
                .with_some(names::CACHED_TOKENS, (nth == 0).then_some(cached))
                .with_some(names::CHUNKS, (step.num > 1).then_some(step.num));
            context = step.until;
            span
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::trace::Value;

    fn int(span: &Span, key: &str) -> Option<i64> {
        match span.attribute(key) {
            Some(Value::Int(value)) => Some(*value),
            _ => None,
        }
    }

    #[test]
    fn the_last_of_many_stands_for_the_rest() {
        let zero = Instant::now();
        let ms = |n: u64| zero + Duration::from_millis(n);
        let mut chunks = Chunks::default();
        for n in 0..40 {
            chunks.add((ms(10 * n), ms(10 * n + 9)), 100 + 16 * (n as usize + 1));
        }
        let all: Vec<Span> = chunks.spans([7; 8], ms(0), 100).collect();
        assert_eq!(all.len(), MAX_CHUNKS);
        assert_eq!(all.iter().filter_map(|span| int(span, names::TOKENS)).sum::<i64>(), 40 * 16);
        assert_eq!((int(&all[0], names::CHUNKS), int(&all[15], names::CHUNKS)), (None, Some(25)));
        assert_eq!(
            (int(&all[0], names::CACHED_TOKENS), int(&all[15], names::CACHED_TOKENS)),
            (Some(100), None)
        );
        assert_eq!(int(&all[15], names::CONTEXT), Some(100 + 15 * 16));
        assert_eq!((all[15].start(), all[15].end()), (ms(150), ms(399)));
        assert!(all.iter().all(|span| span.parent() == Some([7; 8])));
    }

    #[test]
    fn no_chunk_touches_what_was_before_it() {
        let zero = Instant::now();
        let ms = |n: u64| zero + Duration::from_millis(n);
        let mut chunks = Chunks::default();
        // The step had begun before the prompt was in it, and the next begins where it ends.
        chunks.add((ms(1), ms(10)), 32);
        chunks.add((ms(10), ms(20)), 16);
        let all: Vec<Span> = chunks.spans([1; 8], ms(5), 0).collect();
        assert_eq!((all[0].start(), all[0].end()), (after(ms(5)), ms(10)));
        assert_eq!((all[1].start(), int(&all[1], names::TOKENS)), (after(ms(10)), Some(0)));
    }
}
