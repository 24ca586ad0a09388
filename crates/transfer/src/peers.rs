//! Other workers: their connections, and whether their KV can be used.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_handoff::InstanceId;
use baton_kv::{BlockMemory, BlockOrder, KvLayout};
use baton_proto::v1::handoff_client::HandoffClient;
use baton_proto::{PROTOCOL_VERSION, v1};
use tokio::runtime::Handle;
use tokio::sync::OnceCell;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::bulk::Ways;
use crate::device::DeviceRings;
use crate::probe::{Found, Probe, Search, Settled};
use crate::receiver::Receivers;
use crate::{Bulk, TransferError, Transport, bulk_endpoint, control_endpoint, wire};

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);

/// Connections for KV to one peer. One fills a local wire; a long or shared one gives each connection its share.
const BULK_CONNECTIONS: usize = 2;

/// Who this worker is to others.
#[derive(Clone, Debug)]
pub struct Identity {
    /// This process.
    pub instance: InstanceId,
    /// Its KV.
    pub layout: KvLayout,
}

/// How peers are reached.
#[derive(Clone, Debug)]
pub struct PeersConfig {
    /// Who asks.
    pub identity: Identity,
    /// Peers connected at one time.
    pub max_peers: usize,
    /// Where the bulk connections' work is done.
    pub bulk_runtime: Handle,
}

/// A decode worker that shook hands.
#[derive(Clone, Debug)]
pub struct Peer {
    address: String,
    instance: InstanceId,
    control: Channel,
    bulk: Arc<[Channel]>,
    next_bulk: Arc<AtomicUsize>,
    ways: Ways,
    /// In which it takes whole blocks.
    order: BlockOrder,
}

impl Peer {
    /// "host:port" of its server.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The process that answered.
    pub const fn instance(&self) -> InstanceId {
        self.instance
    }

    /// The connection for everything but KV.
    pub fn control(&self) -> Channel {
        self.control.clone()
    }

    /// A connection for one handoff's KV; handoffs take turns over the connections.
    pub fn bulk(&self) -> Bulk {
        let turn = self.next_bulk.fetch_add(1, Ordering::Relaxed) % self.bulk.len();
        Bulk::new(self.bulk[turn].clone(), self.ways.clone()).in_order(self.order)
    }

    /// How KV travels there, never [`Transport::Auto`].
    pub fn transport(&self) -> Transport {
        Bulk::new(self.bulk[0].clone(), self.ways.clone()).transport()
    }
}

type Slot = Arc<OnceCell<Peer>>;

/// Connections to decode workers by address, kept while they are the instance that was meant.
pub struct Peers {
    config: PeersConfig,
    transport: Transport,
    rings: Option<Arc<DeviceRings>>,
    slots: Mutex<HashMap<String, Slot>>,
}

impl Peers {
    /// Nobody is connected.
    pub fn new(config: PeersConfig) -> Self {
        Self { config, transport: Transport::default(), rings: None, slots: Mutex::new(HashMap::new()) }
    }

    /// How KV may travel.
    #[must_use]
    pub const fn with_transport(mut self, transport: Transport) -> Self {
        self.transport = transport;
        self
    }

    /// Where this worker's KV lies: on a device that lets others reach its memory it may travel through that.
    #[must_use]
    pub fn with_memory(mut self, memory: Arc<dyn BlockMemory>) -> Self {
        self.rings = DeviceRings::new(memory);
        self
    }

    /// The peer at "host:port", connected and compared with. Concurrent callers share one attempt; a failed one is not kept.
    ///
    /// # Errors
    /// [`TransferError::Lost`], [`TransferError::Layout`], [`TransferError::WrongInstance`], or [`TransferError::Full`] when
    /// `max_peers` others are in use.
    pub async fn get(&self, address: &str, instance: InstanceId) -> Result<Peer, TransferError> {
        let slot = self.slot(address)?;
        let peer = slot.get_or_try_init(|| self.connect(address)).await?;
        if peer.instance == instance {
            return Ok(peer.clone());
        }
        // A worker was started anew at this address, or the caller's view is older than the connection.
        self.forget(address, &slot);
        let slot = self.slot(address)?;
        let peer = slot.get_or_try_init(|| self.connect(address)).await?;
        if peer.instance == instance {
            return Ok(peer.clone());
        }
        Err(TransferError::WrongInstance {
            address: address.to_owned(),
            expected: instance,
            found: peer.instance,
        })
    }

    /// Drops the connections to an address, as when a handoff lost its control stream.
    pub fn drop_peer(&self, address: &str) {
        self.slots().remove(address);
    }

    /// Peers connected or being connected.
    pub fn len(&self) -> usize {
        self.slots().len()
    }

    /// Whether nobody is connected.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<String, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slot(&self, address: &str) -> Result<Slot, TransferError> {
        let mut slots = self.slots();
        if let Some(slot) = slots.get(address) {
            return Ok(Arc::clone(slot));
        }
        if slots.len() >= self.config.max_peers {
            // Whoever is connecting right now holds its slot too; the others only lose a connection that they'd make again.
            let idle = slots.iter().find(|(_, slot)| Arc::strong_count(slot) == 1);
            let Some(idle) = idle.map(|(address, _)| address.clone()) else {
                return Err(TransferError::Full { what: "peers", limit: self.config.max_peers });
            };
            slots.remove(&idle);
        }
        let slot = Slot::default();
        slots.insert(address.to_owned(), Arc::clone(&slot));
        Ok(slot)
    }

    fn forget(&self, address: &str, slot: &Slot) {
        let mut slots = self.slots();
        if slots.get(address).is_some_and(|known| Arc::ptr_eq(known, slot)) {
            slots.remove(address);
        }
    }

    async fn connect(&self, address: &str) -> Result<Peer, TransferError> {
        let lost = |detail| TransferError::Lost { address: address.to_owned(), detail };
        let control = control_endpoint(address)?
            .connect()
            .await
            .map_err(|error| lost(crate::channel::describe(&error)))?;
        let identity = &self.config.identity;
        let probe = self.probe().await;
        let mut question = question(identity);
        if let Ok(probe) = &probe {
            probe.offer(&mut question);
        }
        let mut client = HandoffClient::new(control.clone());
        let answer = tokio::time::timeout(HANDSHAKE_TIMEOUT, client.handshake(question))
            .await
            .map_err(|_| lost(format!("no handshake within {} s", HANDSHAKE_TIMEOUT.as_secs())))?
            .map_err(|status| refused(address, &status))?
            .into_inner();
        let theirs = Answer::decode(answer)?;
        compare(identity, &theirs)
            .map_err(|text| TransferError::Layout(format!("decode worker at {address}: {text}")))?;
        let settled = match probe {
            Ok(probe) => probe.settle(theirs.found, self.rings.as_ref()),
            Err(why) => Settled::nothing(why),
        };
        let ways = settled
            .ways(self.transport, address)
            .map_err(|text| TransferError::Layout(format!("decode worker at {address}: {text}")))?;
        let bulk = {
            // Connections do their work on the runtime in which they were made.
            let _entered = self.config.bulk_runtime.enter();
            let endpoint = bulk_endpoint(&bulk_address(address, theirs.bulk_port))?;
            (0..BULK_CONNECTIONS).map(|_| endpoint.connect_lazy()).collect()
        };
        let next_bulk = Arc::new(AtomicUsize::new(0));
        let order = identity.layout.order_to(&theirs.layout);
        let (address, instance) = (address.to_owned(), theirs.instance);
        Ok(Peer { address, instance, control, bulk, next_bulk, ways, order })
    }

    /// What shows the decode worker whether it reaches our memory. A device may take its time, so not on this thread.
    async fn probe(&self) -> Result<Probe, String> {
        let (transport, rings) = (self.transport, self.rings.clone());
        let made = tokio::task::spawn_blocking(move || Probe::new(transport, rings.as_ref()));
        made.await.map_err(|error| error.to_string())?
    }
}

fn question(ours: &Identity) -> v1::HandshakeRequest {
    v1::HandshakeRequest {
        protocol_version: PROTOCOL_VERSION,
        instance_id: wire::encode_instance(ours.instance),
        layout: Some(wire::encode_layout(&ours.layout)),
        ..v1::HandshakeRequest::default()
    }
}

fn refused(address: &str, status: &Status) -> TransferError {
    let text = status.message();
    match status.code() {
        Code::FailedPrecondition => {
            TransferError::Layout(format!("decode worker at {address} refuses: {text}"))
        }
        Code::InvalidArgument => TransferError::Protocol(format!("{address}: {text}")),
        code => {
            TransferError::Lost { address: address.to_owned(), detail: format!("handshake: {code}: {text}") }
        }
    }
}

/// The same host, at the port of the bulk service.
fn bulk_address(address: &str, bulk_port: u16) -> String {
    match (bulk_port, address.rsplit_once(':')) {
        (0, _) | (_, None) => address.to_owned(),
        (port, Some((host, _))) => format!("{host}:{port}"),
    }
}

struct Answer {
    protocol_version: u32,
    instance: InstanceId,
    layout: KvLayout,
    bulk_port: u16,
    found: Found,
}

impl Answer {
    fn decode(answer: v1::HandshakeResponse) -> Result<Self, TransferError> {
        let v1::HandshakeResponse {
            protocol_version,
            instance_id,
            layout,
            bulk_port,
            shared_memory,
            device_memory,
        } = answer;
        Ok(Self {
            protocol_version,
            instance: wire::decode_instance("instance_id", &instance_id)?,
            layout: wire::decode_layout(layout)?,
            bulk_port: u16::try_from(bulk_port)
                .map_err(|_| TransferError::malformed("bulk_port", format_args!("{bulk_port} is no port")))?,
            found: Found { shared: shared_memory, device: device_memory },
        })
    }
}

fn compare(ours: &Identity, theirs: &Answer) -> Result<(), String> {
    if theirs.protocol_version != PROTOCOL_VERSION {
        return Err(format!(
            "protocol version: ours is {PROTOCOL_VERSION}, theirs is {}",
            theirs.protocol_version
        ));
    }
    ours.layout.check(&theirs.layout).map_err(|mismatch| mismatch.to_string())
}

/// [`answer_handshake_over`] with [`Transport::Auto`].
///
/// # Errors
/// As there.
pub fn answer_handshake(
    ours: &Identity,
    bulk_port: u16,
    asked: v1::HandshakeRequest,
) -> Result<v1::HandshakeResponse, Status> {
    answer_handshake_over(Transport::Auto, ours, bulk_port, asked)
}

/// A decode worker's answer to a handshake. `bulk_port` is where [`crate::KvStreamService`] is served, 0 for the same port.
///
/// # Errors
/// FAILED_PRECONDITION that names both sides, or INVALID_ARGUMENT for a malformed question.
pub fn answer_handshake_over(
    transport: Transport,
    ours: &Identity,
    bulk_port: u16,
    asked: v1::HandshakeRequest,
) -> Result<v1::HandshakeResponse, Status> {
    answer(&Search { transport, receivers: None }, ours, bulk_port, asked)
}

/// As [`answer_handshake_over`], of a worker that can look at device memory too: `receivers` know its memory and how KV may come. Blocks
/// for as long as a device needs to reach another's memory.
///
/// # Errors
/// As there.
pub fn answer_handshake_for(
    receivers: &Receivers,
    ours: &Identity,
    bulk_port: u16,
    asked: v1::HandshakeRequest,
) -> Result<v1::HandshakeResponse, Status> {
    let search = Search { transport: receivers.transport(), receivers: Some(receivers) };
    answer(&search, ours, bulk_port, asked)
}

fn answer(
    search: &Search<'_>,
    ours: &Identity,
    bulk_port: u16,
    asked: v1::HandshakeRequest,
) -> Result<v1::HandshakeResponse, Status> {
    let v1::HandshakeRequest { protocol_version, instance_id, layout, shared_memory, device_memory } = asked;
    let theirs = Answer {
        protocol_version,
        instance: wire::decode_instance("instance_id", &instance_id)?,
        layout: wire::decode_layout(layout)?,
        bulk_port: 0,
        found: Found::default(),
    };
    let parties =
        format!("(ours: decode worker {}, theirs: prefill worker {})", ours.instance, theirs.instance);
    let refused = |text| Status::failed_precondition(format!("{text} {parties}"));
    compare(ours, &theirs).map_err(refused)?;
    let found = search.find(shared_memory, device_memory, &theirs.instance).map_err(refused)?;
    Ok(v1::HandshakeResponse {
        protocol_version: PROTOCOL_VERSION,
        instance_id: wire::encode_instance(ours.instance),
        layout: Some(wire::encode_layout(&ours.layout)),
        bulk_port: u32::from(bulk_port),
        shared_memory: found.shared,
        device_memory: found.device,
    })
}
