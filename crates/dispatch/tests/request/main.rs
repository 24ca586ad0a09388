//! A request against legs that fail, repeat, run ahead and speak late, in thousands of random schedules.

mod edges;
mod groups;
mod legs;
mod random;
mod redirect;
mod schedules;
mod world;
