//! The memory that a stream's first message names, as its destination sees it.

use crate::device::DeviceView;
use crate::shared::SharedView;

/// Of either kind.
pub(crate) enum View {
    /// A file that both processes map.
    Shared(SharedView),
    /// A ring of the source's device.
    Device(DeviceView),
}

impl View {
    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Shared(view) => view.len(),
            Self::Device(view) => view.len(),
        }
    }

    /// Whether `len` bytes from `offset` on lie within.
    pub(crate) fn holds(&self, offset: usize, len: usize) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len())
    }
}
