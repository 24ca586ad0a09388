//! A decode worker is lost while it receives: the prefill worker holds what it computed and sends it to another one.

mod pair;

use std::net::SocketAddr;

use baton_proto::v1;
use baton_proto::v1::decode_client::DecodeClient;
use baton_proto::v1::prefill_event::Event as PrefillEvent;
use baton_worker::Running;
use pair::{Call, DecodeOutcome, Pair, channel, decode_to_end, settles, start_decode, within};
use tokio::io::{AsyncReadExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tonic::transport::Channel;
use tonic::{Code, Streaming};

const OVER_TCP: &str = "--kv-transport=grpc";

/// Stands before a decode worker: control passes, KV is swallowed. Dropping it cuts every connection.
struct Wall {
    address: SocketAddr,
    _serving: JoinSet<()>,
}

impl Wall {
    async fn before(worker: SocketAddr, bulk_port: u16) -> Self {
        // A worker tells others the port of its KV service, not the host.
        let address: SocketAddr = ([127, 0, 0, 2], worker.port()).into();
        let control = TcpListener::bind(address).await.expect("a port");
        let bulk = TcpListener::bind(SocketAddr::from(([127, 0, 0, 2], bulk_port))).await.expect("a port");
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut near, _)) = control.accept().await {
                connections.spawn(async move {
                    let mut far = TcpStream::connect(worker).await.expect("the worker");
                    let _ = copy_bidirectional(&mut near, &mut far).await;
                });
            }
        });
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut near, _)) = bulk.accept().await {
                connections.spawn(async move {
                    let mut buffer = [0; 4096];
                    while near.read(&mut buffer).await.is_ok_and(|length| length > 0) {}
                });
            }
        });
        Self { address, _serving: serving }
    }
}

/// A prefill worker, a decode worker behind a wall, and another one.
struct Trio {
    pair: Pair,
    wall: Option<Wall>,
    other: Running,
    to_other: DecodeClient<Channel>,
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

async fn next(stream: &mut Streaming<v1::PrefillEvent>) -> PrefillEvent {
    within(stream.message()).await.expect("no break").expect("no end").event.expect("a known event")
}

impl Trio {
    async fn start() -> Self {
        let port = free_port();
        let pair = Pair::start(&[OVER_TCP], &[OVER_TCP, &format!("--bulk-port={port}")]).await;
        let wall = Wall::before(pair.decode.address(), port).await;
        let other = start_decode(&[OVER_TCP]).await;
        let to_other = DecodeClient::new(channel(&other).await);
        Self { pair, wall: Some(wall), other, to_other }
    }

    fn computed(&self) -> u64 {
        self.pair.prefill.core().metrics.prompt_tokens_computed.get()
    }

    /// Both legs, when the first tokens are told and no byte of KV can arrive.
    async fn stuck(
        &mut self,
        call: &Call,
    ) -> (Streaming<v1::PrefillEvent>, Streaming<v1::DecodeEvent>, v1::FirstTokens) {
        let destination = v1::Destination {
            address: self.wall.as_ref().expect("stands").address.to_string(),
            ..self.pair.destination()
        };
        let decode = self.pair.decode(call).await.expect("decode leg");
        let prefill = self.pair.to_prefill.prefill(call.prefill(Some(destination))).await;
        let mut prefill = prefill.expect("prefill leg").into_inner();
        let PrefillEvent::FirstTokens(first) = next(&mut prefill).await else { panic!("no first tokens") };
        (prefill, decode, first)
    }

    fn to_the_other(&self, call: &Call, again: &Call) -> v1::RedirectRequest {
        v1::RedirectRequest {
            key: Some(call.key.clone()),
            new_key: Some(again.key.clone()),
            destination: Some(v1::Destination {
                address: self.other.address().to_string(),
                instance_id: self.other.core().instance.0.to_vec().into(),
            }),
        }
    }

    /// The next attempt with what is held, to its end.
    async fn redirect(
        &mut self,
        call: &Call,
        again: &Call,
        prefill: &mut Streaming<v1::PrefillEvent>,
    ) -> DecodeOutcome {
        let stream = self.to_other.decode(again.decode(false)).await.expect("decode leg").into_inner();
        let request = self.to_the_other(call, again);
        self.pair.to_prefill.redirect(request).await.expect("redirected");
        let rest = decode_to_end(stream).await;
        let done = next(prefill).await;
        assert!(matches!(done, PrefillEvent::HandoffDone(_)), "{done:?}");
        rest
    }

    async fn settles(&self) {
        settles("prefill", &self.pair.prefill).await;
        settles("other", &self.other).await;
    }
}

fn next_attempt(call: &Call) -> Call {
    let mut again = call.clone();
    again.key.attempt += 1;
    again
}

fn tokens(first: &v1::FirstTokens, rest: &DecodeOutcome, sequence: u32) -> Vec<u32> {
    let first = first.tokens.iter().find(|first| first.sequence == sequence).expect("a first token");
    let mut tokens = vec![first.token.expect("a token").id];
    tokens.extend(&rest.by_sequence[&sequence].tokens);
    tokens
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_prompt_whose_decode_worker_is_lost_is_computed_once_and_decoded_elsewhere() {
    let mut trio = Trio::start().await;
    let call = Call::new(1, 900, 20);
    let wanted = trio.pair.run_locally(&call.again(2)).await;
    let (mut prefill, decode, first) = trio.stuck(&call).await;
    trio.wall = None;
    let PrefillEvent::HandoffFailed(failed) = next(&mut prefill).await else { panic!("it went on") };
    assert_eq!((failed.cause(), failed.attempt), (v1::Cause::PeerLost, 0), "{}", failed.detail);
    drop(decode);
    let again = next_attempt(&call);
    let rest = trio.redirect(&call, &again, &mut prefill).await;
    assert_eq!(tokens(&first, &rest, 0), wanted);
    assert_eq!(trio.computed(), 900, "each prompt token once");

    let over = trio.pair.to_prefill.redirect(trio.to_the_other(&again, &next_attempt(&again))).await;
    assert_eq!(over.expect_err("nothing is held").code(), Code::NotFound);
    trio.settles().await;
    settles("first", &trio.pair.decode).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_router_that_is_first_to_know_need_not_wait_for_the_handoff_to_fail() {
    let mut trio = Trio::start().await;
    // A group, and the key of an attempt that is not the first.
    let call = next_attempt(&Call::new(1, 700, 12).group(0, 3));
    let mut local = trio.to_other.decode(call.again(2).decode(true)).await.expect("local").into_inner();
    let mut wanted = DecodeOutcome::default();
    while let Some(event) = within(local.message()).await.expect("no break") {
        wanted.hear(event.event.expect("known"));
    }
    let (mut prefill, decode, first) = trio.stuck(&call).await;
    let rest = trio.redirect(&call, &next_attempt(&call), &mut prefill).await;
    for sequence in 0..3 {
        assert_eq!(tokens(&first, &rest, sequence), wanted.by_sequence[&sequence].tokens);
    }
    assert_eq!(trio.computed(), 700);
    // The worker that got nothing was told by the end of its control stream.
    let outcome = decode_to_end(decode).await;
    assert_eq!(outcome.failed.expect("it failed").cause(), v1::Cause::PeerLost);
    trio.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_is_held_goes_back_when_the_router_leaves_or_no_redirect_comes() {
    let mut trio = Trio::start().await;
    let call = Call::new(1, 500, 12);
    let (mut prefill, decode, _) = trio.stuck(&call).await;
    // The decode worker lets go: for the prefill worker that is a loss like any other.
    drop(decode);
    assert!(matches!(next(&mut prefill).await, PrefillEvent::HandoffFailed(_)));
    let held = trio.pair.prefill.core().loaded().expect("loaded").pool.counts();
    assert!(held.free < held.total, "blocks are held");
    drop(prefill);
    trio.settles().await;

    let call = Call::new(2, 500, 12);
    let (mut prefill, decode, _) = trio.stuck(&call).await;
    drop(decode);
    assert!(matches!(next(&mut prefill).await, PrefillEvent::HandoffFailed(_)));
    let began = std::time::Instant::now();
    assert!(matches!(next(&mut prefill).await, PrefillEvent::Failed(_)), "held for ever");
    let held = began.elapsed().as_secs_f64();
    assert!((2.5..6.0).contains(&held), "held for {held} s");
    trio.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_redirect_is_checked() {
    let mut trio = Trio::start().await;
    let call = Call::new(1, 300, 5);
    let (_prefill, _decode, _) = trio.stuck(&call).await;
    let good = trio.to_the_other(&call, &next_attempt(&call));
    let mut same = good.clone();
    same.new_key = same.key.clone();
    let mut other_group = good.clone();
    other_group.new_key.as_mut().expect("a key").group = 7;
    let nowhere = v1::RedirectRequest { destination: None, ..good.clone() };
    for (bad, word) in [(same, "later attempt"), (other_group, "later attempt"), (nowhere, "destination")] {
        let error = trio.pair.to_prefill.redirect(bad).await.expect_err("refused");
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains(word), "{}", error.message());
    }
    let mut unknown = good;
    unknown.key.as_mut().expect("a key").request = vec![9; 16].into();
    unknown.new_key.as_mut().expect("a key").request = vec![9; 16].into();
    assert_eq!(trio.pair.to_prefill.redirect(unknown).await.expect_err("unknown").code(), Code::NotFound);
}
