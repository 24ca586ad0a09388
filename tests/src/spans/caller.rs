//! The client's own end of a trace.

use crate::seed::Random;

/// A span of the client's, which heads the trace of a request.
#[derive(Debug, Clone)]
pub struct Caller {
    /// 32 hexadecimal digits.
    pub trace_id: String,
    /// 16 hexadecimal digits.
    pub span_id: String,
    /// Whether the client records it.
    pub is_sampled: bool,
}

impl Caller {
    /// A new trace, which the client records.
    pub fn new(random: &mut Random) -> Self {
        // No id may be all zeros.
        let trace_id = format!("{:016x}{:016x}", random.next_u64() | 1, random.next_u64());
        Self { trace_id, span_id: format!("{:016x}", random.next_u64() | 1), is_sampled: true }
    }

    /// Value of the header `traceparent`.
    pub fn header(&self) -> String {
        format!("00-{}-{}-{:02x}", self.trace_id, self.span_id, u8::from(self.is_sampled))
    }
}
