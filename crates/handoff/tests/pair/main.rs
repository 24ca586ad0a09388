//! A source and a destination against each other in virtual time, over channels that lose, repeat, reorder and damage.

mod edges;
mod hold;
mod random;
mod schedules;
mod shell;
mod world;
