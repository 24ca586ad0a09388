//! A collector in this process.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::State;
use baton_telemetry::trace::{Collector, Protocol, Sampler, Service, TracingConfig};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

pub(crate) const SERVICE: Service = Service { name: "baton-router", version: "1.2.3" };

/// What arrives, and where to send it.
pub(crate) struct Received {
    pub(crate) endpoint: String,
    requests: mpsc::Receiver<ExportTraceServiceRequest>,
}

impl Received {
    /// The next export's resource and spans.
    pub(crate) async fn next(&mut self) -> (Resource, Vec<Span>) {
        let request = tokio::time::timeout(Duration::from_secs(10), self.requests.recv());
        let request = request.await.expect("an export within 10 s").expect("the server lives");
        let [of_one] = <[_; 1]>::try_from(request.resource_spans).expect("one resource");
        let spans = of_one.scope_spans.into_iter().flat_map(|scope| scope.spans).collect();
        (of_one.resource.expect("a resource"), spans)
    }
}

struct Grpc(mpsc::Sender<ExportTraceServiceRequest>);

#[tonic::async_trait]
impl TraceService for Grpc {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.send(request.into_inner()).await.map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    (listener, address)
}

/// Serves OTLP over gRPC.
pub(crate) async fn grpc() -> Received {
    let (listener, address) = listen().await;
    let (sender, requests) = mpsc::channel(64);
    let service = TraceServiceServer::new(Grpc(sender));
    let server = tonic::transport::Server::builder().add_service(service);
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    Received { endpoint: format!("http://{address}"), requests }
}

/// Serves OTLP over HTTP.
pub(crate) async fn http() -> Received {
    async fn export(State(sender): State<mpsc::Sender<ExportTraceServiceRequest>>, body: Bytes) {
        let request = ExportTraceServiceRequest::decode(body).expect("a request");
        let _ = sender.send(request).await;
    }
    let (listener, address) = listen().await;
    let (sender, requests) = mpsc::channel(64);
    let app = axum::Router::new().route("/v1/traces", axum::routing::post(export)).with_state(sender);
    tokio::spawn(async move { axum::serve(listener, app).await });
    Received { endpoint: format!("http://{address}"), requests }
}

/// Takes connections and bytes, and says nothing.
pub(crate) async fn hanging() -> String {
    let (listener, address) = listen().await;
    tokio::spawn(async move {
        let mut connections = Vec::new();
        while let Ok((connection, _)) = listener.accept().await {
            connections.push(connection);
        }
    });
    format!("http://{address}")
}

/// Passes connections on to `endpoint`, but for the first: it is closed as soon as something comes over it.
pub(crate) async fn closing_first(endpoint: &str) -> String {
    let to = endpoint.trim_start_matches("http://").to_owned();
    let (listener, address) = listen().await;
    tokio::spawn(async move {
        let mut is_first = true;
        while let Ok((mut here, _)) = listener.accept().await {
            if std::mem::take(&mut is_first) {
                let _ = here.read(&mut [0; 64]).await;
                continue;
            }
            let mut there = TcpStream::connect(&to).await.expect("the collector listens");
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut here, &mut there).await });
        }
    });
    format!("http://{address}")
}

/// Where nobody listens.
pub(crate) async fn dead() -> String {
    let (_, address) = listen().await;
    format!("http://{address}")
}

/// Spans sent soon, to `endpoint`.
pub(crate) fn config(endpoint: &str, protocol: Protocol) -> TracingConfig {
    let endpoint = match protocol {
        Protocol::Grpc => endpoint.to_owned(),
        Protocol::Http => format!("{endpoint}/v1/traces"),
    };
    TracingConfig {
        collector: Some(Collector { endpoint, protocol }),
        file: None,
        sampler: Sampler::default(),
        max_queued: 4096,
        max_batch: 512,
        delay: Duration::from_millis(20),
        timeout: Duration::from_secs(10),
        resource: [("deployment.environment.name".to_owned(), "test".to_owned())].into(),
    }
}

/// Waits until `holds` does.
pub(crate) async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
