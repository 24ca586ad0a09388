//! The steps that computed a prompt.

use baton_handoff::Time;

/// Spans for them, at most; the last one stands for all that follow.
const MAX_CHUNKS: usize = 16;

/// Steps that each computed some of a prompt, in order.
#[derive(Default)]
pub(super) struct Chunks {
    steps: Vec<Step>,
}

struct Step {
    began: Time,
    ended: Time,
    /// Computed, or found, when it had ended.
    until: usize,
    /// Steps that this one stands for.
    num: usize,
}

/// One step's part, or that of several.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) began: Time,
    pub(super) ended: Time,
    pub(super) num_tokens: usize,
    /// Tokens before them.
    pub(super) context: usize,
    /// Of the first one: how many of those were found in the prefix cache.
    pub(super) cached_tokens: Option<usize>,
    pub(super) num_chunks: usize,
}

impl Chunks {
    /// A step computed the prompt up to `until`.
    pub(super) fn add(&mut self, (began, ended): (Time, Time), until: usize) {
        let is_full = self.steps.len() == MAX_CHUNKS;
        match self.steps.last_mut() {
            Some(last) if is_full => {
                (last.ended, last.until) = (ended, until);
                last.num += 1;
            }
            _ => self.steps.push(Step { began, ended, until, num: 1 }),
        }
    }

    /// All of them, of a prompt whose first `cached` tokens were found.
    pub(super) fn finish(self, cached: usize) -> impl Iterator<Item = Chunk> {
        let mut context = cached;
        self.steps.into_iter().enumerate().map(move |(nth, step)| {
            let chunk = Chunk {
                began: step.began,
                ended: step.ended,
                // A prompt that lost its blocks meanwhile began again.
                num_tokens: step.until.saturating_sub(context),
                context,
                cached_tokens: (nth == 0).then_some(cached),
                num_chunks: step.num,
            };
            context = step.until;
            chunk
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const fn ms(n: u64) -> Time {
        Duration::from_millis(n)
    }

    #[test]
    fn the_last_of_many_stands_for_the_rest() {
        let mut chunks = Chunks::default();
        for n in 0..40 {
            chunks.add((ms(10 * n), ms(10 * n + 9)), 100 + 16 * (n as usize + 1));
        }
        let all: Vec<Chunk> = chunks.finish(100).collect();
        assert_eq!(all.len(), MAX_CHUNKS);
        assert_eq!(all.iter().map(|chunk| chunk.num_tokens).sum::<usize>(), 40 * 16);
        assert_eq!(all.iter().map(|chunk| chunk.num_chunks).sum::<usize>(), 40);
        let first = Chunk {
            began: ms(0),
            ended: ms(9),
            num_tokens: 16,
            context: 100,
            cached_tokens: Some(100),
            num_chunks: 1,
        };
        assert_eq!(all[0], first);
        assert_eq!((all[15].began, all[15].ended, all[15].context), (ms(150), ms(399), 100 + 15 * 16));
        assert_eq!(all[15].cached_tokens, None);
    }
}
