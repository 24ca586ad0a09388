//! Learning where a child serves and whether it is ready.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use baton_proto::v1::WatchRequest;
use baton_proto::v1::worker_client::WorkerClient;
use baton_proto::v1::worker_status::State;

use crate::client::Client;

/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(50);
/// How long one look may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// How a child is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Face {
    /// By its status stream.
    Worker,
    /// By `/health`, which says yes only if a chat would succeed.
    Router,
}

/// Waits until a child has written its address.
pub(super) async fn address_in(file: &Path) -> SocketAddr {
    loop {
        let text = tokio::fs::read_to_string(file).await.unwrap_or_default();
        if let Ok(address) = text.trim().parse() {
            return address;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Waits until the child there is ready.
pub(super) async fn ready(face: Face, address: SocketAddr) {
    loop {
        let answer = match face {
            // Ends by itself as soon as the worker is ready; its loading may take longer than one patience.
            Face::Worker => worker_ready(address).await.unwrap_or(false),
            Face::Router => tokio::time::timeout(PATIENCE, router_ready(address)).await.unwrap_or(false),
        };
        if answer {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn router_ready(address: SocketAddr) -> bool {
    match Client::new(&format!("http://{address}")) {
        Ok(client) => client.says_yes("/health").await,
        Err(_) => false,
    }
}

/// Follows the worker's status until it is ready; false when the stream ends before.
async fn worker_ready(address: SocketAddr) -> Result<bool, tonic::Status> {
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| tonic::Status::internal(error.to_string()))?
        .connect_timeout(PATIENCE);
    let channel = endpoint.connect().await.map_err(|error| tonic::Status::unavailable(error.to_string()))?;
    let mut statuses = WorkerClient::new(channel).watch(WatchRequest {}).await?.into_inner();
    while let Some(status) = statuses.message().await? {
        if status.state() == State::Ready {
            return Ok(true);
        }
    }
    Ok(false)
}
