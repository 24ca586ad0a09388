//! Client-chosen request ids: labels, of which no two live requests may have the same.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::api_error::ApiError;

/// Bytes of a label, at most.
const MAX_LABEL_BYTES: usize = 128;

/// The labels of live requests; as many as there are requests.
#[derive(Default)]
pub(crate) struct Labels(Mutex<HashSet<String>>);

/// Keeps a label taken; dropping it frees the label.
pub(crate) struct LabelGuard {
    labels: Arc<Labels>,
    label: String,
}

impl Labels {
    fn live(&self) -> MutexGuard<'_, HashSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a label.
    ///
    /// # Errors
    /// [`ApiError::Duplicate`] while another request has it.
    pub(crate) fn take(self: &Arc<Self>, label: &str) -> Result<LabelGuard, ApiError> {
        if !self.live().insert(label.to_owned()) {
            return Err(ApiError::Duplicate { label: label.to_owned() });
        }
        Ok(LabelGuard { labels: Arc::clone(self), label: label.to_owned() })
    }
}

impl Drop for LabelGuard {
    fn drop(&mut self) {
        self.labels.live().remove(&self.label);
    }
}

/// Checks what a client sent as X-Request-Id.
///
/// # Errors
/// [`ApiError::Invalid`] naming the limit.
pub(crate) fn check(value: &[u8]) -> Result<String, ApiError> {
    let printable = |byte: &u8| (0x21..=0x7e).contains(byte);
    match std::str::from_utf8(value) {
        Ok(text) if (1..=MAX_LABEL_BYTES).contains(&text.len()) && value.iter().all(printable) => {
            Ok(text.to_owned())
        }
        _ => {
            let message = format!(
                "X-Request-Id must be 1 to {MAX_LABEL_BYTES} printable ASCII characters without spaces"
            );
            Err(ApiError::invalid("X-Request-Id", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_taken_until_its_request_ends() {
        let labels = Arc::new(Labels::default());
        let first = labels.take("a").expect("free");
        assert!(matches!(labels.take("a"), Err(ApiError::Duplicate { .. })));
        let _other = labels.take("b").expect("free");
        drop(first);
        let _again = labels.take("a").expect("free again");
    }

    #[test]
    fn labels_are_short_and_printable() {
        assert_eq!(check(b"run-7/42").expect("fine"), "run-7/42");
        for bad in [&b""[..], b"a b", b"a\nb", "\u{e9}".as_bytes(), &[b'a'; 129], &[0xff]] {
            assert!(check(bad).is_err(), "{bad:?}");
        }
    }
}
