//! Gauges and counters whose values are read at scrape.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

/// One value with its labels, in the labels' order.
pub(super) struct Sample {
    pub(super) labels: Vec<(&'static str, &'static str)>,
    pub(super) value: Number,
}

/// A value: whole where it can be, so that counts read as counts.
pub(super) enum Number {
    Whole(u64),
    Real(f64),
}

impl Sample {
    pub(super) fn new(labels: Vec<(&'static str, &'static str)>, num: u64) -> Self {
        Self { labels, value: Number::Whole(num) }
    }

    pub(super) fn real(value: f64) -> Self {
        Self { labels: Vec::new(), value: Number::Real(value) }
    }
}

type Source = Box<dyn Fn() -> Vec<Sample> + Send + Sync>;

/// One family; absent from a scrape until a source is set.
pub(super) struct Scraped {
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    source: SourceSlot,
}

/// Sets what a registered [`Scraped`] reads.
#[derive(Clone, Default)]
pub(super) struct SourceSlot(Arc<Mutex<Option<Source>>>);

impl SourceSlot {
    pub(super) fn set(&self, source: impl Fn() -> Vec<Sample> + Send + Sync + 'static) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(source));
    }

    fn read(&self) -> Option<Vec<Sample>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|source| source())
    }
}

impl Scraped {
    pub(super) fn gauge(name: &'static str, help: &'static str) -> (Self, SourceSlot) {
        Self::new(name, help, MetricType::Gauge)
    }

    pub(super) fn counter(name: &'static str, help: &'static str) -> (Self, SourceSlot) {
        Self::new(name, help, MetricType::Counter)
    }

    fn new(name: &'static str, help: &'static str, kind: MetricType) -> (Self, SourceSlot) {
        let source = SourceSlot::default();
        (Self { name, help, kind, source: source.clone() }, source)
    }

    fn encode_one(&self, value: &Number, encoder: MetricEncoder<'_>) -> fmt::Result {
        match (self.kind, value) {
            (MetricType::Counter, Number::Whole(num)) => ConstCounter::new(*num).encode(encoder),
            (MetricType::Counter, Number::Real(value)) => ConstCounter::new(*value).encode(encoder),
            (_, Number::Whole(num)) => {
                ConstGauge::new(i64::try_from(*num).unwrap_or(i64::MAX)).encode(encoder)
            }
            (_, Number::Real(value)) => ConstGauge::new(*value).encode(encoder),
        }
    }
}

impl fmt::Debug for Scraped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Collector for Scraped {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(samples) = self.source.read() else { return Ok(()) };
        let mut family = encoder.encode_descriptor(self.name, self.help, None, self.kind)?;
        for sample in samples {
            if sample.labels.is_empty() {
                return self.encode_one(&sample.value, family);
            }
            self.encode_one(&sample.value, family.encode_family(&sample.labels)?)?;
        }
        Ok(())
    }
}
