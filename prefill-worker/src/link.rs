//! The control stream of one handoff, from before it is open to after it ended.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use baton_handoff::{DestinationMessage, InstanceId, SourceMessage};
use baton_proto::v1;
use baton_telemetry::trace::TraceContext;
use baton_transfer::{Control, Peer, Peers, TransferError, open_control};

/// Where a handoff's KV goes.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// "host:port" of the decode worker.
    pub(crate) address: String,
    /// Whom the router meant.
    pub(crate) instance: InstanceId,
}

/// The stream and its peer.
pub(crate) enum Link {
    /// Nothing was sent yet.
    Closed,
    /// Connecting, shaking hands, offering.
    Opening(Opening),
    /// Open.
    Open { peer: Box<Peer>, control: Box<Control> },
}

type Opening = Pin<Box<dyn Future<Output = Result<(Peer, Control), TransferError>> + Send>>;

/// What a link tells.
#[derive(Debug)]
pub(crate) enum LinkEvent {
    Received(DestinationMessage),
    /// The stream ended, or could not be opened.
    Lost(TransferError),
}

impl Link {
    /// Connects and makes the offer, as a part of the span `trace`.
    pub(crate) fn open(
        peers: Arc<Peers>,
        target: Target,
        offer: SourceMessage,
        trace: Option<TraceContext>,
    ) -> Self {
        Self::Opening(Box::pin(async move {
            let peer = peers.get(&target.address, target.instance).await?;
            let control =
                open_control(&peer, offer, trace).await.inspect_err(|_| peers.drop_peer(&target.address))?;
            Ok((peer, control))
        }))
    }

    /// The peer, once it answered.
    pub(crate) fn peer(&self) -> Option<&Peer> {
        match self {
            Self::Open { peer, .. } => Some(peer),
            Self::Closed | Self::Opening(_) => None,
        }
    }

    /// When the offer was sent, once the peer answered.
    pub(crate) fn offered_at(&self) -> Option<Instant> {
        match self {
            Self::Open { control, .. } => Some(control.offered_at()),
            Self::Closed | Self::Opening(_) => None,
        }
    }

    /// Sends a message after the offer. False when the stream counts as lost from now on. One that has ended is told so by [`Link::next`] alone, behind
    /// what the destination had said before: that may be that it committed.
    pub(crate) async fn send(&mut self, message: v1::SourceMessage) -> bool {
        match self {
            Self::Open { control, .. } => {
                let _ = control.send(message).await;
                true
            }
            // Dropping what is under way tells the destination as much as a message would.
            Self::Opening(_) | Self::Closed => {
                *self = Self::Closed;
                false
            }
        }
    }

    /// What comes next; pending while closed. Loses nothing when dropped in a `select!`.
    pub(crate) async fn next(&mut self) -> LinkEvent {
        loop {
            match self {
                Self::Closed => std::future::pending().await,
                Self::Opening(opening) => match opening.as_mut().await {
                    Ok((peer, control)) => {
                        *self = Self::Open { peer: Box::new(peer), control: Box::new(control) };
                    }
                    Err(error) => return self.lost(error),
                },
                Self::Open { peer, control } => {
                    let address = peer.address().to_owned();
                    let ended =
                        || TransferError::Lost { address, detail: "the control stream ended".to_owned() };
                    return match control.next().await {
                        Ok(Some(message)) => LinkEvent::Received(message),
                        Ok(None) => self.lost(ended()),
                        Err(error) => self.lost(error),
                    };
                }
            }
        }
    }

    fn lost(&mut self, error: TransferError) -> LinkEvent {
        *self = Self::Closed;
        LinkEvent::Lost(error)
    }
}
