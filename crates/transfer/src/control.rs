//! The source's side of a control stream.

use std::time::Instant;

use baton_handoff::{DestinationMessage, SourceMessage};
use baton_proto::v1;
use baton_proto::v1::handoff_client::HandoffClient;
use baton_telemetry::trace::{TRACEPARENT, TraceContext};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Request, Streaming};

use crate::{Peer, TransferError, wire};

/// Messages that wait for the transport; a handoff has fewer.
const MAX_QUEUED: usize = 8;

/// Largest message on a control stream.
const MAX_CONTROL_BYTES: usize = 64 * 1024;

/// An open control stream of one handoff. Dropping it ends the stream.
pub struct Control {
    address: String,
    outgoing: mpsc::Sender<v1::SourceMessage>,
    incoming: Streaming<v1::DestinationMessage>,
    offered_at: Instant,
}

/// Opens the control stream of one handoff with its first message, the offer: a destination answers only once it has heard one. `trace` is
/// the span that the handoff belongs to, for the destination.
///
/// # Errors
/// [`TransferError::Lost`] when the peer can't be reached or refuses the stream.
pub async fn open_control(
    peer: &Peer,
    offer: SourceMessage,
    trace: Option<TraceContext>,
) -> Result<Control, TransferError> {
    open(peer.control(), peer.address(), offer, trace).await
}

async fn open(
    channel: Channel,
    address: &str,
    offer: SourceMessage,
    trace: Option<TraceContext>,
) -> Result<Control, TransferError> {
    let (outgoing, queued) = mpsc::channel(MAX_QUEUED);
    // The queue is new: it has room.
    let _ = outgoing.try_send(wire::encode_source(&offer));
    let mut client = HandoffClient::new(channel).max_decoding_message_size(MAX_CONTROL_BYTES);
    let offered_at = Instant::now();
    let response = client.control(traced(ReceiverStream::new(queued), trace)).await;
    let incoming = response.map_err(|status| lost(address, &status))?.into_inner();
    Ok(Control { address: address.to_owned(), outgoing, incoming, offered_at })
}

/// A request that says which span makes it.
pub(crate) fn traced<Message>(message: Message, trace: Option<TraceContext>) -> Request<Message> {
    let mut request = Request::new(message);
    // Hexadecimal digits and dashes always are a value.
    if let Some(value) = trace.and_then(|trace| trace.to_header().parse().ok()) {
        request.metadata_mut().insert(TRACEPARENT, value);
    }
    request
}

fn lost(address: &str, status: &tonic::Status) -> TransferError {
    TransferError::Lost {
        address: address.to_owned(),
        detail: format!("{}: {}", status.code(), status.message()),
    }
}

impl Control {
    /// When the offer was sent.
    pub const fn offered_at(&self) -> Instant {
        self.offered_at
    }

    /// Queues a message, see [`wire::encode_source`]; waits while the queue is full.
    ///
    /// # Errors
    /// [`TransferError::Lost`] when the stream has ended.
    pub async fn send(&self, message: v1::SourceMessage) -> Result<(), TransferError> {
        let sent = self.outgoing.send(message).await;
        sent.map_err(|_| TransferError::Lost {
            address: self.address.clone(),
            detail: "the control stream has ended".into(),
        })
    }

    /// The next message; `None` when the destination ended the stream. Loses nothing when dropped in a `select!`.
    ///
    /// # Errors
    /// [`TransferError::Lost`] when the stream broke, [`TransferError::Protocol`] for a message that is none.
    pub async fn next(&mut self) -> Result<Option<DestinationMessage>, TransferError> {
        match self.incoming.message().await {
            Ok(Some(message)) => wire::decode_destination(message).map(Some),
            Ok(None) => Ok(None),
            Err(status) => Err(lost(&self.address, &status)),
        }
    }
}
