//! The `Decode` service.

use std::sync::Arc;

use baton_handoff::{Cause, HandoffKey};
use baton_proto::v1;
use baton_telemetry::log::request_span;
use baton_telemetry::trace::CallContext;
use baton_transfer::wire;
use baton_worker::{Core, LegRequest, WireLeg};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tracing::Instrument;

use crate::directory::Directory;
use crate::group::Stops;
use crate::leg::{Leg, Order};
use crate::local;
use crate::output::Output;
use crate::spans::{Called, LegSpans};

pub(crate) struct DecodeService {
    core: Arc<Core>,
    directory: Arc<Directory>,
}

impl DecodeService {
    pub(crate) fn new(core: Arc<Core>, directory: Arc<Directory>) -> Self {
        Self { core, directory }
    }
}

#[tonic::async_trait]
impl v1::decode_server::Decode for DecodeService {
    type DecodeStream = ReceiverStream<Result<v1::DecodeEvent, Status>>;

    async fn decode(
        &self,
        request: Request<v1::DecodeRequest>,
    ) -> Result<Response<Self::DecodeStream>, Status> {
        let (loaded, guard) = self.core.accept()?;
        let accepted = self.core.clock.now();
        let call = CallContext::read(|name| request.metadata().get(name).map(|value| value.as_bytes()));
        let v1::DecodeRequest { key, prompt, sampling, stopping, local, num_generated, terms } =
            request.into_inner();
        let wire = WireLeg { key, prompt, sampling, stopping, num_generated, terms };
        let request = LegRequest::check(wire, &loaded.limits)?;
        let key = request.key;
        let stops = Arc::new(Stops::new(request.first_sequence, request.num_sequences));
        let control =
            self.directory.open(key, Arc::clone(&stops), accepted).map_err(|cause| refused(key, cause))?;
        let (output, events) = Output::new(request.timeout);
        let (core, directory) = (Arc::clone(&self.core), Arc::clone(&self.directory));
        let mut spans = LegSpans::new(&core.tracing, core.clock, Called { call, key, accepted });
        spans.registered(core.clock.now());
        let trace = call.map(|call| call.parent.trace_id_hex()).unwrap_or_default();
        let span = request_span(&key.request.to_string(), &trace);
        let task = async move {
            let cause = match core.loaded() {
                Ok(loaded) if local => {
                    let (core, output, stops) = (&*core, &output, &*stops);
                    local::run(local::Order { core, loaded, request, output, stops, accepted, spans }).await
                }
                Ok(loaded) => {
                    let receivers = directory.receivers(&core, loaded);
                    let (core, timers) = (Arc::clone(&core), directory.timers);
                    let order = Order { core, receivers, timers, request, control, stops, output, spans };
                    Leg::run(order).await
                }
                // It was ready a moment ago.
                Err(status) => {
                    output.failed(Cause::Engine, status.message()).await;
                    Cause::Engine
                }
            };
            directory.finish(key, cause, core.clock.now());
            drop(guard);
        };
        tokio::spawn(task.instrument(span));
        Ok(Response::new(ReceiverStream::new(events)))
    }

    async fn stop(&self, request: Request<v1::StopRequest>) -> Result<Response<v1::StopResponse>, Status> {
        let v1::StopRequest { key, sequence } = request.into_inner();
        let key = wire::decode_key(key)?;
        let Some(stops) = self.directory.stops(key) else {
            return Err(Status::not_found(format!("key {key} is not live here")));
        };
        match stops.ask(sequence) {
            true => Ok(Response::new(v1::StopResponse {})),
            false => {
                let what = format!("sequence is {sequence}, and key {key} has {}", stops.range());
                Err(Status::invalid_argument(what))
            }
        }
    }
}

fn refused(key: HandoffKey, cause: Cause) -> Status {
    match cause {
        Cause::Duplicate => Status::already_exists(format!("key {key} is live here, or was lately")),
        other => Status::aborted(format!("key {key}: {other}")),
    }
}
