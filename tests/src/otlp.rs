//! A collector inside the test: takes spans over OTLP, by gRPC and by HTTP, and keeps them as values. It has a thread of its own, which gives
//! way to others, and reads what came only when it is asked: what is measured beside it is to be the cluster.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value as AnyValue;
use opentelemetry_proto::tonic::common::v1::{self as common, KeyValue};
use opentelemetry_proto::tonic::trace::v1::{self as wire, ResourceSpans, status::StatusCode};
use prost::Message;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Channel;

use crate::eventually;
use crate::spans::{Kind, Link, Span, Trace};

/// The longest wait for a trace: processes hand over spans once a second or so.
const TRACE_BOUND: Duration = Duration::from_secs(20);

/// A collector that listens; dropping it ends that.
pub struct Collector {
    /// Where it takes OTLP over gRPC.
    pub grpc: SocketAddr,
    /// Where it takes OTLP over HTTP.
    pub http: SocketAddr,
    received: Arc<Received>,
    /// Dropping it ends the thread.
    _running: oneshot::Sender<()>,
}

#[derive(Default)]
struct Received {
    /// Not read yet.
    exports: Mutex<Vec<Vec<ResourceSpans>>>,
    spans: Mutex<Vec<Span>>,
    behind: Option<TraceServiceClient<Channel>>,
    num_grpc: AtomicUsize,
    num_http: AtomicUsize,
    delay_ms: AtomicU64,
}

impl Received {
    async fn take(&self, request: ExportTraceServiceRequest, count: &AtomicUsize) {
        count.fetch_add(1, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(self.delay_ms.load(Ordering::SeqCst))).await;
        if let Some(behind) = &self.behind
            && let Err(error) = behind.clone().export(request.clone()).await
        {
            // What it lacks then shows in the test that asks it.
            eprintln!("the collector can't hand on spans: {error}");
        }
        self.exports.lock().unwrap_or_else(PoisonError::into_inner).push(request.resource_spans);
    }

    fn spans_where(&self, is_wanted: impl Fn(&Span) -> bool) -> Vec<Span> {
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        let exports = std::mem::take(&mut *self.exports.lock().unwrap_or_else(PoisonError::into_inner));
        spans.extend(exports.into_iter().flat_map(read));
        spans.iter().filter(|span| is_wanted(span)).cloned().collect()
    }
}

/// The gRPC face.
struct Service(Arc<Received>);

#[tonic::async_trait]
impl TraceService for Service {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        self.0.take(request.into_inner(), &self.0.num_grpc).await;
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

/// The HTTP face, which answers in kind.
async fn export_over_http(
    State(received): State<Arc<Received>>,
    body: Bytes,
) -> Result<([(&'static str, &'static str); 1], Vec<u8>), (axum::http::StatusCode, String)> {
    let request = ExportTraceServiceRequest::decode(body)
        .map_err(|error| (axum::http::StatusCode::BAD_REQUEST, error.to_string()))?;
    received.take(request, &received.num_http).await;
    let answer = ExportTraceServiceResponse::default().encode_to_vec();
    Ok(([("content-type", "application/x-protobuf")], answer))
}

impl Collector {
    /// Starts one on loopback.
    ///
    /// # Panics
    /// When there is no port.
    pub async fn start() -> Self {
        Self::start_with(IpAddr::V4(Ipv4Addr::LOCALHOST), None).await
    }

    /// Starts one at an address of this machine, in the network namespace of the calling thread; it hands on what it gets, over gRPC, to
    /// the endpoint `behind` it.
    ///
    /// # Panics
    /// When it can't listen there, or the endpoint is none.
    pub async fn start_with(host: IpAddr, behind: Option<String>) -> Self {
        let (running, ended) = oneshot::channel();
        let (started, start) = oneshot::channel();
        std::thread::spawn(move || {
            give_way();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let (grpc, http, received) = serve(host, behind).await;
                let _ = started.send((grpc, http, received));
                // An error says that nobody holds the other end any more.
                let _ = ended.await;
            });
        });
        let (grpc, http, received) = start.await.expect("the collector starts");
        Self { grpc, http, received, _running: running }
    }

    /// The standard variables with which a process tells it spans over gRPC, soon.
    pub fn over_grpc(&self) -> Vec<String> {
        environment(self.grpc, "grpc")
    }

    /// As [`Collector::over_grpc`], over HTTP.
    pub fn over_http(&self) -> Vec<String> {
        environment(self.http, "http/protobuf")
    }

    /// Exports that came over gRPC, and over HTTP.
    pub fn num_exports(&self) -> (usize, usize) {
        (self.received.num_grpc.load(Ordering::SeqCst), self.received.num_http.load(Ordering::SeqCst))
    }

    /// Answers each further export only after `delay`.
    pub fn answer_after(&self, delay: Duration) {
        self.received.delay_ms.store(u64::try_from(delay.as_millis()).unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// Every span that came.
    pub fn spans(&self) -> Vec<Span> {
        self.spans_where(|_| true)
    }

    fn spans_where(&self, is_wanted: impl Fn(&Span) -> bool) -> Vec<Span> {
        self.received.spans_where(is_wanted)
    }

    /// Every trace that came, by its id.
    pub fn traces(&self) -> BTreeMap<String, Trace> {
        Trace::split(self.spans())
    }

    /// The trace with this id, once `is_whole` says so.
    ///
    /// # Panics
    /// When it does not within 20 s.
    pub async fn trace(&self, id: &str, is_whole: impl Fn(&Trace) -> bool) -> Trace {
        eventually(&format!("trace {id} is whole"), TRACE_BOUND, async || {
            let trace = Trace::new(self.spans_where(|span| span.trace_id == id));
            if is_whole(&trace) { Ok(trace) } else { Err(format!("{} spans:\n{trace}", trace.spans.len())) }
        })
        .await
    }
}

/// Listens on two ports, over gRPC and over HTTP, and serves them for as long as the runtime runs.
async fn serve(host: IpAddr, behind: Option<String>) -> (SocketAddr, SocketAddr, Arc<Received>) {
    let behind = behind.map(|endpoint| {
        let endpoint = Channel::from_shared(endpoint).expect("an endpoint");
        TraceServiceClient::new(endpoint.connect_lazy())
    });
    let received = Arc::new(Received { behind, ..Received::default() });
    let [(for_grpc, grpc), (for_http, http)] = [listen(host).await, listen(host).await];
    let service = TraceServiceServer::new(Service(Arc::clone(&received))).max_decoding_message_size(64 << 20);
    let server = tonic::transport::Server::builder().add_service(service);
    let routes = axum::Router::new()
        .route("/v1/traces", axum::routing::post(export_over_http))
        .with_state(Arc::clone(&received));
    tokio::spawn(async move {
        server.serve_with_incoming(TcpListenerStream::new(for_grpc)).await.expect("the collector serves");
    });
    tokio::spawn(async move {
        axum::serve(for_http, routes).await.expect("the collector serves");
    });
    (grpc, http, received)
}

/// As the thread does that exports: whatever core it finds itself on, the cluster comes first.
fn give_way() {
    // SAFETY: plain system call without pointers; 0 means the calling thread. Failing costs nothing but the courtesy.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, 10);
    }
}

fn environment(endpoint: SocketAddr, protocol: &str) -> Vec<String> {
    vec![
        format!("OTEL_EXPORTER_OTLP_ENDPOINT=http://{endpoint}"),
        format!("OTEL_EXPORTER_OTLP_PROTOCOL={protocol}"),
        "OTEL_BSP_SCHEDULE_DELAY=100".to_owned(),
    ]
}

async fn listen(host: IpAddr) -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((host, 0)).await.unwrap_or_else(|error| panic!("{host}: {error}"));
    let address = listener.local_addr().expect("an address");
    (listener, address)
}

/// Every span in the files of a folder that hold OTLP in JSON, one export a line.
///
/// # Errors
/// A line that is no OTLP, with its file and number; a file that can't be read.
pub fn read_files(folder: &Path) -> Result<Vec<Span>, String> {
    let mut spans = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))? {
        let path = entry.map_err(|error| error.to_string())?.path();
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        for (nth, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
            spans
                .extend(read_json(line).map_err(|error| format!("{}:{}: {error}", path.display(), nth + 1))?);
        }
    }
    Ok(spans)
}

/// Every span of an export in JSON.
///
/// # Errors
/// It is no OTLP.
pub fn read_json(text: &str) -> Result<Vec<Span>, String> {
    let request: ExportTraceServiceRequest = serde_json::from_str(text).map_err(|error| error.to_string())?;
    Ok(read(request.resource_spans))
}

/// From the wire.
fn read(resource_spans: Vec<ResourceSpans>) -> Vec<Span> {
    let mut spans = Vec::new();
    for of_process in resource_spans {
        let resource =
            attributes(of_process.resource.map(|resource| resource.attributes).unwrap_or_default());
        let told = of_process.scope_spans.into_iter().flat_map(|scope| scope.spans);
        spans.extend(told.map(|span| read_span(span, resource.clone())));
    }
    spans
}

fn read_span(span: wire::Span, resource: BTreeMap<String, Value>) -> Span {
    use wire::span::SpanKind;
    Span {
        trace_id: hex(&span.trace_id),
        span_id: hex(&span.span_id),
        parent_id: (!span.parent_span_id.is_empty()).then(|| hex(&span.parent_span_id)),
        kind: match span.kind() {
            SpanKind::Unspecified => Kind::Unspecified,
            SpanKind::Internal => Kind::Internal,
            SpanKind::Server => Kind::Server,
            SpanKind::Client => Kind::Client,
            SpanKind::Producer => Kind::Producer,
            SpanKind::Consumer => Kind::Consumer,
        },
        name: span.name,
        start_ns: span.start_time_unix_nano,
        end_ns: span.end_time_unix_nano,
        attributes: attributes(span.attributes),
        links: span
            .links
            .iter()
            .map(|link| Link { trace_id: hex(&link.trace_id), span_id: hex(&link.span_id) })
            .collect(),
        is_error: span.status.is_some_and(|status| status.code() == StatusCode::Error),
        resource,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn attributes(pairs: Vec<KeyValue>) -> BTreeMap<String, Value> {
    pairs.into_iter().map(|pair| (pair.key, pair.value.map_or(Value::Null, attribute))).collect()
}

fn attribute(value: common::AnyValue) -> Value {
    match value.value {
        Some(AnyValue::StringValue(text)) => json!(text),
        Some(AnyValue::BoolValue(is)) => json!(is),
        Some(AnyValue::IntValue(number)) => json!(number),
        Some(AnyValue::DoubleValue(number)) => json!(number),
        Some(AnyValue::ArrayValue(array)) => array.values.into_iter().map(attribute).collect(),
        _ => Value::Null,
    }
}
