//! A CUDA driver, cuBLASLt and Baton's kernels for a machine without a card, built by g++ from `crates/engine/cuda`. What is queued runs
//! only when somebody waits for it, so a missing wait shows; what is not given back is counted.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::repository;

/// The folder with the libraries.
#[derive(Clone, Debug)]
pub struct FakeCuda {
    folder: PathBuf,
    library: Option<Library>,
}

#[derive(Clone, Copy, Debug)]
struct Library(*mut c_void);

/// What was taken from the driver and not given back, and what ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Allocations on the device, pinned memory, streams, events, modules, contexts, objects of cuBLASLt.
    pub held: [usize; 7],
    /// Kernels launched.
    pub num_launches: usize,
    /// Matrix products.
    pub num_products: usize,
}

/// What became of CUDA graphs since the process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphCounts {
    /// Not given back.
    pub held: usize,
    /// Captured.
    pub num_captured: usize,
    /// Launched.
    pub num_launched: usize,
}

impl FakeCuda {
    /// Builds the libraries when they are not there yet; `None` after it was said why a test must do without.
    ///
    /// # Panics
    /// When there is no g++ or the build fails, under `CI=true`.
    pub fn build_or_skip() -> Option<Self> {
        match build() {
            Ok(folder) => Some(Self { folder, library: None }),
            Err(error) => {
                crate::skip(&format!("the fake CUDA driver can't be built: {error}"));
                None
            }
        }
    }

    /// The variable by which a process finds them, `NAME=VALUE`.
    pub fn env(&self) -> String {
        format!("LD_LIBRARY_PATH={}", self.folder.display())
    }

    /// Loads them into this process, where they are then found under their names.
    ///
    /// # Panics
    /// When they can't be loaded.
    #[must_use]
    pub fn loaded(self) -> Self {
        let driver = open(&self.folder.join("libcuda.so"));
        open(&self.folder.join("libcublasLt.so"));
        Self { library: Some(Library(driver)), ..self }
    }

    /// From now on this process may open its own rings, which a real driver refuses: for tests with both ends in one process.
    ///
    /// # Panics
    /// As [`Self::counts`].
    #[must_use]
    pub fn opening_own(self) -> Self {
        // SAFETY: the symbol is this function in the library's source, and takes nothing.
        unsafe { std::mem::transmute::<*mut c_void, extern "C" fn()>(self.symbol(c"fake_open_own"))() };
        self
    }

    /// Rings of others that this process has open, and handles that it gave out since it began.
    ///
    /// # Panics
    /// As [`Self::counts`].
    pub fn ipc_counts(&self) -> (usize, usize) {
        let [num_open, num_exported] = self.numbers(c"fake_ipc_counts");
        (num_open, num_exported)
    }

    /// Since the process began.
    ///
    /// # Panics
    /// When the libraries are not loaded into this process.
    pub fn counts(&self) -> Counts {
        let all: [usize; 9] = self.numbers(c"fake_counts");
        let [held @ .., num_launches, num_products] = all;
        Counts { held, num_launches, num_products }
    }

    /// Since the process began.
    ///
    /// # Panics
    /// When the libraries are not loaded into this process.
    pub fn graph_counts(&self) -> GraphCounts {
        let [held, num_captured, num_launched] = self.numbers(c"fake_graph_counts");
        GraphCounts { held, num_captured, num_launched }
    }

    /// Plants a fault: in graphs captured from now on, this argument of the kernels whose names begin so has the memory that it had when the graph first
    /// ran.
    ///
    /// # Panics
    /// When the libraries are not loaded into this process, or the name has a zero in it.
    pub fn freeze(&self, kernel: &str, argument: i32) {
        let name = CString::new(kernel).expect("a name");
        // SAFETY: the symbol is this function in the library's source, which copies the name.
        unsafe {
            std::mem::transmute::<*mut c_void, extern "C" fn(*const c_char, c_int)>(
                self.symbol(c"fake_freeze"),
            )(name.as_ptr(), argument);
        }
    }

    fn symbol(&self, name: &CStr) -> *mut c_void {
        let library = self.library.expect("loaded into this process");
        // SAFETY: the library stays loaded; the name is a C string.
        let symbol = unsafe { libc::dlsym(library.0, name.as_ptr()) };
        assert!(!symbol.is_null(), "the library has {name:?}");
        symbol
    }

    /// What a function that fills `N` numbers says.
    fn numbers<const N: usize>(&self, function: &CStr) -> [usize; N] {
        let mut all = [0usize; N];
        // SAFETY: the symbol is a function in the library's source that fills so many numbers.
        unsafe {
            std::mem::transmute::<*mut c_void, extern "C" fn(*mut usize)>(self.symbol(function))(
                all.as_mut_ptr(),
            );
        }
        all
    }
}

/// Memory of other processes' devices that a process has open, by the names that the driver gives it: which process made it.
///
/// # Panics
/// When the process is gone.
pub fn opened_by(pid: u32) -> Vec<u32> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("a process that runs");
    let makers = maps.lines().filter_map(|line| {
        let (_, name) = line.split_once("/memfd:fake-cuda-")?;
        name.split('-').next()?.parse::<u32>().ok()
    });
    makers.filter(|&maker| maker != pid).collect()
}

fn open(path: &Path) -> *mut c_void {
    let name = CString::new(path.as_os_str().as_bytes()).expect("a path without zeros");
    // SAFETY: a library of this repository, whose constructors touch nothing of ours.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    assert!(!library.is_null(), "can't load {}", path.display());
    library
}

fn build() -> Result<PathBuf, String> {
    let sources = repository().join("crates/engine/cuda");
    let folder =
        crate::binary::target_dir().join("fake-cuda").join(format!("{:016x}", fingerprint(&sources)?));
    let parent = folder.parent().unwrap_or(&folder);
    std::fs::create_dir_all(parent).map_err(|error| at(parent, &error))?;
    // Tests of several processes may want it at once.
    let lock = File::create(parent.join("lock")).map_err(|error| at(parent, &error))?;
    lock.lock().map_err(|error| at(parent, &error))?;
    if folder.is_dir() {
        return Ok(folder);
    }
    let unfinished = parent.join("unfinished");
    let output = Command::new("sh")
        .arg(sources.join("fake/build.sh"))
        .arg(&unfinished)
        .output()
        .map_err(|error| format!("sh: {error}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    std::fs::rename(&unfinished, &folder).map_err(|error| at(&unfinished, &error))?;
    Ok(folder)
}

/// Of everything that the libraries are built from.
fn fingerprint(sources: &Path) -> Result<u64, String> {
    let mut files = vec![sources.join("order")];
    for part in ["fake", "kernels", "peer", "shim"] {
        let folder = sources.join(part);
        let entries = std::fs::read_dir(&folder).map_err(|error| at(&folder, &error))?;
        files.extend(entries.flatten().map(|entry| entry.path()).filter(|path| path.is_file()));
    }
    files.sort();
    let mut hasher = DefaultHasher::new();
    for file in files {
        file.file_name().hash(&mut hasher);
        std::fs::read(&file).map_err(|error| at(&file, &error))?.hash(&mut hasher);
    }
    Ok(hasher.finish())
}

fn at(path: &Path, error: &std::io::Error) -> String {
    format!("{}: {error}", path.display())
}
