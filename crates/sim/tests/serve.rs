//! A given load on a given cluster.

use std::time::Duration;

use baton_scheduler::StepCost;
use baton_sim::workload::{
    Arrival, Gaps, Lengths, Pace, Prompt, Streams, TRACE_BLOCK_TOKENS, TraceShape, UniqueShape, Workload,
    made_trace, reused_tokens, unique_arrivals,
};
use baton_sim::{
    Durations, Layout, Measured, MeasuredKind, MeasuredSteps, ServeConfig, Served, Shape, WorkerShape, serve,
};

fn served(config: &ServeConfig) -> Served {
    serve(config).unwrap_or_else(|violation| panic!("{violation}"))
}

fn ms(durations: &Durations, q: f64) -> f64 {
    durations.quantile(q).as_secs_f64() * 1e3
}

fn config(shape: Shape, arrivals: Vec<Arrival>) -> ServeConfig {
    let workload = Workload { streams: Streams::default(), quiet: Duration::ZERO, arrivals };
    ServeConfig { seed: 1, shape, workload, num_warm_up: 0, contents: false, measured: None }
}

fn arrivals(gaps: Gaps, num: u32, (prompt, output): (u32, u32)) -> Vec<Arrival> {
    let pace = Pace { gaps, duration: Duration::ZERO, at_least: num };
    let shape =
        UniqueShape { prompt_tokens: Lengths::exactly(prompt), output_tokens: Lengths::exactly(output) };
    unique_arrivals(1, pace, shape).unwrap()
}

#[test]
fn a_run_is_a_function_of_its_configuration() {
    let config = config(Shape::llama_on_h200(), arrivals(Gaps::Poisson(20.0), 200, (1_000, 20)));
    let (one, other) = (served(&config), served(&config));
    assert_eq!(one, other);
    assert_ne!(one.report.digest, served(&ServeConfig { seed: 2, ..config }).report.digest);
}

/// What blocks hold decides which tokens come, not when.
#[test]
fn empty_blocks_take_the_time_of_full_ones() {
    let empty = config(Shape::llama_on_h200(), arrivals(Gaps::Poisson(20.0), 150, (1_000, 30)));
    let full = served(&ServeConfig { contents: true, ..empty.clone() });
    let empty = served(&empty);
    for served in [&empty, &full] {
        assert_eq!((served.num_answered, served.report.num_tokens), (150, 150 * 30));
        assert_eq!(served.report.num_commits, 150);
    }
    for (of, q) in [("ttft", 0.5), ("ttft", 0.9), ("itl", 0.5), ("itl", 0.99)] {
        let value = |served: &Served| if of == "ttft" { ms(&served.ttft, q) } else { ms(&served.itl, q) };
        let (empty, full) = (value(&empty), value(&full));
        assert!((empty / full - 1.0).abs() < 0.1, "{of} {q}: {empty} {full}");
    }
    assert!(empty.report.num_events * 2 < full.report.num_events);
}

/// Eight at once on two prefill workers: the last one waits for three others.
#[test]
fn a_burst_waits_in_line() {
    let shape = Shape::llama_on_h200();
    let steady = served(&config(shape, arrivals(Gaps::Poisson(1.0), 160, (2_048, 8))));
    let burst = Gaps::Bursts { rate: 1.0, size: 8 };
    let burst = served(&config(shape, arrivals(burst, 160, (2_048, 8))));
    let alone = ms(&steady.ttft, 0.1);
    let last = ms(&burst.ttft, 0.9);
    assert!((3.5..5.0).contains(&(last / alone)), "{alone} {last}");
    assert!(ms(&burst.ttft, 0.5) > 1.5 * ms(&steady.ttft, 0.5));
}

#[test]
fn a_made_trace_hits_the_prefix_caches() {
    let lines = made_trace(
        1,
        TraceShape {
            num_requests: 300,
            rate: 10.0,
            new_tokens: 800,
            output_tokens: 20,
            num_prefixes: 4,
            prefix_tokens: 1_024,
            turns_percent: 40,
            max_tokens: 4_096,
        },
    );
    let arrival = |line: &baton_sim::workload::TraceLine| Arrival {
        at: Duration::from_secs_f64(line.timestamp / 1e3),
        prompt: Prompt::Blocks {
            ids: line.hash_ids.clone(),
            block: TRACE_BLOCK_TOKENS,
            tokens: line.input_length,
        },
        output_tokens: line.output_length,
    };
    let (all, reused) = reused_tokens(&lines);
    let shape = Shape::llama_on_h200();
    let with = |cache| {
        let shape = Shape { worker: WorkerShape { cache, ..shape.worker }, ..shape };
        served(&config(shape, lines.iter().map(arrival).collect()))
    };
    let (cached, uncached) = (with(true), with(false));
    assert_eq!((cached.num_answered, uncached.num_answered), (300, 300));
    assert_eq!((uncached.report.num_prompt_tokens, uncached.report.num_cached_tokens), (all, 0));
    // Two prefill workers find less than one cache without bound would, and the two copies of a hot beginning are computed twice.
    let found = all - cached.report.num_prompt_tokens;
    assert!(found * 2 > reused && found <= reused + 300 * 512, "{found} of {reused}");
    assert!(ms(&cached.ttft, 0.5) < ms(&uncached.ttft, 0.5));
}

/// All workers, and all kinds of steps, alike.
fn measured(cost: StepCost, ratios: &[(f64, f64)]) -> Measured {
    let kind = MeasuredKind { from_prompt_tokens: 0, cost, ratios: ratios.to_vec() };
    Measured { workers: vec![MeasuredSteps { planned: cost, kinds: vec![kind] }] }
}

/// Streams of steps of 10 ms; a prompt takes a second in one step.
fn with_streams(shape: Shape) -> ServeConfig {
    let cost = StepCost { fixed_s: 10e-3, per_token_s: 1e-3, per_context_token_s: 0.0 };
    let every = Gaps::Every(Duration::from_secs(5));
    let config = config(shape, arrivals(every, 4, (1_000, 2)));
    let streams = Streams { num: 4, prompt_tokens: 16, output_tokens: 100 };
    ServeConfig {
        workload: Workload { streams, quiet: Duration::from_secs(2), ..config.workload },
        measured: Some(measured(cost, &[])),
        ..config
    }
}

#[test]
fn streams_run_beside_arrivals_and_stall_where_prompts_are_computed_beside_them() {
    let base = Shape::llama_on_h200();
    let worker = WorkerShape { max_step_ms: 60_000.0, local_prefill_tokens: 1_000, ..base.worker };
    let apart = Shape { num_prefill_workers: 1, num_decode_workers: 1, worker, ..base };
    let together = Shape { num_prefill_workers: 0, layout: Layout::Colocated, ..apart };
    let (apart, together) = (served(&with_streams(apart)), served(&with_streams(together)));
    for served in [&apart, &together] {
        assert_eq!((served.num_answered, served.ttft.num()), (4, 4));
        // Four rows of a millisecond each.
        assert!((ms(&served.quiet_itl, 0.5) - 14.0).abs() < 0.5, "{}", ms(&served.quiet_itl, 0.5));
        assert!((ms(&served.ttft, 0.5) - 1_015.0).abs() < 25.0, "{}", ms(&served.ttft, 0.5));
        assert!((served.duration.as_secs_f64() - 16.0).abs() < 0.2, "{:?}", served.duration);
    }
    // A stream that starts again has its block of prompt computed beside the others.
    assert!(ms(&apart.itl, 1.0) < 60.0, "{}", ms(&apart.itl, 1.0));
    assert!((ms(&together.itl, 1.0) - 1_014.0).abs() < 25.0, "{}", ms(&together.itl, 1.0));
    // Streams that end are started again: tokens come all the time.
    assert!(apart.report.num_requests > 4 + 4, "{}", apart.report.num_requests);
}

#[test]
fn noise_spreads_gaps_and_keeps_their_mean() {
    let base = Shape::llama_on_h200();
    let mut quiet = with_streams(Shape { num_prefill_workers: 1, num_decode_workers: 1, ..base });
    // Long, so that few gaps are those of a stream that begins again.
    quiet.workload.quiet = Duration::from_secs(60);
    quiet.workload.streams.output_tokens = 2_000;
    let cost = quiet.measured.as_ref().map(|measured| measured.workers[0].planned).unwrap();
    // Their mean is 1.
    let ratios = [(0.0, 0.95), (0.5, 0.95), (0.9, 1.0), (0.99, 1.52), (1.0, 2.0)];
    let measured = Some(measured(cost, &ratios));
    let (even, noisy) = (served(&quiet), served(&ServeConfig { measured, ..quiet.clone() }));
    let spread = |served: &Served| ms(&served.quiet_itl, 0.99) / ms(&served.quiet_itl, 0.5);
    assert!((spread(&even) - 1.0).abs() < 0.03 && (spread(&noisy) - 1.6).abs() < 0.1, "{}", spread(&noisy));
    let tokens = |served: &Served| served.report.num_tokens as f64 / served.report.time.as_secs_f64();
    assert!((tokens(&noisy) / tokens(&even) - 1.0).abs() < 0.05);
}
