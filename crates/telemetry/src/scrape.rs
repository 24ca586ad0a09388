//! Reading `/metrics` back: what a benchmark asks of a cluster that runs.

/// Seconds that running sequences were blocked, by cause; of decode workers.
pub const DECODE_BLOCKED_SECONDS: &str = "baton_decode_blocked_seconds_total";
/// Seconds that running sequences would have been blocked in a colocated cluster; of the router, which scales to its fleet.
pub const HOL_AVOIDED_SECONDS: &str = "baton_hol_avoided_seconds_total";
/// What a step is expected to cost, by part: `fixed`, `token` and `context_token`, in seconds; of workers.
pub const STEP_COST: &str = "baton_step_cost_seconds";
/// How far off that is, as a share of a step; of workers.
pub const STEP_COST_RESIDUAL: &str = "baton_step_cost_residual";
/// The label of a part of a cost.
pub const PART: &str = "part";
/// What a turn of a worker's loop takes by the kind of its step and by part as [`STEP_COST`] has them, in seconds; of workers.
pub const STEP_PROFILE: &str = "baton_step_profile_seconds";
/// How many times that a share of the steps takes at most, by kind and share; of workers.
pub const STEP_PROFILE_RATIO: &str = "baton_step_profile_ratio";
/// The label of a kind of steps.
pub const KIND: &str = "kind";
/// The label of a share, 0 to 1.
pub const SHARE: &str = "share";
/// Blocks of a worker's pool.
pub const BLOCKS_CONFIGURED: &str = "baton_blocks_total_configured";
/// The label of a cause.
pub const CAUSE: &str = "cause";

/// One scrape. What is no sample is passed over.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scrape {
    series: Vec<Series>,
}

#[derive(Clone, Debug, PartialEq)]
struct Series {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

impl Scrape {
    /// Reads Prometheus' text format or OpenMetrics; exemplars and comments are dropped.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        Self { series: lines.filter_map(sample).collect() }
    }

    /// Sum over all series of this name; `None` when there is none.
    pub fn sum(&self, name: &str) -> Option<f64> {
        let values = self.series.iter().filter(|series| series.name == name).map(|series| series.value);
        values.reduce(|sum, value| sum + value)
    }

    /// Those series whose label has this value.
    #[must_use]
    pub fn only(&self, label: &str, value: &str) -> Self {
        let has = |series: &&Series| series.labels.iter().any(|(key, found)| key == label && found == value);
        Self { series: self.series.iter().filter(has).cloned().collect() }
    }

    /// Sums over all series of this name by the value of one label, in the order in which they came.
    pub fn by_label(&self, name: &str, label: &str) -> Vec<(&str, f64)> {
        let mut sums: Vec<(&str, f64)> = Vec::new();
        for series in self.series.iter().filter(|series| series.name == name) {
            let Some((_, value)) = series.labels.iter().find(|(key, _)| key == label) else { continue };
            match sums.iter_mut().find(|(known, _)| known == value) {
                Some((_, sum)) => *sum += series.value,
                None => sums.push((value, series.value)),
            }
        }
        sums
    }
}

fn sample(line: &str) -> Option<Series> {
    let end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (Vec::new(), rest),
    };
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Series { name: name.to_owned(), labels, value })
}

/// `a="x",b="y"} rest`, with `\\`, `\"` and `\n` in values.
fn labels(mut text: &str) -> Option<(Vec<(String, String)>, &str)> {
    let mut labels = Vec::new();
    loop {
        text = text.trim_start_matches([',', ' ']);
        if let Some(rest) = text.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (key, quoted) = text.split_once("=\"")?;
        let mut value = String::new();
        let mut chars = quoted.char_indices();
        let end = loop {
            match chars.next()? {
                (at, '"') => break at,
                (_, '\\') => match chars.next()?.1 {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                (_, other) => value.push(other),
            }
        };
        labels.push((key.to_owned(), value));
        text = &quoted[end + 1..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_with_and_without_labels_and_exemplars() {
        let scrape = Scrape::parse(
            "# TYPE a counter\na_total 3\nb{x=\"1\",y=\"}\\\"\"} 2.5\nb{x=\"2\",y=\"z\"} 1\nb{x=\"1\"} 4\n\
             h_bucket{le=\"+Inf\"} 4 # {trace_id=\"ab\"} 0.1\nno sample\n\n# EOF\n",
        );
        assert_eq!(scrape.sum("a_total"), Some(3.0));
        assert_eq!(scrape.sum("b"), Some(7.5));
        assert_eq!(scrape.sum("h_bucket"), Some(4.0));
        assert_eq!(scrape.sum("missing"), None);
        assert_eq!(scrape.by_label("b", "x"), [("1", 6.5), ("2", 1.0)]);
        assert_eq!(scrape.by_label("b", "y"), [("}\"", 2.5), ("z", 1.0)]);
        assert_eq!(scrape.only("x", "1").by_label("b", "x"), [("1", 6.5)]);
        assert_eq!(scrape.only("y", "z").sum("b"), Some(1.0));
    }
}
