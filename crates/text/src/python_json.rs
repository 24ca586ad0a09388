//! `tojson` as templates expect it: Python's `json.dumps` without escaping of non-ASCII or HTML.

use std::io;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// The filter: `value|tojson` or `value|tojson(indent=4)`.
pub(crate) fn filter(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let bad = |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    let mut out = Vec::new();
    match indent {
        Some(width) => {
            let spaces = vec![b' '; width.min(16)];
            value.serialize(&mut Serializer::with_formatter(&mut out, PrettyFormatter::with_indent(&spaces)))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, PythonSeparators)),
    }
    .map_err(bad)?;
    Ok(Value::from_safe_string(String::from_utf8_lossy(&out).into_owned()))
}

/// A space after each comma and colon.
struct PythonSeparators;

impl Formatter for PythonSeparators {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
