//! The source tree, for the house rules: Rust text with its comments taken out and its strings apart.

use std::path::{Path, PathBuf};

/// One line of Rust without comments.
#[derive(Debug, Clone, Default)]
pub struct Line {
    /// Code; string literals are left empty.
    pub code: String,
    /// What was inside string literals that begin on this line.
    pub strings: Vec<String>,
}

/// Every file of the repository with this ending, build output and hidden folders left out, relative to the top, sorted.
///
/// # Panics
/// When a folder can't be read.
pub fn files(extension: &str) -> Vec<PathBuf> {
    let top = crate::repository();
    let mut open = vec![top.clone()];
    let mut found = Vec::new();
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(&dir).expect("a readable folder").flatten() {
            let path = entry.path();
            let name = entry.file_name();
            let hidden = name.to_string_lossy().starts_with('.') || (name == "target" && dir == top);
            if path.is_dir() && !hidden {
                open.push(path);
            } else if path.extension().is_some_and(|have| have == extension) {
                found.push(path.strip_prefix(&top).expect("below the top").to_owned());
            }
        }
    }
    found.sort();
    found
}

/// A file's text, by its path relative to the top.
///
/// # Panics
/// When it can't be read.
pub fn text(relative: &Path) -> String {
    let path = crate::repository().join(relative);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Splits Rust text into lines of code and strings.
pub fn lines(source: &str) -> Vec<Line> {
    let mut lines = vec![Line::default()];
    let mut rest = source;
    while let Some(c) = rest.chars().next() {
        let line = lines.last_mut().expect("one line at least");
        let (token, length) = token(rest, line.code.chars().next_back());
        match token {
            Token::Comment => {}
            Token::String { content } => {
                line.code.push_str("\"\"");
                line.strings.push(content.to_owned());
            }
            Token::Char => line.code.push_str("' '"),
            Token::Other if c != '\n' => line.code.push(c),
            Token::Other => {}
        }
        lines.extend(rest[..length].matches('\n').map(|_| Line::default()));
        rest = &rest[length..];
    }
    lines
}

enum Token<'a> {
    Comment,
    String { content: &'a str },
    Char,
    Other,
}

/// The token at the start of `rest`, and its length in bytes.
fn token(rest: &str, before: Option<char>) -> (Token<'_>, usize) {
    if rest.starts_with("//") {
        return (Token::Comment, rest.find('\n').unwrap_or(rest.len()));
    }
    if rest.starts_with("/*") {
        return (Token::Comment, block_comment(rest));
    }
    let in_word = before.is_some_and(|c| c.is_alphanumeric() || c == '_');
    if let Some(raw) = rest.strip_prefix('r').filter(|_| !in_word || before == Some('b')) {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        if raw[hashes..].starts_with('"') {
            let open = 1 + hashes + 1;
            let end = format!("\"{}", "#".repeat(hashes));
            let length = rest[open..].find(&end).map_or(rest.len() - open, |at| at);
            return (
                Token::String { content: &rest[open..open + length] },
                (open + length + end.len()).min(rest.len()),
            );
        }
    }
    if let Some(inside) = rest.strip_prefix('"') {
        let length = quoted(inside, '"');
        return (Token::String { content: &inside[..length] }, (length + 2).min(rest.len()));
    }
    if let Some(inside) = rest.strip_prefix('\'') {
        // 'x' or '\n' is a character; 'a without a second quote is a lifetime.
        let mut chars = inside.chars();
        let first = chars.next();
        if first == Some('\\') || chars.next() == Some('\'') {
            return (Token::Char, (quoted(inside, '\'') + 2).min(rest.len()));
        }
    }
    (Token::Other, rest.chars().next().map_or(1, char::len_utf8))
}

/// Bytes up to the closing quote.
fn quoted(inside: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in inside.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at,
            _ => {}
        }
    }
    inside.len()
}

fn block_comment(rest: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += rest[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use super::lines;

    #[test]
    fn code_strings_and_comments_are_told_apart() {
        let source = "let a = \"x // \\\" y\"; // dbg!(\nlet b = r#\"q\"z\"#; /* todo!(\n */ let c: &'a str = '\"'; d('\\n');";
        let lines = lines(source);
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[0].code.trim(), "let a = \"\";");
        assert_eq!(lines[0].strings, ["x // \\\" y"]);
        assert_eq!(lines[1].code.trim(), "let b = \"\";");
        assert_eq!(lines[1].strings, ["q\"z"]);
        assert_eq!(lines[2].code.trim(), "let c: &'a str = ' '; d(' ');");
    }

    #[test]
    fn a_string_over_two_lines_keeps_the_line_count() {
        let lines = lines("a(\"one\ntwo\");\nb();");
        assert_eq!(lines[2].code, "b();");
        assert_eq!(lines[0].strings, ["one\ntwo"]);
    }
}
