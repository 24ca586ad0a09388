//! When a request's own time is up: what its client says of it, bounded by what the router allows.

use std::time::{Duration, Instant};

use crate::api_error::ApiError;

/// HTTP header with the time a client waits, in milliseconds.
pub(crate) const TIMEOUT_HEADER: &str = "x-request-timeout-ms";
/// The same of gRPC's clients, which set it themselves.
pub(crate) const GRPC_TIMEOUT: &str = "grpc-timeout";

/// Longest time that travels to workers; a client that waits longer is served no longer.
const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// The gRPC transport ends a call at its deadline by itself, as cancelled: ours comes before, and says what it was.
const GRPC_MARGIN: Duration = Duration::from_millis(5);

/// When a request is over, whatever it has got; perhaps never.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    /// The earlier of what the client asks for and what the router allows, from the request's arrival.
    pub(crate) fn new(arrived: Instant, asked: Option<Duration>, allowed: Option<Duration>) -> Self {
        Self(asked.into_iter().chain(allowed).min().map(|timeout| arrived + timeout))
    }

    /// When it passes.
    pub(crate) const fn at(self) -> Option<Instant> {
        self.0
    }

    /// Whether it has passed.
    pub(crate) fn is_over(self) -> bool {
        self.0.is_some_and(|at| at <= Instant::now())
    }

    /// What a worker is told: milliseconds left, at least 1; 0 without a deadline.
    pub(crate) fn left_ms(self) -> u64 {
        self.0.map_or(0, |at| {
            let left = at.saturating_duration_since(Instant::now()).as_millis();
            u64::try_from(left).unwrap_or(u64::MAX).max(1)
        })
    }

    /// Drops the work when the deadline passes.
    ///
    /// # Errors
    /// Those of the work, and [`ApiError::DeadlineExceeded`].
    pub(crate) async fn bound<T>(
        self,
        work: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        match self.0 {
            Some(at) => {
                tokio::time::timeout_at(at.into(), work).await.unwrap_or(Err(ApiError::DeadlineExceeded))
            }
            None => work.await,
        }
    }
}

/// What an HTTP client sent as [`TIMEOUT_HEADER`].
///
/// # Errors
/// [`ApiError::Invalid`] naming header and limits.
pub(crate) fn from_http(value: &[u8]) -> Result<Duration, ApiError> {
    let most = MAX_TIMEOUT.as_millis();
    let ms = std::str::from_utf8(value).ok().and_then(|text| text.trim().parse::<u64>().ok());
    match ms {
        Some(ms @ 1..) if u128::from(ms) <= most => Ok(Duration::from_millis(ms)),
        _ => {
            let message = format!("{TIMEOUT_HEADER} must be a whole number from 1 to {most}");
            Err(ApiError::invalid(TIMEOUT_HEADER, message))
        }
    }
}

/// What a gRPC client sent as [`GRPC_TIMEOUT`]: up to eight digits and a unit.
///
/// # Errors
/// [`ApiError::Invalid`] naming the form.
pub(crate) fn from_grpc(value: &[u8]) -> Result<Duration, ApiError> {
    let parsed = value.split_last().and_then(|(unit, digits)| {
        let number =
            std::str::from_utf8(digits).ok().filter(|digits| digits.len() <= 8)?.parse::<u64>().ok()?;
        match unit {
            b'H' => Some(Duration::from_secs(number * 3600)),
            b'M' => Some(Duration::from_secs(number * 60)),
            b'S' => Some(Duration::from_secs(number)),
            b'm' => Some(Duration::from_millis(number)),
            b'u' => Some(Duration::from_micros(number)),
            b'n' => Some(Duration::from_nanos(number)),
            _ => None,
        }
    });
    let timeout = parsed.ok_or_else(|| {
        ApiError::invalid(
            GRPC_TIMEOUT,
            format!("{GRPC_TIMEOUT} must be 1 to 8 digits and one of H, M, S, m, u, n"),
        )
    })?;
    Ok(timeout.saturating_sub(GRPC_MARGIN).min(MAX_TIMEOUT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_has_limits_and_names_them() {
        assert_eq!(from_http(b"1").expect("fine"), Duration::from_millis(1));
        assert_eq!(from_http(b"86400000").expect("fine"), MAX_TIMEOUT);
        for bad in [&b""[..], b"0", b"-5", b"1.5", b"86400001", b"soon", b"99999999999999999999", &[0xff]] {
            let error = from_http(bad).expect_err("refused");
            assert_eq!((error.status().as_u16(), error.param()), (400, Some(TIMEOUT_HEADER)));
            assert!(error.to_string().contains("from 1 to 86400000"), "{error}");
        }
    }

    #[test]
    fn every_unit_of_grpc_is_known_and_long_ones_are_cut() {
        for (text, ms) in
            [("2S", 1995), ("100m", 95), ("90000u", 85), ("1M", 59_995), ("3m", 0), ("10000n", 0)]
        {
            assert_eq!(from_grpc(text.as_bytes()).expect(text), Duration::from_millis(ms), "{text}");
        }
        assert_eq!(from_grpc(b"99999999H").expect("long"), MAX_TIMEOUT);
        for bad in [&b""[..], b"m", b"5", b"5x", b"123456789m", b"-1S", b"1.5S"] {
            assert_eq!(from_grpc(bad).expect_err("refused").param(), Some(GRPC_TIMEOUT), "{bad:?}");
        }
    }

    #[test]
    fn the_earlier_of_wish_and_bound_counts() {
        let now = Instant::now();
        let s = |seconds| Some(Duration::from_secs(seconds));
        for (asked, allowed, ends) in
            [(None, None, None), (s(3), None, s(3)), (None, s(5), s(5)), (s(9), s(5), s(5))]
        {
            assert_eq!(Deadline::new(now, asked, allowed).at(), ends.map(|after| now + after));
        }
        assert_eq!(Deadline::new(now, None, None).left_ms(), 0);
        assert_eq!(Deadline::new(now, Some(Duration::ZERO), None).left_ms(), 1);
    }
}
