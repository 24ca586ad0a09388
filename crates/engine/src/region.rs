//! One large allocation from the system, in memory before it is first used.

use std::ptr::NonNull;

/// Huge pages are this large.
const HUGE: usize = 2 << 20;
/// The smallest size of an ordinary one.
const ORDINARY: usize = 4096;

/// Zeroed memory, aligned to 2 MiB, with huge pages where they can be had, and touched once so that no
/// step ever waits for a fault.
///
/// Who may read or write which bytes is the holder's affair: a `Region` hands out its address.
pub(crate) struct Region {
    map: NonNull<u8>,
    map_len: usize,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a region is memory and nothing else; access to it is unsafe and argued for where it happens.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Takes `len` bytes.
    ///
    /// # Errors
    /// The system's, if it has no such address space.
    pub(crate) fn new(len: usize) -> std::io::Result<Region> {
        let map_len = len
            .max(1)
            .checked_next_multiple_of(HUGE)
            .and_then(|n| n.checked_add(HUGE))
            .ok_or(std::io::ErrorKind::OutOfMemory)?;
        // SAFETY: an anonymous mapping at an address of the system's choice touches no memory of ours.
        let map = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                map_len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANON,
                -1,
                0,
            )
        };
        if map == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        let map = NonNull::new(map.cast::<u8>()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        let skip = map.as_ptr().align_offset(HUGE);
        // SAFETY: the mapping is one huge page longer than what is used, so an aligned start lies within it.
        let base = unsafe { map.add(skip) };
        let region = Region { map, map_len, base, len };
        region.advise();
        region.touch();
        Ok(region)
    }

    fn advise(&self) {
        #[cfg(target_os = "linux")]
        // SAFETY: the range is ours; advice changes no content, and a refusal changes nothing.
        unsafe {
            libc::madvise(self.base.as_ptr().cast(), self.len.next_multiple_of(HUGE), libc::MADV_HUGEPAGE);
        }
    }

    fn touch(&self) {
        for offset in (0..self.len).step_by(ORDINARY) {
            // SAFETY: within the mapping; nobody else has its address yet.
            unsafe { self.base.add(offset).write_volatile(0) }
        }
    }

    /// First byte; aligned to 2 MiB.
    pub(crate) const fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// `len` bytes from `offset`, which must lie within.
    ///
    /// # Safety
    /// Nobody writes these bytes while the slice lives.
    pub(crate) unsafe fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        assert!(offset <= self.len && len <= self.len - offset, "{len} bytes from {offset} of {}", self.len);
        // SAFETY: the mapping covers the range, zeroed by the system or written since.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset), len) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, whole; whoever used its address borrowed the region.
        unsafe {
            libc::munmap(self.map.as_ptr().cast(), self.map_len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_aligned_zeroed_and_writable_to_its_last_byte() {
        for len in [1, 4095, HUGE, HUGE + 1] {
            let region = Region::new(len).unwrap();
            assert_eq!(region.base().align_offset(HUGE), 0);
            // SAFETY: one thread, no slice alive during the write.
            unsafe {
                assert!(region.bytes(0, len).iter().all(|&b| b == 0));
                region.base().add(len - 1).write(7);
                assert_eq!(region.bytes(len - 1, 1)[0], 7);
            }
            assert_eq!(region.len(), len);
        }
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        assert!(Region::new(usize::MAX).is_err());
        assert!(Region::new(1 << 60).is_err());
    }
}
