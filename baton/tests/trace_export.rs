//! `baton trace export` from outside: what processes wrote becomes one document.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

fn export(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["trace", "export"]).args(arguments).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A line as a role writes it: one span of `trace`, a root with this request id or a child.
fn line(service: &str, trace: &str, span: &str, millis: u64, request: Option<&str>) -> String {
    let attributes: Vec<Value> = request
        .map(|id| json!({"key": "baton.request_id", "value": {"stringValue": id}}))
        .into_iter()
        .collect();
    json!({"resourceSpans": [{
        "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]},
        "scopeSpans": [{"scope": {"name": "baton"}, "spans": [{
            "traceId": trace.repeat(16), "spanId": span.repeat(8), "name": "x", "kind": 2,
            "startTimeUnixNano": "1700000000000000000",
            "endTimeUnixNano": (1_700_000_000_000_000_000 + millis * 1_000_000).to_string(),
            "attributes": attributes,
        }]}],
    }]})
    .to_string()
}

fn write(folder: &Path) {
    let router =
        [line("router", "0a", "01", 90, Some("first")), line("router", "0b", "02", 400, Some("second"))];
    std::fs::write(folder.join("router.jsonl"), router.join("\n") + "\n").unwrap();
    let decode = [line("decode", "0a", "03", 50, None), line("decode", "0b", "04", 300, None)];
    // The process was killed while it wrote.
    std::fs::write(folder.join("decode-0.jsonl"), decode.join("\n") + "\n{\"resourceSp").unwrap();
}

fn traces(document: &Value) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for process in document["resourceSpans"].as_array().unwrap() {
        let service = process["resource"]["attributes"][0]["value"]["stringValue"].as_str().unwrap();
        for span in process["scopeSpans"][0]["spans"].as_array().unwrap() {
            found.push((service.to_owned(), span["traceId"].as_str().unwrap()[..2].to_owned()));
        }
    }
    found
}

#[test]
fn files_of_all_processes_become_one_document_and_can_be_narrowed() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    let path = folder.path().to_str().unwrap();
    let all = [("decode", "0a"), ("decode", "0b"), ("router", "0a"), ("router", "0b")];
    let id = "0A".repeat(16);
    let slow = ["--slowest", "1"];
    for (arguments, wanted) in [
        (&[][..], &all[..]),
        (&["--request-id", "first"], &[("decode", "0a"), ("router", "0a")]),
        (&["--trace-id", &id], &[("decode", "0a"), ("router", "0a")]),
        (&slow, &[("decode", "0b"), ("router", "0b")]),
    ] {
        let output = export(&[&[path][..], arguments].concat());
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        let wanted: Vec<(String, String)> =
            wanted.iter().map(|(service, trace)| ((*service).to_owned(), (*trace).to_owned())).collect();
        assert_eq!(traces(&document), wanted, "{arguments:?}");
        assert!(stderr(&output).contains("not written to their end: 1 lines"), "{}", stderr(&output));
    }
}

#[test]
fn an_export_goes_to_a_file_and_can_be_exported_again() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    let path = folder.path().to_str().unwrap();
    let out = tempfile::tempdir().unwrap();
    let [first, second] = ["a.json", "b.json"].map(|name| out.path().join(name).to_str().unwrap().to_owned());
    assert!(export(&[path, "-o", &first]).status.success());
    // The same spans again, from the document and from the files it was made of: each once.
    let output = export(&[&first, path, "--output", &second]);
    assert!(stderr(&output).contains("4 spans of 2 traces"), "{}", stderr(&output));
    assert_eq!(std::fs::read(&first).unwrap(), std::fs::read(&second).unwrap());
}

#[test]
fn what_cannot_be_exported_is_one_line_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    let path = folder.path().to_str().unwrap();
    let other = folder.path().join("other.jsonl");
    std::fs::write(&other, "{\"a\": 1}\n").unwrap();
    let other = other.to_str().unwrap();
    let decode = folder.path().join("router.jsonl");
    let decode = decode.to_str().unwrap();
    for (arguments, code, part) in [
        (&["/nowhere.jsonl"][..], 2, "/nowhere.jsonl"),
        (&[other], 2, "line 1"),
        (&[path, "--trace-id", "xyz"], 2, "32 hexadecimal digits"),
        (&[decode, "--request-id", "nobody"], 1, "no request nobody among the 2"),
        (&[decode, "--trace-id", "0123456789abcdef0123456789abcdef"], 1, "no span"),
        (&[decode, "-o", "/nowhere/out.json"], 2, "/nowhere/out.json"),
        (&[], 2, "FILE|DIR"),
    ] {
        let output = export(arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(part), "{arguments:?}: {}", stderr(&output));
    }
}
