//! A row in parts, between two steps.

use baton_scheduler::{PlanRow, RowPart, SequenceId, StepPlan};

use super::Decoder;
use crate::scratch::Matrix;

/// What the layers so far made of a row: its residual, and what is still to be added to that.
#[derive(Default)]
pub(crate) struct Carry {
    /// Whose row, for the token at which position, and how many layers of it are done.
    at: Option<(SequenceId, usize, usize)>,
    residual: Vec<f32>,
    projected: Vec<f32>,
}

impl Decoder {
    /// Before a step: puts a row that was begun, and its rotary angles, where layers take them from.
    ///
    /// # Errors
    /// Another row was left off last, or at another layer.
    pub(crate) fn restore(&self, plan: &StepPlan, carry: &Carry) -> Result<(), String> {
        let Some((row, part)) = last_part(plan).filter(|(_, part)| part.layers.start > 0) else {
            return Ok(());
        };
        let wanted = (row.id, row.position, part.layers.start);
        if carry.at != Some(wanted) {
            let (SequenceId(id), position, layer) = wanted;
            return Err(format!(
                "sequence {id} is to go on at layer {layer} of position {position}, which was not left there"
            ));
        }
        let t = row.tokens.start;
        // SAFETY: no member of the team runs, so nobody else reads or writes these rows; they are that long.
        unsafe {
            self.row(self.scratch.residual, t).copy_from_slice(&carry.residual);
            self.row(self.scratch.projected, t).copy_from_slice(&carry.projected);
            let turns = std::slice::from_raw_parts_mut(self.scratch.turns.row(t), self.config.head_dim);
            self.rope.fill(row.position as u32, turns);
        }
        Ok(())
    }

    /// After a step that was computed to its end: keeps the row if it is not done.
    pub(crate) fn keep(&self, plan: &StepPlan, carry: &mut Carry) {
        let Some((row, part)) = last_part(plan) else { return };
        carry.at = None;
        if part.is_last() {
            return;
        }
        let t = row.tokens.start;
        carry.residual.clear();
        carry.projected.clear();
        // SAFETY: as in `restore`; layers that leave the row out do not touch it.
        unsafe {
            carry.residual.extend_from_slice(self.row(self.scratch.residual, t));
            carry.projected.extend_from_slice(self.row(self.scratch.projected, t));
        }
        carry.at = Some((row.id, row.position, part.layers.end));
    }

    /// # Safety
    /// Nobody else reads or writes the row, one of a matrix as wide as the model.
    #[expect(clippy::mut_from_ref, reason = "scratch is shared memory; the contract says who may write")]
    unsafe fn row(&self, matrix: Matrix, t: usize) -> &mut [f32] {
        // SAFETY: by contract.
        unsafe { std::slice::from_raw_parts_mut(matrix.row(t), self.config.hidden) }
    }
}

fn last_part(plan: &StepPlan) -> Option<(&PlanRow, &RowPart)> {
    plan.rows.last().zip(plan.part.as_ref())
}
