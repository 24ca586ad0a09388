//! A request against legs that fail, repeat, run ahead and speak late, in thousands of random schedules.

mod edges;
mod legs;
mod random;
mod schedules;
