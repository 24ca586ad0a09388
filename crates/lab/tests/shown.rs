//! What every demonstration shows: on a terminal, as JSON and on a page.

use std::collections::HashSet;
use std::sync::OnceLock;

use baton_lab::{Demonstration, Marks, Part, Report, html, text};

fn reports() -> &'static [Report] {
    static REPORTS: OnceLock<Vec<Report>> = OnceLock::new();
    REPORTS.get_or_init(|| {
        Demonstration::ALL.into_iter().map(|one| one.run().expect("it can be shown")).collect()
    })
}

#[test]
fn names_are_unique_and_understood() {
    let names: HashSet<&str> = Demonstration::ALL.iter().map(|one| one.name()).collect();
    assert_eq!(names.len(), 9);
    for (one, report) in Demonstration::ALL.into_iter().zip(reports()) {
        assert_eq!(one.name().parse(), Ok(one));
        assert_eq!(report.name, one.name());
        assert!(one.summary().len() < 100, "{}", one.summary());
    }
    let error = "bus".parse::<Demonstration>().unwrap_err();
    assert!(error.starts_with("unknown demonstration 'bus': batching, memory,"), "{error}");
}

#[test]
fn each_fits_a_screen() {
    for report in reports() {
        let shown = text(report);
        println!("{shown}");
        assert!(shown.lines().count() <= 54, "{}: {} lines", report.name, shown.lines().count());
        for line in shown.lines() {
            assert!(line.chars().count() <= 122, "{}: {} columns: {line}", report.name, line.chars().count());
        }
    }
}

#[test]
fn rows_have_a_cell_for_each_column_and_plots_their_values() {
    for report in reports() {
        assert!(
            report.parts.iter().any(|part| !matches!(part, Part::Table(_) | Part::Note { .. })),
            "{}",
            report.name
        );
        for part in &report.parts {
            match part {
                Part::Table(table) => {
                    assert!(!table.rows.is_empty(), "{}", table.caption);
                    assert!(
                        table.rows.iter().all(|row| row.len() == table.columns.len()),
                        "{}",
                        table.caption
                    );
                }
                Part::Plot(plot) => match &plot.marks {
                    Marks::Bars { categories, series } => {
                        assert!(
                            series.iter().all(|bars| bars.values.len() == categories.len()),
                            "{}",
                            plot.title
                        );
                        assert!((1..=4).contains(&series.len()));
                    }
                    Marks::Lines { series } => {
                        let is_drawn = |points: &[(f64, f64)]| {
                            points.len() > 1 && points.iter().all(|(x, y)| x.is_finite() && y.is_finite())
                        };
                        assert!(series.iter().all(|line| is_drawn(&line.points)), "{}", plot.title);
                        assert!((1..=4).contains(&series.len()));
                    }
                },
                Part::Slots(slots) => assert!(slots.rows.iter().all(|row| !row.blocks.is_empty())),
                Part::Note { text } => assert!(!text.is_empty()),
            }
        }
    }
}

#[test]
fn json_has_numbers_as_numbers() {
    for report in reports() {
        let json = serde_json::to_value(report).expect("it can be written");
        assert_eq!(json["name"], report.name);
        let parts = json["parts"].as_array().expect("a list");
        let table = parts.iter().find(|part| part["kind"] == "table").expect("a table");
        let mut cells =
            table["rows"].as_array().expect("rows").iter().flat_map(|row| row.as_array().expect("cells"));
        assert!(cells.any(serde_json::Value::is_number), "{table}");
    }
}

/// Whether every element that is opened is closed, in order.
fn is_balanced(page: &str) -> Result<(), String> {
    const VOID: [&str; 3] = ["meta", "br", "!doctype"];
    let mut open = Vec::new();
    for (at, _) in page.match_indices('<') {
        let rest = &page[at + 1..];
        let tag = &rest[..rest.find('>').ok_or("an open bracket")?];
        let name = tag.split([' ', '/']).find(|part| !part.is_empty()).unwrap_or_default();
        if let Some(closed) = tag.strip_prefix('/') {
            if open.pop() != Some(closed) {
                return Err(format!("</{closed}> at {at}"));
            }
        } else if !tag.ends_with('/') && !VOID.contains(&name) {
            open.push(name);
        }
    }
    if open.is_empty() { Ok(()) } else { Err(format!("left open: {open:?}")) }
}

#[test]
fn the_page_is_whole_and_asks_for_nothing() {
    let page = html(reports());
    assert_eq!(is_balanced(&page), Ok(()));
    for outside in ["http:", "https:", "<script", "<link", "<img", "@import", "url(", "src="] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(page.contains("prefers-color-scheme:dark"));
    let ids: Vec<String> =
        Demonstration::ALL.iter().map(|one| format!("<section id=\"{}\">", one.name())).collect();
    assert!(ids.iter().all(|id| page.matches(id.as_str()).count() == 1));
    assert!(page.len() < 512 * 1024, "{} bytes", page.len());
    let num_figures = |of: fn(&Part) -> bool| {
        reports().iter().flat_map(|report| &report.parts).filter(|part| of(part)).count()
    };
    assert_eq!(
        page.matches("<figure>").count(),
        num_figures(|part| matches!(part, Part::Plot(_) | Part::Slots(_)))
    );
    assert_eq!(page.matches("<table>").count(), num_figures(|part| matches!(part, Part::Table(_))));
}

#[test]
fn nothing_differs_from_run_to_run() {
    // The simulation, which takes most of the time of `stall`, has a test of this kind of its own.
    let all = Demonstration::ALL.into_iter().zip(reports());
    for (one, report) in all.filter(|(one, _)| *one != Demonstration::Stall) {
        assert_eq!(one.run().as_ref(), Ok(report), "{}", one.name());
    }
}

/// What a report prints from the line `caption` on, up to the next empty line.
fn part<'a>(shown: &'a str, caption: &str) -> Vec<&'a str> {
    shown.lines().skip_while(|line| *line != caption).take_while(|line| !line.is_empty()).collect()
}

/// The walk-through with every quoted table as it is printed now, and the demonstrations that it quotes.
fn quoted_anew(walk: &str) -> (String, Vec<&'static str>) {
    let (mut out, mut names) = (String::new(), Vec::new());
    let mut lines = walk.lines();
    while let Some(line) = lines.next() {
        out += &format!("{line}\n");
        if line != "```text" {
            continue;
        }
        let quoted: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
        let [command, "...", caption, ..] = quoted[..] else {
            panic!("not a command and a table: {quoted:?}")
        };
        let name = command.strip_prefix("$ baton lab ").unwrap_or_else(|| panic!("not a command: {command}"));
        let report =
            reports().iter().find(|report| report.name == name).unwrap_or_else(|| panic!("no {name}"));
        let shown = text(report);
        let part = part(&shown, caption);
        assert!(part.len() > 3, "`baton lab {name}` prints no table '{caption}'");
        out += &format!("{command}\n...\n{}\n```\n", part.join("\n"));
        names.push(report.name);
    }
    names.dedup();
    (out, names)
}

/// `BATON_UPDATE_DOCS=1` writes the tables into the walk-through in place of comparing them.
#[test]
fn the_walk_through_quotes_what_the_command_prints() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/lab.md");
    let walk = std::fs::read_to_string(path).expect("docs/lab.md");
    let (anew, names) = quoted_anew(&walk);
    assert_eq!(names, Demonstration::ALL.map(Demonstration::name), "each is quoted, in order");
    if std::env::var_os("BATON_UPDATE_DOCS").is_some() {
        std::fs::write(path, anew).expect("docs/lab.md can be written");
        return;
    }
    for (now, quoted) in anew.lines().zip(walk.lines()) {
        assert_eq!(now, quoted, "BATON_UPDATE_DOCS=1 writes what is printed now into docs/lab.md");
    }
    assert_eq!(anew.lines().count(), walk.lines().count());
}
