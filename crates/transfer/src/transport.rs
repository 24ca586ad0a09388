//! How KV travels to another worker.

use std::fmt;
use std::str::FromStr;

/// What a worker may use; both ends have their say when they shake hands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Shared memory to a worker that can map ours, gRPC to every other.
    #[default]
    Auto,
    /// Frames carry their payload, also within a host.
    Grpc,
    /// Shared memory; a worker that can't map ours is refused.
    Shm,
}

impl Transport {
    const NAMES: [(Self, &'static str); 3] = [(Self::Auto, "auto"), (Self::Grpc, "grpc"), (Self::Shm, "shm")];
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
        found.map(|(known, _)| *known).ok_or_else(|| "auto, grpc or shm".to_owned())
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
