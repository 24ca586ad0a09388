//! A step in the steady state allocates nothing, and makes no system call.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use baton_engine::{CpuEngineConfig, WeightSource};
use baton_model::{Model, WeightType};
use baton_scheduler::{RowSampling, SamplingParams};
use support::random_model::{RandomModel, config};
use support::{Logits, Rig, Sequence, greedy};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
/// One test at a time: the counter is everybody's.
static TURN: Mutex<()> = Mutex::new(());

// SAFETY: everything is passed on to the system's allocator; only a counter is added.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const PROMPT: usize = 60;

/// Four sequences, and a step for all of them: prompts that begin anew each time, or one token each.
struct Steps {
    rig: Rig,
    sequences: Vec<Sequence>,
    tokens: Vec<u32>,
}

impl Steps {
    fn new(source: &dyn WeightSource, num_threads: usize) -> Steps {
        let engine = CpuEngineConfig { num_blocks: 40, num_threads, ..CpuEngineConfig::default() };
        let mut rig = Rig::new(source, engine);
        let sequences = (0..4).map(|_| rig.sequence(100)).collect();
        Steps { rig, sequences, tokens: (0..PROMPT as u32).collect() }
    }

    fn step(&mut self, decode: bool) {
        let params = SamplingParams { temperature: 0.8, top_p: 0.9, top_k: 40, ..SamplingParams::GREEDY };
        for (nth, sequence) in self.sequences.iter_mut().enumerate() {
            sequence.done = if decode { PROMPT } else { 0 };
            let tokens = if decode { &self.tokens[..1] } else { &self.tokens[..] };
            let position = sequence.done + tokens.len();
            let sampled = RowSampling { params, sequence: 0, position: position as u32 };
            let wanted = [greedy(position), Logits::Last(sampled), Logits::All, Logits::None];
            self.rig.add(sequence, tokens, wanted[nth]);
        }
        self.rig.step();
    }
}

fn models() -> [Box<dyn WeightSource>; 2] {
    // Quantised weights meet quantised activations.
    [Box::new(Model::tiny()), Box::new(RandomModel::new(1, config(WeightType::Q4_1), WeightType::Q4_1))]
}

#[test]
fn a_steady_step_allocates_nothing() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for model in models() {
        for num_threads in [1, 2] {
            let mut steps = Steps::new(&*model, num_threads);
            let mut counts = Vec::new();
            for decode in [false, true, false, true, true] {
                let before = ALLOCATIONS.load(Ordering::SeqCst);
                steps.step(decode);
                counts.push(ALLOCATIONS.load(Ordering::SeqCst) - before);
            }
            assert!(counts[0] > 0, "the first step sizes the output, and the counter counts");
            assert_eq!(counts[1..], [0; 4], "{num_threads} threads");
        }
    }
}

/// Kernels of Linux have a mode in which a thread that makes a system call other than `read`, `write` and `exit` is killed at once. So
/// a process of its own enters it, computes steps with its one thread, and says so.
#[cfg(target_os = "linux")]
#[test]
fn a_steady_step_makes_no_system_call() {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};
    use std::sync::mpsc;
    use std::time::Duration;

    const CHILD: &str = "BATON_TEST_STEADY_CHILD";
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Ok(what) = std::env::var(CHILD) {
        in_strict_mode(what == "call");
    }
    let outcome = |what: &str| {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_steady_step_makes_no_system_call", "--nocapture"])
            .env(CHILD, what)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (found, outcome) = mpsc::sync_channel(8);
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some(word) = line.strip_prefix("steady: ") {
                    let _ = found.send(word.to_owned());
                }
            }
        });
        let first = outcome.recv_timeout(Duration::from_secs(60));
        let second = outcome.recv_timeout(Duration::from_secs(5));
        let _ = child.kill();
        let _ = child.wait();
        (first.unwrap_or_default(), second.unwrap_or_default())
    };
    let steps = outcome("steps");
    if steps.0 == "refused" {
        eprintln!("SKIPPED: this system does not let a process restrict its system calls");
        return;
    }
    assert_eq!(steps, ("entering".to_owned(), "computed".to_owned()));
    // The mode does what is said above: one call more, and the last word never comes.
    assert_eq!(outcome("call"), ("entering".to_owned(), String::new()));
}

/// Never returns: says how far it came, the last time after the steps.
#[cfg(target_os = "linux")]
fn in_strict_mode(with_a_call: bool) -> ! {
    let mut all: Vec<Steps> = models().iter().map(|model| Steps::new(&**model, 1)).collect();
    for steps in &mut all {
        [false, true].into_iter().for_each(|decode| steps.step(decode));
    }
    let say = |text: &str| {
        // SAFETY: writes the text's bytes to standard output.
        unsafe { libc::write(1, text.as_ptr().cast(), text.len()) };
    };
    // SAFETY: restricts this thread alone, and takes no pointers.
    if unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT, 0, 0, 0) } != 0 {
        say("\nsteady: refused\n");
        std::process::exit(0);
    }
    say("\nsteady: entering\n");
    for steps in &mut all {
        [false, true, true].into_iter().for_each(|decode| steps.step(decode));
    }
    if with_a_call {
        // SAFETY: asks for a number.
        unsafe { libc::syscall(libc::SYS_getppid) };
    }
    say("steady: computed\n");
    // SAFETY: ends this thread; nothing of it is used after. The process is killed by the test that started it.
    unsafe { libc::syscall(libc::SYS_exit, 0) };
    unreachable!("the thread has ended")
}
