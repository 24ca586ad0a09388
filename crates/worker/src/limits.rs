//! What this process may use: memory and CPUs, by the machine and by its control groups (v1 and v2).

use std::path::{Path, PathBuf};

/// Where the system tells.
struct Roots {
    proc: PathBuf,
    cgroup: PathBuf,
}

/// The most memory that this process may use, in bytes: the smallest of what its control groups allow and what the
/// machine has. `None` when the system tells nothing.
pub fn memory_limit_bytes() -> Option<u64> {
    Roots::system().memory_limit()
}

/// Memory that can be had now without swapping (`MemAvailable`), in bytes.
pub fn memory_available_bytes() -> Option<u64> {
    Roots::system().meminfo("MemAvailable")
}

/// CPUs worth of time that the control groups allow, rounded up; `None` without a quota.
pub fn cpu_quota() -> Option<usize> {
    Roots::system().cpu_quota()
}

impl Roots {
    fn system() -> Self {
        Self { proc: "/proc".into(), cgroup: "/sys/fs/cgroup".into() }
    }

    fn meminfo(&self, name: &str) -> Option<u64> {
        let text = std::fs::read_to_string(self.proc.join("meminfo")).ok()?;
        let line =
            text.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(':')))?;
        let kib: u64 = line.split_ascii_whitespace().nth(1)?.parse().ok()?;
        kib.checked_mul(1024)
    }

    fn memory_limit(&self) -> Option<u64> {
        let v2 = self.folders("").into_iter().filter_map(|folder| read_number(&folder.join("memory.max")));
        let v1 = self
            .folders("memory")
            .into_iter()
            .filter_map(|folder| read_number(&folder.join("memory.limit_in_bytes")));
        // An unlimited v1 group says a number near 2^63; the machine's own size is then the smaller one.
        v2.chain(v1).chain(self.meminfo("MemTotal")).min()
    }

    fn cpu_quota(&self) -> Option<usize> {
        let v2 = self.folders("").into_iter().filter_map(|folder| {
            let text = std::fs::read_to_string(folder.join("cpu.max")).ok()?;
            let (quota, period) = text.trim().split_once(' ')?;
            Some((quota.parse::<u64>().ok()?, period.parse::<u64>().ok()?))
        });
        let v1 = self.folders("cpu").into_iter().filter_map(|folder| {
            // A quota of -1 means none.
            Some((
                read_number(&folder.join("cpu.cfs_quota_us"))?,
                read_number(&folder.join("cpu.cfs_period_us"))?,
            ))
        });
        let cpus = v2
            .chain(v1)
            .filter(|(_, period)| *period > 0)
            .map(|(quota, period)| quota.div_ceil(period).max(1));
        cpus.min().and_then(|cpus| usize::try_from(cpus).ok())
    }

    /// The folders of this process's group and of its ancestors, for a v1 controller or, with "", for v2. A limit of
    /// an ancestor binds too. In a container the path may not exist below the mount; the root always does.
    fn folders(&self, controller: &str) -> Vec<PathBuf> {
        let mount = self.cgroup.join(controller);
        let text = std::fs::read_to_string(self.proc.join("self/cgroup")).unwrap_or_default();
        let own = text.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?);
            let hit = if controller.is_empty() {
                controllers.is_empty()
            } else {
                controllers.split(',').any(|name| name == controller)
            };
            hit.then(|| path.trim_start_matches('/').to_owned())
        });
        let own = own.unwrap_or_default();
        Path::new(&own).ancestors().map(|path| mount.join(path)).collect()
    }
}

fn read_number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Roots) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let roots = Roots { proc: dir.path().join("proc"), cgroup: dir.path().join("cgroup") };
        (dir, roots)
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal:  8388608 kB\nMemAvailable:    4194304 kB\n");

    #[test]
    fn the_tightest_group_of_v2_binds() {
        let (_dir, roots) = machine(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("cgroup/a/memory.max", "1073741824\n"),
            ("cgroup/a/b/memory.max", "max\n"),
            ("cgroup/a/b/cpu.max", "150000 100000\n"),
            ("cgroup/a/cpu.max", "max 100000\n"),
        ]);
        assert_eq!(roots.memory_limit(), Some(1 << 30));
        assert_eq!(roots.cpu_quota(), Some(2));
        assert_eq!(roots.meminfo("MemAvailable"), Some(4 << 30));
    }

    #[test]
    fn v1_groups_bind_and_unlimited_ones_do_not() {
        let (_dir, roots) = machine(&[
            MEMINFO,
            ("proc/self/cgroup", "5:memory:/x\n4:cpu,cpuacct:/x\n"),
            ("cgroup/memory/x/memory.limit_in_bytes", "2147483648\n"),
            ("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("cgroup/cpu/x/cpu.cfs_quota_us", "-1\n"),
            ("cgroup/cpu/x/cpu.cfs_period_us", "100000\n"),
        ]);
        assert_eq!(roots.memory_limit(), Some(2 << 30));
        assert_eq!(roots.cpu_quota(), None);
    }

    #[test]
    fn a_path_from_outside_the_container_falls_back_to_the_root() {
        let (_dir, roots) = machine(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/docker/abc\n"),
            ("cgroup/memory.max", "536870912"),
            ("cgroup/cpu.max", "50000 100000"),
        ]);
        assert_eq!(roots.memory_limit(), Some(512 << 20));
        assert_eq!(roots.cpu_quota(), Some(1));
    }

    #[test]
    fn without_groups_the_machine_counts() {
        let (_dir, roots) = machine(&[MEMINFO]);
        assert_eq!(roots.memory_limit(), Some(8 << 30));
        assert_eq!(roots.cpu_quota(), None);
        let (_dir, roots) = machine(&[]);
        assert_eq!(roots.memory_limit(), None);
    }

    #[test]
    fn this_machine_tells_something() {
        let limit = memory_limit_bytes().unwrap();
        assert!(limit >= 64 << 20, "{limit}");
        assert!(memory_available_bytes().unwrap() > 0);
    }
}
