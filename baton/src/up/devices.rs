//! Of a list of devices and a number of workers the one that was said with more force counts, as with every option: the command line, then the
//! environment, then the file's own section, then the rest of the file.

use clap::ArgMatches;
use clap::parser::ValueSource;

use super::options::UpOptions;
use crate::config::ConfigFile;
use crate::exit::Failure;

/// What an option comes from, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Said {
    Nowhere,
    InFile,
    InOwnSection,
    InEnvironment,
    OnCommandLine,
}

impl Said {
    fn of(key: &str, matches: &ArgMatches, file: Option<&ConfigFile>) -> Self {
        let id = key.replace('-', "_");
        match matches.try_contains_id(&id).ok().and_then(|_| matches.value_source(&id)) {
            Some(ValueSource::CommandLine) => Self::OnCommandLine,
            Some(ValueSource::EnvVariable) => Self::InEnvironment,
            _ if file.is_some_and(|file| file.section_sets("up", key)) => Self::InOwnSection,
            _ if file.is_some_and(|file| file.top.contains_key(key)) => Self::InFile,
            _ => Self::Nowhere,
        }
    }
}

/// The keys of one kind of worker: its list of devices, and how many there are.
const KINDS: [(&str, &str); 2] =
    [("prefill-devices", "prefill-workers"), ("decode-devices", "decode-workers")];

/// Which of the lists count, in the order of [`KINDS`].
fn counting(matches: &ArgMatches, file: Option<&ConfigFile>) -> Result<[bool; 2], Failure> {
    let mut counts = [false; 2];
    for (counts, (list, number)) in counts.iter_mut().zip(KINDS) {
        let [as_list, as_number] = [list, number].map(|key| Said::of(key, matches, file));
        if as_list == as_number && as_list != Said::Nowhere {
            return Err(Failure::Usage(format!(
                "--{list} and --{number} both say how many workers there are: give one of them"
            )));
        }
        *counts = as_list > as_number;
    }
    Ok(counts)
}

/// Empties the lists that do not count.
///
/// # Errors
/// [`Failure::Usage`] for a list and a number that were said with the same force.
pub(crate) fn settle(
    options: &mut UpOptions,
    matches: &ArgMatches,
    file: Option<&ConfigFile>,
) -> Result<(), Failure> {
    let counts = counting(matches, file)?;
    for (list, counts) in [&mut options.prefill_devices, &mut options.decode_devices].into_iter().zip(counts)
    {
        if !counts {
            list.clear();
        }
    }
    Ok(())
}

/// Whether `key` is a list of devices that does not count.
///
/// # Errors
/// As [`settle`].
pub(super) fn is_overruled(
    key: &str,
    matches: &ArgMatches,
    file: Option<&ConfigFile>,
) -> Result<bool, Failure> {
    let Some(nth) = KINDS.iter().position(|(list, _)| *list == key) else { return Ok(false) };
    Ok(!counting(matches, file)?[nth])
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use baton_worker::DeviceName;

    use crate::cli::{self, Commands};

    /// The devices of prefill and decode workers.
    fn devices(file: &str, line: &str) -> Result<[Vec<DeviceName>; 2], String> {
        let mut on_disk = tempfile::NamedTempFile::new().unwrap();
        on_disk.write_all(file.as_bytes()).unwrap();
        let mut arguments = vec!["baton".into(), "--config".into(), on_disk.path().into()];
        arguments.extend(line.split(' ').map(std::ffi::OsString::from));
        match cli::parse(&arguments).map_err(|error| format!("{error:?}"))?.cli.command {
            Commands::Up(options) => Ok([options.prefill(), options.decode()]),
            other => panic!("{other:?}"),
        }
    }

    const CPU: DeviceName = DeviceName::Cpu;
    const TWO: &str = "prefill-devices = [\"cuda:0\", \"cuda:1\"]";

    #[test]
    fn a_number_on_the_command_line_wins_over_a_list_in_the_file() {
        assert_eq!(devices(TWO, "up").unwrap()[0], [DeviceName::Cuda(0), DeviceName::Cuda(1)]);
        assert_eq!(devices(TWO, "up --prefill-workers 3").unwrap()[0], [CPU; 3]);
        // Also where it is the default.
        assert_eq!(devices(TWO, "up --prefill-workers 1").unwrap()[0], [CPU]);
        assert_eq!(devices(TWO, "up --decode-workers 2").unwrap()[1], [CPU; 2]);
        let decode = "[up]\ndecode-devices = [\"cuda:2\"]";
        assert_eq!(devices(decode, "up --decode-workers 2").unwrap()[1], [CPU; 2]);
        assert_eq!(devices(decode, "up --prefill-workers 2").unwrap()[1], [DeviceName::Cuda(2)]);
    }

    #[test]
    fn a_list_on_the_command_line_wins_over_a_number_and_a_list_in_the_file() {
        for file in ["prefill-workers = 4", TWO, "[up]\nprefill-workers = 4"] {
            let found = devices(file, "up --prefill-devices cuda:7,cpu").unwrap();
            assert_eq!(found[0], [DeviceName::Cuda(7), CPU], "{file}");
        }
    }

    #[test]
    fn the_own_section_of_a_file_wins_over_the_rest_of_it() {
        let list = format!("prefill-workers = 4\n[up]\n{TWO}");
        assert_eq!(devices(&list, "up").unwrap()[0].len(), 2);
        assert_eq!(devices(&format!("{TWO}\n[up]\nprefill-workers = 4"), "up").unwrap()[0], [CPU; 4]);
    }

    #[test]
    fn what_is_said_twice_in_one_place_is_refused() {
        let twice = "--prefill-devices and --prefill-workers";
        for (file, line) in [
            ("", "up --prefill-devices cuda:0 --prefill-workers 2"),
            (&*format!("{TWO}\nprefill-workers = 4"), "up"),
            (&*format!("[up]\n{TWO}\nprefill-workers = 4"), "up"),
        ] {
            let error = devices(file, line).unwrap_err();
            assert!(error.contains(twice), "{file} {line}: {error}");
        }
    }
}
