//! Options of `baton up`, and which of them its children are given.

use std::ffi::OsString;
use std::path::PathBuf;

use baton_router::{PlacementConfig, SloConfig};
use baton_worker::{DEFAULT_TOKENS_PER_SEQUENCE, DeviceName, WorkerConfig};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};

use super::devices;
use crate::config::ConfigFile;
use crate::exit::Failure;
use crate::tracing::TracingArgs;

/// Options of `baton up`; those of the workers are the workers' own and are passed on to each of them.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct UpOptions {
    /// Prefill workers to start, 0 to 64; with 0 every prompt is computed where it is decoded
    #[arg(long, env = "BATON_PREFILL_WORKERS", value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(0..=64))]
    pub(super) prefill_workers: u16,

    /// Decode workers to start, 1 to 64
    #[arg(long, env = "BATON_DECODE_WORKERS", value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(super) decode_workers: u16,

    /// Devices of the prefill workers, one worker each, such as cuda:0,cuda:1 or cpu [default: --prefill-workers times --device]
    #[arg(long, env = "BATON_PREFILL_DEVICES", value_name = "LIST", value_delimiter = ',')]
    pub(super) prefill_devices: Vec<DeviceName>,

    /// Devices of the decode workers, one worker each, such as cuda:2 [default: --decode-workers times --device]
    #[arg(long, env = "BATON_DECODE_DEVICES", value_name = "LIST", value_delimiter = ',')]
    pub(super) decode_devices: Vec<DeviceName>,

    /// Start the same number of workers in all, but let each compute prompts and decode: the baseline to compare with
    #[arg(long, env = "BATON_COLOCATED")]
    pub(super) colocated: bool,

    /// Port of the OpenAI HTTP face on 127.0.0.1
    #[arg(long, env = "BATON_HTTP_PORT", value_name = "PORT", default_value_t = 8080,
          value_parser = clap::value_parser!(u16).range(1..))]
    pub(super) http_port: u16,

    /// Port of the gRPC face on 127.0.0.1
    #[arg(long, env = "BATON_GRPC_PORT", value_name = "PORT", default_value_t = 8081,
          value_parser = clap::value_parser!(u16).range(1..))]
    pub(super) grpc_port: u16,

    /// Where the spans of all processes go.
    #[command(flatten)]
    pub(super) tracing: TracingArgs,

    /// Folder for the spans of all processes, a file each, as --trace-file of the roles [default: none]
    #[arg(long, env = "BATON_TRACES", value_name = "DIR", help_heading = "Traces")]
    pub(super) traces: Option<PathBuf>,

    /// How the router places requests.
    #[command(flatten)]
    pub(super) placement: PlacementConfig,

    /// What the router counts as slow.
    #[command(flatten)]
    pub(super) slo: SloConfig,

    /// The options that every worker is given.
    #[command(flatten)]
    pub(super) worker: WorkerConfig,
}

/// Workers' options that `up` decides itself and does not offer.
const NOT_OFFERED: [&str; 3] = ["listen", "address-file", "insecure"];
/// Options that `up` gives each child a value of its own for.
const PLANNED: [&str; 8] =
    ["listen", "address-file", "model", "device", "cpus", "io-cpus", "kv-memory", "colocated"];

impl UpOptions {
    /// The device of each prefill worker.
    pub(super) fn prefill(&self) -> Vec<DeviceName> {
        devices(&self.prefill_devices, self.prefill_workers, self.worker.device)
    }

    /// The device of each decode worker.
    pub(super) fn decode(&self) -> Vec<DeviceName> {
        devices(&self.decode_devices, self.decode_workers, self.worker.device)
    }
}

fn devices(list: &[DeviceName], num_workers: u16, device: DeviceName) -> Vec<DeviceName> {
    if list.is_empty() { vec![device; num_workers.into()] } else { list.to_vec() }
}

/// What `up` says differently about the workers' options.
pub(crate) fn adjust(command: Command) -> Command {
    command.mut_args(|arg| match arg.get_long() {
        Some(long) if NOT_OFFERED.contains(&long) => arg.hide(true).env(None::<&str>),
        Some("cpus") => arg.help(
            "CPUs to share out among the workers, such as 0,2-3; with two or more a prefill and a decode worker \
             never have one in common [default: those this process may use]",
        ),
        Some("io-cpus") => arg.help(
            "CPUs to bind the workers' network threads to, such as 0,2-3 [default: those of the prefill workers]",
        ),
        Some("threads") => arg.help("Compute threads of each worker, 1 to 256 [default: the CPUs it is given]"),
        Some("kv-memory") => arg.help(format!(
            "Memory for the KV blocks of each worker in bytes, with K, M, G or T behind it [default: \
             {DEFAULT_TOKENS_PER_SEQUENCE} tokens for each of --max-num-seqs or one whole context if that is more, as far \
             as the memory here allows]"
        )),
        _ => arg,
    })
}

/// One option that was given to `up`, by whichever way, and concerns its children.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Given {
    key: String,
    values: Vec<OsString>,
    switch: bool,
    /// From the command line or the environment, and not from the file.
    strong: bool,
}

/// The options that `up` hands on.
#[derive(Debug, Clone, Default)]
pub(crate) struct PassedOn {
    given: Vec<Given>,
    file: ConfigFile,
    /// Keys each command knows.
    known: Vec<(String, Vec<String>)>,
}

impl PassedOn {
    /// Collects what was given on the command line, in the environment or in the file. `command` is the whole command
    /// line's definition, `matches` what was parsed for `up`.
    ///
    /// # Errors
    /// [`Failure::Usage`] for an option of the workers that `up` decides itself.
    pub(crate) fn collect(
        command: &Command,
        matches: &ArgMatches,
        file: Option<&ConfigFile>,
    ) -> Result<Self, Failure> {
        let file = file.cloned().unwrap_or_default();
        let keys = |sub: &Command| sub.get_arguments().filter_map(Arg::get_long).map(str::to_owned).collect();
        let known = command.get_subcommands().map(|sub| (sub.get_name().to_owned(), keys(sub))).collect();
        let mut passed = Self { given: Vec::new(), file, known };
        let Some(up) = command.find_subcommand("up") else { return Ok(passed) };
        for arg in up.get_arguments() {
            if let Some(given) = passed.given(arg, matches)?
                && !devices::is_overruled(&given.key, matches, Some(&passed.file))?
            {
                passed.given.push(given);
            }
        }
        Ok(passed)
    }

    fn given(&self, arg: &Arg, matches: &ArgMatches) -> Result<Option<Given>, Failure> {
        let (Some(key), id) = (arg.get_long(), arg.get_id().as_str()) else { return Ok(None) };
        let source = matches.try_contains_id(id).ok().and_then(|_| matches.value_source(id));
        let in_file = self.file.top.contains_key(key) || self.file.section_sets("up", key);
        let strong = match source {
            Some(ValueSource::CommandLine | ValueSource::EnvVariable) => true,
            Some(_) if in_file => false,
            _ => return Ok(None),
        };
        if NOT_OFFERED.contains(&key) {
            // At the top level of the file it may be meant for the roles, which `up` has its own values for.
            if strong || self.file.section_sets("up", key) {
                return Err(Failure::Usage(format!(
                    "--{key} is decided by `up`: leave it out, or run the roles themselves"
                )));
            }
            return Ok(None);
        }
        let switch = matches!(arg.get_action(), ArgAction::SetTrue);
        if switch && !matches.get_flag(id) {
            return Ok(None);
        }
        let values =
            matches.get_raw(id).map(|values| values.map(OsString::from).collect()).unwrap_or_default();
        Ok(Some(Given { key: key.to_owned(), values, switch, strong }))
    }

    /// The arguments for a child that runs `role`, without those that `up` plans.
    pub(super) fn arguments(&self, role: &str) -> Vec<OsString> {
        let mut arguments = Vec::new();
        for given in &self.given {
            let planned = PLANNED.contains(&given.key.as_str());
            let overruled = !given.strong && self.file.section_sets(role, &given.key);
            if planned || overruled || !self.knows(role, &given.key) {
                continue;
            }
            if given.switch {
                arguments.push(format!("--{}", given.key).into());
            }
            for value in given.values.iter().filter(|_| !given.switch) {
                arguments.push(with_value(&given.key, value));
            }
        }
        arguments
    }

    /// The argument for an option that `up` has planned a value for; `None` where the file has one for this role alone.
    pub(super) fn planned(&self, role: &str, key: &str, value: &str) -> Option<OsString> {
        let strong = self.is_strong(key) || (key == "device" && self.has_devices(role));
        (strong || !self.file.section_sets(role, key)).then(|| with_value(key, value.as_ref()))
    }

    fn is_strong(&self, key: &str) -> bool {
        self.given.iter().any(|given| given.key == key && given.strong)
    }

    /// Whether the devices of this role's workers were listed with more force than a file has.
    fn has_devices(&self, role: &str) -> bool {
        let colocated = self.given.iter().any(|given| given.key == "colocated");
        match role {
            // Those that would prefill decode too.
            "decode-worker" => {
                self.is_strong("decode-devices") || (colocated && self.is_strong("prefill-devices"))
            }
            "prefill-worker" => self.is_strong("prefill-devices"),
            _ => false,
        }
    }

    fn knows(&self, role: &str, key: &str) -> bool {
        self.known.iter().any(|(name, keys)| name == role && keys.iter().any(|known| known == key))
    }
}

fn with_value(key: &str, value: &std::ffi::OsStr) -> OsString {
    let mut argument = OsString::from(format!("--{key}="));
    argument.push(value);
    argument
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::cli;

    fn passed(file: &str, line: &str) -> Result<PassedOn, String> {
        let mut on_disk = tempfile::NamedTempFile::new().unwrap();
        on_disk.write_all(file.as_bytes()).unwrap();
        let mut arguments = vec![OsString::from("baton"), "--config".into(), on_disk.path().into()];
        arguments.extend(line.split(' ').map(OsString::from));
        cli::parse(&arguments).map(|parsed| parsed.passed).map_err(|error| format!("{error:?}"))
    }

    fn arguments(passed: &PassedOn, role: &str) -> Vec<String> {
        passed.arguments(role).into_iter().map(|argument| argument.into_string().unwrap()).collect()
    }

    #[test]
    fn children_get_what_was_given_and_what_they_know() {
        let passed = passed("", "up --max-queue 7 --block-size=32 --prefill-workers 2").unwrap();
        assert_eq!(arguments(&passed, "decode-worker"), ["--max-queue=7", "--block-size=32"]);
        assert_eq!(arguments(&passed, "router"), ["--max-queue=7"]);
    }

    #[test]
    fn the_router_alone_is_told_how_to_place() {
        let passed = passed("", "up --placement round-robin --max-local-tokens 64").unwrap();
        assert_eq!(arguments(&passed, "router"), ["--placement=round-robin", "--max-local-tokens=64"]);
        assert_eq!(arguments(&passed, "prefill-worker"), [""; 0]);
    }

    #[test]
    fn where_spans_go_is_for_all_and_what_is_slow_for_the_router() {
        let line = "up --otlp-endpoint http://127.0.0.1:4317 --trace-sample-ratio 0.5 --slo-ttft-ms 500 --traces here";
        let passed = passed("", line).unwrap();
        let traces = ["--otlp-endpoint=http://127.0.0.1:4317", "--trace-sample-ratio=0.5"];
        assert_eq!(arguments(&passed, "decode-worker"), traces);
        assert_eq!(arguments(&passed, "router"), [traces[0], traces[1], "--slo-ttft-ms=500"]);
    }

    #[test]
    fn a_roles_own_section_wins_over_ups_but_not_over_a_flag() {
        let file =
            "max-queue = 5\n[up]\nblock-size = 32\n[decode-worker]\nblock-size = 64\nkv-memory = \"1G\"";
        let from_file = passed(file, "up").unwrap();
        assert_eq!(arguments(&from_file, "prefill-worker"), ["--max-queue=5", "--block-size=32"]);
        assert_eq!(arguments(&from_file, "decode-worker"), ["--max-queue=5"]);
        assert_eq!(from_file.planned("decode-worker", "kv-memory", "9"), None);
        assert_eq!(from_file.planned("prefill-worker", "kv-memory", "9"), Some("--kv-memory=9".into()));
        let flags = passed(file, "up --block-size 16 --kv-memory 2G").unwrap();
        assert_eq!(arguments(&flags, "decode-worker"), ["--max-queue=5", "--block-size=16"]);
        assert_eq!(flags.planned("decode-worker", "kv-memory", "9"), Some("--kv-memory=9".into()));
    }

    #[test]
    fn what_up_decides_itself_is_refused_and_what_is_planned_is_not_repeated() {
        let error = passed("", "up --address-file x").unwrap_err();
        assert!(error.contains("--address-file"), "{error}");
        // At the top level it is meant for roles that run by themselves.
        let passed =
            passed("listen = \"127.0.0.1:7000\"\ninsecure = true", "up --cpus 0 --model builtin:tiny")
                .unwrap();
        assert_eq!(arguments(&passed, "prefill-worker"), [""; 0]);
    }

    #[test]
    fn a_list_of_devices_is_one_worker_each() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            up: UpOptions,
        }
        let parse = |line: &str| <Line as clap::Parser>::try_parse_from(line.split(' ')).map(|line| line.up);
        let up = parse("up --prefill-devices cuda:0,cpu --device cuda:3 --decode-workers 2").unwrap();
        assert_eq!(up.prefill(), [DeviceName::Cuda(0), DeviceName::Cpu]);
        assert_eq!(up.decode(), [DeviceName::Cuda(3); 2]);
        assert_eq!(parse("up").unwrap().prefill(), [DeviceName::Cpu]);
        let error = parse("up --decode-devices cuda:0,gpu").unwrap_err().to_string();
        assert!(error.contains("unknown device 'gpu'"), "{error}");
    }

    #[test]
    fn listed_devices_win_over_a_roles_own_section_of_the_file() {
        let file = "[prefill-worker]\ndevice = \"cpu\"\n[decode-worker]\ndevice = \"cpu\"";
        let listed = passed(file, "up --prefill-devices cuda:0").unwrap();
        assert_eq!(listed.planned("prefill-worker", "device", "cuda:0"), Some("--device=cuda:0".into()));
        assert_eq!(listed.planned("decode-worker", "device", "cuda:0"), None);
        let colocated = passed(file, "up --colocated --prefill-devices cuda:0").unwrap();
        assert_eq!(colocated.planned("decode-worker", "device", "cuda:0"), Some("--device=cuda:0".into()));
        // As strong as the section is only what is above it.
        let in_file = format!("prefill-devices = [\"cuda:0\"]\n{file}");
        assert_eq!(passed(&in_file, "up").unwrap().planned("prefill-worker", "device", "cuda:0"), None);
    }
}
