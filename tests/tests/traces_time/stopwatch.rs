//! A client with a clock at its socket: a thread of its own that sends one request and blocks until bytes come, so that nothing of the test
//! stands between a byte and its time.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use baton_tests::client::ANSWER_BOUND;
use baton_tests::spans::Caller;
use baton_worker::Turns;
use serde_json::Value;
use tokio::sync::oneshot;

/// A router that has nothing else to do has taken a connection by then; a client that keeps its connections does not wait for that.
const ACCEPTED_AFTER: Duration = Duration::from_millis(5);

/// When the events of a streamed completion were there, in milliseconds after its request was sent. The connection stood before.
#[derive(Debug)]
pub(crate) struct Times(Vec<f64>);

impl Times {
    /// The first token.
    pub(crate) fn ttft_ms(&self) -> f64 {
        self.0[0]
    }

    /// From the first token, which P sends, to the second, which D sends.
    pub(crate) fn gap_ms(&self) -> f64 {
        self.0[1] - self.0[0]
    }
}

/// Sends a request that asks for a stream of two tokens or more.
///
/// # Panics
/// When it fails.
pub(crate) async fn time(at: SocketAddr, body: &Value, caller: &Caller) -> Times {
    let body = body.to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {at}\r\ncontent-type: application/json\r\ntraceparent: {}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        caller.header(),
        body.len()
    );
    let (done, times) = oneshot::channel();
    // Not one of the runtime's threads: it may have to be in the namespace that this one is in.
    std::thread::spawn(move || done.send(exchange(at, &(head + &body))));
    times.await.expect("the thread lives").unwrap_or_else(|error| panic!("{at}: {error}"))
}

fn exchange(at: SocketAddr, request: &str) -> Result<Times, String> {
    let text = |error: std::io::Error| error.to_string();
    // Its clock is not to wait for a core.
    let _ = Turns::LastShort.take();
    let mut socket = TcpStream::connect(at).map_err(text)?;
    socket.set_nodelay(true).map_err(text)?;
    socket.set_read_timeout(Some(ANSWER_BOUND)).map_err(text)?;
    let (mut answer, mut times) = (Vec::new(), Vec::new());
    let mut buffer = vec![0; 1 << 16];
    std::thread::sleep(ACCEPTED_AFTER);
    let start = Instant::now();
    socket.write_all(request.as_bytes()).map_err(text)?;
    loop {
        let num = socket.read(&mut buffer).map_err(text)?;
        let now = start.elapsed().as_secs_f64() * 1e3;
        if num == 0 {
            break;
        }
        answer.extend_from_slice(&buffer[..num]);
        times.resize(num_events(&answer), now);
    }
    let answer = String::from_utf8_lossy(&answer);
    if times.len() < 2 || !answer.starts_with("HTTP/1.1 200") || !answer.contains("data: [DONE]") {
        return Err(format!("no stream of two tokens: {answer}"));
    }
    Ok(Times(times))
}

/// Whole events so far. What frames them on the wire never has two line feeds in a row.
fn num_events(answer: &[u8]) -> usize {
    answer.windows(2).filter(|pair| pair == b"\n\n").count()
}

#[test]
fn an_event_counts_once_it_is_whole() {
    let answer = b"HTTP/1.1 200 OK\r\n\r\n9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\n";
    let counts: Vec<usize> = (0..=answer.len()).map(|end| num_events(&answer[..end])).collect();
    let first = answer.windows(2).position(|pair| pair == b"\n\n").expect("an event");
    assert_eq!((counts[first + 1], counts[first + 2], counts[answer.len()]), (0, 1, 2));
}
