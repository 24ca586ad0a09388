//! Reading the TOML file into keys and texts, section by section.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use crate::exit::Failure;

/// Keys of one section and their values as a command line would spell them, one text for each element of an array.
pub(crate) type Section = BTreeMap<String, Vec<String>>;

/// A configuration file, read but not yet compared with the options there are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ConfigFile {
    /// Where it was read from.
    pub(crate) path: PathBuf,
    /// Keys above the first section.
    pub(crate) top: Section,
    /// Sections by the name of their command.
    pub(crate) sections: BTreeMap<String, Section>,
}

impl ConfigFile {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Failure::Usage`]: it can't be read, is not TOML, or holds a value no option can have.
    pub(crate) fn read(path: &Path) -> Result<Self, Failure> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Failure::Usage(format!("--config {}: {error}", path.display())))?;
        Self::parse(path, &text)
    }

    /// Takes a file's text apart.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(crate) fn parse(path: &Path, text: &str) -> Result<Self, Failure> {
        let table: Table = text.parse().map_err(|error: toml::de::Error| {
            let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or("");
            let line = before.matches('\n').count() + 1;
            Failure::Usage(format!("{}:{line}: {}", path.display(), error.message().replace('\n', " ")))
        })?;
        let mut file = Self { path: path.to_owned(), ..Self::default() };
        for (key, value) in table {
            match value {
                Value::Table(section) => {
                    let mut keys = Section::new();
                    for (inner, value) in section {
                        keys.insert(inner.clone(), texts(path, &format!("[{key}] {inner}"), &value)?);
                    }
                    file.sections.insert(key, keys);
                }
                value => {
                    let values = texts(path, &key, &value)?;
                    file.top.insert(key, values);
                }
            }
        }
        Ok(file)
    }

    /// Whether the section of `command` itself sets `key`.
    pub(crate) fn section_sets(&self, command: &str, key: &str) -> bool {
        self.sections.get(command).is_some_and(|section| section.contains_key(key))
    }
}

fn texts(path: &Path, key: &str, value: &Value) -> Result<Vec<String>, Failure> {
    match value {
        Value::Array(values) => values.iter().map(|value| text(path, key, value)).collect(),
        value => Ok(vec![text(path, key, value)?]),
    }
}

fn text(path: &Path, key: &str, value: &Value) -> Result<String, Failure> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Float(number) => Ok(number.to_string()),
        Value::Boolean(flag) => Ok(flag.to_string()),
        other => {
            let kind = other.type_str();
            Err(Failure::Usage(format!("{}: {key}: a value can't be of type {kind}", path.display())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalars_arrays_and_sections_become_texts() {
        let text =
            "context = 4096\nratio = 0.5\ninsecure = true\n[router]\nprefill-worker = [\"a:1\", \"b:2\"]\n";
        let file = ConfigFile::parse(Path::new("f"), text).unwrap();
        assert_eq!(file.top.get("context"), Some(&vec!["4096".to_owned()]));
        assert_eq!(file.top.get("ratio"), Some(&vec!["0.5".to_owned()]));
        assert_eq!(file.top.get("insecure"), Some(&vec!["true".to_owned()]));
        let router = file.sections.get("router").unwrap();
        assert_eq!(router.get("prefill-worker"), Some(&vec!["a:1".to_owned(), "b:2".to_owned()]));
        assert!(file.section_sets("router", "prefill-worker"));
        assert!(!file.section_sets("up", "prefill-worker"));
    }

    #[test]
    fn what_is_wrong_is_named_in_one_line() {
        for (text, part) in [
            ("a = [\n", "f:"),
            ("when = 2020-01-01", "when"),
            ("[up]\n[up.deep]\nx = 1", "[up] deep"),
            ("a = 1\na = 2", "f:2"),
        ] {
            let line = ConfigFile::parse(Path::new("f"), text).unwrap_err().to_string();
            assert!(line.contains(part), "{line}");
            assert!(!line.contains('\n'), "{line}");
        }
    }
}
