//! One finished span.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use super::{TraceContext, new_span_id};
use crate::names;

/// Consecutive spans lie this far apart: whoever looks for the critical path wants one to end before the next begins.
pub const APART: Duration = Duration::from_micros(1);

/// Where a span begins that follows one which ended then.
pub fn after(end: Instant) -> Instant {
    end + APART
}

/// What a span is to the process at its other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanKind {
    /// Nothing: it stays within its process.
    Internal,
    /// It serves a call.
    Server,
    /// It calls and waits.
    Client,
    /// It sends and does not wait for what is done with it.
    Producer,
    /// It does what a producer asked.
    Consumer,
}

/// Value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Text.
    String(Cow<'static, str>),
    /// Yes or no.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// Any other number.
    Float(f64),
}

/// A span with everything known of it. Times are this process's own; they become wall time when it is exported.
#[derive(Clone, Debug)]
pub struct Span {
    pub(super) name: Cow<'static, str>,
    pub(super) kind: SpanKind,
    pub(super) id: [u8; 8],
    pub(super) parent: Option<[u8; 8]>,
    pub(super) start: Instant,
    pub(super) end: Instant,
    pub(super) attributes: Vec<(&'static str, Value)>,
    pub(super) links: Vec<TraceContext>,
    pub(super) failure: Option<String>,
}

impl Span {
    /// A span with a fresh id; one that would end before its start ends there.
    pub fn new(
        name: &'static str,
        kind: SpanKind,
        parent: Option<[u8; 8]>,
        start: Instant,
        end: Instant,
    ) -> Self {
        Self {
            name: Cow::Borrowed(name),
            kind,
            id: new_span_id(),
            parent,
            start,
            end: end.max(start),
            attributes: Vec::new(),
            links: Vec::new(),
            failure: None,
        }
    }

    /// With a name that is no constant, such as `chat <model>`.
    #[must_use]
    pub fn named(mut self, name: String) -> Self {
        self.name = Cow::Owned(name);
        self
    }

    /// With an id that was given out before the span ended.
    #[must_use]
    pub fn with_id(mut self, id: [u8; 8]) -> Self {
        self.id = id;
        self
    }

    /// With one attribute more.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl Into<Value>) -> Self {
        self.attributes.push((key, value.into()));
        self
    }

    /// With one attribute more, if there is a value.
    #[must_use]
    pub fn with_some(self, key: &'static str, value: Option<impl Into<Value>>) -> Self {
        match value {
            Some(value) => self.with(key, value),
            None => self,
        }
    }

    /// With a link to a span of another trace, or of this one.
    #[must_use]
    pub fn linked(mut self, to: TraceContext) -> Self {
        self.links.push(to);
        self
    }

    /// Of a call of this gRPC method, on either side.
    #[must_use]
    pub fn of_call(self, service: &'static str, method: &'static str) -> Self {
        self.with(names::RPC_SYSTEM, "grpc").with(names::RPC_SERVICE, service).with(names::RPC_METHOD, method)
    }

    /// With an error, if there is one.
    #[must_use]
    pub fn failed_if(self, why: Option<&'static str>) -> Self {
        match why {
            Some(why) => self.failed(why),
            None => self,
        }
    }

    /// With an error.
    #[must_use]
    pub fn failed(mut self, why: impl Into<String>) -> Self {
        self.failure = Some(why.into());
        self
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its kind.
    pub const fn kind(&self) -> SpanKind {
        self.kind
    }

    /// Its id.
    pub const fn id(&self) -> [u8; 8] {
        self.id
    }

    /// Its parent's id.
    pub const fn parent(&self) -> Option<[u8; 8]> {
        self.parent
    }

    /// When it began.
    pub const fn start(&self) -> Instant {
        self.start
    }

    /// When it ended.
    pub const fn end(&self) -> Instant {
        self.end
    }

    /// The first value of an attribute.
    pub fn attribute(&self, key: &str) -> Option<&Value> {
        self.attributes.iter().find(|(name, _)| *name == key).map(|(_, value)| value)
    }

    /// What it links to.
    pub fn links(&self) -> &[TraceContext] {
        &self.links
    }

    /// Why it failed.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }
}

impl From<&'static str> for Value {
    fn from(text: &'static str) -> Self {
        Self::String(Cow::Borrowed(text))
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::String(Cow::Owned(text))
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

macro_rules! whole {
    ($($number:ty),*) => {$(
        impl From<$number> for Value {
            fn from(value: $number) -> Self {
                Self::Int(i64::try_from(value).unwrap_or(i64::MAX))
            }
        }
    )*};
}

whole!(i64, i32, u64, u32, usize);
