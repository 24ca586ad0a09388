//! A leg's KV: from the reservation to the last verified frame.

use baton_handoff::DestinationFact;
use baton_kv::WriteLease;
use baton_transfer::{Grant, ReceiverEvent, TokenSpan, TransferError};

use super::Leg;

impl Leg {
    /// The receiver must know the handoff before the grant is out.
    pub(super) fn reserved(&mut self, lease: WriteLease, skip_tokens: usize) {
        let Ok(loaded) = self.core.loaded() else { return };
        self.skip_tokens = skip_tokens;
        let span = TokenSpan { prompt_tokens: self.prompt_tokens, skip_tokens };
        match self.receivers.grant(Grant { key: self.machine.key(), span, lease }) {
            Ok(receiver) => {
                self.receiver = Some(receiver);
                self.fact(DestinationFact::Reserved {
                    skip_tokens: u32::try_from(skip_tokens).unwrap_or(u32::MAX),
                    bytes: span.bytes(loaded.layout()),
                });
            }
            Err(TransferError::Full { .. }) => self.fact(DestinationFact::NoRoom),
            Err(error) => self.broken(&error),
        }
    }

    pub(super) fn receiver_event(&mut self, event: Option<ReceiverEvent>) {
        self.mark_received();
        let now = self.core.clock.now();
        match event {
            Some(ReceiverEvent::Verified { bytes }) => {
                self.waits.verified(self.marks.verified.unwrap_or(now));
                self.fact(DestinationFact::Verified { bytes });
            }
            Some(ReceiverEvent::Corrupt { frame }) => {
                self.waits.corrupt(now);
                self.core.metrics.kv_frames_corrupt.inc();
                tracing::warn!(frame, "a KV frame failed its checksum");
                self.fact(DestinationFact::Corrupt { frame });
            }
            Some(ReceiverEvent::Lost { detail }) => {
                self.detail = detail;
                self.fact(DestinationFact::BulkLost);
            }
            Some(ReceiverEvent::Failed { cause, detail }) => {
                self.detail = detail;
                self.fact(DestinationFact::Cancelled(cause));
            }
            Some(ReceiverEvent::WriterEnded) => {
                self.receiver = None;
                self.fact(DestinationFact::WriterEnded);
            }
            None => self.receiver = None,
        }
    }

    fn mark_received(&mut self) {
        let Some(receiver) = &self.receiver else { return };
        let report = receiver.report();
        self.spans.sent_by(receiver.trace());
        self.core.metrics.kv_received_bytes.inc_by(report.bytes.saturating_sub(self.marks.bytes));
        let clock = self.core.clock;
        self.marks.first_frame = report.first_frame_at.map(|at| clock.at(at));
        self.marks.verified = report.last_verified_at.map(|at| clock.at(at));
        self.marks.wire = report.wire;
        self.waits.waited_for_credit(self.marks.verified.unwrap_or_default(), report.credit_wait);
        let late = &self.core.metrics.late_messages;
        late.add("receiver", report.duplicate_frames.saturating_sub(self.marks.duplicate_frames));
        self.marks.duplicate_frames = report.duplicate_frames;
        self.marks.bytes = report.bytes;
        self.marks.frames = report.frames;
    }
}
