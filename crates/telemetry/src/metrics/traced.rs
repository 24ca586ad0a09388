//! Histograms that name a trace for what they counted.

use std::fmt;
use std::time::SystemTime;

use prometheus_client::encoding::{EncodeLabelKey, EncodeLabelSet, EncodeLabelValue, LabelSetEncoder};
use prometheus_client::metrics::exemplar::HistogramWithExemplars;

use crate::names;
use crate::trace::TraceContext;

/// Counts into buckets; each bucket remembers the trace of what it counted last. Clones share the same counts.
#[derive(Clone, Debug)]
pub struct TracedHistogram(HistogramWithExemplars<TraceLabel>);

/// Written as text only when it is scraped.
#[derive(Clone, Copy, Debug)]
struct TraceLabel(TraceContext);

impl TracedHistogram {
    pub(super) fn new(buckets: impl Iterator<Item = f64>) -> Self {
        Self(HistogramWithExemplars::new(buckets))
    }

    /// Counts a value.
    pub fn observe(&self, value: f64) {
        self.0.observe(value, None, None);
    }

    /// Counts a value and remembers whose it is, if that trace is sampled and so can be found.
    pub fn observe_traced(&self, value: f64, trace: &TraceContext) {
        if trace.sampled {
            self.0.observe(value, Some(TraceLabel(*trace)), Some(SystemTime::now()));
        } else {
            self.observe(value);
        }
    }

    pub(super) fn metric(&self) -> impl prometheus_client::registry::Metric {
        self.0.clone()
    }
}

impl EncodeLabelSet for TraceLabel {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        let mut label = encoder.encode_label();
        let mut key = label.encode_label_key()?;
        EncodeLabelKey::encode(&names::TRACE_ID, &mut key)?;
        let mut value = key.encode_label_value()?;
        EncodeLabelValue::encode(&self.0.trace_id_hex(), &mut value)?;
        value.finish()
    }
}
