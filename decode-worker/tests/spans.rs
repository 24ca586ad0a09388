//! The spans of a decode worker, of calls as a router makes them, and what it tells of stalls.

mod pair;

use std::time::Duration;

use baton_proto::v1;
use baton_telemetry::trace::{
    CallContext, Finished, Sampler, Span, SpanKind, TraceContext, Tracing, Value, new_span_id,
};
use baton_worker::{Running, prefill_seconds};
use pair::{Call, Pair, channel, decode_config, decode_to_end, prefill_config, prefill_to_end, within};
use tokio::sync::mpsc::Receiver;
use tonic::{Request, Streaming};

type ToDecode = v1::decode_client::DecodeClient<tonic::transport::Channel>;

/// A decode worker that traces into `spans`.
struct Traced {
    running: Running,
    client: ToDecode,
    spans: Receiver<Vec<Finished>>,
}

impl Traced {
    async fn start(ratio: f64, options: &[&str]) -> Self {
        let (tracing, spans) = Tracing::collecting(Sampler { parent_based: true, ratio });
        let mut config = decode_config(options);
        config.worker.tracing = tracing;
        let mut running = baton_decode_worker::start(config).expect("decode worker");
        running.ready().await.expect("ready");
        let client = ToDecode::new(channel(&running).await);
        Self { running, client, spans }
    }

    async fn decode(
        &mut self,
        call: &Call,
        local: bool,
        context: &CallContext,
    ) -> Streaming<v1::DecodeEvent> {
        self.client.decode(called(call.decode(local), context)).await.expect("a leg").into_inner()
    }

    /// The next leg's spans.
    async fn leg(&mut self) -> Leg {
        loop {
            let leg = Leg(within(self.spans.recv()).await.expect("spans"));
            // Steps have spans too, now and then.
            if leg.named("engine.step").is_empty() {
                return leg;
            }
        }
    }
}

/// As a router calls.
fn called<Message>(message: Message, context: &CallContext) -> Request<Message> {
    let mut request = Request::new(message);
    for (name, value) in context.headers() {
        request.metadata_mut().insert(name, value.parse().expect("ASCII"));
    }
    request
}

struct Leg(Vec<Finished>);

impl Leg {
    fn one(&self, name: &str, kind: SpanKind) -> &Span {
        let all = self.0.iter().map(|finished| &finished.span);
        let found: Vec<&Span> = all.filter(|span| span.name() == name && span.kind() == kind).collect();
        assert_eq!(found.len(), 1, "{name} {kind:?} in {:?}", self.names());
        found[0]
    }

    fn names(&self) -> Vec<&str> {
        self.0.iter().map(|finished| finished.span.name()).collect()
    }

    fn named(&self, name: &str) -> Vec<&Span> {
        self.0.iter().map(|finished| &finished.span).filter(|span| span.name() == name).collect()
    }
}

fn context(n: u8, sampled: bool) -> CallContext {
    let parent = TraceContext { trace_id: [n; 16], span_id: new_span_id(), sampled };
    CallContext { parent, root: [200; 8], reserve: [201; 8] }
}

fn number(span: &Span, name: &str) -> f64 {
    match span.attribute(name) {
        Some(Value::Float(value)) => *value,
        Some(Value::Int(value)) => *value as f64,
        other => panic!("{name} is {other:?}"),
    }
}

fn ms(span: &Span) -> f64 {
    (span.end() - span.start()).as_secs_f64() * 1e3
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_leg_that_is_handed_off_shows_what_the_router_is_told() {
    let (tracing, mut sent) = Tracing::collecting(Sampler::default());
    let mut config = prefill_config(&[]);
    config.worker.tracing = tracing;
    let mut prefill = baton_prefill_worker::start(config).expect("prefill worker");
    prefill.ready().await.expect("ready");
    let mut to_prefill = v1::prefill_client::PrefillClient::new(channel(&prefill).await);
    let mut decode = Traced::start(1.0, &[]).await;
    let destination = v1::Destination {
        address: decode.running.address().to_string(),
        instance_id: decode.running.core().instance.0.to_vec().into(),
    };
    let context = context(1, true);
    let call = Call::new(1, 500, 20);
    let leg = decode.decode(&call, false, &context).await;
    let prefill = to_prefill.prefill(called(call.prefill(Some(destination)), &context));
    let prefill = prefill.await.expect("a leg").into_inner();
    let (_, told) = tokio::join!(prefill_to_end(prefill), decode_to_end(leg));
    let kv = told.kv.expect("started");

    let leg = decode.leg().await;
    assert!(leg.0.iter().all(|finished| finished.trace_id == [1; 16] && finished.sampled));
    let serves = leg.one("decode", SpanKind::Server);
    assert_eq!(serves.parent(), Some(context.parent.span_id));
    assert_eq!(leg.one("reserve", SpanKind::Server).parent(), Some([201; 8]));
    let received = leg.one("kv.recv", SpanKind::Consumer);
    assert_eq!(number(received, "baton.kv.bytes"), kv.bytes as f64);
    let sent = Leg(within(sent.recv()).await.expect("spans"));
    assert_eq!(received.parent(), Some(sent.one("kv.send", SpanKind::Producer).id()));
    let queue = leg.one("decode.queue", SpanKind::Internal);
    assert!((ms(queue) - kv.decode_queue_us as f64 / 1e3).abs() < 0.002, "{queue:?} {kv:?}");
    let waits: f64 = leg.named("kv.wait").iter().map(|span| ms(span)).sum();
    assert!((waits - kv.exposed_us as f64 / 1e3).abs() < 0.005, "{waits} {kv:?}");
    let run = leg.one("decode.run", SpanKind::Internal);
    assert_eq!((number(run, "baton.steps"), number(run, "baton.batch_max")), (19.0, 1.0));
    let stats = told.by_sequence[&0].stats.expect("statistics");
    assert_eq!((stats.steps, stats.batch_max, stats.avoided_us), (19, 1, 0));
    assert!(
        stats.itl_p50_us > 0 && stats.itl_p50_us <= stats.itl_p99_us && stats.itl_p99_us <= stats.itl_max_us
    );
    assert!((number(run, "baton.itl_max_ms") - stats.itl_max_us as f64 / 1e3).abs() < 0.001);
    for child in [queue, run] {
        assert_eq!(child.parent(), Some(serves.id()));
        assert!(child.start() >= serves.start() && child.end() <= serves.end());
    }
    assert!(queue.end() < run.start());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_stall_names_the_prompt_that_caused_it_to_the_router_and_in_the_trace() {
    // Beside one that decodes a step has room for three blocks, which take 48 ms.
    let options = ["--pace-tokens-per-s=1000", "--local-prefill-tokens=64"];
    let mut decode = Traced::start(1.0, &options).await;
    let (victim, blocker) = (Call::new(1, 4, 600), Call::new(2, 128, 2));
    let (of_victim, of_blocker) = (context(1, true), context(2, true));
    let mut running = decode.decode(&victim, true, &of_victim).await;
    let mut told = pair::DecodeOutcome::default();
    while told.by_sequence.values().all(|answer| answer.tokens.len() < 20) {
        told.hear(within(running.message()).await.unwrap().unwrap().event.unwrap());
    }
    let stream = decode.decode(&blocker, true, &of_blocker).await;
    assert_eq!(decode_to_end(stream).await.tokens.expect("finished").len(), 2);
    let leg_of_blocker = decode.leg().await;
    while let Some(event) = within(running.message()).await.unwrap() {
        told.hear(event.event.unwrap());
    }
    let leg = decode.leg().await;

    let stats = told.by_sequence[&0].stats.unwrap();
    assert_eq!(stats.num_stalls as usize, told.stalls.len());
    assert_eq!(stats.stalled_us, told.stalls.iter().map(|stall| stall.blocked_us).sum::<u64>());
    // A busy machine has slow steps of its own.
    told.stalls.retain(|stall| stall.cause() == v1::StallCause::LocalPrefill);
    assert_eq!(told.stalls.len(), 3, "48, 48 and 32 tokens: {:?}", told.stalls);
    for stall in &told.stalls {
        assert_eq!(stall.blocker_request_id, blocker.key.request);
        assert!(stall.blocked_us >= 25_000, "{stall:?}");
    }

    let run = leg.one("decode.run", SpanKind::Internal);
    let serves_blocker = leg_of_blocker.one("decode", SpanKind::Server);
    let link = TraceContext { span_id: serves_blocker.id(), ..of_blocker.parent };
    let by_prefill =
        |span: &&Span| span.attribute("baton.stall.cause") == Some(&Value::from("local_prefill"));
    let stalls: Vec<&Span> = leg.named("decode.stall").into_iter().filter(by_prefill).collect();
    assert_eq!(stalls.len(), 3);
    for (span, stall) in stalls.into_iter().zip(&told.stalls) {
        assert_eq!((span.parent(), span.links()), (Some(run.id()), &[link][..]));
        assert!((number(span, "baton.stall.blocked_ms") - stall.blocked_us as f64 / 1e3).abs() < 0.001);
        assert!(span.start() >= run.start() && span.end() <= run.end() && ms(span) >= 25.0);
    }
    let chunks = leg_of_blocker.named("prefill.chunk");
    assert_eq!(chunks.iter().map(|chunk| number(chunk, "baton.tokens")).sum::<f64>(), 128.0);
    assert!(chunks.iter().all(|chunk| chunk.parent() == Some(serves_blocker.id())));
    assert_eq!(leg_of_blocker.one("prefill.queue", SpanKind::Internal).parent(), Some(serves_blocker.id()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_handoff_tells_what_its_prompt_would_have_cost_those_that_ran() {
    let mut pair = Pair::start(&["--pace-tokens-per-s=5000"], &["--pace-tokens-per-s=1000"]).await;
    // The prefill worker learns what its steps take.
    pair.run(&Call::new(1, 1500, 2)).await;
    let victim = Call::new(2, 8, 1500);
    let mut running = pair.to_decode.decode(victim.decode(true)).await.expect("a leg").into_inner();
    let mut told = pair::DecodeOutcome::default();
    while told.by_sequence.is_empty() {
        told.hear(within(running.message()).await.unwrap().unwrap().event.unwrap());
    }
    let call = Call::new(3, 1000, 2);
    let decode = pair.decode(&call).await.expect("a leg");
    let prefill = pair.prefill(&call).await.expect("a leg");
    let (_, handed) = tokio::join!(prefill_to_end(prefill), decode_to_end(decode));
    let avoided = handed.avoided.expect("the prefill worker knows what its steps cost");
    assert_eq!(avoided.victims, 1);
    // No step ran since the commit.
    let (cost, residual) = pair.prefill.core().loaded().unwrap().steps.step_cost_now().expect("a cost");
    let want_us = prefill_seconds(&cost, 1000, 0).expect("a time") * 1e6;
    assert!(
        want_us > 1000.0 && (avoided.total_us as f64 - want_us).abs() <= 1.0,
        "{avoided:?}: {want_us} us"
    );
    assert_eq!(avoided.residual, residual);
    while let Some(event) = within(running.message()).await.unwrap() {
        told.hear(event.event.unwrap());
    }
    let stats = told.by_sequence[&0].stats.unwrap();
    assert_eq!((stats.avoided_us, stats.avoided_prefills), (avoided.total_us, 1));
    assert_eq!(handed.by_sequence[&0].stats.unwrap().avoided_prefills, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_the_router_lets_go_of_has_its_run_and_says_that_it_was_cancelled() {
    let mut decode = Traced::start(1.0, &["--pace-tokens-per-s=500"]).await;
    let mut stream = decode.decode(&Call::new(1, 4, 1000), true, &context(1, true)).await;
    for _ in 0..10 {
        within(stream.message()).await.unwrap().unwrap();
    }
    drop(stream);
    let leg = decode.leg().await;
    let steps = number(leg.one("decode.run", SpanKind::Internal), "baton.steps");
    assert!((5.0..900.0).contains(&steps), "{steps}");
    let serves = leg.one("decode", SpanKind::Server);
    assert_eq!(serves.attribute("error.type"), Some(&Value::from("cancelled")));
    assert!(serves.failure().is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_is_not_sampled_is_told_when_a_router_keeps_it_and_only_then() {
    let mut decode = Traced::start(0.0, &[]).await;
    let mut worker = v1::worker_client::WorkerClient::new(channel(&decode.running).await);
    for n in [1, 2] {
        let stream = decode.decode(&Call::new(n, 40, 5), true, &context(n as u8, false)).await;
        decode_to_end(stream).await.tokens.expect("finished");
    }
    decode
        .running
        .core()
        .loaded()
        .unwrap()
        .steps
        .load()
        .wait_for(|load| load.counts.running == 0)
        .await
        .unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(100), decode.spans.recv()).await.is_err());
    let keep =
        |ids: Vec<Vec<u8>>| v1::KeepTracesRequest { trace_ids: ids.into_iter().map(Into::into).collect() };
    within(worker.keep_traces(keep(vec![vec![2; 16], vec![9; 16]]))).await.unwrap();
    let leg = decode.leg().await;
    assert!(leg.0.iter().all(|finished| finished.trace_id == [2; 16]), "{:?}", leg.names());
    leg.one("decode.run", SpanKind::Internal);

    let refused = within(worker.keep_traces(keep(vec![vec![2; 15]]))).await.unwrap_err();
    assert!(refused.message().contains("trace_ids[0] has 15 bytes"), "{refused}");
    let refused = within(worker.keep_traces(keep(vec![vec![2; 16]; 257]))).await.unwrap_err();
    assert!(refused.message().contains("257") && refused.message().contains("256"), "{refused}");
}
