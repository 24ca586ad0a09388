//! Messages that a state machine had no use for.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::Counter;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Where {
    r#where: &'static str,
}

/// Counts messages that came late, twice, or for an attempt that is over; clones share the same counts.
#[derive(Clone, Debug, Default)]
pub struct LateMessages(Family<Where, Counter>);

impl LateMessages {
    pub(super) fn register(&self, registry: &mut Registry) {
        let help = "Messages that came late, twice or for an attempt that is over";
        registry.register("baton_late_messages", help, self.0.clone());
    }

    /// Counts `num` more, by who had no use for them: `router`, `source`, `destination` or `receiver` (KV frames).
    pub fn add(&self, place: &'static str, num: u64) {
        self.0.get_or_create(&Where { r#where: place }).inc_by(num);
    }

    /// How many there were.
    pub fn num(&self, place: &'static str) -> u64 {
        self.0.get_or_create(&Where { r#where: place }).get()
    }
}
