//! A prefill and a decode worker in this process, with real servers, and what a router does with them.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::collections::BTreeMap;
use std::time::Duration;

use baton_decode_worker::DecodeWorkerConfig;
use baton_prefill_worker::PrefillWorkerConfig;
use baton_proto::v1;
use baton_proto::v1::decode_client::DecodeClient;
use baton_proto::v1::decode_event::Event as DecodeEvent;
use baton_proto::v1::prefill_client::PrefillClient;
use baton_proto::v1::prefill_event::Event as PrefillEvent;
use baton_worker::Running;
use clap::Parser;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

/// No wait in these tests is longer.
pub(crate) const BOUND: Duration = Duration::from_secs(30);

#[derive(Parser)]
// Later options win, so that a test can change one.
#[command(args_override_self = true)]
struct PrefillCommand {
    #[command(flatten)]
    config: PrefillWorkerConfig,
}

#[derive(Parser)]
// Later options win, so that a test can change one.
#[command(args_override_self = true)]
struct DecodeCommand {
    #[command(flatten)]
    config: DecodeWorkerConfig,
}

/// Without the prefix cache, so that the same prompt again is computed again.
const SHARED: [&str; 10] = [
    "worker",
    "--model=builtin:tiny",
    "--threads=1",
    "--context=4096",
    "--kv-memory=4M",
    "--max-step-tokens=64",
    "--max-num-seqs=16",
    "--drain-timeout=5",
    "--kv-dtype=f32",
    "--prefix-cache=off",
];

pub(crate) fn prefill_config(more: &[&str]) -> PrefillWorkerConfig {
    PrefillCommand::try_parse_from(SHARED.iter().chain(more)).expect("options").config
}

pub(crate) fn decode_config(more: &[&str]) -> DecodeWorkerConfig {
    DecodeCommand::try_parse_from(SHARED.iter().chain(more)).expect("options").config
}

pub(crate) async fn start_prefill(more: &[&str]) -> Running {
    let mut running = baton_prefill_worker::start(prefill_config(more)).expect("prefill worker");
    running.ready().await.expect("ready");
    running
}

pub(crate) async fn start_decode(more: &[&str]) -> Running {
    let mut running = baton_decode_worker::start(decode_config(more)).expect("decode worker");
    running.ready().await.expect("ready");
    running
}

pub(crate) async fn channel(running: &Running) -> Channel {
    let endpoint = Channel::from_shared(format!("http://{}", running.address())).expect("an address");
    endpoint.connect().await.expect("a connection")
}

/// A worker and a client's connections to it.
pub(crate) struct Pair {
    pub(crate) prefill: Running,
    pub(crate) decode: Running,
    pub(crate) to_prefill: PrefillClient<Channel>,
    pub(crate) to_decode: DecodeClient<Channel>,
}

impl Pair {
    pub(crate) async fn start(prefill_options: &[&str], decode_options: &[&str]) -> Self {
        let prefill = start_prefill(prefill_options).await;
        let decode = start_decode(decode_options).await;
        Self {
            to_prefill: PrefillClient::new(channel(&prefill).await),
            to_decode: DecodeClient::new(channel(&decode).await),
            prefill,
            decode,
        }
    }

    pub(crate) fn destination(&self) -> v1::Destination {
        v1::Destination {
            address: self.decode.address().to_string(),
            instance_id: self.decode.core().instance.0.to_vec().into(),
        }
    }

    pub(crate) async fn prefill(&mut self, call: &Call) -> Result<Streaming<v1::PrefillEvent>, Status> {
        let destination = Some(self.destination());
        Ok(self.to_prefill.prefill(call.prefill(destination)).await?.into_inner())
    }

    pub(crate) async fn decode(&mut self, call: &Call) -> Result<Streaming<v1::DecodeEvent>, Status> {
        Ok(self.to_decode.decode(call.decode(false)).await?.into_inner())
    }

    /// Both legs to their ends: every token in order, and what the transfer cost.
    pub(crate) async fn run(&mut self, call: &Call) -> (Vec<u32>, v1::KvCost) {
        let decode = self.decode(call).await.expect("decode leg");
        let prefill = self.prefill(call).await.expect("prefill leg");
        let (first, rest) = tokio::join!(prefill_to_end(prefill), decode_to_end(decode));
        let (first, end) = (first.first.expect("a first token"), first.end);
        assert!(matches!(end, Some(PrefillEvent::HandoffDone(_))), "{end:?}");
        let kv = rest.kv.expect("started");
        let mut tokens = vec![first];
        tokens.extend(rest.tokens.expect("finished"));
        (tokens, kv)
    }

    /// All tokens of the same call, computed on the decode worker alone.
    pub(crate) async fn run_locally(&mut self, call: &Call) -> Vec<u32> {
        let stream = self.to_decode.decode(call.decode(true)).await.expect("local leg").into_inner();
        decode_to_end(stream).await.tokens.expect("finished")
    }

    /// Both legs of a group to their ends: every sequence's tokens, the first one included, and what the transfer cost.
    pub(crate) async fn run_group(&mut self, call: &Call) -> (BTreeMap<u32, Vec<u32>>, v1::KvCost) {
        let decode = self.decode(call).await.expect("decode leg");
        let prefill = self.prefill(call).await.expect("prefill leg");
        let (first, rest) = tokio::join!(prefill_to_end(prefill), decode_to_end(decode));
        assert!(matches!(first.end, Some(PrefillEvent::HandoffDone(_))), "{:?}", first.end);
        let mut tokens: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for first in &first.all {
            tokens.entry(first.sequence).or_default().push(first.token.expect("a token").id);
        }
        assert_eq!(tokens.len(), call.terms.num_sequences.max(1) as usize);
        for (sequence, answer) in &rest.by_sequence {
            assert!(answer.finished && !answer.preempted, "{answer:?}");
            tokens.get_mut(sequence).expect("a first token").extend(&answer.tokens);
        }
        (tokens, rest.kv.expect("started"))
    }

    pub(crate) async fn stop(&mut self, key: &v1::HandoffKey, sequence: u32) -> Result<(), Status> {
        self.to_decode.stop(v1::StopRequest { key: Some(key.clone()), sequence }).await.map(drop)
    }

    /// Waits until no sequence is on either worker, and every block is free or only in a prefix cache.
    pub(crate) async fn settles(&self) {
        for (name, running) in [("prefill", &self.prefill), ("decode", &self.decode)] {
            settles(name, running).await;
        }
    }
}

pub(crate) async fn settles(name: &str, running: &Running) {
    let loaded = running.core().loaded().expect("loaded");
    for _ in 0..3000 {
        let load = *loaded.steps.load().borrow();
        let pool = loaded.pool.counts();
        if pool.free + pool.cached == pool.total && load.counts == Default::default() {
            loaded.pool.check().expect("a consistent pool");
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let load = *loaded.steps.load().borrow();
    panic!("{name} keeps {:?}, {load:?}", loaded.pool.counts());
}

/// One request.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) key: v1::HandoffKey,
    pub(crate) prompt: Vec<u32>,
    pub(crate) max_new_tokens: u32,
    pub(crate) stop: Vec<u32>,
    pub(crate) temperature: f32,
    pub(crate) num_generated: u32,
    pub(crate) terms: v1::Terms,
}

impl Call {
    pub(crate) fn new(n: u64, prompt_tokens: usize, max_new_tokens: u32) -> Self {
        let mut request = [0; 16];
        request[..8].copy_from_slice(&n.to_le_bytes());
        let mut random = Random(n + 1);
        Self {
            key: v1::HandoffKey { request: request.to_vec().into(), group: 0, attempt: 0 },
            prompt: (0..prompt_tokens).map(|_| random.below(256) as u32).collect(),
            max_new_tokens,
            stop: Vec::new(),
            temperature: 0.0,
            num_generated: 0,
            terms: v1::Terms::default(),
        }
    }

    /// As a group of `num` sequences that count on from `first`.
    pub(crate) fn group(mut self, first: u32, num: u32) -> Self {
        (self.terms.first_sequence, self.terms.num_sequences) = (first, num);
        self
    }

    /// The same prompt under another key.
    pub(crate) fn again(&self, n: u64) -> Self {
        Self { key: Self::new(n, 1, 1).key, ..self.clone() }
    }

    fn sampling(&self) -> v1::Sampling {
        v1::Sampling { temperature: self.temperature, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 42 }
    }

    fn stopping(&self) -> v1::Stopping {
        v1::Stopping { max_new_tokens: self.max_new_tokens, stop_token_ids: self.stop.clone() }
    }

    pub(crate) fn prefill(&self, destination: Option<v1::Destination>) -> v1::PrefillRequest {
        v1::PrefillRequest {
            key: Some(self.key.clone()),
            prompt: self.prompt.clone(),
            sampling: Some(self.sampling()),
            stopping: Some(self.stopping()),
            destination,
            num_generated: self.num_generated,
            terms: Some(self.terms),
        }
    }

    pub(crate) fn decode(&self, local: bool) -> v1::DecodeRequest {
        let mut key = self.key.clone();
        // The same request again, on another worker or in another mode, is another attempt.
        key.group = u32::from(local);
        v1::DecodeRequest {
            key: Some(key),
            prompt: self.prompt.clone(),
            sampling: Some(self.sampling()),
            stopping: Some(self.stopping()),
            local,
            num_generated: self.num_generated,
            terms: Some(self.terms),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct PrefillOutcome {
    /// Of the first sequence.
    pub(crate) first: Option<u32>,
    pub(crate) finish: i32,
    pub(crate) all: Vec<v1::FirstToken>,
    pub(crate) cached_tokens: u32,
    pub(crate) end: Option<PrefillEvent>,
}

pub(crate) async fn prefill_to_end(mut stream: Streaming<v1::PrefillEvent>) -> PrefillOutcome {
    let mut outcome = PrefillOutcome::default();
    while let Some(event) = within(stream.message()).await.expect("an event") {
        match event.event.expect("a known event") {
            PrefillEvent::FirstTokens(first) => {
                outcome.cached_tokens = first.times.expect("times").cached_tokens;
                outcome.first = first.tokens[0].token.map(|token| token.id);
                outcome.finish = first.tokens[0].finish;
                outcome.all = first.tokens;
            }
            end => outcome.end = Some(end),
        }
    }
    outcome
}

/// What a Decode leg told of one sequence.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) tokens: Vec<u32>,
    pub(crate) next_index: Option<u32>,
    pub(crate) finished: bool,
    pub(crate) preempted: bool,
    pub(crate) stats: Option<v1::RunStats>,
}

#[derive(Debug, Default)]
pub(crate) struct DecodeOutcome {
    pub(crate) kv: Option<v1::KvCost>,
    pub(crate) cached_tokens: u32,
    /// Of the sequence that finished last.
    pub(crate) tokens: Option<Vec<u32>>,
    pub(crate) by_sequence: BTreeMap<u32, Answer>,
    pub(crate) stalls: Vec<v1::Stall>,
    pub(crate) avoided: Option<v1::AvoidedStall>,
    pub(crate) failed: Option<v1::Failed>,
}

impl DecodeOutcome {
    pub(crate) fn hear(&mut self, event: DecodeEvent) {
        match event {
            DecodeEvent::Started(started) => {
                assert!(self.kv.is_none(), "started twice");
                self.kv = Some(started.kv.expect("a cost"));
                self.cached_tokens = started.cached_tokens;
                self.avoided = started.avoided;
            }
            DecodeEvent::Tokens(more) => {
                let answer = self.live(more.sequence);
                for token in more.tokens {
                    assert_eq!(token.index, *answer.next_index.get_or_insert(token.index));
                    answer.next_index = Some(token.index + 1);
                    answer.tokens.push(token.id);
                }
            }
            DecodeEvent::Finished(finished) => {
                let answer = self.live(finished.sequence);
                answer.finished = true;
                answer.stats = finished.stats;
                self.tokens = Some(answer.tokens.clone());
            }
            DecodeEvent::Preempted(preempted) => self.live(preempted.sequence).preempted = true,
            DecodeEvent::Stall(stall) => {
                self.live(stall.sequence);
                self.stalls.push(stall);
            }
            DecodeEvent::Failed(failed) => self.failed = Some(failed),
        }
    }

    /// Nothing follows the end of a sequence.
    fn live(&mut self, sequence: u32) -> &mut Answer {
        let answer = self.by_sequence.entry(sequence).or_default();
        assert!(!answer.finished && !answer.preempted, "sequence {sequence} was over");
        answer
    }
}

pub(crate) async fn decode_to_end(mut stream: Streaming<v1::DecodeEvent>) -> DecodeOutcome {
    let mut outcome = DecodeOutcome::default();
    while let Some(event) = within(stream.message()).await.expect("an event") {
        outcome.hear(event.event.expect("a known event"));
    }
    outcome
}

pub(crate) async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(BOUND, future).await.expect("within its bound")
}

pub(crate) fn cause(failed: &Option<PrefillEvent>) -> v1::Cause {
    match failed {
        Some(PrefillEvent::Failed(failed)) => failed.cause(),
        other => panic!("not failed: {other:?}"),
    }
}

/// SplitMix64: a seed is a whole test.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % bound
    }
}
