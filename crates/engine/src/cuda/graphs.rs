//! Decode steps as CUDA graphs: which of them, what memory they share, and which are kept.
//!
//! A graph is captured for a number of rows and of items ([`Padded`]) when such a step comes for the second time: the first has then loaded every
//! kernel that it needs. All graphs read one upload buffer and write one buffer of drawn tokens, which stay where they are.

use std::collections::HashMap;
use std::sync::Arc;

use super::capture::Graph;
use super::drawn::Drawn;
use super::driver::{Device, DeviceError, Stream};
use super::forward::{Forward, Step};
use super::padded::{MAX_ROWS, Padded};
use super::tables::{Tables, Upload};

/// Graphs that are kept; beyond that the one goes that was not used for longest.
const MAX_GRAPHS: usize = 64;

/// The graphs of one engine.
pub(super) struct Graphs {
    known: HashMap<Padded, Known>,
    /// Counts steps, for `last_used`.
    step: u64,
    /// The driver refused one: steps are queued kernel by kernel then.
    refused: bool,
    pub(super) upload: Upload,
    pub(super) drawn: Drawn,
    pub(super) tables: Tables,
    device: Arc<Device>,
}

struct Known {
    /// Not yet, after the first such step.
    graph: Option<Graph>,
    last_used: u64,
}

/// Bytes on the device, beside what the driver takes for graphs themselves.
pub(super) const fn bytes_needed(max_padded_items: usize) -> usize {
    4 * Padded::max_words(max_padded_items) + 8 * MAX_ROWS
}

impl Graphs {
    pub(super) fn new(device: &Arc<Device>, max_padded_items: usize) -> Result<Graphs, DeviceError> {
        Ok(Graphs {
            known: HashMap::new(),
            step: 0,
            refused: false,
            upload: Upload::with_room(device, Padded::max_words(max_padded_items))?,
            drawn: Drawn::new(device, MAX_ROWS)?,
            tables: Tables::default(),
            device: Arc::clone(device),
        })
    }

    /// Whether a step that is padded so is launched as a graph.
    pub(super) fn takes(&mut self, padded: Padded) -> bool {
        if self.refused {
            return false;
        }
        self.step += 1;
        if let Some(known) = self.known.get_mut(&padded) {
            known.last_used = self.step;
            return true;
        }
        if self.known.len() >= MAX_GRAPHS {
            let oldest =
                self.known.iter().min_by_key(|(_, known)| known.last_used).map(|(padded, _)| *padded);
            oldest.map(|padded| self.known.remove(&padded));
        }
        self.known.insert(padded, Known { graph: None, last_used: self.step });
        false
    }

    /// Queues a step whose tables are built and uploaded: as its graph, which is captured first if there is none yet. What the driver can't
    /// capture is queued as it is, here and from then on.
    pub(super) fn launch(
        &mut self,
        stream: &Stream,
        forward: &mut Forward,
        padded: Padded,
    ) -> Result<(), DeviceError> {
        let Self { known, refused, upload, drawn, tables, device, .. } = self;
        let step = Step { stream, upload, tables };
        let Some(known) = known.get_mut(&padded) else { return forward.decode(step, drawn) };
        let graph = match &mut known.graph {
            Some(graph) => graph,
            none => match Graph::capture(device, stream, || forward.decode(step, drawn)) {
                Ok(graph) => none.insert(graph),
                Err(error) => {
                    tracing::warn!(%error, "decode steps are queued kernel by kernel from here on");
                    *refused = true;
                    return forward.decode(step, drawn);
                }
            },
        };
        // SAFETY: what was captured are launches of this very engine over memory that it keeps as long as its graphs; the caller finishes the
        // stream before the tables are uploaded again.
        unsafe { graph.launch(stream) }
    }
}
