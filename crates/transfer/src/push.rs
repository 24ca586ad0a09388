//! The task behind a [`crate::Sender`]: one Push stream at a time, fed frame by frame.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_handoff::Cause;
use baton_proto::v1;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};

use crate::bulk::Bulk;
use crate::control::traced;
use crate::frames::{Frame, MAX_FRAME_BYTES};
use crate::lent::Lent;
use crate::outgoing::{Blocks, Outgoing, PushCodec, Waits, header};
use crate::sender::{Next, SenderEvent, Shared};
use crate::service::PUSH_PATH;

/// Frames between the sender and the encoder; more would only delay a resend.
const FRAMES_IN_FLIGHT: usize = 2;

/// How long the ring of a fenced stream waits for the destination's word that it reads no more. The ring is one of few, so not long.
const RETIRE_TIMEOUT: Duration = Duration::from_secs(1);

/// Largest message of the bulk service: a frame and its header.
pub(crate) const MAX_MESSAGE_BYTES: usize = MAX_FRAME_BYTES + 4096;

pub(crate) struct PushTask {
    shared: Arc<Shared>,
    blocks: Arc<Blocks>,
    bulk: Bulk,
    /// Payload of the largest frame.
    frame_bytes: usize,
    events: mpsc::Sender<SenderEvent>,
}

/// How a stream ended.
enum Ended {
    Fenced,
    Delivered,
    Lost(String),
    Refused(Cause, String),
    /// The destination can't reach the memory in which the stream's payloads lie.
    Unmapped(String),
}

impl PushTask {
    pub(crate) fn new(
        shared: Arc<Shared>,
        blocks: Arc<Blocks>,
        bulk: Bulk,
        frame_bytes: usize,
        events: mpsc::Sender<SenderEvent>,
    ) -> Self {
        Self { shared, blocks, bulk, frame_bytes, events }
    }

    /// Runs until everything is delivered, refused or fenced.
    pub(crate) async fn run(self) {
        let total_bytes = self.shared.total_bytes();
        let fenced = self.push().await;
        // From here on nothing pins blocks or keeps the driver waiting.
        drop(self);
        if let Some(stream) = fenced {
            stream.retire(total_bytes).await;
        }
    }

    /// Returns the stream that was open when it was fenced.
    async fn push(&self) -> Option<Stream> {
        let mut reopened = false;
        while let Some(from) = self.opening().await {
            let (ended, stream) = self.stream_best_way(from, reopened).await;
            match ended {
                Ended::Fenced => return Some(stream),
                Ended::Delivered => {
                    stream.keep_ring();
                    self.tell(SenderEvent::Delivered).await;
                    return None;
                }
                Ended::Refused(cause, detail) => {
                    self.tell(SenderEvent::Refused { cause, detail }).await;
                    return None;
                }
                Ended::Lost(detail) | Ended::Unmapped(detail) => {
                    drop(stream);
                    self.tell(SenderEvent::Lost { detail }).await;
                }
            }
            reopened = true;
        }
        None
    }

    /// A stream over the best way that the destination takes: through device memory, through shared memory, in its messages.
    async fn stream_best_way(&self, from: u64, reopened: bool) -> (Ended, Stream) {
        loop {
            let lent = self.bulk.lend(self.frame_bytes);
            let way = lent.as_ref().map(Lent::transport);
            match (self.stream(from, reopened, lent).await, way) {
                // Each way is closed once, so this ends.
                ((Ended::Unmapped(why), _), Some(way)) => self.bulk.stop(way, &why),
                (ended, _) => return ended,
            }
        }
    }

    /// Where to open the stream; `None` when fenced. Meanwhile what is computed is still told.
    async fn opening(&self) -> Option<u64> {
        loop {
            if self.shared.is_fenced() {
                return None;
            }
            if let Some(from) = self.shared.take_reopen() {
                return Some(from);
            }
            self.shared.catch_up();
            self.shared.progress.changed().await;
        }
    }

    async fn tell(&self, event: SenderEvent) {
        // A driver that is gone has dropped its handle, which fences.
        let _ = self.events.send(event).await;
    }

    /// With a ring, payloads lie in it.
    async fn stream(&self, from: u64, reopened: bool, lent: Option<Lent>) -> (Ended, Stream) {
        let (frames, outgoing) = mpsc::channel(FRAMES_IN_FLIGHT);
        let place = lent.as_ref().map(Lent::opening).unwrap_or_default();
        let mut link =
            Link::open(self.bulk.channel(), traced(ReceiverStream::new(outgoing), self.shared.trace), lent);
        // The queue is empty: this can't fail.
        let _ = frames.try_send(Outgoing::opening(&self.shared.key, place));
        let ended = self.feed(&frames, &mut link, from, reopened).await;
        (ended, Stream { link, _frames: frames })
    }

    /// Sends frames and listens to answers until the stream ends.
    async fn feed(
        &self,
        frames: &mpsc::Sender<Outgoing>,
        link: &mut Link,
        from: u64,
        reopened: bool,
    ) -> Ended {
        let from = match reopened {
            true => match self.resume(link, from).await {
                Ok(verified) => verified,
                Err(ended) => return ended,
            },
            false => from,
        };
        let mut index = self.shared.index_at(from);
        let mut waits = WaitClock::default();
        loop {
            if self.shared.is_fenced() {
                return Ended::Fenced;
            }
            self.shared.catch_up();
            let next = link.next(self.shared.next(index));
            waits.turn(&next);
            let can_send = matches!(next, Next::New(_) | Next::Again(_));
            tokio::select! {
                biased;
                answer = link.answer() => if let Some(ended) = self.answered(answer) {
                    return ended;
                },
                () = self.shared.progress.changed() => {}
                permit = frames.reserve(), if can_send => match (permit, next) {
                    (Ok(permit), Next::New(frame)) => match self.kv(frame, &mut waits, link) {
                        Ok(message) => {
                            permit.send(message);
                            index += 1;
                            self.shared.sent(frame.end());
                        }
                        Err(ended) => return ended,
                    },
                    (Ok(permit), Next::Again(frame)) => match self.kv(frame, &mut waits, link) {
                        Ok(message) => {
                            permit.send(message);
                            self.shared.resent();
                        }
                        Err(ended) => return ended,
                    },
                    (Ok(_), Next::Computing | Next::Uncredited | Next::Exhausted) => {}
                    // The transport gave the request up; its status says why.
                    (Err(_), _) => {
                        let answer = link.answer().await;
                        return self.answered(answer).unwrap_or_else(|| Ended::Lost("the stream was closed".into()));
                    }
                },
            }
        }
    }

    fn kv(&self, frame: Frame, waits: &mut WaitClock, link: &mut Link) -> Result<Outgoing, Ended> {
        let waits = waits.take();
        self.shared.frame_made(waits.credit_us);
        let Some(lent) = &mut link.lent else {
            return Ok(Outgoing::Kv { frame, waits, blocks: Arc::downgrade(&self.blocks) });
        };
        let put = lent.put(&self.blocks, &frame);
        let (offset, crc32c) = put.map_err(|what| Ended::Lost(format!("frame {}: {what}", frame.index)))?;
        Ok(Outgoing::Message(Box::new(v1::KvFrame {
            crc32c,
            shared_offset: offset as u64,
            shared_len: frame.len,
            ..header(&frame, waits)
        })))
    }

    /// Waits for what the destination has; at least everything before `from`.
    async fn resume(&self, link: &mut Link, from: u64) -> Result<u64, Ended> {
        loop {
            if self.shared.is_fenced() {
                return Err(Ended::Fenced);
            }
            tokio::select! {
                biased;
                answer = link.answer() => return match answer {
                    Ok(Some(progress)) => {
                        let verified = progress.bytes.clamp(from, self.shared.total_bytes());
                        self.shared.sent(verified);
                        if verified == self.shared.total_bytes() { Err(Ended::Delivered) } else { Ok(verified) }
                    }
                    answer => Err(self.answered(answer).unwrap_or_else(|| Ended::Lost("no answer".into()))),
                },
                () = self.shared.progress.changed() => self.shared.catch_up(),
            }
        }
    }

    /// What an answer means; `None`: go on.
    fn answered(&self, answer: Result<Option<v1::PushProgress>, Status>) -> Option<Ended> {
        match answer {
            Ok(Some(progress)) if progress.bytes == self.shared.total_bytes() => Some(Ended::Delivered),
            Ok(Some(_)) => None,
            Ok(None) => Some(Ended::Lost("the destination ended the stream before it had every byte".into())),
            Err(status) => {
                let detail = status.message().to_owned();
                Some(match status.code() {
                    Code::NotFound => Ended::Refused(Cause::NotFound, detail),
                    Code::InvalidArgument | Code::OutOfRange | Code::Unimplemented => {
                        Ended::Refused(Cause::Protocol, detail)
                    }
                    Code::Aborted => Ended::Refused(Cause::Cancelled, detail),
                    Code::FailedPrecondition => Ended::Unmapped(detail),
                    // What a broken connection gives, `INTERNAL` among it.
                    _ => Ended::Lost(format!("{}: {detail}", status.code())),
                })
            }
        }
    }
}

/// How long the stream waited for computing and for credit since the frame before.
#[derive(Default)]
struct WaitClock {
    since: Option<(bool, Instant)>,
    waits: Waits,
}

impl WaitClock {
    fn turn(&mut self, next: &Next) {
        let for_credit = match next {
            Next::New(_) | Next::Again(_) => return self.stop(),
            Next::Computing | Next::Exhausted => false,
            Next::Uncredited => true,
        };
        if self.since.is_none_or(|(kind, _)| kind != for_credit) {
            self.stop();
            self.since = Some((for_credit, Instant::now()));
        }
    }

    fn stop(&mut self) {
        if let Some((for_credit, since)) = self.since.take() {
            let waited_us = u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX);
            let sum = if for_credit { &mut self.waits.credit_us } else { &mut self.waits.idle_us };
            *sum = sum.saturating_add(waited_us);
        }
    }

    fn take(&mut self) -> Waits {
        self.stop();
        std::mem::take(&mut self.waits)
    }
}

/// A stream on which nothing more is sent. Dropped, it is closed; a ring in shared memory that it has is gone then, one in device memory rests.
struct Stream {
    link: Link,
    /// While it is there the destination waits for frames, and does not take their end for a loss.
    _frames: mpsc::Sender<Outgoing>,
}

impl Stream {
    /// Keeps the ring for another stream, since the destination reads no more of it.
    fn keep_ring(self) {
        if let Some(lent) = self.link.lent {
            lent.give_back();
        }
    }

    /// Keeps the ring if the destination soon says that it reads no more: it has everything, or knows that the handoff is over. To make another takes
    /// the system a millisecond or two in which nothing else runs on this core, and most handoffs end with a fence: the commit comes first.
    /// With frames that carry their payload there is nothing to keep, and the stream is closed at once.
    async fn retire(mut self, total_bytes: u64) {
        if self.link.lent.is_some()
            && let Ok(true) =
                tokio::time::timeout(RETIRE_TIMEOUT, self.link.is_read_no_more(total_bytes)).await
        {
            self.keep_ring();
        }
    }
}

/// One stream: the call, the answers to it, and the ring with its payloads.
struct Link {
    call: Call,
    lent: Option<Lent>,
}

enum Call {
    Opening(Pin<Box<dyn Future<Output = Result<Streaming<v1::PushProgress>, Status>> + Send>>),
    Open(Box<Streaming<v1::PushProgress>>),
    Closed,
}

impl Link {
    fn open(channel: Channel, request: Request<ReceiverStream<Outgoing>>, lent: Option<Lent>) -> Self {
        let call = Call::Opening(Box::pin(async move {
            let mut grpc = tonic::client::Grpc::new(channel).max_encoding_message_size(MAX_MESSAGE_BYTES);
            grpc.ready().await.map_err(|error| Status::unavailable(crate::channel::describe(&error)))?;
            let path = PathAndQuery::from_static(PUSH_PATH);
            grpc.streaming(request, path, PushCodec).await.map(tonic::Response::into_inner)
        }));
        Self { call, lent }
    }

    /// A frame for which the ring has no room waits as if it had no credit: the destination has not read what was sent.
    fn next(&self, next: Next) -> Next {
        match (&self.lent, next) {
            (Some(lent), Next::New(frame) | Next::Again(frame)) if !lent.has_room(frame.len as usize) => {
                Next::Uncredited
            }
            (_, next) => next,
        }
    }

    /// Waits for the destination's last word, and returns whether that tells that it reads nothing more. A broken connection does not.
    async fn is_read_no_more(&mut self, total_bytes: u64) -> bool {
        loop {
            match self.answer().await {
                Ok(Some(progress)) if progress.bytes < total_bytes => {}
                Ok(_) => return true,
                // Only the destination itself gives these: the handoff is over, or it never knew it.
                Err(status) => return matches!(status.code(), Code::Aborted | Code::NotFound),
            }
        }
    }

    /// The next answer; loses nothing when dropped.
    async fn answer(&mut self) -> Result<Option<v1::PushProgress>, Status> {
        loop {
            match &mut self.call {
                Call::Opening(opening) => {
                    let opened = opening.as_mut().await;
                    self.call = Call::Closed;
                    self.call = Call::Open(Box::new(opened?));
                }
                Call::Open(answers) => {
                    let answer = answers.message().await?;
                    if let (Some(lent), Some(progress)) = (&mut self.lent, &answer) {
                        lent.read_up_to(progress.shared_read);
                    }
                    return Ok(answer);
                }
                Call::Closed => return Err(Status::unavailable("the stream is closed")),
            }
        }
    }
}
