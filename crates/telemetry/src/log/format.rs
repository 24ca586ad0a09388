//! How one line is written.

use std::fmt::{self, Write};

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::LogFormat;
use super::request::Ids;
use crate::names;

/// Span fields are not repeated on every line; the request's ids are found beside the span.
pub(super) struct NoSpanFields;

impl<'w> FormatFields<'w> for NoSpanFields {
    fn format_fields<R: RecordFields>(&self, _: Writer<'w>, _: R) -> fmt::Result {
        Ok(())
    }
}

/// Writes whole lines.
pub(super) struct Lines {
    format: LogFormat,
    role: String,
}

impl Lines {
    pub(super) fn new(format: LogFormat, role: String) -> Self {
        Self { format, role }
    }
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut ids = Ids::default();
        for span in context.event_scope().into_iter().flatten() {
            if let Some(found) = span.extensions().get::<Ids>() {
                ids = found.clone();
                break;
            }
        }
        match self.format {
            LogFormat::Text => self.text(writer, event, &ids),
            LogFormat::Json => self.json(writer, event, &ids),
        }
    }
}

impl Lines {
    fn text(&self, mut writer: Writer<'_>, event: &Event<'_>, ids: &Ids) -> fmt::Result {
        write!(writer, "{} ", self.role)?;
        SystemTime.format_time(&mut writer)?;
        write!(writer, " {:<5} ", event.metadata().level().as_str())?;
        let mut fields = TextFields::default();
        event.record(&mut fields);
        write!(writer, "{}{}", fields.message, fields.rest)?;
        for (name, id) in [(names::REQUEST_ID, &ids.request), (names::TRACE_ID, &ids.trace)] {
            if !id.is_empty() {
                write!(writer, " {name}={id}")?;
            }
        }
        writeln!(writer)
    }

    fn json(&self, mut writer: Writer<'_>, event: &Event<'_>, ids: &Ids) -> fmt::Result {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let mut line = Map::new();
        line.insert("timestamp".to_owned(), Value::String(time));
        line.insert("level".to_owned(), Value::String(event.metadata().level().as_str().to_lowercase()));
        line.insert(names::ROLE.to_owned(), Value::String(self.role.clone()));
        line.insert("target".to_owned(), Value::String(event.metadata().target().to_owned()));
        for (name, id) in [(names::REQUEST_ID, &ids.request), (names::TRACE_ID, &ids.trace)] {
            if !id.is_empty() {
                line.insert(name.to_owned(), Value::String(id.clone()));
            }
        }
        event.record(&mut JsonFields(&mut line));
        writeln!(writer, "{}", Value::Object(line))
    }
}

/// A line break inside a value would forge a line: every control character is escaped.
fn one_line(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut line, character| {
        if character.is_control() {
            line.extend(character.escape_default());
        } else {
            line.push(character);
        }
        line
    })
}

#[derive(Default)]
struct TextFields {
    message: String,
    rest: String,
}

impl TextFields {
    fn push(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.message = one_line(value);
        } else {
            let _ = write!(self.rest, " {}={}", field.name(), one_line(value));
        }
    }
}

impl Visit for TextFields {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() != "message" && (value.is_empty() || value.contains(char::is_whitespace)) {
            self.push(field, &format!("{value:?}"));
        } else {
            self.push(field, value);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.push(field, &format!("{value:?}"));
    }
}

struct JsonFields<'a>(&'a mut Map<String, Value>);

impl Visit for JsonFields<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), Value::String(value.to_owned()));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), Value::from(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().to_owned(), Value::from(value));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name().to_owned(), Value::from(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().to_owned(), Value::Bool(value));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), Value::String(format!("{value:?}")));
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::layer::SubscriberExt;

    use super::super::request::{RequestIds, request_span};
    use super::*;

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("one thread").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn lines(format: LogFormat, body: impl FnOnce()) -> Vec<String> {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let layer = tracing_subscriber::fmt::layer()
            .with_writer(move || writer.clone())
            .fmt_fields(NoSpanFields)
            .event_format(Lines::new(format, "router".to_owned()));
        let subscriber = tracing_subscriber::registry().with(RequestIds).with(layer);
        tracing::subscriber::with_default(subscriber, body);
        let bytes = buffer.0.lock().expect("one thread").clone();
        String::from_utf8(bytes).expect("UTF-8").lines().map(str::to_owned).collect()
    }

    #[test]
    fn every_text_line_has_its_role_and_a_request_line_both_ids() {
        let lines = lines(LogFormat::Text, || {
            tracing::info!(num = 3, "outside");
            let _outer = request_span("aa11", "bb22").entered();
            let _inner = tracing::info_span!("inner").entered();
            tracing::warn!(reason = "a b", "inside\nforged line");
        });
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].starts_with("router ") && lines[0].ends_with("INFO  outside num=3"), "{}", lines[0]);
        assert!(
            lines[1].ends_with(r#"WARN  inside\nforged line reason="a b" request_id=aa11 trace_id=bb22"#),
            "{}",
            lines[1]
        );
    }

    #[test]
    fn every_json_line_parses_and_carries_role_and_ids() {
        let lines = lines(LogFormat::Json, || {
            let _span = request_span("aa11", "").entered();
            tracing::warn!(num = 7_u64, ratio = 0.5, "quote \" and\nbreak");
        });
        let line: Value = serde_json::from_str(&lines[0]).expect("JSON");
        assert_eq!(line["role"], "router");
        assert_eq!(line["level"], "warn");
        assert_eq!(line["message"], "quote \" and\nbreak");
        assert_eq!(line["request_id"], "aa11");
        assert_eq!(line["num"], 7);
        assert!(line.get("trace_id").is_none());
    }
}
