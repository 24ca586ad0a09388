//! Files of OTLP JSON, one batch a line.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde_json::Value;

use crate::exit::Failure;

/// Longest line that is read, in bytes: a batch of 512 spans with all their attributes is well below.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// Hands each `ResourceSpans` of a file to `take`. Lines that are not whole, as a process leaves them that is killed or whose disk is
/// full, are left out, and that is said.
///
/// # Errors
/// [`Failure::Usage`] with file and line for what is something else.
pub(super) fn read(path: &Path, mut take: impl FnMut(Value)) -> Result<(), Failure> {
    let bad = |why: String| Failure::Usage(format!("{}: {why}", path.display()));
    let file = File::open(path).map_err(|error| bad(error.to_string()))?;
    let num_broken = parse(BufReader::new(file), &mut take).map_err(bad)?;
    if num_broken > 0 {
        eprintln!("{}: left out, not written to their end: {num_broken} lines", path.display());
    }
    Ok(())
}

/// How many lines are broken.
fn parse(mut text: impl BufRead, take: &mut impl FnMut(Value)) -> Result<u64, String> {
    let (mut num_whole, mut num_broken) = (0u64, 0u64);
    let mut bytes = Vec::new();
    for number in 1u64.. {
        bytes.clear();
        let mut limited = (&mut text).take(MAX_LINE_BYTES + 1);
        limited.read_until(b'\n', &mut bytes).map_err(|error| error.to_string())?;
        if bytes.len() as u64 > MAX_LINE_BYTES {
            return Err(format!("line {number} is longer than {MAX_LINE_BYTES} bytes"));
        }
        if bytes.is_empty() {
            break;
        }
        if bytes.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        match serde_json::from_slice(&bytes) {
            Ok(value) => {
                batches(value, take).map_err(|why| format!("line {number}: {why}"))?;
                num_whole += 1;
            }
            Err(_) => num_broken += 1,
        }
    }
    if num_whole == 0 && num_broken > 0 {
        return Err(format!("none of its {num_broken} lines is JSON"));
    }
    Ok(num_broken)
}

/// A line is one batch, or a document with some, as what `export` itself writes.
fn batches(mut value: Value, take: &mut impl FnMut(Value)) -> Result<(), String> {
    if value.get("scopeSpans").is_some() {
        take(value);
        return Ok(());
    }
    match value.get_mut("resourceSpans").map(Value::take) {
        Some(Value::Array(all)) => {
            all.into_iter().for_each(take);
            Ok(())
        }
        _ => Err("neither scopeSpans nor resourceSpans: this is no OTLP JSON".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_all(text: &str) -> Result<(usize, u64), String> {
        let mut num = 0;
        let num_broken = parse(text.as_bytes(), &mut |_| num += 1)?;
        Ok((num, num_broken))
    }

    #[test]
    fn batches_and_documents_are_read_and_broken_lines_are_left_out() {
        let document = "{\"resourceSpans\":[{\"scopeSpans\":[1]},{\"scopeSpans\":[2]}]}";
        // A process was killed, started again, and killed again.
        let text =
            format!("{{\"scopeSpans\":[]}}\n\n{{\"scop{{\"scopeSpans\":[]}}\n{document}\n{{\"resourceSp");
        assert_eq!(read_all(&text), Ok((3, 2)));
        assert_eq!(read_all("{\"scopeSpans\":[]}"), Ok((1, 0)));
        assert_eq!(read_all(""), Ok((0, 0)));
    }

    #[test]
    fn what_is_no_otlp_is_told_with_its_line() {
        for (text, wanted) in [
            ("{\"spans\":[]}\n", "line 1: neither"),
            ("\n[1]\n", "line 2: neither"),
            ("{\"resourceSpans\":{}}\n", "line 1: neither"),
            ("nonsense\nmore", "none of its 2 lines"),
        ] {
            let error = read_all(text).unwrap_err();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
