//! Gauges whose values are read at scrape.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;

/// One value with its labels, in the labels' order.
pub(super) struct Sample {
    pub(super) labels: Vec<(&'static str, &'static str)>,
    pub(super) value: i64,
}

impl Sample {
    pub(super) fn new(labels: Vec<(&'static str, &'static str)>, num: u64) -> Self {
        Self { labels, value: i64::try_from(num).unwrap_or(i64::MAX) }
    }
}

type Source = Box<dyn Fn() -> Vec<Sample> + Send + Sync>;

/// One gauge family; absent from a scrape until a source is set.
pub(super) struct ScrapedGauge {
    name: &'static str,
    help: &'static str,
    source: SourceSlot,
}

/// Sets what a registered [`ScrapedGauge`] reads.
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

impl ScrapedGauge {
    pub(super) fn new(name: &'static str, help: &'static str) -> (Self, SourceSlot) {
        let source = SourceSlot::default();
        (Self { name, help, source: source.clone() }, source)
    }
}

impl fmt::Debug for ScrapedGauge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Collector for ScrapedGauge {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(samples) = self.source.read() else { return Ok(()) };
        let mut family = encoder.encode_descriptor(self.name, self.help, None, MetricType::Gauge)?;
        for sample in samples {
            let gauge = ConstGauge::new(sample.value);
            if sample.labels.is_empty() {
                return gauge.encode(family);
            }
            gauge.encode(family.encode_family(&sample.labels)?)?;
        }
        Ok(())
    }
}
