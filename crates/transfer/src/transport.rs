//! How KV travels to another worker.

use std::fmt;
use std::str::FromStr;

/// What a worker may use; both ends have their say when they shake hands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Device memory to a worker whose device reaches ours, shared memory to one that can map ours, gRPC to every other.
    #[default]
    Auto,
    /// Frames carry their payload, also within a host.
    Grpc,
    /// Shared memory; a worker that can't map ours is refused.
    Shm,
    /// Device memory (CUDA IPC); a worker whose device can't reach ours is refused.
    Ipc,
}

impl Transport {
    const NAMES: [(Self, &'static str); 4] =
        [(Self::Auto, "auto"), (Self::Grpc, "grpc"), (Self::Shm, "shm"), (Self::Ipc, "ipc")];

    /// Whether payloads may lie in memory that both processes map. To be on one host is what device memory asks for too.
    pub(crate) const fn allows_shm(self) -> bool {
        matches!(self, Self::Auto | Self::Shm | Self::Ipc)
    }

    /// Whether payloads may lie in the memory of the source's device.
    pub(crate) const fn allows_ipc(self) -> bool {
        matches!(self, Self::Auto | Self::Ipc)
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(known, _)| known == self).map_or("", |(_, name)| name);
        f.pad(name)
    }
}

impl FromStr for Transport {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::NAMES.iter().find(|(_, name)| *name == text);
        found.map(|(known, _)| *known).ok_or_else(|| "auto, grpc, shm or ipc".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_it_is_written() {
        for (transport, name) in Transport::NAMES {
            assert_eq!((transport.to_string().as_str(), name.parse()), (name, Ok(transport)));
        }
        assert!("rdma".parse::<Transport>().is_err());
    }
}
