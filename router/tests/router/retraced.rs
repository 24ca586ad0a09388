//! The spans of requests that run more than once: each attempt has its own, and between them nothing is left out.

use std::time::Duration;

use baton_telemetry::trace::Span;
use serde_json::json;

use crate::fake::{ReceiverFails, Script};
use crate::harness::{Cluster, ONE_PAIR, Shape};
use crate::spans::{Trace, number};

const PLAIN: &str = "/v1/completions";
const TWO_PAIRS: Shape = Shape { num_prefill: 2, num_decode: 2 };

/// The decode worker's tokens come behind the first one, which travels on another stream.
const PACE: Duration = Duration::from_millis(10);

async fn answered(shape: Shape, script: Script) -> Trace {
    let (cluster, mut spans) = Cluster::traced(shape, script, &[], 1.0).await;
    let answer = cluster.client.post(PLAIN, &json!({"prompt": "x", "max_tokens": 12})).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["choices"][0]["text"], "abcdefghijkl");
    spans.next().await
}

fn attempts(spans: &[&Span]) -> Vec<f64> {
    spans.iter().map(|span| number(span, "baton.attempt").expect("a number")).collect()
}

#[tokio::test]
async fn a_prompt_computed_again_shows_both_attempts() {
    let (cluster, mut spans) = Cluster::traced(TWO_PAIRS, Script::says("hello"), &[], 1.0).await;
    cluster.prefill[0].set_broken(true);
    // Placed on either of them.
    let mut retried = None;
    for _ in 0..8 {
        let answer = cluster.client.post(PLAIN, &json!({"prompt": "x"})).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let trace = spans.next().await;
        if number(trace.root(), "baton.retries") == Some(1.0) {
            retried = Some(trace);
            break;
        }
    }
    let trace = retried.expect("one of them met the broken worker");
    let (routes, prefills) = (trace.named("route"), trace.named("prefill"));
    assert_eq!((attempts(&routes), attempts(&prefills)), (vec![0.0, 1.0], vec![0.0, 1.0]));
    assert_eq!((prefills[0].failure(), prefills[1].failure()), (Some("lost"), None));
    let decode = trace.one("decode");
    assert_eq!((attempts(&[decode]), decode.failure()), (vec![1.0], None));
    trace.follow(&[trace.one("tokenize"), routes[0], prefills[0], routes[1], prefills[1], decode]);
    assert!(
        routes[1].end() - routes[1].start() >= Duration::from_millis(40),
        "it waited before it tried again"
    );
    assert_eq!(trace.root().failure(), None);
}

#[tokio::test]
async fn an_answer_that_goes_on_elsewhere_shows_where_it_broke() {
    let script = Script { decode_breaks_before: Some(5), pace: PACE, ..Script::says("abcdefghijkl") };
    let trace = answered(TWO_PAIRS, script).await;
    let [routes, prefills, decodes] = ["route", "prefill", "decode"].map(|name| trace.named(name));
    for spans in [&routes, &prefills, &decodes] {
        assert_eq!(attempts(spans), [0.0, 1.0]);
    }
    assert_eq!((decodes[0].failure(), decodes[1].failure()), (Some("lost"), None));
    trace.follow(&[routes[0], prefills[0], decodes[0], routes[1], prefills[1], decodes[1]]);
    assert_eq!(number(trace.root(), "baton.retries"), Some(1.0));
}

#[tokio::test]
async fn kv_that_is_sent_elsewhere_is_computed_once() {
    let shape = Shape { num_prefill: 1, num_decode: 2 };
    for told_by_prefill in [false, true] {
        let receiver_fails = Some(ReceiverFails { told_by_prefill, given_up: false });
        let trace = answered(shape, Script { receiver_fails, ..Script::says("abcdefghijkl") }).await;
        let [routes, reserves, decodes] = ["route", "reserve", "decode"].map(|name| trace.named(name));
        for spans in [&routes, &reserves, &decodes] {
            assert_eq!(attempts(spans), [0.0, 1.0]);
        }
        assert!(decodes[0].failure().is_some());
        assert_eq!((trace.one("prefill").failure(), decodes[1].failure()), (None, None));
        trace.follow(&[trace.one("prefill"), decodes[0], routes[1], reserves[1], decodes[1]]);
    }
}

#[tokio::test]
async fn a_sequence_that_gave_up_its_blocks_goes_on_in_another_attempt() {
    let script = Script { decode_preempts: Some((0, 4)), pace: PACE, ..Script::says("abcdefghijkl") };
    let trace = answered(ONE_PAIR, script).await;
    let [prefills, decodes] = ["prefill", "decode"].map(|name| trace.named(name));
    assert_eq!((prefills.len(), decodes.len()), (2, 2));
    assert_eq!((decodes[0].failure(), decodes[1].failure()), (Some("preempted"), None));
    trace.follow(&[prefills[0], decodes[0], trace.named("route")[1], prefills[1], decodes[1]]);
    assert_eq!(number(trace.root(), "baton.preemptions"), Some(1.0));
    assert_eq!(number(trace.root(), "baton.retries"), Some(0.0));
}

#[tokio::test]
async fn a_sequence_that_goes_on_alone_has_a_route_of_its_own() {
    let script =
        Script { decode_preempts: Some((1, 3)), pace: PACE, ..Script::says_each(&["abcdef", "uvwxyz"]) };
    let (cluster, mut spans) = Cluster::traced(ONE_PAIR, script, &[], 1.0).await;
    let body = json!({"prompt": "x", "n": 2, "max_tokens": 6});
    let answer = cluster.client.post(PLAIN, &body).await.json();
    assert_eq!(
        (&answer["choices"][0]["text"], &answer["choices"][1]["text"]),
        (&json!("abcdef"), &json!("uvwxyz"))
    );
    let trace = spans.next().await;
    let (routes, decodes) = (trace.named("route"), trace.named("decode"));
    assert_eq!((routes.len(), decodes.len()), (2, 2));
    let sequences: Vec<_> = routes.iter().map(|route| number(route, "baton.sequence")).collect();
    assert_eq!(sequences, [None, Some(1.0)]);
    assert!(routes[1].start() > decodes[0].start(), "not before it had to go");
    assert_eq!(number(trace.root(), "baton.preemptions"), Some(1.0));
}
