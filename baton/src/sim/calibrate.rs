//! `baton sim --calibrate`: the clusters of a comparison that ran, simulated with what their workers measured.
//!
//! Each cluster gets the arrivals that the live one got, at the same times, workers configured alike, and steps that take what each worker measured of its own:
//! a cost for each kind of step, and how far steps of that kind were from it. Nothing of what is compared, gaps and first tokens as clients saw them, goes
//! into the simulation.

use std::path::Path;
use std::time::Duration;

use baton_scheduler::StepCost;
use baton_sim::workload::{Arrival, Prompt, Streams, TRACE_BLOCK_TOKENS, Workload};
use baton_sim::{
    Device, DoorLimits, Layout as Placed, Measured, MeasuredKind, MeasuredSteps, Policy, ServeConfig, Served,
    Shape, WorkerShape, serve,
};
use serde::{Deserialize, Serialize};

use super::report::Quantiles;
use crate::bench::compare::layout::{Layout, Split};
use crate::bench::compare::measured::{self, MeasuredWorker};
use crate::bench::compare::report::Sent;
use crate::bench::print;
use crate::exit::Failure;

/// What a comparison wrote, as far as it is needed here.
#[derive(Debug, Deserialize)]
struct Compared {
    load: Load,
    disaggregated: Live,
    colocated: Vec<Colocated>,
}

#[derive(Debug, Deserialize)]
struct Load {
    seed: u64,
    streams: u32,
    stream_tokens: u32,
    stream_prompt_tokens: u32,
    quiet_s: f64,
    sent: Vec<Sent>,
}

#[derive(Debug, Deserialize)]
struct Live {
    itl_ms: Option<Summary>,
    ttft_ms: Option<Summary>,
    workers: Vec<MeasuredWorker>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Summary {
    p50: f64,
    p99: f64,
}

#[derive(Debug, Deserialize)]
struct Colocated {
    layout: Split,
    chunk: Option<u32>,
    #[serde(flatten)]
    live: Live,
}

/// A figure of a cluster, live and simulated.
#[derive(Debug, Serialize)]
struct Row {
    cluster: String,
    figure: &'static str,
    live_ms: f64,
    simulated_ms: f64,
    /// simulated / live - 1.
    off_by: f64,
}

/// All clusters.
#[derive(Debug, Default, Serialize)]
struct Calibration {
    rows: Vec<Row>,
    /// Clusters that can't be simulated, since a worker of theirs took too few steps to say what one costs.
    unknown: Vec<String>,
}

/// Simulates and prints.
///
/// # Errors
/// [`Failure::Usage`] for a file that is none of a comparison or lacks what is needed; [`Failure::Unexpected`] with the first rule that broke.
pub(super) fn run(path: &Path, json: bool) -> Result<(), Failure> {
    let bad = |why: String| Failure::Usage(format!("--calibrate {}: {why}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
    let calibration = compare(&text).map_err(|failure| match failure {
        Failure::Usage(why) => bad(why),
        other => other,
    })?;
    print(&calibration, &calibration.table(), json)
}

fn compare(text: &str) -> Result<Calibration, Failure> {
    let compared: Compared =
        serde_json::from_str(text).map_err(|error| Failure::Usage(format!("no comparison: {error}")))?;
    let mut calibration = Calibration::default();
    calibration.add(&compared.load, Layout::Disaggregated, &compared.disaggregated)?;
    for Colocated { layout, chunk, live } in &compared.colocated {
        let layout = Layout::Colocated { split: *layout, chunk: *chunk };
        calibration.add(&compared.load, layout, live)?;
    }
    if calibration.rows.is_empty() {
        let why = "no cluster's workers took enough steps to say what one costs: compare for longer";
        return Err(Failure::Usage(why.to_owned()));
    }
    Ok(calibration)
}

impl Calibration {
    fn add(&mut self, load: &Load, layout: Layout, live: &Live) -> Result<(), Failure> {
        match config(load, layout, live)? {
            Some(config) => self.rows.extend(rows(&config, layout, live)?),
            None => self.unknown.push(layout.name()),
        }
        Ok(())
    }

    fn table(&self) -> String {
        let mut text =
            format!("{:<24}{:<10}{:>12}{:>14}{:>8}\n", "cluster", "ms", "live", "simulated", "off");
        for Row { cluster, figure, live_ms, simulated_ms, off_by } in &self.rows {
            let off = 100.0 * off_by;
            text.push_str(&format!(
                "{cluster:<24}{figure:<10}{live_ms:>12.1}{simulated_ms:>14.1}{off:>+7.0}%\n"
            ));
        }
        let worst = self.rows.iter().map(|row| row.off_by.abs()).fold(0.0, f64::max);
        text.push_str(&format!("at worst {:.0} % off\n", 100.0 * worst));
        for cluster in &self.unknown {
            text.push_str(&format!(
                "{cluster}: not simulated, a worker took too few steps to say what one costs\n"
            ));
        }
        text
    }
}

/// Runs of each cluster, of which every figure's median counts: where two workers are about as good for a burst's last prompt, one run
/// sends it to the one and the next to the other, as live runs do.
const RUNS: u64 = 9;

/// What the runs say of TTFT and ITL, figure by figure.
fn medians(config: &ServeConfig) -> Result<[Summary; 2], Failure> {
    let mut figures: [Vec<f64>; 4] = Default::default();
    for run in 0..RUNS {
        let config = ServeConfig { seed: config.seed.wrapping_add(run), ..config.clone() };
        let Served { ttft, itl, .. } =
            serve(&config).map_err(|violation| Failure::Unexpected(violation.to_string()))?;
        let (ttft, itl) = (Quantiles::of(&ttft), Quantiles::of(&itl));
        for (figure, value) in figures.iter_mut().zip([ttft.p50, ttft.p99, itl.p50, itl.p99]) {
            figure.push(value);
        }
    }
    let [ttft_p50, ttft_p99, itl_p50, itl_p99] = figures.map(|mut values| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    });
    Ok([Summary { p50: ttft_p50, p99: ttft_p99 }, Summary { p50: itl_p50, p99: itl_p99 }])
}

/// The four figures of a cluster.
fn rows(config: &ServeConfig, layout: Layout, live: &Live) -> Result<Vec<Row>, Failure> {
    let [ttft, itl] = medians(config)?;
    let row = |figure, live_ms: f64, simulated_ms: f64| Row {
        cluster: layout.name(),
        figure,
        live_ms,
        simulated_ms,
        off_by: simulated_ms / live_ms - 1.0,
    };
    let mut rows = Vec::new();
    if let Some(live) = live.ttft_ms {
        rows.push(row("TTFT p50", live.p50, ttft.p50));
        rows.push(row("TTFT p99", live.p99, ttft.p99));
    }
    if let Some(live) = live.itl_ms {
        rows.push(row("ITL p50", live.p50, itl.p50));
        rows.push(row("ITL p99", live.p99, itl.p99));
    }
    Ok(rows)
}

/// As `up` and the workers are configured by default: sequences, waiting ones and open prompts of a worker, and the bounds of its steps.
const MAX_NUM_SEQS: usize = 32;
const MAX_QUEUE: usize = 256;
const MAX_OPEN_PROMPTS: usize = 4;
const BLOCK_TOKENS: usize = 16;
const LOCAL_PREFILL_TOKENS: u32 = 256;
const MAX_STEP_MS: u32 = 200;
const MAX_STEP_GROWTH: f64 = 0.1;
/// Between two processes of one host: bytes a second, and microseconds of a message. No first token waits for either.
const LINK_BYTES_PER_S: f64 = 1e9;
const LATENCY_US: (u64, u64) = (100, 300);

/// `None`: a worker says no cost, or none decodes.
fn config(load: &Load, layout: Layout, live: &Live) -> Result<Option<ServeConfig>, Failure> {
    let workload = workload(load)?;
    let mut workers: Vec<&MeasuredWorker> = live.workers.iter().collect();
    workers.sort_by_key(|worker| worker.role != "prefill");
    let num_prefill_workers = workers.iter().filter(|worker| worker.role == "prefill").count();
    let steps: Option<Vec<MeasuredSteps>> = workers.iter().map(|worker| steps(worker)).collect();
    let (Some(mut steps), true) = (steps, workers.len() > num_prefill_workers) else {
        return Ok(None);
    };
    let (prefills, decodes) = steps.split_at_mut(num_prefill_workers);
    share_kinds(prefills);
    share_kinds(decodes);
    let longest = workload.arrivals.iter().map(|arrival| arrival.prompt.num_tokens()).max().unwrap_or(1);
    let limits = layout.limits(longest);
    let blocks = |role: &str| workers.iter().filter(|w| w.role == role).filter_map(|w| w.blocks).min();
    let blocks = |role| blocks(role).map_or(4_096, |blocks| blocks as usize);
    let base = Shape::llama_on_h200();
    let shape = Shape {
        num_prefill_workers,
        num_decode_workers: workers.len() - num_prefill_workers,
        layout: match layout {
            Layout::Disaggregated => Placed::Disaggregated,
            Layout::Colocated { .. } => Placed::Colocated,
        },
        policy: Policy::KvAware,
        max_local_tokens: 16,
        door: DoorLimits { max_concurrent: 256, max_queue: 256 },
        worker: WorkerShape {
            block_size: BLOCK_TOKENS,
            prefill_blocks: blocks("prefill"),
            decode_blocks: blocks("decode"),
            max_step_tokens: limits.step_tokens as usize,
            local_prefill_tokens: limits.piece.unwrap_or(LOCAL_PREFILL_TOKENS) as usize,
            max_step_ms: f64::from(limits.step_ms.unwrap_or(MAX_STEP_MS)),
            max_step_growth: MAX_STEP_GROWTH,
            max_num_seqs: MAX_NUM_SEQS,
            max_queue: MAX_QUEUE,
            max_open_prompts: MAX_OPEN_PROMPTS,
            cache: true,
            ..base.worker
        },
        device: Device {
            link_bytes_per_s: LINK_BYTES_PER_S,
            latency_us: LATENCY_US,
            ..Device::SMOLLM2_ON_CPU
        },
        ..base
    };
    let measured = Some(Measured { workers: steps });
    Ok(Some(ServeConfig { seed: load.seed, shape, workload, num_warm_up: 0, contents: false, measured }))
}

/// `None` for a worker that says too little, or what can't be.
fn steps(worker: &MeasuredWorker) -> Option<MeasuredSteps> {
    let planned = cost([worker.fixed_s?, worker.per_token_s?, worker.per_context_token_s?])?;
    let kind = |kind: &measured::MeasuredKind| {
        let is_told =
            |(share, ratio): &(f64, f64)| (0.0..=1.0).contains(share) && ratio.is_finite() && *ratio > 0.0;
        let ascend = kind.ratios.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1);
        (ascend && kind.ratios.iter().all(is_told)).then_some(())?;
        Some(MeasuredKind {
            from_prompt_tokens: kind.from_prompt_tokens,
            cost: cost([kind.fixed_s, kind.per_token_s, kind.per_context_token_s])?,
            ratios: kind.ratios.clone(),
        })
    };
    let kinds: Vec<MeasuredKind> = worker.kinds.iter().map(kind).collect::<Option<_>>()?;
    let ascend = kinds.is_sorted_by(|a, b| a.from_prompt_tokens < b.from_prompt_tokens);
    (!kinds.is_empty() && ascend).then_some(MeasuredSteps { planned, kinds })
}

/// A worker to which no step of some kind came, or one only, takes what another one of its role measured: it may get more in the simulation, and
/// a single short prompt says nothing of a long one.
fn share_kinds(workers: &mut [MeasuredSteps]) {
    // Of several steps no two took exactly what is expected of them.
    let is_of_several = |kind: &MeasuredKind| {
        let ratios = || kind.ratios.iter().map(|(_, ratio)| *ratio);
        ratios().any(|ratio| Some(ratio) != ratios().next())
    };
    let mut all: Vec<MeasuredKind> = workers.iter().flat_map(|worker| worker.kinds.iter().cloned()).collect();
    all.sort_by_key(|kind| !is_of_several(kind));
    for worker in workers {
        for kind in &all {
            match worker.kinds.iter_mut().find(|known| known.from_prompt_tokens == kind.from_prompt_tokens) {
                Some(known) if is_of_several(known) => {}
                Some(known) if is_of_several(kind) => *known = kind.clone(),
                Some(_) => {}
                None => worker.kinds.push(kind.clone()),
            }
        }
        worker.kinds.sort_by_key(|kind| kind.from_prompt_tokens);
    }
}

fn cost(parts: [f64; 3]) -> Option<StepCost> {
    let is_cost =
        parts.iter().all(|part| part.is_finite() && *part >= 0.0) && parts.iter().sum::<f64>() > 0.0;
    let [fixed_s, per_token_s, per_context_token_s] = parts;
    is_cost.then_some(StepCost { fixed_s, per_token_s, per_context_token_s })
}

/// Seconds and tokens that a comparison can have: what is beyond was not written by one.
const MAX_SECONDS: f64 = 86_400.0;
const MAX_TOKENS: u32 = 1 << 24;

fn workload(load: &Load) -> Result<Workload, Failure> {
    let seconds = |field: &str, seconds: f64| match (0.0..=MAX_SECONDS).contains(&seconds) {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => Err(Failure::Usage(format!("{field} is {seconds}: from 0 to {MAX_SECONDS}"))),
    };
    let tokens = |field: &str, tokens: u32| match (1..=MAX_TOKENS).contains(&tokens) {
        true => Ok(tokens),
        false => Err(Failure::Usage(format!("{field} is {tokens}: from 1 to {MAX_TOKENS}"))),
    };
    let arrival = |(nth, sent): (usize, &Sent)| {
        let num = tokens("load.sent.prompt_tokens", sent.prompt_tokens)?;
        let prompt = match sent.hash_ids.is_empty() {
            true => Prompt::Unique { nth: nth as u64, tokens: num },
            false => Prompt::Blocks { ids: sent.hash_ids.clone(), block: TRACE_BLOCK_TOKENS, tokens: num },
        };
        let output_tokens = tokens("load.sent.output_tokens", sent.output_tokens)?;
        Ok(Arrival { at: seconds("load.sent.at_s", sent.at_s)?, prompt, output_tokens })
    };
    let arrivals = load.sent.iter().enumerate().map(arrival).collect::<Result<Vec<_>, Failure>>()?;
    if arrivals.is_empty() {
        return Err(Failure::Usage("load.sent is empty: nothing arrived".to_owned()));
    }
    let streams = Streams {
        num: load.streams,
        prompt_tokens: tokens("load.stream_prompt_tokens", load.stream_prompt_tokens)?,
        output_tokens: tokens("load.stream_tokens", load.stream_tokens)?,
    };
    Ok(Workload { streams, quiet: seconds("load.quiet_s", load.quiet_s)?, arrivals })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// What its scheduler plans with is half of what every kind of step takes.
    fn worker(role: &str, [fixed_s, per_token_s, per_context_token_s]: [f64; 3]) -> Value {
        let kind = |kind: &str, from: usize| {
            json!({"kind": kind, "from_prompt_tokens": from, "fixed_s": fixed_s, "per_token_s": per_token_s,
                   "per_context_token_s": per_context_token_s, "ratios": [[0.0, 1.0], [0.5, 1.0], [1.0, 1.0]]})
        };
        json!({"role": role, "blocks": 2_000, "fixed_s": fixed_s / 2.0, "per_token_s": per_token_s / 2.0,
               "per_context_token_s": per_context_token_s / 2.0, "residual": 0.05,
               "kinds": [kind("decode", 0), kind("few", 1), kind("many", 64)]})
    }

    fn summary([p50, p90, p99, max]: [f64; 4]) -> Value {
        json!({"p50": p50, "p90": p90, "p99": p99, "max": max, "mean": p50, "count": 100})
    }

    /// Steps of 8 ms, prompts of 1,000 tokens that take 1 s, one every 4 s: TTFT is 1 s, ITL 8 ms, and colocated in one piece a gap of a second.
    fn compared() -> Value {
        let live = |workers: Vec<Value>| json!({"itl_ms": summary([8.0, 8.0, 8.0, 9.0]), "ttft_ms": summary([1_000.0, 1_000.0, 1_000.0, 1_000.0]), "workers": workers});
        let sent: Vec<Value> = (0..5)
            .map(|nth| json!({"at_s": f64::from(nth) * 4.0, "prompt_tokens": 1_000, "output_tokens": 4}))
            .collect();
        let prefill = worker("prefill", [0.0, 1e-3, 0.0]);
        let decode = worker("decode", [8e-3, 0.0, 0.0]);
        let both = worker("decode", [8e-3, 1e-3, 0.0]);
        let mut colocated = live(vec![both]);
        colocated["layout"] = json!("1x2");
        colocated["chunk"] = Value::Null;
        json!({
            "load": {"seed": 1, "streams": 2, "stream_tokens": 500, "stream_prompt_tokens": 16, "quiet_s": 1.0, "sent": sent},
            "disaggregated": live(vec![decode, prefill]),
            "colocated": [colocated],
        })
    }

    #[test]
    fn who_had_one_step_of_a_kind_takes_it_from_who_had_several() {
        let kind = |from, fixed_s, ratios: &[f64]| MeasuredKind {
            from_prompt_tokens: from,
            cost: StepCost { fixed_s, per_token_s: 0.0, per_context_token_s: 0.0 },
            ratios: ratios.iter().map(|ratio| (0.5, *ratio)).collect(),
        };
        let several = [0.9, 1.1];
        let one = [1.0, 1.0];
        let steps = |kinds| MeasuredSteps {
            planned: StepCost { fixed_s: 1.0, per_token_s: 0.0, per_context_token_s: 0.0 },
            kinds,
        };
        let mut workers = [
            steps(vec![kind(0, 1.0, &several), kind(64, 9.0, &one)]),
            steps(vec![kind(0, 2.0, &several), kind(1, 5.0, &one), kind(64, 3.0, &several)]),
        ];
        share_kinds(&mut workers);
        let of = |worker: &MeasuredSteps| {
            worker.kinds.iter().map(|kind| (kind.from_prompt_tokens, kind.cost.fixed_s)).collect::<Vec<_>>()
        };
        assert_eq!(of(&workers[0]), [(0, 1.0), (1, 5.0), (64, 3.0)]);
        assert_eq!(of(&workers[1]), [(0, 2.0), (1, 5.0), (64, 3.0)]);
    }

    #[test]
    fn what_was_measured_decides_what_is_simulated() {
        let calibration = compare(&compared().to_string()).unwrap();
        let rows = &calibration.rows;
        let of = |cluster: &str, figure: &str| {
            let found = rows.iter().find(|row| row.cluster == cluster && row.figure == figure);
            found.unwrap().simulated_ms
        };
        let near = |value: f64, expected: f64| (value / expected - 1.0).abs() < 0.03;
        assert!(near(of("disaggregated", "TTFT p50"), 1_008.0), "{rows:?}");
        assert!(near(of("disaggregated", "ITL p50"), 8.0) && near(of("disaggregated", "ITL p99"), 8.0));
        let whole = "1x2, in one piece";
        assert!(near(of(whole, "TTFT p50"), 1_014.0) && near(of(whole, "ITL p50"), 10.0), "{rows:?}");
        assert_eq!(rows.len(), 8);
        assert!(calibration.table().contains("at worst"), "{}", calibration.table());
    }

    #[test]
    fn a_file_that_lacks_something_is_told_what() {
        let broken = |change: fn(&mut Value)| {
            let mut value = compared();
            change(&mut value);
            compare(&value.to_string()).unwrap_err().to_string()
        };
        let texts = [
            (broken(|v| v["load"]["sent"] = json!([])), "load.sent is empty"),
            (broken(|v| v["load"]["quiet_s"] = json!(-1.0)), "load.quiet_s is -1"),
            (broken(|v| v["load"]["stream_tokens"] = json!(0)), "load.stream_tokens is 0"),
            (broken(|v| _ = v["load"].as_object_mut().unwrap().remove("sent")), "missing field `sent`"),
        ];
        for (text, expected) in texts {
            assert!(text.contains(expected), "{text}");
        }
        assert!(compare("nothing").is_err_and(|failure| failure.code() == 2));
    }

    #[test]
    fn a_cluster_whose_workers_say_no_cost_is_left_out_by_name() {
        let mut value = compared();
        value["disaggregated"]["workers"][0]["fixed_s"] = Value::Null;
        let calibration = compare(&value.to_string()).unwrap();
        assert_eq!(
            (calibration.rows.len(), calibration.unknown.as_slice()),
            (4, &["disaggregated".to_owned()][..])
        );
        assert!(calibration.table().contains("disaggregated: not simulated"), "{}", calibration.table());
        value["disaggregated"] = compared()["disaggregated"].clone();
        value["disaggregated"]["workers"][0]["kinds"][1]["ratios"][1][1] = json!(0.5);
        assert_eq!(compare(&value.to_string()).unwrap().unknown, ["disaggregated"]);
        value["colocated"][0]["workers"] = json!([]);
        assert!(
            compare(&value.to_string())
                .is_err_and(|failure| failure.to_string().contains("compare for longer"))
        );
    }
}
