//! What a scripted worker answers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_proto::v1;
use bytes::Bytes;
use tokio::sync::watch;

use super::EOS;

/// What a worker answers; the token of index `i` of sequence `s` is `answers[s][i]`, and end of sequence follows (or, if it is
/// ignored, the answer again).
#[derive(Clone, Debug)]
pub(crate) struct Script {
    /// Of each sequence; the first one again when there are more sequences.
    pub(crate) answers: Vec<Vec<u32>>,
    /// Between tokens.
    pub(crate) pace: Duration,
    /// Tokens of one message.
    pub(crate) tokens_per_message: usize,
    /// The prefill leg says nothing, ever.
    pub(crate) prefill_hangs: bool,
    /// The decode leg says nothing after the tokens of this index.
    pub(crate) decode_hangs_after: Option<u32>,
    /// The decode leg's stream ends without a last word before the token of this index, once in a cluster.
    pub(crate) decode_breaks_before: Option<u32>,
    /// A sequence of the decode leg is preempted before its token of this index, once in a cluster.
    pub(crate) decode_preempts: Option<(u32, u32)>,
    /// The first handoff in a cluster fails once the first tokens are told.
    pub(crate) receiver_fails: Option<ReceiverFails>,
    /// The decode leg says every message with tokens twice.
    pub(crate) repeats: bool,
    /// Every leg is refused so.
    pub(crate) refuses: Option<v1::Cause>,
    /// Prompt tokens that the prefill worker finds in its cache.
    pub(crate) cached_tokens: u32,
    /// It has a prefix cache, and says what is in it.
    pub(crate) has_cache: bool,
    /// The decode leg says so before the token of this index.
    pub(crate) stalls: Option<(u32, v1::Stall)>,
    /// What the decode leg says of the prompt's neighbours, and of the sequence's.
    pub(crate) avoided: Option<v1::AvoidedStall>,
    pub(crate) stats: Option<v1::RunStats>,
    /// What the workers of one cluster know of each other.
    pub(crate) shared: Arc<Shared>,
}

/// A handoff that fails with the prompt computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReceiverFails {
    /// The prefill worker says so; else the decode leg breaks.
    pub(crate) told_by_prefill: bool,
    /// The prefill worker has given the KV up when the redirect comes.
    pub(crate) given_up: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Legs whose first tokens were sampled: nothing is committed before.
    sampled: watch::Sender<Vec<Bytes>>,
    /// Handoffs that fail, and the attempts that they were redirected to.
    failing: Mutex<Vec<Bytes>>,
    redirected: watch::Sender<Vec<(Bytes, v1::HandoffKey)>>,
    num_broken: AtomicUsize,
    num_preempted: AtomicUsize,
}

/// A handoff, whichever worker it is on.
pub(super) fn name(key: &v1::HandoffKey) -> Bytes {
    [key.request.as_ref(), &key.group.to_be_bytes(), &key.attempt.to_be_bytes()].concat().into()
}

impl Shared {
    pub(super) fn commit(&self, key: &v1::HandoffKey) {
        self.sampled.send_modify(|sampled| sampled.push(name(key)));
    }

    pub(super) async fn committed(&self, key: &v1::HandoffKey) {
        let name = name(key);
        let mut sampled = self.sampled.subscribe();
        let _ = sampled.wait_for(|sampled| sampled.contains(&name)).await;
    }

    /// Whether this handoff is the one that fails.
    pub(super) fn fails(&self, key: &v1::HandoffKey) -> bool {
        let mut failing = self.failing.lock().expect("unpoisoned");
        if failing.is_empty() {
            failing.push(name(key));
        }
        failing.contains(&name(key))
    }

    pub(super) fn redirect(&self, from: &v1::HandoffKey, to: v1::HandoffKey) {
        self.redirected.send_modify(|redirected| redirected.push((name(from), to)));
    }

    /// The attempt that gets what this one computed.
    pub(super) async fn redirected(&self, from: &v1::HandoffKey) -> v1::HandoffKey {
        let name = name(from);
        let mut redirected = self.redirected.subscribe();
        let found =
            redirected.wait_for(|all| all.iter().any(|(of, _)| *of == name)).await.expect("the script lives");
        found.iter().find(|(of, _)| *of == name).expect("waited for").1.clone()
    }
}

impl Script {
    pub(crate) fn says(text: &str) -> Self {
        Self::says_each(&[text])
    }

    /// One text for each sequence.
    pub(crate) fn says_each(texts: &[&str]) -> Self {
        Self {
            answers: texts.iter().map(|text| text.bytes().map(u32::from).collect()).collect(),
            pace: Duration::ZERO,
            tokens_per_message: 1,
            prefill_hangs: false,
            decode_hangs_after: None,
            decode_breaks_before: None,
            decode_preempts: None,
            receiver_fails: None,
            repeats: false,
            refuses: None,
            cached_tokens: 0,
            has_cache: false,
            stalls: None,
            avoided: None,
            stats: None,
            shared: Arc::default(),
        }
    }

    pub(super) fn token(&self, sequence: u32, index: u32, stopping: &v1::Stopping) -> u32 {
        let answer = self.answers.get(sequence as usize).unwrap_or(&self.answers[0]);
        let index = index as usize;
        match answer.get(index) {
            Some(token) => *token,
            None if stopping.stop_token_ids.contains(&EOS) => EOS,
            None => answer[index % answer.len()],
        }
    }

    /// Whether the leg breaks now, which it does once.
    pub(super) fn breaks(&self, index: u32) -> bool {
        self.decode_breaks_before == Some(index) && self.shared.num_broken.fetch_add(1, Ordering::SeqCst) == 0
    }

    /// Whether this sequence is preempted now, which one is once.
    pub(super) fn preempts(&self, sequence: u32, index: u32) -> bool {
        self.decode_preempts == Some((sequence, index))
            && self.shared.num_preempted.fetch_add(1, Ordering::SeqCst) == 0
    }
}
