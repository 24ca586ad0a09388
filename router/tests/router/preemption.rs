//! Sequences that a decode worker gives up, and groups that break apart.

use std::time::Duration;

use baton_proto::v1;
use serde_json::{Value, json};

use crate::fake::{FakeWorker, Script};
use crate::harness::{Cluster, ONE_PAIR, Shape};

const PLAIN: &str = "/v1/completions";

fn text(chunks: &[Value], index: usize) -> String {
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().expect("choices"));
    choices.filter(|choice| choice["index"] == index).filter_map(|choice| choice["text"].as_str()).collect()
}

fn group(request: &v1::PrefillRequest) -> (u32, u32) {
    let key = request.key.as_ref().expect("a key");
    (key.group, key.attempt)
}

#[tokio::test]
async fn a_preempted_sequence_is_resumed_without_a_gap() {
    let script = Script { decode_preempts: Some((0, 5)), ..Script::says("abcdefghijkl") };
    let cluster = Cluster::start(ONE_PAIR, script, &[]).await;
    let body = json!({"prompt": "x", "stream": true, "priority": 3, "max_tokens": 12});
    let chunks = cluster.client.post(PLAIN, &body).await.chunks();
    assert_eq!(text(&chunks, 0), "abcdefghijkl");
    assert_eq!(chunks.last().expect("chunks")["baton"]["kv"]["bytes"], 2 * 4096, "both transfers");
    let prefills = cluster.prefill[0].prefills();
    assert_eq!(prefills.iter().map(group).collect::<Vec<_>>(), [(0, 0), (0, 1)]);
    let again = &prefills[1];
    assert_eq!(again.num_generated, 5);
    assert_eq!(again.prompt, b"xabcde".map(u32::from));
    assert_eq!(again.stopping.as_ref().expect("stopping").max_new_tokens, 7);
    let terms = |request: &v1::PrefillRequest| request.terms.expect("terms");
    assert!(!terms(&prefills[0]).preempted && terms(again).preempted);
    assert!(terms(again).age_ms >= terms(&prefills[0]).age_ms);
    assert_eq!(terms(again).priority, 3);
    assert!(cluster.decode[0].decodes()[1].terms.expect("terms").preempted, "both legs know");
    let metrics = cluster.router.metrics();
    assert_eq!((metrics.preempted_requests.get(), metrics.resumes.get(), metrics.retries.get()), (1, 1, 0));
    cluster.until_no_leg_is_open().await;
}

#[tokio::test]
async fn one_of_several_sequences_is_preempted_and_the_others_do_not_notice() {
    let pace = Duration::from_millis(2);
    let texts = ["abcdefghijkl", "ABCDEFGHIJKL"];
    let script = Script { decode_preempts: Some((1, 5)), pace, ..Script::says_each(&texts) };
    let cluster = Cluster::start(ONE_PAIR, script, &[]).await;
    let body = json!({"prompt": "x", "stream": true, "n": 2, "max_tokens": 12});
    let chunks = cluster.client.post(PLAIN, &body).await.chunks();
    assert_eq!([text(&chunks, 0), text(&chunks, 1)], texts);
    let prefills = cluster.prefill[0].prefills();
    assert_eq!(prefills.iter().map(group).collect::<Vec<_>>(), [(0, 0), (2, 0)]);
    let (again, terms) = (&prefills[1], prefills[1].terms.expect("terms"));
    assert_eq!((terms.first_sequence, terms.num_sequences, terms.preempted), (1, 1, true));
    assert_eq!((again.num_generated, &again.prompt), (5, &b"xABCDE".map(u32::from).to_vec()));
    cluster.until_no_leg_is_open().await;
    assert_eq!(cluster.router.metrics().preempted_requests.get(), 1);
}

#[tokio::test]
async fn a_group_whose_worker_is_lost_goes_on_as_one_group_a_sequence() {
    let shape = Shape { num_prefill: 1, num_decode: 2 };
    let pace = Duration::from_millis(5);
    let texts = ["abcdefghijkl", "ABCDEFGHIJKL", "0"];
    let script = Script { decode_breaks_before: Some(6), pace, ..Script::says_each(&texts) };
    let cluster = Cluster::start(shape, script, &[]).await;
    cluster.until_all_ready().await;
    let body = json!({"prompt": "x", "stream": true, "n": 3, "max_tokens": 12});
    let chunks = cluster.client.post(PLAIN, &body).await.chunks();
    assert_eq!([text(&chunks, 0), text(&chunks, 1), text(&chunks, 2)], texts);
    let prefills = cluster.prefill[0].prefills();
    let mut groups: Vec<_> = prefills.iter().map(group).collect();
    groups.sort_unstable();
    assert_eq!(groups, [(0, 0), (1, 0), (2, 0)], "the sequence that had ended is not resumed");
    let metrics = cluster.router.metrics();
    assert_eq!((metrics.resumes.get(), metrics.preempted_requests.get()), (2, 0));
    let lost = cluster.decode.iter().position(|worker| {
        worker.decodes().iter().any(|request| request.key.as_ref().expect("a key").group == 0)
    });
    let others = &cluster.decode[1 - lost.expect("one had it")];
    assert_eq!(FakeWorker::decodes(others).len(), 2, "both went to the other worker");
    cluster.until_no_leg_is_open().await;
}
