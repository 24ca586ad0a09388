//! Memory that two processes of one host map: the source makes it and writes, the destination opens it and can only read.
//!
//! It is a memfd, reached as `/proc/<pid>/fd/<n>`: no name in a file system is left behind, however a process ends. It is sealed
//! against shrinking, so that a mapping of it never loses the memory beneath (a read there would be a SIGBUS), and against
//! new writable mappings, so that nobody but its maker writes.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::ptr::NonNull;

use crate::checksum;

/// Seals of a file that can be mapped without fear.
const SEALS: libc::c_int =
    libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL;

/// What the link in `/proc` of such a file says.
const LINK: &str = "/memfd:baton-kv";

/// What the system is asked for at a time: in a call that takes all of a ring nobody else has the core for a millisecond.
const PIECE_BYTES: usize = 128 * 1024;

/// A mapping; who may touch which byte is the holder's affair.
struct Map {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is memory and nothing else; every access is argued for where it happens.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    fn new(file: &File, len: usize, protection: libc::c_int) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the system's choice touches no memory of ours.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len })
    }

    /// Takes the page faults of the first `len` bytes now, in pieces: others may have the core between them.
    fn populate(&self, len: usize, advice: libc::c_int) {
        let end = len.min(self.len);
        for start in (0..end).step_by(PIECE_BYTES) {
            let len = PIECE_BYTES.min(end - start);
            // SAFETY: the range lies within the mapping, whose content this does not change. Refused (before Linux 5.14), it is the first use of a
            // page that faults.
            unsafe { libc::madvise(self.base.as_ptr().add(start).cast(), len, advice) };
        }
    }

    /// Whether `len` bytes from `offset` on lie within.
    const fn holds(&self, offset: usize, len: usize) -> bool {
        match offset.checked_add(len) {
            Some(end) => end <= self.len,
            None => false,
        }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone, and no reference into it is left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// The source's end.
pub(crate) struct SharedMemory {
    file: File,
    map: Map,
}

impl SharedMemory {
    /// Takes `len` bytes, all of them now: later there is none that could be refused.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        // SAFETY: the name is a C string; the result is checked.
        let fd =
            unsafe { libc::memfd_create(c"baton-kv".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is open and nobody else's.
        let file = unsafe { File::from_raw_fd(fd) };
        for start in (0..len).step_by(PIECE_BYTES) {
            let offset = |at: usize| libc::off_t::try_from(at).map_err(|_| io::ErrorKind::InvalidInput);
            let (start, size) = (offset(start)?, offset(PIECE_BYTES.min(len - start))?);
            // SAFETY: the call touches no memory of ours.
            if unsafe { libc::fallocate(fd, 0, start, size) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        let map = Map::new(&file, len, libc::PROT_READ | libc::PROT_WRITE)?;
        map.populate(len, libc::MADV_POPULATE_WRITE);
        // SAFETY: as above.
        if unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, SEALS) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { file, map })
    }

    /// Where another process of this user finds it, if it sees this process.
    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// Writes `bytes` at `offset` and appends them to `crc`; `None`, and nothing written, when they do not fit there.
    pub(crate) fn write(&mut self, offset: usize, bytes: &[u8], crc: u32) -> Option<u32> {
        if !self.map.holds(offset, bytes.len()) {
            return None;
        }
        // SAFETY: the range was checked and stays backed, for the file can't shrink. `bytes` lies elsewhere, since no lasting reference
        // into the mapping is ever made. That the other process may read meanwhile harms only what it reads, which it verifies.
        unsafe {
            let to = std::slice::from_raw_parts_mut(self.map.base.as_ptr().add(offset), bytes.len());
            Some(checksum::append_copied(crc, bytes.as_ptr(), to, false))
        }
    }
}

/// The destination's end.
pub(crate) struct SharedView {
    map: Map,
}

impl SharedView {
    /// Maps what a peer says lies at `path`, if it is a file that [`SharedMemory`] made, of at most `max_len` bytes.
    ///
    /// # Errors
    /// Why not, for people.
    pub(crate) fn open(path: &str, max_len: usize) -> Result<Self, String> {
        let (file, len) = open(path)?;
        if len == 0 || len > max_len {
            return Err(format!("{path} has {len} bytes; from 1 to {max_len} are taken"));
        }
        let map = Map::new(&file, len, libc::PROT_READ)
            .map_err(|error| format!("{path} can't be mapped: {error}"))?;
        Ok(Self { map })
    }

    /// Bytes.
    pub(crate) const fn len(&self) -> usize {
        self.map.len
    }

    /// Takes the page faults of the first `len` bytes now; more than there are is all.
    pub(crate) fn populate(&self, len: usize) {
        self.map.populate(len, libc::MADV_POPULATE_READ);
    }

    /// As [`SharedView::read`], and appends the bytes to `crc`; they are written past the caches.
    pub(crate) fn read_far(&self, offset: usize, out: &mut [u8], crc: u32) -> Option<u32> {
        if !self.map.holds(offset, out.len()) {
            return None;
        }
        // SAFETY: as in `read`; each byte is looked at once, and what is written of it is what is summed.
        Some(unsafe { checksum::append_copied(crc, self.map.base.as_ptr().add(offset), out, true) })
    }

    /// Copies what lies at `offset` into `out`; false, and `out` unchanged, when the range does not lie within.
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) -> bool {
        if !self.map.holds(offset, out.len()) {
            return false;
        }
        // SAFETY: the range was checked and stays backed, for the file can't shrink; `out` is ours and lies elsewhere. The
        // other process may write meanwhile: any bytes will do here, and what is verified is the copy.
        unsafe {
            std::ptr::copy_nonoverlapping(self.map.base.as_ptr().add(offset), out.as_mut_ptr(), out.len());
        }
        true
    }
}

/// Whether the file at `path` begins with `nonce`: then its maker and this process see the same memory.
///
/// # Errors
/// Why not, for people.
pub(crate) fn check_nonce(path: &str, nonce: &[u8]) -> Result<(), String> {
    let (file, _) = open(path)?;
    let mut found = vec![0; nonce.len()];
    file.read_exact_at(&mut found, 0).map_err(|error| format!("{path}: {error}"))?;
    if found != nonce {
        return Err(format!("{path} is another process's: the nonce differs"));
    }
    Ok(())
}

/// Opens a sealed memfd and returns it with its length. A peer says the path, so nothing else may be opened, and nothing may block.
fn open(path: &str) -> Result<(File, usize), String> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let place = path.strip_prefix("/proc/").and_then(|rest| rest.split_once("/fd/"));
    if !place.is_some_and(|(pid, fd)| is_number(pid) && is_number(fd)) {
        return Err(format!("'{path}' is no path of shared memory"));
    }
    let said = |error: io::Error| format!("{path}: {error}");
    let link = std::fs::read_link(path).map_err(said)?;
    if !link.to_string_lossy().starts_with(LINK) {
        return Err(format!("{path} is {}, no shared memory", link.display()));
    }
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(said)?;
    // SAFETY: the call touches no memory of ours.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    // Asked of the open file, so that it does not matter what the path leads to by now. No memfd: -1, which has no meaning as seals.
    if seals < 0 || seals & SEALS != SEALS {
        return Err(format!("{path} is not sealed as shared memory is"));
    }
    let len = file.metadata().map_err(said)?.len();
    Ok((file, usize::try_from(len).map_err(|_| format!("{path} has {len} bytes"))?))
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd;

    use super::*;

    fn memfd(len: u64, seals: libc::c_int) -> (File, String) {
        // SAFETY: the name is a C string; the descriptor is nobody else's.
        let file =
            unsafe { File::from_raw_fd(libc::memfd_create(c"baton-kv".as_ptr(), libc::MFD_ALLOW_SEALING)) };
        file.set_len(len).unwrap();
        // SAFETY: the call touches no memory.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }, 0);
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        (file, path)
    }

    #[test]
    fn what_one_end_writes_the_other_reads_and_nothing_beyond() {
        let mut memory = SharedMemory::new(10_000).unwrap();
        let view = SharedView::open(&memory.path(), 10_000).unwrap();
        assert_eq!(view.len(), 10_000);
        assert_eq!(memory.write(9_990, &[7; 10], 3), Some(checksum::append(3, &[7; 10])));
        assert_eq!(memory.write(9_991, &[8; 10], 0), None);
        assert_eq!(memory.write(usize::MAX, &[8], 0), None);
        let mut out = [1; 10];
        for beyond in [9_991, 10_000, usize::MAX - 5, usize::MAX] {
            assert!(!view.read(beyond, &mut out) && out == [1; 10], "{beyond}");
        }
        assert!(view.read(9_990, &mut out));
        assert_eq!(out, [7; 10]);
        let mut out = [1; 10];
        assert_eq!((view.read_far(9_991, &mut out, 0), out), (None, [1; 10]));
        assert_eq!(view.read_far(9_990, &mut out, 3), Some(checksum::append(3, &[7; 10])));
        assert_eq!(out, [7; 10]);
    }

    #[test]
    fn a_view_outlives_its_maker_and_no_name_is_left() {
        let mut memory = SharedMemory::new(4096).unwrap();
        assert!(memory.write(0, b"kept", 0).is_some());
        let (view, path) = (SharedView::open(&memory.path(), 4096).unwrap(), memory.path());
        drop(memory);
        let mut out = [0; 4];
        assert!(view.read(0, &mut out));
        assert_eq!(&out, b"kept");
        // The descriptor's number may have been given to another file of this process by now.
        assert!(check_nonce(&path, b"kept").is_err());
    }

    #[test]
    fn the_file_can_neither_shrink_nor_be_written_by_others() {
        let memory = SharedMemory::new(8192).unwrap();
        let error = memory.file.set_len(4096).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        let again = OpenOptions::new().read(true).write(true).open(memory.path()).unwrap();
        assert!(Map::new(&again, 8192, libc::PROT_READ | libc::PROT_WRITE).is_err());
        assert!(again.write_at(b"x", 0).is_err());
    }

    #[test]
    fn foreign_files_are_refused_and_nothing_blocks() {
        let (_unsealed, unsealed) = memfd(4096, 0);
        let (_half, half) = memfd(4096, libc::F_SEAL_GROW);
        let (_empty, empty) = memfd(0, SEALS);
        let (_large, large) = memfd(8192, SEALS);
        let plain = File::open("/proc/self/exe").unwrap();
        let plain = format!("/proc/{}/fd/{}", std::process::id(), plain.into_raw_fd());
        let mut pipe = [0; 2];
        // SAFETY: the array takes the two descriptors.
        assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
        let pipe = format!("/proc/{}/fd/{}", std::process::id(), pipe[0]);
        for (path, part) in [
            (unsealed.as_str(), "not sealed"),
            (half.as_str(), "not sealed"),
            (empty.as_str(), "has 0 bytes"),
            (large.as_str(), "has 8192 bytes"),
            (plain.as_str(), "no shared memory"),
            (pipe.as_str(), "no shared memory"),
            ("/proc/4294967295/fd/3", "No such file"),
            ("/etc/passwd", "no path of shared memory"),
            ("/proc/self/fd/3", "no path of shared memory"),
            ("/proc/1/fd/../mem", "no path of shared memory"),
            ("", "no path of shared memory"),
        ] {
            let error = SharedView::open(path, 4096).map(drop).unwrap_err();
            assert!(error.contains(part), "{path}: {error}");
        }
    }

    #[test]
    fn a_nonce_is_found_only_where_it_was_written() {
        let mut memory = SharedMemory::new(4096).unwrap();
        assert!(memory.write(0, &[5; 16], 0).is_some());
        assert_eq!(check_nonce(&memory.path(), &[5; 16]), Ok(()));
        assert!(check_nonce(&memory.path(), &[6; 16]).unwrap_err().contains("the nonce differs"));
        assert!(check_nonce(&memory.path(), &[5; 5000]).is_err());
    }
}
