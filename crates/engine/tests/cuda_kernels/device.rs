//! What runs a kernel: the shim on this CPU, or a card.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::OnceLock;

use crate::card::Card;
use crate::library::{Library, shim_or_skip};

/// One argument of a kernel, as `ABI.md` orders them.
pub(crate) enum Arg<'a> {
    /// Memory that the kernel reads and perhaps writes: its first byte and its length.
    Memory {
        at: *mut c_void,
        bytes: usize,
        written: bool,
        borrow: PhantomData<&'a mut [u8]>,
    },
    Null,
    I32(i32),
    F32(f32),
}

/// Memory that is only read.
pub(crate) fn input<T: Copy>(x: &[T]) -> Arg<'_> {
    Arg::Memory {
        at: x.as_ptr().cast_mut().cast(),
        bytes: size_of_val(x),
        written: false,
        borrow: PhantomData,
    }
}

/// Memory that is written.
pub(crate) fn output<T: Copy>(x: &mut [T]) -> Arg<'_> {
    Arg::Memory { at: x.as_mut_ptr().cast(), bytes: size_of_val(x), written: true, borrow: PhantomData }
}

pub(crate) fn number(x: usize) -> Arg<'static> {
    Arg::I32(i32::try_from(x).unwrap())
}

/// How a kernel is launched.
pub(crate) struct Launch<'a> {
    pub(crate) kernel: &'a str,
    pub(crate) grid: [usize; 3],
    pub(crate) threads: usize,
    pub(crate) shared_bytes: usize,
}

pub(crate) trait Device: Send + Sync {
    /// Whether the kernel is there: libraries made for one test have only what it needs.
    fn has(&self, kernel: &str) -> bool;
    /// Runs to the end; what is written is in the arguments' memory then.
    fn run(&self, launch: &Launch<'_>, args: &[Arg<'_>]);
    /// Orders in which threads may run, each of which must give the same bits.
    fn schedules(&self) -> Vec<i32> {
        vec![0]
    }
    fn set_schedule(&self, _schedule: i32) {}
}

/// The device of this run; `None` after the reason why there is none was said.
pub(crate) fn device_or_skip() -> Option<&'static dyn Device> {
    static CARD: OnceLock<Card> = OnceLock::new();
    static SANITIZED: OnceLock<Library> = OnceLock::new();
    match std::env::var("BATON_KERNELS").as_deref() {
        Ok("card") => Some(CARD.get_or_init(Card::open)),
        // The child of `library::nothing_is_read_or_written_beyond_its_memory`.
        Ok(path) => Some(SANITIZED.get_or_init(|| Library::open(path.as_ref()))),
        Err(_) => shim_or_skip().map(|library| library as &dyn Device),
    }
}
