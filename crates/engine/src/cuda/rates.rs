//! What a device does at most, for shares of it: products of bf16 matrices, and bytes copied within it and to and from the host.

use std::sync::Arc;
use std::time::Instant;

use super::config::Half;
use super::driver::{Device, DeviceError, Memory, Pinned, Stream};
use super::probe::CudaFound;
use super::products::{Factors, Products, ROW_UNIT};
use crate::error::EngineBuildError;

/// Times each is done, after one that does not count.
const REPEATS: u32 = 20;

/// Rates of one device; each is the mean over what was queued at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CudaRates {
    /// Operations of a product of square bf16 matrices into f32, in 10^12 a second; a multiply-add is two.
    pub matrix_tflops: f64,
    /// Bytes read and written by copies within the device, in 10^9 a second.
    pub copy_gb_per_s: f64,
    /// Bytes from pinned host memory, in 10^9 a second.
    pub to_device_gb_per_s: f64,
    /// Bytes to pinned host memory, in 10^9 a second.
    pub from_device_gb_per_s: f64,
}

/// Measures card `ordinal` with matrices of `width` by `width`, a multiple of 16, and copies of `num_bytes`.
///
/// # Errors
/// [`EngineBuildError::Device`]: no such card, or one that fails; [`EngineBuildError::InvalidConfig`] for a width that is none.
pub fn cuda_rates(ordinal: u32, width: usize, num_bytes: usize) -> Result<CudaRates, EngineBuildError> {
    if width == 0 || !width.is_multiple_of(ROW_UNIT) || num_bytes == 0 {
        let reason = format!("multiples of {ROW_UNIT}, and some bytes to copy, are needed");
        return Err(EngineBuildError::invalid("width", width, reason));
    }
    CudaFound::look().check(ordinal).map_err(EngineBuildError::Device)?;
    let device = Device::open(ordinal)?;
    let operations = 2.0 * (width as f64).powi(3);
    let [copy, up, down] = copies(&device, num_bytes)?;
    let per_s = |bytes: usize, seconds: f64| bytes as f64 / seconds / 1e9;
    Ok(CudaRates {
        matrix_tflops: operations / product(&device, width)? / 1e12,
        copy_gb_per_s: per_s(2 * num_bytes, copy),
        to_device_gb_per_s: per_s(num_bytes, up),
        from_device_gb_per_s: per_s(num_bytes, down),
    })
}

/// Seconds that one of what `queue` queues takes.
fn seconds(stream: &Stream, mut queue: impl FnMut() -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
    queue()?;
    stream.synchronize()?;
    let began = Instant::now();
    for _ in 0..REPEATS {
        queue()?;
    }
    stream.synchronize()?;
    Ok(began.elapsed().as_secs_f64() / f64::from(REPEATS))
}

/// Of one product. What tensor cores take depends on values through the clock alone, so they are small and not all alike.
fn product(device: &Arc<Device>, width: usize) -> Result<f64, DeviceError> {
    let elements = width * width;
    let host = Pinned::new(device, 2 * elements)?;
    let memory = Memory::new(device, 2 * 2 * elements + 4 * elements)?;
    let (x, weight) = (memory.at(0, 2 * elements), memory.at(2 * elements, 2 * elements));
    let out = memory.at(4 * elements, 4 * elements);
    let stream = Stream::new(device)?;
    // SAFETY: nothing uses it yet.
    let bytes = unsafe { host.get_mut(0, 2 * elements) };
    for (nth, element) in bytes.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        // Exponents near that of 2^-6.
        let bits = (nth as u32).wrapping_mul(0x9E37_79B9) >> 16;
        *element = (0x3C00 | (bits & 0x80FF) as u16).to_le_bytes();
    }
    // SAFETY: both copies are waited for before the bytes are touched again.
    unsafe {
        stream.upload(bytes, x)?;
        stream.upload(bytes, weight)?;
    }
    stream.synchronize()?;
    let mut products = Products::new(device, Half::Bf16)?;
    let weight = products.weight(weight, width, width)?;
    let factors = Factors { x, out, num_rows: width };
    // SAFETY: everything lives until the stream was waited for.
    seconds(&stream, || unsafe { products.multiply(&stream, &weight, factors) })
}

/// Of one copy within the device, to it, and from it.
fn copies(device: &Arc<Device>, len: usize) -> Result<[f64; 3], DeviceError> {
    let host = Pinned::new(device, len)?;
    let memory = Memory::new(device, 2 * len)?;
    let (from, to) = (memory.at(0, len), memory.at(len, len));
    let stream = Stream::new(device)?;
    // SAFETY: everything lives, and nobody looks at the host's side, until the stream was waited for.
    unsafe {
        let up = seconds(&stream, || stream.upload(host.get(0, len), from))?;
        let within = seconds(&stream, || stream.copy(from, to))?;
        let down = seconds(&stream, || stream.download(to, host.get_mut(0, len)))?;
        Ok([within, up, down])
    }
}
