//! What `/metrics` says, as values.

use std::collections::BTreeMap;

/// One scrape: series (name and labels) to value.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    series: Vec<Series>,
}

#[derive(Debug, Clone)]
struct Series {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Metrics {
    /// Reads the text format; exemplars and comments are dropped.
    ///
    /// # Panics
    /// On a line that is no sample: the exposition would be broken for everyone.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        Self {
            series: lines.map(|line| sample(line).unwrap_or_else(|| panic!("no sample: {line}"))).collect(),
        }
    }

    /// Sum over all series of this name that carry these labels; 0 when there are none.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.matching(name, labels).map(|series| series.value).sum()
    }

    /// Whether there is a series of this name with these labels.
    pub fn has(&self, name: &str, labels: &[(&str, &str)]) -> bool {
        self.matching(name, labels).next().is_some()
    }

    fn matching<'a>(&'a self, name: &'a str, labels: &'a [(&str, &str)]) -> impl Iterator<Item = &'a Series> {
        self.series.iter().filter(move |series| {
            series.name == name
                && labels.iter().all(|(key, value)| series.labels.get(*key).is_some_and(|have| have == value))
        })
    }
}

fn sample(line: &str) -> Option<Series> {
    let (name_and_labels, rest) = match line.find('{') {
        Some(open) => {
            let close = open + closing_brace(&line[open..])?;
            ((&line[..open], &line[open + 1..close]), &line[close + 1..])
        }
        None => {
            let space = line.find(' ')?;
            ((&line[..space], ""), &line[space..])
        }
    };
    let value = rest.split_whitespace().next()?.parse().ok()?;
    let labels = name_and_labels.1.split("\",").filter(|pair| !pair.is_empty()).map(|pair| {
        let (key, value) = pair.split_once("=\"")?;
        Some((key.trim().to_owned(), value.trim_end_matches('"').to_owned()))
    });
    Some(Series { name: name_and_labels.0.to_owned(), labels: labels.collect::<Option<_>>()?, value })
}

/// Position of the brace that ends the labels; a label's value may hold braces.
fn closing_brace(text: &str) -> Option<usize> {
    let mut quoted = false;
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => quoted = !quoted,
            '}' if !quoted => return Some(at),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::Metrics;

    #[test]
    fn samples_with_and_without_labels_and_exemplars() {
        let metrics = Metrics::parse(
            "# TYPE a counter\na_total 3\nb{x=\"1\",y=\"}\"} 2.5\nb{x=\"2\",y=\"z\"} 1\n\
             h_bucket{le=\"+Inf\"} 4 # {trace_id=\"ab\"} 0.1\n# EOF\n",
        );
        assert_eq!(metrics.sum("a_total", &[]), 3.0);
        assert_eq!(metrics.sum("b", &[]), 3.5);
        assert_eq!(metrics.sum("b", &[("y", "}")]), 2.5);
        assert_eq!(metrics.sum("h_bucket", &[("le", "+Inf")]), 4.0);
        assert!(
            metrics.has("b", &[("x", "2")]) && !metrics.has("b", &[("x", "3")]) && !metrics.has("c", &[])
        );
    }
}
