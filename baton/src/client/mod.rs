//! Speaking HTTP to a running cluster: one request, one answer or one stream of events.

mod chunk;
mod sse;

pub(crate) use chunk::{Chunk, KvReport, Usage};
pub(crate) use sse::EventStream;

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client as Pool, Error as PoolError};
use hyper_util::rt::TokioExecutor;

use crate::exit::Failure;

/// Longest answer that is read whole, in bytes.
const MAX_ANSWER_BYTES: usize = 16 << 20;
/// How long a connection attempt may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a request got no good answer, named by what the caller does next.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ClientError {
    /// Nobody listens: start a cluster, or correct the address.
    #[error("no cluster answers at {url} ({reason}): start one with `baton up`, or pass --url")]
    NoCluster {
        /// The address tried.
        url: String,
        /// The system's reason.
        reason: String,
    },
    /// The router said no; its reason says what to change, or to come back later.
    #[error("{status}: {message}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// The router's own words.
        message: String,
    },
    /// The request broke off after it was accepted; trying again may help.
    #[error("the answer broke off: {0}")]
    Broken(String),
}

impl ClientError {
    /// A short name for counting errors by kind.
    pub(crate) fn kind(&self) -> String {
        match self {
            Self::NoCluster { .. } => "connect".to_owned(),
            Self::Refused { status, .. } => format!("http_{status}"),
            Self::Broken(_) => "broken".to_owned(),
        }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        Self::Unexpected(error.to_string())
    }
}

/// A cluster's HTTP face.
#[derive(Clone)]
pub(crate) struct Client {
    base: String,
    pool: Pool<HttpConnector, Full<Bytes>>,
}

impl Client {
    /// For a base URL like `http://127.0.0.1:8080`.
    ///
    /// # Errors
    /// [`Failure::Usage`] when it is not an `http://host:port` URL.
    pub(crate) fn new(url: &str) -> Result<Self, Failure> {
        let base = url.trim_end_matches('/');
        let good =
            base.parse::<Uri>().is_ok_and(|uri| uri.scheme_str() == Some("http") && uri.host().is_some());
        if !good {
            return Err(Failure::Usage(format!(
                "--url {url}: expected something like http://127.0.0.1:8080"
            )));
        }
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let pool = Pool::builder(TokioExecutor::new()).build(connector);
        Ok(Self { base: base.to_owned(), pool })
    }

    /// Posts a JSON body and gives the stream of the answer's events.
    ///
    /// # Errors
    /// [`ClientError::NoCluster`], [`ClientError::Refused`], [`ClientError::Broken`].
    pub(crate) async fn stream(
        &self,
        path: &str,
        body: &serde_json::Value,
    ) -> Result<EventStream, ClientError> {
        let response = self.send(Method::POST, path, Bytes::from(body.to_string())).await?;
        Ok(EventStream::new(response.into_body()))
    }

    /// Gets a JSON document.
    ///
    /// # Errors
    /// As [`stream`](Self::stream).
    pub(crate) async fn get(&self, path: &str) -> Result<serde_json::Value, ClientError> {
        let response = self.send(Method::GET, path, Bytes::new()).await?;
        let bytes = read_whole(response).await?;
        serde_json::from_slice(&bytes).map_err(|error| ClientError::Broken(error.to_string()))
    }

    /// Gets a text.
    ///
    /// # Errors
    /// As [`stream`](Self::stream).
    pub(crate) async fn text(&self, path: &str) -> Result<String, ClientError> {
        let response = self.send(Method::GET, path, Bytes::new()).await?;
        let bytes = read_whole(response).await?;
        String::from_utf8(bytes.into()).map_err(|error| ClientError::Broken(error.to_string()))
    }

    /// Whether a path is answered with a success, whatever the body.
    pub(crate) async fn says_yes(&self, path: &str) -> bool {
        self.send(Method::GET, path, Bytes::new()).await.is_ok()
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Response<Incoming>, ClientError> {
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| ClientError::Broken(error.to_string()))?;
        let response = self.pool.request(request).await.map_err(|error| self.not_sent(&error))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let bytes = read_whole(response).await?;
        Err(ClientError::Refused { status: status.as_u16(), message: error_message(status, &bytes) })
    }

    fn not_sent(&self, error: &PoolError) -> ClientError {
        let mut innermost: &dyn std::error::Error = error;
        while let Some(source) = innermost.source() {
            innermost = source;
        }
        let reason = innermost.to_string();
        if error.is_connect() {
            ClientError::NoCluster { url: self.base.clone(), reason }
        } else {
            ClientError::Broken(reason)
        }
    }
}

async fn read_whole(response: Response<Incoming>) -> Result<Bytes, ClientError> {
    let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await;
    body.map(|collected| collected.to_bytes()).map_err(|error| ClientError::Broken(error.to_string()))
}

/// The `error.message` of an OpenAI-shaped refusal, else the start of the body, else the status itself.
fn error_message(status: StatusCode, body: &[u8]) -> String {
    let parsed: Option<Chunk> = serde_json::from_slice(body).ok();
    if let Some(error) = parsed.and_then(|chunk| chunk.error) {
        return error.message;
    }
    let text = String::from_utf8_lossy(body);
    let text: String = text.trim().chars().take(200).collect();
    if text.is_empty() { status.to_string() } else { text.replace('\n', " ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_port_without_a_cluster_says_how_to_start_one() {
        // Bound and dropped: nobody listens there now.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let client = Client::new(&format!("http://127.0.0.1:{port}/")).unwrap();
        let error = client.get("/health").await.unwrap_err();
        assert_eq!(error.kind(), "connect");
        let line = error.to_string();
        assert!(line.contains("baton up") && line.contains(&port.to_string()), "{line}");
    }

    #[test]
    fn only_plain_http_urls_are_taken() {
        for url in ["127.0.0.1:8080", "https://host", "http://", "ftp://host", ""] {
            assert!(Client::new(url).is_err_and(|failure| failure.code() == 2), "{url}");
        }
    }

    #[test]
    fn a_refusal_shows_the_routers_own_words() {
        let body = br#"{"error": {"message": "no such model", "type": "x"}}"#;
        assert_eq!(error_message(StatusCode::NOT_FOUND, body), "no such model");
        assert_eq!(error_message(StatusCode::NOT_FOUND, b"gone\n"), "gone");
        assert_eq!(error_message(StatusCode::NOT_FOUND, b""), "404 Not Found");
    }
}
