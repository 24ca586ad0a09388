//! Turning a file's values into the defaults of clap's options.

use clap::builder::BoolishValueParser;
use clap::{Arg, ArgAction, Command};

use super::file::{ConfigFile, Section};
use super::nearest::nearest;
use crate::exit::Failure;

/// Commands that a configuration file speaks to.
const CONFIGURED_COMMANDS: [&str; 5] = ["up", "router", "prefill-worker", "decode-worker", "doctor"];

/// Options of the command line itself that a file can't set.
const NOT_IN_A_FILE: [&str; 3] = ["config", "help", "version"];

/// Gives `command` and its subcommands the file's values as defaults. Without a file only the spelling of switches in
/// the environment (`1`, `yes`, `true`, ...) is settled.
///
/// # Errors
/// [`Failure::Usage`] that names the key: unknown (with the nearest known one), of the wrong type, or out of bounds.
pub(crate) fn apply(mut command: Command, file: Option<&ConfigFile>) -> Result<Command, Failure> {
    for name in CONFIGURED_COMMANDS {
        if command.find_subcommand(name).is_some() {
            command = command.mut_subcommand(name, |sub| sub.mut_args(lenient_switch));
        }
    }
    command = command.mut_args(lenient_switch);
    let Some(file) = file else { return Ok(command) };
    check_names(&command, file)?;
    let at_top: Vec<String> = keys(&command).map(str::to_owned).collect();
    command = set_defaults(command, file, None, &file.top)?;
    for name in CONFIGURED_COMMANDS {
        let Some(sub) = command.find_subcommand(name).cloned() else { continue };
        let own = file.sections.get(name).cloned().unwrap_or_default();
        // A section's key hides the same key of the top level, which is then not even checked for this command.
        let shared = file.top.iter().filter(|(key, _)| !at_top.contains(key) && !own.contains_key(*key));
        let shared: Section = shared.map(|(key, values)| (key.clone(), values.clone())).collect();
        let sub = set_defaults(sub, file, None, &shared)?;
        let sub = set_defaults(sub, file, Some(name), &own)?;
        command = command.mut_subcommand(name, |_| sub);
    }
    Ok(command)
}

/// A switch can be given by a file or the environment as `true`, `1`, `yes` or `on` and their opposites.
fn lenient_switch(arg: Arg) -> Arg {
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        arg.value_parser(BoolishValueParser::new())
    } else {
        arg
    }
}

/// Long names of the options a file may set on this command.
fn keys(command: &Command) -> impl Iterator<Item = &str> {
    command.get_arguments().filter_map(Arg::get_long).filter(|long| !NOT_IN_A_FILE.contains(long))
}

fn check_names(command: &Command, file: &ConfigFile) -> Result<(), Failure> {
    let path = file.path.display();
    let subs = || CONFIGURED_COMMANDS.iter().filter_map(|name| command.find_subcommand(name));
    let all: Vec<&str> = keys(command).chain(subs().flat_map(keys)).collect();
    for key in file.top.keys() {
        check_key(&format!("{path}: unknown key '{key}'"), key, &all)?;
    }
    for (section, values) in &file.sections {
        let Some(sub) =
            command.find_subcommand(section).filter(|_| CONFIGURED_COMMANDS.contains(&section.as_str()))
        else {
            let known = CONFIGURED_COMMANDS.join("], [");
            return Err(Failure::Usage(format!("{path}: unknown section [{section}]: there are [{known}]")));
        };
        let known: Vec<&str> = keys(sub).collect();
        for key in values.keys() {
            check_key(&format!("{path}: unknown key '{key}' in [{section}]"), key, &known)?;
        }
    }
    Ok(())
}

fn check_key(complaint: &str, key: &str, known: &[&str]) -> Result<(), Failure> {
    if known.contains(&key) {
        return Ok(());
    }
    match nearest(key, known.iter().copied()) {
        Some(near) => Err(Failure::Usage(format!("{complaint}: the nearest known one is '{near}'"))),
        None => Err(Failure::Usage(format!("{complaint}: see `baton help` for the options, each is a key"))),
    }
}

/// Sets the values of those keys that `command` has.
fn set_defaults(
    mut command: Command,
    file: &ConfigFile,
    section: Option<&str>,
    values: &Section,
) -> Result<Command, Failure> {
    for (key, values) in values {
        let Some(arg) = command.get_arguments().find(|arg| arg.get_long() == Some(key)).cloned() else {
            continue;
        };
        let place = section.map_or_else(String::new, |name| format!("[{name}] "));
        check_value(&arg, values)
            .map_err(|reason| Failure::Usage(format!("{}: {place}{key}: {reason}", file.path.display())))?;
        let id = arg.get_id().clone();
        let values = values.clone();
        command = command.mut_arg(id, |arg| arg.required(false).default_values(values));
    }
    Ok(command)
}

/// Whether the option takes these values: asked of clap itself, on a command with that option alone.
fn check_value(arg: &Arg, values: &[String]) -> Result<(), String> {
    let takes_many = matches!(arg.get_action(), ArgAction::Append) || arg.get_value_delimiter().is_some();
    if values.len() != 1 && !takes_many {
        return Err(format!("takes one value, not {}", values.len()));
    }
    let switch = matches!(arg.get_action(), ArgAction::SetTrue);
    // A switch takes no value on a command line; as a plain option with the same parser it does.
    let probe = if switch { arg.clone().action(ArgAction::Set).num_args(1) } else { arg.clone() };
    let probe = Arg::new("value")
        .long("value")
        .action(probe.get_action().clone())
        .value_parser(probe.get_value_parser().clone())
        .allow_hyphen_values(true);
    let arguments = values.iter().map(|value| format!("--value={value}"));
    let command = Command::new("probe").no_binary_name(true).disable_help_flag(true).arg(probe);
    match command.try_get_matches_from(arguments) {
        Ok(_) => Ok(()),
        Err(error) => Err(one_line(&error.to_string())),
    }
}

/// Clap's complaint about the probe without its decoration.
fn one_line(rendered: &str) -> String {
    let lines = rendered.lines().map(str::trim);
    let wanted =
        lines.take_while(|line| !line.starts_with("For more information") && !line.starts_with("Usage:"));
    let line = wanted.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    let line = line.strip_prefix("error: ").unwrap_or(&line);
    line.replace(" for '--value <value>'", "").replace("'--value <value>'", "it")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::{Args, FromArgMatches, Parser, Subcommand};

    use super::*;

    #[derive(Parser, Debug)]
    struct Cli {
        #[arg(long, global = true, default_value = "info")]
        log_level: String,
        #[command(subcommand)]
        command: Commands,
    }

    #[derive(Subcommand, Debug)]
    enum Commands {
        Up(Options),
        Router(Options),
        PrefillWorker(Options),
        DecodeWorker(Options),
        Doctor(Options),
    }

    #[derive(Args, Debug)]
    struct Options {
        #[arg(long, env = "BATON_TEST_DEFAULTS_PORT", default_value_t = 8080)]
        http_port: u16,
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
        context: Option<u32>,
        #[arg(long)]
        insecure: bool,
        #[arg(long)]
        worker: Vec<String>,
        #[arg(long)]
        model: String,
    }

    fn parse(text: &str, line: &str) -> Result<Cli, String> {
        use clap::CommandFactory;
        let file = ConfigFile::parse(Path::new("f.toml"), text).map_err(|error| error.to_string())?;
        let command = apply(Cli::command(), Some(&file)).map_err(|error| error.to_string())?;
        let matches = command.try_get_matches_from(line.split(' ')).map_err(|error| error.to_string())?;
        Cli::from_arg_matches(&matches).map_err(|error| error.to_string())
    }

    fn up(text: &str, line: &str) -> Options {
        match parse(text, line).unwrap().command {
            Commands::Up(options)
            | Commands::Router(options)
            | Commands::PrefillWorker(options)
            | Commands::DecodeWorker(options)
            | Commands::Doctor(options) => options,
        }
    }

    #[test]
    fn a_file_beats_the_default_and_a_flag_beats_the_file() {
        let file = "http-port = 9000\nmodel = \"m\"";
        assert_eq!(up("model = \"m\"", "baton up").http_port, 8080);
        assert_eq!(up(file, "baton up").http_port, 9000);
        assert_eq!(up(file, "baton up --http-port 9001").http_port, 9001);
    }

    #[test]
    fn a_section_beats_the_top_level_for_its_command_alone() {
        let file = "model = \"m\"\ncontext = 10\n[router]\ncontext = 20";
        assert_eq!(up(file, "baton router").context, Some(20));
        assert_eq!(up(file, "baton up").context, Some(10));
    }

    #[test]
    fn switches_lists_required_and_global_options_can_be_set() {
        let file = "model = \"m\"\ninsecure = true\nworker = [\"a\", \"b\"]\nlog-level = \"warn\"";
        let options = up(file, "baton up");
        assert!(options.insecure);
        assert_eq!(options.worker, ["a", "b"]);
        assert_eq!(options.model, "m");
        assert_eq!(parse(file, "baton up").unwrap().log_level, "warn");
        assert_eq!(up(file, "baton up --worker c").worker, ["c"]);
    }

    #[test]
    fn what_can_not_be_is_named_with_its_key() {
        for (text, parts) in [
            ("htp-port = 1", ["'htp-port'", "'http-port'"]),
            ("[router]\nhttp_port = 1", ["'http_port' in [router]", "'http-port'"]),
            ("[routr]\ncontext = 1", ["[routr]", "[router]"]),
            ("http-port = \"abc\"", ["http-port", "abc"]),
            ("http-port = true", ["http-port", "true"]),
            ("[up]\ncontext = 0", ["[up] context", "0"]),
            ("insecure = 3", ["insecure", "3"]),
            ("context = [1, 2]", ["context", "one value"]),
            ("config = \"x\"", ["'config'", "unknown"]),
        ] {
            let line = parse(&format!("{text}\n"), "baton up --model m").unwrap_err();
            assert!(parts.iter().all(|part| line.contains(part)), "{text}: {line}");
            assert!(!line.contains('\n'), "{text}: {line}");
        }
    }
}
