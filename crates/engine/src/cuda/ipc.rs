//! Device memory that another process of this host opens: CUDA IPC.
//!
//! What is exported is a whole allocation of the driver's, of which small ones share one; so only what is a multiple of
//! [`GRANULE`] is exported, and nothing else of this process lies in it.

use std::ffi::c_char;
use std::sync::Arc;

use cudarc::driver::sys;

use super::driver::{Device, DeviceError, Memory, Span, failed};

type Outcome<T> = Result<T, DeviceError>;

/// In which the driver takes memory from the device.
pub(super) const GRANULE: usize = 2 << 20;
/// Bytes by which another process opens memory.
pub(super) const HANDLE_BYTES: usize = 64;

impl Memory {
    /// By what another process opens it, as long as it lives here.
    pub(super) fn export(&self, device: &Device) -> Outcome<[u8; HANDLE_BYTES]> {
        device.bind()?;
        if !self.len().is_multiple_of(GRANULE) {
            return Err(DeviceError::new("export memory", format!("{} bytes may not be alone", self.len())));
        }
        let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        // SAFETY: the memory lives; the driver fills the handle.
        unsafe { sys::cuIpcGetMemHandle(&raw mut handle, self.all().address) }
            .result()
            .map_err(failed("export memory"))?;
        // A C `char` is signed on some machines and not on others.
        Ok(handle.reserved.map(|byte| byte.to_ne_bytes()[0]))
    }
}

/// Memory of another process, reached from this device.
pub(super) struct Opened {
    device: Arc<Device>,
    address: sys::CUdeviceptr,
    len: usize,
}

impl Opened {
    /// Opens at least `len` bytes. That the handle's maker is on this host is known: what a foreign handle leads to is not.
    pub(super) fn open(device: &Arc<Device>, handle: [u8; HANDLE_BYTES], len: usize) -> Outcome<Opened> {
        device.bind()?;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| c_char::from_ne_bytes([byte])) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: the driver checks the handle; what it gives is closed once, in `drop`.
        unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, flags) }
            .result()
            .map_err(failed("open another process's memory"))?;
        let opened = Opened { device: Arc::clone(device), address, len };
        match opened.told_len() {
            // Where the driver does not tell, the ring's length is what both sides agreed on.
            Some(found) if found < len => {
                let reason = format!("it has {found} bytes, not {len}");
                Err(DeviceError::new("open another process's memory", reason))
            }
            _ => Ok(opened),
        }
    }

    fn told_len(&self) -> Option<usize> {
        let (mut base, mut len) = (0, 0);
        // SAFETY: the driver fills two numbers.
        let told = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut len, self.address) };
        told.result().ok().map(|()| len)
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// `len` bytes from `offset`; `None` when they do not lie within.
    pub(super) fn at(&self, offset: usize, len: usize) -> Option<Span> {
        let fits = offset <= self.len && len <= self.len - offset;
        fits.then(|| Span { address: self.address + offset as u64, len })
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: opened once; work that reached it was waited for by whoever queued it.
        let _ = unsafe { sys::cuIpcCloseMemHandle(self.address) };
    }
}
