//! The scripted worker's services.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::decode_server::Decode;
use baton_proto::v1::prefill_server::Prefill;
use baton_proto::v1::worker_server::Worker;
use futures::Stream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::decode::decode;
use super::script::name;
use super::{EOS, Kind, State};

#[derive(Clone)]
pub(super) struct Service(pub(super) Arc<State>);

type Reply<Event> = Pin<Box<dyn Stream<Item = Result<Event, Status>> + Send>>;

#[tonic::async_trait]
impl Worker for Service {
    type WatchStream = Reply<v1::WorkerStatus>;
    type WatchCacheStream = Reply<v1::CacheUpdate>;

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::WorkerDescription>, Status> {
        Ok(Response::new(self.0.description.lock().expect("unpoisoned").clone()))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (sender, receiver) = mpsc::channel(4);
        let (mut status, mute) = (self.0.status.subscribe(), self.0.mute.subscribe());
        tokio::spawn(async move {
            for sequence in 0.. {
                while *mute.borrow() {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                let now = v1::WorkerStatus { sequence, ..status.borrow_and_update().clone() };
                if sender.send(Ok(now)).await.is_err() {
                    return;
                }
                let _ = tokio::time::timeout(Duration::from_millis(100), status.changed()).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn watch_cache(
        &self,
        _: Request<v1::WatchCacheRequest>,
    ) -> Result<Response<Self::WatchCacheStream>, Status> {
        if !self.0.script.has_cache {
            return Ok(Response::new(Box::pin(futures::stream::empty())));
        }
        let updates = self.0.cache.open(self.0.instance());
        Ok(Response::new(Box::pin(ReceiverStream::new(updates))))
    }

    async fn keep_traces(
        &self,
        request: Request<v1::KeepTracesRequest>,
    ) -> Result<Response<v1::KeepTracesResponse>, Status> {
        self.0.kept.lock().expect("unpoisoned").extend(request.into_inner().trace_ids);
        Ok(Response::new(v1::KeepTracesResponse {}))
    }
}

/// Counts a leg while its script runs.
struct OpenLeg {
    state: Arc<State>,
    done: bool,
}

impl OpenLeg {
    fn new(state: &Arc<State>) -> Self {
        state.num_open.fetch_add(1, Ordering::SeqCst);
        Self { state: Arc::clone(state), done: false }
    }

    fn finish(mut self) {
        self.done = true;
    }
}

impl Drop for OpenLeg {
    fn drop(&mut self) {
        if !self.done {
            self.state.num_cancelled.fetch_add(1, Ordering::SeqCst);
        }
        self.state.num_open.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Runs a leg's script until the caller drops the stream.
fn leg<Event: Send + 'static, Run: Future<Output = ()> + Send + 'static>(
    state: &Arc<State>,
    script: impl FnOnce(mpsc::Sender<Result<Event, Status>>) -> Run,
) -> Response<Reply<Event>> {
    let (sender, receiver) = mpsc::channel(4);
    let open = OpenLeg::new(state);
    let run = script(sender.clone());
    tokio::spawn(async move {
        tokio::select! {
            () = sender.closed() => {}
            () = run => open.finish(),
        }
    });
    Response::new(Box::pin(ReceiverStream::new(receiver)))
}

pub(super) fn sampled(id: u32, index: u32) -> v1::SampledToken {
    v1::SampledToken { id, logprob: -1.0, index }
}

pub(super) fn failed(cause: v1::Cause) -> v1::Failed {
    v1::Failed { cause: cause.into(), detail: "scripted".to_owned() }
}

/// The numbers of a leg's sequences.
pub(super) fn sequences(terms: Option<&v1::Terms>) -> std::ops::Range<u32> {
    let terms = terms.expect("terms");
    terms.first_sequence..terms.first_sequence + terms.num_sequences
}

#[tonic::async_trait]
impl Prefill for Service {
    type PrefillStream = Reply<v1::PrefillEvent>;

    async fn prefill(
        &self,
        request: Request<v1::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        assert_eq!(self.0.kind, Kind::Prefill);
        self.0.hear(request.metadata());
        let request = request.into_inner();
        self.0.prefills.lock().expect("unpoisoned").push(request.clone());
        let state = Arc::clone(&self.0);
        Ok(leg(&self.0, move |sender| prefill(state, request, sender)))
    }

    async fn redirect(
        &self,
        request: Request<v1::RedirectRequest>,
    ) -> Result<Response<v1::RedirectResponse>, Status> {
        let request = request.into_inner();
        self.0.redirects.lock().expect("unpoisoned").push(request.clone());
        if self.0.script.receiver_fails.is_none_or(|fails| fails.given_up) {
            return Err(Status::not_found("scripted"));
        }
        let (from, to) = (request.key.expect("a key"), request.new_key.expect("a key"));
        self.0.script.shared.redirect(&from, to);
        Ok(Response::new(v1::RedirectResponse {}))
    }
}

async fn prefill(
    state: Arc<State>,
    request: v1::PrefillRequest,
    sender: mpsc::Sender<Result<v1::PrefillEvent, Status>>,
) {
    use v1::prefill_event::Event;
    let script = Arc::clone(&state.script);
    let send = |event| sender.send(Ok(v1::PrefillEvent { event: Some(event) }));
    if state.broken.load(Ordering::SeqCst) {
        return;
    }
    if let Some(cause) = script.refuses {
        let _ = send(Event::Failed(failed(cause))).await;
        return;
    }
    if script.prefill_hangs {
        std::future::pending::<()>().await;
    }
    let stopping = request.stopping.expect("stopping");
    let first = |sequence| {
        let id = script.token(sequence, request.num_generated, &stopping);
        let finish = match id {
            EOS => v1::FinishReason::Stop,
            _ if stopping.max_new_tokens == 1 => v1::FinishReason::Length,
            _ => v1::FinishReason::Unspecified,
        };
        v1::FirstToken { sequence, token: Some(sampled(id, request.num_generated)), finish: finish.into() }
    };
    let tokens: Vec<_> = sequences(request.terms.as_ref()).map(first).collect();
    let goes_on = tokens.iter().any(|first| first.finish() == v1::FinishReason::Unspecified);
    let cached_tokens = script.cached_tokens;
    let times = v1::PrefillTimes { num_chunks: 1, cached_tokens, ..v1::PrefillTimes::default() };
    let _ = send(Event::FirstTokens(v1::FirstTokens { tokens, times: Some(times) })).await;
    let key = request.key.as_ref().expect("a key");
    script.shared.commit(key);
    if let Some(fails) = script.receiver_fails.filter(|_| goes_on && script.shared.fails(key)) {
        if fails.told_by_prefill {
            let (attempt, cause) = (key.attempt, v1::Cause::PeerLost.into());
            let failed = v1::HandoffFailed { attempt, cause, detail: "scripted".to_owned() };
            let _ = send(Event::HandoffFailed(failed)).await;
        }
        let to = script.shared.redirected(key).await;
        script.shared.commit(&to);
    }
    if goes_on {
        let done = v1::HandoffDone { bytes: 4096, frames: 4, resent_frames: 0 };
        let _ = send(Event::HandoffDone(done)).await;
    }
}

#[tonic::async_trait]
impl Decode for Service {
    type DecodeStream = Reply<v1::DecodeEvent>;

    async fn decode(
        &self,
        request: Request<v1::DecodeRequest>,
    ) -> Result<Response<Self::DecodeStream>, Status> {
        assert_eq!(self.0.kind, Kind::Decode);
        self.0.hear(request.metadata());
        let request = request.into_inner();
        self.0.decodes.lock().expect("unpoisoned").push(request.clone());
        let state = Arc::clone(&self.0);
        Ok(leg(&self.0, move |sender| decode(state, request, sender)))
    }

    async fn stop(&self, request: Request<v1::StopRequest>) -> Result<Response<v1::StopResponse>, Status> {
        let v1::StopRequest { key, sequence } = request.into_inner();
        let stop = (name(&key.expect("a key")), sequence);
        self.0.stops.lock().expect("unpoisoned").push(stop);
        Ok(Response::new(v1::StopResponse {}))
    }
}
