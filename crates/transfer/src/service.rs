//! The bulk service of a decode worker: every Push stream fills the blocks of a granted handoff.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use baton_handoff::Cause;
use baton_proto::v1;
use baton_telemetry::trace::{TRACEPARENT, TraceContext};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::body::Body;
use tonic::codec::{BufferSettings, EncodeBody, SingleMessageCompressionOverride};
use tonic::codegen::http::{HeaderValue, Request, Response, header};
use tonic::codegen::{BoxFuture, Service};
use tonic::server::NamedService;
use tonic_prost::ProstCodec;

use crate::claim::{Claim, Claimed, Entry};
use crate::incoming::Incoming;
use crate::receiver::{ReceiverEvent, Receivers};
use crate::ring::untold_bytes;
use crate::view::View;
use crate::wire;
use crate::writer::{Fault, Outcome};

/// How long a stream may stay open without saying which handoff it is for.
const OPENING_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a stream that was opened again waits for the older one to let go.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(5);

/// The one call of `baton.v1.KvStream`.
pub(crate) const PUSH_PATH: &str = "/baton.v1.KvStream/Push";

/// Implements `baton.v1.KvStream` over the handoffs granted in [`Receivers`]. Not the generated server, which copies every message once
/// more than is needed.
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

/// The service, for [`crate::bulk_server_builder`].
pub fn kv_stream_server(receivers: Receivers) -> KvStreamService {
    KvStreamService::new(receivers)
}

type Answer = Result<v1::PushProgress, Status>;

impl NamedService for KvStreamService {
    const NAME: &'static str = "baton.v1.KvStream";
}

impl Service<Request<Body>> for KvStreamService {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let receivers = self.receivers.clone();
        Box::pin(async move {
            let (head, body) = request.into_parts();
            if head.uri.path() != PUSH_PATH {
                return Ok(Status::unimplemented(format!("there is no {}", head.uri.path())).into_http());
            }
            let trace = head.headers.get(TRACEPARENT).and_then(|value| TraceContext::parse(value.as_bytes()));
            Ok(match push(&receivers, Incoming::new(body), trace).await {
                Ok(answers) => respond(answers),
                Err(status) => status.into_http(),
            })
        })
    }
}

fn respond(answers: mpsc::Receiver<Answer>) -> Response<Body> {
    let encoder = ProstCodec::<v1::PushProgress, v1::PushProgress>::raw_encoder(BufferSettings::default());
    let answers = ReceiverStream::new(answers);
    let uncompressed = SingleMessageCompressionOverride::Disable;
    let body = EncodeBody::new_server(encoder, answers, None, uncompressed, None);
    let mut response = Response::new(Body::new(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// Reads the first message and lets a task of its own read the others.
async fn push(
    receivers: &Receivers,
    mut frames: Incoming,
    trace: Option<TraceContext>,
) -> Result<mpsc::Receiver<Answer>, Status> {
    let opening = tokio::time::timeout(OPENING_TIMEOUT, frames.message())
        .await
        .map_err(|_| Status::deadline_exceeded("no first message within 10 s"))??
        .ok_or_else(|| Status::invalid_argument("the stream has no first message"))?;
    if opening.num_blocks != 0 || !opening.payload.is_empty() || opening.shared_len != 0 {
        return Err(Status::invalid_argument("the first message names the handoff and carries no KV"));
    }
    let key = wire::decode_key(opening.key.clone())?;
    let entry =
        receivers.find(&key).ok_or_else(|| Status::not_found(format!("no handoff {key} is granted here")))?;
    if let Some(trace) = trace {
        entry.traced(trace);
    }
    let view = receivers.view(&opening).map_err(Status::failed_precondition)?;
    if let Some(View::Shared(view)) = &view {
        // Payloads begin at the memory's first byte, so a short stream comes no further.
        view.populate(usize::try_from(entry.total_bytes()).unwrap_or(usize::MAX));
    }
    let (answers, answered) = mpsc::channel(2);
    match entry.claim(TAKEOVER_TIMEOUT).await {
        Claimed::Writer(claim) => {
            // A task of its own: the claim is given back in order even when the stream is reset.
            tokio::spawn(receive(receivers.clone(), claim, frames, view, answers));
        }
        Claimed::Ended => end_at_once(&entry, &answers)?,
        Claimed::Refused => return Err(Status::unavailable("another stream writes for this handoff")),
    }
    Ok(answered)
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

async fn receive(
    receivers: Receivers,
    mut claim: Claim,
    mut frames: Incoming,
    view: Option<View>,
    answers: mpsc::Sender<Answer>,
) {
    let entry = claim.opened();
    // Nobody listens: then the stream's end is seen below.
    let _ = answers.send(Ok(entry.progress())).await;
    let ended = write(&mut claim, &mut frames, view.as_ref(), &answers).await;
    // Before anything is told: whoever opens the stream again finds the writer, whoever waits for its end sees it.
    claim.release();
    let is_whole = matches!(ended, Ended::Whole);
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
    // Not before: unmapping takes longer than the answer.
    match view {
        Some(View::Device(view)) if is_whole => receivers.keep(view),
        view => drop(view),
    }
}

/// Shared payloads that were read, and how many bytes of them the source was not told of.
#[derive(Default)]
struct SharedRead {
    num_payloads: u64,
    untold: usize,
}

async fn write(
    claim: &mut Claim,
    frames: &mut Incoming,
    view: Option<&View>,
    answers: &mpsc::Sender<Answer>,
) -> Ended {
    let mut read = SharedRead::default();
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
        let shared_bytes = frame.shared_len as usize;
        let Some(writer) = claim.writer() else { return Ended::Revoked };
        let outcome = writer.accept(frame, view).await;
        let is_whole = writer.is_whole();
        claim.publish();
        match outcome {
            Ok(Outcome::Verified) if is_whole => return Ended::Whole,
            Ok(Outcome::Verified | Outcome::Duplicate) => {}
            Ok(Outcome::Corrupt { frame }) => claim.tell(ReceiverEvent::Corrupt { frame }).await,
            Err(Fault::Fenced) => return Ended::Revoked,
            Err(Fault::Protocol(detail)) => return Ended::Protocol(detail),
            Err(Fault::Memory(detail)) => return Ended::Lost(detail),
        }
        let Some(view) = view.filter(|_| shared_bytes > 0) else { continue };
        read.num_payloads += 1;
        read.untold += shared_bytes;
        if read.untold >= untold_bytes(view.len()) {
            read.untold = 0;
            let progress = claim.progress(read.num_payloads);
            tokio::select! {
                _ = answers.send(Ok(progress)) => {}
                () = claim.revoked() => return Ended::Revoked,
            }
        }
    }
}
