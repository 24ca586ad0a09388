//! Meeting a decode worker: handshake, instances, bounds, and the control stream.

mod support;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use baton_handoff::{Cause, DestinationMessage, InstanceId, SourceMessage};
use baton_kv::{BlockMemory, KvLayout};
use baton_proto::v1;
use baton_proto::v1::handoff_server::{Handoff, HandoffServer};
use baton_transfer::{
    Identity, Peers, PeersConfig, Receivers, TransferError, Transport, answer_handshake,
    answer_handshake_for, answer_handshake_over, control_server_builder, open_control, wire,
};
use support::device::OnDevice;
use support::{PATIENCE, Rng, Sink, Source, instance, key, layout};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

/// A decode worker that answers handshakes, and on a control stream the offer with `Busy`, then with what else it hears as an abort.
struct Worker {
    identity: Identity,
    receivers: Option<Receivers>,
    transport: Transport,
    handshakes: Arc<AtomicUsize>,
}

#[tonic::async_trait]
impl Handoff for Worker {
    type ControlStream = ReceiverStream<Result<v1::DestinationMessage, Status>>;

    async fn handshake(
        &self,
        request: Request<v1::HandshakeRequest>,
    ) -> Result<Response<v1::HandshakeResponse>, Status> {
        self.handshakes.fetch_add(1, Ordering::SeqCst);
        let asked = request.into_inner();
        match &self.receivers {
            Some(receivers) => answer_handshake_for(receivers, &self.identity, 4321, asked),
            None => answer_handshake_over(self.transport, &self.identity, 4321, asked),
        }
        .map(Response::new)
    }

    async fn control(
        &self,
        request: Request<Streaming<v1::SourceMessage>>,
    ) -> Result<Response<Self::ControlStream>, Status> {
        let mut incoming = request.into_inner();
        let (outgoing, stream) = tokio::sync::mpsc::channel(4);
        tokio::spawn(async move {
            while let Ok(Some(message)) = incoming.message().await {
                let answer = match wire::decode_source(message) {
                    Ok(SourceMessage::Offer { prompt_tokens, .. }) => {
                        DestinationMessage::Busy { retry_after_ms: u64::from(prompt_tokens) }
                    }
                    Ok(SourceMessage::Abort(_)) => DestinationMessage::Aborted { committed: false },
                    Ok(_) => break,
                    Err(error) => DestinationMessage::Gone(error.cause()),
                };
                let _ = outgoing.send(Ok(wire::encode_destination(&answer))).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

struct Running {
    address: SocketAddr,
    handshakes: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

async fn start_at(address: SocketAddr, instance: InstanceId, layout: KvLayout) -> Running {
    start_over(Transport::Auto, address, instance, layout).await
}

async fn start_over(
    transport: Transport,
    address: SocketAddr,
    instance: InstanceId,
    layout: KvLayout,
) -> Running {
    start_for(None, transport, address, instance, layout).await
}

async fn start_for(
    receivers: Option<Receivers>,
    transport: Transport,
    address: SocketAddr,
    instance: InstanceId,
    layout: KvLayout,
) -> Running {
    let listener = TcpListener::bind(address).await.unwrap();
    let address = listener.local_addr().unwrap();
    let handshakes = Arc::new(AtomicUsize::new(0));
    let identity = Identity { instance, layout };
    let worker = Worker { identity, receivers, transport, handshakes: Arc::clone(&handshakes) };
    let task = tokio::spawn(async move {
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let server = control_server_builder().add_service(HandoffServer::new(worker));
        server.serve_with_incoming(incoming).await.unwrap();
    });
    Running { address, handshakes, task }
}

async fn start(instance: InstanceId, layout: KvLayout) -> Running {
    start_at("127.0.0.1:0".parse().unwrap(), instance, layout).await
}

fn peers(max_peers: usize) -> Peers {
    Peers::new(PeersConfig {
        identity: Identity { instance: instance(1), layout: layout(2, 1, 8, 16) },
        max_peers,
        bulk_runtime: tokio::runtime::Handle::current(),
    })
}

#[tokio::test]
async fn a_peer_is_met_once_and_kept() {
    let worker = start(instance(2), layout(2, 1, 8, 16)).await;
    let (peers, address) = (peers(4), worker.address.to_string());
    let meetings = (0..8).map(|_| peers.get(&address, instance(2)));
    for met in futures_join(meetings).await {
        assert_eq!(met.unwrap().instance(), instance(2));
    }
    assert_eq!((worker.handshakes.load(Ordering::SeqCst), peers.len()), (1, 1));
}

/// Runs all at once on this task.
async fn futures_join<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut set: Vec<_> = futures.map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|context| {
        for (future, output) in &mut set {
            if output.is_none()
                && let std::task::Poll::Ready(value) = future.as_mut().poll(context)
            {
                *output = Some(value);
            }
        }
        if set.iter().all(|(_, output)| output.is_some()) {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
    set.into_iter().filter_map(|(_, output)| output).collect()
}

#[tokio::test]
async fn layouts_that_differ_are_refused_with_both_sides_named_and_asked_again_later() {
    let worker = start(instance(2), layout(2, 1, 8, 32)).await;
    let (peers, address) = (peers(4), worker.address.to_string());
    let error = peers.get(&address, instance(2)).await.unwrap_err();
    assert!(matches!(error, TransferError::Layout(_)), "{error:?}");
    assert_eq!(error.cause(), Cause::Layout);
    let text = error.to_string();
    for part in [
        "block_size",
        "ours is 32",
        "theirs is 16",
        &address,
        &instance(1).to_string(),
        &instance(2).to_string(),
    ] {
        assert!(text.contains(part), "{text} does not say {part}");
    }
    assert!(peers.get(&address, instance(2)).await.is_err());
    assert_eq!(worker.handshakes.load(Ordering::SeqCst), 2, "a failed meeting is not kept");
}

#[test]
fn another_protocol_is_refused() {
    let identity = Identity { instance: instance(2), layout: layout(2, 1, 8, 16) };
    let asked = v1::HandshakeRequest {
        protocol_version: baton_proto::PROTOCOL_VERSION + 1,
        instance_id: wire::encode_instance(instance(1)),
        layout: Some(wire::encode_layout(&identity.layout)),
        shared_memory: None,
        device_memory: None,
    };
    let status = answer_handshake(&identity, 0, asked.clone()).unwrap_err();
    assert_eq!(status.code(), tonic::Code::FailedPrecondition);
    let expected = format!(
        "protocol version: ours is {}, theirs is {}",
        baton_proto::PROTOCOL_VERSION,
        asked.protocol_version
    );
    assert!(status.message().contains(&expected), "{status}");
    let status = answer_handshake(&identity, 0, v1::HandshakeRequest { layout: None, ..asked }).unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
}

#[tokio::test]
async fn a_worker_started_anew_is_met_anew_and_a_stale_view_is_told() {
    let worker = start(instance(2), layout(2, 1, 8, 16)).await;
    let (peers, address) = (peers(4), worker.address.to_string());
    peers.get(&address, instance(2)).await.unwrap();
    worker.task.abort();
    let _ = worker.task.await;
    let again = start_at(worker.address, instance(3), layout(2, 1, 8, 16)).await;
    assert_eq!(peers.get(&address, instance(3)).await.unwrap().instance(), instance(3));
    let error = peers.get(&address, instance(2)).await.unwrap_err();
    let expected = TransferError::WrongInstance { address, expected: instance(2), found: instance(3) };
    assert_eq!(error, expected);
    assert_eq!(again.handshakes.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn nobody_at_the_address_is_told_with_the_address() {
    let address = {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap().to_string()
    };
    let error =
        tokio::time::timeout(PATIENCE, peers(4).get(&address, instance(2))).await.unwrap().unwrap_err();
    assert!(matches!(&error, TransferError::Lost { address: at, .. } if *at == address), "{error:?}");
    assert!(error.to_string().contains("refused"), "{error}");
    let error = peers(4).get("not an address", instance(2)).await.unwrap_err();
    assert_eq!(error.cause(), Cause::PeerLost);
}

#[tokio::test]
async fn peers_are_bounded_and_idle_ones_make_room() {
    let peers = peers(2);
    let mut workers = Vec::new();
    for n in 2..6 {
        let worker = start(instance(n), layout(2, 1, 8, 16)).await;
        peers.get(&worker.address.to_string(), instance(n)).await.unwrap();
        assert!(peers.len() <= 2);
        workers.push(worker);
    }
    peers.drop_peer(&workers[3].address.to_string());
    assert_eq!(peers.len(), 1);
}

#[tokio::test]
async fn a_control_stream_carries_both_ways_and_tells_its_end() {
    // On a runtime of its own, so that its connections die with it.
    let process = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let worker = process.spawn(start(instance(2), layout(2, 1, 8, 16))).await.unwrap();
    let peers = peers(4);
    let peer = peers.get(&worker.address.to_string(), instance(2)).await.unwrap();
    let offer = SourceMessage::Offer {
        key: key(1),
        source: instance(1),
        destination: instance(2),
        prompt_tokens: 77,
    };
    let mut control = open_control(&peer, offer.clone(), None).await.unwrap();
    assert_eq!(control.next().await, Ok(Some(DestinationMessage::Busy { retry_after_ms: 77 })));
    control.send(wire::encode_source(&SourceMessage::Abort(Cause::Cancelled))).await.unwrap();
    assert_eq!(control.next().await, Ok(Some(DestinationMessage::Aborted { committed: false })));
    // This worker hangs up on a notice.
    control.send(wire::encode_source(&SourceMessage::Notice)).await.unwrap();
    assert_eq!(control.next().await, Ok(None));

    process.shutdown_background();
    let error = open_control(&peer, offer, None).await.map(drop).unwrap_err();
    assert_eq!(error.cause(), Cause::PeerLost);
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn shared_memory_is_used_when_both_allow_it_and_demanded_only_in_vain() {
    use Transport::{Auto, Grpc, Shm};
    for (ours, theirs, expected) in [
        (Auto, Auto, Ok(Shm)),
        (Auto, Grpc, Ok(Grpc)),
        (Grpc, Auto, Ok(Grpc)),
        (Shm, Shm, Ok(Shm)),
        (Shm, Grpc, Err("can't map this worker's memory")),
        (Grpc, Shm, Err("it was not offered")),
    ] {
        let worker =
            start_over(theirs, "127.0.0.1:0".parse().unwrap(), instance(2), layout(2, 1, 8, 16)).await;
        let peers = peers(4).with_transport(ours);
        let met = peers.get(&worker.address.to_string(), instance(2)).await;
        match expected {
            Ok(transport) => {
                let peer = met.unwrap();
                assert_eq!((peer.transport(), peer.bulk().transport()), (transport, transport));
            }
            Err(text) => {
                let error = met.unwrap_err();
                assert_eq!(error.cause(), Cause::Layout, "{error}");
                assert!(error.to_string().contains(text), "{error}");
            }
        }
    }
}

/// A worker whose blocks are on a device, or not.
async fn start_with(transport: Transport, on_device: bool) -> Running {
    let layout = layout(2, 1, 8, 16);
    let sink = Arc::new(Sink::new(&layout, 2));
    let memory: Arc<dyn BlockMemory> = if on_device { Arc::new(OnDevice::new(sink)) } else { sink };
    let receivers = Receivers::new(memory, 2).with_transport(transport);
    start_for(Some(receivers), transport, "127.0.0.1:0".parse().unwrap(), instance(2), layout).await
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn device_memory_is_used_when_both_are_on_one_and_everything_else_falls_back() {
    use Transport::{Auto, Grpc, Ipc, Shm};
    let source = || Arc::new(Source::random(&layout(2, 1, 8, 16), 2, &mut Rng(5)));
    for (ours, on_device, theirs, expected) in [
        (Auto, (true, true), Auto, Ok(Ipc)),
        (Ipc, (true, true), Auto, Ok(Ipc)),
        (Auto, (true, true), Ipc, Ok(Ipc)),
        (Auto, (true, false), Auto, Ok(Shm)),
        (Auto, (false, true), Auto, Ok(Shm)),
        (Shm, (true, true), Auto, Ok(Shm)),
        (Auto, (true, true), Shm, Ok(Shm)),
        (Grpc, (true, true), Auto, Ok(Grpc)),
        (Auto, (true, true), Grpc, Ok(Grpc)),
        (Ipc, (true, false), Auto, Err("device memory is demanded and can't be used")),
        (Ipc, (false, true), Auto, Err("this worker's KV is on no device")),
        (Auto, (false, true), Ipc, Err("device memory is demanded and can't be used: it was not offered")),
        (Ipc, (true, true), Shm, Err("device memory is demanded and can't be used")),
    ] {
        let worker = start_with(theirs, on_device.1).await;
        let device = Arc::new(OnDevice::new(source()));
        let memory: Arc<dyn BlockMemory> = if on_device.0 { Arc::clone(&device) as _ } else { source() };
        let peers = peers(4).with_transport(ours).with_memory(memory);
        let what = format!("{ours} {on_device:?} {theirs}");
        let met = peers.get(&worker.address.to_string(), instance(2)).await;
        match expected {
            Ok(transport) => {
                let peer = met.unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!((peer.transport(), peer.bulk().transport()), (transport, transport), "{what}");
                assert_eq!(
                    device.num_rings.load(Ordering::SeqCst) > 0,
                    on_device.0 && ours != Grpc && ours != Shm
                );
            }
            Err(text) => {
                let error = met.unwrap_err();
                assert_eq!(error.cause(), Cause::Layout, "{what}: {error}");
                assert!(error.to_string().contains(text), "{what}: {error}");
            }
        }
    }
}

/// Another host's handle is never opened, and a ring that is another's is no proof.
#[cfg(target_os = "linux")]
#[test]
fn a_ring_is_looked_at_only_after_shared_memory_and_its_nonce_counts() {
    let layout = layout(2, 1, 8, 16);
    let identity = Identity { instance: instance(2), layout: layout.clone() };
    let seen = Arc::new(OnDevice::new(Arc::new(Sink::new(&layout, 2))));
    let receivers = Receivers::new(Arc::clone(&seen) as _, 2);
    let source = OnDevice::new(Arc::new(Source::random(&layout, 2, &mut Rng(6))));
    let ring = source.peer().unwrap().make_ring(8 << 20).unwrap();
    ring.mark(&[7; 16]).unwrap();
    for (nonce, num_opened) in [(7u8, 0), (8, 0)] {
        let asked = v1::HandshakeRequest {
            protocol_version: baton_proto::PROTOCOL_VERSION,
            instance_id: wire::encode_instance(instance(1)),
            layout: Some(wire::encode_layout(&layout)),
            shared_memory: Some(v1::SharedMemory {
                path: "/proc/4294967295/fd/3".to_owned(),
                nonce: vec![nonce; 16].into(),
            }),
            device_memory: Some(v1::DeviceMemory {
                handle: ring.handle().to_vec().into(),
                nonce: vec![nonce; 16].into(),
            }),
        };
        let answer = answer_handshake_for(&receivers, &identity, 0, asked).unwrap();
        assert!(!answer.device_memory && !answer.shared_memory);
        assert_eq!(seen.num_opened.load(Ordering::SeqCst), num_opened);
    }
}

/// Keeps what is logged on this thread.
#[derive(Clone, Default)]
struct Lines(Arc<std::sync::Mutex<String>>);

impl tracing::Subscriber for Lines {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        struct Write<'a>(&'a mut String);
        impl tracing::field::Visit for Write<'_> {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0.push_str(&format!("{}={value:?} ", field.name()));
            }
        }
        event.record(&mut Write(&mut self.0.lock().unwrap()));
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[cfg(target_os = "linux")]
#[test]
fn a_nonce_that_is_not_found_means_grpc_and_a_line_in_the_log() {
    let identity = Identity { instance: instance(2), layout: layout(2, 1, 8, 16) };
    let offers = [
        ("/proc/4294967295/fd/3", 16, "No such file"),
        ("/proc/self/exe", 16, "no path of shared memory"),
        ("/proc/4294967295/fd/3", 3, "its nonce has 3 bytes"),
    ];
    for (path, nonce, text) in offers {
        let shared_memory = v1::SharedMemory { path: path.to_owned(), nonce: vec![7; nonce].into() };
        let asked = v1::HandshakeRequest {
            protocol_version: baton_proto::PROTOCOL_VERSION,
            instance_id: wire::encode_instance(instance(1)),
            layout: Some(wire::encode_layout(&identity.layout)),
            shared_memory: Some(shared_memory),
            device_memory: None,
        };
        let lines = Lines::default();
        let answer = tracing::subscriber::with_default(lines.clone(), || {
            answer_handshake(&identity, 0, asked.clone()).unwrap()
        });
        assert!(!answer.shared_memory);
        let said = lines.0.lock().unwrap().clone();
        assert!(said.contains("KV comes over gRPC") && said.contains(text), "{said}");
        let error = answer_handshake_over(Transport::Shm, &identity, 0, asked).unwrap_err();
        assert!(error.message().contains("demanded"), "{error}");
    }
}
