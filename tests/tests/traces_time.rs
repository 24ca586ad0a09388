//! Figures in a trace against what is seen from outside: the client's clock, and a link of known speed.

use std::sync::Arc;
use std::time::Instant;

use baton_tests::cluster::{greedy, strings, with};
use baton_tests::netns::{Cable, Side};
use baton_tests::otlp::Collector;
use baton_tests::seed::Random;
use baton_tests::spans::{Caller, Kind, Trace};
use baton_tests::{Cluster, ClusterConfig, EventStream, Turn};
use serde_json::json;

/// What a client saw of a request, in milliseconds, and its trace.
struct Seen {
    ttft_ms: f64,
    /// From the first token, which P sends, to the second, which D sends.
    gap_ms: f64,
    trace: Trace,
}

async fn see(
    cluster: &Cluster,
    collector: &Collector,
    random: &mut Random,
    prompt: usize,
    tokens: usize,
) -> Seen {
    let caller = Caller::new(random);
    let body = with(greedy(&random.tiny_prompt(prompt), tokens), json!({"stream": true}));
    let start = Instant::now();
    let headers = [("traceparent", &*caller.header())];
    let stream =
        EventStream::post_with(cluster.http, "/v1/completions", &body, &headers).await.expect("a stream");
    let events = stream.collect().await.expect("a whole stream");
    let ms = |nth: usize, since: Instant| events[nth].0.duration_since(since).as_secs_f64() * 1e3;
    let (ttft_ms, gap_ms) = (ms(0, start), ms(1, events[0].0));
    let is_whole = |trace: &Trace| {
        ["tokenize", "route", "prefill.chunk", "kv.recv", "decode.run"]
            .iter()
            .all(|name| trace.named(name).next().is_some())
            && ["prefill", "decode"].iter().all(|name| trace.named(name).count() == 2)
    };
    Seen { ttft_ms, gap_ms, trace: collector.trace(&caller.trace_id, is_whole).await }
}

/// Where the time of a request went, in milliseconds, each from a span's own duration.
#[derive(Debug)]
struct Account {
    end_to_end: f64,
    router: f64,
    queue: f64,
    prefill: f64,
    exposed: f64,
    decode_queue: f64,
    decode: f64,
    /// What calls took beyond what the called spent on them.
    network: f64,
}

impl Account {
    fn new(trace: &Trace) -> Self {
        let sum = |name: &str| trace.named(name).map(|span| span.ms()).sum::<f64>();
        let called = |name: &str| (trace.one(name, Kind::Client).ms(), trace.one(name, Kind::Server).ms());
        let (prefill_call, prefill) = called("prefill");
        let (decode_call, decode) = called("decode");
        let queue = sum("prefill.queue");
        Self {
            end_to_end: trace.root().ms(),
            router: sum("tokenize") + sum("door") + sum("route"),
            queue,
            prefill: prefill - queue,
            exposed: sum("kv.wait"),
            decode_queue: sum("decode.queue"),
            decode: sum("decode.run"),
            network: (prefill_call - prefill) + (decode_call - decode),
        }
    }

    fn rest(&self) -> f64 {
        let told = self.router
            + self.queue
            + self.prefill
            + self.exposed
            + self.decode_queue
            + self.decode
            + self.network;
        self.end_to_end - told
    }
}

/// The least value that `share` of the values do not exceed.
fn quantile(values: &[f64], share: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[((values.len() as f64 * share).ceil() as usize).max(1) - 1]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_time_of_a_request_adds_up_and_its_first_token_is_when_the_client_sees_it() {
    const NUM: usize = 200;
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
    see(&cluster, &collector, &mut random, 100, 8).await;
    let (mut rests, mut shares, mut late) = (Vec::new(), Vec::new(), Vec::new());
    let mut worst: Option<(f64, Account, Trace)> = None;
    for _ in 0..NUM {
        let (prompt, tokens) = (random.within(20..1500), random.within(4..64));
        let seen = see(&cluster, &collector, &mut random, prompt, tokens).await;
        let account = Account::new(&seen.trace);
        let rest = account.rest();
        rests.push(rest.abs());
        shares.push(rest.abs() / account.end_to_end);
        late.push(seen.ttft_ms - seen.trace.root().number("baton.ttft_ms"));
        if worst.as_ref().is_none_or(|(most, ..)| rest.abs() > *most) {
            worst = Some((rest.abs(), account, seen.trace));
        }
    }
    let (_, account, trace) = worst.expect("requests were made");
    eprintln!(
        "unexplained: p50 {:.3} ms, p99 {:.3} ms = {:.2} %, worst {:.3} ms: {account:?}",
        quantile(&rests, 0.5),
        quantile(&rests, 0.99),
        100.0 * quantile(&shares, 0.99),
        quantile(&rests, 1.0)
    );
    eprintln!(
        "first token at the client after the trace's: p50 {:.3} ms, p99 {:.3} ms, worst {:.3} ms, least {:.3} ms",
        quantile(&late, 0.5),
        quantile(&late, 0.99),
        quantile(&late, 1.0),
        quantile(&late, 0.0)
    );
    // The tail is the machine's: a thread that waits for a core is in no span. It is printed, and only the middle is asked.
    assert!(quantile(&rests, 0.5) < 2.0 || quantile(&shares, 0.5) < 0.02, "{account:?}\n{trace}");
    assert!(quantile(&late, 0.5) < 2.0 && quantile(&late, 0.0) > -0.1, "{late:?}");
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
        see(&cluster, &collector, &mut random, PROMPT, 8).await;
        let mut failures = Vec::new();
        for kilobits in [2_000, 3_000, 4_500, 6_000] {
            cable.set_rate_kilobits(kilobits);
            let computed = exposed_on(kilobits);
            let mut seen = Vec::new();
            for _ in 0..3 {
                seen.push(see(&cluster, &collector, &mut random, PROMPT, 8).await);
            }
            seen.sort_by(|a, b| a.gap_ms.total_cmp(&b.gap_ms));
            let Seen { gap_ms, trace, .. } = &seen[1];
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
