//! Spans in a file: OTLP JSON, one batch a line, as Jaeger's page uploads them.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SpanData;

use crate::TelemetryError;

/// A file grows no further than this; what would follow is dropped and counted.
const MAX_BYTES: u64 = 4 << 30;

/// The file, open for appending: a process that is started again goes on with it.
#[derive(Debug)]
pub(super) struct SpanFile {
    file: File,
    path: PathBuf,
    num_bytes: u64,
}

impl SpanFile {
    pub(super) fn open(path: &Path) -> Result<Self, TelemetryError> {
        let failed = |source| TelemetryError::File { path: path.to_owned(), source };
        let file = File::options().create(true).append(true).open(path).map_err(failed)?;
        let num_bytes = file.metadata().map_err(failed)?.len();
        Ok(Self { file, path: path.to_owned(), num_bytes })
    }

    /// Writes one line, whole or, if the disk is full, not at all as far as readers are concerned: they skip what is no JSON.
    pub(super) fn append(&mut self, spans: Vec<SpanData>, resource: &Resource) -> Result<(), String> {
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", self.path.display());
        let resource_spans = group_spans_by_resource_and_scope(spans, &resource.into());
        let request = ExportTraceServiceRequest { resource_spans };
        let mut line = serde_json::to_vec(&request).map_err(|error| failed(&error))?;
        line.push(b'\n');
        let num_bytes = self.num_bytes + line.len() as u64;
        if num_bytes > MAX_BYTES {
            return Err(failed(&format_args!("it would grow beyond {MAX_BYTES} bytes")));
        }
        self.file.write_all(&line).map_err(|error| failed(&error))?;
        self.num_bytes = num_bytes;
        Ok(())
    }
}
