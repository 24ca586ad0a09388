//! Spans on their way out, to collectors that answer, that are dead and that hang.

mod broken;
mod collector;
mod delivery;
