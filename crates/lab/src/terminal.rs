//! Reports as text: what fits a terminal. Plots and pictures of slots are for the page.

use crate::report::{Cell, Column, Part, Report, Table};

/// Columns of a terminal that prose is broken at.
const WIDTH: usize = 110;
/// Between two columns of a table.
const GAP: &str = "  ";

/// The report as lines of at most about 110 columns, with a newline at the end.
pub fn text(report: &Report) -> String {
    let mut out = format!("{}: {}\n", report.name, report.title);
    wrap(&mut out, report.idea);
    for part in &report.parts {
        match part {
            Part::Table(table) => {
                out.push('\n');
                add_table(&mut out, table);
            }
            Part::Note { text } => {
                out.push('\n');
                wrap(&mut out, text);
            }
            Part::Plot(_) | Part::Slots(_) => {}
        }
    }
    out
}

fn width(text: &str) -> usize {
    text.chars().count()
}

fn wrap(out: &mut String, prose: &str) {
    let mut used = 0;
    for word in prose.split_whitespace() {
        if used > 0 && used + 1 + width(word) > WIDTH {
            out.push('\n');
            used = 0;
        } else if used > 0 {
            out.push(' ');
            used += 1;
        }
        out.push_str(word);
        used += width(word);
    }
    out.push('\n');
}

fn add_table(out: &mut String, table: &Table) {
    out.push_str(&table.caption);
    out.push('\n');
    let shown: Vec<Vec<String>> =
        table.rows.iter().map(|row| row.iter().map(Cell::shown).collect()).collect();
    let to_the_right: Vec<bool> = (0..table.columns.len()).map(|nth| is_numeric(table, nth)).collect();
    let widest = |(nth, column): (usize, &Column)| {
        let cells = shown.iter().filter_map(|row| row.get(nth)).map(|cell| width(cell));
        cells.chain([width(column.name), width(column.unit)]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = table.columns.iter().enumerate().map(widest).collect();
    let mut add_line = |cells: &mut dyn Iterator<Item = &str>| {
        let cells = cells.zip(&widths).zip(&to_the_right).map(|((cell, &width), right)| {
            if *right { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        out.push_str(cells.collect::<Vec<_>>().join(GAP).trim_end());
        out.push('\n');
    };
    add_line(&mut table.columns.iter().map(|column| column.name));
    if table.columns.iter().any(|column| !column.unit.is_empty()) {
        add_line(&mut table.columns.iter().map(|column| column.unit));
    }
    let rule: Vec<String> = widths.iter().map(|&width| "-".repeat(width)).collect();
    add_line(&mut rule.iter().map(String::as_str));
    for row in &shown {
        add_line(&mut row.iter().map(String::as_str));
    }
}

/// Whether a column stands to the right: all its cells but the odd word are numbers.
pub(crate) fn is_numeric(table: &Table, nth: usize) -> bool {
    let mut cells = table.rows.iter().filter_map(|row| row.get(nth));
    cells.any(Cell::is_number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Demonstration;

    #[test]
    fn columns_line_up_and_numbers_stand_to_the_right() {
        let mut report = Report::new(Demonstration::Cow, "A title", "An idea.");
        report.table(
            "Rows",
            &[("name", ""), ("time", "ms")],
            vec![
                vec!["a".into(), Cell::Real(1.0, 1)],
                vec!["longer".into(), Cell::Real(12_345.0, 1)],
                vec!["none".into(), Cell::Nothing],
            ],
        );
        let wanted = "cow: A title\nAn idea.\n\nRows\nname        time\n              ms\n------  --------\na            1.0\n\
                      longer  12,345.0\nnone           -\n";
        assert_eq!(text(&report), wanted);
    }

    #[test]
    fn prose_is_broken_between_words() {
        let mut out = String::new();
        wrap(&mut out, &"word ".repeat(60));
        assert!(
            out.lines().all(|line| line.len() <= WIDTH && !line.starts_with(' ') && !line.ends_with(' '))
        );
        assert_eq!(out.split_whitespace().count(), 60);
    }
}
