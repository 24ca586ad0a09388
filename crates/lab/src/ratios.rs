//! Whole clusters in the simulation: how many workers should prefill, and where disaggregation loses.

use baton_sim::{
    Device, Durations, Faults, Layout, Load, Report as SimReport, Shape, SimConfig, WorkerShape,
};

use crate::report::Report;
use crate::{Cell, LabError};

/// Devices of each cluster.
const NUM_WORKERS: usize = 4;
/// Prompt tokens beside decoding, where a device does both.
const CHUNK: usize = 256;
const NUM_REQUESTS: usize = 64;
const SEED: u64 = 3;

/// How the devices of a cluster share the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Split {
    /// So many prefill, the others decode.
    Apart(usize),
    /// Each does both, prompts in chunks.
    Together,
}

type Named = (&'static str, Split);

/// Every split, to find the right ratio.
const ALL: &[Named] = &[
    ("1P3D", Split::Apart(1)),
    ("2P2D", Split::Apart(2)),
    ("3P1D", Split::Apart(3)),
    ("4C", Split::Together),
];
/// Whether disaggregation pays.
const TWO: &[Named] = &[("2P2D", Split::Apart(2)), ("4C", Split::Together)];

/// What a cluster is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scene {
    pub(crate) name: &'static str,
    prompt: usize,
    reply: u32,
    interval_ms: u64,
    link_gbps: f64,
    splits: &'static [Named],
}

pub(crate) const SCENES: [Scene; 4] = [
    Scene {
        name: "2,048 in, 128 out, 20/s, 400 Gb/s",
        prompt: 2_048,
        reply: 128,
        interval_ms: 50,
        link_gbps: 400.0,
        splits: ALL,
    },
    Scene {
        name: "6,144 in, 32 out, 12.5/s, 400 Gb/s",
        prompt: 6_144,
        reply: 32,
        interval_ms: 80,
        link_gbps: 400.0,
        splits: ALL,
    },
    Scene {
        name: "128 in, 256 out, 100/s, 400 Gb/s",
        prompt: 128,
        reply: 256,
        interval_ms: 10,
        link_gbps: 400.0,
        splits: TWO,
    },
    Scene {
        name: "2,048 in, 128 out, 20/s, 10 Gb/s",
        prompt: 2_048,
        reply: 128,
        interval_ms: 50,
        link_gbps: 10.0,
        splits: TWO,
    },
];

/// Llama 3 8B on H200s, without prefix caches and without faults.
pub(crate) fn run(scene: &Scene, split: Split) -> Result<SimReport, LabError> {
    let base = Shape::llama_on_h200();
    let (num_prefill_workers, layout) = match split {
        Split::Apart(prefill) => (prefill, Layout::Disaggregated),
        Split::Together => (0, Layout::Colocated),
    };
    let shape = Shape {
        num_prefill_workers,
        num_decode_workers: NUM_WORKERS - num_prefill_workers,
        layout,
        max_local_tokens: 16,
        worker: WorkerShape { local_prefill_tokens: CHUNK, ..base.worker },
        device: Device { link_bytes_per_s: 0.9 * scene.link_gbps * 1e9 / 8.0, ..base.device },
        load: Load {
            num_requests: NUM_REQUESTS,
            interval_ms: scene.interval_ms,
            prompt_tokens: (scene.prompt, scene.prompt),
            new_tokens: (scene.reply, scene.reply),
            ..base.load
        },
        ..base
    };
    let config = SimConfig { seed: SEED, faults: Faults::None, shape: Some(shape) };
    baton_sim::run(&config)
        .map_err(|violation| LabError::Broken { what: "stall", why: violation.to_string() })
}

fn ms(durations: &Durations, q: f64) -> f64 {
    durations.quantile(q).as_secs_f64() * 1e3
}

pub(crate) fn add(report: &mut Report) -> Result<(), LabError> {
    let mut rows = Vec::new();
    for scene in &SCENES {
        for (nth, &(name, split)) in scene.splits.iter().enumerate() {
            let SimReport { ttft, itl, .. } = run(scene, split)?;
            let [ttft_50, ttft_95] = [0.5, 0.95].map(|q| Cell::Real(ms(&ttft, q), 0));
            let [itl_50, itl_99, longest] = [0.5, 0.99, 1.0].map(|q| Cell::Real(ms(&itl, q), 1));
            let load = if nth == 0 { scene.name } else { "" };
            rows.push(vec![load.into(), name.into(), ttft_50, ttft_95, itl_50, itl_99, longest]);
        }
    }
    report.table(
        "How many of four should prefill, and where disaggregation loses: H200s with Llama 3 8B in the simulation",
        &[
            ("prompt, reply, rate, link", ""),
            ("workers", ""),
            ("TTFT p50", "ms"),
            ("TTFT p95", "ms"),
            ("ITL p50", "ms"),
            ("ITL p99", "ms"),
            ("longest ITL", "ms"),
        ],
        rows,
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(scene: usize, split: Split) -> SimReport {
        let report = run(&SCENES[scene], split).unwrap();
        assert_eq!(report.num_finished, report.num_requests);
        report
    }

    #[test]
    fn a_prompt_elsewhere_leaves_replies_smooth_and_needs_enough_prefill_workers() {
        let (apart, together) = (of(0, Split::Apart(2)), of(0, Split::Together));
        assert!(ms(&apart.itl, 0.99) < ms(&together.itl, 0.99));
        assert!(ms(&of(1, Split::Apart(1)).ttft, 0.95) > 2.0 * ms(&of(1, Split::Apart(3)).ttft, 0.95));
    }

    #[test]
    fn disaggregation_loses_over_a_slow_link_and_gains_nothing_from_short_prompts() {
        assert!(ms(&of(3, Split::Apart(2)).itl, 1.0) > 20.0 * ms(&of(3, Split::Together).itl, 1.0));
        let (apart, together) = (of(2, Split::Apart(2)), of(2, Split::Together));
        assert!(ms(&apart.itl, 0.99) > 0.9 * ms(&together.itl, 0.99));
        assert!(ms(&apart.ttft, 0.95) > 0.9 * ms(&together.ttft, 0.95));
    }
}
