//! A small HTTP server on this machine that a test scripts, request by request.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// One request as it came.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) path: String,
    /// Names in lower case.
    pub(crate) headers: Vec<(String, String)>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    /// Where a `Range: bytes=N-` starts.
    pub(crate) fn range_start(&self) -> Option<usize> {
        self.header("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }
}

/// What to answer.
#[derive(Default)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    /// Close the connection after so many bytes of the body, whatever the length announced.
    pub(crate) cut_after: Option<usize>,
    /// Announce no length: the body ends with the connection.
    pub(crate) unsized_body: bool,
}

impl Reply {
    pub(crate) fn new(status: u16, body: impl Into<Vec<u8>>) -> Reply {
        Reply { status, body: body.into(), ..Reply::default() }
    }

    pub(crate) fn with(mut self, name: &'static str, value: impl Into<String>) -> Reply {
        self.headers.push((name, value.into()));
        self
    }

    pub(crate) fn cut(mut self, after: usize) -> Reply {
        self.cut_after = Some(after);
        self
    }
}

/// The server; its thread ends with the test process.
pub(crate) struct Server {
    pub(crate) endpoint: String,
    seen: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    pub(crate) fn start(answer: impl Fn(&Request, usize) -> Reply + Send + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
        let endpoint = format!("http://{}", listener.local_addr().expect("it is bound"));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&seen);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let Some(request) = read(&stream) else { continue };
                let mut log = log.lock().expect("no holder panics");
                let nth = log.iter().filter(|earlier: &&Request| earlier.path == request.path).count();
                log.push(request.clone());
                drop(log);
                send(stream, answer(&request, nth));
            }
        });
        Server { endpoint, seen }
    }

    /// Requests so far for paths that contain `part`.
    pub(crate) fn seen(&self, part: &str) -> Vec<Request> {
        let seen = self.seen.lock().expect("no holder panics");
        seen.iter().filter(|request| request.path.contains(part)).cloned().collect()
    }
}

fn read(stream: &TcpStream) -> Option<Request> {
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    let mut lines = BufReader::new(stream).lines();
    let path = lines.next()?.ok()?.split(' ').nth(1)?.to_owned();
    let headers = lines
        .map_while(Result::ok)
        .take_while(|line| !line.is_empty())
        .filter_map(|line| {
            line.split_once(':').map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        })
        .collect();
    Some(Request { path, headers })
}

fn send(mut stream: TcpStream, reply: Reply) {
    let mut head = format!("HTTP/1.1 {} X\r\nconnection: close\r\n", reply.status);
    if !reply.unsized_body {
        head.push_str(&format!("content-length: {}\r\n", reply.body.len()));
    }
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    let len = reply.cut_after.unwrap_or(reply.body.len()).min(reply.body.len());
    // A client that hangs up early is none of the server's business.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&reply.body[..len]));
}
