//! How fast KV moves from this worker to others, as it was measured.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_handoff::InstanceId;
use baton_proto::v1;

use crate::steps::DecayingRatio;

/// Workers whose link is remembered, at most; the one that was used least recently is forgotten first.
pub const MAX_LINKS: usize = 64;

/// Bytes a second by the worker they went to. Every transfer weighs by its bytes and time, and less the older it is.
#[derive(Debug, Default)]
pub struct LinkRates {
    links: Mutex<Links>,
}

#[derive(Debug, Default)]
struct Links {
    by_instance: BTreeMap<InstanceId, Link>,
    num_transfers: u64,
}

#[derive(Debug, Default)]
struct Link {
    rate: DecayingRatio,
    /// Number of its latest transfer.
    used: u64,
}

impl LinkRates {
    /// A transfer to `instance` ended: `bytes` arrived, and for `outstanding` some were under way. Without bytes nothing was measured.
    pub fn observe(&self, instance: InstanceId, bytes: u64, outstanding: Duration) {
        if bytes == 0 || outstanding.is_zero() {
            return;
        }
        let mut links = self.links();
        links.num_transfers += 1;
        let used = links.num_transfers;
        let link = links.by_instance.entry(instance).or_default();
        link.rate.add(bytes as f64, outstanding.as_secs_f64());
        link.used = used;
        if links.by_instance.len() > MAX_LINKS
            && let Some(oldest) =
                links.by_instance.iter().min_by_key(|(_, link)| link.used).map(|(id, _)| *id)
        {
            links.by_instance.remove(&oldest);
        }
    }

    pub(crate) fn to_wire(&self) -> Vec<v1::LinkRate> {
        let encode = |(instance, link): (&InstanceId, &Link)| v1::LinkRate {
            decode_instance_id: instance.0.to_vec().into(),
            bytes_per_s: link.rate.get(),
        };
        self.links().by_instance.iter().map(encode).collect()
    }

    fn links(&self) -> MutexGuard<'_, Links> {
        // Every change is whole before anything can panic.
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance(n: u8) -> InstanceId {
        InstanceId([n; 16])
    }

    #[test]
    fn each_link_has_its_own_rate() {
        let links = LinkRates::default();
        links.observe(instance(1), 1000, Duration::from_millis(10));
        links.observe(instance(2), 500, Duration::from_secs(1));
        links.observe(instance(1), 0, Duration::from_secs(9));
        links.observe(instance(3), 5, Duration::ZERO);
        let rates: Vec<_> =
            links.to_wire().iter().map(|link| (link.decode_instance_id[0], link.bytes_per_s)).collect();
        assert_eq!(rates.len(), 2);
        assert!((rates[0].1 - 100_000.0).abs() < 1e-6 && (rates[1].1 - 500.0).abs() < 1e-6, "{rates:?}");
    }

    #[test]
    fn what_was_used_least_recently_is_forgotten() {
        let links = LinkRates::default();
        for n in 0..MAX_LINKS as u8 {
            links.observe(instance(n), 1, Duration::from_secs(1));
        }
        links.observe(instance(0), 1, Duration::from_secs(1));
        links.observe(instance(200), 1, Duration::from_secs(1));
        let known: Vec<u8> = links.to_wire().iter().map(|link| link.decode_instance_id[0]).collect();
        assert_eq!(known.len(), MAX_LINKS);
        assert!(known.contains(&0) && !known.contains(&1) && known.contains(&200));
    }
}
