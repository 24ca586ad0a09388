//! Fetching one file over HTTP so that an interruption costs nothing that was already here.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ureq::config::RedirectAuthHeaders;
use ureq::http::{HeaderMap, Response, StatusCode, header};
use ureq::tls::{RootCerts, TlsConfig, TlsProvider};
use ureq::{Agent, Body};

use crate::cache::{create_parent, file_name, publish, with_suffix};
use crate::{ModelError, Progress, digest};

/// Attempts in a row that bring no new byte before the fetch is given up; waits double from [`FIRST_WAIT`].
const MAX_FRUITLESS: u32 = 5;
const FIRST_WAIT: Duration = Duration::from_millis(250);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// A read that brings nothing for so long ends the attempt; the next one resumes.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// A client that trusts what the system trusts, keeps no token across hosts and bounds every wait.
pub(crate) fn client() -> Agent {
    let tls = TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .root_certs(RootCerts::PlatformVerifier)
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .build();
    Agent::config_builder()
        .tls_config(tls)
        .http_status_as_error(false)
        .redirect_auth_headers(RedirectAuthHeaders::SameHost)
        .user_agent(concat!("baton/", env!("CARGO_PKG_VERSION")))
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .timeout_recv_response(Some(RESPONSE_TIMEOUT))
        .timeout_per_read(Some(READ_TIMEOUT))
        .build()
        .new_agent()
}

/// What to fetch and where to.
pub(crate) struct Fetch<'a> {
    pub(crate) agent: &'a Agent,
    pub(crate) url: &'a str,
    pub(crate) token: Option<&'a str>,
    pub(crate) target: &'a Path,
    /// Size of the whole file, where known beforehand.
    pub(crate) bytes: Option<u64>,
    /// SHA-256 in lower-case hexadecimal, where known beforehand.
    pub(crate) sha256: Option<&'a str>,
    pub(crate) progress: &'a dyn Progress,
}

/// Why an attempt ended without the whole file.
enum Stopped {
    /// Worth another attempt.
    Again(String),
    Fatal(ModelError),
}

impl From<ModelError> for Stopped {
    fn from(error: ModelError) -> Stopped {
        Stopped::Fatal(error)
    }
}

impl Fetch<'_> {
    /// Fetches into `<target>.part`, resuming what lies there, checks size and checksum, and renames. The caller
    /// holds the target's lock.
    pub(crate) fn run(&self) -> Result<(), ModelError> {
        create_parent(self.target)?;
        self.progress.start(&file_name(self.target), self.bytes);
        let result = self.attempts();
        self.progress.finish();
        result?;
        self.verify()
    }

    fn part(&self) -> PathBuf {
        with_suffix(self.target, ".part")
    }

    /// The entity tag that the part belongs to.
    fn tag_path(&self) -> PathBuf {
        with_suffix(self.target, ".part.etag")
    }

    fn attempts(&self) -> Result<(), ModelError> {
        let mut num_fruitless = 0;
        loop {
            let before = self.part_bytes();
            let reason = match self.attempt() {
                Ok(()) => return Ok(()),
                Err(Stopped::Fatal(error)) => return Err(error),
                Err(Stopped::Again(reason)) => reason,
            };
            num_fruitless = if self.part_bytes() > before { 0 } else { num_fruitless + 1 };
            if num_fruitless == MAX_FRUITLESS {
                return Err(ModelError::download(self.url, reason));
            }
            std::thread::sleep(FIRST_WAIT * 2u32.pow(num_fruitless));
        }
    }

    fn part_bytes(&self) -> u64 {
        std::fs::metadata(self.part()).map_or(0, |metadata| metadata.len())
    }

    /// Bytes to resume from and the tag to resume with. A part whose tag is unknown is resumed only if a checksum
    /// will tell whether its two halves belong together.
    fn resume_point(&self) -> (u64, Option<String>) {
        let have = self.part_bytes();
        let tag = std::fs::read_to_string(self.tag_path()).ok().filter(|tag| !tag.is_empty());
        let usable = tag.is_some() || self.sha256.is_some();
        if have > 0 && usable && self.bytes.is_none_or(|bytes| have <= bytes) {
            (have, tag)
        } else {
            (0, None)
        }
    }

    fn attempt(&self) -> Result<(), Stopped> {
        let (have, tag) = self.resume_point();
        if have > 0 && self.bytes == Some(have) {
            return Ok(());
        }
        let mut request = self.agent.get(self.url);
        if let Some(token) = self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        if have > 0 {
            request = request.header(header::RANGE, format!("bytes={have}-"));
            if let Some(tag) = &tag {
                request = request.header(header::IF_RANGE, tag);
            }
        }
        let mut response = request.call().map_err(|error| Stopped::Again(error.to_string()))?;
        let (start, total) = self.judge(&response, have)?;
        if start == 0 {
            self.remember_tag(response.headers())?;
        }
        self.receive(&mut response, start, total)
    }

    /// From the answer's head: the offset its body starts at, and the whole file's size if it says so.
    fn judge(&self, response: &Response<Body>, have: u64) -> Result<(u64, Option<u64>), Stopped> {
        match response.status() {
            StatusCode::OK => Ok((0, response.body().content_length())),
            StatusCode::PARTIAL_CONTENT => match content_range(response.headers()) {
                Some((start, total)) if start == have => Ok((start, total)),
                _ => {
                    self.discard()?;
                    Err(Stopped::Again("the server sent another range than was asked for".to_owned()))
                }
            },
            StatusCode::RANGE_NOT_SATISFIABLE => {
                self.discard()?;
                Err(Stopped::Again("the file on the server has changed".to_owned()))
            }
            status => Err(refusal(self.url, status, self.token.is_some())),
        }
    }

    fn remember_tag(&self, headers: &HeaderMap) -> Result<(), ModelError> {
        let path = self.tag_path();
        // Only a strong tag promises equal bytes.
        match headers.get(header::ETAG).and_then(|tag| tag.to_str().ok()).filter(|tag| tag.starts_with('"')) {
            Some(tag) => std::fs::write(&path, tag).map_err(ModelError::io("write", &path)),
            None => remove_if_there(&path),
        }
    }

    fn receive(&self, response: &mut Response<Body>, start: u64, total: Option<u64>) -> Result<(), Stopped> {
        if let (Some(expected), Some(total)) = (self.bytes, total)
            && expected != total
        {
            let reason = format!("the server offers {total} bytes, expected {expected}");
            return Err(ModelError::download(self.url, reason).into());
        }
        let ends_visibly = total.is_some() || response.headers().contains_key(header::TRANSFER_ENCODING);
        if !ends_visibly && self.bytes.is_none() && self.sha256.is_none() {
            // Such a body ends with the connection: half of it would look like all of it.
            return Err(
                ModelError::download(self.url, "the server does not say how large the file is").into()
            );
        }
        let part = self.part();
        let mut file = OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(start == 0)
            .open(&part)
            .map_err(ModelError::io("create", &part))?;
        file.seek(SeekFrom::Start(start)).map_err(ModelError::io("write", &part))?;
        let mut done = start;
        let mut reader = response.body_mut().as_reader();
        let mut buffer = vec![0; 1 << 17];
        loop {
            let len = reader.read(&mut buffer).map_err(|error| Stopped::Again(error.to_string()))?;
            if len == 0 {
                break;
            }
            write(&mut file, &part, buffer.get(..len).unwrap_or_default())?;
            done += len as u64;
            self.progress.advance_to(done);
        }
        match self.bytes.or(total) {
            Some(total) if done < total => {
                Err(Stopped::Again(format!("the connection ended after {done} of {total} bytes")))
            }
            Some(total) if done > total => {
                self.discard()?;
                Err(Stopped::Again(format!("the server sent {done} bytes of {total}")))
            }
            _ => Ok(()),
        }
    }

    fn discard(&self) -> Result<(), ModelError> {
        remove_if_there(&self.part())?;
        remove_if_there(&self.tag_path())
    }

    fn verify(&self) -> Result<(), ModelError> {
        let part = self.part();
        if let Some(expected) = self.sha256 {
            let found = digest::hex(&digest::sha256_of_file(&part)?);
            if found != expected {
                self.discard()?;
                let reason =
                    format!("fetched bytes have SHA-256 {found}, expected {expected}; they were discarded");
                return Err(ModelError::corrupt(self.target, reason));
            }
        }
        publish(&part, self.target)?;
        remove_if_there(&self.tag_path())
    }
}

/// What an answer that is neither content nor a redirect means.
fn refusal(url: &str, status: StatusCode, has_token: bool) -> Stopped {
    match status {
        StatusCode::NOT_FOUND => Stopped::Fatal(ModelError::NotFound { path: url.into() }),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            let hint = if has_token {
                "the token in HF_TOKEN has no access"
            } else {
                "set HF_TOKEN if it is private or gated"
            };
            Stopped::Fatal(ModelError::download(url, format!("the server answered {status}: {hint}")))
        }
        StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => {
            Stopped::Again(format!("the server answered {status}"))
        }
        status if status.is_server_error() => Stopped::Again(format!("the server answered {status}")),
        status => Stopped::Fatal(ModelError::download(url, format!("the server answered {status}"))),
    }
}

/// GETs a small document; `limit_bytes` bounds its size.
pub(crate) fn get_document(
    agent: &Agent,
    url: &str,
    token: Option<&str>,
    limit_bytes: u64,
) -> Result<Vec<u8>, ModelError> {
    let mut num_fruitless = 0;
    loop {
        let reason = match try_get(agent, url, token, limit_bytes) {
            Ok(document) => return Ok(document),
            Err(Stopped::Fatal(error)) => return Err(error),
            Err(Stopped::Again(reason)) => reason,
        };
        num_fruitless += 1;
        if num_fruitless == MAX_FRUITLESS {
            return Err(ModelError::download(url, reason));
        }
        std::thread::sleep(FIRST_WAIT * 2u32.pow(num_fruitless));
    }
}

fn try_get(agent: &Agent, url: &str, token: Option<&str>, limit_bytes: u64) -> Result<Vec<u8>, Stopped> {
    let mut request = agent.get(url);
    if let Some(token) = token {
        request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
    }
    let mut response = request.call().map_err(|error| Stopped::Again(error.to_string()))?;
    match response.status() {
        StatusCode::OK => {}
        status => return Err(refusal(url, status, token.is_some())),
    }
    let body = response.body_mut().with_config().limit(limit_bytes);
    body.read_to_vec().map_err(|error| Stopped::Again(error.to_string()))
}

/// Parses `bytes START-END/TOTAL`, where the total may be `*`.
fn content_range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let text = headers.get(header::CONTENT_RANGE)?.to_str().ok()?;
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (start, _) = range.split_once('-')?;
    Some((start.trim().parse().ok()?, total.trim().parse().ok()))
}

fn write(file: &mut File, path: &Path, bytes: &[u8]) -> Result<(), ModelError> {
    file.write_all(bytes).map_err(ModelError::io("write", path))
}

fn remove_if_there(path: &Path) -> Result<(), ModelError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(ModelError::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}
