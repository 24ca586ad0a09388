//! What the C library does with buffers that are freed.

/// Freed bytes at the end of a heap that are kept: about what one handoff's credit lets be under way.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const KEPT_BYTES: libc::c_int = 16 * 1024 * 1024;

/// Allocations from this size on are mappings of their own; no buffer of a usual frame is.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED_BYTES: libc::c_int = 2 * 1024 * 1024;

/// Lets this process keep the memory of frame buffers. glibc would return it to the system after every frame and take it, zeroed, for
/// the next one: a tenth of what receiving costs. Concerns the whole process, which holds up to 16 MiB more a thread that frees
/// much; done once, when the first bulk connection or server is made.
pub(crate) fn keep_buffers() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        static ONCE: std::sync::Once = std::sync::Once::new();
        // SAFETY: the calls set two numbers under the allocator's own lock. Refused, they change nothing.
        ONCE.call_once(|| unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES);
            libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_BYTES);
        });
    }
}
