//! Where the bytes of a frame that came in lie.

use std::ops::Range;

use baton_proto::v1;

use crate::checksum;
use crate::device::DeviceView;
use crate::shared::SharedView;
use crate::view::View;

/// The payload of one message.
pub(crate) enum Payload<'a> {
    /// In the message.
    Here(&'a [u8]),
    /// In shared memory, from `offset` on. The range lies within.
    Shared { view: &'a SharedView, offset: usize, len: usize },
    /// In the source's device memory, which this process can't look at. The range lies within.
    Device { view: &'a DeviceView, offset: usize, len: usize },
}

impl<'a> Payload<'a> {
    /// Finds it; `view` is the memory that the stream's first message named.
    ///
    /// # Errors
    /// What the source did wrong.
    pub(crate) fn find(message: &'a v1::KvFrame, view: Option<&'a View>) -> Result<Self, String> {
        if message.shared_len == 0 {
            return Ok(Self::Here(&message.payload));
        }
        let Some(view) = view else {
            return Err("it has a shared payload, and the stream has no shared memory".into());
        };
        if !message.payload.is_empty() {
            return Err("it has a payload and a shared payload".into());
        }
        let len = message.shared_len as usize;
        match usize::try_from(message.shared_offset) {
            Ok(offset) if view.holds(offset, len) => Ok(match view {
                View::Shared(view) => Self::Shared { view, offset, len },
                View::Device(view) => Self::Device { view, offset, len },
            }),
            _ => Err(format!(
                "{len} bytes at {} of shared memory are out of range: it has {}",
                message.shared_offset,
                view.len()
            )),
        }
    }

    pub(crate) const fn len(&self) -> usize {
        match self {
            Self::Here(bytes) => bytes.len(),
            Self::Shared { len, .. } | Self::Device { len, .. } => *len,
        }
    }

    /// Copies the bytes from `start` on into `out`, past the caches, and appends them to `crc`; `None` beyond the payload's end. What another
    /// process can change is looked at once: what is summed is what is written.
    pub(crate) fn copy(&self, start: usize, out: &mut [u8], crc: u32) -> Option<u32> {
        let end = start.checked_add(out.len())?;
        match self {
            Self::Here(bytes) => {
                let part = bytes.get(start..end)?;
                // SAFETY: the part has as many bytes as `out`.
                Some(unsafe { checksum::append_copied(crc, part.as_ptr(), out, true) })
            }
            Self::Shared { view, offset, len } if end <= *len => view.read_far(offset + start, out, crc),
            Self::Shared { .. } | Self::Device { .. } => None,
        }
    }

    /// Bytes `part` of the payload; `None` beyond its end. Shared bytes are copied into `scratch` first: what another process can change
    /// is looked at once.
    pub(crate) fn part<'b>(&'b self, part: Range<usize>, scratch: &'b mut Vec<u8>) -> Option<&'b [u8]> {
        match self {
            Self::Here(bytes) => bytes.get(part),
            Self::Shared { view, offset, len } => {
                if part.end > *len {
                    return None;
                }
                scratch.resize(part.len(), 0);
                view.read(offset + part.start, scratch).then_some(scratch.as_slice())
            }
            Self::Device { .. } => None,
        }
    }
}
