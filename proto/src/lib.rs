//! Owns Baton's wire protocol: the messages and services generated from `proto/baton/v1`.
//!
//! Must never know what a message means: conversion to and from the pure types stands in the service
//! files of the crates that speak it.

pub mod bulk;

/// Version of the protocol between router and workers; workers of different versions refuse each other.
pub const PROTOCOL_VERSION: u32 = 3;

/// Encoded descriptors of every proto file, for gRPC reflection.
pub const FILE_DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/baton.bin"));

/// Generated code of package `baton.v1`.
#[allow(missing_docs, clippy::all, unreachable_pub)]
pub mod v1 {
    tonic::include_proto!("baton.v1");
    include!(concat!(env!("OUT_DIR"), "/bulk/baton.v1.rs"));
}
