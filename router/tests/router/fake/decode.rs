//! The script of a Decode leg.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use baton_proto::v1;
use baton_proto::v1::decode_event::Event;
use tokio::sync::mpsc;
use tonic::Status;

use super::script::name;
use super::service::{failed, sampled, sequences};
use super::{EOS, State};

/// One sequence of a leg.
struct Sequence {
    number: u32,
    /// Tokens of the next message.
    batch: Vec<v1::SampledToken>,
    ended: bool,
}

/// Says one token of every sequence in turn, until all have ended.
pub(super) async fn decode(
    state: Arc<State>,
    request: v1::DecodeRequest,
    sender: mpsc::Sender<Result<v1::DecodeEvent, Status>>,
) {
    let script = Arc::clone(&state.script);
    let send = |event| sender.send(Ok(v1::DecodeEvent { event: Some(event) }));
    if state.broken.load(Ordering::SeqCst) {
        return;
    }
    if let Some(cause) = script.refuses {
        let _ = send(Event::Failed(failed(cause))).await;
        return;
    }
    let key = request.key.as_ref().expect("a key");
    if !request.local {
        if let Some(fails) = script.receiver_fails.filter(|_| script.shared.fails(key)) {
            script.shared.committed(key).await;
            if fails.told_by_prefill {
                std::future::pending::<()>().await;
            }
            // Behind the first tokens, which travel on another stream.
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            return;
        }
        script.shared.committed(key).await;
    }
    let kv = v1::KvCost { bytes: 4096, frames: 4, total_us: 2500, exposed_us: 500, ..v1::KvCost::default() };
    let kv = (!request.local).then_some(kv);
    let _ = send(Event::Started(v1::Started { kv, avoided: script.avoided, ..v1::Started::default() })).await;
    let stopping = request.stopping.as_ref().expect("stopping");
    let first = request.num_generated + u32::from(!request.local);
    let end = request.num_generated + stopping.max_new_tokens;
    // A first token that came with the handoff may have ended its sequence.
    let ended = |number| !request.local && script.token(number, request.num_generated, stopping) == EOS;
    let mut all: Vec<Sequence> = sequences(request.terms.as_ref())
        .map(|number| Sequence { number, batch: Vec::new(), ended: ended(number) })
        .collect();
    for index in first..end {
        if script.breaks(index) {
            return;
        }
        if let Some((_, stall)) = script.stalls.as_ref().filter(|(before, _)| *before == index) {
            let _ = send(Event::Stall(stall.clone())).await;
        }
        for sequence in all.iter_mut().filter(|sequence| !sequence.ended) {
            if state.is_stopped(&name(key), sequence.number) {
                sequence.ended = true;
                continue;
            }
            for event in sequence.step(&state, index, end, stopping) {
                if send(event).await.is_err() {
                    return;
                }
            }
        }
        if all.iter().all(|sequence| sequence.ended) {
            return;
        }
        if script.decode_hangs_after == Some(index) {
            std::future::pending::<()>().await;
        }
        if !script.pace.is_zero() {
            tokio::time::sleep(script.pace).await;
        }
    }
}

impl Sequence {
    /// What it says with the token of this index.
    fn step(&mut self, state: &State, index: u32, end: u32, stopping: &v1::Stopping) -> Vec<Event> {
        let (script, sequence) = (&state.script, self.number);
        if script.preempts(sequence, index) {
            self.ended = true;
            return vec![Event::Preempted(v1::Preempted { sequence })];
        }
        let id = script.token(sequence, index, stopping);
        self.batch.push(sampled(id, index));
        self.ended = id == EOS || index + 1 == end;
        let mut events = Vec::new();
        if self.batch.len() == script.tokens_per_message || self.ended {
            let tokens = Event::Tokens(v1::Tokens { tokens: std::mem::take(&mut self.batch), sequence });
            if script.repeats {
                events.push(tokens.clone());
            }
            events.push(tokens);
        }
        if self.ended {
            let reason = if id == EOS { v1::FinishReason::Stop } else { v1::FinishReason::Length };
            let finished =
                v1::Finished { reason: reason.into(), num_tokens: index + 1, sequence, stats: script.stats };
            events.push(Event::Finished(finished));
        }
        events
    }
}
