//! `baton lab` from outside: the list, one demonstration as text and JSON, the page, and what is refused.

use std::process::{Command, Output};

const NAMES: [&str; 9] =
    ["batching", "memory", "blocktable", "cow", "prefix", "stall", "deadlock", "users", "break"];

fn lab(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BATON_")) {
        command.env_remove(name);
    }
    command.arg("lab").args(arguments).output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn without_a_name_the_demonstrations_are_listed_in_order() {
    let listed = stdout(&lab(&[]));
    let names: Vec<&str> =
        listed.lines().filter_map(|line| line.strip_prefix("  ")?.split_whitespace().next()).collect();
    assert_eq!(names, NAMES);
    let listed: serde_json::Value = serde_json::from_str(&stdout(&lab(&["--json"]))).unwrap();
    assert_eq!(
        listed.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect::<Vec<_>>(),
        NAMES
    );
}

#[test]
fn one_demonstration_is_shown_as_text_json_and_a_page() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("lab.html");
    let shown = stdout(&lab(&["blocktable", "--html", page.to_str().unwrap()]));
    assert!(shown.starts_with("blocktable: ") && shown.contains("[5, 2, 9, 0]"), "{shown}");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("<section id=\"blocktable\">") && page.trim_end().ends_with("</html>"));
    let json: serde_json::Value = serde_json::from_str(&stdout(&lab(&["blocktable", "--json"]))).unwrap();
    assert_eq!((&json["name"], &json["parts"][0]["rows"][0][1]), (&"blocktable".into(), &"[5, 2, 9]".into()));
}

#[test]
fn all_are_shown_one_after_the_other() {
    let shown = stdout(&lab(&["all"]));
    let mut rest = shown.as_str();
    for name in NAMES {
        let at = rest.find(&format!("{name}: ")).unwrap_or_else(|| panic!("no {name} in {rest}"));
        rest = &rest[at..];
    }
}

#[test]
fn what_can_not_be_done_is_refused_by_name() {
    for (arguments, said) in [
        (&["bus"][..], "unknown demonstration 'bus': batching, memory"),
        (&["cow", "--html", "/nowhere/at/all.html"], "--html: /nowhere/at/all.html can't be written"),
        (&["--html", "x.html"], "<NAME>"),
    ] {
        let output = lab(arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(said), "{stderr}");
    }
}
