//! Where spans go and which are sampled: from options, and from the variables that OpenTelemetry defines for every program.
//!
//! An option beats its variable. A variable that makes no sense is passed over with a warning, as OpenTelemetry asks, because it may
//! be meant for others; an endpoint that can't be used is an error, for somebody waits for spans there.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use super::Sampler;
use crate::TelemetryError;

/// Spans that wait for the exporter, at most, unless `OTEL_BSP_MAX_QUEUE_SIZE` says less.
pub(super) const MAX_QUEUED: usize = 4096;
/// Spans of one export, at most, unless `OTEL_BSP_MAX_EXPORT_BATCH_SIZE` says less.
const MAX_BATCH: usize = 512;
/// How long a span waits for others, unless `OTEL_BSP_SCHEDULE_DELAY` says otherwise.
const DELAY: Duration = Duration::from_secs(1);
/// How long an export may take, unless `OTEL_EXPORTER_OTLP_TIMEOUT` or `OTEL_BSP_EXPORT_TIMEOUT` say less.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How spans travel to a collector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// `grpc`.
    #[default]
    Grpc,
    /// `http/protobuf`.
    Http,
}

/// A collector.
#[derive(Clone, Debug, PartialEq)]
pub struct Collector {
    /// Whole URL, with the path for HTTP.
    pub endpoint: String,
    /// How to talk to it.
    pub protocol: Protocol,
}

/// Everything tracing is set up with.
#[derive(Clone, Debug, PartialEq)]
pub struct TracingConfig {
    /// Where spans are sent; none: to no collector.
    pub collector: Option<Collector>,
    /// A file to append OTLP JSON to, one batch a line.
    pub file: Option<PathBuf>,
    /// Which traces.
    pub sampler: Sampler,
    /// Spans that wait for the exporter, at most.
    pub max_queued: usize,
    /// Spans of one export, at most.
    pub max_batch: usize,
    /// How long a span waits for others.
    pub delay: Duration,
    /// How long one export may take.
    pub timeout: Duration,
    /// What else the process says of itself; `service.name` in it beats the role's own.
    pub resource: BTreeMap<String, String>,
}

/// Options of the command line; each beats its variable.
#[derive(Clone, Debug, Default)]
pub struct TracingOptions {
    /// `--otlp-endpoint`.
    pub otlp_endpoint: Option<String>,
    /// `--trace-sample-ratio`, 0 to 1.
    pub sample_ratio: Option<f64>,
    /// `--trace-file`.
    pub file: Option<PathBuf>,
}

/// A variable that was passed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ignored {
    /// Its name.
    pub variable: &'static str,
    /// What was accepted instead of it.
    pub expected: &'static str,
}

/// Reads variables and keeps what was passed over.
struct Environment<'a> {
    variable: &'a dyn Fn(&str) -> Option<String>,
    ignored: Vec<Ignored>,
}

impl TracingConfig {
    /// As [`TracingConfig::read`], from this process's own environment; the log says what was passed over.
    ///
    /// # Errors
    /// The same.
    pub fn from_environment(options: &TracingOptions) -> Result<Option<Self>, TelemetryError> {
        let (config, ignored) = Self::read(options, |name| std::env::var(name).ok())?;
        for Ignored { variable, expected } in ignored.iter().filter(|_| config.is_some()) {
            ::tracing::warn!(variable, expected, "the variable makes no sense and is passed over");
        }
        Ok(config)
    }

    /// What options and variables say; `None` when neither names a place for spans, or `OTEL_SDK_DISABLED` is `true`.
    /// Variables that make no sense are listed.
    ///
    /// # Errors
    /// [`TelemetryError::BadOption`] for an endpoint that is no `http://` URL.
    pub fn read(
        options: &TracingOptions,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<(Option<Self>, Vec<Ignored>), TelemetryError> {
        let mut environment = Environment { variable: &variable, ignored: Vec::new() };
        let config = environment.config(options)?;
        Ok((config, environment.ignored))
    }
}

impl Environment<'_> {
    /// An empty variable counts as none.
    fn text(&self, name: &str) -> Option<String> {
        (self.variable)(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    fn read<T>(
        &mut self,
        variable: &'static str,
        expected: &'static str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        let text = self.text(variable)?;
        let value = parse(&text);
        if value.is_none() {
            self.ignored.push(Ignored { variable, expected });
        }
        value
    }

    fn number(&mut self, variable: &'static str) -> Option<u64> {
        self.read(variable, "a whole number above 0", |text| text.parse().ok().filter(|number| *number > 0))
    }

    fn at_most(&mut self, variable: &'static str, most: usize) -> usize {
        self.number(variable).map_or(most, |number| usize::try_from(number).unwrap_or(most).min(most))
    }

    fn config(&mut self, options: &TracingOptions) -> Result<Option<TracingConfig>, TelemetryError> {
        let disabled =
            self.text("OTEL_SDK_DISABLED").is_some_and(|disabled| disabled.eq_ignore_ascii_case("true"));
        let collector = self.collector(options)?;
        if disabled || (collector.is_none() && options.file.is_none()) {
            return Ok(None);
        }
        let sampler = match options.sample_ratio {
            Some(ratio) => Sampler { parent_based: true, ratio },
            None => self.sampler(),
        };
        let max_queued = self.at_most("OTEL_BSP_MAX_QUEUE_SIZE", MAX_QUEUED);
        let max_batch = self.at_most("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", MAX_BATCH);
        let delay = self.number("OTEL_BSP_SCHEDULE_DELAY").map_or(DELAY, Duration::from_millis);
        let timeouts = [
            self.number("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT").or(self.number("OTEL_EXPORTER_OTLP_TIMEOUT")),
            self.number("OTEL_BSP_EXPORT_TIMEOUT"),
        ];
        let timeout = timeouts.into_iter().flatten().map(Duration::from_millis).min().unwrap_or(TIMEOUT);
        let mut resource = self.resource();
        if let Some(name) = self.text("OTEL_SERVICE_NAME") {
            resource.insert(crate::names::resource::SERVICE_NAME.to_owned(), name);
        }
        let file = options.file.clone();
        Ok(Some(TracingConfig { collector, file, sampler, max_queued, max_batch, delay, timeout, resource }))
    }

    fn collector(&mut self, options: &TracingOptions) -> Result<Option<Collector>, TelemetryError> {
        const KINDS: &str = "otlp or none";
        let exporter = self.read("OTEL_TRACES_EXPORTER", KINDS, |text| match text {
            "otlp" => Some(true),
            "none" => Some(false),
            _ => None,
        });
        let protocol = self.protocol("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL");
        let protocol = protocol.or_else(|| self.protocol("OTEL_EXPORTER_OTLP_PROTOCOL")).unwrap_or_default();
        let whole = self.text("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
        let base = self.text("OTEL_EXPORTER_OTLP_ENDPOINT");
        let (source, endpoint, is_base) = match (&options.otlp_endpoint, whole, base) {
            // Asked for on the command line: what the environment says of exporters does not matter.
            (Some(endpoint), _, _) => ("--otlp-endpoint", endpoint.clone(), true),
            _ if exporter == Some(false) => return Ok(None),
            (None, Some(endpoint), _) => ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint, false),
            (None, None, Some(endpoint)) => ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint, true),
            (None, None, None) if exporter == Some(true) => {
                let default = match protocol {
                    Protocol::Grpc => "http://localhost:4317",
                    Protocol::Http => "http://localhost:4318",
                };
                ("OTEL_TRACES_EXPORTER", default.to_owned(), true)
            }
            (None, None, None) => return Ok(None),
        };
        if !is_endpoint(&endpoint) {
            let expected =
                "a URL such as http://127.0.0.1:4317 (https is not supported: send to a collector nearby)";
            return Err(TelemetryError::BadOption { option: source, value: endpoint, expected });
        }
        let endpoint = match protocol {
            Protocol::Http if is_base => format!("{}/v1/traces", endpoint.trim_end_matches('/')),
            _ => endpoint,
        };
        Ok(Some(Collector { endpoint, protocol }))
    }

    fn protocol(&mut self, variable: &'static str) -> Option<Protocol> {
        self.read(variable, "grpc or http/protobuf", |text| match text {
            "grpc" => Some(Protocol::Grpc),
            "http/protobuf" => Some(Protocol::Http),
            _ => None,
        })
    }

    fn sampler(&mut self) -> Sampler {
        const KINDS: &str = "always_on, always_off, traceidratio, or one of them behind parentbased_";
        let ratio = self.read("OTEL_TRACES_SAMPLER_ARG", "a number from 0 to 1", |text| {
            text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio))
        });
        let sampler = self.read("OTEL_TRACES_SAMPLER", KINDS, |text| {
            let (parent_based, kind) = match text.strip_prefix("parentbased_") {
                Some(kind) => (true, kind),
                None => (false, text),
            };
            let ratio = match kind {
                "always_on" => 1.0,
                "always_off" => 0.0,
                "traceidratio" => ratio.unwrap_or(1.0),
                _ => return None,
            };
            Some(Sampler { parent_based, ratio })
        });
        sampler.unwrap_or_default()
    }

    /// `key=value,...`, values percent-encoded.
    fn resource(&mut self) -> BTreeMap<String, String> {
        let pairs = self.read("OTEL_RESOURCE_ATTRIBUTES", "key=value pairs with commas between", |text| {
            let pairs = text.split(',').filter(|pair| !pair.trim().is_empty());
            let pairs = pairs.map(|pair| {
                let (key, value) = pair.split_once('=')?;
                let key = key.trim();
                (!key.is_empty()).then(|| Some((key.to_owned(), decoded(value.trim())?)))?
            });
            pairs.collect()
        });
        pairs.unwrap_or_default()
    }
}

/// `http://host[:port][/path]`.
fn is_endpoint(url: &str) -> bool {
    let Some(rest) = url.strip_prefix("http://") else { return false };
    let authority = rest.split('/').next().unwrap_or_default();
    let host = match authority.rsplit_once(':') {
        // The colons of an address in brackets are no port's.
        Some((host, port)) if !port.ends_with(']') => {
            if port.parse::<u16>().is_err() {
                return false;
            }
            host
        }
        _ => authority,
    };
    !host.is_empty() && !url.contains(|c: char| c.is_whitespace() || c.is_control() || !c.is_ascii())
}

fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
            bytes.push(digit(rest.next()?)? << 4 | digit(rest.next()?)?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(
        options: TracingOptions,
        variables: &[(&str, &str)],
    ) -> Result<(Option<TracingConfig>, Vec<Ignored>), String> {
        let variable =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        TracingConfig::read(&options, variable).map_err(|error| error.to_string())
    }

    fn config(variables: &[(&str, &str)]) -> TracingConfig {
        let (config, ignored) = read(TracingOptions::default(), variables).expect("readable");
        assert!(ignored.is_empty(), "{ignored:?}");
        config.expect("on")
    }

    const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317");

    #[test]
    fn nothing_is_on_without_a_place_for_spans() {
        let off =
            |variables: &[(&str, &str)]| read(TracingOptions::default(), variables).unwrap().0.is_none();
        assert!(off(&[]));
        assert!(off(&[("OTEL_TRACES_SAMPLER", "always_on"), ("OTEL_SERVICE_NAME", "x")]));
        assert!(off(&[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")]));
        assert!(off(&[ENDPOINT, ("OTEL_TRACES_EXPORTER", "none")]));
        assert!(off(&[ENDPOINT, ("OTEL_SDK_DISABLED", "TRUE")]));
        let asked =
            TracingOptions { otlp_endpoint: Some("http://here:1".into()), ..TracingOptions::default() };
        assert!(read(asked, &[("OTEL_TRACES_EXPORTER", "none")]).unwrap().0.is_some());
        let file = TracingOptions { file: Some("spans".into()), ..TracingOptions::default() };
        assert_eq!(read(file, &[]).unwrap().0.unwrap().collector, None);
    }

    #[test]
    fn endpoints_follow_the_protocol_and_the_more_special_variable() {
        let endpoint = |variables: &[(&str, &str)]| config(variables).collector.expect("a collector");
        assert_eq!(
            endpoint(&[ENDPOINT]),
            Collector { endpoint: "http://collector:4317".into(), protocol: Protocol::Grpc }
        );
        let http = ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf");
        assert_eq!(
            endpoint(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318/"), http]),
            Collector { endpoint: "http://c:4318/v1/traces".into(), protocol: Protocol::Http }
        );
        let traces = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://t:9/own/path");
        assert_eq!(endpoint(&[ENDPOINT, traces, http]).endpoint, "http://t:9/own/path");
        let grpc = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc");
        assert_eq!(endpoint(&[ENDPOINT, http, grpc]).protocol, Protocol::Grpc);
        assert_eq!(endpoint(&[("OTEL_TRACES_EXPORTER", "otlp")]).endpoint, "http://localhost:4317");
        let option = TracingOptions { otlp_endpoint: Some("http://o:1".into()), ..TracingOptions::default() };
        let chosen = read(option, &[ENDPOINT, traces, http]).unwrap().0.unwrap().collector.unwrap();
        assert_eq!(chosen.endpoint, "http://o:1/v1/traces");
    }

    #[test]
    fn an_endpoint_that_can_not_be_is_refused_by_its_name() {
        for bad in [
            "collector:4317",
            "https://c:4317",
            "http://",
            "http://:1",
            "http://c:port",
            "http://c:70000",
            "http://c d",
        ] {
            let error = read(TracingOptions::default(), &[("OTEL_EXPORTER_OTLP_ENDPOINT", bad)]).unwrap_err();
            assert!(error.contains("OTEL_EXPORTER_OTLP_ENDPOINT") && error.contains(bad), "{error}");
            let option = TracingOptions { otlp_endpoint: Some(bad.into()), ..TracingOptions::default() };
            assert!(read(option, &[]).unwrap_err().contains("--otlp-endpoint"));
        }
        for good in ["http://c", "http://[::1]", "http://[::1]:4317", "http://127.0.0.1:4317/x"] {
            assert!(is_endpoint(good), "{good}");
        }
    }

    #[test]
    fn samplers_are_read() {
        let sampler = |kind, arg| {
            config(&[ENDPOINT, ("OTEL_TRACES_SAMPLER", kind), ("OTEL_TRACES_SAMPLER_ARG", arg)]).sampler
        };
        assert_eq!(config(&[ENDPOINT]).sampler, Sampler { parent_based: true, ratio: 1.0 });
        assert_eq!(sampler("always_off", ""), Sampler { parent_based: false, ratio: 0.0 });
        assert_eq!(sampler("traceidratio", "0.25"), Sampler { parent_based: false, ratio: 0.25 });
        assert_eq!(sampler("parentbased_traceidratio", "0.5"), Sampler { parent_based: true, ratio: 0.5 });
        let option = TracingOptions { sample_ratio: Some(0.1), ..TracingOptions::default() };
        let (chosen, _) = read(option, &[ENDPOINT, ("OTEL_TRACES_SAMPLER", "always_on")]).unwrap();
        assert_eq!(chosen.unwrap().sampler, Sampler { parent_based: true, ratio: 0.1 });
    }

    #[test]
    fn what_makes_no_sense_is_passed_over_by_name() {
        let (config, ignored) = read(
            TracingOptions::default(),
            &[
                ENDPOINT,
                ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
                ("OTEL_TRACES_EXPORTER", "zipkin"),
                ("OTEL_TRACES_SAMPLER", "sometimes"),
                ("OTEL_TRACES_SAMPLER_ARG", "1.5"),
                ("OTEL_BSP_SCHEDULE_DELAY", "-1"),
                ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "many"),
                ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"),
                ("OTEL_RESOURCE_ATTRIBUTES", "a=b,c"),
            ],
        )
        .unwrap();
        let config = config.unwrap();
        assert_eq!((config.sampler, config.delay, config.max_batch), (Sampler::default(), DELAY, MAX_BATCH));
        assert_eq!((config.timeout, config.resource.len()), (TIMEOUT, 0));
        let mut names: Vec<_> = ignored.iter().map(|ignored| ignored.variable).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            [
                "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
                "OTEL_BSP_SCHEDULE_DELAY",
                "OTEL_EXPORTER_OTLP_PROTOCOL",
                "OTEL_EXPORTER_OTLP_TIMEOUT",
                "OTEL_RESOURCE_ATTRIBUTES",
                "OTEL_TRACES_EXPORTER",
                "OTEL_TRACES_SAMPLER",
                "OTEL_TRACES_SAMPLER_ARG",
            ]
        );
    }

    #[test]
    fn batches_timeouts_and_resources_are_read() {
        let config = config(&[
            ENDPOINT,
            ("OTEL_BSP_SCHEDULE_DELAY", "50"),
            ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100000"),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "100"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "3000"),
            ("OTEL_BSP_EXPORT_TIMEOUT", "2000"),
            ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab, team=a%2Cb%20c,service.name=x"),
            ("OTEL_SERVICE_NAME", "y"),
        ]);
        assert_eq!((config.max_queued, config.max_batch), (100, MAX_BATCH));
        assert_eq!(config.delay, Duration::from_millis(50));
        assert_eq!(config.timeout, Duration::from_secs(2));
        assert_eq!(config.resource["team"], "a,b c");
        assert_eq!(config.resource["service.name"], "y");
    }
}
