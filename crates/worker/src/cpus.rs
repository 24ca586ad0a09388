//! Sets of logical CPUs: reading them from the command line, and binding threads to them.

use std::fmt;
use std::io;
use std::str::FromStr;

/// Logical CPUs by number, ascending, without repetition; never empty. Written `0,2-3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuList(Vec<usize>);

/// Largest CPU number that the system call's fixed set can hold.
const MAX_CPU: usize = libc::CPU_SETSIZE as usize - 1;

impl CpuList {
    /// The CPUs, ascending.
    pub fn as_slice(&self) -> &[usize] {
        &self.0
    }

    /// How many CPUs.
    pub fn num_cpus(&self) -> usize {
        self.0.len()
    }

    /// The CPUs that this thread may run on (`sched_getaffinity`).
    ///
    /// # Errors
    /// The system's.
    pub fn allowed() -> io::Result<Self> {
        // SAFETY: `cpu_set_t` is a plain bit array for which all zeros is the empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: `set` is valid for writes of the size given; 0 means the calling thread.
        if unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `CPU_ISSET` only reads `set`, and the numbers are below `CPU_SETSIZE`.
        let cpus = (0..=MAX_CPU).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect();
        Ok(Self(cpus))
    }

    /// The first CPU of this list that is not in `allowed`.
    pub fn first_outside(&self, allowed: &Self) -> Option<usize> {
        self.0.iter().copied().find(|cpu| !allowed.0.contains(cpu))
    }

    /// Binds the calling thread, and the threads it starts from now on, to these CPUs.
    ///
    /// # Errors
    /// The system's; no CPU of the list exists or is allowed.
    pub fn bind_current_thread(&self) -> io::Result<()> {
        // SAFETY: `cpu_set_t` is a plain bit array for which all zeros is the empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        for &cpu in &self.0 {
            // SAFETY: every number was checked against `MAX_CPU` when the list was made.
            unsafe { libc::CPU_SET(cpu, &mut set) };
        }
        // SAFETY: `set` is valid for reads of the size given; 0 means the calling thread.
        match unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Binds the calling thread and lowers its priority as asked; what the system refuses is only logged, since it costs speed
/// and not results.
pub(crate) fn settle_current_thread(what: &str, cpus: Option<&CpuList>, nice: i32) {
    if let Some(cpus) = cpus
        && let Err(error) = cpus.bind_current_thread()
    {
        tracing::warn!(%cpus, %error, "the {what} thread can't be bound");
    }
    if nice > 0
        && let Err(error) = nice_current_thread(nice)
    {
        tracing::warn!(%error, "the {what} thread's priority can't be lowered");
    }
}

/// The shortest of turns.
const SHORT_NS: u64 = 300_000;

/// How long a thread computes before others on its CPU have their turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turns {
    /// What the system gives to all: 0.7 to 4 ms.
    Usual,
    /// A fraction of that, for a thread that mostly waits and then has something to pass on. Linux from 6.12 on lets it break into a longer turn
    /// the moment it wakes; with usual turns it may wait for the end of that one. Its share of the time stays what it was.
    Short,
    /// One and a half times that, for whoever is woken by a thread with short turns, message by message: it must not break into that one's turn before all messages are
    /// written, since who is interrupted with work left may have to wait for a whole turn of a step.
    NextShort,
    /// Twice the shortest, for a client beside them.
    LastShort,
    /// Two and a half times the shortest, for a step that yields about as often: Linux takes what is left of a turn from who yields, which of a
    /// usual turn is most of it, so that beside another program the step would get next to nothing.
    Yielding,
}

impl Turns {
    /// Gives the calling thread, and the threads and processes it starts from now on, such turns. Systems that know no such thing take no notice.
    ///
    /// # Errors
    /// The system's, such as a container that forbids the call; nothing follows from it but waits.
    pub fn take(self) -> io::Result<()> {
        let turn_ns = match self {
            Turns::Usual => 0,
            Turns::Short => SHORT_NS,
            Turns::NextShort => SHORT_NS * 3 / 2,
            Turns::LastShort => SHORT_NS * 2,
            Turns::Yielding => SHORT_NS * 5 / 2,
        };
        set_turn(turn_ns)
    }
}

#[cfg(target_os = "linux")]
fn set_turn(turn_ns: u64) -> io::Result<()> {
    // SAFETY: a plain struct for which all zeros is a value.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::sched_attr>() as u32;
    // SAFETY: both calls read or fill `size` bytes of the struct; 0 means the calling thread.
    let outcome = unsafe {
        if libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) != 0 {
            return Err(io::Error::last_os_error());
        }
        attributes.size = size;
        attributes.sched_runtime = turn_ns;
        libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0)
    };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(not(target_os = "linux"))]
fn set_turn(_turn_ns: u64) -> io::Result<()> {
    Ok(())
}

/// Makes the calling thread, and the threads it starts from now on, give way to others: `nice` in `0..=19`. On Linux
/// this is a property of a thread, and raising it needs no right.
///
/// # Errors
/// The system's.
fn nice_current_thread(nice: i32) -> io::Result<()> {
    // SAFETY: plain system call without pointers; 0 means the calling thread.
    match unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl FromStr for CpuList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = |part: &str| format!("'{part}' is not a CPU or a range of CPUs: write 0,2-3");
        let number = |digits: &str, part: &str| {
            let cpu = digits.trim().parse::<usize>().map_err(|_| bad(part))?;
            if cpu > MAX_CPU { Err(format!("CPU {cpu}: the largest number is {MAX_CPU}")) } else { Ok(cpu) }
        };
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first, part)?, number(last, part)?);
            if first > last {
                return Err(format!("'{part}': a range of CPUs goes upwards"));
            }
            cpus.extend(first..=last);
        }
        cpus.sort_unstable();
        if let Some(pair) = cpus.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("CPU {} is named twice", pair[0]));
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.as_slice();
        let mut separator = "";
        while let [first, ..] = rest {
            let length = rest.iter().zip(*first..).take_while(|(cpu, want)| *cpu == want).count();
            match length {
                1 => write!(f, "{separator}{first}")?,
                _ => write!(f, "{separator}{first}-{}", first + length - 1)?,
            }
            (rest, separator) = (&rest[length..], ",");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_ranges_are_read_and_printed() {
        for (text, cpus) in [("0", vec![0]), ("3,0-1", vec![0, 1, 3]), ("0,2-4, 9", vec![0, 2, 3, 4, 9])] {
            assert_eq!(text.parse::<CpuList>().unwrap().as_slice(), cpus, "{text}");
        }
        assert_eq!("4,0,2-3".parse::<CpuList>().unwrap().to_string(), "0,2-4");
    }

    #[test]
    fn bad_lists_are_refused() {
        for text in ["", "a", "1-", "-1", "3-1", "1,,2", "0,0", "0-2,1", "5000", "1-2-3"] {
            assert!(text.parse::<CpuList>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_thread_can_be_bound_and_made_nice_without_touching_others() {
        let allowed = CpuList::allowed().unwrap();
        let last = CpuList(vec![*allowed.as_slice().last().unwrap()]);
        let bound = last.clone();
        std::thread::spawn(move || {
            bound.bind_current_thread().unwrap();
            nice_current_thread(3).unwrap();
            assert_eq!(CpuList::allowed().unwrap(), bound);
            Turns::Short.take().unwrap();
            Turns::Usual.take().unwrap();
            // SAFETY: plain system call without pointers.
            assert_eq!(unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }, 3);
        })
        .join()
        .unwrap();
        assert_eq!(CpuList::allowed().unwrap(), allowed);
        // SAFETY: plain system call without pointers.
        assert!(unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) } < 3);
        assert_eq!(last.first_outside(&allowed), None);
    }
}
