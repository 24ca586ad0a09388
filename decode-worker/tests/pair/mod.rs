//! A prefill and a decode worker in this process, with real servers, and what a router does with them.
#![allow(dead_code, reason = "each test file uses its own part")]

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

const SHARED: [&str; 9] = [
    "worker",
    "--model=builtin:tiny",
    "--threads=1",
    "--context=4096",
    "--kv-memory=4M",
    "--max-step-tokens=64",
    "--max-num-seqs=16",
    "--drain-timeout=5",
    "--kv-dtype=f32",
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
        }
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
            num_generated: 0,
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
            num_generated: 0,
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct PrefillOutcome {
    pub(crate) first: Option<u32>,
    pub(crate) finish: i32,
    pub(crate) cached_tokens: u32,
    pub(crate) end: Option<PrefillEvent>,
}

pub(crate) async fn prefill_to_end(mut stream: Streaming<v1::PrefillEvent>) -> PrefillOutcome {
    let mut outcome = PrefillOutcome::default();
    while let Some(event) = within(stream.message()).await.expect("an event") {
        match event.event.expect("a known event") {
            PrefillEvent::FirstToken(first) => {
                let token = first.token.expect("a token");
                assert_eq!(token.index, 0);
                outcome.cached_tokens = first.times.expect("times").cached_tokens;
                outcome.first = Some(token.id);
                outcome.finish = first.finish;
            }
            end => outcome.end = Some(end),
        }
    }
    outcome
}

#[derive(Debug, Default)]
pub(crate) struct DecodeOutcome {
    pub(crate) kv: Option<v1::KvCost>,
    pub(crate) cached_tokens: u32,
    /// Set when the sequence finished.
    pub(crate) tokens: Option<Vec<u32>>,
    pub(crate) failed: Option<v1::Failed>,
}

pub(crate) async fn decode_to_end(mut stream: Streaming<v1::DecodeEvent>) -> DecodeOutcome {
    let mut outcome = DecodeOutcome::default();
    let (mut tokens, mut next_index) = (Vec::new(), None);
    while let Some(event) = within(stream.message()).await.expect("an event") {
        match event.event.expect("a known event") {
            DecodeEvent::Started(started) => {
                outcome.kv = Some(started.kv.expect("a cost"));
                outcome.cached_tokens = started.cached_tokens;
            }
            DecodeEvent::Tokens(more) => {
                for token in more.tokens {
                    assert_eq!(token.index, *next_index.get_or_insert(token.index));
                    next_index = Some(token.index + 1);
                    tokens.push(token.id);
                }
            }
            DecodeEvent::Finished(_) => outcome.tokens = Some(std::mem::take(&mut tokens)),
            DecodeEvent::Failed(failed) => outcome.failed = Some(failed),
        }
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
