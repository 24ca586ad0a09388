//! The committed modules on a card, through the driver's C interface: `library::the_way_to_a_card_works_on_the_driver_for_tests` keeps it working.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::Mutex;
use std::time::Instant;

use crate::device::{Arg, Device, Launch};
use crate::library::value;

type Handle = *mut c_void;

const MAX_DYNAMIC_SHARED: c_int = 8;

/// Both modules on the first card. One launch at a time, on one stream.
pub(crate) struct Card {
    library: Handle,
    context: Handle,
    stream: Handle,
    functions: Mutex<HashMap<String, Option<usize>>>,
    modules: [Handle; 2],
}

// SAFETY: handles of the driver may be used by any thread that has made the context its own, which `run` does.
unsafe impl Send for Card {}
// SAFETY: as above; launches are serialised by the mutex.
unsafe impl Sync for Card {}

/// A function of the driver by name and type.
///
/// # Safety
/// The driver's function of this name has this type.
unsafe fn symbol<F: Copy>(library: Handle, name: &CStr) -> F {
    // SAFETY: the library is open.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!found.is_null(), "the driver has no {name:?}");
    assert_eq!(size_of::<F>(), size_of::<Handle>());
    // SAFETY: by contract; a function pointer is as large as a pointer.
    unsafe { std::mem::transmute_copy(&found) }
}

fn succeeded(code: c_int, what: &str) {
    assert_eq!(code, 0, "{what} failed: CUDA error {code}");
}

impl Card {
    pub(crate) fn open() -> Card {
        // In the program, so that it can be taken to a card alone; copied, since the driver wants it aligned.
        let images = [
            include_bytes!("../../cuda/built/baton.fatbin").to_vec(),
            include_bytes!("../../cuda/built/peer/peer.fatbin").to_vec(),
        ];
        // SAFETY: the driver's interface, as its manual declares it.
        unsafe {
            let names = [c"libcuda.so.1", c"libcuda.so"];
            let open = |name: &CStr| libc::dlopen(name.as_ptr(), libc::RTLD_NOW);
            let library = names.into_iter().map(open).find(|library| !library.is_null());
            let library = library.expect("BATON_KERNELS=card needs a driver: there is no libcuda.so.1");
            let init: extern "C" fn(c_uint) -> c_int = symbol(library, c"cuInit");
            let retain: extern "C" fn(*mut Handle, c_int) -> c_int =
                symbol(library, c"cuDevicePrimaryCtxRetain");
            let set: extern "C" fn(Handle) -> c_int = symbol(library, c"cuCtxSetCurrent");
            let load: extern "C" fn(*mut Handle, *const u8) -> c_int = symbol(library, c"cuModuleLoadData");
            let create: extern "C" fn(*mut Handle, c_uint) -> c_int = symbol(library, c"cuStreamCreate");
            let [mut context, mut stream] = [std::ptr::null_mut(); 2];
            let mut modules = [std::ptr::null_mut(); 2];
            succeeded(init(0), "cuInit");
            succeeded(retain(&raw mut context, 0), "cuDevicePrimaryCtxRetain");
            succeeded(set(context), "cuCtxSetCurrent");
            for (module, image) in modules.iter_mut().zip(&images) {
                succeeded(load(module, image.as_ptr()), "cuModuleLoadData");
            }
            succeeded(create(&raw mut stream, 0), "cuStreamCreate");
            Card { library, context, stream, functions: Mutex::default(), modules }
        }
    }

    fn function(&self, kernel: &str, functions: &mut HashMap<String, Option<usize>>) -> Option<Handle> {
        let found = functions.entry(kernel.to_owned()).or_insert_with(|| {
            let name = CString::new(kernel).unwrap();
            self.modules.iter().find_map(|&module| {
                let mut function = std::ptr::null_mut();
                // SAFETY: as in `open`.
                let code = unsafe {
                    let get: extern "C" fn(*mut Handle, Handle, *const c_char) -> c_int =
                        symbol(self.library, c"cuModuleGetFunction");
                    get(&raw mut function, module, name.as_ptr())
                };
                (code == 0).then_some(function as usize)
            })
        });
        found.map(|function| function as Handle)
    }

    fn enter(&self) {
        // SAFETY: as in `open`.
        unsafe {
            let set: extern "C" fn(Handle) -> c_int = symbol(self.library, c"cuCtxSetCurrent");
            succeeded(set(self.context), "cuCtxSetCurrent");
        }
    }
}

impl Device for Card {
    fn has(&self, kernel: &str) -> bool {
        self.enter();
        self.function(kernel, &mut self.functions.lock().unwrap()).is_some()
    }

    fn run(&self, launch: &Launch<'_>, args: &[Arg<'_>]) {
        self.run_again(launch, args, 0);
    }
}

type LaunchKernel = extern "C" fn(
    Handle,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    Handle,
    *mut *mut c_void,
    *mut *mut c_void,
) -> c_int;

impl Card {
    /// Runs a kernel once, and then `repeats` times more; the seconds that one of these took.
    pub(crate) fn run_again(&self, launch: &Launch<'_>, args: &[Arg<'_>], repeats: u32) -> f64 {
        let mut functions = self.functions.lock().unwrap();
        self.enter();
        let function = self.function(launch.kernel, &mut functions);
        let function = function.unwrap_or_else(|| panic!("there is no kernel {}", launch.kernel));
        // SAFETY: the driver's interface, as its manual declares it; copies have the sizes of the arguments' memory.
        unsafe {
            let allocate: extern "C" fn(*mut u64, usize) -> c_int = symbol(self.library, c"cuMemAlloc_v2");
            let free: extern "C" fn(u64) -> c_int = symbol(self.library, c"cuMemFree_v2");
            let upload: extern "C" fn(u64, *const c_void, usize, Handle) -> c_int =
                symbol(self.library, c"cuMemcpyHtoDAsync_v2");
            let download: extern "C" fn(*mut c_void, u64, usize, Handle) -> c_int =
                symbol(self.library, c"cuMemcpyDtoHAsync_v2");
            let attribute: extern "C" fn(Handle, c_int, c_int) -> c_int =
                symbol(self.library, c"cuFuncSetAttribute");
            let wait: extern "C" fn(Handle) -> c_int = symbol(self.library, c"cuStreamSynchronize");
            let mut values: Vec<u64> = args.iter().map(value).collect();
            for (arg, place) in args.iter().zip(&mut values) {
                if let Arg::Memory { at, bytes, .. } = *arg {
                    succeeded(allocate(place, bytes.max(1)), "cuMemAlloc");
                    succeeded(upload(*place, at, bytes, self.stream), "cuMemcpyHtoDAsync");
                }
            }
            let shared = c_int::try_from(launch.shared_bytes).unwrap();
            succeeded(attribute(function, MAX_DYNAMIC_SHARED, shared), "cuFuncSetAttribute");
            self.launch(function, launch, &mut values);
            succeeded(wait(self.stream), launch.kernel);
            let start = Instant::now();
            (0..repeats).for_each(|_| self.launch(function, launch, &mut values));
            succeeded(wait(self.stream), launch.kernel);
            let seconds = start.elapsed().as_secs_f64() / f64::from(repeats.max(1));
            for (arg, place) in args.iter().zip(&values) {
                if let Arg::Memory { at, bytes, written: true, .. } = *arg {
                    succeeded(download(at, *place, bytes, self.stream), "cuMemcpyDtoHAsync");
                }
            }
            succeeded(wait(self.stream), launch.kernel);
            for (_, place) in args.iter().zip(values).filter(|(arg, _)| matches!(arg, Arg::Memory { .. })) {
                succeeded(free(place), "cuMemFree");
            }
            seconds
        }
    }

    /// # Safety
    /// `values` are what the kernel takes.
    unsafe fn launch(&self, function: Handle, launch: &Launch<'_>, values: &mut [u64]) {
        let mut pointers: Vec<*mut c_void> =
            values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
        let [x, y, z] = launch.grid.map(|n| c_uint::try_from(n).unwrap());
        let (threads, shared) = (launch.threads as c_uint, launch.shared_bytes as c_uint);
        // SAFETY: the driver's interface, as its manual declares it.
        let code = unsafe {
            let start: LaunchKernel = symbol(self.library, c"cuLaunchKernel");
            let (stream, arguments) = (self.stream, pointers.as_mut_ptr());
            start(function, x, y, z, threads, 1, 1, shared, stream, arguments, std::ptr::null_mut())
        };
        succeeded(code, launch.kernel);
    }
}
