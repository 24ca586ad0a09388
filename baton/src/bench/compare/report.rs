//! The comparison as one JSON object and as a table.

use std::fmt::Write;

use baton_sim::workload::Prompt;
use serde::{Deserialize, Serialize};

use super::outcome::{Colocated, Outcome, Slo};
use super::verdict;
use crate::bench::stats::Summary;
use crate::bench::workload::{STREAM_PROMPT_TOKENS, Workload};

/// What was sent to every cluster.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Load {
    pub(super) seed: u64,
    /// The CPUs that each cluster had.
    pub(super) cpus: Vec<usize>,
    /// What one prefill worker computes alone; null where nobody asked.
    pub(super) prefill_prompts_per_s: Option<f64>,
    /// Background streams, and tokens of each.
    pub(super) streams: u32,
    pub(super) stream_tokens: u32,
    /// Requests that arrive.
    pub(super) arrivals: u64,
    /// From the first to the last of them, in seconds.
    pub(super) arrivals_within_s: f64,
    /// Tokens of all their prompts.
    pub(super) prompt_tokens: u64,
    /// Requests of a trace file that are longer than the context.
    pub(super) left_out: u64,
    /// Tokens of each stream's prompt, and seconds that the streams run alone first.
    pub(super) stream_prompt_tokens: u32,
    pub(super) quiet_s: f64,
    /// Every arrival.
    pub(super) sent: Vec<Sent>,
}

/// An arrival, as a simulation needs it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sent {
    /// Seconds from the first arrival on.
    pub(crate) at_s: f64,
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: u32,
    /// Tokens asked for.
    pub(crate) output_tokens: u32,
    /// Of a trace: a name for each 512 tokens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) hash_ids: Vec<u64>,
}

impl Load {
    /// Notes what every cluster is sent.
    pub(super) fn sent(&mut self, workload: &Workload) {
        self.streams = workload.streams.num;
        self.stream_tokens = workload.streams.output_tokens;
        self.arrivals = workload.arrivals.len() as u64;
        self.arrivals_within_s = workload.arrivals.last().map_or(0.0, |arrival| arrival.at.as_secs_f64());
        let tokens = workload.arrivals.iter().map(|arrival| u64::from(arrival.prompt.num_tokens()));
        self.prompt_tokens = tokens.sum();
        (self.stream_prompt_tokens, self.quiet_s) = (STREAM_PROMPT_TOKENS, workload.quiet.as_secs_f64());
        let sent = workload.arrivals.iter().map(|arrival| Sent {
            at_s: arrival.at.as_secs_f64(),
            prompt_tokens: arrival.prompt.num_tokens(),
            output_tokens: arrival.output_tokens,
            hash_ids: match &arrival.prompt {
                Prompt::Unique { .. } => Vec::new(),
                Prompt::Blocks { ids, .. } => ids.clone(),
            },
        });
        self.sent = sent.collect();
    }
}

/// Everything that was compared.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(in crate::bench) struct Comparison {
    pub(super) load: Load,
    pub(super) slo: Slo,
    pub(super) disaggregated: Outcome,
    pub(super) colocated: Vec<Colocated>,
    pub(super) avoided_stall: AvoidedStall,
    /// Whether disaggregation won, in sentences.
    pub(super) verdict: Vec<String>,
}

/// What the disaggregated cluster said it spared its streams, beside what the 2x1 cluster with prompts in one piece did to them.
/// Null where it is not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct AvoidedStall {
    /// Said before the colocated run.
    pub(super) modelled_ms: Option<f64>,
    /// As the colocated workers counted it.
    pub(super) measured_ms: Option<f64>,
    /// As this side saw it in the gaps of the colocated run.
    pub(super) measured_by_client_ms: Option<f64>,
    /// modelled / measured - 1.
    pub(super) off_by: Option<f64>,
    /// The same against what this side saw.
    pub(super) off_by_client: Option<f64>,
}

impl AvoidedStall {
    fn new(disaggregated: &Outcome, colocated: &[Colocated]) -> Self {
        use super::layout::Split;
        let baseline = colocated.iter().find(|one| one.layout == Split::TwoByOne && one.chunk.is_none());
        let blocked = baseline.map(|one| &one.outcome.blocked);
        let modelled_ms = disaggregated.avoided_ms;
        let measured_ms = blocked.and_then(|blocked| blocked.by_prefills_ms());
        let measured_by_client_ms = blocked.map(|blocked| blocked.client_ms);
        let off_by = |measured: Option<f64>| {
            let measured = measured.filter(|measured| *measured > 0.0)?;
            Some(modelled_ms? / measured - 1.0)
        };
        Self {
            modelled_ms,
            measured_ms,
            measured_by_client_ms,
            off_by: off_by(measured_ms),
            off_by_client: off_by(measured_by_client_ms),
        }
    }

    fn line(&self) -> String {
        let seconds = |ms: Option<f64>| ms.map_or("not known".to_owned(), |ms| format!("{:.1} s", ms / 1e3));
        let off = |part: Option<f64>| part.map_or(String::new(), |part| format!(" ({:+.0} %)", 100.0 * part));
        format!(
            "avoided stall, 2x1 in one piece: modelled beforehand {}; measured there by the workers {}{}, by its clients {}{}\n",
            seconds(self.modelled_ms),
            seconds(self.measured_ms),
            off(self.off_by),
            seconds(self.measured_by_client_ms),
            off(self.off_by_client)
        )
    }
}

impl Comparison {
    pub(super) fn new(load: Load, slo: Slo, disaggregated: Outcome, colocated: Vec<Colocated>) -> Self {
        let avoided_stall = AvoidedStall::new(&disaggregated, &colocated);
        let verdict = verdict::sentences(&disaggregated, &colocated, slo);
        Self { load, slo, disaggregated, colocated, avoided_stall, verdict }
    }

    /// All clusters by name, the disaggregated one first.
    pub(super) fn clusters(&self) -> impl Iterator<Item = (String, &Outcome)> {
        let colocated = self.colocated.iter().map(|one| (one.name(), &one.outcome));
        std::iter::once(("disaggregated".to_owned(), &self.disaggregated)).chain(colocated)
    }

    /// The same for a person.
    pub(in crate::bench) fn table(&self) -> String {
        let load = &self.load;
        let mut text = format!(
            "{} streams of {} tokens; {} prompts, {} tokens together, within {:.0} s; CPUs {:?}; seed {}\n",
            load.streams,
            load.stream_tokens,
            load.arrivals,
            load.prompt_tokens,
            load.arrivals_within_s,
            load.cpus,
            load.seed
        );
        if let Some(per_s) = load.prefill_prompts_per_s {
            let _ = writeln!(text, "one prefill worker alone: {per_s:.3} prompts/s; half of that arrives");
        }
        if load.left_out > 0 {
            let _ = writeln!(text, "requests longer than the context, left out: {}", load.left_out);
        }
        let columns: Vec<(String, &Outcome)> = self.clusters().collect();
        let _ = write!(text, "{:<26}", "ms");
        for (name, _) in &columns {
            let _ = write!(text, "{name:>20}");
        }
        text.push('\n');
        for (name, cell) in ROWS {
            let _ = write!(text, "{name:<26}");
            for (_, outcome) in &columns {
                let _ = write!(text, "{:>20}", cell(outcome));
            }
            text.push('\n');
        }
        text.push('\n');
        text.push_str(&self.avoided_stall.line());
        for sentence in &self.verdict {
            let _ = writeln!(text, "{sentence}");
        }
        text
    }
}

type Cell = fn(&Outcome) -> String;

const ROWS: [(&str, Cell); 24] = [
    ("gap p50", |o| of(o.itl_ms, |s| s.p50)),
    ("gap p99", |o| of(o.itl_ms, |s| s.p99)),
    ("gap worst", |o| of(o.itl_ms, |s| s.max)),
    ("  before a second token", |o| of(o.first_gap_ms, |s| s.max)),
    ("  before a later one", |o| of(o.later_itl_ms, |s| s.max)),
    ("gap p50, no arrivals", |o| of(o.quiet_itl_ms, |s| s.p50)),
    ("gap p99, no arrivals", |o| of(o.quiet_itl_ms, |s| s.p99)),
    ("p99 / p50", |o| ratio(o.itl_ms, |s| s.p99, o.itl_ms, |s| s.p50)),
    ("worst / p50", |o| ratio(o.itl_ms, |s| s.max, o.itl_ms, |s| s.p50)),
    ("p99 / p99, no arrivals", |o| ratio(o.itl_ms, |s| s.p99, o.quiet_itl_ms, |s| s.p99)),
    ("TTFT p50", |o| of(o.ttft_ms, |s| s.p50)),
    ("TTFT p99", |o| of(o.ttft_ms, |s| s.p99)),
    ("arrivals' gap p50", |o| of(o.arrival_itl_ms, |s| s.p50)),
    ("TPOT p50", |o| of(o.tpot_ms, |s| s.p50)),
    ("output tokens/s", |o| format!("{:.1}", o.output_tokens_per_s)),
    ("requests in SLO / all", |o| format!("{} / {}", o.requests_in_slo, o.requests)),
    ("goodput, requests/s", |o| format!("{:.3}", o.goodput_per_s)),
    ("KV transfers, total", |o| kv(o, |o| o.kv.total_ms)),
    ("  hidden", |o| kv(o, |o| o.kv.hidden_ms)),
    ("  exposed", |o| kv(o, |o| o.kv.exposed_ms)),
    ("  exposed, worst", |o| kv(o, |o| o.kv.exposed_max_ms)),
    ("blocked, workers say", |o| o.blocked.by_prefills_ms().map_or("-".to_owned(), number)),
    ("blocked, clients see", |o| number(o.blocked.client_ms)),
    ("errors", |o| o.errors.values().sum::<u64>().to_string()),
];

fn number(value: f64) -> String {
    format!("{value:.1}")
}

fn of(summary: Option<Summary>, value: impl Fn(&Summary) -> f64) -> String {
    summary.map_or("-".to_owned(), |summary| number(value(&summary)))
}

type Part = fn(&Summary) -> f64;

fn ratio(over: Option<Summary>, part: Part, under: Option<Summary>, of: Part) -> String {
    let ratio = over.zip(under).map(|(over, under)| part(&over) / of(&under));
    ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"))
}

fn kv(outcome: &Outcome, value: impl Fn(&Outcome) -> f64) -> String {
    if outcome.kv.transfers == 0 { "-".to_owned() } else { number(value(outcome)) }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;

    use super::super::layout::Split;
    use super::super::outcome::{Blocked, Kv};
    use super::*;
    use crate::bench::stats::Samples;

    fn flat(value: f64) -> Option<Summary> {
        std::iter::once(value).collect::<Samples>().summary()
    }

    /// An outcome whose gaps are `usual` but for the worst, and so on.
    pub(in super::super) fn outcome([usual, p99, worst]: [f64; 3], ttft: f64, goodput: f64) -> Outcome {
        let itl = flat(usual).map(|summary| Summary { p99, max: worst, ..summary });
        Outcome {
            duration_s: 60.0,
            itl_ms: itl,
            itl_shares_ms: Vec::new(),
            worst_gap: None,
            first_gap_ms: None,
            later_itl_ms: None,
            arrival_itl_ms: None,
            quiet_itl_ms: flat(usual),
            ttft_ms: flat(ttft),
            ttft_each_ms: vec![ttft],
            tpot_ms: flat(usual),
            output_tokens_per_s: 8e3 / usual,
            arrivals: 8,
            requests: 70,
            requests_in_slo: 60,
            goodput_per_s: goodput,
            errors: BTreeMap::new(),
            merged_tokens: 0,
            kv: Kv::default(),
            blocked: Blocked::default(),
            avoided_ms: None,
            workers: Vec::new(),
            gaps: vec![(0.5, usual), (30.0, worst)],
            prefills: vec![(0.0, 2.5)],
        }
    }

    pub(in super::super) fn colocated(layout: Split, chunk: Option<u32>, outcome: Outcome) -> Colocated {
        Colocated { layout, chunk, tried: Vec::new(), outcome }
    }

    pub(in super::super) fn comparison() -> Comparison {
        let mut disaggregated = outcome([15.0, 24.0, 47.0], 2960.0, 1.1);
        disaggregated.avoided_ms = Some(99_000.0);
        disaggregated.kv =
            Kv { transfers: 8, total_ms: 100.0, hidden_ms: 90.0, exposed_ms: 10.0, ..Kv::default() };
        let mut whole = outcome([11.0, 19.0, 2734.0], 2700.0, 0.9);
        whole.blocked.workers_ms = [("local_prefill", 100_000.0), ("slow_step", 50.0)]
            .map(|(cause, ms)| (cause.to_owned(), ms))
            .into();
        whole.blocked.client_ms = 90_000.0;
        let chunked = colocated(Split::TwoByOne, Some(256), outcome([11.0, 275.0, 496.0], 2830.0, 0.4));
        let all = vec![colocated(Split::TwoByOne, None, whole), chunked];
        Comparison::new(Load::default(), Slo::default(), disaggregated, all)
    }

    #[test]
    fn the_json_has_the_promised_names() {
        let json = serde_json::to_value(comparison()).unwrap();
        assert_eq!(json["disaggregated"]["itl_ms"]["max"], 47.0);
        assert_eq!(json["disaggregated"]["ttft_ms"]["p50"], 2960.0);
        assert_eq!(json["disaggregated"]["kv"]["exposed_ms"], 10.0);
        assert_eq!(json["colocated"][0]["layout"], "2x1");
        assert_eq!(json["colocated"][0]["chunk"], serde_json::Value::Null);
        assert_eq!(json["colocated"][1]["chunk"], 256);
        assert_eq!(json["colocated"][1]["itl_ms"]["p99"], 275.0);
        assert_eq!(json["avoided_stall"]["modelled_ms"], 99_000.0);
        assert_eq!(json["avoided_stall"]["measured_ms"], 100_000.0);
        assert!((json["avoided_stall"]["off_by"].as_f64().unwrap() + 0.01).abs() < 1e-9);
        assert!((json["avoided_stall"]["off_by_client"].as_f64().unwrap() - 0.1).abs() < 1e-9);
        assert_eq!(json["disaggregated"].get("gaps"), None);
    }

    #[test]
    fn the_table_has_a_column_a_cluster_and_says_what_is_not_known() {
        let text = comparison().table();
        let row = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap();
            line[name.len()..].split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(row("gap worst"), ["47.0", "2734.0", "496.0"]);
        assert_eq!(row("worst / p50"), ["3.13", "248.55", "45.09"]);
        assert_eq!(row("blocked, workers say"), ["-", "100000.0", "-"]);
        assert_eq!(row("KV transfers, total"), ["100.0", "-", "-"]);
        assert!(text.contains("modelled beforehand 99.0 s") && text.contains("(-1 %)"), "{text}");
        let unknown = AvoidedStall::default().line();
        assert!(unknown.contains("not known"), "{unknown}");
    }
}
