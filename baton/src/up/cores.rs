//! Which processor cores the workers get.

use baton_worker::{CpuList, cpu_quota};

/// The cores this process may use, in the order they are handed out: siblings of one physical core side by side. No
/// more of them than a container's quota pays for. Empty where the system does not say; then nothing is pinned.
pub(super) fn usable() -> Vec<usize> {
    let mut cpus = CpuList::allowed().map(|list| list.as_slice().to_vec()).unwrap_or_default();
    cpus.sort_by_key(|cpu| (first_sibling(*cpu), *cpu));
    within_quota(&cpus, cpu_quota().unwrap_or(cpus.len()), std::process::id() as usize)
}

/// `count` of the [`usable`] cores, on as many physical cores as there are; fewer where there are not so many.
pub(crate) fn far_apart(count: usize) -> Vec<usize> {
    spread(&usable(), first_sibling, count)
}

/// Takes first the CPUs that are the first taken of their core, then the others.
fn spread(cpus: &[usize], core: impl Fn(usize) -> usize, count: usize) -> Vec<usize> {
    let (mut firsts, mut others, mut seen) = (Vec::new(), Vec::new(), Vec::new());
    for &cpu in cpus {
        let core = core(cpu);
        if seen.contains(&core) {
            others.push(cpu);
        } else {
            seen.push(core);
            firsts.push(cpu);
        }
    }
    firsts.into_iter().chain(others).take(count).collect()
}

/// Where `up` runs everything but the compute of one prefill and one decode worker that share `cpus`; empty for one CPU.
pub(crate) fn beside_prefill(cpus: &[usize]) -> Vec<usize> {
    share_out(cpus, Fleet { num_prefill: 1, num_decode: 1 }).beside
}

/// Under a quota smaller than the mask other containers share these cores, so the choice starts at a different one in
/// each process instead of at everyone's CPU 0.
fn within_quota(cpus: &[usize], quota: usize, salt: usize) -> Vec<usize> {
    if quota >= cpus.len() {
        return cpus.to_vec();
    }
    cpus.iter().cycle().skip(salt % cpus.len().max(1)).take(quota.max(1)).copied().collect()
}

/// The lowest CPU of the physical core that `cpu` is part of; itself where the system does not say.
fn first_sibling(cpu: usize) -> usize {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    let list = std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<CpuList>().ok());
    list.and_then(|list| list.as_slice().first().copied()).unwrap_or(cpu)
}

/// How many workers of each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fleet {
    /// Prefill workers.
    pub(super) num_prefill: usize,
    /// Decode workers.
    pub(super) num_decode: usize,
}

/// The cores of each worker, in worker order; an empty list means not pinned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shares {
    /// Of each prefill worker.
    pub(super) prefill: Vec<Vec<usize>>,
    /// Of each decode worker.
    pub(super) decode: Vec<Vec<usize>>,
    /// Where everything else should run (network threads, router): beside prefill, away from decoding, whose steps
    /// are the ones that users see as gaps. Empty when there is no such core.
    pub(super) beside: Vec<usize>,
}

/// Shares `cpus` out. With two or more, a prefill and a decode worker never have one in common; with enough for
/// everyone no two workers do. What can't be divided evenly goes to prefill, which is bound by arithmetic.
pub(super) fn share_out(cpus: &[usize], fleet: Fleet) -> Shares {
    let Fleet { num_prefill, num_decode } = fleet;
    let num_workers = num_prefill + num_decode;
    if cpus.len() < 2 || num_workers == 0 {
        let all = |count| vec![cpus.to_vec(); count];
        return Shares { prefill: all(num_prefill), decode: all(num_decode), beside: Vec::new() };
    }
    let least = if num_prefill > 0 { 1 } else { 0 };
    let most = cpus.len() - least;
    let for_decode = if num_prefill == 0 {
        cpus.len()
    } else if cpus.len() >= num_workers {
        cpus.len() / num_workers * num_decode
    } else {
        (cpus.len() * num_decode / num_workers).clamp(usize::from(num_decode > 0), most)
    };
    let (decode, prefill) = cpus.split_at(for_decode.min(cpus.len()));
    Shares {
        prefill: among(prefill, num_prefill),
        decode: among(decode, num_decode),
        beside: prefill.to_vec(),
    }
}

/// Divides cores among workers of one kind: in runs while there is one for each, else in turns.
fn among(cpus: &[usize], num_workers: usize) -> Vec<Vec<usize>> {
    if cpus.is_empty() {
        return vec![Vec::new(); num_workers];
    }
    if cpus.len() < num_workers {
        return cpus.iter().cycle().take(num_workers).map(|cpu| vec![*cpu]).collect();
    }
    let bounds = |worker: usize| worker * cpus.len() / num_workers;
    (0..num_workers)
        .map(|worker| cpus.get(bounds(worker)..bounds(worker + 1)).unwrap_or(&[]).to_vec())
        .collect()
}

/// As `--cpus` takes it.
pub(crate) fn as_list(cpus: &[usize]) -> String {
    cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(num_cpus: usize, num_prefill: usize, num_decode: usize) -> Shares {
        let cpus: Vec<usize> = (0..num_cpus).collect();
        share_out(&cpus, Fleet { num_prefill, num_decode })
    }

    #[test]
    fn two_cores_are_one_each() {
        let shares = shares(2, 1, 1);
        assert_eq!((shares.decode, shares.prefill, shares.beside), (vec![vec![0]], vec![vec![1]], vec![1]));
    }

    #[test]
    fn prefill_and_decode_never_share_when_there_are_two() {
        for num_cpus in 2..20 {
            for num_prefill in 1..6 {
                for num_decode in 1..6 {
                    let case = format!("{num_cpus} cores, {num_prefill} + {num_decode}");
                    let shares = shares(num_cpus, num_prefill, num_decode);
                    assert_eq!(
                        (shares.prefill.len(), shares.decode.len()),
                        (num_prefill, num_decode),
                        "{case}"
                    );
                    let decode: Vec<usize> = shares.decode.concat();
                    let prefill: Vec<usize> = shares.prefill.concat();
                    assert!(prefill.iter().chain(&shares.beside).all(|cpu| !decode.contains(cpu)), "{case}");
                    assert!(
                        shares.decode.iter().chain(&shares.prefill).all(|cpus| !cpus.is_empty()),
                        "{case}"
                    );
                    if num_cpus >= num_prefill + num_decode {
                        let mut all: Vec<usize> = [decode, prefill].concat();
                        all.sort_unstable();
                        assert_eq!(all, (0..num_cpus).collect::<Vec<_>>(), "{case}");
                    }
                }
            }
        }
    }

    #[test]
    fn one_core_is_shared_and_one_kind_takes_all() {
        assert_eq!(shares(1, 1, 1).prefill, [[0]]);
        assert_eq!(shares(0, 1, 1).prefill, [[0; 0]]);
        let colocated = shares(4, 0, 2);
        assert_eq!(colocated.decode, [[0, 1], [2, 3]]);
        assert!(colocated.beside.is_empty());
        assert_eq!(shares(2, 0, 4).decode, [[0], [1], [0], [1]]);
    }

    #[test]
    fn siblings_come_last() {
        let core = |cpu: usize| cpu / 2;
        assert_eq!(spread(&[0, 1, 2, 3], core, 2), [0, 2]);
        assert_eq!(spread(&[0, 1, 2, 3], core, 3), [0, 2, 1]);
        assert_eq!(spread(&[5], core, 2), [5]);
        assert_eq!(beside_prefill(&[4, 6]), [6]);
        assert_eq!(beside_prefill(&[4]), [0; 0]);
    }

    #[test]
    fn a_quota_hands_out_no_more_cores_than_it_pays_for() {
        assert_eq!(within_quota(&[0, 1, 2, 3], 2, 7), [3, 0]);
        assert_eq!(within_quota(&[3, 5], 2, 1), [3, 5]);
        assert_eq!(within_quota(&[], 8, 3), [0; 0]);
    }
}
