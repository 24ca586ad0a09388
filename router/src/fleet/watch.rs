//! Keeping one worker's part of the view current.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use baton_dispatch::Role;
use baton_handoff::InstanceId;
use baton_kv::KvLayout;
use baton_proto::v1;
use baton_proto::v1::worker_client::WorkerClient;
use tokio::time::timeout;
use tonic::Streaming;
use tonic::transport::Channel;

use super::agreement::Description;
use super::{Fleet, Member, cache, instance};

/// Wait before a worker is asked again after it could not be reached.
const FIRST_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(1);

/// Reads a worker's status stream, opening it again whenever it ends.
pub(super) async fn keep(fleet: &Fleet, index: usize, member: &Member) {
    let mut backoff = FIRST_BACKOFF;
    loop {
        let began = Instant::now();
        let end = follow(fleet, index, member).await;
        // What it has measured is told anew, perhaps by another process.
        if let Some(description) = member.description() {
            fleet.forget_links(description.instance);
        }
        match end {
            // A gap is no silence: the next stream begins with a whole status.
            End::Gap => tracing::debug!(worker = %member.address, "status stream has a gap"),
            End::Silent(reason) => member.fall_silent(&reason),
        }
        if began.elapsed() > MAX_BACKOFF {
            backoff = FIRST_BACKOFF;
        }
        tokio::time::sleep(backoff).await;
        backoff = (backoff * 2).min(MAX_BACKOFF);
    }
}

/// Looks for workers that are silent or stand still.
pub(super) async fn patrol(fleet: &Fleet) {
    let period =
        (fleet.patience.heartbeat_timeout / 8).clamp(Duration::from_millis(10), Duration::from_millis(250));
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let now = Instant::now();
        for member in &fleet.members {
            member.check_patience(now, fleet.patience);
        }
    }
}

enum End {
    Gap,
    Silent(String),
}

impl From<tonic::Status> for End {
    fn from(status: tonic::Status) -> Self {
        Self::Silent(format!("{}: {}", status.code(), first_line(status.message())))
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

async fn follow(fleet: &Fleet, index: usize, member: &Member) -> End {
    match try_follow(fleet, index, member).await {
        Ok(never) => match never {},
        Err(end) => end,
    }
}

async fn try_follow(fleet: &Fleet, index: usize, member: &Member) -> Result<Infallible, End> {
    let patience = fleet.patience.heartbeat_timeout;
    let silent = |what: &str| silent(what, patience);
    let channel = timeout(super::member::CONNECT_TIMEOUT, member.endpoint.connect())
        .await
        .map_err(|_| silent("no connection"))?
        .map_err(|error| End::Silent(root_cause(&error)))?;
    let mut client = WorkerClient::new(channel);
    let description =
        timeout(patience, describe(&mut client, member)).await.map_err(|_| silent("no description"))??;
    let process = description.instance;
    let has_layout = description.layout.is_some();
    member.describe(description);
    fleet.judge();
    let opened = timeout(patience, client.watch(v1::WatchRequest {}))
        .await
        .map_err(|_| silent("no status stream"))??;
    let statuses = read_statuses(fleet, member, client.clone(), opened.into_inner(), process, has_layout);
    if !fleet.reads_caches {
        return statuses.await;
    }
    tokio::select! {
        ended = statuses => ended,
        never = cache::keep(fleet, index, member, client, process) => match never {},
    }
}

async fn read_statuses(
    fleet: &Fleet,
    member: &Member,
    mut client: WorkerClient<Channel>,
    mut statuses: Streaming<v1::WorkerStatus>,
    process: InstanceId,
    mut has_layout: bool,
) -> Result<Infallible, End> {
    let patience = fleet.patience.heartbeat_timeout;
    let silent = |what: &str| silent(what, patience);
    let mut sequence: Option<u64> = None;
    loop {
        let status = timeout(patience, statuses.message())
            .await
            .map_err(|_| silent("no heartbeat"))??
            .ok_or_else(|| End::Silent("the worker ended its status stream".to_owned()))?;
        if instance(&status.instance_id) != Some(process) {
            return Err(End::Silent("another process answers at this address".to_owned()));
        }
        if sequence.is_some_and(|before| status.sequence != before.wrapping_add(1)) {
            return Err(End::Gap);
        }
        sequence = Some(status.sequence);
        if !has_layout && status.state() == v1::worker_status::State::Ready {
            let described = timeout(patience, describe(&mut client, member)).await;
            let description = described.map_err(|_| silent("no description"))??;
            has_layout = description.layout.is_some();
            member.describe(description);
            fleet.judge();
        }
        if member.role == Role::Prefill {
            fleet.set_links(process, &status.links);
        }
        member.hear(status, Instant::now());
    }
}

fn silent(what: &str, patience: Duration) -> End {
    End::Silent(format!("{what} within {:.1} s", patience.as_secs_f64()))
}

/// The innermost reason: the outer ones only say that a transport failed.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    first_line(&cause.to_string()).to_owned()
}

async fn describe(client: &mut WorkerClient<Channel>, member: &Member) -> Result<Description, End> {
    let answer = client.describe(v1::DescribeRequest {}).await?.into_inner();
    let instance = instance(&answer.instance_id)
        .ok_or_else(|| End::Silent("it sent an instance id that is not 16 bytes".to_owned()))?;
    let role = match answer.role() {
        v1::Role::Unspecified => None,
        v1::Role::Prefill => Some(Role::Prefill),
        v1::Role::Decode => Some(Role::Decode),
    };
    Ok(Description {
        address: member.address.clone(),
        expected_role: member.role,
        instance,
        role,
        layout: answer.layout.map(layout),
        protocol_version: answer.protocol_version,
        context: answer.context,
        num_blocks: answer.num_blocks,
    })
}

fn layout(wire: v1::KvLayout) -> Result<KvLayout, String> {
    let size = |value: u32, field: &str| match usize::try_from(value) {
        Ok(size) if size > 0 => Ok(size),
        _ => Err(format!("{field} is {value}")),
    };
    Ok(KvLayout {
        model_digest: wire
            .model_digest
            .as_ref()
            .try_into()
            .map_err(|_| format!("model_digest has {} bytes", wire.model_digest.len()))?,
        num_layers: size(wire.num_layers, "num_layers")?,
        num_kv_heads: size(wire.num_kv_heads, "num_kv_heads")?,
        head_dim: size(wire.head_dim, "head_dim")?,
        block_size: size(wire.block_size, "block_size")?,
        dtype: wire.dtype.parse()?,
        arrangement: wire.arrangement,
        numerics_id: wire.numerics_id,
    })
}
