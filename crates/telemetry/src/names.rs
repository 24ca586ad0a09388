//! Names of spans and attributes. Every literal stands here, so that a dashboard's author finds all of them.

/// The span around everything that is done for one request in one process.
pub const SPAN_REQUEST: &str = "request";

/// The request's id: 128 bits as 32 hexadecimal digits.
pub const REQUEST_ID: &str = "request_id";
/// The trace the request belongs to: 32 hexadecimal digits.
pub const TRACE_ID: &str = "trace_id";
/// Which process wrote a line: `router`, `prefill-worker`, `decode-worker`, `baton`.
pub const ROLE: &str = "role";

/// How the request was served: `disaggregated`, `local` or `colocated`.
pub const MODE: &str = "baton.mode";
/// Bytes of KV that moved between workers.
pub const KV_BYTES: &str = "baton.kv.bytes";
/// Duration of the transfer, in milliseconds.
pub const KV_TOTAL_MS: &str = "baton.kv.total_ms";
/// The part of the transfer for which the client waited, in milliseconds.
pub const KV_EXPOSED_MS: &str = "baton.kv.exposed_ms";
