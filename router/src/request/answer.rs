//! Tokens to what the client reads: detokenized, cut at stop strings, counted and timed, choice by choice.

use std::time::{Duration, Instant};

use baton_handoff::FinishReason;
use baton_telemetry::metrics::RouterMetrics;
use baton_telemetry::trace::TraceContext;
use baton_text::{Detokenizer, StopStrings};

/// The answer of one request so far: one choice for each of its sequences.
pub(super) struct Answer {
    choices: Vec<Choice>,
    arrived: Instant,
    first_at: Option<Instant>,
    /// For the exemplars of what is observed.
    trace: TraceContext,
}

struct Choice {
    detokenizer: Detokenizer,
    stops: StopStrings,
    /// Every token delivered; forced on a later attempt.
    token_ids: Vec<u32>,
    first_at: Option<Instant>,
    last_at: Option<Instant>,
    /// From the first token to the second.
    first_gap: Option<Duration>,
    longest_gap: Option<Duration>,
    reason: Option<FinishReason>,
}

/// What a token brought.
#[derive(Default)]
pub(super) struct Step {
    pub(super) text: String,
    /// A stop string is complete: nothing after it is wanted.
    pub(super) stopped: bool,
}

impl Answer {
    /// An answer of as many choices as there are pairs.
    pub(super) fn new(
        choices: Vec<(Detokenizer, StopStrings)>,
        arrived: Instant,
        trace: TraceContext,
    ) -> Self {
        let choice = |(detokenizer, stops)| Choice {
            detokenizer,
            stops,
            token_ids: Vec::new(),
            first_at: None,
            last_at: None,
            first_gap: None,
            longest_gap: None,
            reason: None,
        };
        Self { choices: choices.into_iter().map(choice).collect(), arrived, first_at: None, trace }
    }

    /// Takes the next token of a choice.
    pub(super) fn push(&mut self, index: u32, token: u32, now: Instant, metrics: &RouterMetrics) -> Step {
        let Some(choice) = self.choices.get_mut(index as usize) else { return Step::default() };
        if self.first_at.is_none() {
            let ttft = now.saturating_duration_since(self.arrived);
            metrics.ttft.observe_traced(ttft.as_secs_f64(), &self.trace);
            self.first_at = Some(now);
        }
        if let Some(gap) = choice.last_at.map(|last| now.saturating_duration_since(last)) {
            metrics.itl.observe_traced(gap.as_secs_f64(), &self.trace);
            choice.first_gap.get_or_insert(gap);
            choice.longest_gap = choice.longest_gap.max(Some(gap));
        }
        choice.first_at.get_or_insert(now);
        choice.last_at = Some(now);
        choice.push(token)
    }

    /// Ends a choice: text that waited for more.
    pub(super) fn finish(&mut self, index: u32, reason: FinishReason) -> String {
        self.choices.get_mut(index as usize).map_or_else(String::new, |choice| {
            choice.reason = Some(reason);
            choice.flush()
        })
    }

    /// Whether every choice has ended.
    pub(super) fn is_finished(&self) -> bool {
        self.choices.iter().all(|choice| choice.reason.is_some())
    }

    /// One reason for them all: `Length` when any of them was cut.
    pub(super) fn reason(&self) -> FinishReason {
        let cut = |choice: &Choice| choice.reason == Some(FinishReason::Length);
        if self.choices.iter().any(cut) { FinishReason::Length } else { FinishReason::Stop }
    }

    /// Every token of a choice that was delivered.
    pub(super) fn token_ids(&self, index: u32) -> &[u32] {
        self.choices.get(index as usize).map_or(&[], |choice| &choice.token_ids)
    }

    /// The tokens of each choice.
    pub(super) fn choices(&self) -> impl Iterator<Item = &[u32]> {
        self.choices.iter().map(|choice| &*choice.token_ids)
    }

    /// Tokens over all choices.
    pub(super) fn num_tokens(&self) -> usize {
        self.choices().map(<[u32]>::len).sum()
    }

    /// From arrival to the first token of any choice.
    pub(super) fn ttft(&self) -> Option<Duration> {
        self.first_at.map(|at| at.saturating_duration_since(self.arrived))
    }

    /// The same in milliseconds; 0 without any.
    pub(super) fn ttft_ms(&self) -> f64 {
        self.ttft().map_or(0.0, |ttft| ttft.as_secs_f64() * 1e3)
    }

    /// When the last token of a choice was delivered.
    pub(super) fn last_at(&self, index: u32) -> Option<Instant> {
        self.choices.get(index as usize)?.last_at
    }

    /// From the first token of the first choice to its second.
    pub(super) fn first_gap(&self) -> Option<Duration> {
        self.choices.first()?.first_gap
    }

    /// The longest time between two tokens of a choice.
    pub(super) fn longest_gap(&self) -> Option<Duration> {
        self.choices.iter().filter_map(|choice| choice.longest_gap).max()
    }

    /// Why each choice ended, as far as they have.
    pub(super) fn reasons(&self) -> impl Iterator<Item = FinishReason> {
        self.choices.iter().filter_map(|choice| choice.reason)
    }

    /// Records what is known only at the end.
    pub(super) fn observe_end(&self, now: Instant, metrics: &RouterMetrics) {
        let e2e = now.saturating_duration_since(self.arrived);
        metrics.e2e.observe_traced(e2e.as_secs_f64(), &self.trace);
        for choice in &self.choices {
            if let (Some(first), Some(last), gaps @ 1..) =
                (choice.first_at, choice.last_at, choice.token_ids.len().saturating_sub(1))
            {
                let tpot = last.saturating_duration_since(first).as_secs_f64() / gaps as f64;
                metrics.tpot.observe_traced(tpot, &self.trace);
            }
        }
    }
}

impl Choice {
    fn push(&mut self, token: u32) -> Step {
        self.token_ids.push(token);
        let Some(piece) = self.detokenizer.push(token) else { return Step::default() };
        let step = self.stops.push(&piece);
        Step { text: step.text, stopped: step.matched.is_some() }
    }

    /// A stop string may still be completed by the end of a broken character.
    fn flush(&mut self) -> String {
        if self.stops.is_matched() {
            return String::new();
        }
        let mut text = String::new();
        if let Some(piece) = self.detokenizer.flush() {
            text.push_str(&self.stops.push(&piece).text);
        }
        text.push_str(&self.stops.flush());
        text
    }
}
