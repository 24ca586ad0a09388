//! Two network namespaces joined by a cable that can be slowed and pulled: what a proxy on loopback can't show, since there a lost
//! peer always says goodbye.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Which end of the cable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Where the router and the prefill workers run, and the test's own client.
    Near,
    /// Where the decode workers run.
    Far,
}

/// The cable; dropping it takes both namespaces away.
#[derive(Debug)]
pub struct Cable {
    name: String,
}

static NUM_CABLES: AtomicU32 = AtomicU32::new(0);

impl Cable {
    /// Makes both namespaces; `None` after [`crate::skip`] said why that is not possible here.
    pub fn new() -> Option<Self> {
        let nth = NUM_CABLES.fetch_add(1, Ordering::Relaxed);
        let cable = Self { name: format!("baton-{}-{nth}", std::process::id()) };
        match cable.set_up() {
            Ok(()) => Some(cable),
            Err(error) => {
                crate::skip(&format!(
                    "network namespaces can't be made (root and iproute2 are needed): {error}"
                ));
                None
            }
        }
    }

    fn set_up(&self) -> Result<(), String> {
        let (near, far) = (self.namespace(Side::Near), self.namespace(Side::Far));
        ip(&["netns", "add", &near])?;
        ip(&["netns", "add", &far])?;
        ip(&["-n", &near, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", &far])?;
        for (side, namespace) in [(Side::Near, &near), (Side::Far, &far)] {
            let address = format!("{}/30", self.address(side));
            ip(&["-n", namespace, "address", "add", &address, "dev", "cable"])?;
            ip(&["-n", namespace, "link", "set", "cable", "up"])?;
            ip(&["-n", namespace, "link", "set", "lo", "up"])?;
        }
        Ok(())
    }

    /// Name of a side's namespace.
    pub fn namespace(&self, side: Side) -> String {
        format!("{}-{}", self.name, if side == Side::Near { "near" } else { "far" })
    }

    /// Address of a side; the same for every cable, since no two see each other.
    pub fn address(&self, side: Side) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(10, 77, 0, if side == Side::Near { 1 } else { 2 }))
    }

    /// What a command line begins with to run on a side.
    pub fn prefix(&self, side: Side) -> Vec<String> {
        crate::cluster::strings(&["ip", "netns", "exec", &self.namespace(side)])
    }

    /// Pulls the cable out (`false`), or plugs it in.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn plug(&self, plugged: bool) {
        let state = if plugged { "up" } else { "down" };
        ip(&["-n", &self.namespace(Side::Near), "link", "set", "cable", state]).expect("the cable is ours");
    }

    /// As [`Cable::set_rate_kilobits`], in megabits a second.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn set_rate(&self, megabits: u32) {
        self.set_rate_kilobits(megabits.saturating_mul(1000));
    }

    /// Bounds what leaves each side to a rate in kilobits a second (token bucket; bursts of 6 ms, so that a slow cable is slow for small pieces too).
    ///
    /// # Panics
    /// When the system refuses.
    pub fn set_rate_kilobits(&self, kilobits: u32) {
        for side in [Side::Near, Side::Far] {
            let rate = format!("{kilobits}kbit");
            // No less than two packets, or the bucket never holds one.
            let burst = format!("{}b", (u64::from(kilobits) * 6 / 8).clamp(4_096, 1 << 20));
            let namespace = self.namespace(side);
            let args = ["-n", &namespace, "qdisc", "replace", "dev", "cable", "root", "tbf"];
            let shape = ["rate", &rate, "burst", &burst, "latency", "200ms"];
            run("tc", &[&args[..], &shape[..]].concat()).expect("the cable is ours");
        }
    }

    /// Runs a test's own part on the near side, on a thread and a runtime of its own.
    ///
    /// # Panics
    /// When it does, or when the namespace can't be entered.
    pub fn run<T: Send>(&self, part: impl AsyncFnOnce() -> T + Send) -> T {
        let namespace = format!("/run/netns/{}", self.namespace(Side::Near));
        let on_thread = move || {
            enter(&namespace).unwrap_or_else(|error| panic!("{namespace}: {error}"));
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(part())
        };
        std::thread::scope(|scope| {
            scope.spawn(on_thread).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for side in [Side::Near, Side::Far] {
            // One that was never made is no loss.
            let _ = ip(&["netns", "delete", &self.namespace(side)]);
        }
    }
}

/// Moves the calling thread, and what it starts from here on, into a namespace.
fn enter(path: &str) -> std::io::Result<()> {
    let file = File::open(path)?;
    // SAFETY: setns takes an open descriptor, changes only the calling thread, and touches no memory of this process.
    match unsafe { libc::setns(file.as_raw_fd(), libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

fn ip(args: &[&str]) -> Result<(), String> {
    run("ip", args)
}

fn run(program: &str, args: &[&str]) -> Result<(), String> {
    let output = Command::new(program).args(args).output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program} {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_on_the_near_side_reaches_the_far_one_and_nothing_else_changes() {
        let Some(cable) = Cable::new() else { return };
        let (near, far) = (cable.address(Side::Near), cable.address(Side::Far));
        let listens = |at: IpAddr| std::net::TcpListener::bind((at, 0)).is_ok();
        assert!(cable.run(async || listens(near)));
        assert!(!cable.run(async || listens(far)), "the far side's address is here");
        assert!(!listens(near), "this thread was moved too");
    }
}
