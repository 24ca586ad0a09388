//! What is started where: each child's command line, from the options and from what this machine has.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use baton_model::{Model, ModelSource};
use baton_worker::{ByteSize, DeviceName};

use super::cores::{self, Fleet, Shares, as_list};
use super::keep::{Address, Role};
use super::memory::{self, MemoryShare};
use super::options::{PassedOn, UpOptions};
use super::process::Launch;
use crate::exit::Failure;

/// Everything that was decided before a child is started.
#[derive(Debug)]
pub(super) struct Plan {
    /// The workers, prefill first.
    pub(super) workers: Vec<Role>,
    /// How many of them prefill.
    pub(super) num_prefill: usize,
    /// What was decided about cores, for people.
    pub(super) cores: String,
    /// What was decided about memory, for people.
    pub(super) memory: String,
    model: String,
    beside: Vec<usize>,
}

/// What the plan is made from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Given<'a> {
    /// `up`'s options.
    pub(super) options: &'a UpOptions,
    /// What is handed on to the children as it is.
    pub(super) passed: &'a PassedOn,
    /// Arguments before a child's role: where its configuration and its log settings are.
    pub(super) common: &'a [OsString],
}

/// What one worker computes with.
#[derive(Debug, Clone, Copy)]
struct Resources<'a> {
    cpus: &'a [usize],
    device: DeviceName,
    /// Planned here for those that share this machine's memory.
    kv_bytes: Option<u64>,
}

/// Whether a worker with this device takes this machine's memory for its blocks.
fn is_cpu(device: DeviceName) -> bool {
    device.resolved() == DeviceName::Cpu
}

/// How a worker's command line begins.
const PREFILL: &str = "prefill-worker";
const DECODE: &str = "decode-worker";
const ROUTER: &str = "router";

impl Plan {
    /// Decides. `folder` is where the workers write their addresses to.
    ///
    /// # Errors
    /// [`Failure::Memory`], or [`Failure::Usage`] for more context than the model has.
    pub(super) fn new(
        given: Given<'_>,
        source: &ModelSource,
        model: &Model,
        folder: &Path,
    ) -> Result<Self, Failure> {
        let options = given.options;
        let (mut prefill, mut decode) = (options.prefill(), options.decode());
        if options.colocated {
            prefill.append(&mut decode);
            std::mem::swap(&mut prefill, &mut decode);
        }
        let fleet = Fleet { num_prefill: prefill.len(), num_decode: decode.len() };
        // Those on devices with memory of their own plan for themselves.
        let num_on_cpu = prefill.iter().chain(&decode).filter(|device| is_cpu(**device)).count() as u64;
        let memory = match num_on_cpu {
            0 => None,
            _ => Some(memory::plan(model, &options.worker, num_on_cpu)?),
        };
        let cpus = match &options.worker.cpus {
            Some(list) => list.as_slice().to_vec(),
            None => cores::usable(),
        };
        let shares = cores::share_out(&cpus, fleet);
        let mut plan = Self {
            workers: Vec::new(),
            num_prefill: fleet.num_prefill,
            cores: describe_cores(&shares),
            memory: memory.map_or_else(|| "KV in the devices' memory".to_owned(), describe_memory),
            model: name_of(source),
            beside: shares.beside.clone(),
        };
        let kv = memory.map(|memory| memory.kv_bytes);
        let kv = |device| kv.filter(|_| is_cpu(device));
        for (nth, (cpus, device)) in shares.prefill.iter().zip(prefill).enumerate() {
            let given_to = Resources { cpus, device, kv_bytes: kv(device) };
            plan.add_worker(given, PREFILL, format!("prefill-{nth}"), given_to, folder);
        }
        for (nth, (cpus, device)) in shares.decode.iter().zip(decode).enumerate() {
            let given_to = Resources { cpus, device, kv_bytes: kv(device) };
            plan.add_worker(given, DECODE, format!("decode-{nth}"), given_to, folder);
        }
        Ok(plan)
    }

    fn add_worker(
        &mut self,
        given: Given<'_>,
        role: &str,
        name: String,
        Resources { cpus, device, kv_bytes }: Resources<'_>,
        folder: &Path,
    ) {
        let mut planned = vec![("model", self.model.clone()), ("device", device.to_string())];
        let asked = given.options.worker.kv_memory.map(|ByteSize(bytes)| bytes);
        planned.extend(kv_bytes.or(asked).map(|bytes| ("kv-memory", bytes.to_string())));
        if !cpus.is_empty() {
            planned.push(("cpus", as_list(cpus)));
        }
        let given_io = given.options.worker.io_cpus.as_ref().map(ToString::to_string);
        let beside = (!self.beside.is_empty()).then(|| as_list(&self.beside));
        planned.extend(given_io.or(beside).map(|list| ("io-cpus", list)));
        planned.extend(trace_file(given, &name));
        let launch = Launch { arguments: arguments(given, role, &planned), ..Launch::default() };
        let address = Address::Chosen(folder.join(format!("{name}.address")));
        self.workers.push(Role { index: self.workers.len(), name, launch, address });
    }

    /// The router for workers at these addresses, in the order of [`workers`](Self::workers).
    pub(super) fn router(&self, given: Given<'_>, workers: &[SocketAddr]) -> Role {
        let options = given.options;
        let local = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let mut planned = vec![("model", self.model.clone())];
        planned.extend(trace_file(given, ROUTER));
        let mut arguments = arguments(given, ROUTER, &planned);
        let mut push = |key: &str, value: String| arguments.push(format!("--{key}={value}").into());
        push("http-listen", local(options.http_port).to_string());
        push("grpc-listen", local(options.grpc_port).to_string());
        for (nth, address) in workers.iter().enumerate() {
            push(if nth < self.num_prefill { PREFILL } else { DECODE }, address.to_string());
        }
        if options.colocated {
            arguments.push("--colocated".into());
        }
        Role {
            name: ROUTER.to_owned(),
            index: self.workers.len(),
            launch: Launch { arguments, cpus: self.beside.clone(), ..Launch::default() },
            address: Address::Fixed(local(options.http_port)),
        }
    }
}

fn arguments(given: Given<'_>, role: &str, planned: &[(&str, String)]) -> Vec<OsString> {
    let mut arguments = given.common.to_vec();
    arguments.push(role.into());
    arguments.extend(given.passed.arguments(role));
    arguments.extend(planned.iter().filter_map(|(key, value)| given.passed.planned(role, key, value)));
    arguments
}

/// Where a process writes its spans.
fn trace_file(given: Given<'_>, name: &str) -> Option<(&'static str, String)> {
    let folder = given.options.traces.as_ref()?;
    Some(("trace-file", folder.join(format!("{name}.jsonl")).display().to_string()))
}

/// The model as a child is told it: what was resolved once, so that nobody resolves it again.
fn name_of(source: &ModelSource) -> String {
    match source {
        ModelSource::Tiny => "builtin:tiny".to_owned(),
        ModelSource::File(path) | ModelSource::Folder(path) => {
            std::path::absolute(path).unwrap_or_else(|_| PathBuf::from(path)).display().to_string()
        }
    }
}

fn describe_cores(shares: &Shares) -> String {
    let of = |kind: &str, lists: &[Vec<usize>]| -> Vec<String> {
        lists.iter().enumerate().map(|(nth, cpus)| format!("{kind}-{nth} on {}", as_list(cpus))).collect()
    };
    let all: Vec<String> = [of("decode", &shares.decode), of("prefill", &shares.prefill)].concat();
    if shares.decode.iter().chain(&shares.prefill).all(Vec::is_empty) {
        return "not bound".to_owned();
    }
    let beside = match shares.beside.is_empty() {
        true => String::new(),
        false => format!(", network and router on {}", as_list(&shares.beside)),
    };
    format!("{}{beside}", all.join(", "))
}

fn describe_memory(share: MemoryShare) -> String {
    let available =
        share.available_bytes.map_or_else(String::new, |bytes| format!(" of {} available", ByteSize(bytes)));
    format!(
        "KV {} a worker ({} tokens){available}, context {} tokens",
        ByteSize(share.kv_bytes),
        share.num_tokens,
        share.context
    )
}
