//! One TOML file behind the command line: its values become the options' defaults, so that flags and environment
//! variables win over it without any option being defined a second time.
//!
//! A key is an option's long name without the dashes. At the top level it applies to every command that has the
//! option; in a section named after a command (`[up]`, `[router]`, `[prefill-worker]`, `[decode-worker]`, `[doctor]`) to that
//! command alone, and wins there.

mod defaults;
mod file;
mod nearest;

pub(crate) use defaults::apply;
pub(crate) use file::ConfigFile;

use std::ffi::OsString;
use std::path::PathBuf;

/// Finds `--config FILE` before the command line can be parsed, because the file decides the defaults it is parsed
/// with; `BATON_CONFIG` counts when the flag is absent.
pub(crate) fn path_from(arguments: &[OsString]) -> Option<PathBuf> {
    let mut arguments = arguments.iter().skip(1);
    while let Some(argument) = arguments.next() {
        if argument == "--" {
            break;
        }
        if argument == "--config" {
            return arguments.next().map(PathBuf::from);
        }
        if let Some(path) = argument.to_str().and_then(|text| text.strip_prefix("--config=")) {
            return Some(PathBuf::from(path));
        }
    }
    std::env::var_os("BATON_CONFIG").filter(|path| !path.is_empty()).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_of_the_flag_are_found_anywhere_before_the_double_dash() {
        let find = |line: &str| {
            let arguments: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            path_from(&arguments)
        };
        assert_eq!(find("baton --config a.toml up"), Some("a.toml".into()));
        assert_eq!(find("baton up --config=b.toml"), Some("b.toml".into()));
        assert_eq!(find("baton chat -- --config"), None);
    }
}
