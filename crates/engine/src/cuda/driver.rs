//! CUDA's driver behind owners that give back what they took: a device's context, streams, events, memory, modules.
//!
//! Every owner holds its [`Device`], so a context outlives whatever was made in it. A context is current per thread:
//! whoever calls from a thread of his own calls [`Device::bind`] first.

use std::ffi::{CString, c_void};
use std::fmt;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use crate::error::EngineBuildError;

/// What the driver refused, and its words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceError {
    what: &'static str,
    reason: String,
}

impl DeviceError {
    pub(crate) fn new(what: &'static str, reason: impl fmt::Display) -> DeviceError {
        DeviceError { what, reason: reason.to_string() }
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA can't {}: {}", self.what, self.reason)
    }
}

impl From<DeviceError> for EngineBuildError {
    fn from(error: DeviceError) -> Self {
        Self::Device(error.to_string())
    }
}

type Outcome<T> = Result<T, DeviceError>;

/// What a library says of a failure.
pub(crate) trait Reason {
    fn reason(&self) -> String;
}

impl Reason for result::DriverError {
    fn reason(&self) -> String {
        self.error_string().map_or_else(|_| self.to_string(), |text| text.to_string_lossy().into_owned())
    }
}

impl Reason for cudarc::cublaslt::result::CublasError {
    fn reason(&self) -> String {
        self.to_string()
    }
}

/// For `map_err`: what was tried.
pub(crate) fn failed<E: Reason>(what: &'static str) -> impl FnOnce(E) -> DeviceError {
    move |error| DeviceError::new(what, error.reason())
}

/// A card with its primary context.
pub(crate) struct Device {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: a context is a handle that the driver lets every thread make current, at the same time too.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Takes the primary context of device `ordinal` and makes it current on this thread. The caller has asked
    /// [`super::probe`] whether the libraries are there.
    pub(crate) fn open(ordinal: u32) -> Outcome<Arc<Device>> {
        result::init().map_err(failed("start"))?;
        let device = result::device::get(ordinal.cast_signed()).map_err(failed("find the device"))?;
        // SAFETY: the driver just named the device; the context is released once, in `drop`.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(failed("make a context"))?;
        let device = Arc::new(Device { device, context });
        device.bind()?;
        Ok(device)
    }

    /// Makes the context current on this thread; cheap when it is.
    pub(crate) fn bind(&self) -> Outcome<()> {
        // SAFETY: the context was retained and is released only when `self` is dropped.
        unsafe { result::ctx::set_current(self.context) }.map_err(failed("use its context"))
    }

    /// Bytes free, and bytes in all.
    pub(crate) fn memory(&self) -> Outcome<(usize, usize)> {
        self.bind()?;
        result::mem_get_info().map_err(failed("say how much memory there is"))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`; everything made in the context held `self` and is gone.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Work in order.
pub(crate) struct Stream {
    device: Arc<Device>,
    raw: sys::CUstream,
}

// SAFETY: a handle that any thread may use at any time; the driver locks.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// A point in a stream.
pub(crate) struct Event {
    device: Arc<Device>,
    raw: sys::CUevent,
}

// SAFETY: as for a stream.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Stream {
    /// One that waits for no other.
    pub(crate) fn new(device: &Arc<Device>) -> Outcome<Stream> {
        device.bind()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(failed("make a stream"))?;
        Ok(Stream { device: Arc::clone(device), raw })
    }

    pub(crate) const fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Returns when everything queued is done.
    pub(crate) fn synchronize(&self) -> Outcome<()> {
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::synchronize(self.raw) }.map_err(failed("finish a stream"))
    }

    /// What is queued from now on runs after `event` as it was last recorded; at once if it never was.
    pub(crate) fn wait(&self, event: &Event) -> Outcome<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both live.
        unsafe { result::stream::wait_event(self.raw, event.raw, flags) }.map_err(failed("wait for an event"))
    }

    /// `event` stands for all that is queued up to now.
    pub(crate) fn record(&self, event: &Event) -> Outcome<()> {
        // SAFETY: both live.
        unsafe { result::event::record(event.raw, self.raw) }.map_err(failed("record an event"))
    }

    /// Queues a kernel.
    ///
    /// # Safety
    /// Arguments are those of the kernel in number, order and type; the memory they name lives and is not touched
    /// by others until the stream is past this.
    pub(crate) unsafe fn launch(&self, kernel: Kernel, geometry: Geometry, args: &[Arg]) -> Outcome<()> {
        let mut values = [0u64; MAX_ARGS];
        let mut pointers = [std::ptr::null_mut::<c_void>(); MAX_ARGS];
        for ((value, pointer), arg) in values.iter_mut().zip(&mut pointers).zip(args) {
            // Little endian: a pointer to a u64 is one to each narrower type with its low bits.
            *value = arg.0;
            *pointer = std::ptr::from_mut(value).cast();
        }
        let Geometry { grid, block, shared_bytes } = geometry;
        // SAFETY: the caller's; the driver copies the arguments before it returns.
        unsafe {
            result::launch_kernel(
                kernel.raw,
                (grid[0], grid[1], grid[2]),
                (block[0], block[1], block[2]),
                shared_bytes,
                self.raw,
                &mut pointers[..args.len().min(MAX_ARGS)],
            )
        }
        .map_err(failed("launch a kernel"))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = self.synchronize();
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { result::stream::destroy(self.raw) };
    }
}

impl Event {
    pub(crate) fn new(device: &Arc<Device>) -> Outcome<Event> {
        device.bind()?;
        let raw = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(failed("make an event"))?;
        Ok(Event { device: Arc::clone(device), raw })
    }

    /// One for which a waiting thread sleeps: for threads that share a core with others.
    pub(crate) fn sleeping(device: &Arc<Device>) -> Outcome<Event> {
        use sys::CUevent_flags::{CU_EVENT_BLOCKING_SYNC as BLOCKING, CU_EVENT_DISABLE_TIMING as UNTIMED};
        device.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the driver writes a handle or fails; it is destroyed once, in `drop`.
        unsafe { sys::cuEventCreate(&raw mut raw, BLOCKING as u32 | UNTIMED as u32) }
            .result()
            .map_err(failed("make an event"))?;
        Ok(Event { device: Arc::clone(device), raw })
    }

    /// Returns when what it stands for is done; at once if it was never recorded.
    pub(crate) fn synchronize(&self) -> Outcome<()> {
        // SAFETY: the event lives as long as `self`.
        unsafe { result::event::synchronize(self.raw) }.map_err(failed("wait for an event"))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { result::event::destroy(self.raw) };
    }
}

/// Bytes on the device, of whatever content.
pub(crate) struct Memory {
    device: Arc<Device>,
    address: sys::CUdeviceptr,
    len: usize,
}

impl Memory {
    /// Takes `len` bytes, aligned to at least 256.
    pub(crate) fn new(device: &Arc<Device>, len: usize) -> Outcome<Memory> {
        device.bind()?;
        // SAFETY: the driver gives memory or an error; it is freed once, in `drop`.
        let address = unsafe { result::malloc_sync(len.max(1)) }
            .map_err(|error| DeviceError::new("give memory", format!("{len} bytes: {}", error.reason())))?;
        Ok(Memory { device: Arc::clone(device), address, len })
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Address of the byte at `offset`, before which and after which `len` bytes lie within.
    ///
    /// # Panics
    /// When they don't.
    pub(crate) fn at(&self, offset: usize, len: usize) -> Span {
        assert!(offset <= self.len && len <= self.len - offset, "{len} bytes from {offset} of {}", self.len);
        Span { address: self.address + offset as u64, len }
    }

    /// All of it.
    pub(crate) fn all(&self) -> Span {
        self.at(0, self.len)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: taken in `new`, freed once; streams that used it were finished by their owners before.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

/// A part of device memory, without a hold on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) address: u64,
    pub(crate) len: usize,
}

impl Span {
    /// Part of it.
    ///
    /// # Panics
    /// When it is not within.
    pub(crate) fn part(self, offset: usize, len: usize) -> Span {
        assert!(offset <= self.len && len <= self.len - offset, "{len} bytes from {offset} of {}", self.len);
        Span { address: self.address + offset as u64, len }
    }
}

/// Host memory that copies to and from the device go through without a stop. Not write-combined: it is read too.
pub(crate) struct Pinned {
    device: Arc<Device>,
    bytes: *mut u8,
    len: usize,
}

// SAFETY: memory and nothing else; whoever reaches into it argues for it.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(crate) fn new(device: &Arc<Device>, len: usize) -> Outcome<Pinned> {
        device.bind()?;
        // SAFETY: the driver gives memory or an error; it is freed once, in `drop`.
        let bytes = unsafe { result::malloc_host(len.max(1), 0) }
            .map_err(|error| DeviceError::new("pin memory", format!("{len} bytes: {}", error.reason())))?;
        let bytes = bytes.cast::<u8>();
        // SAFETY: as many bytes as were just given.
        unsafe { bytes.write_bytes(0, len) };
        Ok(Pinned { device: Arc::clone(device), bytes, len })
    }

    /// `len` bytes from `offset`.
    ///
    /// # Safety
    /// No copy that writes them is under way while the slice lives.
    pub(crate) unsafe fn get(&self, offset: usize, len: usize) -> &[u8] {
        assert!(offset <= self.len && len <= self.len - offset, "{len} bytes from {offset} of {}", self.len);
        // SAFETY: within the memory, which was zeroed; the rest is the caller's.
        unsafe { std::slice::from_raw_parts(self.bytes.add(offset), len) }
    }

    /// `len` bytes from `offset`, to write.
    ///
    /// # Safety
    /// No copy that reads or writes them is under way, and no other slice of them lives.
    #[allow(clippy::mut_from_ref, reason = "parts of one ring are lent apart from each other")]
    pub(crate) unsafe fn get_mut(&self, offset: usize, len: usize) -> &mut [u8] {
        assert!(offset <= self.len && len <= self.len - offset, "{len} bytes from {offset} of {}", self.len);
        // SAFETY: within the memory, which was zeroed; the rest is the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.add(offset), len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: given in `new`, freed once.
        let _ = unsafe { result::free_host(self.bytes.cast()) };
    }
}

/// Compiled kernels.
pub(crate) struct Module {
    device: Arc<Device>,
    raw: sys::CUmodule,
}

// SAFETY: a handle that the driver locks.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// One kernel of a module that lives.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    raw: sys::CUfunction,
}

// SAFETY: as for a module.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Module {
    /// Loads a cubin, or PTX that ends with a zero.
    pub(crate) fn load(device: &Arc<Device>, image: &[u8]) -> Outcome<Module> {
        device.bind()?;
        // SAFETY: the image was made by the compiler and is checked by the driver.
        let raw = unsafe { result::module::load_data(image.as_ptr().cast()) }
            .map_err(failed("load the kernels"))?;
        Ok(Module { device: Arc::clone(device), raw })
    }

    /// The kernel of this name. `shared_bytes` is the most dynamic shared memory that it is launched with.
    pub(crate) fn kernel(&self, name: &str, shared_bytes: u32) -> Outcome<Kernel> {
        let wanted = || CString::new(name).map_err(|error| DeviceError::new("name a kernel", error));
        // SAFETY: the module lives.
        let raw = unsafe { result::module::get_function(self.raw, wanted()?) }
            .map_err(|error| DeviceError::new("find a kernel", format!("{name}: {}", error.reason())))?;
        if shared_bytes > DEFAULT_SHARED_BYTES {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was just found.
            unsafe { result::function::set_function_attribute(raw, attribute, shared_bytes.cast_signed()) }
                .map_err(|error| DeviceError::new("give shared memory", format!("{name}: {}", error.reason())))?;
        }
        Ok(Kernel { raw })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: loaded in `load`, unloaded once; streams that ran its kernels were finished before.
        let _ = unsafe { result::module::unload(self.raw) };
    }
}

/// Dynamic shared memory that every kernel may have without asking.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;
/// Arguments of a kernel, at most.
const MAX_ARGS: usize = 32;

/// How many threads run a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
}

/// One argument: its bits, from the lowest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arg(u64);

impl From<Span> for Arg {
    fn from(span: Span) -> Arg {
        Arg(span.address)
    }
}

impl From<Option<Span>> for Arg {
    /// Nothing is the null pointer.
    fn from(span: Option<Span>) -> Arg {
        Arg(span.map_or(0, |span| span.address))
    }
}

impl From<u32> for Arg {
    fn from(value: u32) -> Arg {
        Arg(u64::from(value))
    }
}

impl From<u64> for Arg {
    fn from(value: u64) -> Arg {
        Arg(value)
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Arg {
        Arg(u64::from(value.to_bits()))
    }
}
