//! Owns the demonstrations of `baton lab`: each shows one idea on the very pool, tables, scheduler, prefix cache and timing engine that serve,
//! and says so where a small naive model stands beside them for contrast; and how a demonstration is written down, as text and as a page.
//!
//! Must never know a clock, a thread, a socket or a random source: what is drawn follows from seeds in the code, so every figure is the same on
//! every machine.

mod batching;
mod block_table;
mod breaking;
mod contiguous;
mod cow;
mod crowd;
mod deadlock;
mod demonstration;
mod device;
mod error;
mod guard;
mod html;
mod memory;
mod plot;
mod prefix;
mod random;
mod ratios;
mod report;
mod serving;
mod stall;
mod static_batch;
mod switches;
mod terminal;
mod transfer;
mod users;

pub use demonstration::Demonstration;
pub use error::LabError;
pub use html::html;
pub use report::{
    Axis, Bars, Cell, Column, Line, Marks, Part, Plot, Report, SlotRow, SlotState, Slots, Table,
};
pub use terminal::text;
