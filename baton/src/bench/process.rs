//! What this process takes, as the system says.

/// CPU seconds that the calling thread has used.
pub(crate) fn thread_cpu_s() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call fills the struct it is given. It can't fail for this clock; zero would show as nonsense.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Bytes of memory by a field of the process's status, such as `VmRSS:`, or the largest so far, `VmHWM:`.
pub(crate) fn own_memory(field: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// From here on `VmHWM:` is the largest since now, where the system allows that.
pub(crate) fn forget_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_takes_time_on_a_core_and_memory_is_there() {
        let before = thread_cpu_s();
        let sum = (0..20_000_000_u64).fold(0, |sum: u64, n| std::hint::black_box(sum ^ n));
        assert!(thread_cpu_s() > before, "{sum}");
        if cfg!(target_os = "linux") {
            forget_peak();
            assert!(own_memory("VmHWM:") >= own_memory("VmRSS:").map(|now| now / 2));
            assert_eq!(own_memory("VmNothing:"), None);
        }
    }
}
