//! Several answers to one prompt.

use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::generate_request::Input;
use baton_proto::v1::inference_client::InferenceClient;
use futures::StreamExt;
use serde_json::{Value, json};

use crate::fake::Script;
use crate::harness::{Cluster, ONE_PAIR, Shape, eventually};

const CHAT: &str = "/v1/chat/completions";
const PLAIN: &str = "/v1/completions";

fn chat(extra: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in extra.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

/// What was streamed of a choice: text, finish reasons, and the place of its last chunk.
fn of(chunks: &[Value], index: usize) -> (String, Vec<String>, usize) {
    let (mut text, mut reasons, mut last) = (String::new(), Vec::new(), 0);
    for (place, chunk) in chunks.iter().enumerate() {
        for choice in chunk["choices"].as_array().expect("choices").iter().filter(|c| c["index"] == index) {
            let content = choice["delta"]["content"].as_str().or_else(|| choice["text"].as_str());
            text.push_str(content.unwrap_or_default());
            reasons.extend(choice["finish_reason"].as_str().map(str::to_owned));
            last = place;
        }
    }
    (text, reasons, last)
}

#[tokio::test]
async fn a_whole_answer_has_every_choice_and_counts_the_prompt_once() {
    let script = Script::says_each(&["one", "two!", "threes"]);
    let cluster = Cluster::start(ONE_PAIR, script, &[]).await;
    let body = chat(json!({"n": 3, "return_token_ids": true}));
    let body = cluster.client.post(CHAT, &body).await.json();
    let choices = body["choices"].as_array().expect("choices");
    assert_eq!(choices.len(), 3);
    for (index, said) in ["one", "two!", "threes"].iter().enumerate() {
        let choice = &choices[index];
        assert_eq!(choice["index"], index);
        assert_eq!(choice["message"], json!({"role": "assistant", "content": said}));
        assert_eq!(choice["finish_reason"], "stop");
        let ids: Vec<u32> = said.bytes().map(u32::from).chain([257]).collect();
        assert_eq!(choice["token_ids"], json!(ids));
    }
    let prompt_tokens = body["usage"]["prompt_tokens"].as_u64().expect("a number");
    assert_eq!(body["usage"]["completion_tokens"], 4 + 5 + 7);
    assert_eq!(body["usage"]["total_tokens"], prompt_tokens + 16);
    assert_eq!(body["baton"]["kv"]["bytes"], 4096, "one transfer");
    let (prefills, decodes) = (cluster.prefill[0].prefills(), cluster.decode[0].decodes());
    assert_eq!((prefills.len(), decodes.len()), (1, 1), "one prompt, one handoff");
    for terms in [prefills[0].terms, decodes[0].terms] {
        let terms = terms.expect("terms");
        assert_eq!((terms.first_sequence, terms.num_sequences, terms.preempted), (0, 3, false));
    }
    let metrics = cluster.client.get("/metrics").await.text();
    for count in ["ttft_seconds_count 1", "itl_seconds_count 13", "tpot_seconds_count 3"] {
        assert!(metrics.contains(count), "{count} is missing in\n{metrics}");
    }
    assert_eq!((cluster.num_ended("disaggregated", "stop"), cluster.num_in_flight()), (1, 0));
    assert!(cluster.decode[0].stops().is_empty());
}

#[tokio::test]
async fn a_streamed_answer_has_every_role_first_and_every_choice_its_own_end() {
    let script = Script { pace: Duration::from_millis(2), ..Script::says_each(&["a", "bcdef", "ghi"]) };
    let cluster = Cluster::start(ONE_PAIR, script, &[]).await;
    let body = chat(json!({"n": 3, "stream": true, "stream_options": {"include_usage": true}}));
    let chunks = cluster.client.post(CHAT, &body).await.chunks();
    for (index, chunk) in chunks.iter().take(3).enumerate() {
        assert_eq!(chunk["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
        assert_eq!(chunk["choices"][0]["index"], index);
    }
    let ends: Vec<usize> = ["a", "bcdef", "ghi"]
        .iter()
        .enumerate()
        .map(|(index, said)| {
            let (text, reasons, last) = of(&chunks, index);
            assert_eq!((text.as_str(), reasons), (*said, vec!["stop".to_owned()]));
            assert_eq!(chunks[last]["choices"][0]["finish_reason"], "stop", "nothing follows its reason");
            last
        })
        .collect();
    assert!(ends[0] < ends[2] && ends[2] < ends[1], "each ends in its own time: {ends:?}");
    let (last, before) = chunks.split_last().expect("chunks");
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(2 + 6 + 4)));
    assert_eq!(last["baton"]["mode"], "disaggregated");
    assert!(before.iter().all(|chunk| chunk["usage"].is_null() && chunk.get("baton").is_none()));
}

#[tokio::test]
async fn one_choice_stops_at_a_stop_string_and_the_others_go_on() {
    let pace = Duration::from_millis(3);
    let texts = ["abcdefghijklmnop", "xxSTOPyyyyyyyyyy"];
    for tokens_per_message in [1, 3] {
        let script = Script { pace, tokens_per_message, ..Script::says_each(&texts) };
        let cluster = Cluster::start(ONE_PAIR, script, &[]).await;
        for stream in [false, true] {
            let body = json!({"prompt": "x", "n": 2, "stop": "STOP", "max_tokens": 16, "stream": stream});
            let answer = cluster.client.post(PLAIN, &body).await;
            let (texts, reasons) = if stream {
                let chunks = answer.chunks();
                let (first, second) = (of(&chunks, 0), of(&chunks, 1));
                ([first.0, second.0], [first.1.concat(), second.1.concat()])
            } else {
                let body = answer.json();
                let field = |index: usize, name: &str| {
                    body["choices"][index][name].as_str().expect("text").to_owned()
                };
                assert_eq!(body["usage"]["completion_tokens"], 16 + 6, "counted up to the stop");
                ([field(0, "text"), field(1, "text")], [field(0, "finish_reason"), field(1, "finish_reason")])
            };
            assert_eq!(texts, ["abcdefghijklmnop", "xx"]);
            assert_eq!(reasons, ["length", "stop"]);
        }
        eventually("the worker was told, of the one", async || cluster.decode[0].stops() == [1, 1]).await;
        cluster.until_no_leg_is_open().await;
        assert_eq!(cluster.num_ended("disaggregated", "length"), 2);
    }
}

#[tokio::test]
async fn a_stop_string_of_the_only_choice_that_runs_cancels_the_leg() {
    let script = Script { pace: Duration::from_millis(2), ..Script::says_each(&["a", "xxSTOPyyyyyyyyyy"]) };
    let cluster = Cluster::start(ONE_PAIR, script, &[]).await;
    let body = json!({"prompt": "x", "n": 2, "stop": "STOP", "max_tokens": 1000});
    let body = cluster.client.post(PLAIN, &body).await.json();
    assert_eq!((&body["choices"][0]["text"], &body["choices"][1]["text"]), (&json!("a"), &json!("xx")));
    cluster.until_no_leg_is_open().await;
}

#[tokio::test]
async fn one_token_of_each_needs_no_decode_worker() {
    let cluster = Cluster::start(ONE_PAIR, Script::says_each(&["abc", "xyz"]), &[]).await;
    let body = cluster.client.post(PLAIN, &json!({"prompt": "x", "n": 2, "max_tokens": 1})).await.json();
    assert_eq!((&body["choices"][0]["text"], &body["choices"][1]["text"]), (&json!("a"), &json!("x")));
    assert_eq!(body["choices"][1]["finish_reason"], "length");
    assert!(cluster.decode[0].decodes().is_empty());
    // All first tokens end their sequences, which nobody could know before.
    let cluster = Cluster::start(ONE_PAIR, Script::says_each(&["", ""]), &[]).await;
    let body = cluster.client.post(PLAIN, &json!({"prompt": "x", "n": 2})).await.json();
    assert_eq!(
        (&body["choices"][1]["finish_reason"], &body["usage"]["completion_tokens"]),
        (&json!("stop"), &json!(2))
    );
    cluster.until_no_leg_is_open().await;
}

#[tokio::test]
async fn without_prefill_workers_a_group_is_computed_where_it_runs() {
    let shape = Shape { num_prefill: 0, num_decode: 1 };
    let cluster = Cluster::start(shape, Script::says_each(&["one", "two"]), &["--colocated"]).await;
    let body = cluster.client.post(CHAT, &chat(json!({"n": 2, "temperature": 0}))).await.json();
    assert_eq!(body["choices"][1]["message"]["content"], "two");
    let decode = &cluster.decode[0].decodes()[0];
    assert!(decode.local && decode.terms.expect("terms").num_sequences == 2);
}

#[tokio::test]
async fn the_limit_is_an_option_and_named_when_it_is_passed() {
    for (options, most) in [(&[][..], 8), (&["--max-n", "3"][..], 3)] {
        let cluster = Cluster::start(ONE_PAIR, Script::says("x"), options).await;
        assert_eq!(cluster.client.post(PLAIN, &json!({"prompt": "a", "n": most})).await.status, 200);
        let legs = cluster.num_legs();
        for stream in [false, true] {
            for n in [json!(0), json!(most + 1), json!(1e19 as u64)] {
                let body = json!({"prompt": "a", "n": n, "stream": stream});
                let answer = cluster.client.post(PLAIN, &body).await;
                assert_eq!((answer.status, &answer.error()["param"]), (400, &json!("n")));
                let message = answer.error()["message"].to_string();
                let limit = if n == json!(0) { "at least 1".to_owned() } else { format!("at most {most}") };
                assert!(message.contains(&limit), "{message}");
            }
        }
        assert_eq!(cluster.num_legs(), legs);
    }
}

#[tokio::test]
async fn grpc_says_which_answer_a_message_belongs_to() {
    let script = Script { pace: Duration::from_millis(1), ..Script::says_each(&["one", "twenty"]) };
    let cluster = Cluster::start(ONE_PAIR, script, &[]).await;
    let mut client =
        InferenceClient::connect(format!("http://{}", cluster.router.grpc)).await.expect("connected");
    let ask = |n: Option<u32>, priority: i32| v1::GenerateRequest {
        input: Some(Input::Prompt("abc".to_owned())),
        n,
        priority,
        no_prefix_cache: true,
        ..v1::GenerateRequest::default()
    };
    let response = client.generate(ask(Some(2), -7)).await.expect("accepted");
    let messages: Vec<_> = response.into_inner().map(|message| message.expect("no error")).collect().await;
    for (index, said) in [(0, "one"), (1, "twenty")] {
        let own = || messages.iter().filter(|message| message.index == index);
        assert_eq!(own().map(|message| message.text.as_str()).collect::<String>(), said);
        let reasons: Vec<_> = own().map(|message| message.finish_reason.as_str()).collect();
        assert_eq!(reasons.concat(), "stop", "one reason, with its last message");
        assert_eq!(reasons.last(), Some(&"stop"));
    }
    let (last, before) = messages.split_last().expect("messages");
    assert!(before.iter().all(|message| message.usage.is_none()));
    assert_eq!(last.usage, Some(v1::Usage { prompt_tokens: 3, completion_tokens: 4 + 7, cached_tokens: 0 }));
    let terms = cluster.prefill[0].prefills()[0].terms.expect("terms");
    assert_eq!((terms.priority, terms.no_prefix_cache, terms.num_sequences), (-7, true, 2));
    for (request, says) in
        [(ask(Some(0), 0), "n must be"), (ask(Some(9), 0), "at most 8"), (ask(None, 101), "from -100 to 100")]
    {
        let status = client.generate(request).await.expect_err("refused");
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert!(status.message().contains(says), "{status}");
    }
}
