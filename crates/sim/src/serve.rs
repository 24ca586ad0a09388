//! A given workload on a given cluster, without faults, and what its clients see of it.

use std::time::Duration;

use baton_handoff::{RequestId, Time};

use crate::fidelity::Fidelity;
use crate::ids::IdMap;
use crate::measured::Measured;
use crate::random::Random;
use crate::router::Ask;
use crate::workload::{self, Prompt, Workload, turn_tokens};
use crate::{Durations, Load, Report, Shape, Violation, world};

/// The sequences of streams' prompts, of blocks by name, and of arrivals' own prompts.
const STREAMS: u64 = 1 << 40;
const BLOCKS: u64 = 1 << 41;
/// Token ids of prompts: none of them ends a sequence.
const TOKENS: (u32, u32) = (3, 40);

/// A cluster and what it is sent.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// Everything random follows from it.
    pub seed: u64,
    /// The cluster; its [`Shape::load`] and [`Shape::hasty`] count for nothing.
    pub shape: Shape,
    /// What comes.
    pub workload: Workload,
    /// Arrivals that are served and not measured, while the cluster fills.
    pub num_warm_up: usize,
    /// Blocks have contents, and every token depends on all before it, as in runs with faults: ten times as dear, and nothing else differs.
    pub contents: bool,
    /// What workers were measured to take, in place of the device's roofline.
    pub measured: Option<Measured>,
}

/// What clients saw, and what happened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// Counts.
    pub report: Report,
    /// Of the arrivals, from their moment to their first token.
    pub ttft: Durations,
    /// Gaps between tokens while requests arrived: of the streams, or where there are none of the arrivals.
    pub itl: Durations,
    /// Gaps of the streams before the first request arrived.
    pub quiet_itl: Durations,
    /// Of the arrivals, between the first token, which a prefill worker sends, and the second.
    pub first_gap: Durations,
    /// Arrivals that were answered in full.
    pub num_answered: u64,
    /// From the first arrival to the last answer, in virtual time.
    pub duration: Duration,
}

/// Runs it until every arrival is answered and everything has returned to its place.
///
/// # Errors
/// The first rule that broke.
pub fn serve(config: &ServeConfig) -> Result<Served, Violation> {
    let longest = config.workload.longest().max(1);
    let load = Load { prompt_tokens: (1, longest), new_tokens: (1, 1), ..config.shape.load };
    let shape = Shape { load, hasty: false, ..config.shape };
    let fidelity = Fidelity { empty: !config.contents, measured: config.measured.clone() };
    world::World::serving(config, shape, fidelity).run_serving()
}

/// Listens to what is delivered.
#[derive(Debug, Default)]
pub(crate) struct Observer {
    /// Requests with a lower number arrive, the others are streams.
    num_arrivals: usize,
    num_warm_up: usize,
    has_streams: bool,
    over: bool,
    /// When the first request arrives, once that is known.
    pub(crate) will_arrive: Option<Time>,
    /// Requests arrive, since this moment.
    pub(crate) arriving: Option<Time>,
    /// Streams that have their first token.
    pub(crate) num_begun: u32,
    /// Requests that have ended, and whether they are complete, that were not looked at yet.
    pub(crate) ended: Vec<(usize, bool)>,
    served: Served,
}

impl Observer {
    pub(crate) fn first_token(&mut self, request: usize, took: Duration) {
        if request >= self.num_arrivals {
            self.num_begun += 1;
        } else if request >= self.num_warm_up {
            self.served.ttft.record(took);
        }
    }

    /// `nth`: the token's number in its sequence; 1 for the second.
    pub(crate) fn gap(&mut self, request: usize, nth: usize, gap: Duration) {
        let is_stream = request >= self.num_arrivals;
        if self.over {
            return;
        }
        if self.arriving.is_none() {
            return self.served.quiet_itl.record(gap);
        }
        let counts = is_stream || request >= self.num_warm_up;
        if nth == 1 && !is_stream && counts {
            self.served.first_gap.record(gap);
        }
        if counts && is_stream == self.has_streams {
            self.served.itl.record(gap);
        }
    }

    /// An arrival is answered in full.
    pub(crate) const fn finished(&mut self) {
        self.served.num_answered += 1;
    }

    /// The last arrival has its answer: what comes later is not measured.
    pub(crate) fn answered(&mut self, now: Time) {
        self.over = true;
        self.served.duration = self.arriving.map_or(Duration::ZERO, |since| now - since);
    }

    /// The end of a run.
    pub(crate) fn served(self, report: Report) -> Served {
        Served { report, ..self.served }
    }
}

/// What is still to come of a workload.
pub(crate) struct Given {
    seed: u64,
    workload: Workload,
    cache: bool,
    /// By request: which stream it is a turn of, which turn, and the router that has it.
    turns: IdMap<usize, (u32, u64, usize)>,
    next_request: usize,
    num_unanswered: usize,
}

impl Given {
    pub(crate) fn new(config: &ServeConfig) -> (Self, Observer) {
        let (workload, num_arrivals) = (config.workload.clone(), config.workload.arrivals.len());
        let given = Self {
            seed: config.seed,
            cache: config.shape.worker.cache,
            turns: IdMap::default(),
            next_request: num_arrivals,
            num_unanswered: num_arrivals,
            workload,
        };
        let has_streams = config.workload.streams.num > 0;
        let num_warm_up = config.num_warm_up;
        (given, Observer { num_arrivals, num_warm_up, has_streams, ..Observer::default() })
    }

    pub(crate) const fn workload(&self) -> &Workload {
        &self.workload
    }

    pub(crate) fn num_arrivals(&self) -> usize {
        self.workload.arrivals.len()
    }

    /// The number of the request that a stream's next turn is.
    pub(crate) fn turn(&mut self, stream: u32, turn: u64, router: usize) -> usize {
        let request = self.next_request;
        self.next_request += 1;
        self.turns.insert(request, (stream, turn, router));
        request
    }

    /// A request has ended: the stream and turn that it was, and whether all arrivals are answered now.
    pub(crate) fn ended(&mut self, request: usize) -> (Option<(u32, u64, usize)>, bool) {
        let turn = self.turns.remove(&request);
        let was_last = turn.is_none() && self.num_unanswered == 1;
        self.num_unanswered -= usize::from(turn.is_none());
        (turn, was_last)
    }

    pub(crate) const fn is_over(&self) -> bool {
        self.num_unanswered == 0
    }

    /// The streams that still run, with their routers, in the order of their requests.
    pub(crate) fn running(&self) -> Vec<(usize, usize)> {
        let mut running: Vec<_> = self.turns.iter().map(|(request, turn)| (*request, turn.2)).collect();
        running.sort_unstable();
        running
    }

    /// What a request asks.
    pub(crate) fn ask(&self, request: usize, random: &mut Random) -> Ask {
        let (prompt, max_new_tokens) = match self.workload.arrivals.get(request) {
            Some(arrival) => (self.prompt(&arrival.prompt), arrival.output_tokens),
            None => {
                let (stream, turn, _) = self.turns.get(&request).copied().unwrap_or_default();
                let streams = &self.workload.streams;
                let nth = STREAMS + u64::from(stream) + turn * u64::from(streams.num);
                let output = turn_tokens(streams.output_tokens, (stream, streams.num), turn);
                (self.tokens(nth, streams.prompt_tokens), output)
            }
        };
        Ask {
            request: RequestId(random.id()),
            prompt: prompt.into(),
            max_new_tokens: max_new_tokens.max(1),
            stop_tokens: Vec::new(),
            seed: random.next(),
            priority: 0,
            cache: self.cache,
            stop_after: vec![None],
            patience: None,
        }
    }

    fn tokens(&self, nth: u64, num: u32) -> Vec<u32> {
        let mut random = workload::Random::new(self.seed, nth);
        (0..num.max(1)).map(move |_| random.between(TOKENS.0, TOKENS.1)).collect()
    }

    fn prompt(&self, prompt: &Prompt) -> Vec<u32> {
        match prompt {
            Prompt::Unique { nth, tokens } => self.tokens(*nth, *tokens),
            Prompt::Blocks { ids, block, tokens } => {
                let all = ids.iter().flat_map(|id| self.tokens(BLOCKS + id, *block));
                all.take(*tokens as usize).collect()
            }
        }
    }
}
