//! Copies between host and device, queued on a stream.

use cudarc::driver::{result, sys};

use super::driver::{DeviceError, Span, Stream, failed};

type Outcome = Result<(), DeviceError>;

impl Stream {
    /// Queues a copy to the device.
    ///
    /// # Safety
    /// `from` is as long as `to`, lives and keeps its bytes until the stream is past this; nobody else touches `to`.
    pub(crate) unsafe fn upload(&self, from: &[u8], to: Span) -> Outcome {
        assert_eq!(from.len(), to.len, "an upload of another length");
        // SAFETY: the caller's; lengths were compared.
        unsafe { result::memcpy_htod_async(to.address, from, self.raw()) }
            .map_err(failed("copy to the device"))
    }

    /// Queues a copy from the device.
    ///
    /// # Safety
    /// `to` lives and is touched by nobody until the stream is past this.
    pub(crate) unsafe fn download(&self, from: Span, to: &mut [u8]) -> Outcome {
        assert_eq!(to.len(), from.len, "a download of another length");
        // SAFETY: the caller's; lengths were compared.
        unsafe { result::memcpy_dtoh_async(to, from.address, self.raw()) }
            .map_err(failed("copy from the device"))
    }

    /// Queues a copy within the device.
    ///
    /// # Safety
    /// Both live until the stream is past this, and nobody else touches `to`.
    pub(crate) unsafe fn copy(&self, from: Span, to: Span) -> Outcome {
        assert_eq!(from.len, to.len, "a copy of another length");
        // SAFETY: the caller's; lengths were compared.
        unsafe { result::memcpy_dtod_async(to.address, from.address, from.len, self.raw()) }
            .map_err(failed("copy within the device"))
    }

    /// Queues a copy of `num_rows` rows between host and device, each side with a pitch of its own.
    ///
    /// # Safety
    /// As [`Self::upload`] and [`Self::download`], for every row.
    pub(crate) unsafe fn copy_rows(&self, host: HostRows, device: Rows, rows: RowShape, up: bool) -> Outcome {
        use sys::CUmemorytype::{CU_MEMORYTYPE_DEVICE as DEVICE, CU_MEMORYTYPE_HOST as HOST};
        let reach = |pitch: usize| rows.num_rows.saturating_sub(1) * pitch + rows.row_bytes;
        assert!(reach(device.pitch) <= device.span.len, "rows beyond the end of device memory");
        let (from, to) = if up { (HOST, DEVICE) } else { (DEVICE, HOST) };
        let (from_pitch, to_pitch) = if up { (host.pitch, device.pitch) } else { (device.pitch, host.pitch) };
        // Of each side the driver looks at the address of its kind of memory alone.
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: from,
            srcHost: host.bytes.cast_const().cast(),
            srcDevice: device.span.address,
            srcArray: std::ptr::null_mut(),
            srcPitch: from_pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: to,
            dstHost: host.bytes.cast(),
            dstDevice: device.span.address,
            dstArray: std::ptr::null_mut(),
            dstPitch: to_pitch,
            WidthInBytes: rows.row_bytes,
            Height: rows.num_rows,
        };
        // SAFETY: the caller's; the structure is copied before the call returns.
        unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, self.raw()) }.result().map_err(failed("copy rows"))
    }
}

/// Rows in host memory.
#[derive(Clone, Copy)]
pub(crate) struct HostRows {
    pub(crate) bytes: *mut u8,
    pub(crate) pitch: usize,
}

/// Rows in device memory.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) span: Span,
    pub(crate) pitch: usize,
}

/// How many rows of how many bytes.
#[derive(Clone, Copy)]
pub(crate) struct RowShape {
    pub(crate) num_rows: usize,
    pub(crate) row_bytes: usize,
}
