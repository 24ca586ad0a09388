//! `baton bench transfer`: how fast KV moves between two workers of this machine, beside what the machine can do at all.
//!
//! Needs no cluster. Both ends run in this process, each on a thread of its own with a runtime of its own, over the code
//! that workers use. The ways are measured in turn, round by round, so that what else the machine does hits all of them; medians
//! are reported, and CPU time, which other programs disturb less than speed.

mod baselines;
mod ends;

use std::time::{Duration, Instant};

use baton_transfer::Transport;
use serde::Serialize;

use self::baselines::{Copies, Tcp};
use self::ends::Ends;
use crate::exit::Failure;

/// What to measure, and for how long.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct TransferOptions {
    /// Bytes of one transfer, rounded to whole tokens of the default model's KV
    #[arg(long, value_name = "N", default_value_t = 47_185_920,
          value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    bytes: u64,

    /// Rounds; each moves that many bytes once every way
    #[arg(long, value_name = "N", default_value_t = 41, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,

    /// Seconds after which no further round begins
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(super) json: bool,
}

/// Measures; blocks the thread that calls it.
///
/// # Errors
/// [`Failure::Memory`] when the blocks do not fit, [`Failure::Unexpected`] when the two ends can't talk to each other.
pub(super) fn run(options: &TransferOptions) -> Result<Report, Failure> {
    let mut ends = Ends::start(options.bytes)?;
    let bytes = ends.bytes();
    let (tcp, mut copies) = (Tcp::start(bytes)?, Copies::new(bytes));
    let mut all = Rounds::default();
    // Connections, page faults, clock speed.
    ends.transfer(Transport::Shm)?;
    ends.transfer(Transport::Grpc)?;
    tcp.transfer()?;
    copies.memcpy();
    let began = Instant::now();
    for _ in 0..options.rounds {
        if began.elapsed() > Duration::from_secs(options.seconds) {
            break;
        }
        all.shm.extend(ends.transfer(Transport::Shm)?);
        all.memcpy.push(copies.memcpy());
        all.grpc.extend(ends.transfer(Transport::Grpc)?);
        all.tcp.push(tcp.transfer()?);
        all.plain.push(copies.blocks(false));
        all.summed.push(copies.blocks(true));
    }
    Ok(all.report(bytes))
}

/// One transfer.
#[derive(Debug, Clone, Copy)]
struct Sample {
    seconds: f64,
    /// CPU seconds of the thread that sends; of the only one when there is one.
    send_cpu_s: f64,
    /// CPU seconds of the thread that receives.
    receive_cpu_s: f64,
}

#[derive(Debug, Default)]
struct Rounds {
    grpc: Vec<Sample>,
    shm: Vec<Sample>,
    tcp: Vec<Sample>,
    memcpy: Vec<Sample>,
    plain: Vec<Sample>,
    summed: Vec<Sample>,
}

/// Medians over the rounds. GB is 10^9 bytes.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Bytes of one transfer.
    bytes: u64,
    rounds: usize,
    grpc_gb_per_s: f64,
    /// `null` where the system has no shared memory of this kind.
    shm_gb_per_s: Option<f64>,
    tcp_loopback_gb_per_s: f64,
    memcpy_gb_per_s: f64,
    /// Median of the rounds' own ratios.
    grpc_per_tcp: f64,
    shm_per_memcpy: Option<f64>,
    grpc_cpu_s_per_gb: f64,
    grpc_send_cpu_s_per_gb: f64,
    grpc_receive_cpu_s_per_gb: f64,
    shm_cpu_s_per_gb: Option<f64>,
    shm_send_cpu_s_per_gb: Option<f64>,
    shm_receive_cpu_s_per_gb: Option<f64>,
    tcp_cpu_s_per_gb: f64,
    tcp_send_cpu_s_per_gb: f64,
    tcp_receive_cpu_s_per_gb: f64,
    memcpy_cpu_s_per_gb: f64,
    /// What one pass of the checksum adds to one copy, block by block; each end makes one.
    crc_cpu_s_per_gb: f64,
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

impl Rounds {
    fn report(&self, bytes: u64) -> Report {
        let gb = bytes as f64 / 1e9;
        let speed = |samples: &[Sample]| median(samples.iter().map(|sample| gb / sample.seconds));
        let send = |samples: &[Sample]| median(samples.iter().map(|sample| sample.send_cpu_s / gb));
        let receive = |samples: &[Sample]| median(samples.iter().map(|sample| sample.receive_cpu_s / gb));
        let both = |samples: &[Sample]| {
            median(samples.iter().map(|sample| (sample.send_cpu_s + sample.receive_cpu_s) / gb))
        };
        let ratio = |ours: &[Sample], theirs: &[Sample]| {
            median(ours.iter().zip(theirs).map(|(ours, theirs)| theirs.seconds / ours.seconds))
        };
        let crc =
            self.summed.iter().zip(&self.plain).map(|(with, without)| with.send_cpu_s - without.send_cpu_s);
        Report {
            bytes,
            rounds: self.grpc.len(),
            grpc_gb_per_s: speed(&self.grpc).unwrap_or_default(),
            shm_gb_per_s: speed(&self.shm),
            tcp_loopback_gb_per_s: speed(&self.tcp).unwrap_or_default(),
            memcpy_gb_per_s: speed(&self.memcpy).unwrap_or_default(),
            grpc_per_tcp: ratio(&self.grpc, &self.tcp).unwrap_or_default(),
            shm_per_memcpy: ratio(&self.shm, &self.memcpy),
            grpc_cpu_s_per_gb: both(&self.grpc).unwrap_or_default(),
            grpc_send_cpu_s_per_gb: send(&self.grpc).unwrap_or_default(),
            grpc_receive_cpu_s_per_gb: receive(&self.grpc).unwrap_or_default(),
            shm_cpu_s_per_gb: both(&self.shm),
            shm_send_cpu_s_per_gb: send(&self.shm),
            shm_receive_cpu_s_per_gb: receive(&self.shm),
            tcp_cpu_s_per_gb: both(&self.tcp).unwrap_or_default(),
            tcp_send_cpu_s_per_gb: send(&self.tcp).unwrap_or_default(),
            tcp_receive_cpu_s_per_gb: receive(&self.tcp).unwrap_or_default(),
            memcpy_cpu_s_per_gb: send(&self.memcpy).unwrap_or_default(),
            crc_cpu_s_per_gb: median(crc.map(|seconds| seconds / gb)).unwrap_or_default(),
        }
    }
}

impl Report {
    /// For people.
    pub(super) fn table(&self) -> String {
        let mut text = format!(
            "{} bytes of KV, both ends on this machine, {} rounds; GB is 10^9 bytes\n\n{:<24}{:>8}  {:>24}\n",
            self.bytes, self.rounds, "", "GB/s", "CPU s/GB (send, receive)"
        );
        let mut line = |what: &str, speed: f64, send: f64, receive: Option<f64>, note: String| {
            let receive = receive.map_or_else(String::new, |receive| format!("{receive:>11.3}"));
            text.push_str(&format!("{what:<24}{speed:>8.2}  {send:>13.3}{receive:<11}{note}\n"));
        };
        let of = |ratio: f64, what: &str| format!("   {:.0} % of {what}", 100.0 * ratio);
        line(
            "gRPC, verified",
            self.grpc_gb_per_s,
            self.grpc_send_cpu_s_per_gb,
            Some(self.grpc_receive_cpu_s_per_gb),
            of(self.grpc_per_tcp, "raw TCP"),
        );
        let (send, receive) = (self.tcp_send_cpu_s_per_gb, self.tcp_receive_cpu_s_per_gb);
        line("raw TCP, 1 MiB writes", self.tcp_loopback_gb_per_s, send, Some(receive), String::new());
        if let (Some(speed), Some(send), Some(ratio)) =
            (self.shm_gb_per_s, self.shm_send_cpu_s_per_gb, self.shm_per_memcpy)
        {
            let receive = self.shm_receive_cpu_s_per_gb;
            line("shared memory, verified", speed, send, receive, of(ratio, "memcpy"));
        }
        line("memcpy, one thread", self.memcpy_gb_per_s, self.memcpy_cpu_s_per_gb, None, String::new());
        text.push_str(&format!(
            "\nThe checksum's part: {:.3} CPU s/GB at each end, above a copy without it\n",
            self.crc_cpu_s_per_gb
        ));
        text
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        options: TransferOptions,
    }

    #[test]
    fn a_small_run_reports_every_way_with_its_cost() {
        let Command { options } = Command::parse_from(["transfer", "--bytes", "1000000", "--rounds", "3"]);
        let report = run(&options).unwrap();
        let json = serde_json::to_value(&report).unwrap();
        // Whole tokens of 23,040 bytes.
        assert_eq!((&json["bytes"], &json["rounds"]), (&(44 * 23_040).into(), &3.into()));
        for way in ["grpc", "tcp_loopback", "memcpy", "shm"] {
            let speed = json[format!("{way}_gb_per_s")].as_f64();
            assert!(speed.is_some_and(|speed| speed > 0.0 && speed < 1000.0), "{way}: {json}");
        }
        for way in ["grpc", "grpc_send", "grpc_receive", "shm", "shm_send", "shm_receive", "tcp", "memcpy"] {
            let cost = json[format!("{way}_cpu_s_per_gb")].as_f64();
            assert!(cost.is_some_and(|cost| cost > 0.0 && cost < 1000.0), "{way}: {json}");
        }
        assert!(json["grpc_per_tcp"].as_f64() > Some(0.0) && json["shm_per_memcpy"].as_f64() > Some(0.0));
        assert!(json["crc_cpu_s_per_gb"].is_f64());
        let table = report.table();
        for part in ["gRPC, verified", "shared memory, verified", "% of raw TCP", "% of memcpy", "checksum"] {
            assert!(table.contains(part), "{table}");
        }
    }

    #[test]
    fn the_median_is_of_all_rounds() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), Some(2.0));
        assert_eq!(median(std::iter::empty()), None);
        let sample = |seconds| Sample { seconds, send_cpu_s: 0.5, receive_cpu_s: 0.25 };
        let all = vec![sample(1.0), sample(2.0), sample(4.0)];
        let rounds = Rounds { grpc: all.clone(), tcp: vec![sample(0.5); 3], ..Rounds::default() };
        let report = rounds.report(2_000_000_000);
        assert_eq!(
            (report.grpc_gb_per_s, report.tcp_loopback_gb_per_s, report.grpc_per_tcp),
            (1.0, 4.0, 0.25)
        );
        assert_eq!((report.grpc_cpu_s_per_gb, report.grpc_send_cpu_s_per_gb), (0.375, 0.25));
        assert_eq!((report.shm_gb_per_s, report.shm_per_memcpy), (None, None));
    }
}
