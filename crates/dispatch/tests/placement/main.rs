//! Placement: its properties over random fleets, its named answers, and the index of cached blocks against a model.

mod cache;
mod fleets;
mod kv_aware;
mod rules;
mod search;
