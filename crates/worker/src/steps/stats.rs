//! How one sequence ran: counted by the step loop, read at any time by whoever serves the sequence. Counting allocates nothing.

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Buckets of a doubling, as a power of two: the middle of a bucket is within 1/32 of everything in it.
const BITS: u32 = 4;
const PER_DOUBLING: usize = 1 << BITS;

/// Longer gaps count as this long: 268 s.
const MAX_US: u64 = (1 << 28) - 1;

const NUM_BUCKETS: usize = (28 - BITS as usize + 1) * PER_DOUBLING;

/// How a sequence ran here up to now. Gaps are those between two of its tokens; the first is counted from the step boundary at which a
/// sequence that came from a prefill worker began to run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunStats {
    /// Steps that gave it a token after its first.
    pub steps: u64,
    /// Sequences that decoded in the fullest of them.
    pub batch_max: u32,
    /// Median gap; within 3.2 %.
    pub itl_p50: Duration,
    /// The 99th percentile; within 3.2 %.
    pub itl_p99: Duration,
    /// The longest gap; exact.
    pub itl_max: Duration,
    /// Gaps that were stalls.
    pub num_stalls: u32,
    /// By how much all stalls together exceeded a step that only decodes.
    pub stalled: Duration,
    /// What prompts that others computed would have cost it here, in microseconds; a model.
    pub avoided_us: i64,
    /// How many such prompts there were.
    pub avoided_prefills: u32,
}

/// The counts behind [`RunStats`]. Only the step loop writes.
pub(super) struct RunBoard {
    steps: AtomicU64,
    batch_max: AtomicU32,
    max_us: AtomicU64,
    num_stalls: AtomicU32,
    stalled_us: AtomicU64,
    avoided_us: AtomicI64,
    avoided_prefills: AtomicU32,
    gaps: [AtomicU32; NUM_BUCKETS],
}

impl Default for RunBoard {
    fn default() -> Self {
        Self {
            steps: AtomicU64::new(0),
            batch_max: AtomicU32::new(0),
            max_us: AtomicU64::new(0),
            num_stalls: AtomicU32::new(0),
            stalled_us: AtomicU64::new(0),
            avoided_us: AtomicI64::new(0),
            avoided_prefills: AtomicU32::new(0),
            gaps: [const { AtomicU32::new(0) }; NUM_BUCKETS],
        }
    }
}

impl RunBoard {
    /// A token came `gap` after the one before it, from a step in which `batch` sequences decoded.
    pub(super) fn token(&self, gap: Duration, batch: u32) {
        let us = micros(gap);
        self.steps.fetch_add(1, Relaxed);
        self.batch_max.fetch_max(batch, Relaxed);
        self.max_us.fetch_max(us, Relaxed);
        self.gaps[bucket(us)].fetch_add(1, Relaxed);
    }

    /// A gap was a stall.
    pub(super) fn stall(&self, blocked: Duration) {
        self.num_stalls.fetch_add(1, Relaxed);
        self.stalled_us.fetch_add(micros(blocked), Relaxed);
    }

    /// A prompt that was computed elsewhere would have blocked it for `seconds`.
    pub(super) fn avoided(&self, seconds: f64) {
        self.avoided_us.fetch_add((seconds * 1e6) as i64, Relaxed);
        self.avoided_prefills.fetch_add(1, Relaxed);
    }

    pub(super) fn read(&self) -> RunStats {
        let max_us = self.max_us.load(Relaxed);
        let at_most_max = |us: u64| Duration::from_micros(us.min(max_us));
        RunStats {
            steps: self.steps.load(Relaxed),
            batch_max: self.batch_max.load(Relaxed),
            itl_p50: at_most_max(self.quantile_us(0.5)),
            itl_p99: at_most_max(self.quantile_us(0.99)),
            itl_max: Duration::from_micros(max_us),
            num_stalls: self.num_stalls.load(Relaxed),
            stalled: Duration::from_micros(self.stalled_us.load(Relaxed)),
            avoided_us: self.avoided_us.load(Relaxed),
            avoided_prefills: self.avoided_prefills.load(Relaxed),
        }
    }

    /// The least value that `share` of the gaps do not exceed, as the middle of its bucket; 0 without gaps.
    fn quantile_us(&self, share: f64) -> u64 {
        let counts = || self.gaps.iter().map(|count| u64::from(count.load(Relaxed)));
        let wanted = (share * counts().sum::<u64>() as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        let found = counts().position(|count| {
            seen += count;
            seen >= wanted
        });
        found.map_or(0, middle)
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Exact below 16, then 16 of equal width from each power of two to the next.
fn bucket(us: u64) -> usize {
    let us = us.min(MAX_US);
    match us.checked_ilog2() {
        Some(exponent) if exponent >= BITS => {
            let shift = exponent - BITS;
            shift as usize * PER_DOUBLING + (us >> shift) as usize
        }
        _ => us as usize,
    }
}

fn middle(bucket: usize) -> u64 {
    if bucket < 2 * PER_DOUBLING {
        return bucket as u64;
    }
    let shift = bucket / PER_DOUBLING - 1;
    let least = (PER_DOUBLING + bucket % PER_DOUBLING) << shift;
    (least + (1 << shift) / 2) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gap_has_a_bucket_whose_middle_is_near() {
        let mut last = 0;
        for us in (0..70_000).chain((0..400).map(|n| 70_000 + n * 670_000)) {
            let at = bucket(us);
            assert!(at < NUM_BUCKETS && at >= last && at - last <= PER_DOUBLING * 12, "{us}");
            last = at;
            let off = (middle(at) as f64 - us as f64).abs() / (us as f64).max(1.0);
            assert!(off <= 0.032, "{us} us falls to {} us: {off}", middle(at));
        }
        assert_eq!(bucket(MAX_US), NUM_BUCKETS - 1);
        assert_eq!(bucket(u64::MAX), NUM_BUCKETS - 1);
        for at in 0..NUM_BUCKETS {
            assert_eq!(bucket(middle(at)), at);
        }
    }

    #[test]
    fn quantiles_are_of_all_gaps_and_never_above_the_longest() {
        let board = RunBoard::default();
        assert_eq!(board.read(), RunStats::default());
        for n in 1..=1000 {
            board.token(Duration::from_micros(n * 10), 1 + (n % 5) as u32);
        }
        let stats = board.read();
        let near = |found: Duration, us: f64| (found.as_micros() as f64 / us - 1.0).abs() < 0.033;
        assert!(near(stats.itl_p50, 5000.0) && near(stats.itl_p99, 9900.0), "{stats:?}");
        assert_eq!((stats.steps, stats.batch_max), (1000, 5));
        assert_eq!(stats.itl_max, Duration::from_millis(10));
        let one = RunBoard::default();
        one.token(Duration::from_micros(1025), 1);
        assert_eq!(one.read().itl_p99, Duration::from_micros(1025), "not the middle of its bucket, 1056");
    }

    #[test]
    fn stalls_and_what_was_avoided_add_up() {
        let board = RunBoard::default();
        board.stall(Duration::from_millis(30));
        board.stall(Duration::from_millis(50));
        board.avoided(0.25);
        board.avoided(0.5);
        let stats = board.read();
        assert_eq!((stats.num_stalls, stats.stalled), (2, Duration::from_millis(80)));
        assert_eq!((stats.avoided_us, stats.avoided_prefills), (750_000, 2));
    }
}
