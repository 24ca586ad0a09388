//! One granted handoff, and the one stream at a time that writes for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_kv::Fence;
use baton_proto::v1;
use baton_telemetry::trace::TraceContext;
use tokio::sync::{Notify, mpsc, watch};

use crate::receiver::{ReceiveReport, ReceiverEvent};
use crate::writer::Writer;

/// What the driver is told without a queue.
#[derive(Clone, Copy, Default)]
pub(crate) struct News {
    pub(crate) verified: u64,
    pub(crate) report: ReceiveReport,
    /// The source's span of the transfer, once a stream was opened.
    pub(crate) trace: Option<TraceContext>,
    /// The lease is dropped.
    pub(crate) ended: bool,
}

pub(crate) struct Entry {
    total_bytes: u64,
    fence: Fence,
    slot: Mutex<Slot>,
    /// Grows when a stream takes over and when the handoff is fenced: whoever writes stops then.
    turn: watch::Sender<u64>,
    returned: Notify,
    pub(crate) news: watch::Sender<News>,
    events: mpsc::Sender<ReceiverEvent>,
}

enum Slot {
    /// Nobody writes.
    Here(Box<Writer>),
    /// A stream has it.
    Taken,
    /// Dropped.
    Ended,
}

/// Answer to a stream that wants to write.
pub(crate) enum Claimed {
    Writer(Claim),
    /// The lease is gone: everything was verified, or the handoff was fenced.
    Ended,
    /// A newer stream wants it too, or the older one did not let go.
    Refused,
}

impl Entry {
    pub(crate) fn new(
        writer: Writer,
        fence: Fence,
        news: watch::Sender<News>,
        events: mpsc::Sender<ReceiverEvent>,
    ) -> Self {
        Self {
            total_bytes: writer.total_bytes(),
            fence,
            slot: Mutex::new(Slot::Here(Box::new(writer))),
            turn: watch::channel(0).0,
            returned: Notify::new(),
            news,
            events,
        }
    }

    /// Of the whole stream.
    pub(crate) const fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// What was verified up to now.
    pub(crate) fn progress(&self) -> v1::PushProgress {
        let news = self.news.borrow();
        v1::PushProgress { bytes: news.verified, frames: news.report.frames, shared_read: 0 }
    }

    /// A stream of this span was opened.
    pub(crate) fn traced(&self, trace: TraceContext) {
        self.news.send_if_modified(|news| news.trace.replace(trace).is_none());
    }

    /// Whether the handoff ended with bytes missing.
    pub(crate) fn is_cut_short(&self) -> bool {
        self.news.borrow().verified < self.total_bytes
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No write begins after this returns; the writer is dropped here or by the stream that has it.
    pub(crate) fn end(&self) {
        self.fence.close();
        let here = {
            let mut slot = self.slot();
            match std::mem::replace(&mut *slot, Slot::Ended) {
                Slot::Here(writer) => Some(writer),
                // The stream that has it drops it when it sees the fence.
                Slot::Taken => {
                    *slot = Slot::Taken;
                    None
                }
                Slot::Ended => None,
            }
        };
        if let Some(writer) = here {
            self.drop_writer(writer);
        }
        self.turn.send_modify(|turn| *turn += 1);
    }

    fn drop_writer(&self, writer: Box<Writer>) {
        drop(writer);
        self.news.send_modify(|news| news.ended = true);
    }

    /// Stops the stream that writes, if any, and takes its place.
    pub(crate) async fn claim(self: &Arc<Self>, patience: Duration) -> Claimed {
        let mut mine = 0;
        self.turn.send_modify(|turn| {
            *turn += 1;
            mine = *turn;
        });
        let mut turn = self.turn.subscribe();
        let deadline = tokio::time::Instant::now() + patience;
        loop {
            match self.take() {
                Slot::Here(writer) => {
                    return Claimed::Writer(Claim {
                        entry: Arc::clone(self),
                        writer: Some(writer),
                        turn,
                        mine,
                    });
                }
                Slot::Ended => return Claimed::Ended,
                Slot::Taken => {}
            }
            tokio::select! {
                () = self.returned.notified() => {}
                () = revoked(&mut turn, mine) => {
                    // Whoever came later waits for the same notice.
                    self.returned.notify_one();
                    return Claimed::Refused;
                }
                () = tokio::time::sleep_until(deadline) => return Claimed::Refused,
            }
        }
    }

    fn take(&self) -> Slot {
        let mut slot = self.slot();
        match &*slot {
            Slot::Here(_) => std::mem::replace(&mut *slot, Slot::Taken),
            Slot::Taken => Slot::Taken,
            Slot::Ended => Slot::Ended,
        }
    }

    /// The writer comes back: for the next stream, or to be dropped.
    fn put_back(&self, writer: Box<Writer>) {
        let over = {
            let mut slot = self.slot();
            // Looked at under the lock: a fence that closes now finds the writer in its slot.
            if writer.is_fenced() || writer.is_whole() {
                *slot = Slot::Ended;
                Some(writer)
            } else {
                *slot = Slot::Here(writer);
                None
            }
        };
        if let Some(writer) = over {
            self.drop_writer(writer);
        }
        self.returned.notify_one();
    }
}

/// One stream's hold on the writer; dropping it gives it back.
pub(crate) struct Claim {
    entry: Arc<Entry>,
    writer: Option<Box<Writer>>,
    turn: watch::Receiver<u64>,
    mine: u64,
}

async fn revoked(turn: &mut watch::Receiver<u64>, mine: u64) {
    // An error means that the entry is gone, and with it everything to write.
    let _ = turn.wait_for(|turn| *turn != mine).await;
}

impl Claim {
    /// Notes that a stream begins.
    pub(crate) fn opened(&mut self) -> Arc<Entry> {
        if let Some(writer) = &mut self.writer {
            writer.report.num_streams += 1;
        }
        self.publish();
        Arc::clone(&self.entry)
    }

    /// What was verified up to now, and how many payloads were read from shared memory.
    pub(crate) fn progress(&self, shared_read: u64) -> v1::PushProgress {
        v1::PushProgress { shared_read, ..self.entry.progress() }
    }

    /// Present until the claim is released.
    pub(crate) fn writer(&mut self) -> Option<&mut Writer> {
        self.writer.as_deref_mut()
    }

    /// Another stream took over, or the handoff was fenced.
    pub(crate) async fn revoked(&mut self) {
        revoked(&mut self.turn, self.mine).await;
    }

    /// Tells what is verified; costs the driver one look however many frames it stands for.
    pub(crate) fn publish(&self) {
        let Some(writer) = &self.writer else { return };
        self.entry.news.send_modify(|news| {
            news.verified = writer.verified();
            news.report = writer.report;
        });
    }

    /// Tells the driver; gives up when the claim is revoked meanwhile.
    pub(crate) async fn tell(&mut self, event: ReceiverEvent) {
        tokio::select! {
            _ = self.entry.events.send(event) => {}
            () = revoked(&mut self.turn, self.mine) => {}
        }
    }

    /// Gives the writer back.
    pub(crate) fn release(&mut self) {
        if let Some(writer) = self.writer.take() {
            self.entry.put_back(writer);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.release();
    }
}
