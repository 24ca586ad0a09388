//! The listener for KV: a port and a thread of its own, so that frames never stand in the way of tokens.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;

use baton_transfer::{Receivers, bulk_server_builder, kv_stream_server};
use baton_worker::{Core, State, WorkerError};
use tonic::transport::server::TcpIncoming;

use crate::directory::Directory;

/// A bound listener.
pub(crate) struct Bulk {
    listener: TcpListener,
    port: u16,
}

impl Bulk {
    pub(crate) fn bind(ip: IpAddr, port: u16) -> Result<Self, WorkerError> {
        let address = SocketAddr::new(ip, port);
        let failed = |source| WorkerError::Bind { address, option: "--bulk-port", source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        Ok(Self { listener, port })
    }

    pub(crate) const fn port(&self) -> u16 {
        self.port
    }

    /// Serves once the model is loaded, on the bulk thread, until the worker ends.
    pub(crate) fn serve(self, core: &Arc<Core>, directory: Arc<Directory>) {
        let bulk = core.bulk.clone();
        let core = Arc::clone(core);
        bulk.spawn(async move {
            let mut state = core.lifecycle.watch();
            // The state's sender lives in `core`.
            let _ = state.wait_for(|state| *state != State::Loading).await;
            let Ok(loaded) = core.loaded() else { return };
            let receivers = directory.receivers(&core, loaded);
            if let Err(error) = self.serve_until_dropped(receivers).await {
                core.lifecycle.set(State::Failed(format!("the KV listener ended: {error}")));
            }
        });
    }

    async fn serve_until_dropped(self, receivers: Receivers) -> Result<(), String> {
        let listener = tokio::net::TcpListener::from_std(self.listener).map_err(|error| error.to_string())?;
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let mut server = bulk_server_builder();
        let served = server.add_service(kv_stream_server(receivers)).serve_with_incoming(incoming).await;
        served.map_err(|error| error.to_string())
    }
}
