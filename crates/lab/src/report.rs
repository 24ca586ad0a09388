//! What a demonstration says: text, tables, plots and pictures of slots, whatever they are shown on.

use serde::{Serialize, Serializer};

use crate::Demonstration;

/// One demonstration's outcome.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// As typed.
    pub name: &'static str,
    /// What it is about, in a few words.
    pub title: &'static str,
    /// The idea, and what is compared with what.
    pub idea: &'static str,
    /// In the order in which they are read.
    pub parts: Vec<Part>,
}

/// One part of a report.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Part {
    /// Figures; on every output.
    Table(Table),
    /// A picture of figures; on the page alone.
    Plot(Plot),
    /// A picture of who has which slots; on the page alone.
    Slots(Slots),
    /// A sentence or two; on every output.
    Note {
        /// The sentences.
        text: String,
    },
}

/// Rows of figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Table {
    /// What the rows are.
    pub caption: String,
    /// Of each column the name and the unit.
    pub columns: Vec<Column>,
    /// As many cells each as there are columns.
    pub rows: Vec<Vec<Cell>>,
}

/// What a column holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Column {
    /// Its name.
    pub name: &'static str,
    /// Its unit; empty for names and plain counts.
    pub unit: &'static str,
}

/// One value of a table.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// Words.
    Text(String),
    /// A whole number.
    Count(u64),
    /// A number, shown with this many digits after the point.
    Real(f64, usize),
    /// Does not apply.
    Nothing,
}

impl Serialize for Cell {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Text(text) => serializer.serialize_str(text),
            Self::Count(count) => serializer.serialize_u64(*count),
            Self::Real(value, _) => serializer.serialize_f64(*value),
            Self::Nothing => serializer.serialize_none(),
        }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<usize> for Cell {
    fn from(count: usize) -> Self {
        Self::Count(count as u64)
    }
}

impl From<u64> for Cell {
    fn from(count: u64) -> Self {
        Self::Count(count)
    }
}

impl Cell {
    /// As it is shown: whole numbers with commas.
    pub fn shown(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Count(count) => grouped(*count),
            Self::Real(value, digits) => real(*value, *digits),
            Self::Nothing => "-".to_owned(),
        }
    }

    /// Whether it stands to the right of its column.
    pub const fn is_number(&self) -> bool {
        !matches!(self, Self::Text(_))
    }
}

/// A whole number with a comma before each three digits.
fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::new();
    for (nth, digit) in digits.chars().enumerate() {
        if nth > 0 && (digits.len() - nth).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A number with `digits` after the point, and commas before it.
pub(crate) fn real(value: f64, digits: usize) -> String {
    let text = format!("{:.*}", digits, value.abs());
    let (whole, rest) =
        text.split_once('.').map_or((text.as_str(), None), |(whole, rest)| (whole, Some(rest)));
    let whole = whole.parse().map_or_else(|_| whole.to_owned(), grouped);
    let sign = if value < 0.0 { "-" } else { "" };
    rest.map_or_else(|| format!("{sign}{whole}"), |rest| format!("{sign}{whole}.{rest}"))
}

/// A picture of figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plot {
    /// What it shows.
    pub title: String,
    /// Across.
    pub x: Axis,
    /// Up; begins at 0.
    pub y: Axis,
    /// What is drawn.
    pub marks: Marks,
}

/// An axis of a plot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Axis {
    /// What it measures.
    pub label: &'static str,
    /// In what; empty for names and plain counts.
    pub unit: &'static str,
    /// Whether each doubling takes as much room as the one before.
    pub doublings: bool,
}

impl Axis {
    /// An axis with even steps.
    pub(crate) const fn of(label: &'static str, unit: &'static str) -> Self {
        Self { label, unit, doublings: false }
    }
}

/// What a plot draws.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Marks {
    /// Groups of bars, one group a category.
    Bars {
        /// Names of the groups.
        categories: Vec<String>,
        /// One bar of each a group; at most four.
        series: Vec<Bars>,
    },
    /// Lines through points; at most four.
    Lines {
        /// Each with its name.
        series: Vec<Line>,
    },
}

/// Bars of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bars {
    /// Its name.
    pub name: String,
    /// One a category.
    pub values: Vec<f64>,
}

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    /// Its name.
    pub name: String,
    /// Across and up, from left to right.
    pub points: Vec<(f64, f64)>,
}

/// A picture of slots: each row is a run of blocks, each block a run of slots.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Slots {
    /// What it shows.
    pub title: String,
    /// From top to bottom.
    pub rows: Vec<SlotRow>,
}

/// One row of such a picture.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SlotRow {
    /// Whose they are.
    pub name: String,
    /// Of each block its label and its slots.
    pub blocks: Vec<(String, Vec<SlotState>)>,
}

/// What is in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SlotState {
    /// A token of this sequence alone.
    Used,
    /// A token that several sequences read.
    Shared,
    /// Held, and without a token.
    Empty,
}

impl Report {
    /// An empty report.
    pub(crate) const fn new(of: Demonstration, title: &'static str, idea: &'static str) -> Self {
        Self { name: of.name(), title, idea, parts: Vec::new() }
    }

    pub(crate) fn note(&mut self, text: impl Into<String>) {
        self.parts.push(Part::Note { text: text.into() });
    }

    pub(crate) fn table(
        &mut self,
        caption: impl Into<String>,
        columns: &[(&'static str, &'static str)],
        rows: Vec<Vec<Cell>>,
    ) {
        let columns = columns.iter().map(|&(name, unit)| Column { name, unit }).collect();
        self.parts.push(Part::Table(Table { caption: caption.into(), columns, rows }));
    }

    pub(crate) fn plot(&mut self, title: impl Into<String>, (x, y): (Axis, Axis), marks: Marks) {
        self.parts.push(Part::Plot(Plot { title: title.into(), x, y, marks }));
    }

    pub(crate) fn slots(&mut self, title: impl Into<String>, rows: Vec<SlotRow>) {
        self.parts.push(Part::Slots(Slots { title: title.into(), rows }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_shown_with_commas() {
        let shown = [0, 999, 1_000, 17_000, 1_234_567].map(|count: u64| Cell::from(count).shown());
        assert_eq!(shown, ["0", "999", "1,000", "17,000", "1,234,567"]);
        assert_eq!(real(11_407.44, 1), "11,407.4");
        assert_eq!(real(-0.126, 2), "-0.13");
        assert_eq!(real(2.5, 0), "2");
        assert_eq!(Cell::Nothing.shown(), "-");
    }
}
