//! A small HTTP client: one connection a request, so that dropping an answer is what a client that hangs up does.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// The longest wait for an answer, or for the next event of a stream.
pub const ANSWER_BOUND: Duration = Duration::from_secs(120);

/// A whole answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Status code.
    pub status: StatusCode,
    /// Headers.
    pub headers: HeaderMap,
    /// Body.
    pub body: Bytes,
}

impl Answer {
    /// The body as JSON.
    ///
    /// # Panics
    /// When it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("no JSON ({error}): {} {}", self.status, self.text()))
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// A header's value; "" when absent.
    pub fn header(&self, name: &str) -> String {
        header(&self.headers, name)
    }

    /// Demands a status, and gives the answer back.
    ///
    /// # Panics
    /// When it is another one.
    pub fn expect(self, status: u16) -> Self {
        assert_eq!(self.status.as_u16(), status, "{}", self.text());
        self
    }
}

fn header(headers: &HeaderMap, name: &str) -> String {
    headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned()).unwrap_or_default()
}

/// What a completion, streamed or not, came to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Completion {
    /// Generated tokens.
    pub token_ids: Vec<u32>,
    /// Generated text.
    pub text: String,
    /// Why it ended.
    pub finish_reason: String,
    /// `usage`, or null.
    pub usage: Value,
    /// How the router placed it: `disaggregated`, `colocated` or `local`.
    pub mode: String,
}

/// Sends one request and reads the whole answer.
///
/// # Errors
/// What failed, as text: the server can't be reached, or hung up.
pub async fn request(
    at: SocketAddr,
    method: &str,
    path: &str,
    body: Option<&Value>,
) -> Result<Answer, String> {
    request_with(at, method, path, body, &[]).await
}

/// As [`request`], with more headers.
///
/// # Errors
/// As [`request`].
pub async fn request_with(
    at: SocketAddr,
    method: &str,
    path: &str,
    body: Option<&Value>,
    headers: &[(&str, &str)],
) -> Result<Answer, String> {
    let whole = async {
        let (response, connection) = open(at, method, path, body, headers).await?;
        let (parts, incoming) = response.into_parts();
        let body = incoming.collect().await.map_err(|error| format!("body: {error}"))?.to_bytes();
        drop(connection);
        Ok(Answer { status: parts.status, headers: parts.headers, body })
    };
    tokio::time::timeout(ANSWER_BOUND, whole)
        .await
        .map_err(|_| format!("no answer within {ANSWER_BOUND:?}"))?
}

/// The task that drives a connection; the connection closes with it.
struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn open(
    at: SocketAddr,
    method: &str,
    path: &str,
    body: Option<&Value>,
    headers: &[(&str, &str)],
) -> Result<(http::Response<Incoming>, Connection), String> {
    let stream = TcpStream::connect(at).await.map_err(|error| format!("connect to {at}: {error}"))?;
    let (mut sender, driver) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| format!("handshake: {error}"))?;
    let connection = Connection(tokio::spawn(async move {
        // How a connection ended shows at its request.
        let _ = driver.await;
    }));
    let mut request = Request::builder().method(method).uri(path).header("host", at.to_string());
    if body.is_some() {
        request = request.header("content-type", "application/json");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let bytes = body.map(|value| Bytes::from(value.to_string())).unwrap_or_default();
    let request = request.body(Full::new(bytes)).map_err(|error| format!("request: {error}"))?;
    let response = sender.send_request(request).await.map_err(|error| format!("send: {error}"))?;
    Ok((response, connection))
}

/// One server-sent event.
#[derive(Debug, Clone)]
pub struct Event {
    /// When it was complete here.
    pub at: Instant,
    /// Its data, without `data: `.
    pub data: String,
}

/// A streamed answer; dropping it closes the connection.
pub struct EventStream {
    /// Status code; the body of an error is read by [`EventStream::collect`] as data.
    pub status: StatusCode,
    /// Headers.
    pub headers: HeaderMap,
    body: Incoming,
    buffer: Vec<u8>,
    ready: VecDeque<Event>,
    _connection: Connection,
}

impl EventStream {
    /// Posts `body` and waits for the answer's head.
    ///
    /// # Errors
    /// As [`request`].
    pub async fn post(at: SocketAddr, path: &str, body: &Value) -> Result<Self, String> {
        Self::post_with(at, path, body, &[]).await
    }

    /// As [`EventStream::post`], with more headers.
    ///
    /// # Errors
    /// As [`request`].
    pub async fn post_with(
        at: SocketAddr,
        path: &str,
        body: &Value,
        headers: &[(&str, &str)],
    ) -> Result<Self, String> {
        let head = tokio::time::timeout(ANSWER_BOUND, open(at, "POST", path, Some(body), headers)).await;
        let (response, connection) = head.map_err(|_| format!("no answer within {ANSWER_BOUND:?}"))??;
        let (parts, body) = response.into_parts();
        let (buffer, ready) = (Vec::new(), VecDeque::new());
        Ok(Self {
            status: parts.status,
            headers: parts.headers,
            body,
            buffer,
            ready,
            _connection: connection,
        })
    }

    /// A header's value; "" when absent.
    pub fn header(&self, name: &str) -> String {
        header(&self.headers, name)
    }

    /// The next event, `[DONE]` included; `None` at the end.
    ///
    /// # Errors
    /// The connection broke, or nothing came within [`ANSWER_BOUND`].
    pub async fn next(&mut self) -> Result<Option<Event>, String> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(Some(event));
            }
            let frame = tokio::time::timeout(ANSWER_BOUND, self.body.frame())
                .await
                .map_err(|_| format!("no event within {ANSWER_BOUND:?}"))?;
            match frame {
                None => return Ok(None),
                Some(Err(error)) => return Err(format!("stream broke: {error}")),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.feed(&data);
                    }
                }
            }
        }
    }

    fn feed(&mut self, data: &[u8]) {
        let at = Instant::now();
        self.buffer.extend_from_slice(data);
        while let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
            let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
            // A cut inside a character would show here as U+FFFD, and the tests look for that.
            let text = String::from_utf8_lossy(&event);
            let data: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
            if !data.is_empty() {
                self.ready.push_back(Event { at, data: data.join("\n") });
            }
        }
    }

    /// Every further event as JSON, `[DONE]` not included, until the stream ends.
    ///
    /// # Errors
    /// As [`EventStream::next`]; a stream that ends without `[DONE]`; an event that is no JSON.
    pub async fn collect(mut self) -> Result<Vec<(Instant, Value)>, String> {
        let mut events = Vec::new();
        let mut done = false;
        while let Some(event) = self.next().await? {
            if event.data == "[DONE]" {
                done = true;
                continue;
            }
            let value =
                serde_json::from_str(&event.data).map_err(|error| format!("{error}: {}", event.data))?;
            events.push((event.at, value));
        }
        if done {
            Ok(events)
        } else {
            Err(format!("the stream ended without [DONE]; last: {:?}", events.last()))
        }
    }

    /// Collects a streamed completion of several choices.
    ///
    /// # Errors
    /// As [`EventStream::completion`].
    pub async fn choices(self, num_choices: usize) -> Result<Vec<Completion>, String> {
        let mode = self.header("x-baton-mode");
        let mut choices = vec![Completion { mode, ..Completion::default() }; num_choices];
        for (_, event) in &self.collect().await? {
            if !event["error"].is_null() {
                return Err(event.to_string());
            }
            Completion::add_choices(&mut choices, event);
        }
        Ok(choices)
    }

    /// Collects a streamed completion.
    ///
    /// # Errors
    /// As [`EventStream::collect`]; an event that reports an error.
    pub async fn completion(self) -> Result<Completion, String> {
        let mode = self.header("x-baton-mode");
        let events = self.collect().await?;
        let mut whole = Completion { mode, ..Completion::default() };
        for (_, event) in &events {
            if !event["error"].is_null() {
                return Err(event.to_string());
            }
            whole.add(event);
        }
        Ok(whole)
    }
}

impl Completion {
    /// From a whole answer's JSON.
    pub fn from_answer(answer: &Answer) -> Self {
        let mut whole = Self { mode: answer.header("x-baton-mode"), ..Self::default() };
        whole.add(&answer.json());
        whole
    }

    /// Every choice of a whole answer with `n` above 1, by index; usage and mode stand on each.
    pub fn choices(answer: &Answer) -> Vec<Self> {
        let value = answer.json();
        let num = value["choices"].as_array().map_or(0, Vec::len);
        let mut choices = vec![Self { mode: answer.header("x-baton-mode"), ..Self::default() }; num];
        Self::add_choices(&mut choices, &value);
        choices
    }

    /// Adds one event of a stream to the choices it names.
    pub fn add_choices(choices: &mut [Self], value: &Value) {
        for choice in value["choices"].as_array().into_iter().flatten() {
            let index = choice["index"].as_u64().and_then(|index| usize::try_from(index).ok());
            if let Some(whole) = index.and_then(|index| choices.get_mut(index)) {
                whole.add_choice(choice);
            }
        }
        if value["usage"].is_object() {
            choices.iter_mut().for_each(|whole| whole.usage = value["usage"].clone());
        }
    }

    /// Adds one event of a stream.
    pub fn add(&mut self, value: &Value) {
        self.add_choice(&value["choices"][0]);
        if value["usage"].is_object() {
            self.usage = value["usage"].clone();
        }
    }

    fn add_choice(&mut self, choice: &Value) {
        let text = [&choice["text"], &choice["delta"]["content"], &choice["message"]["content"]];
        self.text.extend(text.into_iter().filter_map(Value::as_str));
        let ids = choice["token_ids"].as_array().into_iter().flatten();
        self.token_ids.extend(ids.filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()));
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reason = reason.to_owned();
        }
    }
}
