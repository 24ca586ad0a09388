//! Clusters of the size that people deploy: what they reach, and which placement serves them best.

use std::time::{Duration, Instant};

use baton_sim::{Device, Faults, Layout, Load, Policy, Report, Shape, SimConfig, WorkerShape, run};

fn report_of(seed: u64, shape: Shape) -> Report {
    let began = Instant::now();
    match run(&SimConfig { seed, faults: Faults::None, shape: Some(shape) }) {
        Ok(report) => {
            println!("seed {seed}, {} events, {:.1?}", report.num_events, began.elapsed());
            report
        }
        Err(violation) => panic!("{violation}"),
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Two H200s that prefill and two that decode, at two thirds of what the two can prefill.
#[test]
fn a_realistic_cluster_serves_its_load() {
    let report = report_of(1, Shape::llama_on_h200());
    println!("{report}");
    assert_eq!((report.num_finished, report.num_tokens), (200, 200 * 128));
    // 2,048 tokens take 2 * 8.03e9 * 2,048 flops and attention: 58 ms at 0.6 of the peak. Half of all wait for less than one other prompt.
    let (ttft, itl) = (report.ttft.quantile(0.5), report.itl.quantile(0.5));
    assert!(ttft > Duration::from_millis(55) && ttft < Duration::from_millis(130), "{ttft:?}");
    // All weights and a few dozen contexts of 0.3 GB once a step: 4.2 ms and more.
    assert!(itl > Duration::from_millis(4) && itl < Duration::from_millis(12), "{itl:?}");
    // No prompt runs beside decoding sequences, so the tail is not far from the median.
    assert!(report.itl.quantile(0.99) < 2 * itl, "{:?}", report.itl.quantile(0.99));
}

/// What disaggregation is for: on the same four devices together, a prompt stalls the tokens of others for as long as it takes, or
/// in chunks takes a little from each of many steps.
#[test]
fn colocated_workers_stall_where_disaggregated_ones_do_not() {
    let apart = Shape::llama_on_h200();
    let together = |local_prefill_tokens| Shape {
        num_prefill_workers: 0,
        num_decode_workers: 4,
        layout: Layout::Colocated,
        worker: WorkerShape { local_prefill_tokens, ..apart.worker },
        ..apart
    };
    let shapes =
        [("disaggregated", apart), ("whole prompts", together(2_048)), ("chunks of 256", together(256))];
    let reports = shapes.map(|(name, shape)| {
        let report = report_of(2, shape);
        let (ttft, itl) = (&report.ttft, &report.itl);
        let [ttft_99, itl_50, itl_99] = [ttft.quantile(0.99), itl.quantile(0.5), itl.quantile(0.99)].map(ms);
        println!("{name:14} ttft p99 {ttft_99:.0} ms, itl p50 {itl_50:.1} ms, p99 {itl_99:.1} ms");
        report
    });
    let [apart, whole, chunked] = reports.map(|report| report.itl.quantile(0.99));
    assert!(apart * 5 < whole, "{apart:?} {whole:?}");
    assert!(apart < chunked, "{apart:?} {chunked:?}");
}

/// Near what the fleet can do without caches. (With half of that load no queue is long, and the tails differ little; that of the aware one is
/// then longer by the few long prompts that many short ones pass.)
fn shared_prefixes(policy: Policy) -> Shape {
    let shape = Shape::llama_on_h200();
    Shape {
        num_prefill_workers: 4,
        num_decode_workers: 4,
        policy,
        worker: WorkerShape { cache: true, prefill_blocks: 4_096, ..shape.worker },
        device: Device::LLAMA_ON_A100,
        // 64 beginnings of 1,536 tokens: more than one worker can keep, fewer than four together can.
        load: Load {
            num_requests: 600,
            interval_ms: 40,
            prompt_tokens: (1_600, 2_400),
            new_tokens: (16, 64),
            num_prefixes: 64,
            prefix_tokens: 1_536,
            shared_per_mille: 900,
            ..shape.load
        },
        ..shape
    }
}

#[test]
fn kv_aware_placement_computes_less_and_waits_no_longer() {
    let reports: Vec<(Policy, Report)> =
        Policy::ALL.into_iter().map(|policy| (policy, report_of(7, shared_prefixes(policy)))).collect();
    for (policy, report) in &reports {
        let (ttft, itl) = (&report.ttft, &report.itl);
        println!(
            "{:14} {:8} prompt tokens computed, {:7} cached; ttft p50 {:.0} ms, p99 {:.0} ms; itl p99 {:.1} ms",
            policy.name(),
            report.num_prompt_tokens,
            report.num_cached_tokens,
            ms(ttft.quantile(0.5)),
            ms(ttft.quantile(0.99)),
            ms(itl.quantile(0.99)),
        );
        assert_eq!(report.num_finished, 600);
    }
    let of = |wanted| reports.iter().find(|(policy, _)| *policy == wanted).map(|(_, report)| report);
    let (Some(aware), Some(robin)) = (of(Policy::KvAware), of(Policy::RoundRobin)) else { panic!("not run") };
    assert!(aware.num_prompt_tokens * 10 < robin.num_prompt_tokens * 8, "less than 0.8 of the work");
    assert!(aware.ttft.quantile(0.99) <= robin.ttft.quantile(0.99));
    assert!(aware.ttft.quantile(0.5) <= robin.ttft.quantile(0.5));
}
