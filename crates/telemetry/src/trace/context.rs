//! Trace and span of a caller, as W3C Trace Context carries them, and what else goes with a call between Baton's processes.

use std::cell::Cell;
use std::fmt::Write;
use std::hash::{BuildHasher, RandomState};

/// Name of the header and of the gRPC metadata key.
pub const TRACEPARENT: &str = "traceparent";

/// Name of the gRPC metadata key for ids of spans that a worker's spans are children of beside the calling one.
pub const SPANS: &str = "baton-spans";

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

    /// The same trace, with a span id that nobody has yet.
    #[must_use]
    pub fn child(&self) -> Self {
        Self { span_id: new_span_id(), ..*self }
    }

    /// The trace id as 32 hexadecimal digits, as log lines carry it.
    pub fn trace_id_hex(&self) -> String {
        hex(&self.trace_id)
    }
}

/// What goes from the router to a worker with a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallContext {
    /// Trace and span that call: the parent of the worker's SERVER span.
    pub parent: TraceContext,
    /// Id of the request's root span.
    pub root: [u8; 8],
    /// Id of the router's span of the reservation; zeros when there is none.
    pub reserve: [u8; 8],
}

impl CallContext {
    /// Metadata of the call.
    pub fn headers(&self) -> [(&'static str, String); 2] {
        let spans = format!("{}-{}", hex(&self.root), hex(&self.reserve));
        [(TRACEPARENT, self.parent.to_header()), (SPANS, spans)]
    }

    /// Reads what [`CallContext::headers`] wrote; a caller that is no router sends its `traceparent` alone, and is the root then.
    pub fn read<'a>(get: impl Fn(&str) -> Option<&'a [u8]>) -> Option<Self> {
        let parent = TraceContext::parse(get(TRACEPARENT)?)?;
        let spans = get(SPANS).and_then(|spans| std::str::from_utf8(spans).ok()).and_then(|spans| {
            let (root, reserve) = spans.trim().split_once('-')?;
            Some((bytes::<8>(root)?, bytes::<8>(reserve)?))
        });
        let (root, reserve) = spans.unwrap_or((parent.span_id, [0; 8]));
        let root = if root == [0; 8] { parent.span_id } else { root };
        Some(Self { parent, root, reserve })
    }
}

/// A trace id that nobody has yet.
pub fn new_trace_id() -> [u8; 16] {
    random()
}

thread_local! {
    /// State of the generator of span ids.
    static SPAN_IDS: Cell<u64> = Cell::new(u64::from_ne_bytes(random()));
}

/// A span id that nobody has yet: SplitMix64 (Steele, Lea, Flood 2014) from a random start on each thread, since asking the system for every
/// id costs more than all else about a span.
pub fn new_span_id() -> [u8; 8] {
    SPAN_IDS.with(|state| {
        loop {
            state.set(state.get().wrapping_add(0x9e37_79b9_7f4a_7c15));
            let x = state.get();
            let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let id = x ^ (x >> 31);
            // Zero is no id.
            if id != 0 {
                return id.to_be_bytes();
            }
        }
    })
}

/// Random bytes, not all zero.
fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    if getrandom::fill(&mut bytes).is_err() {
        // Ids need not be secret, and a request must not fail for want of one.
        let seed = RandomState::new();
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = seed.hash_one(at).to_le_bytes()[0];
        }
    }
    if bytes == [0; N] {
        bytes = [1; N];
    }
    bytes
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

    #[test]
    fn no_two_ids_are_the_same_on_one_thread_or_on_several() {
        let draw = || (0..10_000).map(|_| new_span_id()).collect::<Vec<_>>();
        let threads: Vec<_> = (0..3).map(|_| std::thread::spawn(draw)).collect();
        let mut ids = draw();
        for thread in threads {
            ids.extend(thread.join().expect("no panic"));
        }
        ids.sort_unstable();
        ids.dedup();
        assert!(ids.len() == 40_000 && !ids.contains(&[0; 8]));
    }

    #[test]
    fn what_goes_with_a_call_round_trips() {
        let trace = TraceContext { trace_id: new_trace_id(), span_id: new_span_id(), sampled: true };
        let context = CallContext { parent: trace.child(), root: trace.span_id, reserve: new_span_id() };
        let headers = context.headers();
        let read = |headers: &[(&'static str, String)]| {
            CallContext::read(|name| {
                headers.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_bytes())
            })
        };
        assert_eq!(read(&headers), Some(context));
        let [traceparent, _] = headers;
        let alone = CallContext { root: context.parent.span_id, reserve: [0; 8], ..context };
        assert_eq!(
            read(std::slice::from_ref(&traceparent)),
            Some(alone),
            "a caller that is no router is the root"
        );
        assert_eq!(read(&[traceparent.clone(), (SPANS, "nonsense".to_owned())]), Some(alone));
        assert_eq!(read(&[(SPANS, traceparent.1)]), None);
    }
}
