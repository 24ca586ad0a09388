//! Who and which: request ids, instance ids, handoff keys.

use std::fmt;

macro_rules! id128 {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub [u8; 16]);

        impl $name {
            /// From wire bytes; `None` unless there are exactly 16.
            pub fn from_slice(bytes: &[u8]) -> Option<Self> {
                bytes.try_into().ok().map(Self)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }
    };
}

id128! {
    /// A request: 128 random bits drawn by the router; a client's own id is only a label beside it.
    RequestId
}
id128! {
    /// A worker process: 128 random bits drawn at start, never derived from host and port.
    InstanceId
}

/// Names one try to serve one sequence group; on every message between workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HandoffKey {
    /// The request.
    pub request: RequestId,
    /// Which of its sequence groups.
    pub group: u32,
    /// Which try, from 0.
    pub attempt: u32,
}

impl fmt::Display for HandoffKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.request, self.group, self.attempt)
    }
}
