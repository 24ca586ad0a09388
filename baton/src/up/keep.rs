//! Keeping one child alive: start it, learn its address, see it become ready, start it again when it dies.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tokio::process::Child;
use tokio::sync::{mpsc, watch};

use super::output::{LastLines, Prefix, copy_lines};
use super::probe::{self, Face};
use super::process::{self, Launch};
use super::restarts::{Restarts, Verdict};
use crate::exit::Failure;

/// What a child is.
#[derive(Debug, Clone)]
pub(super) struct Role {
    /// `prefill-0`, `decode-1`, `router`: what its lines begin with.
    pub(super) name: String,
    /// Position among the children.
    pub(super) index: usize,
    /// What its command line is, apart from its address.
    pub(super) launch: Launch,
    /// Where it serves.
    pub(super) address: Address,
}

/// How a child's address comes about.
#[derive(Debug, Clone)]
pub(super) enum Address {
    /// The child takes a free port and writes it to a file; started again it gets the same one.
    Chosen(PathBuf),
    /// Known before (the router's).
    Fixed(SocketAddr),
}

/// What happened to a child.
#[derive(Debug)]
pub(super) enum Event {
    /// It has bound its address; told once.
    Bound(usize, SocketAddr),
    /// It can serve: its position and its name.
    Ready(usize, String),
    /// It died and will be started again after the pause.
    Died(String, Duration),
    /// It can't be started.
    Failed(Failure),
}

/// What the children are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Go on.
    Run,
    /// End, with this long to do so.
    Stop(Duration),
    /// End now.
    Kill,
}

/// Runs until it is told to stop; the child has ended when this returns.
pub(super) async fn keep(role: Role, mut orders: watch::Receiver<Order>, events: mpsc::Sender<Event>) {
    let mut keeper =
        Keeper { begun: Instant::now(), restarts: Restarts::default(), known: None, role, events };
    if let Address::Fixed(address) = keeper.role.address {
        keeper.known = Some(address);
    }
    loop {
        let last = LastLines::default();
        let started = Instant::now();
        let ended = match keeper.start(&last) {
            Ok(mut child) => {
                let ended = tokio::select! {
                    ended = keeper.watch(&mut child) => Some(ended),
                    () = not_run(&mut orders) => None,
                };
                let Some(ended) = ended else { return end(&mut child, &mut orders).await };
                ended
            }
            Err(error) => (format!("could not be started: {error}"), None),
        };
        // The pipes close a moment after the process has ended.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let Some(pause) = keeper.after_death(ended, started, &last).await else { return };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = not_run(&mut orders) => return,
        }
    }
}

/// Waits for an order to stop.
async fn not_run(orders: &mut watch::Receiver<Order>) {
    // An error means that nobody gives orders any more, which is an order too.
    let _ = orders.wait_for(|order| *order != Order::Run).await;
}

/// Ends a child as ordered; a later order to kill is obeyed at once.
async fn end(child: &mut Child, orders: &mut watch::Receiver<Order>) {
    let order = *orders.borrow();
    let patience = match order {
        Order::Stop(patience) => patience,
        Order::Run | Order::Kill => Duration::ZERO,
    };
    let kill = async {
        if orders.wait_for(|order| *order == Order::Kill).await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    process::stop(child, patience, kill).await;
}

struct Keeper {
    begun: Instant,
    restarts: Restarts,
    known: Option<SocketAddr>,
    role: Role,
    events: mpsc::Sender<Event>,
}

impl Keeper {
    fn start(&self, last: &LastLines) -> std::io::Result<Child> {
        let mut launch = self.role.launch.clone();
        match (&self.role.address, self.known) {
            (Address::Fixed(_), _) => {}
            (Address::Chosen(_), Some(address)) => {
                launch.arguments.push(format!("--listen={address}").into())
            }
            (Address::Chosen(file), None) => {
                launch.arguments.push("--listen=127.0.0.1:0".into());
                launch.arguments.extend([OsString::from("--address-file"), file.clone().into()]);
            }
        }
        let mut child = process::start(&launch)?;
        let prefix = Prefix::new(&self.role.name, self.role.index);
        if let Some(pipe) = child.stdout.take() {
            tokio::spawn(copy_lines(pipe, prefix.clone(), last.clone()));
        }
        if let Some(pipe) = child.stderr.take() {
            tokio::spawn(copy_lines(pipe, prefix, last.clone()));
        }
        Ok(child)
    }

    /// Until the child ends: how, and its exit code if it had one.
    async fn watch(&mut self, child: &mut Child) -> (String, Option<i32>) {
        let status = tokio::select! {
            status = child.wait() => status,
            () = self.become_ready() => {
                self.restarts.ready();
                self.tell(Event::Ready(self.role.index, self.role.name.clone())).await;
                child.wait().await
            }
        };
        match status {
            Ok(status) => (process::describe(status), status.code()),
            Err(error) => (format!("can't be watched: {error}"), None),
        }
    }

    async fn become_ready(&mut self) {
        let (address, face) = match (&self.role.address, self.known) {
            (Address::Fixed(address), _) => (*address, Face::Router),
            (Address::Chosen(_), Some(address)) => (address, Face::Worker),
            (Address::Chosen(file), None) => {
                let address = probe::address_in(file).await;
                self.known = Some(address);
                self.tell(Event::Bound(self.role.index, address)).await;
                (address, Face::Worker)
            }
        };
        probe::ready(face, address).await;
    }

    /// Decides what follows: the pause before the next start, or `None` when there is none.
    async fn after_death(
        &mut self,
        ended: (String, Option<i32>),
        started: Instant,
        last: &LastLines,
    ) -> Option<Duration> {
        let (how, code) = ended;
        let name = &self.role.name;
        if let Some(code) = code.filter(|code| !self.restarts.was_ready() && Failure::is_final(*code)) {
            let line = format!("{name} {how}, which starting it again would not change");
            let code = u8::try_from(code).unwrap_or(1);
            self.tell(Event::Failed(Failure::Child { line, code })).await;
            return None;
        }
        match self.restarts.died(self.begun.elapsed(), started.elapsed()) {
            Verdict::Again(pause) => {
                self.tell(Event::Died(format!("{name} {how}"), pause)).await;
                Some(pause)
            }
            Verdict::GiveUp => {
                let lines = last.all();
                let text = match lines.is_empty() {
                    true => format!("{name} keeps dying ({how}) and said nothing"),
                    false => format!("{name} keeps dying ({how}); its last lines:\n  {}", lines.join("\n  ")),
                };
                self.tell(Event::Failed(Failure::Worker(text))).await;
                None
            }
        }
    }

    async fn tell(&self, event: Event) {
        // Nobody listens any more only when everything is being stopped.
        let _ = self.events.send(event).await;
    }
}
