//! Connections: small ones for control, and ones with large windows for KV.

use std::time::Duration;

use tonic::transport::{Endpoint, Server};

use crate::TransferError;
use crate::heap::keep_buffers;

/// HTTP/2 window of a bulk stream and of its connection: equal, so that one stream that isn't read can't take the window from
/// the others as long as the credit outstanding on a connection stays below it.
pub const BULK_WINDOW_BYTES: u32 = 64 * 1024 * 1024;

/// Largest HTTP/2 frame on a bulk connection: a KV frame in one piece. With the default of 16 KiB a transfer takes a quarter
/// more CPU time.
const BULK_HTTP2_FRAME_BYTES: u32 = 256 * 1024;

/// Window of control connections: their messages are small.
const CONTROL_WINDOW_BYTES: u32 = 1024 * 1024;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const PING_INTERVAL: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// Streams that a peer may have open on one connection.
const MAX_STREAMS: u32 = 1024;

fn endpoint(address: &str) -> Result<Endpoint, TransferError> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| TransferError::Lost { address: address.to_owned(), detail: describe(&error) })?;
    Ok(endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true))
}

/// A client's control connection to "host:port".
///
/// # Errors
/// [`TransferError::Lost`] when that is no address.
pub fn control_endpoint(address: &str) -> Result<Endpoint, TransferError> {
    Ok(endpoint(address)?
        .initial_stream_window_size(CONTROL_WINDOW_BYTES)
        .initial_connection_window_size(CONTROL_WINDOW_BYTES))
}

/// A client's bulk connection to "host:port". Only answers come back on it, so its own windows are small.
///
/// # Errors
/// [`TransferError::Lost`] when that is no address.
pub fn bulk_endpoint(address: &str) -> Result<Endpoint, TransferError> {
    keep_buffers();
    control_endpoint(address)
}

/// Server settings for everything but KV. A listener given to `serve_with_incoming` must set TCP_NODELAY itself: without it
/// a small answer waits up to 40 ms for the acknowledgement of the one before.
pub fn control_server_builder() -> Server {
    Server::builder()
        .tcp_nodelay(true)
        .initial_stream_window_size(CONTROL_WINDOW_BYTES)
        .initial_connection_window_size(CONTROL_WINDOW_BYTES)
        .max_concurrent_streams(MAX_STREAMS)
        .http2_keepalive_interval(Some(PING_INTERVAL))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
}

/// Server settings for [`crate::KvStreamService`].
pub fn bulk_server_builder() -> Server {
    keep_buffers();
    control_server_builder()
        .initial_stream_window_size(BULK_WINDOW_BYTES)
        .initial_connection_window_size(BULK_WINDOW_BYTES)
        .max_frame_size(BULK_HTTP2_FRAME_BYTES)
}

/// An error with its sources, which transports hide behind "transport error".
pub(crate) fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let inner_text = inner.to_string();
        if !text.ends_with(&inner_text) {
            text.push_str(": ");
            text.push_str(&inner_text);
        }
        source = inner.source();
    }
    text
}
