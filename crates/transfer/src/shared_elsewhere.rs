//! Systems without memfd: no shared memory can be made or opened, so KV goes over gRPC.

use std::io;

/// Never made.
pub(crate) enum SharedMemory {}

impl SharedMemory {
    pub(crate) fn new(_len: usize) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn path(&self) -> String {
        match *self {}
    }

    pub(crate) fn write(&mut self, _offset: usize, _bytes: &[u8], _crc: u32) -> Option<u32> {
        match *self {}
    }
}

/// Never opened.
pub(crate) enum SharedView {}

impl SharedView {
    pub(crate) fn open(_path: &str, _max_len: usize) -> Result<Self, String> {
        Err("this system has no shared memory for KV".to_owned())
    }

    pub(crate) const fn len(&self) -> usize {
        match *self {}
    }

    pub(crate) fn populate(&self, _len: usize) {
        match *self {}
    }

    pub(crate) fn read_far(&self, _offset: usize, _out: &mut [u8], _crc: u32) -> Option<u32> {
        match *self {}
    }

    pub(crate) fn read(&self, _offset: usize, _out: &mut [u8]) -> bool {
        match *self {}
    }
}

pub(crate) fn check_nonce(_path: &str, _nonce: &[u8]) -> Result<(), String> {
    Err("this system has no shared memory for KV".to_owned())
}
