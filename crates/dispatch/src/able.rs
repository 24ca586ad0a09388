//! Which workers can take a request at all.

use baton_handoff::InstanceId;

use crate::cost::Measured;
use crate::{Layout, Need, PlaceError, Role, WorkerState, WorkerView};

/// The workers that may be chosen for one request, by position in the fleet; memory is used again from request to request.
#[derive(Debug)]
pub(crate) struct Able {
    pub(crate) prefills: Vec<usize>,
    pub(crate) decodes: Vec<usize>,
    /// What all workers measured of themselves, those that may not be chosen among them.
    pub(crate) measured: Measured,
}

impl Able {
    pub(crate) const fn new() -> Self {
        Self { prefills: Vec::new(), decodes: Vec::new(), measured: Measured::NONE }
    }

    /// Looks at every worker.
    ///
    /// # Errors
    /// [`PlaceError`], when no decode worker may be chosen.
    pub(crate) fn survey(
        &mut self,
        workers: &[WorkerView],
        need: &Need<'_>,
        layout: Layout,
    ) -> Result<(), PlaceError> {
        self.prefills.clear();
        self.decodes.clear();
        self.measured = Measured::NONE;
        let (prompt_blocks, most_blocks) = (need.prompt_blocks(), need.most_blocks());
        let mut error = PlaceError::NoWorker;
        for (at, view) in workers.iter().enumerate() {
            // In the same pass, since it is the memory of all views that takes time.
            self.measured.take_in(view);
            let blocks = u64::from(view.total_blocks);
            match view.role {
                _ if view.state != WorkerState::Ready => {}
                Role::Prefill => {
                    if blocks >= prompt_blocks && layout == Layout::Disaggregated {
                        self.prefills.push(at);
                    }
                }
                Role::Decode if blocks < most_blocks => {
                    // Of the reasons for a refusal, the one that is nearest to a placement.
                    if error == PlaceError::NoWorker {
                        error = PlaceError::TooLarge;
                    }
                }
                Role::Decode if view.num_waiting >= need.max_waiting => error = PlaceError::Saturated,
                Role::Decode => self.decodes.push(at),
            }
        }
        for able in [&mut self.prefills, &mut self.decodes] {
            spare(able, workers, need.avoid);
        }
        if self.decodes.is_empty() { Err(error) } else { Ok(()) }
    }
}

/// Leaves out those to avoid, unless that leaves none.
fn spare(able: &mut Vec<usize>, workers: &[WorkerView], avoid: &[InstanceId]) {
    let is_to_avoid = |at: &usize| avoid.contains(&workers[*at].instance);
    if !avoid.is_empty() && !able.iter().all(is_to_avoid) {
        able.retain(|at| !is_to_avoid(at));
    }
}
