//! What comes over HTTP that is no good request, and the paths beside the two that generate.

use bytes::Bytes;
use http::Method;
use serde_json::json;

use crate::fake::Script;
use crate::harness::{Cluster, ONE_PAIR};

const CHAT: &str = "/v1/chat/completions";
const JSON: (&str, &str) = ("content-type", "application/json");

#[tokio::test]
async fn bodies_that_are_no_json_are_refused_with_the_position() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("x"), &[]).await;
    let deep = format!("{{\"messages\": {}{}}}", "[".repeat(5000), "]".repeat(5000));
    let bodies: [(&[u8], &str); 9] = [
        (b"", "line 1 column 0"),
        (b"{", "line 1 column 1"),
        (b"{\"messages\": [}", "line 1 column 15"),
        (b"[1]", "a JSON object"),
        (b"\"text\"", "a JSON object"),
        (b"{\"a\": 1, \"a\": 2}", "stands twice"),
        (b"{\"user\": \"\xff\xfe\"}", "line 1 column"),
        (b"{\"n\": NaN}", "line 1 column"),
        (deep.as_bytes(), "recursion limit"),
    ];
    for (body, says) in bodies {
        let answer = cluster.client.send(Method::POST, CHAT, &[JSON], Bytes::copy_from_slice(body)).await;
        let error = answer.error();
        assert_eq!(answer.status, 400, "{error}");
        assert!(error["message"].as_str().is_some_and(|message| message.contains(says)), "{error}");
        assert!(error["param"].is_null());
    }
    assert_eq!(cluster.num_legs(), 0);
}

#[tokio::test]
async fn the_content_type_must_be_json() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("x"), &[]).await;
    let body = Bytes::from(json!({"messages": [{"role": "user", "content": "x"}]}).to_string());
    for (headers, status) in [
        (&[][..], 415),
        (&[("content-type", "text/plain")][..], 415),
        (&[("content-type", "application/x-www-form-urlencoded")][..], 415),
        (&[("content-type", "application/json; charset=latin1")][..], 415),
        (&[JSON, ("content-encoding", "gzip")][..], 415),
        (&[("content-type", "application/json; charset=utf-8")][..], 200),
        (&[("content-type", "Application/JSON")][..], 200),
    ] {
        let answer = cluster.client.send(Method::POST, CHAT, headers, body.clone()).await;
        assert_eq!(answer.status, status, "{headers:?}: {}", answer.text());
    }
}

#[tokio::test]
async fn a_body_may_be_as_large_as_the_limit_and_no_larger() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("x"), &["--max-body-bytes", "2000"]).await;
    let padded = |bytes: usize| {
        let frame = json!({"messages": [{"role": "user", "content": ""}]}).to_string().len();
        json!({"messages": [{"role": "user", "content": "x".repeat(bytes - frame)}]}).to_string()
    };
    let fits = cluster.client.send(Method::POST, CHAT, &[JSON], Bytes::from(padded(2000))).await;
    assert_eq!(fits.status, 200);
    let large = cluster.client.send(Method::POST, CHAT, &[JSON], Bytes::from(padded(2001))).await;
    assert_eq!((large.status, &large.error()["code"]), (413, &json!("body_too_large")));
    assert!(large.error()["message"].to_string().contains("2000"));
    // Without a declared length it is counted while it arrives.
    let body = padded(2001);
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    let chunked = format!("{head}{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    let answer = raw(cluster.router.http, chunked.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
}

async fn raw(address: std::net::SocketAddr, bytes: &[u8]) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut connection = tokio::net::TcpStream::connect(address).await.expect("connected");
    connection.write_all(bytes).await.expect("written");
    let mut head = [0; 64];
    let num = connection.read(&mut head).await.expect("read");
    String::from_utf8_lossy(&head[..num]).into_owned()
}

#[tokio::test]
async fn other_paths_and_methods_are_json_errors_too() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("x"), &[]).await;
    let answer = cluster.client.get("/v1/embeddings").await;
    assert_eq!((answer.status, &answer.error()["code"]), (404, &json!("not_found")));
    let answer = cluster.client.get(CHAT).await;
    assert_eq!((answer.status, answer.header("allow")), (405, Some("POST")));
    let answer = cluster.client.post("/v1/models", &json!({})).await;
    assert_eq!((answer.status, answer.header("allow")), (405, Some("GET")));
}

#[tokio::test]
async fn models_health_and_metrics_say_what_is_served() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("x"), &["--served-model-name", "mine"]).await;
    let models = cluster.client.get("/v1/models").await.json();
    assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!("mine")));
    let health = cluster.client.get("/health").await.json();
    assert_eq!(
        (&health["status"], &health["model"], &health["missing"]),
        (&json!("ok"), &json!("mine"), &json!([]))
    );
    for (accept, kind, ends) in [
        ("application/openmetrics-text;version=1.0.0", "application/openmetrics-text", "# EOF\n"),
        ("*/*", "text/plain; version=0.0.4", "\n"),
    ] {
        let headers = [("accept", accept)];
        let metrics = cluster.client.send(Method::GET, "/metrics", &headers, Bytes::new()).await;
        assert!(metrics.header("content-type").is_some_and(|found| found.starts_with(kind)), "{accept}");
        assert!(metrics.text().contains("{role=\"decode\",state=\"ready\"} 1"));
        assert!(metrics.text().ends_with(ends));
    }
    let body = json!({"model": "yours", "messages": [{"role": "user", "content": "x"}]});
    let error = cluster.client.post(CHAT, &body).await.error();
    assert_eq!(error["code"], "model_not_found");
    assert!(error["message"].to_string().contains("'mine'"), "{error}");
}
