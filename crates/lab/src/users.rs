//! `users`: a hundred users on one device with 16 GiB for KV.

use crate::crowd::{Batching, Served, User, serve};
use crate::device::KV_TOKEN_BYTES;
use crate::random::{Random, quantile};
use crate::report::{Axis, Bars, Marks, Report};
use crate::serving::{Ask, ServingConfig};
use crate::{Cell, Demonstration, LabError};

const NUM_USERS: usize = 100;
/// Questions of each user, one after the other.
const QUESTIONS: usize = 3;
const BLOCK_SIZE: usize = 16;
const NUM_SLOTS: usize = (16 << 30) / KV_TOKEN_BYTES;
/// Slots that a contiguous reservation takes: the longest sequence that may be asked for.
const MAX_LEN: usize = 2_048;

/// Where KV lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// A run of [`MAX_LEN`] slots a sequence, so that as many sequences run as there are runs.
    Contiguous,
    /// Blocks on demand.
    Paged,
}

pub(crate) fn users() -> Vec<User> {
    let mut random = Random::new(100);
    let mut question = |id: usize| {
        let (prompt, reply) = (random.between(64..=512), random.between(16..=256));
        Ask { ends_after: Some(reply), ..Ask::new(id as u64, random.tokens(prompt), 512) }
    };
    (0..NUM_USERS).map(|user| (0..QUESTIONS).map(|nth| question(user * QUESTIONS + nth)).collect()).collect()
}

/// All users' questions, served one of four ways.
pub(crate) fn run(batching: Batching, memory: Memory) -> Result<Served, LabError> {
    let roomy = ServingConfig {
        max_step_tokens: 2_048,
        local_prefill_tokens: 512,
        ..ServingConfig::roomy(NUM_SLOTS / BLOCK_SIZE, BLOCK_SIZE)
    };
    let max_num_seqs = match memory {
        Memory::Contiguous => NUM_SLOTS / MAX_LEN,
        Memory::Paged => NUM_USERS,
    };
    serve(&ServingConfig { max_num_seqs, ..roomy }, batching, users())
}

const WAYS: [(&str, Batching, Memory); 4] = [
    ("static, contiguous", Batching::Static, Memory::Contiguous),
    ("static, paged", Batching::Static, Memory::Paged),
    ("continuous, contiguous", Batching::Continuous, Memory::Contiguous),
    ("continuous, paged", Batching::Continuous, Memory::Paged),
];

pub(crate) fn report() -> Result<Report, LabError> {
    let mut report = Report::new(
        Demonstration::Users,
        "A hundred users on one device",
        "Each user asks three questions, one after the other. Paging decides how many of them the memory holds; continuous batching decides whether a place \
         that falls free is used. All four rows run on the scheduler that serves: contiguous memory limits it to as many sequences as there are reservations \
         of 2,048 tokens, static batching lets nobody in before the last one is out.",
    );
    let (mut rows, mut speeds, mut tails) = (Vec::new(), Vec::new(), Vec::new());
    for (name, batching, memory) in WAYS {
        let served = run(batching, memory)?;
        let [p50, p99] = [0.5, 0.99].map(|q| quantile(&served.latencies, q));
        speeds.push(served.tokens_per_s());
        tails.push(p99);
        rows.push(vec![
            Cell::from(name),
            Cell::Real(served.tokens_per_s(), 0),
            Cell::Real(p50, 2),
            Cell::Real(p99, 2),
            served.peak.into(),
            Cell::Real(served.time.as_secs_f64(), 1),
            served.num_steps.into(),
        ]);
    }
    report.table(
        "300 questions of 100 users; 16 GiB for KV (32,768 tokens), prompts of 64 to 512 tokens, replies of 16 to 256",
        &[
            ("batching, memory", ""),
            ("throughput", "tokens/s"),
            ("answer p50", "s"),
            ("answer p99", "s"),
            ("users held", ""),
            ("all done", "s"),
            ("steps", ""),
        ],
        rows,
    );
    let bars = |title: &str, axis: Axis, values: Vec<f64>, report: &mut Report| {
        let categories = WAYS.map(|(name, ..)| name.to_owned()).to_vec();
        let series = vec![Bars { name: axis.label.to_owned(), values }];
        report.plot(title, (Axis::of("batching, memory", ""), axis), Marks::Bars { categories, series });
    };
    bars("Throughput", Axis::of("throughput", "tokens/s"), speeds, &mut report);
    bars("Time to a whole answer, 99 of 100", Axis::of("p99", "s"), tails, &mut report);
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paging_holds_more_users_and_continuous_batching_serves_them_sooner() {
        let [fixed, static_paged, contiguous, both] =
            WAYS.map(|(_, batching, memory)| run(batching, memory).unwrap());
        for served in [&fixed, &static_paged, &contiguous, &both] {
            assert_eq!(served.latencies.len(), NUM_USERS * QUESTIONS);
            assert_eq!(served.num_tokens, both.num_tokens);
        }
        assert_eq!((fixed.peak, contiguous.peak), (16, 16));
        assert!(both.peak >= 4 * 16 && static_paged.peak > 16, "{} {}", both.peak, static_paged.peak);
        let speed = Served::tokens_per_s;
        assert!(speed(&fixed) < speed(&contiguous) && speed(&contiguous) < speed(&both));
        assert!(speed(&fixed) < speed(&static_paged) && speed(&static_paged) < speed(&both));
        let p99 = |served: &Served| quantile(&served.latencies, 0.99);
        assert!(p99(&both) < p99(&contiguous) && p99(&contiguous) < p99(&fixed));
        assert!(p99(&both) < p99(&static_paged));
    }
}
