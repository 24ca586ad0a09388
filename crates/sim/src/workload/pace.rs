//! Unique prompts that arrive at some pace.

use std::time::Duration;

use super::random::Random;
use super::{Arrival, Lengths, Prompt};

/// Arrivals of one run.
pub const MAX_ARRIVALS: usize = 1_000_000;
/// The sequence that arrival times are drawn from, and that of lengths.
const TIMES: u64 = u64::MAX;
const LENGTHS: u64 = u64::MAX - 1;

/// How unique prompts arrive.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// Time between them.
    pub gaps: Gaps,
    /// Go on for this long...
    pub duration: Duration,
    /// ...and until so many have come.
    pub at_least: u32,
}

/// Time between two arrivals.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gaps {
    /// A Poisson process of this rate, a second.
    Poisson(f64),
    /// Always the same.
    Every(Duration),
    /// So many at one moment; the moments are a Poisson process, and `rate` requests come a second in the mean.
    Bursts {
        /// Requests a second.
        rate: f64,
        /// Requests of a burst; at least 1.
        size: u32,
    },
}

/// What the unique prompts are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UniqueShape {
    /// Tokens of a prompt, drawn uniformly.
    pub prompt_tokens: Lengths,
    /// Tokens asked for, likewise.
    pub output_tokens: Lengths,
}

/// A pace that does not end in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("more than {MAX_ARRIVALS} arrivals")]
pub struct TooMany;

/// Unique prompts that arrive at that pace; the first at once. A function of its arguments.
///
/// # Errors
/// [`TooMany`], for more of them than [`MAX_ARRIVALS`].
pub fn unique_arrivals(seed: u64, pace: Pace, shape: UniqueShape) -> Result<Vec<Arrival>, TooMany> {
    let (mut times, mut lengths) = (Random::new(seed, TIMES), Random::new(seed, LENGTHS));
    let mut draw = |range: Lengths| lengths.between(range.low, range.high);
    let (mut arrivals, mut at) = (Vec::new(), Duration::ZERO);
    while at < pace.duration || arrivals.len() < pace.at_least as usize {
        if arrivals.len() == MAX_ARRIVALS {
            return Err(TooMany);
        }
        let nth = arrivals.len() as u64;
        let prompt = Prompt::Unique { nth, tokens: draw(shape.prompt_tokens) };
        arrivals.push(Arrival { at, prompt, output_tokens: draw(shape.output_tokens) });
        at += match pace.gaps {
            Gaps::Poisson(rate) => Duration::from_secs_f64(times.exponential(rate)),
            Gaps::Every(gap) => gap,
            Gaps::Bursts { rate, size } if (nth + 1).is_multiple_of(u64::from(size.max(1))) => {
                Duration::from_secs_f64(times.exponential(rate / f64::from(size.max(1))))
            }
            Gaps::Bursts { .. } => Duration::ZERO,
        };
    }
    Ok(arrivals)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: UniqueShape =
        UniqueShape { prompt_tokens: Lengths::exactly(64), output_tokens: Lengths::exactly(8) };

    #[test]
    fn arrivals_fill_the_duration_and_are_never_too_few() {
        let pace = Pace { gaps: Gaps::Poisson(2.0), duration: Duration::from_secs(100), at_least: 8 };
        let arrivals = unique_arrivals(1, pace, SHAPE).unwrap();
        assert!((150..250).contains(&arrivals.len()), "{}", arrivals.len());
        assert!(arrivals.iter().all(|arrival| arrival.at < pace.duration));
        assert_eq!(arrivals, unique_arrivals(1, pace, SHAPE).unwrap());
        let rare = Pace { gaps: Gaps::Poisson(0.001), duration: Duration::from_secs(1), at_least: 8 };
        assert_eq!(unique_arrivals(1, rare, SHAPE).unwrap().len(), 8);
        let even = Pace { gaps: Gaps::Every(Duration::from_secs(4)), duration: Duration::ZERO, at_least: 3 };
        let times: Vec<u64> =
            unique_arrivals(1, even, SHAPE).unwrap().iter().map(|arrival| arrival.at.as_secs()).collect();
        assert_eq!(times, [0, 4, 8]);
        let endless = Pace { gaps: Gaps::Poisson(1e6), duration: Duration::from_secs(86_400), at_least: 1 };
        assert_eq!(unique_arrivals(1, endless, SHAPE), Err(TooMany));
    }

    #[test]
    fn lengths_vary_and_leave_the_times_alone() {
        let pace = Pace { gaps: Gaps::Poisson(10.0), duration: Duration::ZERO, at_least: 500 };
        let varied = UniqueShape { prompt_tokens: Lengths { low: 10, high: 20 }, ..SHAPE };
        let (same, other) =
            (unique_arrivals(3, pace, SHAPE).unwrap(), unique_arrivals(3, pace, varied).unwrap());
        assert!(same.iter().zip(&other).all(|(a, b)| a.at == b.at));
        let lengths: Vec<u32> = other.iter().map(|arrival| arrival.prompt.num_tokens()).collect();
        assert_eq!((lengths.iter().min(), lengths.iter().max()), (Some(&10), Some(&20)));
    }

    #[test]
    fn bursts_come_at_once_and_keep_the_mean_rate() {
        let gaps = Gaps::Bursts { rate: 50.0, size: 10 };
        let pace = Pace { gaps, duration: Duration::ZERO, at_least: 20_000 };
        let arrivals = unique_arrivals(1, pace, SHAPE).unwrap();
        for burst in arrivals.chunks(10) {
            assert!(burst.iter().all(|arrival| arrival.at == burst[0].at));
        }
        let moments = arrivals.chunks(10).map(|burst| burst[0].at);
        assert!(moments.clone().zip(moments.skip(1)).all(|(one, next)| one < next));
        let rate = 20_000.0 / arrivals[19_999].at.as_secs_f64();
        assert!((rate - 50.0).abs() < 3.0, "{rate}");
    }
}
