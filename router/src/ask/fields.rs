//! A JSON object read strictly: each field is taken once, by type, and what is left over is an error.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::neutral;
use crate::api_error::ApiError;

/// The fields of one object, with the path to it.
pub(super) struct Fields {
    path: String,
    map: Map<String, Value>,
}

/// The top object of a body; a name that stands in it twice is refused, since readers would differ on which counts.
struct Top(Map<String, Value>);

impl<'de> Deserialize<'de> for Top {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TopVisitor;
        impl<'de> Visitor<'de> for TopVisitor {
            type Value = Top;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Top, A::Error> {
                let mut map = Map::new();
                while let Some(name) = access.next_key::<String>()? {
                    if map.contains_key(&name) {
                        return Err(A::Error::custom(format_args!(
                            "the field `{}` stands twice",
                            shown(&name)
                        )));
                    }
                    map.insert(name, access.next_value()?);
                }
                Ok(Top(map))
            }
        }
        deserializer.deserialize_map(TopVisitor)
    }
}

/// Names come from outside: cut, and without control characters.
fn shown(name: &str) -> String {
    name.chars().filter(|character| !character.is_control()).take(64).collect()
}

/// What a value is, for messages.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.is_f64() => "a number with a fraction",
        Value::Number(_) => "an integer",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// "must be X, not Y", with the field named in message and `param`.
pub(super) fn wrong_type(param: &str, expected: &str, found: &Value) -> ApiError {
    ApiError::invalid(param, format!("{param} must be {expected}, not {}", kind(found)))
}

impl Fields {
    /// Reads a body.
    pub(super) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let Top(map) = serde_json::from_slice(body).map_err(|error| ApiError::Invalid {
            param: None,
            message: format!("the body is not a valid JSON object: {error}"),
        })?;
        Ok(Self { path: String::new(), map })
    }

    /// An object within another, at `path`.
    pub(super) fn nested(path: String, value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { path, map }),
            other => Err(wrong_type(&path, "an object", &other)),
        }
    }

    /// The full name of a field.
    pub(super) fn param(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// Takes a field; null counts as absent.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name).filter(|value| !value.is_null())
    }

    /// Takes a field that must be there.
    pub(super) fn require(&mut self, name: &str) -> Result<Value, ApiError> {
        self.take(name).ok_or_else(|| {
            let param = self.param(name);
            ApiError::invalid(param.clone(), format!("{param} is required"))
        })
    }

    pub(super) fn take_bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(wrong_type(&self.param(name), "a boolean", &other)),
        }
    }

    pub(super) fn take_string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(value)) => Ok(Some(value)),
            Some(other) => Err(wrong_type(&self.param(name), "a string", &other)),
        }
    }

    pub(super) fn take_number(&mut self, name: &str) -> Result<Option<f64>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => match value.as_f64() {
                Some(number) => Ok(Some(number)),
                None => Err(wrong_type(&self.param(name), "a number", &value)),
            },
        }
    }

    /// A whole number of at least `least`.
    pub(super) fn take_count(&mut self, name: &str, least: u64) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let param = self.param(name);
        if let Some(number) = value.as_u64() {
            if number < least {
                return Err(ApiError::invalid(
                    &*param,
                    format!("{param} must be at least {least}, not {number}"),
                ));
            }
            return Ok(Some(number));
        }
        if let Some(negative) = value.as_i64() {
            return Err(ApiError::invalid(
                &*param,
                format!("{param} must be at least {least}, not {negative}"),
            ));
        }
        Err(wrong_type(&param, &format!("an integer of at least {least}"), &value))
    }

    /// Refuses what is left: fields that are known but not supported unless their value changes nothing, and
    /// fields that nobody knows.
    pub(super) fn finish(self) -> Result<(), ApiError> {
        for (name, value) in &self.map {
            if value.is_null() && neutral::is_known(name) {
                continue;
            }
            let param = self.param(&shown(name));
            match neutral::accepted(name) {
                None => return Err(ApiError::invalid(&*param, format!("unknown field '{param}'"))),
                Some(accepted) if accepted.allows(value) => {}
                Some(accepted) => {
                    let message = format!("{param} is not supported; {}", accepted.describe());
                    return Err(ApiError::invalid(param, message));
                }
            }
        }
        Ok(())
    }

    /// Refuses every field that is left, but for those of `ignored` whose value is null, empty or false.
    pub(super) fn finish_without(self, ignored: &[&str]) -> Result<(), ApiError> {
        for (name, value) in &self.map {
            let empty = match value {
                Value::Null | Value::Bool(false) => true,
                Value::Array(items) => items.is_empty(),
                Value::Object(map) => map.is_empty(),
                _ => false,
            };
            if ignored.contains(&name.as_str()) {
                if empty {
                    continue;
                }
                let param = self.param(name);
                return Err(ApiError::invalid(&*param, format!("{param} is not supported")));
            }
            let param = self.param(&shown(name));
            return Err(ApiError::invalid(&*param, format!("unknown field '{param}'")));
        }
        Ok(())
    }
}
