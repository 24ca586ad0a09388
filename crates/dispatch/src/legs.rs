//! What the legs of a group say, and what of it reaches the client.

use baton_handoff::{Cause, FinishReason, FirstToken, SampledToken};

use crate::attempt::{Attempt, LastWord};
use crate::failure::Failure;
use crate::sequence::Order;
use crate::{DecodeFact, PrefillFact, Request, RequestAction, Time};

impl Request {
    /// An event of the Prefill leg of the group's live attempt.
    pub(crate) fn prefill(&mut self, now: Time, at: usize, event: PrefillFact) {
        let Some(live) = self.groups[at].live() else { return };
        let (computes, decodes) = (live.computes(), live.placed.decode);
        live.prefill_open &= !is_last(&event);
        let failure = match event {
            PrefillFact::FirstTokens(_) if live.first_tokens => {
                self.ignored += 1;
                return;
            }
            PrefillFact::FirstTokens(first) => return self.first_tokens(now, at, &first),
            // The decode leg says how it goes on.
            PrefillFact::Done => return,
            PrefillFact::HandoffFailed(cause) => Failure::of(cause, decodes),
            // What failed was told before, with the attempt that it belongs to.
            PrefillFact::NotRedirected if !live.started => return self.start_over(now, at),
            PrefillFact::Failed(cause) if live.redirected && !live.started && cause.is_of_destination() => {
                return self.start_over(now, at);
            }
            PrefillFact::NotRedirected => {
                self.ignored += 1;
                return;
            }
            PrefillFact::Failed(Cause::PeerLost) => Failure::of(Cause::PeerLost, decodes),
            PrefillFact::Failed(cause) => Failure::of(cause, computes),
            PrefillFact::Unreachable => Failure::of(Cause::PeerLost, computes),
            PrefillFact::Lost => Failure::lost(computes),
        };
        if live.is_past_prefill() {
            self.ignored += 1;
        } else {
            self.attempt_failed(now, at, failure);
        }
    }

    fn first_tokens(&mut self, now: Time, at: usize, first: &[FirstToken]) {
        let sequences = self.groups[at].sequences();
        let Some(live) = self.groups[at].live() else { return };
        if !first.iter().map(|first| first.sequence).eq(sequences.clone()) {
            let failure = Failure::of(Cause::Protocol, live.computes());
            return self.attempt_failed(now, at, failure);
        }
        live.first_tokens = true;
        let (attempt, decode) = (live.legs.key.attempt, live.legs.decode);
        for FirstToken { sequence, token, finish } in first.iter().copied() {
            if !self.groups[at].runs(attempt) {
                return;
            }
            self.token(now, at, sequence, token);
            let finish = finish.or_else(|| (!decode).then_some(FinishReason::Length));
            if let Some(reason) = finish
                && self.groups[at].runs(attempt)
            {
                self.finish(sequence, reason);
                self.settle(at);
            }
        }
        for sequence in sequences {
            self.catch_up(now, at, attempt, sequence);
        }
    }

    /// Hands on what the Decode leg said of a sequence ahead of its first token.
    fn catch_up(&mut self, now: Time, at: usize, attempt: u32, sequence: u32) {
        while self.groups[at].runs(attempt) && self.owns(at, sequence) {
            let Some(early) = self.groups[at].live().and_then(|live| live.early(sequence)) else { return };
            match (early.tokens.pop_front(), early.last) {
                (Some(token), _) => self.token(now, at, sequence, token),
                (None, Some(word)) => return self.last_word(at, sequence, word),
                (None, None) => return,
            }
        }
    }

    /// An event of the Decode leg of the group's live attempt.
    pub(crate) fn decode(&mut self, now: Time, at: usize, event: DecodeFact) {
        let Some(live) = self.groups[at].live() else { return };
        let (computes, decodes) = (live.computes(), live.placed.decode);
        let failure = match event {
            DecodeFact::Started if live.started => {
                self.ignored += 1;
                return;
            }
            DecodeFact::Started => {
                live.started = true;
                let redirected = live.redirected;
                self.groups[at].preempted = false;
                if redirected {
                    self.stop_finished(at);
                }
                return;
            }
            DecodeFact::Token { sequence, token } => return self.decoded(now, at, sequence, token),
            DecodeFact::Finished { sequence, reason } => {
                return self.said_last(now, at, sequence, LastWord::Finished(reason));
            }
            // Sequences are preempted one by one once they run; before that they go with the blocks of the handoff.
            DecodeFact::Preempted { .. } if !live.started => Failure::of(Cause::Preempted, decodes),
            DecodeFact::Preempted { sequence } => {
                return self.said_last(now, at, sequence, LastWord::Preempted);
            }
            DecodeFact::Failed(Cause::PeerLost) => Failure::of(Cause::PeerLost, computes),
            DecodeFact::Failed(cause) => Failure::of(cause, decodes),
            DecodeFact::Unreachable => Failure::of(Cause::PeerLost, decodes),
            DecodeFact::Lost => Failure::lost(decodes),
        };
        if live.has_decode_ended() {
            self.ignored += 1;
        } else {
            self.attempt_failed(now, at, failure);
        }
    }

    /// A token of the Decode leg: delivered, or kept for its place behind the first one.
    fn decoded(&mut self, now: Time, at: usize, sequence: u32, token: SampledToken) {
        let owns = self.owns(at, sequence);
        let max_early = self.config.limits.max_early_tokens;
        let Some(live) = self.groups[at].live() else { return };
        let (computes, known) = (live.computes(), live.first_tokens);
        let Some(early) = live.early(sequence) else { return self.no_such_sequence(now, at) };
        if !owns || early.last.is_some() {
            self.ignored += 1;
        } else if known {
            self.token(now, at, sequence, token);
        } else if early.tokens.len() < max_early {
            early.tokens.push_back(token);
        } else {
            self.attempt_failed(now, at, Failure::of(Cause::Expired, computes));
        }
    }

    /// The Decode leg says nothing more of a sequence.
    fn said_last(&mut self, now: Time, at: usize, sequence: u32, word: LastWord) {
        let owns = self.owns(at, sequence);
        let Some(live) = self.groups[at].live() else { return };
        let known = live.first_tokens;
        let Some(early) = live.early(sequence) else { return self.no_such_sequence(now, at) };
        if !owns || early.last.is_some() {
            self.ignored += 1;
            return;
        }
        early.last = Some(word);
        if known {
            self.last_word(at, sequence, word);
        }
    }

    fn last_word(&mut self, at: usize, sequence: u32, word: LastWord) {
        match word {
            LastWord::Finished(reason) => {
                self.finish(sequence, reason);
                self.settle(at);
            }
            LastWord::Preempted => self.sequence_preempted(at, sequence),
        }
    }

    /// The only place where a token is delivered.
    fn token(&mut self, now: Time, at: usize, sequence: u32, token: SampledToken) {
        match self.sequences[sequence as usize].take(token) {
            Order::Next => self.actions.push_back(RequestAction::Deliver { sequence, token }),
            Order::Old => self.ignored += 1,
            // A hole in an ordered stream: what comes after it can't be trusted.
            Order::Hole => self.distrust(now, at, |live| live.placed.decode),
        }
    }

    fn no_such_sequence(&mut self, now: Time, at: usize) {
        self.distrust(now, at, |live| live.placed.decode);
    }

    fn distrust(&mut self, now: Time, at: usize, worker: impl Fn(&Attempt) -> baton_handoff::InstanceId) {
        let Some(live) = self.groups[at].live() else { return };
        let failure = Failure::of(Cause::Protocol, worker(live));
        self.attempt_failed(now, at, failure);
    }
}

/// Whether nothing follows it on a Prefill leg.
const fn is_last(event: &PrefillFact) -> bool {
    match event {
        PrefillFact::Done | PrefillFact::Failed(_) | PrefillFact::Unreachable | PrefillFact::Lost => true,
        PrefillFact::FirstTokens(_) | PrefillFact::HandoffFailed(_) | PrefillFact::NotRedirected => false,
    }
}
