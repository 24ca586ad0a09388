//! Names of spans and attributes. Every literal stands here, so that a dashboard's author finds all of them.

/// The span around everything that is done for one request in one process, for log lines.
pub const SPAN_REQUEST: &str = "request";

/// The request's id: 128 bits as 32 hexadecimal digits.
pub const REQUEST_ID: &str = "request_id";
/// The trace the request belongs to: 32 hexadecimal digits.
pub const TRACE_ID: &str = "trace_id";
/// Which process wrote a line: `router`, `prefill-worker`, `decode-worker`, `baton`.
pub const ROLE: &str = "role";

/// Names of spans. A request's root is named after its operation and its model instead.
pub mod span {
    /// Router: the request's body arrives.
    pub const READ: &str = "read";
    /// Router: reading, rendering and encoding a request.
    pub const TOKENIZE: &str = "tokenize";
    /// Router: waiting to be let in.
    pub const DOOR: &str = "door";
    /// Router: the placement of one attempt.
    pub const ROUTE: &str = "route";
    /// Router and decode worker: a leg is registered.
    pub const RESERVE: &str = "reserve";
    /// Router and prefill worker: up to the first token.
    pub const PREFILL: &str = "prefill";
    /// A prompt waits for its first chunk.
    pub const PREFILL_QUEUE: &str = "prefill.queue";
    /// A part of a prompt is computed.
    pub const PREFILL_CHUNK: &str = "prefill.chunk";
    /// Router: from when all is known to the last byte handed over.
    pub const RESPOND: &str = "respond";
    /// Prefill worker: from the offer to the commit.
    pub const HANDOFF: &str = "handoff";
    /// Prefill worker: KV is sent.
    pub const KV_SEND: &str = "kv.send";
    /// Decode worker: KV is received and verified.
    pub const KV_RECV: &str = "kv.recv";
    /// Router and decode worker: from when the sequence could go on to its end.
    pub const DECODE: &str = "decode";
    /// Decode worker: from prefill's end to the step at which the sequence could have run.
    pub const DECODE_QUEUE: &str = "decode.queue";
    /// Decode worker: the exposed part of a transfer.
    pub const KV_WAIT: &str = "kv.wait";
    /// Decode worker: from when all KV is there to the step boundary at which the sequence runs.
    pub const DECODE_COMMIT: &str = "decode.commit";
    /// Decode worker: a sequence runs.
    pub const DECODE_RUN: &str = "decode.run";
    /// Decode worker: a gap between two tokens that decoding alone does not explain.
    pub const DECODE_STALL: &str = "decode.stall";
    /// Workers: one step of the engine, sampled, in a trace of its own.
    pub const ENGINE_STEP: &str = "engine.step";
}

/// How the request was served: `disaggregated`, `local` or `colocated`.
pub const MODE: &str = "baton.mode";
/// Why it was placed as it was.
pub const REASON: &str = "baton.reason";
/// The request's id, as log lines and `x-request-id` have it.
pub const BATON_REQUEST_ID: &str = "baton.request_id";
/// The caller's own name of the request.
pub const CLIENT_REQUEST_ID: &str = "baton.client_request_id";
/// Counts attempts of a request, from 0.
pub const ATTEMPT: &str = "baton.attempt";
/// Counts sequences of a request, from 0.
pub const SEQUENCE: &str = "baton.sequence";
/// Whether every token was computed under one numerics id.
pub const EXACT: &str = "baton.exact";
/// Attempts after the first.
pub const RETRIES: &str = "baton.retries";
/// How often a sequence of the request gave up its blocks.
pub const PREEMPTIONS: &str = "baton.preemptions";

/// Rule that placed a request.
pub const ROUTE_POLICY: &str = "baton.route.policy";
/// Address of the prefill worker.
pub const ROUTE_PREFILL: &str = "baton.route.prefill_worker";
/// Address of the decode worker.
pub const ROUTE_DECODE: &str = "baton.route.decode_worker";
/// Prompt tokens that the router expects in prefix caches.
pub const PREFIX_HIT_TOKENS: &str = "baton.route.prefix_hit_tokens";

/// Tokens computed.
pub const TOKENS: &str = "baton.tokens";
/// Tokens before them.
pub const CONTEXT: &str = "baton.context";
/// Prompt tokens taken from a prefix cache.
pub const CACHED_TOKENS: &str = "baton.cached_tokens";
/// Chunks that a span stands for.
pub const CHUNKS: &str = "baton.chunks";

/// Bytes of KV that moved between workers.
pub const KV_BYTES: &str = "baton.kv.bytes";
/// Blocks of KV that moved.
pub const KV_BLOCKS: &str = "baton.kv.blocks";
/// Frames of KV.
pub const KV_FRAMES: &str = "baton.kv.frames";
/// Frames that were sent a second time.
pub const KV_RESENT_FRAMES: &str = "baton.kv.resent_frames";
/// How KV moved: `grpc` or `shm`.
pub const KV_TRANSPORT: &str = "baton.kv.transport";
/// Time for which the sender had bytes and no credit, in milliseconds.
pub const KV_CREDIT_WAIT_MS: &str = "baton.kv.credit_wait_ms";
/// Duration of the transfer, in milliseconds.
pub const KV_TOTAL_MS: &str = "baton.kv.total_ms";
/// The part of the transfer during which the prompt was still computed, in milliseconds.
pub const KV_HIDDEN_MS: &str = "baton.kv.hidden_ms";
/// The part of the transfer for which the client waited, in milliseconds.
pub const KV_EXPOSED_MS: &str = "baton.kv.exposed_ms";
/// Time with bytes under way, in milliseconds; of `kv.wait`, its part of the exposed time.
pub const KV_WIRE_MS: &str = "baton.kv.wire_ms";
/// The part of the exposed time without credit, in milliseconds.
pub const KV_CREDIT_MS: &str = "baton.kv.credit_ms";
/// The part of the exposed time for frames that were sent again, in milliseconds.
pub const KV_RESEND_MS: &str = "baton.kv.resend_ms";

/// Steps of a run.
pub const STEPS: &str = "baton.steps";
/// Sequences in the fullest step of a run.
pub const BATCH_MAX: &str = "baton.batch_max";
/// Median gap between two tokens, in milliseconds.
pub const ITL_P50_MS: &str = "baton.itl_p50_ms";
/// 99th percentile of the gaps, in milliseconds.
pub const ITL_P99_MS: &str = "baton.itl_p99_ms";
/// Longest gap, in milliseconds.
pub const ITL_MAX_MS: &str = "baton.itl_max_ms";

/// Whether a sequence of the request stalled.
pub const STALLED: &str = "baton.stalled";
/// Cause of a stall: `local_prefill`, `preemption`, `resume`, `copy` or `slow_step`.
pub const STALL_CAUSE: &str = "baton.stall.cause";
/// The request that a stalled one waited for.
pub const STALL_BLOCKER: &str = "baton.stall.blocker_request_id";
/// How much longer than a step that only decodes, in milliseconds.
pub const STALL_BLOCKED_MS: &str = "baton.stall.blocked_ms";

/// `met` or `missed`: the time to first token.
pub const SLO_TTFT: &str = "baton.slo.ttft";
/// `met` or `missed`: every gap between tokens.
pub const SLO_ITL: &str = "baton.slo.itl";
/// From arrival to the first token handed over, in milliseconds.
pub const TTFT_MS: &str = "baton.ttft_ms";
/// From the first token to the second, in milliseconds.
pub const TOKEN_GAP_1_2_MS: &str = "baton.token_gap_1_2_ms";

/// Modelled: how long this request's prompt would have blocked others in a colocated cluster, summed over them, in milliseconds.
pub const HOL_AVOIDED_MS: &str = "baton.hol.avoided_ms";
/// How many others.
pub const HOL_VICTIMS: &str = "baton.hol.victims";
/// The baseline, and the model of a step.
pub const HOL_METHOD: &str = "baton.hol.method";
/// How far the model of a step is off in the mean, as a share.
pub const HOL_RESIDUAL: &str = "baton.hol.residual";
/// Modelled: how long prompts of others would have blocked this request, in milliseconds.
pub const HOL_WOULD_BLOCK_MS: &str = "baton.hol.would_block_ms";
/// How many prompts.
pub const HOL_PREFILLS: &str = "baton.hol.prefills";

/// Rows of a step.
pub const STEP_ROWS: &str = "baton.step.rows";
/// Rows of a step whose links did not fit.
pub const STEP_LINKS_DROPPED: &str = "baton.step.links_dropped";

/// `chat` or `text_completion`.
pub const GEN_AI_OPERATION: &str = "gen_ai.operation.name";
/// Model that was asked for.
pub const GEN_AI_REQUEST_MODEL: &str = "gen_ai.request.model";
/// Tokens of the prompt.
pub const GEN_AI_INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
/// Tokens of all answers.
pub const GEN_AI_OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";
/// Why the answers ended, with commas between.
pub const GEN_AI_FINISH_REASONS: &str = "gen_ai.response.finish_reasons";
/// What went wrong, in one word.
pub const ERROR_TYPE: &str = "error.type";
/// Method of an HTTP request.
pub const HTTP_METHOD: &str = "http.request.method";
/// Path of an HTTP request.
pub const HTTP_ROUTE: &str = "http.route";
/// Status of an HTTP response.
pub const HTTP_STATUS: &str = "http.response.status_code";
/// Kind of a call: `grpc`.
pub const RPC_SYSTEM: &str = "rpc.system";
/// Service of a call.
pub const RPC_SERVICE: &str = "rpc.service";
/// Method of a call.
pub const RPC_METHOD: &str = "rpc.method";
/// Status code of a call.
pub const RPC_STATUS: &str = "rpc.grpc.status_code";
/// Address at the other end of a call.
pub const SERVER_ADDRESS: &str = "server.address";

/// Names of what a process says about itself with its spans.
pub mod resource {
    /// Kind of process: `baton-router`, `baton-prefill-worker` or `baton-decode-worker`.
    pub const SERVICE_NAME: &str = "service.name";
    /// Which process of that kind: its instance id.
    pub const SERVICE_INSTANCE_ID: &str = "service.instance.id";
    /// Version of the program.
    pub const SERVICE_VERSION: &str = "service.version";
    /// Machine.
    pub const HOST_NAME: &str = "host.name";
    /// Name of the instrumentation.
    pub const SCOPE: &str = "baton";
}
