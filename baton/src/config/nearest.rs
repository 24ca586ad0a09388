//! The known word nearest to a mistyped one.

/// The candidate with the fewest edits from `word`, if it is near enough to be meant.
pub(super) fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.replace('_', "-").to_lowercase();
    let limit = (word.chars().count() / 2).max(2);
    candidates
        .into_iter()
        .map(|candidate| (edits(&word, candidate), candidate))
        .filter(|(distance, _)| *distance <= limit)
        .min()
        .map(|(_, candidate)| candidate)
}

/// Levenshtein distance: insertions, deletions and replacements of one character each cost 1.
fn edits(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, from) in left.chars().enumerate() {
        let mut diagonal = i;
        let mut before = i + 1;
        for (cell, to) in row.iter_mut().skip(1).zip(&right) {
            let replaced = diagonal + usize::from(from != *to);
            diagonal = *cell;
            before = replaced.min(before + 1).min(*cell + 1);
            *cell = before;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_levenshteins() {
        for (left, right, distance) in [
            ("", "", 0),
            ("a", "", 1),
            ("", "ab", 2),
            ("kitten", "sitting", 3),
            ("port", "port", 0),
            ("ab", "ba", 2),
        ] {
            assert_eq!(edits(left, right), distance, "{left} {right}");
        }
    }

    #[test]
    fn only_a_near_word_is_offered() {
        let known = ["http-port", "grpc-port", "context"];
        assert_eq!(nearest("http_port", known), Some("http-port"));
        assert_eq!(nearest("contxt", known), Some("context"));
        assert_eq!(nearest("zzzzzzzz", known), None);
    }
}
