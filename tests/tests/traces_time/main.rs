//! Figures in a trace against what is seen from outside: the client's clock, and a link of known speed.

mod account;
mod stopwatch;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use account::Account;
use baton_tests::cluster::{greedy, strings, with};
use baton_tests::netns::{Cable, Side};
use baton_tests::otlp::Collector;
use baton_tests::seed::Random;
use baton_tests::spans::{Caller, Kind, Trace};
use baton_tests::{Cluster, ClusterConfig, Turn};
use serde_json::json;
use stopwatch::Times;
use tokio::task::JoinSet;

/// A request that was made: what its client's clock says, and who heads its trace.
struct Asked {
    times: Times,
    caller: Caller,
}

async fn ask(at: SocketAddr, random: &mut Random, prompt: usize, tokens: usize) -> Asked {
    let caller = Caller::new(random);
    let body = with(greedy(&random.tiny_prompt(prompt), tokens), json!({"stream": true}));
    Asked { times: stopwatch::time(at, &body, &caller).await, caller }
}

/// The trace of a request that was handed off, once everybody has told.
async fn trace(collector: &Collector, asked: &Asked) -> Trace {
    let is_whole = |trace: &Trace| {
        ["tokenize", "route", "prefill.chunk", "kv.recv", "decode.run", "respond"]
            .iter()
            .all(|name| trace.named(name).next().is_some())
            && ["prefill", "decode"].iter().all(|name| trace.named(name).count() == 2)
    };
    collector.trace(&asked.caller.trace_id, is_whole).await
}

/// The least value that `share` of the values do not exceed.
fn quantile(values: &[f64], share: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[((values.len() as f64 * share).ceil() as usize).max(1) - 1]
}

/// p50, p99 and the largest of some milliseconds, for people.
fn spread(values: &[f64]) -> String {
    let [p50, p99, most] = [0.5, 0.99, 1.0].map(|share| quantile(values, share));
    format!("p50 {p50:.3} ms, p99 {p99:.3} ms, most {most:.3} ms")
}

/// How many requests are under way.
#[derive(Clone, Copy)]
struct Load {
    num_clients: usize,
    /// Of each client.
    num_requests: usize,
    /// Prompt tokens, at most.
    max_prompt: usize,
    /// Between two requests of a client, at most.
    max_pause_ms: usize,
}

const ONE_AT_A_TIME: Load = Load { num_clients: 1, num_requests: 150, max_prompt: 1500, max_pause_ms: 1 };
/// P computes for half of the time or so.
const MODERATE: Load = Load { num_clients: 3, num_requests: 50, max_prompt: 800, max_pause_ms: 100 };

async fn drive(at: SocketAddr, random: &mut Random, load: Load) -> Vec<Asked> {
    let mut clients = JoinSet::new();
    for _ in 0..load.num_clients {
        let mut random = Random::new(random.next_u64());
        clients.spawn(async move {
            let mut asked = Vec::new();
            for _ in 0..load.num_requests {
                let (prompt, tokens) = (random.within(20..load.max_prompt), random.within(4..64));
                asked.push(ask(at, &mut random, prompt, tokens).await);
                let pause_ms = random.within(0..load.max_pause_ms) as u64;
                tokio::time::sleep(Duration::from_millis(pause_ms)).await;
            }
            asked
        });
    }
    clients.join_all().await.into_iter().flatten().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_time_of_a_request_adds_up_and_its_first_token_is_when_the_client_sees_it() {
    let _turn = Turn::take();
    let mut random = Random::from_env("the_time_of_a_request_adds_up");
    let collector = Collector::start().await;
    // Decoding takes the time of a larger model's, so that 64 tokens are a tenth of a second.
    let cluster = Cluster::start(ClusterConfig {
        env: collector.over_grpc(),
        prefill_args: strings(&["--pace-tokens-per-s", "8192"]),
        decode_args: strings(&["--pace-tokens-per-s", "500"]),
        ..ClusterConfig::default()
    })
    .await;
    ask(cluster.http, &mut random, 100, 8).await;
    for (name, load) in [("one at a time", ONE_AT_A_TIME), ("moderate load", MODERATE)] {
        let (mut rests, mut networks, mut shares, mut late) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut worst: Option<(f64, Account, Trace)> = None;
        for asked in drive(cluster.http, &mut random, load).await {
            let trace = trace(&collector, &asked).await;
            let account = Account::new(&trace);
            let rest = account.rest().abs();
            rests.push(rest);
            shares.push(rest / account.end_to_end);
            networks.push(account.network);
            late.push(asked.times.ttft_ms() - trace.root().number("baton.ttft_ms"));
            if worst.as_ref().is_none_or(|(most, ..)| rest > *most) {
                worst = Some((rest, account, trace));
            }
        }
        let (_, account, trace) = worst.expect("requests were made");
        eprintln!("{name}: in no span: {}, p99 {:.3} %", spread(&rests), 100.0 * quantile(&shares, 0.99));
        eprintln!("{name}: on the way between processes: {}", spread(&networks));
        eprintln!("{name}: first token at the client's socket, after the trace's: {}", spread(&late));
        assert!(
            quantile(&rests, 0.99) < 2.0 || quantile(&shares, 0.99) < 0.02,
            "{name}: {account:?}\n{trace}"
        );
        // A thread that waits for a core is in no clock but the client's: the tail is printed, and the middle asked.
        assert!(quantile(&late, 0.5) < 2.0 && quantile(&late, 0.0) > -0.1, "{name}: {late:?}");
    }
}

/// Bytes of KV of one token of `builtin:tiny` in f16, and of one of its layers.
const TOKEN_BYTES: f64 = 512.0;
const NUM_LAYERS: usize = 4;
const PROMPT: usize = 2048;
const CHUNK: usize = 256;
const TOKENS_PER_S: f64 = 2048.0;

/// When the last byte of a prompt's KV has passed a link, less when its last layer was computed, in milliseconds: each layer of each chunk can
/// go when it is computed, and goes when what came before it has gone.
fn exposed_on(kilobits: u32) -> f64 {
    // A full packet on the wire holds 1,448 bytes of the stream and takes 1,514.
    let ms_per_byte = 8.0 / f64::from(kilobits) * 1514.0 / 1448.0;
    let piece_ms = CHUNK as f64 / TOKENS_PER_S * 1e3 / NUM_LAYERS as f64;
    let piece_bytes = CHUNK as f64 * TOKEN_BYTES / NUM_LAYERS as f64;
    let num_pieces = PROMPT / CHUNK * NUM_LAYERS;
    let passed = (1..=num_pieces)
        .fold(0.0, |passed: f64, nth| passed.max(nth as f64 * piece_ms) + piece_bytes * ms_per_byte);
    passed - num_pieces as f64 * piece_ms
}

#[test]
fn the_computed_figure_is_right_where_it_is_plain() {
    // So fast that only the last piece counts: 32 KiB at 1 Gb/s are 0.27 ms.
    assert!((exposed_on(1_000_000) - 0.274).abs() < 0.001, "{}", exposed_on(1_000_000));
    // So slow that the link never rests: 1 MiB at 1 Mb/s from the end of the first piece on.
    let wire = 1_048_576.0 * 8.0 / 1e3 * 1514.0 / 1448.0;
    assert!((exposed_on(1_000) - (wire + 31.25 - 1_000.0)).abs() < 0.001, "{}", exposed_on(1_000));
}

/// A link stepped from a quarter to most of what would hide the transfer.
#[test]
fn the_exposed_transfer_follows_the_links_speed_and_is_what_the_client_waits() {
    let _turn = Turn::take();
    let Some(cable) = Cable::new().map(Arc::new) else { return };
    let mut random = Random::from_env("the_exposed_transfer_follows");
    cable.run(async || {
        let collector = Collector::start_with(cable.address(Side::Near), None).await;
        let (tokens_per_s, chunk) = (TOKENS_PER_S.to_string(), CHUNK.to_string());
        let cluster = Cluster::start(ClusterConfig {
            cable: Some(Arc::clone(&cable)),
            env: collector.over_grpc(),
            prefill_args: strings(&["--pace-tokens-per-s", &tokens_per_s, "--max-step-tokens", &chunk]),
            ..ClusterConfig::default()
        })
        .await;
        ask(cluster.http, &mut random, PROMPT, 8).await;
        let mut failures = Vec::new();
        for kilobits in [2_000, 3_000, 4_500, 6_000] {
            cable.set_rate_kilobits(kilobits);
            let computed = exposed_on(kilobits);
            let mut seen = Vec::new();
            for _ in 0..3 {
                let asked = ask(cluster.http, &mut random, PROMPT, 8).await;
                seen.push((asked.times.gap_ms(), trace(&collector, &asked).await));
            }
            seen.sort_by(|(a, _), (b, _)| a.total_cmp(b));
            let (gap_ms, trace) = &seen[1];
            let (root, run) = (trace.root(), trace.one("decode.run", Kind::Internal));
            let (exposed, step) = (root.number("baton.kv.exposed_ms"), run.number("baton.itl_p50_ms"));
            let wait = trace.one("kv.wait", Kind::Internal).ms();
            let outside = gap_ms - step;
            eprintln!(
                "{kilobits} kb/s: computed {computed:.1} ms, exposed {exposed:.1}, kv.wait {wait:.1}, token 2 - token 1 - a step {outside:.1}, the router's {:.1}",
                root.number("baton.token_gap_1_2_ms")
            );
            let far = |value: f64, from: f64| (value - from).abs() > 0.1 * from;
            if far(exposed, computed) || far(outside, exposed) || (wait - exposed).abs() > 0.01 {
                failures.push(format!("{kilobits} kb/s\n{trace}"));
            }
        }
        assert!(failures.is_empty(), "{}", failures.join("\n"));
    });
}
