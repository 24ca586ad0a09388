//! The fewest workers that keep an objective, and how much more they could take.

use crate::colocated::{CHUNKS, colocated};
use crate::decode::{Mixture, batches};
use crate::queue::{Queue, quantile};
use crate::steps::{HOP_S, MAX_NUM_SEQS, MAX_OPEN_PROMPTS, MAX_STEP_TOKENS, Steps};
use crate::{PlanError, PlanInput};

/// Workers of both kinds together at most: as many as a router knows of one kind.
const MAX_WORKERS: u32 = 1_024;
/// Workers that would be idle for all but an eighth of the time are no plan.
const IDLEST: f64 = 8.0;
/// Share of a link, or of a prefill worker's time, that can be used at most.
const BUSIEST: f64 = 0.97;
/// Halvings when the largest rate is looked for.
const HALVINGS: usize = 12;

/// How workers are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cluster {
    /// Prefill and decode apart.
    Disaggregated {
        /// Prefill workers.
        prefill: u32,
        /// Decode workers.
        decode: u32,
    },
    /// Both on every worker.
    Colocated {
        /// Workers.
        workers: u32,
        /// Prompt tokens of a step beside decoding sequences.
        chunk: u32,
    },
}

impl Cluster {
    /// Workers of all kinds.
    pub const fn num_workers(&self) -> u32 {
        match self {
            Self::Disaggregated { prefill, decode } => *prefill + *decode,
            Self::Colocated { workers, .. } => *workers,
        }
    }
}

/// What a cluster comes to under a load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figures {
    /// Half of all requests have their first token within.
    pub ttft_p50_ms: f64,
    /// 99 in 100.
    pub ttft_p99_ms: f64,
    /// Half of all gaps between two tokens are at most so long.
    pub itl_p50_ms: f64,
    /// 99 in 100.
    pub itl_p99_ms: f64,
    /// Mean sequences that decode on a worker.
    pub batch: f64,
    /// 99 in 100 transfers have at most so much left when their prompt is computed.
    pub exposed_p99_ms: f64,
}

/// A plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// The fewest workers with prefill apart, what they come to, and the largest rate at which they keep the objective. `None`: no number of workers does.
    pub disaggregated: Option<(Cluster, Figures, f64)>,
    /// The same of colocated workers with their best chunk.
    pub colocated: Option<(Cluster, Figures, f64)>,
    /// Line rate in gigabits a second below which a prefill worker's link can't send what it computes under this load; 0 without such workers.
    pub least_gbps: f64,
    /// Line rate above which a transfer is hidden behind its own prefill but for the last layers.
    pub hiding_gbps: f64,
}

impl Plan {
    /// The cheaper one; disaggregated when both take as many workers and it can take as large a rate.
    pub fn cheapest(&self) -> Option<(Cluster, Figures, f64)> {
        match (self.disaggregated, self.colocated) {
            (Some(apart), Some(together)) => {
                let (a, b) = (apart.0.num_workers(), together.0.num_workers());
                let apart_wins = a < b || (a == b && apart.2 >= together.2);
                Some(if apart_wins { apart } else { together })
            }
            (apart, together) => apart.or(together),
        }
    }
}

/// What a cluster comes to; `None`: it does not keep up.
pub fn figures(input: &PlanInput, cluster: Cluster) -> Option<Figures> {
    let steps = Steps::new(input);
    match cluster {
        Cluster::Disaggregated { prefill, decode } => apart(input, &steps, prefill, decode),
        Cluster::Colocated { workers, chunk } => colocated(input, &steps, workers, chunk),
    }
}

fn prefill_queue<'a>(input: &PlanInput, steps: &'a Steps, num_workers: u32, grant_s: f64) -> Queue<'a> {
    Queue {
        steps,
        rate: input.rate,
        input_tokens: input.input_tokens,
        num_workers,
        budget: MAX_STEP_TOKENS,
        max_open: MAX_OPEN_PROMPTS,
        grant_s,
        num_hops: 4.0,
        wire_token_s: input.wire_token_s(),
    }
}

fn apart(input: &PlanInput, steps: &Steps, prefill: u32, decode: u32) -> Option<Figures> {
    let batches = batches(input, steps, decode)?;
    let [step_p50] = batches.steps.clone().quantiles([0.5]);
    let queue = prefill_queue(input, steps, prefill, step_p50);
    let per_worker = input.rate / f64::from(prefill);
    let transfer_s = f64::from(input.input_tokens) * input.wire_token_s();
    let receives = input.rate / f64::from(decode) * transfer_s;
    if (per_worker * queue.alone()).max(per_worker * transfer_s).max(receives) > BUSIEST {
        return None;
    }
    let ran = queue.run();
    // The second token waits for what is left of the transfer, of the running step, and for a step.
    let mut first = Mixture::default();
    let num = ran.exposed.len() as f64;
    for (nth, exposed) in ran.exposed.iter().enumerate() {
        let residual = (nth as f64 * 0.754_877_666_246_692_7).fract() * step_p50;
        first.add(exposed + HOP_S + residual + step_p50, 1.0 / num);
    }
    let new_tokens = f64::from(input.output_tokens) - 1.0;
    let mut gaps = Mixture::default();
    gaps.add_all(&batches.steps, new_tokens - 1.0);
    gaps.add_all(&first, 1.0);
    let [itl_p50, itl_p99] = gaps.quantiles([0.5, 0.99]).map(|seconds| seconds * 1e3);
    Some(Figures {
        ttft_p50_ms: quantile(&ran.ttft, 0.5) * 1e3,
        ttft_p99_ms: quantile(&ran.ttft, 0.99) * 1e3,
        itl_p50_ms: itl_p50,
        itl_p99_ms: itl_p99,
        batch: batches.mean,
        exposed_p99_ms: quantile(&ran.exposed, 0.99) * 1e3,
    })
}

fn keeps(input: &PlanInput, figures: &Option<Figures>) -> bool {
    figures.is_some_and(|figures| {
        figures.ttft_p99_ms <= input.slo.ttft_ms && figures.itl_p99_ms <= input.slo.itl_ms
    })
}

/// How many workers are looked at.
#[derive(Clone, Copy, Debug)]
struct Numbers {
    /// Fewer can't do the work.
    least: u32,
    /// With more they would be idle for most of the time.
    most: u32,
}

impl Numbers {
    /// For work of so many seconds a second, of which a busy worker does at most `at_once` at the same time.
    fn for_work(seconds_per_s: f64, at_once: f64) -> Self {
        let least = (seconds_per_s / at_once).ceil().max(1.0);
        let most = (seconds_per_s.ceil() * IDLEST).max(least).min(f64::from(MAX_WORKERS));
        Self { least: least as u32, most: most as u32 }
    }
}

/// The smallest number with which `is_enough`, if any is. More are never worse.
fn fewest(Numbers { least, most }: Numbers, is_enough: impl Fn(u32) -> bool) -> Option<u32> {
    if least > most {
        return None;
    }
    let (mut enough, mut not_enough) = (least, least - 1);
    while !is_enough(enough) {
        if enough >= most {
            return None;
        }
        not_enough = enough;
        enough = (enough * 2).min(most);
    }
    while enough - not_enough > 1 {
        let middle = enough.midpoint(not_enough);
        if is_enough(middle) {
            enough = middle;
        } else {
            not_enough = middle;
        }
    }
    Some(enough)
}

/// Seconds of decoding a second, were no two sequences in one step.
fn decode_work(input: &PlanInput, steps: &Steps) -> f64 {
    input.rate * (f64::from(input.output_tokens) - 1.0) * steps.decode(1.0)
}

fn fewest_apart(input: &PlanInput, steps: &Steps) -> Option<(u32, u32)> {
    let mean_itl = |decode| batches(input, steps, decode).map(|batches| batches.steps.quantiles([0.99])[0]);
    let decodes = Numbers::for_work(decode_work(input, steps), f64::from(MAX_NUM_SEQS));
    let decode =
        fewest(decodes, |decode| mean_itl(decode).is_some_and(|seconds| seconds * 1e3 <= input.slo.itl_ms))?;
    let prefills = Numbers::for_work(input.rate * prefill_queue(input, steps, 1, 0.0).alone(), 1.0);
    let ttft = |prefill, decode| {
        apart(input, steps, prefill, decode).is_some_and(|figures| figures.ttft_p99_ms <= input.slo.ttft_ms)
    };
    // The transfer can ask for more decode workers than the steps do, and a decode worker's steps for more prefill workers.
    let receives = input.rate * f64::from(input.input_tokens) * input.wire_token_s() / BUSIEST;
    let decode = decode.max(receives.ceil() as u32);
    let prefill = fewest(prefills, |prefill| ttft(prefill, decode))?;
    let all = |prefill, decode| keeps(input, &apart(input, steps, prefill, decode));
    let more_decode = fewest(Numbers { least: decode, ..decodes }, |decode| all(prefill, decode))
        .map(|decode| (prefill, decode));
    let more_prefill = fewest(Numbers { least: prefill, ..prefills }, |prefill| all(prefill, decode))
        .map(|prefill| (prefill, decode));
    [more_decode, more_prefill].into_iter().flatten().min_by_key(|(prefill, decode)| prefill + decode)
}

/// Beyond what the input asks for, up to the rate at which the cluster just keeps the objective.
fn largest_rate(input: &PlanInput, cluster: Cluster) -> f64 {
    let is_kept = |rate: f64| {
        let input = PlanInput { rate, ..*input };
        keeps(&input, &figures(&input, cluster))
    };
    let (mut kept, mut broken) = (input.rate, input.rate * 2.0);
    while is_kept(broken) && broken < input.rate * 1e3 {
        (kept, broken) = (broken, broken * 2.0);
    }
    for _ in 0..HALVINGS {
        let middle = f64::midpoint(kept, broken);
        if is_kept(middle) { kept = middle } else { broken = middle }
    }
    kept
}

/// The fewest colocated workers with this chunk.
pub(crate) fn fewest_with(input: &PlanInput, steps: &Steps, chunk: u32) -> Option<Cluster> {
    let alone = steps.prompt(&steps.decoding(1.0), input.input_tokens, chunk);
    if alone * 1e3 > input.slo.ttft_ms {
        return None;
    }
    let prompts = Numbers::for_work(input.rate * alone, 1.0);
    let most = prompts.most.max(Numbers::for_work(decode_work(input, steps), 1.0).most);
    let workers = fewest(Numbers { most, ..prompts }, |workers| {
        keeps(input, &colocated(input, steps, workers, chunk))
    })?;
    Some(Cluster::Colocated { workers, chunk })
}

/// The fewest colocated workers with any chunk; among as few the chunk with which they can take the largest rate.
fn fewest_together(input: &PlanInput, steps: &Steps) -> Option<(Cluster, f64)> {
    let all: Vec<Cluster> = CHUNKS.iter().filter_map(|chunk| fewest_with(input, steps, *chunk)).collect();
    let least = all.iter().map(Cluster::num_workers).min()?;
    let best = all.into_iter().filter(|cluster| cluster.num_workers() == least);
    best.map(|cluster| (cluster, largest_rate(input, cluster))).max_by(|a, b| a.1.total_cmp(&b.1))
}

/// The fewest prefill and decode workers.
pub(crate) fn fewest_disaggregated(input: &PlanInput, steps: &Steps) -> Option<Cluster> {
    let (prefill, decode) = fewest_apart(input, steps)?;
    (prefill + decode <= MAX_WORKERS).then_some(Cluster::Disaggregated { prefill, decode })
}

/// Plans.
///
/// # Errors
/// [`PlanError`]: an input that is out of its bounds, an objective that no number of workers keeps, or more workers than a router knows.
pub fn plan(input: &PlanInput) -> Result<Plan, PlanError> {
    input.check()?;
    let steps = Steps::new(input);
    let apart = fewest_disaggregated(input, &steps);
    let together = fewest_together(input, &steps);
    if apart.is_none() && together.is_none() {
        return Err(why_not(input, &steps));
    }
    let with_figures = |cluster: Cluster, rate| Some((cluster, figures(input, cluster)?, rate));
    let alone = prefill_queue(input, &steps, 1, 0.0).alone();
    let least_s = match apart {
        Some(Cluster::Disaggregated { prefill, .. }) => f64::from(prefill) / input.rate * BUSIEST,
        _ => f64::INFINITY,
    };
    Ok(Plan {
        disaggregated: apart.and_then(|cluster| with_figures(cluster, largest_rate(input, cluster))),
        colocated: together.and_then(|(cluster, rate)| with_figures(cluster, rate)),
        least_gbps: input.gbps_for(least_s),
        hiding_gbps: input.gbps_for(alone),
    })
}

fn why_not(input: &PlanInput, steps: &Steps) -> PlanError {
    let prompt_ms = prefill_queue(input, steps, 1, 0.0).alone() * 1e3;
    let step_ms = steps.decode(1.0) * 1e3;
    let slow = |bound, limit_ms, alone_ms| PlanError::TooSlow { bound, limit_ms, alone_ms };
    match () {
        () if prompt_ms > input.slo.ttft_ms => slow("slo-ttft-ms", input.slo.ttft_ms, prompt_ms),
        () if step_ms > input.slo.itl_ms => slow("slo-itl-ms", input.slo.itl_ms, step_ms),
        // An objective that an idle device just keeps needs workers that are all but idle.
        () => PlanError::TooMany { most: MAX_WORKERS },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::tests::input;

    #[test]
    fn one_worker_fewer_of_either_kind_breaks_the_objective() {
        for rate in [5.0, 60.0] {
            let input = PlanInput { rate, ..input() };
            let (cluster, reached, largest) = plan(&input).unwrap().disaggregated.unwrap();
            let Cluster::Disaggregated { prefill, decode } = cluster else { panic!("{cluster:?}") };
            assert!(keeps(&input, &Some(reached)) && largest >= rate, "{reached:?} {largest}");
            for (prefill, decode) in [(prefill - 1, decode), (prefill, decode - 1)] {
                if prefill > 0 && decode > 0 {
                    let fewer = figures(&input, Cluster::Disaggregated { prefill, decode });
                    assert!(!keeps(&input, &fewer), "{rate}: {prefill}:{decode} {fewer:?}");
                }
            }
            let beyond = PlanInput { rate: largest * 1.01, ..input };
            assert!(!keeps(&beyond, &figures(&beyond, cluster)), "{largest}");
        }
    }

    /// A chunk small enough for a strict gap makes first tokens late. With long gaps allowed nothing is gained by keeping workers apart, and a
    /// prefill worker can't decode.
    #[test]
    fn strict_bounds_ask_for_disaggregation_and_loose_ones_do_not() {
        let mut input = PlanInput { output_tokens: 160, ..input() };
        (input.slo.ttft_ms, input.slo.itl_ms) = (90.0, 6.0);
        let strict = plan(&input).unwrap();
        let (apart, ..) = strict.disaggregated.unwrap();
        let fewer =
            strict.colocated.is_none_or(|(together, ..)| together.num_workers() > apart.num_workers());
        assert!(fewer, "{strict:?}");
        assert_eq!(strict.cheapest().map(|(cluster, ..)| cluster), Some(apart));
        (input.rate, input.slo.itl_ms, input.slo.ttft_ms) = (1.0, 400.0, 5_000.0);
        let loose = plan(&input).unwrap();
        let (cluster, ..) = loose.cheapest().unwrap();
        assert_eq!(cluster.num_workers(), 1, "{cluster:?}");
        assert!(matches!(cluster, Cluster::Colocated { .. }));
    }

    #[test]
    fn a_slow_link_needs_more_workers_or_makes_the_second_token_late() {
        let fast = plan(&input()).unwrap();
        let slow = PlanInput { link_gbps: 10.0, ..input() };
        let (cluster, figures, _) = fast.disaggregated.unwrap();
        assert!(figures.exposed_p99_ms < 2.0, "{figures:?}");
        assert!(fast.hiding_gbps > 38.0 && fast.hiding_gbps < 45.0, "{}", fast.hiding_gbps);
        assert!(fast.least_gbps < fast.hiding_gbps);
        let plan = plan(&slow).unwrap();
        let more = plan.disaggregated.is_none_or(|(slow, ..)| slow.num_workers() > cluster.num_workers());
        assert!(more, "{plan:?}");
    }

    #[test]
    fn what_no_number_of_workers_keeps_is_told_with_what_an_idle_one_takes() {
        let with = |ttft_ms, itl_ms| {
            let mut input = input();
            (input.slo.ttft_ms, input.slo.itl_ms) = (ttft_ms, itl_ms);
            plan(&input).unwrap_err().to_string()
        };
        assert!(with(20.0, 15.0).contains("slo-ttft-ms within 20 ms"), "{}", with(20.0, 15.0));
        assert!(with(300.0, 2.0).contains("slo-itl-ms within 2 ms"), "{}", with(300.0, 2.0));
        let huge = PlanInput { rate: 1e5, ..input() };
        assert_eq!(plan(&huge), Err(PlanError::TooMany { most: MAX_WORKERS }));
    }

    #[test]
    fn the_fewest_is_found_within_its_bounds() {
        for wanted in 1..40 {
            for least in 1..=wanted {
                assert_eq!(fewest(Numbers { least, most: 40 }, |n| n >= wanted), Some(wanted));
                assert_eq!(fewest(Numbers { least, most: wanted }, |n| n > wanted), None);
            }
        }
        let of = |seconds, at_once| {
            let Numbers { least, most } = Numbers::for_work(seconds, at_once);
            (least, most)
        };
        assert_eq!((of(2.3, 1.0), of(500.0, 256.0), of(0.01, 1.0)), ((3, 24), (2, 1_024), (1, 8)));
        let Numbers { least, most } = Numbers::for_work(5e3, 1.0);
        assert!(least > most, "{least} {most}");
    }
}
