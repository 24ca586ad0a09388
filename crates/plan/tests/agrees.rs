//! The model against the simulator.

use baton_plan::{Cluster, Figures, PlanInput, Slo, device, figures, judge, model};

struct Point {
    model: &'static str,
    device: &'static str,
    rate: f64,
    tokens: (u32, u32),
    link_gbps: f64,
    cluster: Cluster,
}

const fn apart(prefill: u32, decode: u32) -> Cluster {
    Cluster::Disaggregated { prefill, decode }
}

const fn together(workers: u32, chunk: u32) -> Cluster {
    Cluster::Colocated { workers, chunk }
}

const fn point(rate: f64, tokens: (u32, u32), cluster: Cluster) -> Point {
    Point { model: "llama-3-8b", device: "h200", rate, tokens, link_gbps: 400.0, cluster }
}

impl Point {
    fn input(&self) -> PlanInput {
        PlanInput {
            model: model(self.model).unwrap(),
            device: device(self.device).unwrap(),
            rate: self.rate,
            input_tokens: self.tokens.0,
            output_tokens: self.tokens.1,
            slo: Slo { ttft_ms: 1e6, itl_ms: 1e6 },
            link_gbps: self.link_gbps,
        }
    }
}

/// As many as the model computes.
const NUM_REQUESTS: u32 = 12_000;

/// How far the model is off in each figure.
fn off(point: &Point) -> [f64; 4] {
    let modelled = figures(&point.input(), point.cluster).unwrap();
    let judged = judge(&point.input(), point.cluster, NUM_REQUESTS).unwrap();
    assert_eq!(judged.num_answered, u64::from(NUM_REQUESTS));
    let four = |f: &Figures| [f.ttft_p50_ms, f.ttft_p99_ms, f.itl_p50_ms, f.itl_p99_ms];
    let (modelled, judged) = (four(&modelled), four(&judged.figures));
    let off = std::array::from_fn(|nth| modelled[nth] / judged[nth] - 1.0);
    println!(
        "{} on {}, {}/s of {:?}, {} Gb/s, {:?}: ttft p50, p99, itl p50, p99 in ms {modelled:.1?}, simulated {judged:.1?}: {:+.1?} %",
        point.model,
        point.device,
        point.rate,
        point.tokens,
        point.link_gbps,
        point.cluster,
        off.map(|off: f64| 100.0 * off)
    );
    off
}

/// Of the four figures, how far each may be off at most.
fn agree(points: &[Point], most: [f64; 4]) {
    // All are printed, also when one is too far off.
    let offs: Vec<[f64; 4]> = points.iter().map(off).collect();
    for off in offs {
        assert!(off.iter().zip(most).all(|(off, most)| off.abs() < most), "{off:?}");
    }
}

#[test]
fn disaggregated_clusters_come_to_what_the_model_says() {
    let points = [
        point(20.0, (2_048, 128), apart(2, 1)),
        point(60.0, (1_024, 110), apart(4, 4)),
        Point { link_gbps: 100.0, ..point(8.0, (4_096, 110), apart(2, 2)) },
        // So short that the gap behind the first token is among the longest of a hundred.
        Point { device: "a100", model: "mistral-7b", ..point(6.0, (1_500, 64), apart(2, 1)) },
    ];
    agree(&points, [0.1; 4]);
}

#[test]
fn colocated_clusters_come_to_what_the_model_says() {
    let points = [point(20.0, (2_048, 128), together(4, 512)), point(30.0, (1_024, 110), together(4, 1_024))];
    agree(&points, [0.1; 4]);
}

/// Points that the model was not made with: few workers and many, small chunks and whole prompts, mostly idle and busy, another model on another device.
#[test]
fn and_elsewhere() {
    let points = [
        point(8.0, (2_048, 128), together(2, 256)),
        point(60.0, (512, 64), together(4, 512)),
        point(40.0, (2_048, 160), together(8, 2_048)),
        point(9.0, (4_096, 64), together(3, 1_024)),
        Point { device: "a100", model: "mistral-7b", ..point(6.0, (1_500, 200), together(3, 512)) },
    ];
    agree(&points, [0.1; 4]);
}
