//! `baton chat`: one question to a running cluster, its answer as it comes, and what it took.

use std::io::Write;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::client::{Client, KvReport, Usage};
use crate::exit::Failure;

/// Options of `baton chat`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ChatOptions {
    /// What to say
    #[arg(value_name = "TEXT")]
    message: String,

    /// Where the cluster's HTTP face is
    #[arg(long, env = "BATON_URL", value_name = "URL", default_value = "http://127.0.0.1:8080")]
    url: String,

    /// System prompt [default: the model's own]
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,

    /// Tokens of the answer, at most
    #[arg(long, value_name = "TOKENS", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,

    /// Sampling temperature, 0 (greedy) to 2
    #[arg(long, value_name = "T", default_value_t = 0.7)]
    temperature: f64,

    /// Seed of the sampling, for the same answer again [default: drawn by the router]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

/// Asks, shows the answer on standard output and the account on standard error.
///
/// # Errors
/// [`Failure::Usage`] for a bad URL, [`Failure::Unexpected`] when no cluster answers or the answer breaks off.
pub(crate) async fn run(options: ChatOptions) -> Result<(), Failure> {
    let client = Client::new(&options.url)?;
    let account = ask(&client, &options, &mut std::io::stdout()).await?;
    eprintln!("{}", account.line());
    Ok(())
}

/// The request's body.
fn body(options: &ChatOptions) -> serde_json::Value {
    let mut messages = Vec::new();
    if let Some(system) = &options.system {
        messages.push(json!({"role": "system", "content": system}));
    }
    messages.push(json!({"role": "user", "content": options.message}));
    let mut body = json!({
        "messages": messages,
        "stream": true,
        "stream_options": {"include_usage": true},
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
    });
    if let (Some(seed), Some(fields)) = (options.seed, body.as_object_mut()) {
        fields.insert("seed".to_owned(), json!(seed));
    }
    body
}

async fn ask(client: &Client, options: &ChatOptions, out: &mut impl Write) -> Result<Account, Failure> {
    let start = Instant::now();
    let mut events = client.stream("/v1/chat/completions", &body(options)).await?;
    let mut account = Account::default();
    let mut show = |text: &str| {
        let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        written.map_err(|error| Failure::Unexpected(format!("can't write the answer: {error}")))
    };
    while let Some(chunk) = events.next().await? {
        if !chunk.text().is_empty() {
            account.first.get_or_insert_with(|| start.elapsed());
            account.last = start.elapsed();
            show(chunk.text())?;
        }
        account.usage = chunk.usage.or(account.usage);
        if let Some(report) = chunk.baton {
            account.mode = report.mode;
            account.router_ttft_ms = report.ttft_ms;
            account.kv = report.kv;
        }
    }
    show("\n")?;
    Ok(account)
}

/// What one answer took, by this side's clock where the router says nothing.
#[derive(Debug, Default)]
struct Account {
    first: Option<Duration>,
    last: Duration,
    usage: Option<Usage>,
    mode: String,
    router_ttft_ms: Option<f64>,
    kv: Option<KvReport>,
}

impl Account {
    /// `TTFT 41 ms · 120.5 tok/s (64 tokens) · KV 1.1 MiB, transfer 12.3 ms, exposed 0.4 ms`.
    fn line(&self) -> String {
        let mut parts = Vec::new();
        let measured = self.first.map(|first| first.as_secs_f64() * 1e3);
        if let Some(ttft_ms) = self.router_ttft_ms.or(measured) {
            parts.push(format!("TTFT {ttft_ms:.0} ms"));
        }
        let tokens = self.usage.map_or(0, |usage| usage.completion_tokens);
        let decoding = self.last.saturating_sub(self.first.unwrap_or_default()).as_secs_f64();
        if tokens > 1 && decoding > 0.0 {
            // The first token starts the clock, so that one less came while it ran.
            let rate = (tokens - 1) as f64 / decoding;
            parts.push(format!("{rate:.1} tok/s ({tokens} tokens)"));
        } else {
            parts.push(format!("{tokens} tokens"));
        }
        match self.kv {
            Some(kv) => parts.push(format!(
                "KV {}, transfer {:.1} ms, exposed {:.1} ms",
                bytes(kv.bytes),
                kv.total_ms,
                kv.exposed_ms
            )),
            None if self.mode.is_empty() => parts.push("no KV transfer".to_owned()),
            None => parts.push(format!("no KV transfer ({})", self.mode)),
        }
        parts.join(" · ")
    }
}

fn bytes(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..0x10_0000 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        _ => format!("{:.1} MiB", bytes as f64 / (1024.0 * 1024.0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_account_is_one_line_with_its_units() {
        let account = Account {
            first: Some(Duration::from_millis(100)),
            last: Duration::from_millis(1100),
            usage: Some(Usage { prompt_tokens: 5, completion_tokens: 51 }),
            mode: "disaggregated".to_owned(),
            router_ttft_ms: Some(41.2),
            kv: Some(KvReport { bytes: 3 << 20, total_ms: 12.34, exposed_ms: 0.4 }),
        };
        let line = account.line();
        assert_eq!(
            line,
            "TTFT 41 ms · 50.0 tok/s (51 tokens) · KV 3.0 MiB, transfer 12.3 ms, exposed 0.4 ms"
        );
        let local = Account { mode: "local".to_owned(), ..Account::default() };
        assert_eq!(local.line(), "0 tokens · no KV transfer (local)");
    }

    #[test]
    fn a_seed_is_sent_only_when_given() {
        use clap::Parser;
        #[derive(Parser)]
        struct Command {
            #[command(flatten)]
            chat: ChatOptions,
        }
        let of = |line: &[&str]| body(&Command::parse_from(line).chat);
        let plain = of(&["chat", "hello"]);
        assert!(plain.get("seed").is_none());
        assert_eq!(plain["messages"].as_array().unwrap().len(), 1);
        let full = of(&["chat", "hello", "--seed", "7", "--system", "be brief"]);
        assert_eq!(full["seed"], 7);
        assert_eq!(full["messages"][0]["role"], "system");
    }
}
