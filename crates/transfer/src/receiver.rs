//! Granted handoffs: who may push which frames into which blocks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_handoff::{Cause, HandoffKey};
use baton_kv::{BlockMemory, WriteLease};
use baton_proto::v1;
use baton_telemetry::trace::TraceContext;
use tokio::sync::{mpsc, watch};

use crate::claim::{Entry, News};
use crate::device::{DeviceView, DeviceViews};
use crate::frames::TokenSpan;
use crate::ring::RING_BYTES;
use crate::shared::SharedView;
use crate::view::View;
use crate::writer::Writer;
use crate::{BULK_WINDOW_BYTES, MAX_FRAME_BYTES, TransferError, Transport};

/// Events of one handoff that wait for its driver; a stream that has more waits.
const MAX_EVENTS: usize = 16;

/// Two frames: one that is verified, one that is under way.
const MIN_CREDIT_WINDOW: u64 = 2 * crate::FRAME_BYTES as u64;

/// More brings nothing on a link that a host is likely to have: 8 MiB is 2 ms at 32 Gb/s.
const MAX_CREDIT_WINDOW: u64 = 8 * 1024 * 1024;

/// A handoff that may be pushed here.
pub struct Grant {
    /// The handoff.
    pub key: HandoffKey,
    /// What comes.
    pub span: TokenSpan,
    /// The blocks to write: all of the sequence but the skipped ones.
    pub lease: WriteLease,
}

/// What a receiver tells; the names are those of [`baton_handoff::DestinationFact`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReceiverEvent {
    /// Every byte below this offset is verified and lies in its block.
    Verified {
        /// Absolute offset.
        bytes: u64,
    },
    /// This frame failed its checksum: it is to be sent again.
    Corrupt {
        /// Index of the frame.
        frame: u64,
    },
    /// The stream broke; the source may open it once more.
    Lost {
        /// What the transport said.
        detail: String,
    },
    /// The source broke the protocol: the attempt is over.
    Failed {
        /// Why.
        cause: Cause,
        /// For people.
        detail: String,
    },
    /// The lease is dropped: nothing writes into the blocks any more.
    WriterEnded,
}

/// What came in, on this process's monotonic clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiveReport {
    /// Verified bytes of KV.
    pub bytes: u64,
    /// Verified frames.
    pub frames: u64,
    /// Frames that failed their checksum.
    pub corrupt_frames: u64,
    /// Frames that came although they were verified already.
    pub duplicate_frames: u64,
    /// Streams opened: 1, or 2 when the connection was lost.
    pub num_streams: u32,
    /// t_f: the first frame was received.
    pub first_frame_at: Option<Instant>,
    /// t_v, once everything is verified: the last frame was.
    pub last_verified_at: Option<Instant>,
    /// Time with bytes outstanding: from frame to frame, less the time in which the source says it had nothing it could send.
    pub wire: Duration,
    /// Time in which the source had bytes and no credit, by its own clock.
    pub credit_wait: Duration,
}

/// All granted handoffs of a worker, by key; shared with [`crate::KvStreamService`].
#[derive(Clone)]
pub struct Receivers {
    registry: Arc<Registry>,
    transport: Transport,
    views: Arc<DeviceViews>,
}

struct Registry {
    memory: Arc<dyn BlockMemory>,
    max_receivers: usize,
    live: Mutex<HashMap<HandoffKey, Arc<Entry>>>,
}

/// The driver's handle on one granted handoff. Dropping it fences the handoff and forgets its key.
pub struct Receiver {
    key: HandoffKey,
    registry: Arc<Registry>,
    entry: Arc<Entry>,
    news: watch::Receiver<News>,
    events: mpsc::Receiver<ReceiverEvent>,
    verified: u64,
    ended: bool,
}

impl Receivers {
    /// No handoff is granted. At most `max_receivers` are at one time.
    pub fn new(memory: Arc<dyn BlockMemory>, max_receivers: usize) -> Self {
        let registry = Registry { memory, max_receivers, live: Mutex::new(HashMap::new()) };
        Self { registry: Arc::new(registry), transport: Transport::default(), views: Arc::default() }
    }

    /// A stream whose payloads lie where this does not allow it is refused.
    #[must_use]
    pub fn with_transport(mut self, transport: Transport) -> Self {
        self.transport = transport;
        self
    }

    /// From now on frames of this handoff are taken.
    ///
    /// # Errors
    /// [`TransferError::Full`], [`TransferError::Duplicate`], or [`TransferError::Protocol`] when span and lease do not fit;
    /// the lease is dropped then.
    pub fn grant(&self, grant: Grant) -> Result<Receiver, TransferError> {
        let Grant { key, span, lease } = grant;
        let layout = self.registry.memory.layout();
        span.check(layout)?;
        let (needed, skipped) = (layout.blocks_for(span.prompt_tokens), span.skip_tokens / layout.block_size);
        if lease.len() < needed || lease.skip() != skipped {
            return Err(TransferError::Protocol(format!(
                "the lease has blocks {}..{} of {skipped}..{needed}",
                lease.skip(),
                lease.len()
            )));
        }
        if layout.block_layer_bytes() > MAX_FRAME_BYTES {
            return Err(TransferError::Layout(format!(
                "a block of one layer exceeds {MAX_FRAME_BYTES} bytes"
            )));
        }
        let (news_tx, news) = watch::channel(News::default());
        let (events_tx, events) = mpsc::channel(MAX_EVENTS);
        let fence = lease.fence();
        let writer = Writer::new(key, span, Arc::clone(&self.registry.memory), lease);
        let entry = Arc::new(Entry::new(writer, fence, news_tx, events_tx));
        self.registry.insert(key, Arc::clone(&entry))?;
        let registry = Arc::clone(&self.registry);
        Ok(Receiver { key, registry, entry, news, events, verified: 0, ended: false })
    }

    /// Credit window of one handoff, in bytes: with `max_receivers` at once all of them together stay under the window of a
    /// connection that they share, as far as at least one block of one layer, and 256 KiB, allows.
    pub fn credit_window(&self) -> u64 {
        let share = u64::from(BULK_WINDOW_BYTES) / (self.registry.max_receivers as u64 + 1);
        let block_bytes = self.registry.memory.layout().block_layer_bytes() as u64;
        share.clamp(MIN_CREDIT_WINDOW, MAX_CREDIT_WINDOW).max(block_bytes)
    }

    /// Handoffs granted now.
    pub fn len(&self) -> usize {
        self.registry.live().len()
    }

    /// Whether none is granted.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Maps or opens the memory that a stream's first message names; `None` when it names none.
    ///
    /// # Errors
    /// Why it can't be used, for people.
    pub(crate) fn view(&self, opening: &v1::KvFrame) -> Result<Option<View>, String> {
        if !opening.device_ring.is_empty() {
            return self.device_view(&opening.device_ring).map(|view| Some(View::Device(view)));
        }
        if opening.shared_path.is_empty() {
            return Ok(None);
        }
        if !self.transport.allows_shm() {
            return Err("shared memory is not used here".to_owned());
        }
        SharedView::open(&opening.shared_path, RING_BYTES).map(|view| Some(View::Shared(view)))
    }

    /// Opens a ring of a device of this host.
    pub(crate) fn device_view(&self, handle: &[u8]) -> Result<DeviceView, String> {
        if !self.transport.allows_ipc() {
            return Err("device memory is not used here".to_owned());
        }
        let memory = self.registry.memory.peer().ok_or("this worker's KV is on no device")?;
        self.views.open(memory, handle)
    }

    /// The stream that read it has ended well.
    pub(crate) fn keep(&self, view: DeviceView) {
        self.views.keep(view);
    }

    pub(crate) const fn transport(&self) -> Transport {
        self.transport
    }

    pub(crate) fn find(&self, key: &HandoffKey) -> Option<Arc<Entry>> {
        self.registry.live().get(key).cloned()
    }
}

impl Registry {
    fn live(&self) -> MutexGuard<'_, HashMap<HandoffKey, Arc<Entry>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn insert(&self, key: HandoffKey, entry: Arc<Entry>) -> Result<(), TransferError> {
        let mut live = self.live();
        if live.contains_key(&key) {
            return Err(TransferError::Duplicate(key));
        }
        if live.len() >= self.max_receivers {
            return Err(TransferError::Full { what: "handoffs being received", limit: self.max_receivers });
        }
        live.insert(key, entry);
        Ok(())
    }
}

impl Receiver {
    /// What happened next; `None` after [`ReceiverEvent::WriterEnded`]. Loses nothing when dropped in a `select!`.
    pub async fn next(&mut self) -> Option<ReceiverEvent> {
        loop {
            let news = *self.news.borrow_and_update();
            if news.verified > self.verified {
                self.verified = news.verified;
                return Some(ReceiverEvent::Verified { bytes: news.verified });
            }
            if let Ok(event) = self.events.try_recv() {
                return Some(event);
            }
            if news.ended {
                return (!std::mem::replace(&mut self.ended, true)).then_some(ReceiverEvent::WriterEnded);
            }
            tokio::select! {
                // The entry that sends lives as long as this handle.
                _ = self.news.changed() => {}
                Some(event) = self.events.recv() => return Some(event),
            }
        }
    }

    /// Ends the writing: no write begins after this returns. [`ReceiverEvent::WriterEnded`] follows once the lease is dropped.
    pub fn fence(&self) {
        self.entry.end();
    }

    /// The source's span of the transfer, once a stream was opened by a source that traces.
    pub fn trace(&self) -> Option<TraceContext> {
        self.news.borrow().trace
    }

    /// What came in up to now.
    pub fn report(&self) -> ReceiveReport {
        self.news.borrow().report
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.registry.live().remove(&self.key);
        self.entry.end();
    }
}
