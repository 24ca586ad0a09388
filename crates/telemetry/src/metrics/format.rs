//! The two text formats of a scrape.
//!
//! Prometheus asks for OpenMetrics, which carries exemplars. Other readers, `promtool check metrics` among them, read the older
//! format: there a counter's own lines carry `_total` too, and there are no units, exemplars or end mark.

/// The content type of OpenMetrics.
pub const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// The content type of the older format.
pub const PLAIN: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Whether somebody who accepts this reads OpenMetrics.
pub(super) fn wants_open_metrics(accept: Option<&str>) -> bool {
    accept.is_some_and(|accept| accept.contains("application/openmetrics-text"))
}

/// OpenMetrics text in the older format.
pub(super) fn plain(open: &str) -> String {
    let mut plain = String::with_capacity(open.len() + open.len() / 8);
    // The help of a family comes before its type, and both need the name that its type decides.
    let mut help: Option<(&str, &str)> = None;
    for line in open.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let suffix = if kind == "counter" { "_total" } else { "" };
            let kind = if kind == "unknown" { "untyped" } else { kind };
            if let Some((_, text)) = help.take().filter(|(of, _)| *of == name) {
                push(&mut plain, &["# HELP ", name, suffix, " ", text]);
            }
            push(&mut plain, &["# TYPE ", name, suffix, " ", kind]);
        } else if !line.starts_with('#') {
            push(&mut plain, &[without_exemplar(line)]);
        }
    }
    plain
}

fn push(text: &mut String, parts: &[&str]) {
    parts.iter().for_each(|part| text.push_str(part));
    text.push('\n');
}

/// An exemplar stands behind ` # `, which a label's value could hold too; so the last one outside quotes counts.
fn without_exemplar(line: &str) -> &str {
    let (mut in_quotes, mut escaped) = (false, false);
    for (at, byte) in line.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_quotes,
            b'"' => in_quotes = !in_quotes,
            b'#' if !in_quotes => return line[..at].trim_end(),
            _ => {}
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_format_names_counters_whole_and_has_no_exemplars() {
        let open = "# HELP a Things.\n# TYPE a counter\na_total{x=\"1 # 2\"} 3\n\
                    # HELP h_seconds Time.\n# TYPE h_seconds histogram\n# UNIT h_seconds seconds\n\
                    h_seconds_bucket{le=\"1.0\"} 1 # {trace_id=\"ab\"} 0.5 1.0\nh_seconds_sum 0.5\n\
                    # HELP g State.\n# TYPE g gauge\ng 1\n# EOF\n";
        let expected = "# HELP a_total Things.\n# TYPE a_total counter\na_total{x=\"1 # 2\"} 3\n\
                        # HELP h_seconds Time.\n# TYPE h_seconds histogram\n\
                        h_seconds_bucket{le=\"1.0\"} 1\nh_seconds_sum 0.5\n\
                        # HELP g State.\n# TYPE g gauge\ng 1\n";
        assert_eq!(plain(open), expected);
    }

    #[test]
    fn only_who_asks_gets_open_metrics() {
        assert!(wants_open_metrics(Some(
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2"
        )));
        assert!(!wants_open_metrics(Some("text/plain")) && !wants_open_metrics(None));
    }
}
