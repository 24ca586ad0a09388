//! The `Handoff` service: layouts are compared, and every control stream finds its leg.

use std::sync::Arc;
use std::time::Duration;

use baton_handoff::{Cause, DestinationMessage, HandoffKey, Offer, SourceMessage};
use baton_proto::v1;
use baton_transfer::{Identity, answer_handshake_for, wire};
use baton_worker::Core;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::directory::{ANSWER_BUFFER, ControlStream, Directory, Placed, Slot};

/// How long a stream may stay open without an offer.
const OFFER_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct HandoffService {
    core: Arc<Core>,
    directory: Arc<Directory>,
    bulk_port: u16,
}

impl HandoffService {
    pub(crate) fn new(core: Arc<Core>, directory: Arc<Directory>, bulk_port: u16) -> Self {
        Self { core, directory, bulk_port }
    }
}

#[tonic::async_trait]
impl v1::handoff_server::Handoff for HandoffService {
    async fn handshake(
        &self,
        request: Request<v1::HandshakeRequest>,
    ) -> Result<Response<v1::HandshakeResponse>, Status> {
        let loaded = self.core.loaded()?;
        let ours = Identity { instance: self.core.instance, layout: loaded.layout().clone() };
        let receivers = self.directory.receivers(&self.core, loaded);
        let (asked, port) = (request.into_inner(), self.bulk_port);
        // A device may take its time, and tokens go out on this thread.
        let answer = move || answer_handshake_for(&receivers, &ours, port, asked);
        let answered = tokio::task::spawn_blocking(answer).await;
        answered.map_err(|error| Status::internal(error.to_string()))?.map(Response::new)
    }

    type ControlStream = ReceiverStream<Result<v1::DestinationMessage, Status>>;

    async fn control(
        &self,
        request: Request<Streaming<v1::SourceMessage>>,
    ) -> Result<Response<Self::ControlStream>, Status> {
        self.core.loaded()?;
        let (outgoing, answers) = mpsc::channel(ANSWER_BUFFER);
        let (core, directory) = (Arc::clone(&self.core), Arc::clone(&self.directory));
        let incoming = request.into_inner();
        tokio::spawn(async move {
            if let Err(status) = attach(&core, &directory, incoming, outgoing.clone()).await {
                // A source that is gone needs no answer.
                let _ = outgoing.send(Err(status)).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(answers)))
    }
}

/// Reads the offer and hands the stream to its leg.
async fn attach(
    core: &Core,
    directory: &Directory,
    mut incoming: Streaming<v1::SourceMessage>,
    outgoing: mpsc::Sender<Result<v1::DestinationMessage, Status>>,
) -> Result<(), Status> {
    let offer = tokio::time::timeout(OFFER_TIMEOUT, read_offer(&mut incoming))
        .await
        .map_err(|_| Status::deadline_exceeded("no offer within 10 s"))??;
    let offered_at = core.clock.now();
    let placed = match core.lifecycle.is_ready() {
        true => directory.offer(offer, offered_at),
        false => Placed::Gone(Cause::Draining),
    };
    let found = match placed {
        Placed::Gone(cause) => Err(cause),
        Placed::Leg(slot) => Ok(slot),
        Placed::Parked(leg) => wait_for_leg(core, directory, offer.key, leg, &mut incoming).await,
    };
    let gone = |cause| Ok(wire::encode_destination(&DestinationMessage::Gone(cause)));
    match found {
        Ok(slot) => {
            let stream = Box::new(ControlStream { offer, offered_at, incoming, outgoing });
            if let Err(unsent) = slot.send(stream).await {
                // The leg ended in this moment.
                let _ = unsent.0.outgoing.send(gone(Cause::Cancelled)).await;
            }
        }
        Err(cause) => {
            let _ = outgoing.send(gone(cause)).await;
        }
    }
    Ok(())
}

async fn read_offer(incoming: &mut Streaming<v1::SourceMessage>) -> Result<Offer, Status> {
    let first =
        incoming.message().await?.ok_or_else(|| Status::invalid_argument("the stream has no offer"))?;
    match wire::decode_source(first)? {
        SourceMessage::Offer { key, source, destination, prompt_tokens } => {
            Ok(Offer { key, source, destination, prompt_tokens })
        }
        _ => Err(Status::invalid_argument("the first message of a control stream is an offer")),
    }
}

/// Keeps an offer that came before its Decode leg, for a short while.
async fn wait_for_leg(
    core: &Core,
    directory: &Directory,
    key: HandoffKey,
    mut leg: tokio::sync::oneshot::Receiver<Slot>,
    incoming: &mut Streaming<v1::SourceMessage>,
) -> Result<Slot, Cause> {
    let park = directory.timers.park;
    loop {
        tokio::select! {
            slot = &mut leg => return slot.map_err(|_| Cause::NotFound),
            // An abort, the end, or a message that has no place here: in any case the offer is over.
            _ = incoming.message() => {
                directory.withdraw(key);
                return Err(Cause::Cancelled);
            }
            () = tokio::time::sleep(park) => directory.expire(core.clock.now()),
        }
    }
}
