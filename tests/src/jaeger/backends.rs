//! Who is told of spans in a test: a collector inside it, always, and behind that a Jaeger, where one can be built.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::time::Duration;

use super::Jaeger;
use crate::eventually;
use crate::otlp::Collector;
use crate::spans::{Search, Trace};

/// Processes hand over spans once a second or so, and the collector hands them on.
const BOUND: Duration = Duration::from_secs(30);

/// The collector, and the Jaeger behind it.
pub struct Backends {
    /// Where processes send spans.
    pub collector: Collector,
    jaeger: Option<Jaeger>,
}

impl Backends {
    /// Starts both on loopback, with Jaeger's files in `dir`.
    ///
    /// # Panics
    /// When one does not start.
    pub async fn start(dir: &Path) -> Self {
        Self::start_at(IpAddr::V4(Ipv4Addr::LOCALHOST), dir).await
    }

    /// As [`Backends::start`], with the collector at another address of this machine.
    ///
    /// # Panics
    /// As [`Backends::start`].
    pub async fn start_at(host: IpAddr, dir: &Path) -> Self {
        let jaeger = Jaeger::start(dir).await;
        let collector = Collector::start_with(host, jaeger.as_ref().map(Jaeger::endpoint)).await;
        Self { collector, jaeger }
    }

    /// What each of them finds, once that is what `wanted` accepts; the collector's first.
    ///
    /// # Panics
    /// When one of them does not find it within 30 s.
    pub async fn find(&self, search: Search<'_>, wanted: impl Fn(&[Trace]) -> bool) -> Vec<Vec<Trace>> {
        let what = format!("the collector finds {search:?}");
        let in_collector =
            eventually(&what, BOUND, async || judge(search.among(self.collector.spans()), &wanted)).await;
        let mut found = vec![in_collector];
        if let Some(jaeger) = &self.jaeger {
            let what = format!("Jaeger finds {search:?}");
            let in_jaeger =
                eventually(&what, BOUND, async || judge(jaeger.search(search).await?, &wanted)).await;
            found.push(in_jaeger);
        }
        found
    }
}

fn judge(found: Vec<Trace>, wanted: impl Fn(&[Trace]) -> bool) -> Result<Vec<Trace>, String> {
    if wanted(&found) {
        return Ok(found);
    }
    Err(found.iter().map(Trace::to_string).collect::<Vec<_>>().join("\n"))
}
