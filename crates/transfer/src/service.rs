//! The bulk service of a decode worker: every Push stream fills the blocks of a granted handoff.

use std::sync::Arc;
use std::time::Duration;

use baton_handoff::Cause;
use baton_proto::v1;
use baton_proto::v1::kv_stream_server::{KvStream, KvStreamServer};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::claim::{Claim, Claimed, Entry};
use crate::push::MAX_MESSAGE_BYTES;
use crate::receiver::{ReceiverEvent, Receivers};
use crate::wire;
use crate::writer::{Fault, Outcome};

/// How long a stream may stay open without saying which handoff it is for.
const OPENING_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a stream that was opened again waits for the older one to let go.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(5);

/// Implements `baton.v1.KvStream` over the handoffs granted in [`Receivers`].
#[derive(Clone)]
pub struct KvStreamService {
    receivers: Receivers,
}

impl KvStreamService {
    /// Takes the frames of whatever is granted in `receivers`.
    pub const fn new(receivers: Receivers) -> Self {
        Self { receivers }
    }
}

/// The service, with the message sizes that frames need; for [`crate::bulk_server_builder`].
pub fn kv_stream_server(receivers: Receivers) -> KvStreamServer<KvStreamService> {
    KvStreamServer::new(KvStreamService::new(receivers)).max_decoding_message_size(MAX_MESSAGE_BYTES)
}

type Answer = Result<v1::PushProgress, Status>;

#[tonic::async_trait]
impl KvStream for KvStreamService {
    type PushStream = ReceiverStream<Answer>;

    async fn push(
        &self,
        request: Request<Streaming<v1::KvFrame>>,
    ) -> Result<Response<Self::PushStream>, Status> {
        let mut frames = request.into_inner();
        let opening = tokio::time::timeout(OPENING_TIMEOUT, frames.message())
            .await
            .map_err(|_| Status::deadline_exceeded("no first message within 10 s"))??
            .ok_or_else(|| Status::invalid_argument("the stream has no first message"))?;
        if opening.num_blocks != 0 || !opening.payload.is_empty() {
            return Err(Status::invalid_argument("the first message names the handoff and carries no KV"));
        }
        let key = wire::decode_key(opening.key)?;
        let entry = self
            .receivers
            .find(&key)
            .ok_or_else(|| Status::not_found(format!("no handoff {key} is granted here")))?;
        let (answers, answered) = mpsc::channel(2);
        match entry.claim(TAKEOVER_TIMEOUT).await {
            Claimed::Writer(claim) => {
                // A task of its own: the claim is given back in order even when the stream is reset.
                tokio::spawn(receive(claim, frames, answers));
            }
            Claimed::Ended => end_at_once(&entry, &answers)?,
            Claimed::Refused => return Err(Status::unavailable("another stream writes for this handoff")),
        }
        Ok(Response::new(ReceiverStream::new(answered)))
    }
}

/// The source did not hear that everything is here, or that the handoff is over.
fn end_at_once(entry: &Arc<Entry>, answers: &mpsc::Sender<Answer>) -> Result<(), Status> {
    if entry.is_cut_short() {
        return Err(over());
    }
    // The queue is new: it has room.
    let _ = answers.try_send(Ok(entry.progress()));
    Ok(())
}

fn over() -> Status {
    Status::aborted("the handoff is over")
}

/// How a stream ended.
enum Ended {
    Whole,
    Revoked,
    Lost(String),
    Protocol(String),
}

async fn receive(mut claim: Claim, mut frames: Streaming<v1::KvFrame>, answers: mpsc::Sender<Answer>) {
    let entry = claim.opened();
    // Nobody listens: then the stream's end is seen below.
    let _ = answers.send(Ok(entry.progress())).await;
    let ended = write(&mut claim, &mut frames).await;
    // Before anything is told: whoever opens the stream again finds the writer, whoever waits for its end sees it.
    claim.release();
    let answer = match ended {
        Ended::Whole => Ok(entry.progress()),
        Ended::Revoked => Err(over()),
        Ended::Lost(detail) => {
            claim.tell(ReceiverEvent::Lost { detail: detail.clone() }).await;
            Err(Status::unavailable(detail))
        }
        Ended::Protocol(detail) => {
            claim.tell(ReceiverEvent::Failed { cause: Cause::Protocol, detail: detail.clone() }).await;
            Err(Status::invalid_argument(detail))
        }
    };
    let _ = answers.send(answer).await;
}

async fn write(claim: &mut Claim, frames: &mut Streaming<v1::KvFrame>) -> Ended {
    loop {
        let message = tokio::select! {
            biased;
            () = claim.revoked() => return Ended::Revoked,
            message = frames.message() => message,
        };
        let frame = match message {
            Ok(Some(frame)) => frame,
            Ok(None) => return Ended::Lost("the source closed the stream before its last frame".into()),
            Err(status) => return Ended::Lost(status.to_string()),
        };
        let Some(writer) = claim.writer() else { return Ended::Revoked };
        let outcome = writer.accept(frame).await;
        let is_whole = writer.is_whole();
        claim.publish();
        match outcome {
            Ok(Outcome::Verified) if is_whole => return Ended::Whole,
            Ok(Outcome::Verified | Outcome::Duplicate) => {}
            Ok(Outcome::Corrupt { frame }) => claim.tell(ReceiverEvent::Corrupt { frame }).await,
            Err(Fault::Fenced) => return Ended::Revoked,
            Err(Fault::Protocol(detail)) => return Ended::Protocol(detail),
        }
    }
}
