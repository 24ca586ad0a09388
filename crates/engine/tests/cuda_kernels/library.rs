//! The kernels as a library for this CPU: compiled once for each content, kept in the target folder.

use std::cell::Cell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock};

use crate::device::{Arg, Device, Launch};

type LaunchFn = unsafe extern "C" fn(*const c_char, *const u32, *const u32, usize, *mut *mut c_void) -> c_int;
type ParamsFn = unsafe extern "C" fn(*const c_char, *mut usize, c_int) -> c_int;
type ScheduleFn = unsafe extern "C" fn(c_int);

/// `crates/engine/cuda`.
pub(crate) fn cuda_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda")
}

/// A change to the sources before they are compiled.
#[derive(Clone, Copy)]
pub(crate) struct Patch {
    pub(crate) file: &'static str,
    /// Occurs in the file exactly once.
    pub(crate) from: &'static str,
    pub(crate) to: &'static str,
}

/// What is compiled.
#[derive(Default)]
pub(crate) struct Build<'a> {
    pub(crate) patches: &'a [Patch],
    /// Attention for these (type, head size) only; all if empty.
    pub(crate) attention: &'a [(&'a str, usize)],
    pub(crate) flags: &'a [&'a str],
}

pub(crate) struct Library {
    launch: LaunchFn,
    params: ParamsFn,
    set_schedule: ScheduleFn,
    one_launch: Mutex<()>,
}

thread_local! {
    /// Each test has its own, as each has its thread.
    static SCHEDULE: Cell<i32> = const { Cell::new(0) };
}

/// Says why a test can't run here; under `CI=true` that fails it.
pub(crate) fn skip(why: &str) {
    assert!(std::env::var("CI").as_deref() != Ok("true"), "skipping is not allowed under CI=true: {why}");
    eprintln!("SKIPPED: {why}");
}

pub(crate) fn has_compiler() -> bool {
    let found = Command::new("g++").arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        skip("there is no g++ to compile the CUDA kernels for this CPU");
    }
    found
}

/// All kernels, unchanged.
pub(crate) fn shim_or_skip() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY.get_or_init(|| has_compiler().then(|| Library::open(&Build::default().made()))).as_ref()
}

impl Build<'_> {
    /// The library's path, after it was compiled if it is not there yet.
    pub(crate) fn made(&self) -> PathBuf {
        let sources = self.sources();
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-shim");
        let mut content = self.flags.join(" ");
        for (name, text) in &sources {
            content.push_str(name);
            content.push_str(text);
        }
        for file in
            ["order", "shim/fiber.h", "shim/device.h", "shim/launch.h", "shim/build.sh", "peer/rings.cu"]
        {
            content.push_str(&fs::read_to_string(cuda_folder().join(file)).unwrap());
        }
        let hash = fnv(content.as_bytes());
        let library = folder.join(format!("{hash:016x}.so"));
        if !library.exists() {
            // Its own folder, so that two processes may compile the same.
            let work = folder.join(format!("{hash:016x}-{}", std::process::id()));
            fs::create_dir_all(&work).unwrap();
            for (name, text) in &sources {
                fs::write(work.join(name), text).unwrap();
            }
            let made = work.join("kernels.so");
            let mut command = Command::new(cuda_folder().join("shim/build.sh"));
            let output = command.arg(&made).args(self.flags).env("KERNELS", &work).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            fs::rename(made, &library).unwrap();
            fs::remove_dir_all(work).unwrap();
        }
        library
    }

    fn sources(&self) -> Vec<(String, String)> {
        let mut sources: Vec<(String, String)> = fs::read_dir(cuda_folder().join("kernels"))
            .unwrap()
            .map(|entry| {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_str().unwrap().to_owned();
                (name, fs::read_to_string(path).unwrap())
            })
            .collect();
        sources.sort();
        for (name, text) in &mut sources {
            for patch in self.patches.iter().filter(|patch| patch.file == name) {
                let count = text.matches(patch.from).count();
                assert_eq!(count, 1, "'{}' must be in {name} once", patch.from);
                *text = text.replace(patch.from, patch.to);
            }
            if name == "entries.cu" && !self.attention.is_empty() {
                text.retain_attention(self.attention);
            }
        }
        sources
    }
}

trait RetainAttention {
    fn retain_attention(&mut self, wanted: &[(&str, usize)]);
}

impl RetainAttention for String {
    fn retain_attention(&mut self, wanted: &[(&str, usize)]) {
        let wanted: Vec<String> = wanted.iter().map(|(t, d)| format!("ATTENTION_OF({t}, {d})")).collect();
        let lines = self
            .lines()
            .filter(|line| !line.starts_with("ATTENTION_OF(") || wanted.iter().any(|w| w == line));
        *self = lines.fold(String::new(), |text, line| text + line + "\n");
    }
}

/// FNV-1a (Fowler, Noll, Vo) in 64 bits.
fn fnv(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

impl Library {
    pub(crate) fn open(path: &Path) -> Library {
        let name = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: the library is one that `build.sh` made; what it does when it is loaded is to note its kernels' names.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "{} can't be loaded", path.display());
        let symbol = |name: &std::ffi::CStr| {
            // SAFETY: the handle is open and stays so.
            let symbol = unsafe { libc::dlsym(handle, name.as_ptr()) };
            assert!(!symbol.is_null(), "{name:?} is missing");
            symbol
        };
        // SAFETY: `shim/launch.h` declares them so.
        unsafe {
            Library {
                launch: std::mem::transmute::<*mut c_void, LaunchFn>(symbol(c"shim_launch")),
                params: std::mem::transmute::<*mut c_void, ParamsFn>(symbol(c"shim_params")),
                set_schedule: std::mem::transmute::<*mut c_void, ScheduleFn>(symbol(c"shim_set_schedule")),
                one_launch: Mutex::new(()),
            }
        }
    }

    fn sizes(&self, kernel: &str) -> Option<Vec<usize>> {
        let name = CString::new(kernel).unwrap();
        let mut sizes = [0; 32];
        // SAFETY: there is room for 32 sizes.
        let count = unsafe { (self.params)(name.as_ptr(), sizes.as_mut_ptr(), 32) };
        usize::try_from(count).ok().map(|count| sizes[..count].to_vec())
    }
}

impl Device for Library {
    fn has(&self, kernel: &str) -> bool {
        self.sizes(kernel).is_some()
    }

    fn run(&self, launch: &Launch<'_>, args: &[Arg<'_>]) {
        let (name, sizes) = (CString::new(launch.kernel).unwrap(), self.sizes(launch.kernel));
        let mut values: Vec<u64> = args.iter().map(value).collect();
        let given: Vec<usize> =
            args.iter().map(|arg| if matches!(arg, Arg::I32(_) | Arg::F32(_)) { 4 } else { 8 }).collect();
        assert_eq!(sizes, Some(given), "arguments of {}", launch.kernel);
        let mut pointers: Vec<*mut c_void> =
            values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
        let grid = launch.grid.map(|n| u32::try_from(n).unwrap());
        let block = [u32::try_from(launch.threads).unwrap(), 1, 1];
        let _guard = self.one_launch.lock().unwrap();
        // SAFETY: arguments have the sizes that the kernel takes, and memory that the caller's borrows keep; that a kernel stays
        // within it is what these tests are about.
        let code = unsafe {
            (self.set_schedule)(SCHEDULE.get());
            (self.launch)(
                name.as_ptr(),
                grid.as_ptr(),
                block.as_ptr(),
                launch.shared_bytes,
                pointers.as_mut_ptr(),
            )
        };
        assert_eq!(code, 0, "there is no kernel {}", launch.kernel);
    }

    fn schedules(&self) -> Vec<i32> {
        vec![0, 1, 2, 3]
    }

    fn set_schedule(&self, schedule: i32) {
        SCHEDULE.set(schedule);
    }
}

/// An argument's bits; little-endian, so that a number's four bytes come first.
pub(crate) fn value(arg: &Arg<'_>) -> u64 {
    match *arg {
        Arg::Memory { at, .. } => at as u64,
        Arg::Null => 0,
        Arg::I32(x) => u64::from(x.cast_unsigned()),
        Arg::F32(x) => u64::from(x.to_bits()),
    }
}

/// Every test of this file's neighbours again, in a process in which an address sanitizer watches the kernels. Shared memory is allocated
/// exactly, and so is every argument.
#[test]
fn nothing_is_read_or_written_beyond_its_memory() {
    if std::env::var_os("BATON_KERNELS").is_some() || !has_compiler() {
        return;
    }
    let attention = [("f16", 96), ("bf16", 16)];
    let flags = ["-fsanitize=address", "-O1"];
    let library = Build { attention: &attention, flags: &flags, patches: &[] }.made();
    let found = Command::new("g++").arg("-print-file-name=libasan.so").output().unwrap();
    let runtime = String::from_utf8(found.stdout).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--test-threads=1", "within_bounds"])
        .env("BATON_KERNELS", library)
        .env("LD_PRELOAD", runtime.trim())
        .env("ASAN_OPTIONS", "detect_leaks=0:detect_stack_use_after_return=0")
        .output()
        .unwrap();
    let text =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success() && !text.contains(" 0 passed"), "{text}");
}

/// What reaches a card when there is one (`BATON_KERNELS=card`), on the driver of `cuda/fake`.
#[test]
fn the_way_to_a_card_works_on_the_driver_for_tests() {
    if std::env::var_os("BATON_KERNELS").is_some() || !has_compiler() {
        return;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cuda-driver-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    fs::copy(Build::default().made(), folder.join("libbaton_kernels.so")).unwrap();
    let driver = ["fake/driver.cpp", "fake/graph.cpp", "fake/ipc.cpp"].map(|file| cuda_folder().join(file));
    let mut compiler = Command::new("g++");
    compiler.args(["-std=c++17", "-O0", "-fPIC", "-shared"]).args(driver).args(["-ldl", "-o"]);
    assert!(compiler.arg(folder.join("libcuda.so.1")).status().unwrap().success());
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["rows::", "blocks::", "both_ends_sum", "a_byte_that_changed", "decode_agrees"])
        .env("BATON_KERNELS", "card")
        .env("LD_LIBRARY_PATH", &folder)
        .output()
        .unwrap();
    fs::remove_dir_all(folder).unwrap();
    let text =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success() && text.contains(" 9 passed"), "{text}");
}
