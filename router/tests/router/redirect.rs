//! A handoff fails with the prompt computed: what the prefill worker holds goes to another decode worker.

use baton_proto::v1;
use serde_json::json;

use crate::fake::{ReceiverFails, Script};
use crate::harness::{Cluster, ONE_PAIR, Shape};

const PLAIN: &str = "/v1/completions";
const TEXT: &str = "abcdefghijkl";

async fn answered(shape: Shape, receiver_fails: ReceiverFails) -> Cluster {
    let script = Script { receiver_fails: Some(receiver_fails), ..Script::says(TEXT) };
    let cluster = Cluster::start(shape, script, &[]).await;
    cluster.until_all_ready().await;
    let answer = cluster.client.post(PLAIN, &json!({"prompt": "x", "max_tokens": 12})).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["choices"][0]["text"], TEXT);
    cluster.until_no_leg_is_open().await;
    cluster
}

#[tokio::test]
async fn held_kv_is_redirected_whoever_notices_first() {
    for told_by_prefill in [false, true] {
        let shape = Shape { num_prefill: 1, num_decode: 2 };
        let cluster = answered(shape, ReceiverFails { told_by_prefill, given_up: false }).await;
        assert_eq!(cluster.prefill[0].prefills().len(), 1, "computed once");
        let redirects = cluster.prefill[0].redirects();
        let [redirect] = &redirects[..] else { panic!("{redirects:?}") };
        let second =
            |nth: &usize| cluster.decode[*nth].decodes().first().is_some_and(|leg| attempt(leg) == 1);
        let nth = (0..2).find(second).expect("a second attempt");
        let (lost, other) = (&cluster.decode[1 - nth], &cluster.decode[nth]);
        let decodes = other.decodes();
        let [leg] = &decodes[..] else { panic!("{decodes:?}") };
        assert_eq!(leg.key, redirect.new_key);
        assert_eq!(redirect.key, cluster.prefill[0].prefills()[0].key);
        let destination = redirect.destination.clone().expect("a destination");
        assert_eq!((destination.address, destination.instance_id), (other.address(), other.instance()));
        assert_eq!((&leg.prompt, leg.num_generated), (&cluster.prefill[0].prefills()[0].prompt, 0));
        // Where the prefill worker says so the first leg may be gone before it arrived.
        let first = lost.decodes();
        assert!(told_by_prefill || !first.is_empty());
        assert!(first.iter().all(|first| (&first.prompt, &first.stopping) == (&leg.prompt, &leg.stopping)));
        let metrics = cluster.router.metrics();
        assert_eq!((metrics.redirects.get(), metrics.retries.get(), metrics.resumes.get()), (1, 1, 0));
    }
}

fn attempt(leg: &v1::DecodeRequest) -> u32 {
    leg.key.as_ref().expect("a key").attempt
}

#[tokio::test]
async fn what_was_given_up_is_computed_again() {
    let shape = Shape { num_prefill: 1, num_decode: 2 };
    let cluster = answered(shape, ReceiverFails { told_by_prefill: true, given_up: true }).await;
    let prefills = cluster.prefill[0].prefills();
    assert_eq!((prefills.len(), prefills[1].num_generated), (2, 1), "behind the first token");
    assert_eq!(cluster.router.metrics().retries.get(), 1);
}

#[tokio::test]
async fn the_worker_that_failed_is_no_place_to_redirect_to() {
    let cluster = answered(ONE_PAIR, ReceiverFails { told_by_prefill: true, given_up: false }).await;
    assert_eq!(cluster.prefill[0].redirects(), []);
    assert_eq!(cluster.prefill[0].prefills().len(), 2);
    assert_eq!(cluster.router.metrics().redirects.get(), 0);
}
