//! What a request's transfers cost, and what its neighbours cost it or were spared.

use baton_telemetry::StallCause;

/// What transfers cost, in milliseconds on the decode worker's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Kv {
    pub(crate) bytes: u64,
    pub(crate) total_ms: f64,
    /// Of the total, what the answer waited for.
    pub(crate) exposed_ms: f64,
    /// With bytes outstanding.
    pub(crate) wire_ms: f64,
}

impl Kv {
    /// Of the total, what nobody waited for.
    pub(crate) fn hidden_ms(&self) -> f64 {
        self.total_ms - self.exposed_ms
    }

    /// Another transfer of the same request.
    pub(super) fn add(&mut self, other: &Self) {
        self.bytes += other.bytes;
        self.total_ms += other.total_ms;
        self.exposed_ms += other.exposed_ms;
        self.wire_ms += other.wire_ms;
    }
}

/// A gap between two tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Stall {
    pub(crate) cause: StallCause,
    /// Beyond what decoding alone takes.
    pub(crate) blocked_ms: f64,
}

/// What a request's prompt would have cost those that ran on its decode worker, had it been computed there; a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AvoidedStall {
    pub(crate) victims: u32,
    /// Summed over them.
    pub(crate) total_ms: f64,
    /// Mean relative error of the model's steps.
    pub(crate) residual: f64,
}

/// What others' prompts would have cost a sequence; a model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RunStats {
    pub(crate) avoided_ms: f64,
    pub(crate) avoided_prefills: u32,
}

/// What a request's neighbours were spared on its account, and it on theirs, over all its attempts and sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Neighbours {
    /// What its own prompt would have cost others.
    pub(super) spared: Option<AvoidedStall>,
    /// What others' prompts would have cost it.
    pub(super) was_spared: RunStats,
}

impl Neighbours {
    /// A group runs.
    pub(super) fn started(&mut self, avoided: Option<AvoidedStall>) {
        let Some(avoided) = avoided else { return };
        let before = self.spared.map_or((0, 0.0), |before| (before.victims, before.total_ms));
        self.spared = Some(AvoidedStall {
            victims: avoided.victims.saturating_add(before.0),
            total_ms: avoided.total_ms + before.1,
            ..avoided
        });
    }

    /// A sequence is complete.
    pub(super) fn finished(&mut self, stats: Option<RunStats>) {
        let stats = stats.unwrap_or_default();
        self.was_spared.avoided_ms += stats.avoided_ms;
        self.was_spared.avoided_prefills =
            self.was_spared.avoided_prefills.saturating_add(stats.avoided_prefills);
    }
}

/// The baseline that stalls are avoided against: as many workers in all, each of them computing prompts beside decoding. There a
/// given sequence shares its worker with a given prompt less often than on the decode workers alone, by [`Baseline::share`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Baseline {
    pub(super) num_prefill: u32,
    pub(super) num_decode: u32,
}

impl Baseline {
    fn num_workers(self) -> u32 {
        self.num_prefill.saturating_add(self.num_decode).max(1)
    }

    /// Of what a decode worker reports, how much the baseline would have cost in the mean.
    pub(super) fn share(self) -> f64 {
        f64::from(self.num_decode.max(1)) / f64::from(self.num_workers())
    }

    /// Its name, and how the figure is made.
    pub(super) fn method(self) -> String {
        format!("colocated-{}x1 expected-share linear-step-cost", self.num_workers())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_all_attempts_and_sequences_add_up_and_negative_ones_stay() {
        let mut neighbours = Neighbours::default();
        let avoided = |victims, total_ms| Some(AvoidedStall { victims, total_ms, residual: 0.1 });
        neighbours.started(None);
        assert_eq!(neighbours.spared, None);
        neighbours.started(avoided(3, 9.0));
        neighbours.started(avoided(1, -2.0));
        assert_eq!(neighbours.spared, avoided(4, 7.0));
        neighbours.finished(Some(RunStats { avoided_ms: 5.0, avoided_prefills: 2 }));
        neighbours.finished(None);
        neighbours.finished(Some(RunStats { avoided_ms: -1.5, avoided_prefills: 1 }));
        assert_eq!(neighbours.was_spared, RunStats { avoided_ms: 3.5, avoided_prefills: 3 });
    }

    #[test]
    fn the_baseline_has_as_many_workers_and_says_so() {
        let baseline = Baseline { num_prefill: 1, num_decode: 1 };
        assert_eq!(baseline.share(), 0.5);
        assert_eq!(baseline.method(), "colocated-2x1 expected-share linear-step-cost");
        assert_eq!(Baseline { num_prefill: 1, num_decode: 3 }.share(), 0.75);
        let lost = Baseline { num_prefill: 0, num_decode: 0 };
        assert_eq!(lost.share(), 1.0, "nobody is left");
    }
}
