//! What the root span says of a request at its end, and the metrics that go with it.

use baton_dispatch::RequestEnd;
use baton_handoff::Cause;
use baton_telemetry::names;

use super::cost::Baseline;
use super::run::Run;
use super::{Summary, finish_name};
use crate::api_error::ApiError;
use crate::slo::{Kept, Waits, outcome};

impl Run<'_> {
    /// Compares how long the client waited with what is promised, and counts it.
    pub(super) fn judge(&self, result: &Result<Summary, ApiError>) -> Kept {
        let cancelled = Err(ApiError::Failed { cause: Cause::Cancelled });
        let kept = self.app.slo.judge(&Waits {
            ttft: self.answer.ttft(),
            longest_gap: self.answer.longest_gap(),
            age: self.arrived.elapsed(),
            cancelled: *result == cancelled,
        });
        for (slo, kept) in [("ttft", kept.ttft), ("itl", kept.itl)] {
            if let Some(kept) = kept {
                self.app.metrics.slo(slo, outcome(kept));
            }
        }
        kept
    }

    /// Counts what the request's prompt would have cost others; answers with the baseline, if anything is known against it.
    pub(super) fn spared(&self) -> Option<Baseline> {
        let known = self.neighbours.spared.is_some() || self.neighbours.was_spared.avoided_prefills > 0;
        let (num_prefill, num_decode) = known.then(|| self.app.fleet.num_ready())?;
        let baseline = Baseline { num_prefill, num_decode };
        if let Some(spared) = self.neighbours.spared {
            // A counter only grows; spans carry negative figures too.
            let seconds = spared.total_ms * baseline.share() / 1e3;
            self.app.metrics.hol_avoided.inc_by(seconds.max(0.0));
        }
        Some(baseline)
    }

    /// Says it all on the root span.
    pub(super) fn describe(
        &mut self,
        result: &Result<Summary, ApiError>,
        kept: Kept,
        baseline: Option<Baseline>,
    ) {
        let Some(root) = self.spans.on() else { return };
        if let Some(RequestEnd::Unplaced { error, .. }) = self.ended {
            root.unplaced(error);
        }
        root.ended(result.as_ref().err());
        // A client that left is told nothing.
        if *result != Err(ApiError::Failed { cause: Cause::Cancelled }) {
            root.responds();
        }
        if let Some(placed) = self.placed {
            root.set(names::MODE, placed.mode.name());
            root.set(names::REASON, placed.reason);
        }
        root.set(names::RETRIES, self.request.num_retries());
        root.set(names::PREEMPTIONS, self.num_preemptions);
        root.set(names::GEN_AI_INPUT_TOKENS, self.prompt.len());
        root.set(names::GEN_AI_OUTPUT_TOKENS, self.answer.num_tokens());
        root.set(names::CACHED_TOKENS, self.cached_tokens);
        let reasons: Vec<&str> = self.answer.reasons().map(finish_name).collect();
        if !reasons.is_empty() {
            root.set(names::GEN_AI_FINISH_REASONS, reasons.join(","));
        }
        for (name, kept) in [(names::SLO_TTFT, kept.ttft), (names::SLO_ITL, kept.itl)] {
            if let Some(kept) = kept {
                root.set(name, outcome(kept));
            }
        }
        root.set(names::EXACT, root.is_exact());
        if kept.is_missed() {
            root.keep();
        }
        root.first_token(self.answer.ttft());
        if let Some(gap) = self.answer.first_gap() {
            root.set(names::TOKEN_GAP_1_2_MS, gap.as_secs_f64() * 1e3);
        }
        if let Some(kv) = &self.kv {
            root.set(names::KV_BYTES, kv.bytes);
            root.set(names::KV_TOTAL_MS, kv.total_ms);
            root.set(names::KV_HIDDEN_MS, kv.hidden_ms());
            root.set(names::KV_EXPOSED_MS, kv.exposed_ms);
            root.set(names::KV_WIRE_MS, kv.wire_ms);
        }
        let Some(baseline) = baseline else { return };
        root.set(names::HOL_METHOD, baseline.method());
        if let Some(spared) = self.neighbours.spared {
            root.set(names::HOL_AVOIDED_MS, spared.total_ms * baseline.share());
            root.set(names::HOL_VICTIMS, spared.victims);
            root.set(names::HOL_RESIDUAL, spared.residual);
        }
        root.set(names::HOL_WOULD_BLOCK_MS, self.neighbours.was_spared.avoided_ms * baseline.share());
        root.set(names::HOL_PREFILLS, self.neighbours.was_spared.avoided_prefills);
    }
}
