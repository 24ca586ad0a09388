//! Clusters as large as people deploy: a request costs what it costs in a small one.

use std::time::Instant;

use baton_sim::{Served, scaled, serve};

fn served(num_workers: usize, num_requests: u32) -> Served {
    let config = scaled(1, num_workers, num_requests).unwrap();
    let began = Instant::now();
    let served = serve(&config).unwrap_or_else(|violation| panic!("{violation}"));
    let (took, events) = (began.elapsed(), served.report.num_events as f64 / f64::from(num_requests));
    println!(
        "{num_workers:5} workers, {num_requests} requests: {:.2} s, {:.0} us and {events:.0} events a request; ttft p50 {:.1?} p99 {:.1?}, itl p50 {:.1?} p99 {:.1?}",
        took.as_secs_f64(),
        took.as_secs_f64() / f64::from(num_requests) * 1e6,
        served.ttft.quantile(0.5),
        served.ttft.quantile(0.99),
        served.itl.quantile(0.5),
        served.itl.quantile(0.99),
    );
    served
}

/// Events are what a run's time goes into, and their number does not depend on the machine.
#[test]
fn a_request_costs_as_many_events_in_a_large_cluster_as_in_a_small_one() {
    let clusters = [(10, 1_000), (200, 3_000)].map(|(workers, requests)| {
        let served = served(workers, requests);
        assert_eq!((served.num_answered, served.report.num_finished), (requests.into(), requests.into()));
        assert_eq!(served.report.num_tokens, u64::from(requests) * 128);
        served.report.num_events as f64 / f64::from(requests)
    });
    let [small, large] = clusters;
    assert!((large / small - 1.0).abs() < 0.15, "{small} events a request, then {large}");
}
