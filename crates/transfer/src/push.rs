//! The task behind a [`crate::Sender`]: one Push stream at a time, fed frame by frame.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use baton_handoff::Cause;
use baton_proto::v1;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::frames::{Frame, MAX_FRAME_BYTES};
use crate::outgoing::{Blocks, Outgoing, PushCodec, Waits};
use crate::sender::{Next, SenderEvent, Shared};

/// Frames between the sender and the encoder; more would only delay a resend.
const FRAMES_IN_FLIGHT: usize = 2;

/// Largest message of the bulk service: a frame and its header.
pub(crate) const MAX_MESSAGE_BYTES: usize = MAX_FRAME_BYTES + 4096;

pub(crate) struct PushTask {
    shared: Arc<Shared>,
    blocks: Arc<Blocks>,
    channel: Channel,
    events: mpsc::Sender<SenderEvent>,
}

/// How a stream ended.
enum Ended {
    Fenced,
    Delivered,
    Lost(String),
    Refused(Cause, String),
}

impl PushTask {
    pub(crate) fn new(
        shared: Arc<Shared>,
        blocks: Arc<Blocks>,
        channel: Channel,
        events: mpsc::Sender<SenderEvent>,
    ) -> Self {
        Self { shared, blocks, channel, events }
    }

    /// Runs until everything is delivered, refused or fenced.
    pub(crate) async fn run(self) {
        let mut reopened = false;
        while let Some(from) = self.opening().await {
            match self.stream(from, reopened).await {
                Ended::Fenced => return,
                Ended::Delivered => return self.tell(SenderEvent::Delivered).await,
                Ended::Refused(cause, detail) => {
                    return self.tell(SenderEvent::Refused { cause, detail }).await;
                }
                Ended::Lost(detail) => self.tell(SenderEvent::Lost { detail }).await,
            }
            reopened = true;
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

    async fn stream(&self, from: u64, reopened: bool) -> Ended {
        let (frames, outgoing) = mpsc::channel(FRAMES_IN_FLIGHT);
        let mut link = Link::open(self.channel.clone(), outgoing);
        // The queue is empty: this can't fail.
        let _ = frames.try_send(Outgoing::Opening(self.shared.key));
        let from = match reopened {
            true => match self.resume(&mut link, from).await {
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
            let next = self.shared.next(index);
            waits.turn(&next);
            let can_send = matches!(next, Next::New(_) | Next::Again(_));
            tokio::select! {
                biased;
                answer = link.answer() => if let Some(ended) = self.answered(answer) {
                    return ended;
                },
                () = self.shared.progress.changed() => {}
                permit = frames.reserve(), if can_send => match (permit, next) {
                    (Ok(permit), Next::New(frame)) => {
                        permit.send(self.kv(frame, &mut waits));
                        index += 1;
                        self.shared.sent(frame.end());
                    }
                    (Ok(permit), Next::Again(frame)) => {
                        permit.send(self.kv(frame, &mut waits));
                        self.shared.resent();
                    }
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

    fn kv(&self, frame: Frame, waits: &mut WaitClock) -> Outgoing {
        Outgoing::Kv { frame, waits: waits.take(), blocks: Arc::downgrade(&self.blocks) }
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

/// The call of one stream, and the answers to it.
enum Link {
    Opening(Pin<Box<dyn Future<Output = Result<Streaming<v1::PushProgress>, Status>> + Send>>),
    Open(Box<Streaming<v1::PushProgress>>),
    Closed,
}

impl Link {
    fn open(channel: Channel, outgoing: mpsc::Receiver<Outgoing>) -> Self {
        Self::Opening(Box::pin(async move {
            let mut grpc = tonic::client::Grpc::new(channel).max_encoding_message_size(MAX_MESSAGE_BYTES);
            grpc.ready().await.map_err(|error| Status::unavailable(crate::channel::describe(&error)))?;
            let path = PathAndQuery::from_static("/baton.v1.KvStream/Push");
            let request = tonic::Request::new(ReceiverStream::new(outgoing));
            grpc.streaming(request, path, PushCodec).await.map(tonic::Response::into_inner)
        }))
    }

    /// The next answer; loses nothing when dropped.
    async fn answer(&mut self) -> Result<Option<v1::PushProgress>, Status> {
        loop {
            match self {
                Self::Opening(opening) => {
                    let opened = opening.as_mut().await;
                    *self = Self::Closed;
                    *self = Self::Open(Box::new(opened?));
                }
                Self::Open(answers) => return answers.message().await,
                Self::Closed => return Err(Status::unavailable("the stream is closed")),
            }
        }
    }
}
