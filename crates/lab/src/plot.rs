//! Plots and pictures of slots as SVG, in one coordinate system that is readable on a phone: 420 units across.

use std::fmt::Write;

use crate::html::escape;
use crate::report::{Axis, Bars, Line, Marks, Plot, SlotState, Slots, real};

const WIDTH: f64 = 420.0;
const LEFT: f64 = 46.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 10.0;
const HEIGHT: f64 = 200.0;
/// Below a plot: its ticks and the axis's label.
const BELOW: f64 = 40.0;
/// Of one category's name, and of one bar.
const NAME: f64 = 18.0;
const BAR: f64 = 15.0;

/// An axis label with its unit.
fn label(axis: Axis) -> String {
    if axis.unit.is_empty() { axis.label.to_owned() } else { format!("{} ({})", axis.label, axis.unit) }
}

/// About five round values from 0 on, the last one at least `max`.
fn ticks(max: f64) -> Vec<f64> {
    let max = if max > 0.0 { max } else { 1.0 };
    let rough = max / 4.0;
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|m| m * power).find(|step| *step >= rough * 0.999);
    let step = step.unwrap_or(rough);
    let num = (max / step - 1e-9).ceil().max(1.0) as u32;
    (0..=num).map(|nth| f64::from(nth) * step).collect()
}

/// A number as short as it can be without losing what a tick says.
fn short(value: f64) -> String {
    let digits = (0..3).find(|&digits| {
        let scale = 10_f64.powi(digits);
        ((value * scale).round() / scale - value).abs() < 1e-9 * value.abs().max(1.0)
    });
    real(value, digits.unwrap_or(3) as usize)
}

/// A value beside a bar: three digits that count.
fn value_label(value: f64) -> String {
    let digits = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    real(value, digits)
}

/// A plot's SVG.
pub(crate) fn plot(plot: &Plot) -> String {
    match &plot.marks {
        Marks::Bars { categories, series } => bars(plot, categories, series),
        Marks::Lines { series } => lines(plot, series),
    }
}

/// Names of what is drawn, if there is more than one.
pub(crate) fn legend(plot: &Plot) -> Vec<&str> {
    let names: Vec<&str> = match &plot.marks {
        Marks::Bars { series, .. } => series.iter().map(|bars| bars.name.as_str()).collect(),
        Marks::Lines { series } => series.iter().map(|line| line.name.as_str()).collect(),
    };
    if names.len() > 1 { names } else { Vec::new() }
}

fn open(out: &mut String, title: &str, height: f64) {
    let title = escape(title);
    let _ = write!(out, "<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{title}\">");
}

fn bars(plot: &Plot, categories: &[String], series: &[Bars]) -> String {
    let max = series.iter().flat_map(|bars| &bars.values).copied().fold(0.0, f64::max);
    let ticks = ticks(max);
    let top = ticks.last().copied().unwrap_or(1.0);
    // Room for a value behind the longest bar.
    let across = |value: f64| 2.0 + value / top * (WIDTH - 56.0);
    let group = NAME + BAR * series.len() as f64 + 6.0;
    let bottom = group * categories.len() as f64;
    let mut out = String::new();
    open(&mut out, &plot.title, bottom + BELOW);
    for &tick in &ticks {
        let x = across(tick);
        let _ = write!(out, "<line class=\"grid\" x1=\"{x:.1}\" y1=\"0\" x2=\"{x:.1}\" y2=\"{bottom:.1}\"/>");
        let anchor = if tick == 0.0 { "start" } else { "middle" };
        let (y, text) = (bottom + 14.0, short(tick));
        let _ = write!(
            out,
            "<text class=\"tick\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"
        );
    }
    for (nth, name) in categories.iter().enumerate() {
        let y = group * nth as f64;
        let _ = write!(out, "<text x=\"4\" y=\"{:.1}\">{}</text>", y + 13.0, escape(name));
        for (which, bars) in series.iter().enumerate() {
            let value = bars.values.get(nth).copied().unwrap_or(0.0);
            let (y, width) = (y + NAME + BAR * which as f64, across(value) - 2.0);
            let _ = write!(
                out,
                "<rect class=\"fill{}\" x=\"2\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{:.1}\"/>",
                which + 1,
                BAR - 2.0
            );
            let (x, y) = (across(value) + 4.0, y + 11.0);
            let _ =
                write!(out, "<text class=\"tick\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", value_label(value));
        }
    }
    let (x, y) = (WIDTH / 2.0, bottom + 32.0);
    let _ = write!(
        out,
        "<text class=\"axis\" x=\"{x}\" y=\"{y:.1}\" text-anchor=\"middle\">{}</text>",
        label(plot.y)
    );
    out.push_str("</svg>");
    out
}

/// Where values of the horizontal axis lie.
struct Across {
    min: f64,
    max: f64,
    doublings: bool,
}

impl Across {
    fn of(axis: Axis, series: &[Line]) -> Self {
        let values = series.iter().flat_map(|line| line.points.iter().map(|point| point.0));
        let (min, max) = values.fold((f64::MAX, f64::MIN), |(min, max), x| (min.min(x), max.max(x)));
        Self { min, max: if max > min { max } else { min + 1.0 }, doublings: axis.doublings }
    }

    fn at(&self, value: f64) -> f64 {
        let scale = |value: f64| if self.doublings { value.max(1e-9).log2() } else { value };
        let share = (scale(value) - scale(self.min)) / (scale(self.max) - scale(self.min));
        LEFT + share * (WIDTH - LEFT - RIGHT)
    }

    fn ticks(&self) -> Vec<f64> {
        if self.doublings {
            let doublings = (self.max / self.min).log2().floor() as i32;
            return (0..=doublings).step_by(2).map(|nth| self.min * 2_f64.powi(nth)).collect();
        }
        ticks(self.max).into_iter().filter(|tick| (self.min..=self.max).contains(tick)).collect()
    }
}

fn lines(plot: &Plot, series: &[Line]) -> String {
    let max = series.iter().flat_map(|line| line.points.iter().map(|point| point.1)).fold(0.0, f64::max);
    let up_ticks = ticks(max);
    let top = up_ticks.last().copied().unwrap_or(1.0);
    let up = |value: f64| TOP + HEIGHT - value / top * HEIGHT;
    let across = Across::of(plot.x, series);
    let mut out = String::new();
    open(&mut out, &plot.title, TOP + 14.0 + HEIGHT + BELOW);
    // The upper label stands over its axis, so that it needs no turned text.
    let _ = write!(
        out,
        "<text class=\"axis\" x=\"2\" y=\"11\">{}</text><g transform=\"translate(0 14)\">",
        label(plot.y)
    );
    for &tick in &up_ticks {
        let y = up(tick);
        let (x, right, text) = (LEFT - 5.0, WIDTH - RIGHT, short(tick));
        let _ =
            write!(out, "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\"/>");
        let _ = write!(
            out,
            "<text class=\"tick\" x=\"{x}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
            y + 4.0
        );
    }
    let bottom = TOP + HEIGHT;
    for tick in across.ticks() {
        let (x, y, text) = (across.at(tick), bottom + 15.0, short(tick));
        let _ = write!(
            out,
            "<line class=\"grid\" x1=\"{x:.1}\" y1=\"{bottom}\" x2=\"{x:.1}\" y2=\"{:.1}\"/>",
            bottom + 4.0
        );
        let _ =
            write!(out, "<text class=\"tick\" x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{text}</text>");
    }
    for (nth, line) in series.iter().enumerate() {
        let points = line.points.iter().map(|&(x, y)| format!("{:.1},{:.1}", across.at(x), up(y)));
        let points = points.collect::<Vec<_>>().join(" ");
        let _ = write!(out, "<polyline class=\"line{}\" points=\"{points}\"/>", nth + 1);
    }
    let (x, y) = (f64::midpoint(LEFT, WIDTH - RIGHT), bottom + 33.0);
    let _ = write!(
        out,
        "<text class=\"axis\" x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">{}</text>",
        label(plot.x)
    );
    out.push_str("</g></svg>");
    out
}

/// A picture of slots, one row a sequence.
pub(crate) fn slots(slots: &Slots) -> String {
    const GAP: f64 = 5.0;
    const CELL: f64 = 18.0;
    const ROW: f64 = 54.0;
    let most = |of: &dyn Fn(&crate::SlotRow) -> usize| slots.rows.iter().map(of).max().unwrap_or(1) as f64;
    let (num_blocks, num_slots) =
        (most(&|row| row.blocks.len()), most(&|row| row.blocks.iter().map(|(_, slots)| slots.len()).sum()));
    let cell = ((WIDTH - 4.0 - GAP * num_blocks) / num_slots).min(CELL);
    let mut out = String::new();
    open(&mut out, &slots.title, ROW * slots.rows.len() as f64);
    for (nth, row) in slots.rows.iter().enumerate() {
        let y = ROW * nth as f64;
        let _ = write!(out, "<text x=\"2\" y=\"{:.1}\">{}</text>", y + 12.0, escape(&row.name));
        let mut x = 2.0;
        for (name, states) in &row.blocks {
            let middle = x + cell * states.len() as f64 / 2.0;
            let (name, under) = (escape(name), y + 44.0);
            let _ = write!(
                out,
                "<text class=\"tick\" x=\"{middle:.1}\" y=\"{under:.1}\" text-anchor=\"middle\">{name}</text>"
            );
            for state in states {
                let class = match state {
                    SlotState::Used => "used",
                    SlotState::Shared => "shared",
                    SlotState::Empty => "empty",
                };
                let y = y + 17.0;
                let _ = write!(
                    out,
                    "<rect class=\"{class}\" x=\"{x:.2}\" y=\"{y:.1}\" width=\"{:.2}\" height=\"14\"/>",
                    (cell - 0.6).max(0.5)
                );
                x += cell;
            }
            x += GAP;
        }
    }
    out.push_str("</svg>");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_reach_the_largest_value() {
        assert_eq!(ticks(0.0), [0.0, 0.25, 0.5, 0.75, 1.0]);
        assert_eq!(ticks(84.16), [0.0, 25.0, 50.0, 75.0, 100.0]);
        assert_eq!(ticks(8.0), [0.0, 2.0, 4.0, 6.0, 8.0]);
        for max in [0.013, 0.7, 3.0, 41.0, 999.0, 81_920.0] {
            let ticks = ticks(max);
            assert!((3..=7).contains(&ticks.len()) && ticks[ticks.len() - 1] >= max, "{max}: {ticks:?}");
        }
        assert_eq!([0.25, 2.5, 20.0, 1_500.0].map(short), ["0.25", "2.5", "20", "1,500"]);
    }

    #[test]
    fn doublings_take_equal_room() {
        let line = Line { name: "x".to_owned(), points: vec![(1.0, 0.0), (1_024.0, 1.0)] };
        let across = Across::of(Axis { label: "x", unit: "", doublings: true }, &[line]);
        let steps: Vec<f64> =
            [1.0, 4.0, 16.0, 64.0].windows(2).map(|w| across.at(w[1]) - across.at(w[0])).collect();
        assert!(steps.iter().all(|step| (step - steps[0]).abs() < 1e-9), "{steps:?}");
        assert_eq!(across.ticks(), [1.0, 4.0, 16.0, 64.0, 256.0, 1_024.0]);
        assert!((across.at(1_024.0) - (WIDTH - RIGHT)).abs() < 1e-9);
    }
}
