//! The comparison as a picture: gaps between tokens over time, one strip a cluster, on one logarithmic scale.
//!
//! Self-contained SVG; its colours follow the reader's light or dark theme.

use std::fmt::Write;

use super::outcome::Outcome;
use super::report::Comparison;
use crate::bench::stats::Summary;

/// All lengths are in pixels.
const WIDTH: f64 = 960.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 56.0;
const STRIP: f64 = 104.0;
const PLOT: f64 = 72.0;
const BOTTOM: f64 = 44.0;
/// Two pixels each: what a reader can tell apart.
const COLUMN: f64 = 2.0;

const STYLE: &str = "\
text{font:12px system-ui,sans-serif;fill:#24292f}.small{font-size:11px;fill:#57606a}.title{font-size:14px;font-weight:600}\
.back{fill:#ffffff}.grid{stroke:#d0d7de;stroke-width:1}.prefill{fill:#d0d7de;opacity:.55}.ours{stroke:#0969da}.theirs{stroke:#cf222e}\
.ours,.theirs{stroke-width:2}\
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9198a1}.back{fill:#0d1117}.grid{stroke:#30363d}\
.prefill{fill:#484f58}.ours{stroke:#58a6ff}.theirs{stroke:#ff7b72}}";

/// What all strips share.
struct Scale {
    seconds: f64,
    /// Decades of milliseconds: the axis runs from `10^low` to `10^high`.
    low: i32,
    high: i32,
}

impl Scale {
    fn of(comparison: &Comparison) -> Self {
        let gaps = || comparison.clusters().flat_map(|(_, outcome)| outcome.gaps.iter());
        let seconds = gaps().map(|(at, _)| *at).fold(1.0, f64::max);
        // Gaps below a millisecond are tokens that came in one network packet.
        let low = gaps().map(|(_, gap)| gap.max(1.0)).fold(f64::INFINITY, f64::min);
        let high = gaps().map(|(_, gap)| *gap).fold(10.0, f64::max);
        let low = if low.is_finite() { low.log10().floor() as i32 } else { 0 };
        Self { seconds, low, high: (high.log10().ceil() as i32).max(low + 1) }
    }

    fn x(&self, at: f64) -> f64 {
        LEFT + (at / self.seconds).clamp(0.0, 1.0) * (WIDTH - LEFT - RIGHT)
    }

    /// Down from the top of a strip's plot.
    fn y(&self, gap: f64) -> f64 {
        let part = (gap.max(1e-3).log10() - f64::from(self.low)) / f64::from(self.high - self.low);
        PLOT * (1.0 - part.clamp(0.0, 1.0))
    }
}

/// Draws it.
pub(super) fn draw(comparison: &Comparison) -> String {
    let scale = Scale::of(comparison);
    let num = comparison.clusters().count() as f64;
    let height = TOP + num * STRIP + BOTTOM;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
         aria-label=\"Gaps between tokens over time, disaggregated and colocated\">\n<style>{STYLE}</style>\n\
         <rect class=\"back\" width=\"{WIDTH}\" height=\"{height}\" rx=\"6\"/>\n\
         <text class=\"title\" x=\"16\" y=\"24\">Gaps between tokens of decoding streams while prompts arrive</text>\n\
         <text class=\"small\" x=\"16\" y=\"42\">ms, logarithmic; each column is the range of gaps that ended there; grey: \
         a prompt waits for its first token</text>\n"
    );
    for (nth, (name, outcome)) in comparison.clusters().enumerate() {
        let top = TOP + nth as f64 * STRIP;
        // Writing to a String can't fail.
        let _ = writeln!(svg, "<g transform=\"translate(0 {top})\">");
        strip(&mut svg, &scale, &name, outcome, nth == 0);
        svg.push_str("</g>\n");
    }
    seconds_axis(&mut svg, &scale, height - BOTTOM + 14.0);
    svg.push_str("</svg>\n");
    svg
}

fn strip(svg: &mut String, scale: &Scale, name: &str, outcome: &Outcome, ours: bool) {
    let says = |summary: Summary| {
        format!("median {:.1}, p99 {:.1}, worst {:.0} ms", summary.p50, summary.p99, summary.max)
    };
    let figures = outcome.itl_ms.map_or_else(|| "no gaps".to_owned(), says);
    let right = WIDTH - RIGHT;
    let _ = writeln!(
        svg,
        "<text x=\"{LEFT}\" y=\"13\">{name}</text><text class=\"small\" x=\"{right}\" y=\"13\" text-anchor=\"end\">{figures}</text>\n\
         <g transform=\"translate(0 20)\">"
    );
    for (from, to) in union(&outcome.prefills) {
        let (from, to) = (scale.x(from), scale.x(to));
        let width = (to - from).max(1.0);
        let _ = write!(
            svg,
            "<rect class=\"prefill\" x=\"{from:.1}\" y=\"0\" width=\"{width:.1}\" height=\"{PLOT}\"/>"
        );
    }
    for decade in scale.low..=scale.high {
        let (gap, y) = (10f64.powi(decade), scale.y(10f64.powi(decade)));
        let (label, below) = (LEFT - 6.0, y + 4.0);
        let _ = write!(
            svg,
            "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{right}\"/>\
             <text class=\"small\" x=\"{label}\" y=\"{below:.1}\" text-anchor=\"end\">{gap}</text>"
        );
    }
    let mut path = String::new();
    for (x, (least, most)) in columns(scale, &outcome.gaps) {
        // A column of one gap would be invisible without a height of its own.
        let (bottom, top) = (scale.y(least) + 0.75, scale.y(most) - 0.75);
        let _ = write!(path, "M{x:.0} {bottom:.1}V{top:.1}");
    }
    let class = if ours { "ours" } else { "theirs" };
    let _ = writeln!(svg, "\n<path class=\"{class}\" d=\"{path}\"/></g>");
}

/// Intervals that do not overlap, so that no grey is darker than another; `intervals` begin in order.
fn union(intervals: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut union: Vec<(f64, f64)> = Vec::new();
    for &(from, to) in intervals {
        match union.last_mut().filter(|last| last.1 >= from) {
            Some(last) => last.1 = last.1.max(to),
            None => union.push((from, to)),
        }
    }
    union
}

/// The smallest and the largest gap of each column that has any, by its position.
fn columns(scale: &Scale, gaps: &[(f64, f64)]) -> Vec<(f64, (f64, f64))> {
    let mut columns = std::collections::BTreeMap::new();
    for (at, gap) in gaps {
        let column = ((scale.x(*at) - LEFT) / COLUMN) as u32;
        let range = columns.entry(column).or_insert((*gap, *gap));
        *range = (range.0.min(*gap), range.1.max(*gap));
    }
    columns.into_iter().map(|(column, range)| (LEFT + (f64::from(column) + 0.5) * COLUMN, range)).collect()
}

fn seconds_axis(svg: &mut String, scale: &Scale, y: f64) {
    let step = [1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0, 900.0, 3600.0];
    let step = step.into_iter().find(|step| scale.seconds / step <= 12.0).unwrap_or(scale.seconds);
    let mut at = 0.0;
    while at <= scale.seconds {
        let x = scale.x(at);
        let _ = write!(
            svg,
            "<text class=\"small\" x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{at:.0} s</text>"
        );
        at += step;
    }
    svg.push('\n');
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::comparison;
    use super::*;

    #[test]
    fn every_cluster_has_a_strip_and_every_gap_lies_inside_it() {
        let comparison = comparison();
        let svg = draw(&comparison);
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert_eq!(svg.matches("<g transform").count(), 2 * 3);
        assert_eq!((svg.matches("class=\"ours\"").count(), svg.matches("class=\"theirs\"").count()), (1, 2));
        assert!(svg.contains("worst 2734 ms") && svg.contains("prefers-color-scheme:dark"));
        let scale = Scale::of(&comparison);
        for (_, outcome) in comparison.clusters() {
            for (at, gap) in &outcome.gaps {
                assert!(
                    (LEFT..=WIDTH - RIGHT).contains(&scale.x(*at)) && (0.0..=PLOT).contains(&scale.y(*gap))
                );
            }
        }
        // The axis ends at whole decades around 11 and 2734 ms.
        assert_eq!((scale.low, scale.high), (1, 4));
        assert!(scale.y(100.0) < scale.y(10.0));
    }

    #[test]
    fn prompts_that_wait_together_are_one_grey() {
        let intervals = [(0.0, 2.0), (1.0, 1.5), (2.0, 3.0), (4.0, 5.0)];
        assert_eq!(union(&intervals), [(0.0, 3.0), (4.0, 5.0)]);
    }

    #[test]
    fn a_column_spans_its_gaps() {
        let scale = Scale { seconds: 442.0, low: 0, high: 4 };
        let found = columns(&scale, &[(0.1, 5.0), (0.2, 500.0), (0.3, 50.0), (400.0, 7.0)]);
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].1, found[1].1), ((5.0, 500.0), (7.0, 7.0)));
    }
}
