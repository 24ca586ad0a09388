//! `baton bench --compare`: one workload on a disaggregated cluster and on colocated ones of as many cores, side by side.
//!
//! The clusters are `baton up` again, one after another; the disaggregated one goes first, so that what it says it has spared its
//! streams is known before anybody measures it on a colocated one. This process runs where the disaggregated cluster's network
//! threads run, away from its decode core; beside colocated workers, which use both cores alike, it runs on both.

pub(crate) mod cluster;
pub(crate) mod layout;
pub(crate) mod measured;
mod options;
mod outcome;
mod picture;
pub(crate) mod report;
mod verdict;

pub(super) use options::CompareOptions;

use std::ffi::OsString;
use std::time::Duration;

use baton_worker::{CpuList, Turns};

use self::cluster::{Cluster, Common, Counts};
use self::layout::{Layout, Split};
use self::outcome::{Colocated, Outcome, Slo, Tried, best_chunk};
use self::report::{Comparison, Load};
use super::drive::{Observer, drive};
use super::mooncake::{Part, TraceFile};
use super::options::BenchOptions;
use super::request::{Record, measure};
use super::stats::Samples;
use super::workload::{Arrival, Gaps, Pace, Prompt, Shape, Streams, Workload, unique_arrivals};
use crate::exit::Failure;
use crate::up::{self, Interrupts};

/// Streams, tokens of each, arrivals at least, tokens that each asks for, time, and time that the streams run alone first; unless
/// asked otherwise.
const STREAMS: u32 = 8;
const STREAM_TOKENS: u32 = 500;
const ARRIVALS: u32 = 8;
const OUTPUT_TOKENS: u32 = 8;
const DURATION: Duration = Duration::from_secs(60);
const QUIET: Duration = Duration::from_secs(10);
/// Prompts that measure what a prefill worker can do; the first one warms up.
const CALIBRATION: u64 = 4;
/// Of that, what arrives.
const LOAD: f64 = 0.5;
/// Arrivals of a run that only tries a chunk, and the time that its streams run alone.
const TRY_ARRIVALS: usize = 3;
const TRY_QUIET: Duration = Duration::from_secs(2);

/// Compares and gives the report; writes the picture if asked to. `global` are the arguments that every child is given first.
///
/// # Errors
/// [`Failure::Child`] with 130 after Ctrl-C, and whatever keeps a cluster from being started, driven or asked. No child is left.
pub(super) async fn run(options: &BenchOptions, global: Vec<OsString>) -> Result<Comparison, Failure> {
    let mut interrupts = Interrupts::listen()?;
    let allowed = CpuList::allowed().ok();
    let comparing = Comparing::new(options, global)?;
    let mut running = None;
    let outcome = tokio::select! {
        biased;
        () = interrupts.first() => {
            say("stopping (Ctrl-C again to stop at once)");
            Err(interrupted())
        }
        outcome = comparing.compare(&mut running) => outcome,
    };
    bind(allowed.as_ref());
    if let Some(mut cluster) = running {
        cluster.stop(interrupts.second()).await;
    }
    let comparison = outcome?;
    if let Some(path) = &options.compare.svg {
        let failed = |error| Failure::Usage(format!("--svg {}: {error}", path.display()));
        std::fs::write(path, picture::draw(&comparison)).map_err(failed)?;
    }
    Ok(comparison)
}

/// Binds this thread, the only one there is; what the system refuses only costs quiet.
fn bind(cpus: Option<&CpuList>) {
    if let Some(cpus) = cpus
        && let Err(error) = cpus.bind_current_thread()
    {
        eprintln!("can't bind the load to CPUs {cpus}: {error}");
    }
}

struct Comparing<'a> {
    options: &'a BenchOptions,
    common: Common,
    slo: Slo,
    /// Where the load runs while a cluster starts, so that its children may use every CPU.
    everywhere: Option<CpuList>,
}

impl<'a> Comparing<'a> {
    fn new(options: &'a BenchOptions, global: Vec<OsString>) -> Result<Self, Failure> {
        let compare = &options.compare;
        let cpus = match &compare.cpus {
            Some(list) => list.as_slice().to_vec(),
            None => up::far_apart(2),
        };
        if cpus.len() != 2 {
            return Err(Failure::Usage(format!(
                "--cpus: two CPUs are compared with two, but here are {}: {}",
                cpus.len(),
                up::as_list(&cpus)
            )));
        }
        Ok(Self {
            options,
            common: Common { global, model: compare.model.clone(), cpus },
            slo: Slo { ttft_ms: compare.slo_ttft_ms, itl_ms: compare.slo_itl_ms },
            everywhere: CpuList::allowed().ok(),
        })
    }

    async fn compare(&self, running: &mut Option<Cluster>) -> Result<Comparison, Failure> {
        // Read first, so that what is wrong with it is told before a cluster is started.
        let trace = self.options.compare.workload.as_deref().map(TraceFile::read).transpose()?;
        let longest = self.shape().prompt_tokens;
        let cluster = self.start(Layout::Disaggregated, longest, running).await?;
        let (workload, load) = self.workload(cluster, trace).await?;
        let disaggregated = self.drive(cluster, Layout::Disaggregated, workload.clone()).await?;
        stop(running).await;

        let mut colocated = Vec::new();
        for split in Split::ALL {
            let whole = Layout::Colocated { split, chunk: None };
            let outcome = self.one(whole, workload.clone(), running).await?;
            colocated.push(Colocated { layout: split, chunk: None, tried: Vec::new(), outcome });
            let tried = self.try_chunks(split, &workload, running).await?;
            let Some(chunk) = best_chunk(&tried) else { continue };
            let chunked = Layout::Colocated { split, chunk: Some(chunk) };
            let outcome = self.one(chunked, workload.clone(), running).await?;
            colocated.push(Colocated { layout: split, chunk: Some(chunk), tried, outcome });
        }
        Ok(Comparison::new(load, self.slo, disaggregated, colocated))
    }

    fn shape(&self) -> Shape {
        let background = &self.options.background;
        Shape {
            prompt_tokens: background.arrival_prompt_tokens,
            output_tokens: background.arrival_output_tokens.unwrap_or(OUTPUT_TOKENS),
        }
    }

    /// What will be sent to every cluster. Where nobody says how fast prompts shall arrive, the disaggregated cluster's prefill worker
    /// is measured first.
    async fn workload(
        &self,
        cluster: &Cluster,
        trace: Option<TraceFile>,
    ) -> Result<(Workload, Load), Failure> {
        let (options, background) = (self.options, &self.options.background);
        let duration = options.duration.unwrap_or(DURATION);
        let mut load = Load { seed: options.seed, cpus: self.common.cpus.clone(), ..Load::default() };
        let mut workload = Workload {
            seed: options.seed,
            vocab: options.vocab,
            streams: Streams { num: 0, output_tokens: STREAM_TOKENS },
            quiet: background.quiet.unwrap_or(QUIET),
            arrivals: Vec::new(),
        };
        if let Some(trace) = trace {
            let trace = trace.take(Part { duration, context: cluster.context })?;
            load.left_out = trace.num_too_long as u64;
            workload.arrivals = trace.arrivals;
            workload.quiet = Duration::ZERO;
            load.sent(&workload);
            return Ok((workload, load));
        }
        workload.streams = Streams {
            num: background.streams.unwrap_or(STREAMS),
            output_tokens: background.stream_tokens.unwrap_or(STREAM_TOKENS),
        };
        let gaps = match (background.arrival_every, background.arrival_rate) {
            (Some(every), _) => Gaps::Every(every),
            (None, Some(rate)) => Gaps::Poisson(rate),
            (None, None) => {
                let per_s = self.prompts_per_s(cluster, &workload).await?;
                load.prefill_prompts_per_s = Some(per_s);
                Gaps::Poisson(LOAD * per_s)
            }
        };
        let pace = Pace { gaps, duration, at_least: background.arrivals.unwrap_or(ARRIVALS) };
        workload.arrivals = unique_arrivals(options.seed, pace, self.shape())?;
        load.sent(&workload);
        Ok((workload, load))
    }

    /// How many of the prompts the prefill worker computes a second, one after another and alone.
    async fn prompts_per_s(&self, cluster: &Cluster, workload: &Workload) -> Result<f64, Failure> {
        let mut times = Samples::default();
        for nth in 0..CALIBRATION {
            // Far away from those of the run.
            let prompt = Prompt::Unique { nth: (1 << 30) + nth, tokens: self.shape().prompt_tokens };
            let ask = workload.ask(&Arrival { at: Duration::ZERO, prompt, output_tokens: 1 });
            let mut record = Record::new(std::time::Instant::now());
            measure(&cluster.client, &ask, &mut record, || {}).await?;
            if nth > 0 {
                times.extend(record.ttft().map(|ttft| ttft.as_secs_f64() * 1e3));
            }
        }
        let Some(times) = times.summary() else {
            return Err(Failure::Unexpected("no prompt of the calibration was answered".to_owned()));
        };
        say(&format!("a prompt takes the prefill worker {:.0} ms", times.p50));
        Ok(1e3 / times.p50.max(1e-3))
    }

    /// Short runs with each chunk.
    async fn try_chunks(
        &self,
        split: Split,
        workload: &Workload,
        running: &mut Option<Cluster>,
    ) -> Result<Vec<Tried>, Failure> {
        let mut short = workload.clone();
        short.quiet = short.quiet.min(TRY_QUIET);
        if short.streams.num > 0 {
            short.arrivals.truncate(TRY_ARRIVALS);
        }
        let mut tried = Vec::new();
        for &chunk in &self.options.compare.chunks {
            let outcome =
                self.one(Layout::Colocated { split, chunk: Some(chunk) }, short.clone(), running).await?;
            tried.push(Tried { chunk, itl_ms: outcome.itl_ms, ttft_ms: outcome.ttft_ms });
        }
        Ok(tried)
    }

    /// A cluster from its start to its end.
    async fn one(
        &self,
        layout: Layout,
        workload: Workload,
        running: &mut Option<Cluster>,
    ) -> Result<Outcome, Failure> {
        let cluster = self.start(layout, workload.longest_prompt(), running).await?;
        let outcome = self.drive(cluster, layout, workload).await?;
        stop(running).await;
        Ok(outcome)
    }

    async fn start<'r>(
        &self,
        layout: Layout,
        longest: u32,
        running: &'r mut Option<Cluster>,
    ) -> Result<&'r Cluster, Failure> {
        bind(self.everywhere.as_ref());
        let _ = Turns::Usual.take();
        say(&format!("{}: starting", layout.name()));
        let cluster = Cluster::start(&self.common, layout.start(longest), running).await?;
        let beside = match layout {
            Layout::Disaggregated => up::as_list(&up::beside_prefill(&self.common.cpus)).parse().ok(),
            Layout::Colocated { .. } => up::as_list(&self.common.cpus).parse().ok(),
        };
        bind(beside.as_ref());
        // A clock that waits for its turn measures that too.
        let _ = Turns::LastShort.take();
        Ok(cluster)
    }

    async fn drive(&self, cluster: &Cluster, layout: Layout, workload: Workload) -> Result<Outcome, Failure> {
        say(&format!(
            "{}: {} streams, {} arrivals within {:.0} s",
            layout.name(),
            workload.streams.num,
            workload.arrivals.len(),
            workload.arrivals.last().map_or(0.0, |arrival| arrival.at.as_secs_f64())
        ));
        let mut counted = Counted { cluster, before: Counts::default(), during: Counts::default() };
        let timeout = self.options.request_timeout;
        let run = Box::pin(drive(&cluster.client, workload, timeout, &mut counted)).await?;
        Ok(Outcome::of(&run, counted.during, self.slo))
    }
}

/// What a cluster counts between the first arrival and the last answer.
struct Counted<'a> {
    cluster: &'a Cluster,
    before: Counts,
    during: Counts,
}

impl Observer for Counted<'_> {
    async fn arrivals_begin(&mut self) -> Result<(), Failure> {
        self.before = self.cluster.counts().await?;
        Ok(())
    }

    async fn arrivals_ended(&mut self) -> Result<(), Failure> {
        self.during = self.cluster.counts().await?.since(&self.before);
        Ok(())
    }
}

/// Stays in its place until it has ended, so that an interrupt finds it there.
async fn stop(running: &mut Option<Cluster>) {
    if let Some(cluster) = running {
        cluster.stop(std::future::pending()).await;
    }
    *running = None;
}

fn interrupted() -> Failure {
    let line = "interrupted before everything was compared".to_owned();
    Failure::Child { line, code: Failure::Interrupted.code() }
}

/// How far it is; standard output is for the report.
fn say(line: &str) {
    eprintln!("{line}");
}
