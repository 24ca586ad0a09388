//! A small HTTP client.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

pub(crate) struct Client {
    pool: Pool<HttpConnector, Full<Bytes>>,
    address: SocketAddr,
}

/// A whole response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("UTF-8")
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().expect("ASCII"))
    }

    /// The error object, which every refusal must have whole.
    pub(crate) fn error(&self) -> Value {
        let error = self.json()["error"].clone();
        let fields: Vec<_> = error.as_object().expect("an error object").keys().cloned().collect();
        assert_eq!(fields.len(), 4, "{error}");
        assert!(!error["message"].as_str().expect("a message").contains('\n'), "{error}");
        error
    }

    /// The data of every event of a streamed answer.
    pub(crate) fn events(&self) -> Vec<String> {
        events(&self.text())
    }

    /// Every chunk of a streamed answer that ended well.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{}", self.text());
        events.iter().map(|event| serde_json::from_str(event).expect("JSON")).collect()
    }
}

pub(crate) fn events(text: &str) -> Vec<String> {
    text.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect()
}

/// A test that waits for nothing fails instead of hanging.
async fn bounded<T>(wait: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(30), wait).await.expect("something within 30 s")
}

/// A response whose body is read bit by bit.
pub(crate) struct Stream {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    body: Incoming,
    pub(crate) seen: String,
}

impl Stream {
    /// Reads until the text seen so far contains `part`; false when the body ends before.
    pub(crate) async fn until(&mut self, part: &str) -> bool {
        while !self.seen.contains(part) {
            match bounded(self.body.frame()).await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.seen.push_str(std::str::from_utf8(&data).expect("UTF-8"));
                    }
                }
                Some(Err(_)) | None => return false,
            }
        }
        true
    }

    /// Reads to the end.
    pub(crate) async fn rest(mut self) -> String {
        self.until("\u{0}").await;
        self.seen
    }
}

impl Client {
    pub(crate) fn new(address: SocketAddr) -> Self {
        Self { pool: Pool::builder(TokioExecutor::new()).build_http(), address }
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(Method::GET, path, &[], Bytes::new()).await
    }

    /// Posts JSON.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_with(path, &[], body).await
    }

    pub(crate) async fn post_with(&self, path: &str, headers: &[(&str, &str)], body: &Value) -> Answer {
        let mut all = vec![("content-type", "application/json")];
        all.extend_from_slice(headers);
        self.send(Method::POST, path, &all, Bytes::from(body.to_string())).await
    }

    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> Answer {
        let Stream { status, headers, body, .. } = self.open(method, path, headers, body).await;
        let body = bounded(body.collect()).await.expect("a whole body").to_bytes().to_vec();
        Answer { status, headers, body }
    }

    /// Posts JSON and returns when the head of the response is there.
    pub(crate) async fn stream(&self, path: &str, headers: &[(&str, &str)], body: &Value) -> Stream {
        let mut all = vec![("content-type", "application/json")];
        all.extend_from_slice(headers);
        self.open(Method::POST, path, &all, Bytes::from(body.to_string())).await
    }

    async fn open(&self, method: Method, path: &str, headers: &[(&str, &str)], body: Bytes) -> Stream {
        let mut request = Request::builder().method(method).uri(format!("http://{}{path}", self.address));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body)).expect("a request");
        let response = bounded(self.pool.request(request)).await.expect("a response");
        let (head, body) = response.into_parts();
        Stream { status: head.status.as_u16(), headers: head.headers, body, seen: String::new() }
    }
}
