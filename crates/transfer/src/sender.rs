//! Sending one handoff's frames: what is computed goes out in order, as far as the source's machine allows.
//!
//! The sender decides nothing: it is told how far to transmit, which frame to send again, from where to go on after a lost
//! connection, and to stop. It tells what is computed, what the transport took and when the connection broke.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use baton_handoff::{Cause, HandoffKey};
use baton_kv::{BlockMemory, ReadLease};
use baton_telemetry::trace::TraceContext;
use tokio::sync::{mpsc, watch};

use crate::bulk::Bulk;
use crate::frames::{Frame, FramePlan, TokenSpan};
use crate::outgoing::Blocks;
use crate::progress::Progress;
use crate::push::PushTask;
use crate::{DEVICE_FRAME_BYTES, FRAME_BYTES, SHARED_FRAME_BYTES, TransferError, Transport};

/// Frames that wait to be sent again; the machine asks for one at a time.
const MAX_PENDING_RESENDS: usize = 16;

/// What a sender is created with, once the prompt's blocks are allocated.
pub struct SenderConfig {
    /// The handoff.
    pub key: HandoffKey,
    /// What to send.
    pub span: TokenSpan,
    /// All blocks of the prompt, skipped ones included.
    pub lease: ReadLease,
    /// Where they lie.
    pub memory: Arc<dyn BlockMemory>,
    /// What the step loop tells; attached to the sequence before its first step.
    pub progress: Progress,
    /// Where the bytes go, see [`crate::Peer::bulk`].
    pub channel: Bulk,
    /// Credit of the grant: a frame is never larger, but always at least one block of one layer.
    pub first_credit: u64,
    /// The span of the transfer, for the destination.
    pub trace: Option<TraceContext>,
}

/// What the sender tells; the names are those of [`baton_handoff::SourceFact`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SenderEvent {
    /// Every byte below this offset is computed.
    Encoded {
        /// Absolute offset.
        bytes: u64,
    },
    /// The transport took every byte below this offset.
    Sent {
        /// Absolute offset.
        bytes: u64,
    },
    /// The transport took a frame that was to be sent again.
    Resent,
    /// The connection broke; nothing is sent until [`Sender::reopen`].
    Lost {
        /// What the transport said.
        detail: String,
    },
    /// The destination refused the stream: abort the handoff.
    Refused {
        /// Why.
        cause: Cause,
        /// What it said.
        detail: String,
    },
    /// The destination has verified every byte; nothing follows.
    Delivered,
}

/// What went over the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SentTotals {
    /// Bytes of KV in the handoff's byte stream, resends not counted.
    pub bytes: u64,
    /// Frames they were cut into.
    pub frames: u64,
    /// Frames sent more than once.
    pub resent_frames: u64,
}

/// The driver's handle. Dropping it stops the sender.
pub struct Sender {
    shared: Arc<Shared>,
    news: watch::Receiver<News>,
    events: mpsc::Receiver<SenderEvent>,
    seen: News,
}

/// What only grows between two reopenings.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct News {
    pub(crate) encoded: u64,
    pub(crate) sent: u64,
    pub(crate) resent: u64,
}

pub(crate) struct Shared {
    pub(crate) key: HandoffKey,
    pub(crate) trace: Option<TraceContext>,
    pub(crate) progress: Progress,
    first_frame_at: OnceLock<Instant>,
    credit_wait_us: AtomicU64,
    pub(crate) news: watch::Sender<News>,
    up_to: AtomicU64,
    fenced: AtomicBool,
    work: Mutex<Work>,
}

struct Work {
    plan: FramePlan,
    computed: u64,
    resends: VecDeque<u64>,
    reopen_from: Option<u64>,
}

/// Creates a sender; the future is to be spawned where the bulk connection's work is done, and holds the lease until it ends.
///
/// # Errors
/// [`TransferError::Protocol`] or [`TransferError::Layout`] when span, lease and layout do not fit.
pub fn sender(
    config: SenderConfig,
) -> Result<(Sender, impl Future<Output = ()> + Send + use<>), TransferError> {
    let frame_bytes = match config.channel.transport() {
        Transport::Ipc => DEVICE_FRAME_BYTES,
        Transport::Shm => SHARED_FRAME_BYTES,
        Transport::Auto | Transport::Grpc => FRAME_BYTES,
    };
    sender_with_frames(config, frame_bytes)
}

/// [`sender`] with another bound of a frame's payload, in bytes; for measuring.
///
/// # Errors
/// As [`sender`].
pub fn sender_with_frames(
    config: SenderConfig,
    frame_bytes: usize,
) -> Result<(Sender, impl Future<Output = ()> + Send + use<>), TransferError> {
    let SenderConfig { key, span, lease, memory, progress, channel, first_credit, trace } = config;
    let frame_bytes = usize::try_from(first_credit).unwrap_or(usize::MAX).min(frame_bytes);
    let plan = FramePlan::new(memory.layout(), span, frame_bytes)?.in_order(channel.order());
    let largest = frame_bytes.max(memory.layout().block_layer_bytes());
    let needed = memory.layout().blocks_for(span.prompt_tokens);
    if lease.len() < needed {
        return Err(TransferError::Protocol(format!(
            "the lease has {} blocks; {} prompt tokens take {needed}",
            lease.len(),
            span.prompt_tokens
        )));
    }
    let least = (memory.layout().block_layer_bytes() as u64).min(plan.total_bytes());
    if first_credit < least {
        return Err(TransferError::Layout(format!(
            "the grant's credit of {first_credit} bytes is less than one block of one layer, {least} bytes"
        )));
    }
    let (news_tx, news) = watch::channel(News::default());
    let (events_tx, events) = mpsc::channel(4);
    let shared = Arc::new(Shared {
        key,
        trace,
        first_frame_at: OnceLock::new(),
        credit_wait_us: AtomicU64::new(0),
        progress,
        news: news_tx,
        up_to: AtomicU64::new(0),
        fenced: AtomicBool::new(false),
        work: Mutex::new(Work { plan, computed: 0, resends: VecDeque::new(), reopen_from: Some(0) }),
    });
    let blocks = Arc::new(Blocks { memory, lease, key });
    let task = PushTask::new(Arc::clone(&shared), blocks, channel, largest, events_tx);
    Ok((Sender { shared, news, events, seen: News::default() }, task.run()))
}

impl Sender {
    /// Frames that end at or before this absolute offset may be sent. Never goes back.
    pub fn transmit(&self, up_to: u64) {
        self.shared.up_to.fetch_max(up_to, Ordering::AcqRel);
        self.shared.progress.wake();
    }

    /// Sends a frame once more, ahead of new ones and beside credit.
    ///
    /// # Errors
    /// [`TransferError::Protocol`] for a frame that was never cut, [`TransferError::Full`] when too many wait.
    pub fn resend(&self, frame: u64) -> Result<(), TransferError> {
        {
            let mut work = self.shared.work();
            if frame >= work.plan.num_frames() {
                let num_frames = work.plan.num_frames();
                return Err(TransferError::Protocol(format!(
                    "resend of frame {frame}; there are {num_frames}"
                )));
            }
            if work.resends.len() >= MAX_PENDING_RESENDS {
                return Err(TransferError::Full { what: "frames to resend", limit: MAX_PENDING_RESENDS });
            }
            work.resends.push_back(frame);
        }
        self.shared.progress.wake();
        Ok(())
    }

    /// After [`SenderEvent::Lost`]: opens the stream anew and goes on from the frame that holds the byte at `from`, or
    /// further where the destination says that it has more.
    pub fn reopen(&mut self, from: u64) {
        {
            let mut work = self.shared.work();
            work.reopen_from = Some(from);
            // What was asked for again lies behind `from`.
            work.resends.clear();
        }
        self.shared.news.send_modify(|news| news.sent = from);
        self.seen.sent = from;
        self.shared.progress.wake();
    }

    /// Stops: no byte is read from the blocks for a frame that is not with the transport yet, and the stream is closed.
    pub fn fence(&self) {
        self.shared.fenced.store(true, Ordering::Release);
        self.shared.progress.wake();
    }

    /// What happened next; `None` once the sender has ended. Loses nothing when dropped in a `select!`.
    pub async fn next(&mut self) -> Option<SenderEvent> {
        let mut open = true;
        loop {
            let news = *self.news.borrow_and_update();
            if news.encoded > self.seen.encoded {
                self.seen.encoded = news.encoded;
                return Some(SenderEvent::Encoded { bytes: news.encoded });
            }
            if news.sent > self.seen.sent {
                self.seen.sent = news.sent;
                return Some(SenderEvent::Sent { bytes: news.sent });
            }
            if news.resent > self.seen.resent {
                self.seen.resent += 1;
                return Some(SenderEvent::Resent);
            }
            if let Ok(event) = self.events.try_recv() {
                return Some(event);
            }
            if !open {
                return None;
            }
            tokio::select! {
                changed = self.news.changed() => open = changed.is_ok(),
                // `None`: the task has ended; what it said last is looked at once more.
                event = self.events.recv() => match event {
                    Some(event) => return Some(event),
                    None => open = false,
                }
            }
        }
    }

    /// When the first frame was made; none was before that.
    pub fn first_frame_at(&self) -> Option<Instant> {
        self.shared.first_frame_at.get().copied()
    }

    /// How long frames were ready and there was no credit for them, up to the last frame sent.
    pub fn credit_wait(&self) -> Duration {
        Duration::from_micros(self.shared.credit_wait_us.load(Ordering::Relaxed))
    }

    /// The whole stream's bytes and frames; `None` until every token of the span is computed.
    pub fn totals(&self) -> Option<SentTotals> {
        self.shared.catch_up();
        let resent_frames = self.shared.news.borrow().resent;
        let work = self.shared.work();
        work.plan.is_complete().then(|| SentTotals {
            bytes: work.plan.total_bytes(),
            frames: work.plan.num_frames(),
            resent_frames,
        })
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.fence();
    }
}

impl Shared {
    fn work(&self) -> MutexGuard<'_, Work> {
        // Nothing in here panics halfway through a change.
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_fenced(&self) -> bool {
        self.fenced.load(Ordering::Acquire)
    }

    /// Takes in what the step loop computed, and tells.
    pub(crate) fn catch_up(&self) {
        let computed = {
            let mut work = self.work();
            let at = self.progress.get();
            let before = work.computed;
            work.computed = work.plan.advance(at, before);
            work.computed
        };
        self.news.send_if_modified(|news| {
            let grown = computed > news.encoded;
            news.encoded = news.encoded.max(computed);
            grown
        });
    }

    /// A frame goes out that had waited for credit this long.
    pub(crate) fn frame_made(&self, waited_us: u64) {
        self.first_frame_at.get_or_init(Instant::now);
        self.credit_wait_us.fetch_add(waited_us, Ordering::Relaxed);
    }

    /// What the stream does next, when its new frames have come to `index`.
    pub(crate) fn next(&self, index: u64) -> Next {
        let work = self.work();
        if let Some(frame) = work.resends.front().and_then(|&again| work.plan.frame(again)) {
            return Next::Again(frame);
        }
        match work.plan.frame(index) {
            None if work.plan.is_complete() => Next::Exhausted,
            Some(frame) if frame.end() <= self.up_to.load(Ordering::Acquire) => Next::New(frame),
            Some(frame) if frame.end() <= work.computed => Next::Uncredited,
            None | Some(_) => Next::Computing,
        }
    }

    /// The transport took everything before `end`.
    pub(crate) fn sent(&self, end: u64) {
        self.news.send_modify(|news| news.sent = news.sent.max(end));
    }

    /// The transport took the frame of the last [`Next::Again`].
    pub(crate) fn resent(&self) {
        self.work().resends.pop_front();
        self.news.send_modify(|news| news.resent += 1);
    }

    /// From where to open the stream, once that is decided.
    pub(crate) fn take_reopen(&self) -> Option<u64> {
        self.work().reopen_from.take()
    }

    pub(crate) fn index_at(&self, offset: u64) -> u64 {
        self.work().plan.index_at(offset)
    }

    pub(crate) fn total_bytes(&self) -> u64 {
        self.work().plan.total_bytes()
    }
}

/// What a stream does next.
#[derive(Clone, Copy)]
pub(crate) enum Next {
    /// Send this frame, and count on.
    New(Frame),
    /// Send this frame once more.
    Again(Frame),
    /// Nothing more is computed yet.
    Computing,
    /// Bytes are there, credit is not.
    Uncredited,
    /// Everything was sent.
    Exhausted,
}
