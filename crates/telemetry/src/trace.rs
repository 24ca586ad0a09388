//! Which trace a request belongs to, as W3C Trace Context carries it between processes.

use std::fmt::Write;

/// Name of the header and of the gRPC metadata key.
pub const TRACEPARENT: &str = "traceparent";

/// Trace and span of a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// The whole trace.
    pub trace_id: [u8; 16],
    /// The span that calls.
    pub span_id: [u8; 8],
    /// Whether the caller records it.
    pub sampled: bool,
}

impl TraceContext {
    /// Reads `version-trace_id-span_id-flags`; `None` for anything that is not valid, which starts a new trace.
    pub fn parse(header: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(header).ok()?.trim();
        let mut parts = text.split('-');
        let version = bytes::<1>(parts.next()?)?;
        let trace_id = bytes::<16>(parts.next()?)?;
        let span_id = bytes::<8>(parts.next()?)?;
        let flags = bytes::<1>(parts.next()?)?;
        // Version 00 has exactly four parts; later ones may append more; ff is never valid.
        let extra = parts.next().is_some();
        if version[0] == 0xff || (version[0] == 0 && extra) || trace_id == [0; 16] || span_id == [0; 8] {
            return None;
        }
        Some(Self { trace_id, span_id, sampled: flags[0] & 1 == 1 })
    }

    /// The header's value.
    pub fn to_header(&self) -> String {
        format!("00-{}-{}-{:02x}", hex(&self.trace_id), hex(&self.span_id), u8::from(self.sampled))
    }

    /// The trace id as 32 hexadecimal digits, as log lines carry it.
    pub fn trace_id_hex(&self) -> String {
        hex(&self.trace_id)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Exactly `N` bytes in lower-case hexadecimal, as the standard demands.
fn bytes<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * N {
        return None;
    }
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = digit(*pair.first()?)? << 4 | digit(*pair.get(1)?)?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_valid_header_round_trips() {
        let header = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let context = TraceContext::parse(header.as_bytes()).expect("valid");
        assert_eq!(context.to_header(), header);
        assert_eq!(context.trace_id_hex(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert!(context.sampled);
    }

    #[test]
    fn what_is_not_valid_starts_a_new_trace() {
        for header in [
            "",
            "00",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x",
            "00-4bf92f3577b34da6a3ce929d0e0e47-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4\u{e9}6-00f067aa0ba902b7-01",
        ] {
            assert_eq!(TraceContext::parse(header.as_bytes()), None, "{header}");
        }
    }
}
