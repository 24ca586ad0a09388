//! All children together: what is known of them, what they are told, and how everything ends.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::checklist::line;
use super::keep::{Event, Order, Role, keep};
use crate::exit::Failure;

/// Events that wait to be read; children wait with what they do next when it is full.
const EVENTS: usize = 256;
/// What a child gets beyond the time it gives its own requests.
const GRACE: Duration = Duration::from_secs(1);

/// What is asked from outside: to stop, and to stop at once.
pub(crate) struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Interrupts {
    /// # Errors
    /// [`Failure::Unexpected`] when the system allows no handler.
    pub(crate) fn listen() -> Result<Self, Failure> {
        let of = |kind| {
            signal(kind).map_err(|error| Failure::Unexpected(format!("can't handle signals: {error}")))
        };
        Ok(Self {
            interrupt: of(SignalKind::interrupt())?,
            terminate: of(SignalKind::terminate())?,
            hang_up: of(SignalKind::hangup())?,
        })
    }

    /// Ctrl-C, SIGTERM, or the terminal is gone.
    pub(crate) async fn first(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = self.hang_up.recv() => {}
        }
    }

    /// Another Ctrl-C.
    pub(crate) async fn second(mut self) {
        self.interrupt.recv().await;
    }
}

/// Children that are told the same.
struct Group {
    orders: watch::Sender<Order>,
    children: JoinSet<()>,
}

impl Default for Group {
    fn default() -> Self {
        Self { orders: watch::Sender::new(Order::Run), children: JoinSet::new() }
    }
}

impl Group {
    fn start(&mut self, role: Role, events: mpsc::Sender<Event>) {
        // On the runtime's only thread, the main one: children are tied to the life of the thread that starts them.
        self.children.spawn(keep(role, self.orders.subscribe(), events));
    }

    /// Asks them to end and waits until they have.
    async fn stop(&mut self, patience: Duration) {
        self.orders.send_replace(Order::Stop(patience));
        self.ended().await;
    }

    async fn ended(&mut self) {
        while self.children.join_next().await.is_some() {}
    }

    fn kill(&self) {
        self.orders.send_replace(Order::Kill);
    }
}

/// The children.
pub(super) struct Supervisor {
    sender: mpsc::Sender<Event>,
    events: mpsc::Receiver<Event>,
    workers: Group,
    router: Group,
    addresses: Vec<Option<SocketAddr>>,
    ready: Vec<bool>,
    folder: Option<TempDir>,
}

impl Default for Supervisor {
    fn default() -> Self {
        let (sender, events) = mpsc::channel(EVENTS);
        Self {
            sender,
            events,
            workers: Group::default(),
            router: Group::default(),
            addresses: Vec::new(),
            ready: Vec::new(),
            folder: None,
        }
    }
}

impl Supervisor {
    /// A folder that only this user can read, for the children to tell their addresses in; removed when they have.
    ///
    /// # Errors
    /// [`Failure::Unexpected`] when there is none to be had.
    pub(super) fn private_folder(&mut self) -> Result<PathBuf, Failure> {
        let made = tempfile::Builder::new().prefix("baton-up-").tempdir();
        let folder =
            made.map_err(|error| Failure::Unexpected(format!("can't create a temporary folder: {error}")))?;
        let path = folder.path().to_owned();
        self.folder = Some(folder);
        Ok(path)
    }

    /// Starts the workers.
    pub(super) fn start_workers(&mut self, workers: Vec<Role>) {
        self.addresses = vec![None; workers.len()];
        for worker in workers {
            self.ready.push(false);
            self.workers.start(worker, self.sender.clone());
        }
    }

    /// Starts the router.
    pub(super) fn start_router(&mut self, router: Role) {
        self.ready.push(false);
        self.router.start(router, self.sender.clone());
    }

    /// The addresses of the first `count` children, as soon as all are known.
    ///
    /// # Errors
    /// What the children report.
    pub(super) async fn addresses(&mut self, count: usize) -> Result<Vec<SocketAddr>, Failure> {
        loop {
            let known: Vec<SocketAddr> = self.addresses.iter().flatten().copied().collect();
            if known.len() >= count {
                // Told once, an address stays: a child that is started again gets the same one.
                self.folder = None;
                return Ok(known);
            }
            self.next().await?;
        }
    }

    /// Waits until every worker is ready.
    ///
    /// # Errors
    /// What the children report.
    pub(super) async fn workers_ready(&mut self) -> Result<(), Failure> {
        while !self.ready.iter().take(self.addresses.len()).all(|ready| *ready) {
            self.next().await?;
        }
        Ok(())
    }

    /// Waits until every child is ready.
    ///
    /// # Errors
    /// What the children report.
    pub(super) async fn all_ready(&mut self) -> Result<(), Failure> {
        while !self.ready.iter().all(|ready| *ready) {
            self.next().await?;
        }
        Ok(())
    }

    /// Does something while the children are watched.
    ///
    /// # Errors
    /// Its own, or what the children report.
    pub(super) async fn beside<T>(
        &mut self,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        tokio::pin!(work);
        loop {
            tokio::select! {
                outcome = &mut work => return outcome,
                event = self.next() => event?,
            }
        }
    }

    /// Watches until a child can't be kept up.
    pub(super) async fn keep_up(&mut self) -> Failure {
        loop {
            if let Err(failure) = self.next().await {
                return failure;
            }
        }
    }

    /// Takes in one event.
    async fn next(&mut self) -> Result<(), Failure> {
        match self.events.recv().await {
            Some(Event::Bound(index, address)) => {
                if let Some(known) = self.addresses.get_mut(index) {
                    *known = Some(address);
                }
            }
            Some(Event::Ready(index, name)) => {
                if let Some(ready) = self.ready.get_mut(index) {
                    if *ready {
                        line(&format!("{name} is ready again"));
                    }
                    *ready = true;
                }
            }
            Some(Event::Died(what, pause)) => {
                line(&format!("{what}; starting it again in {:.1} s", pause.as_secs_f64()));
            }
            Some(Event::Failed(failure)) => return Err(failure),
            // This side holds a sender itself.
            None => return Err(Failure::Unexpected("the children can't be watched any more".to_owned())),
        }
        Ok(())
    }

    /// Ends all children, the router first: its requests still need the workers. Those that have not ended after
    /// `patience` and a little are killed, or all of them when `now` comes first.
    ///
    /// # Errors
    /// [`Failure::Interrupted`] when `now` came.
    pub(super) async fn stop(
        mut self,
        patience: Duration,
        now: impl Future<Output = ()>,
    ) -> Result<(), Failure> {
        // What they still have to say interests nobody, but must not make them wait.
        self.events.close();
        let (router, workers) = (&mut self.router, &mut self.workers);
        let in_order = async {
            router.stop(patience + GRACE).await;
            workers.stop(patience + GRACE).await;
        };
        tokio::select! {
            () = in_order => return Ok(()),
            () = now => {}
        }
        self.router.kill();
        self.workers.kill();
        self.router.ended().await;
        self.workers.ended().await;
        Err(Failure::Interrupted)
    }
}
