//! A plan as JSON and for a person.

use std::fmt::Write;

use baton_plan::{Change, Cluster, Figures, Judged, Plan, PlanInput};
use serde::Serialize;

/// Everything that is told.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    input: Input,
    /// The one with the fewest workers.
    cheapest: Option<Choice>,
    /// Null where no number of workers keeps the objective.
    disaggregated: Option<Choice>,
    colocated: Option<Choice>,
    links: Links,
    /// In a sentence.
    verdict: String,
    sensitivity: Vec<Changed>,
    simulated: Vec<Simulated>,
}

#[derive(Debug, Serialize)]
struct Input {
    model: &'static str,
    model_source: &'static str,
    gpu: &'static str,
    gpu_source: &'static str,
    rate: f64,
    input_len: u32,
    output_len: u32,
    slo_ttft_ms: f64,
    slo_itl_ms: f64,
    link_gbps: f64,
}

/// A cluster that keeps the objective.
#[derive(Debug, Clone, Serialize)]
struct Choice {
    name: String,
    workers: u32,
    prefill: Option<u32>,
    decode: Option<u32>,
    chunk: Option<u32>,
    /// The largest rate at which it keeps the objective, for each of its GPUs.
    goodput_per_gpu: f64,
    #[serde(flatten)]
    figures: Numbers,
    batch: f64,
    exposed_p99_ms: f64,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Numbers {
    ttft_p50_ms: f64,
    ttft_p99_ms: f64,
    itl_p50_ms: f64,
    itl_p99_ms: f64,
}

/// Line rates that a prefill worker's link needs; null without such workers.
#[derive(Debug, Serialize)]
struct Links {
    /// To send what it computes.
    least_gbps: Option<f64>,
    /// To hide a transfer behind its prefill.
    hiding_gbps: f64,
}

#[derive(Debug, Serialize)]
struct Changed {
    input: &'static str,
    factor: f64,
    disaggregated: Option<String>,
    colocated: Option<String>,
}

/// What the simulator saw of a cluster, and how far the model is off.
#[derive(Debug, Serialize)]
struct Simulated {
    name: String,
    requests: u64,
    answered: u64,
    #[serde(flatten)]
    figures: Numbers,
    /// modelled / simulated - 1, at worst of the four.
    off_by: f64,
}

impl Numbers {
    const fn of(figures: &Figures) -> Self {
        let Figures { ttft_p50_ms, ttft_p99_ms, itl_p50_ms, itl_p99_ms, .. } = *figures;
        Self { ttft_p50_ms, ttft_p99_ms, itl_p50_ms, itl_p99_ms }
    }

    const fn all(&self) -> [f64; 4] {
        [self.ttft_p50_ms, self.ttft_p99_ms, self.itl_p50_ms, self.itl_p99_ms]
    }
}

fn name(cluster: Cluster) -> String {
    match cluster {
        Cluster::Disaggregated { prefill, decode } => format!("{prefill}P{decode}D"),
        Cluster::Colocated { workers, chunk } => format!("{workers} with chunks of {chunk}"),
    }
}

impl Choice {
    fn new((cluster, figures, rate): (Cluster, Figures, f64)) -> Self {
        let (prefill, decode, chunk) = match cluster {
            Cluster::Disaggregated { prefill, decode } => (Some(prefill), Some(decode), None),
            Cluster::Colocated { chunk, .. } => (None, None, Some(chunk)),
        };
        Self {
            name: name(cluster),
            workers: cluster.num_workers(),
            prefill,
            decode,
            chunk,
            goodput_per_gpu: rate / f64::from(cluster.num_workers()),
            figures: Numbers::of(&figures),
            batch: figures.batch,
            exposed_p99_ms: figures.exposed_p99_ms,
        }
    }
}

/// Goodputs that differ by less are alike.
const ALIKE: f64 = 1.03;

fn verdict(apart: Option<&Choice>, together: Option<&Choice>) -> String {
    let (apart, together) = match (apart, together) {
        (Some(apart), Some(together)) => (apart, together),
        (Some(_), None) => {
            return "Disaggregation wins: no number of colocated workers keeps this objective.".to_owned();
        }
        _ => {
            return "Disaggregation loses: no number of prefill and decode workers keeps this objective."
                .to_owned();
        }
    };
    let ratio = apart.goodput_per_gpu / together.goodput_per_gpu;
    let word = match (apart.workers.cmp(&together.workers), ratio) {
        (std::cmp::Ordering::Less, _) => "wins",
        (std::cmp::Ordering::Greater, _) => "loses",
        (_, ratio) if ratio > ALIKE => "wins by goodput",
        (_, ratio) if ratio < 1.0 / ALIKE => "loses by goodput",
        _ => "is alike",
    };
    format!(
        "Disaggregation {word}: {} GPUs and {:.2} requests/s for each of them, colocated {} and {:.2}.",
        apart.workers, apart.goodput_per_gpu, together.workers, together.goodput_per_gpu
    )
}

impl Report {
    pub(super) fn new(input: &PlanInput, plan: &Plan, changes: &[Change]) -> Self {
        let (apart, together) = (plan.disaggregated.map(Choice::new), plan.colocated.map(Choice::new));
        let changed = |change: &Change| Changed {
            input: change.input,
            factor: change.factor,
            disaggregated: change.disaggregated.map(name),
            colocated: change.colocated.map(name),
        };
        Self {
            input: Input {
                model: input.model.name,
                model_source: input.model.source,
                gpu: input.device.name,
                gpu_source: input.device.source,
                rate: input.rate,
                input_len: input.input_tokens,
                output_len: input.output_tokens,
                slo_ttft_ms: input.slo.ttft_ms,
                slo_itl_ms: input.slo.itl_ms,
                link_gbps: input.link_gbps,
            },
            cheapest: plan.cheapest().map(Choice::new),
            verdict: verdict(apart.as_ref(), together.as_ref()),
            links: Links {
                least_gbps: apart.is_some().then_some(plan.least_gbps),
                hiding_gbps: plan.hiding_gbps,
            },
            disaggregated: apart,
            colocated: together,
            sensitivity: changes.iter().map(changed).collect(),
            simulated: Vec::new(),
        }
    }

    /// Takes up what the simulator saw of a cluster.
    pub(super) fn judged(&mut self, cluster: Cluster, figures: &Figures, judged: &Judged) {
        let (modelled, simulated) = (Numbers::of(figures), Numbers::of(&judged.figures));
        let off = modelled.all().into_iter().zip(simulated.all()).map(|(ours, theirs)| ours / theirs - 1.0);
        self.simulated.push(Simulated {
            name: name(cluster),
            requests: judged.num_requests,
            answered: judged.num_answered,
            figures: simulated,
            off_by: off.max_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap_or(0.0),
        });
    }

    /// The same for a person.
    pub(super) fn table(&self) -> String {
        let i = &self.input;
        let mut text = format!(
            "{} on {}: {} requests/s, prompts of {} and answers of {} tokens, links of {} Gb/s\n99 in 100 first tokens within {} ms, 99 in 100 gaps within {} ms\n\
             model: {}; device: {}\n\n",
            i.model,
            i.gpu,
            i.rate,
            i.input_len,
            i.output_len,
            i.link_gbps,
            i.slo_ttft_ms,
            i.slo_itl_ms,
            i.model_source,
            i.gpu_source
        );
        let _ = writeln!(
            text,
            "{:<16}{:<24}{:>5}{:>16}{:>10}{:>10}{:>10}{:>10}{:>8}",
            "", "workers", "GPUs", "goodput a GPU", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "batch"
        );
        for (kind, choice) in [("disaggregated", &self.disaggregated), ("colocated", &self.colocated)] {
            text.push_str(&row(kind, choice.as_ref()));
        }
        let _ = writeln!(text, "\n{}", self.verdict);
        if let Some(cheapest) = &self.cheapest {
            let _ = writeln!(text, "Cheapest: {}.", cheapest.name);
        }
        if let Some(least) = self.links.least_gbps {
            let _ = writeln!(
                text,
                "A prefill worker's link needs {least:.1} Gb/s to send what it computes; from {:.1} Gb/s on a transfer is hidden behind its prefill.",
                self.links.hiding_gbps
            );
        }
        self.add_sensitivity(&mut text);
        self.add_simulated(&mut text);
        text
    }

    fn add_sensitivity(&self, text: &mut String) {
        let _ = writeln!(text, "\n{:<44}{:<18}colocated", "with", "disaggregated");
        for Changed { input, factor, disaggregated, colocated } in &self.sensitivity {
            let none = "none keeps it";
            let (apart, together) =
                (disaggregated.as_deref().unwrap_or(none), colocated.as_deref().unwrap_or(none));
            let _ = writeln!(text, "{:<44}{apart:<18}{together}", format!("{input} x {factor}"));
        }
    }

    fn add_simulated(&self, text: &mut String) {
        for Simulated { name, requests, answered, figures, off_by } in &self.simulated {
            let [ttft_p50, ttft_p99, itl_p50, itl_p99] = figures.all();
            let _ = writeln!(
                text,
                "\nsimulated {name}, {answered} of {requests} requests: TTFT p50 {ttft_p50:.1} p99 {ttft_p99:.1} ms, ITL p50 {itl_p50:.1} p99 {itl_p99:.1} ms; the model is \
                 {:+.1} % off at worst",
                100.0 * off_by
            );
        }
    }
}

fn row(kind: &str, choice: Option<&Choice>) -> String {
    let Some(choice) = choice else {
        return format!("{kind:<16}no number of workers keeps this objective\n");
    };
    let [ttft_p50, ttft_p99, itl_p50, itl_p99] = choice.figures.all();
    format!(
        "{kind:<16}{:<24}{:>5}{:>16.2}{ttft_p50:>10.1}{ttft_p99:>10.1}{itl_p50:>10.1}{itl_p99:>10.1}{:>8.1}\n",
        choice.name, choice.workers, choice.goodput_per_gpu, choice.batch
    )
}
