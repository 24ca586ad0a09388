//! One colocated worker, step by step: chunks of prompts beside whoever decodes.

use std::collections::VecDeque;

use crate::PlanInput;
use crate::decode::most_sequences;
use crate::spread::Spread;
use crate::steps::{BLOCK_TOKENS, HOP_S, MAX_NUM_SEQS, Steps, Work};

/// Shortest time between two statuses of a worker, in seconds.
const SPACING_S: f64 = 10e-3;
/// Weight of the newest step in what a status says of speed.
const NEWEST: f64 = 0.2;

/// What all workers have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind<'a> {
    pub(crate) input: &'a PlanInput,
    pub(crate) steps: &'a Steps,
    /// Prompt tokens of a step beside decoding sequences.
    pub(crate) chunk: u32,
}

/// What came of all steps.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// Seconds to each first token.
    pub(crate) ttft: Vec<f64>,
    /// Seconds between two tokens.
    pub(crate) itl: Spread,
    /// Seconds of steps, each times its decoding sequences.
    pub(crate) decoded_s: f64,
    /// Whether what happens now is measured.
    pub(crate) measures: bool,
}

/// What a worker's status says.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Status {
    pub(crate) running: u32,
    pub(crate) queued_tokens: u64,
    /// Sequences with blocks.
    pub(crate) holding: u32,
    pub(crate) prefill_tokens_per_s: f64,
    pub(crate) decode_step_ms: f64,
}

#[derive(Clone, Copy, Debug)]
struct Prompt {
    /// When its request came, and when it reached the worker.
    came: f64,
    at: f64,
    done: u32,
    /// Tokens of it in the running step.
    chunk: u32,
    counts: bool,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    begun: f64,
    ends: f64,
    num_rows: usize,
}

/// One worker.
#[derive(Debug, Default)]
pub(crate) struct StepLoop {
    /// In the order in which they came, which is the order in which they are computed.
    prompts: VecDeque<Prompt>,
    /// Of the first so many the scheduler knows.
    num_known: usize,
    /// The number of the last step of each decoding sequence; as all decode for as many steps, in order.
    decoding: VecDeque<u64>,
    /// Tokens that the newest tokens of these attend over, together.
    context: f64,
    num_steps: u64,
    running: Option<Running>,
    /// When the last step ended.
    idle_since: f64,
    /// Requests that were sent here and have not ended.
    pub(crate) num_sent: u32,
    now: Status,
    told: Status,
    told_at: f64,
    /// When the next status goes out.
    tells_at: Option<f64>,
}

impl StepLoop {
    /// A request comes at `came`.
    pub(crate) fn send(&mut self, came: f64, counts: bool) {
        self.num_sent += 1;
        self.prompts.push_back(Prompt { came, at: came + HOP_S, done: 0, chunk: 0, counts });
    }

    /// What the router knows of it at this moment, up to which it was advanced.
    pub(crate) fn told(&mut self, now: f64) -> Status {
        self.tell(now);
        self.told
    }

    /// Runs the steps that begin before `until`, and ends those that end by then.
    pub(crate) fn advance(&mut self, kind: &Kind<'_>, until: f64, seen: &mut Seen) {
        loop {
            if let Some(running) = self.running {
                if running.ends > until {
                    return;
                }
                self.end_step(kind, running, seen);
            }
            let next = self.prompts.front().map(|prompt| prompt.at).filter(|_| self.decoding.is_empty());
            // Without sequences that decode it waits for a prompt; one whose chunks are under way is first, and was there before.
            let begins = match (next, self.decoding.is_empty()) {
                (Some(at), _) => self.idle_since.max(at),
                (None, false) => self.idle_since,
                (None, true) => return,
            };
            if begins >= until {
                return;
            }
            self.begin_step(kind, begins);
        }
    }

    fn begin_step(&mut self, kind: &Kind<'_>, now: f64) {
        self.tell(now);
        self.admit(kind, now);
        let num_rows = self.decoding.len();
        let mut work = Work { tokens: num_rows as f64, attended: self.context, context: self.context };
        // Alone a prompt takes all tokens of a step, beside others its share.
        let mut budget = if num_rows == 0 { kind.chunk + MAX_NUM_SEQS } else { kind.chunk };
        let mut is_first = true;
        for prompt in self.prompts.iter_mut().take(self.num_known) {
            let left = kind.input.input_tokens - prompt.done;
            prompt.chunk = kind.steps.chunk(&work, prompt.done, left, budget, is_first);
            if prompt.chunk > 0 {
                work = work.with_chunk(prompt.done, prompt.chunk);
                budget = budget.saturating_sub(prompt.chunk);
                is_first = false;
            }
        }
        self.running = Some(Running { begun: now, ends: now + kind.steps.seconds(&work), num_rows });
        self.changed(now);
    }

    /// The scheduler hears of those that have come, as far as there is room for them.
    fn admit(&mut self, kind: &Kind<'_>, now: f64) {
        let room = (most_sequences(kind.input) as usize).saturating_sub(self.decoding.len());
        let come = self.prompts.iter().take_while(|prompt| prompt.at <= now).count();
        for _ in self.num_known..come.min(room) {
            self.num_known += 1;
            self.now.queued_tokens += u64::from(kind.input.input_tokens);
        }
        self.now.holding = (self.num_known + self.decoding.len()) as u32;
    }

    fn end_step(&mut self, kind: &Kind<'_>, running: Running, seen: &mut Seen) {
        let Running { begun, ends, num_rows } = running;
        self.tell(ends);
        let took = ends - begun;
        (self.running, self.idle_since) = (None, ends);
        self.num_steps += 1;
        if seen.measures && num_rows > 0 {
            seen.itl.add(took, num_rows as f64);
        }
        seen.decoded_s += took * num_rows as f64;
        self.context += num_rows as f64;
        let last_len = f64::from(kind.input.input_tokens + kind.input.output_tokens);
        while self.decoding.front().is_some_and(|last| *last <= self.num_steps) {
            self.decoding.pop_front();
            self.context -= last_len;
            self.num_sent -= 1;
        }
        let computed = self.end_chunks(kind, ends, seen);
        let (rate, value) = match computed {
            0 => (&mut self.now.decode_step_ms, took * 1e3),
            tokens => (&mut self.now.prefill_tokens_per_s, f64::from(tokens) / took),
        };
        *rate = if *rate == 0.0 { value } else { *rate * (1.0 - NEWEST) + value * NEWEST };
        self.now.queued_tokens -= u64::from(computed);
        self.now.running = self.decoding.len() as u32;
        self.now.holding = (self.num_known + self.decoding.len()) as u32;
        self.changed(ends);
    }

    /// Prompts that are computed decode from the next step on. How many tokens were computed.
    fn end_chunks(&mut self, kind: &Kind<'_>, now: f64, seen: &mut Seen) -> u32 {
        let PlanInput { input_tokens, output_tokens, .. } = *kind.input;
        let mut computed = 0;
        for prompt in self.prompts.iter_mut().take(self.num_known) {
            let chunk = std::mem::take(&mut prompt.chunk);
            (prompt.done, computed) = (prompt.done + chunk, computed + chunk);
        }
        // One behind can be done before one in front of it, that a block's end left without its last tokens.
        while let Some(nth) =
            self.prompts.iter().take(self.num_known).position(|prompt| prompt.done >= input_tokens)
        {
            let Some(prompt) = self.prompts.remove(nth) else { break };
            self.num_known -= 1;
            if prompt.counts {
                seen.ttft.push(now - prompt.came + HOP_S);
            }
            if output_tokens > 1 {
                self.decoding.push_back(self.num_steps + u64::from(output_tokens) - 1);
                self.context += f64::from(input_tokens) + 1.0;
            } else {
                self.num_sent -= 1;
            }
        }
        computed
    }

    /// A status that was due before this moment went out with what was true then.
    fn tell(&mut self, now: f64) {
        if self.tells_at.is_some_and(|at| at < now) {
            (self.told, self.told_at) = (self.now, self.tells_at.take().unwrap_or(now));
        }
    }

    /// What changed is told soon.
    fn changed(&mut self, now: f64) {
        if self.tells_at.is_none() && self.told != self.now {
            self.tells_at = Some(now.max(self.told_at + SPACING_S));
        }
    }
}

impl Status {
    /// Blocks that sequences hold, at most.
    pub(crate) fn held_blocks(&self, input: &PlanInput) -> u32 {
        self.holding * (input.input_tokens + input.output_tokens).div_ceil(BLOCK_TOKENS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::tests::input;

    fn run(came: &[f64], chunk: u32) -> (StepLoop, Seen, PlanInput) {
        let input = PlanInput { input_tokens: 2_048, output_tokens: 5, ..input() };
        let steps = Steps::new(&input);
        let kind = Kind { input: &input, steps: &steps, chunk };
        let (mut worker, mut seen) = (StepLoop::default(), Seen { measures: true, ..Seen::default() });
        for at in came {
            worker.advance(&kind, *at, &mut seen);
            worker.send(*at, true);
        }
        worker.advance(&kind, f64::INFINITY, &mut seen);
        (worker, seen, input)
    }

    #[test]
    fn a_prompt_alone_takes_its_own_steps_and_then_decodes() {
        let (worker, seen, input) = run(&[1.0], 512);
        let steps = Steps::new(&input);
        // Nobody decodes beside it: 768 tokens a step.
        let alone = steps.prompt(&Work::default(), 2_048, 512 + MAX_NUM_SEQS);
        assert_eq!(seen.ttft.len(), 1);
        assert!((seen.ttft[0] - alone - 2.0 * HOP_S).abs() < 1e-9, "{:?} {alone}", seen.ttft);
        let decode: f64 = (0..4).map(|n| steps.seconds(&Work::decode(1.0, 2_049.0 + f64::from(n)))).sum();
        assert!((seen.decoded_s - decode).abs() < 1e-9, "{} {decode}", seen.decoded_s);
        assert_eq!((worker.num_steps, worker.num_sent, worker.context), (3 + 4, 0, 0.0));
    }

    #[test]
    fn a_prompt_beside_others_is_cut_and_makes_their_steps_longer() {
        // The second one comes while the first one decodes.
        let (worker, seen, input) = run(&[0.0, 0.068], 256);
        let steps = Steps::new(&input);
        let (longest, shortest) = (seen.itl.quantile(1.0), seen.itl.quantile(0.0));
        let mixed = steps.seconds(&Work::decode(1.0, 2_050.0).with_chunk(0, 256));
        assert!(shortest < 1.01 * steps.decode(1.0) && longest > 0.9 * mixed, "{shortest} {longest} {mixed}");
        assert!(seen.ttft[1] > seen.ttft[0], "{:?}", seen.ttft);
        assert_eq!((worker.num_sent, worker.context), (0, 0.0));
    }

    #[test]
    fn statuses_are_a_while_old() {
        let input = PlanInput { input_tokens: 2_048, output_tokens: 5, ..input() };
        let steps = Steps::new(&input);
        let kind = Kind { input: &input, steps: &steps, chunk: 512 };
        let (mut worker, mut seen) = (StepLoop::default(), Seen::default());
        worker.send(0.0, true);
        // The first step begins at 40 us, and what it changed is told at once, or 10 ms after the last status.
        worker.advance(&kind, 5e-3, &mut seen);
        assert_eq!(worker.told(5e-3), Status::default());
        worker.advance(&kind, 11e-3, &mut seen);
        let told = worker.told(11e-3);
        assert_eq!((told.queued_tokens, told.holding, told.running), (2_048, 1, 0));
        worker.advance(&kind, 1.0, &mut seen);
        let told = worker.told(1.0);
        assert_eq!((told.queued_tokens, told.holding, told.running, worker.num_sent), (0, 0, 0, 0));
        assert!(told.prefill_tokens_per_s > 1e4 && told.decode_step_ms > 1.0, "{told:?}");
    }
}
