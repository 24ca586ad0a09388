//! Reports as one page that needs nothing else: its style stands in it, its plots are SVG, and nothing is fetched or run.

use std::fmt::Write;

use crate::plot;
use crate::report::{Cell, Part, Report, Slots, Table};
use crate::terminal::is_numeric;

/// Light and dark by the reader's preference. Lines and bars take the Okabe-Ito colours, which people with any kind of colour
/// blindness tell apart; lines differ in their dashes too.
const STYLE: &str = "\
:root{color-scheme:light dark;--back:#fff;--text:#1b1f24;--quiet:#57606a;--rule:#d8dee4;--card:#f6f8fa;\
--c1:#0072b2;--c2:#d55e00;--c3:#007a5a;--c4:#a0448a}\
@media (prefers-color-scheme:dark){:root{--back:#0f1318;--text:#e6edf3;--quiet:#9aa7b4;--rule:#323a44;--card:#171d25;\
--c1:#56b4e9;--c2:#f0a03c;--c3:#35c79a;--c4:#e29ad0}}\
*{box-sizing:border-box}\
body{margin:0 auto;max-width:1160px;padding:20px 16px 40px;background:var(--back);color:var(--text);\
font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}\
h1{font-size:1.5rem;margin:0 0 4px}h2{font-size:1.2rem;margin:0 0 4px}h3{font-size:.95rem;margin:0 0 6px}\
p{margin:6px 0;max-width:78ch}.quiet,th{color:var(--quiet)}a{color:var(--c1)}\
nav{display:flex;flex-wrap:wrap;gap:2px 14px}code{font-size:.9em}\
section{border-top:1px solid var(--rule);margin-top:28px;padding-top:20px}\
.wide{overflow-x:auto;margin:14px 0}\
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}\
h3.above{margin:18px 0 -8px}\
th,td{padding:3px 12px 3px 0;text-align:left;border-bottom:1px solid var(--rule);white-space:nowrap}\
th{font-weight:600;vertical-align:bottom}th.right,td.right{text-align:right}\
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,360px),1fr));gap:14px;align-items:start}\
figure{margin:0;padding:12px;background:var(--card);border:1px solid var(--rule);border-radius:6px;max-width:560px}\
svg{display:block;width:100%;height:auto}\
svg text{fill:var(--text);font-size:12px;paint-order:stroke;stroke:var(--card);stroke-width:3px;stroke-linejoin:round}\
svg text.tick,svg text.axis{fill:var(--quiet)}svg text.tick{font-size:11px}\
.grid{stroke:var(--rule);stroke-width:1}\
.fill1{fill:var(--c1)}.fill2{fill:var(--c2)}.fill3{fill:var(--c3)}.fill4{fill:var(--c4)}\
.line1,.line2,.line3,.line4{fill:none;stroke-width:2;stroke-linejoin:round}\
.line1{stroke:var(--c1)}.line2{stroke:var(--c2);stroke-dasharray:7 3}.line3{stroke:var(--c3);stroke-dasharray:2 3}\
.line4{stroke:var(--c4);stroke-dasharray:9 3 2 3}\
.used{fill:var(--c1)}.shared{fill:var(--c2)}.empty{fill:none;stroke:var(--quiet);stroke-width:.7}\
.legend{font-size:.82rem;margin:0 0 6px}.legend span{margin-right:16px;white-space:nowrap}\
.legend svg{display:inline-block;width:28px;height:10px;margin-right:5px;vertical-align:middle}";

/// What must not stand in HTML as it is.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            _ => out.push(c),
        }
    }
    out
}

/// One page with all of these, complete in itself.
pub fn html(reports: &[Report]) -> String {
    let mut out = String::from("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    out.push_str("<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">");
    let _ = write!(out, "<title>baton lab</title><style>{STYLE}</style></head><body>\n<h1>baton lab</h1>");
    out.push_str("<p class=\"quiet\">The ideas that Baton is made of, each shown on the code that serves, in virtual time.</p>");
    if reports.len() > 1 {
        out.push_str("<nav>");
        for report in reports {
            let _ = write!(out, "<a href=\"#{0}\">{0}</a>", report.name);
        }
        out.push_str("</nav>");
    }
    for report in reports {
        add_report(&mut out, report);
    }
    out.push_str("</body></html>\n");
    out
}

fn add_report(out: &mut String, report: &Report) {
    let Report { name, title, idea, parts } = report;
    let _ = write!(out, "\n<section id=\"{name}\"><h2>{}</h2>", escape(title));
    let _ = write!(out, "<p>{}</p><p class=\"quiet\"><code>baton lab {name}</code></p>", escape(idea));
    // Pictures first: they say what the figures are about.
    out.push_str("<div class=\"plots\">");
    for part in parts {
        match part {
            Part::Plot(plot) => add_figure(out, &plot.title, &line_legend(plot), &plot::plot(plot)),
            Part::Slots(slots) => add_figure(out, &slots.title, &slot_legend(slots), &plot::slots(slots)),
            Part::Table(_) | Part::Note { .. } => {}
        }
    }
    out.push_str("</div>");
    for part in parts {
        match part {
            Part::Table(table) => add_table(out, table),
            Part::Note { text } => {
                let _ = write!(out, "<p class=\"quiet\">{}</p>", escape(text));
            }
            Part::Plot(_) | Part::Slots(_) => {}
        }
    }
    out.push_str("</section>");
}

fn add_figure(out: &mut String, title: &str, legend: &str, svg: &str) {
    let _ = write!(out, "<figure><h3>{}</h3>{legend}{svg}</figure>", escape(title));
}

fn legend(entries: impl Iterator<Item = (String, String)>) -> String {
    let entries = entries.map(|(mark, name)| {
        format!("<span><svg viewBox=\"0 0 28 10\" aria-hidden=\"true\">{mark}</svg>{}</span>", escape(&name))
    });
    let entries: String = entries.collect();
    if entries.is_empty() { entries } else { format!("<p class=\"legend\">{entries}</p>") }
}

fn line_legend(plot: &crate::Plot) -> String {
    let is_lines = matches!(plot.marks, crate::Marks::Lines { .. });
    let mark = |nth: usize| match is_lines {
        true => format!("<polyline class=\"line{nth}\" points=\"0,5 28,5\"/>"),
        false => format!("<rect class=\"fill{nth}\" width=\"28\" height=\"10\"/>"),
    };
    legend((1..).zip(plot::legend(plot)).map(|(nth, name)| (mark(nth), name.to_owned())))
}

fn slot_legend(slots: &Slots) -> String {
    use crate::SlotState::{Empty, Shared, Used};
    let kinds = [(Used, "used", "this sequence's"), (Shared, "shared", "shared"), (Empty, "empty", "empty")];
    let states: Vec<_> =
        slots.rows.iter().flat_map(|row| row.blocks.iter().flat_map(|(_, states)| states)).collect();
    let there = kinds.into_iter().filter(|(state, ..)| states.contains(&state));
    let mark = |class| format!("<rect class=\"{class}\" x=\"9\" y=\"1\" width=\"9\" height=\"8\"/>");
    legend(there.map(|(_, class, name)| (mark(class), name.to_owned())))
}

fn add_table(out: &mut String, table: &Table) {
    let _ = write!(
        out,
        "<h3 class=\"above\">{}</h3><div class=\"wide\"><table><thead><tr>",
        escape(&table.caption)
    );
    let class = |nth| if is_numeric(table, nth) { " class=\"right\"" } else { "" };
    for (nth, column) in table.columns.iter().enumerate() {
        let unit =
            if column.unit.is_empty() { String::new() } else { format!("<br>{}", escape(column.unit)) };
        let _ = write!(out, "<th{}>{}{unit}</th>", class(nth), escape(column.name));
    }
    out.push_str("</tr></thead><tbody>");
    for row in &table.rows {
        out.push_str("<tr>");
        for (nth, cell) in row.iter().map(Cell::shown).enumerate() {
            let _ = write!(out, "<td{}>{}</td>", class(nth), escape(&cell));
        }
        out.push_str("</tr>");
    }
    out.push_str("</tbody></table></div>");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Demonstration;

    #[test]
    fn text_can_not_break_out_of_the_page() {
        let mut report = Report::new(Demonstration::Cow, "a < b & \"c\"", "<script>");
        report.note("1 > 0");
        report.table("<b>", &[("<i>", "")], vec![vec!["<td>".into()]]);
        let page = html(&[report]);
        assert!(!page.contains("<script>") && !page.contains("<b>") && !page.contains("<i>"), "{page}");
        assert!(page.contains("a &lt; b &amp; &quot;c&quot;") && page.contains("1 &gt; 0"));
        assert_eq!(page.matches("<td").count(), 1);
    }
}
