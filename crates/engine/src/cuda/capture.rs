//! CUDA graphs: work that is queued once, and from then on launched as one.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::driver::{Device, DeviceError, Stream, failed};

/// Captured work, ready to be launched. It names the memory that the work named: whoever captures sees to it that this memory stays
/// where it is as long as the graph lives.
pub(crate) struct Graph {
    device: Arc<Device>,
    raw: sys::CUgraphExec,
}

// SAFETY: a handle that any thread may use, one at a time; nothing in it is bound to a thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Has `queue` queue its work on `stream`, which does none of it and notes it down.
    ///
    /// # Errors
    /// What `queue` said, or the driver; the stream is as before.
    pub(crate) fn capture(
        device: &Arc<Device>,
        stream: &Stream,
        queue: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<Graph, DeviceError> {
        // What other threads do meanwhile, copies of KV among it, is none of the capture's business.
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives; the capture is ended below, whatever happens.
        unsafe { result::stream::begin_capture(stream.raw(), mode) }.map_err(failed("begin a graph"))?;
        let queued = queue();
        // SAFETY: as above.
        let ended = unsafe { result::stream::end_capture(stream.raw()) }.map_err(failed("end a graph"));
        // What kept work from being queued says more than that the capture is spoilt.
        let template = ended.map(Template);
        queued?;
        let template = template?;
        let no_flags = sys::CUgraphInstantiate_flags(0);
        // SAFETY: the template lives; what is made of it is destroyed once, in `drop`.
        let raw =
            unsafe { result::graph::instantiate(template.0, no_flags) }.map_err(failed("make a graph"))?;
        Ok(Graph { device: Arc::clone(device), raw })
    }

    /// Queues all of it.
    ///
    /// # Safety
    /// As the launches that were captured, all of them.
    pub(crate) unsafe fn launch(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both live; the rest is the caller's.
        unsafe { result::graph::launch(self.raw, stream.raw()) }.map_err(failed("launch a graph"))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: made in `capture`, destroyed once; a launch under way keeps what it needs.
        let _ = unsafe { result::graph::exec_destroy(self.raw) };
    }
}

/// What was noted down, from which a graph is made.
struct Template(sys::CUgraph);

impl Drop for Template {
    fn drop(&mut self) {
        // SAFETY: a graph that a capture gave, destroyed once.
        let _ = unsafe { result::graph::destroy(self.0) };
    }
}
