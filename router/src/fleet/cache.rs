//! Reading what a worker has in its prefix cache.

use std::time::{Duration, Instant};

use baton_dispatch::WorkerState;
use baton_handoff::InstanceId;
use baton_kv::BlockHash;
use baton_proto::v1;
use baton_proto::v1::worker_client::WorkerClient;
use tonic::Code;
use tonic::transport::Channel;

use super::{Fleet, Member, instance};

/// How often a worker is looked at that is not ready yet.
const READY_PERIOD: Duration = Duration::from_millis(50);
/// Wait before a stream that broke is opened again.
const FIRST_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// Why a stream ended.
enum End {
    /// It has no prefix cache.
    NoCache,
    /// A message was missed: the next stream begins with a snapshot.
    Gap,
    /// It is not to be trusted, or broke.
    Broken(String),
}

/// Keeps the fleet's index of one process current, until the future is dropped.
pub(super) async fn keep(
    fleet: &Fleet,
    index: usize,
    member: &Member,
    client: WorkerClient<Channel>,
    process: InstanceId,
) -> std::convert::Infallible {
    let mut backoff = FIRST_BACKOFF;
    loop {
        // What the stream before left.
        fleet.tidy_cache().await;
        while member.state() != WorkerState::Ready {
            tokio::time::sleep(READY_PERIOD).await;
        }
        let began = Instant::now();
        let mut reader = Reader { fleet, index, next: None };
        let end = reader.follow(client.clone(), process).await;
        if began.elapsed() > MAX_BACKOFF {
            backoff = FIRST_BACKOFF;
        }
        drop(reader);
        match end {
            End::NoCache => return std::future::pending().await,
            End::Gap => tracing::debug!(worker = %member.address, "cache stream has a gap"),
            End::Broken(reason) => tracing::debug!(worker = %member.address, reason, "cache stream ended"),
        }
        tokio::time::sleep(backoff).await;
        backoff = (backoff * 2).min(MAX_BACKOFF);
    }
}

struct Reader<'a> {
    fleet: &'a Fleet,
    index: usize,
    /// Number of the next message, once there was one.
    next: Option<u64>,
}

/// Whatever ends the stream, what was heard over it is void.
impl Drop for Reader<'_> {
    fn drop(&mut self) {
        if self.next.is_some() {
            self.fleet.forget_cache(self.index);
        }
    }
}

impl Reader<'_> {
    async fn follow(&mut self, mut client: WorkerClient<Channel>, process: InstanceId) -> End {
        let mut updates = match client.watch_cache(v1::WatchCacheRequest {}).await {
            Ok(response) => response.into_inner(),
            Err(status) if status.code() == Code::Unimplemented => return End::NoCache,
            Err(status) => return broken(&status),
        };
        loop {
            let update = match updates.message().await {
                Ok(Some(update)) => update,
                Ok(None) if self.next.is_none() => return End::NoCache,
                Ok(None) => return End::Broken("the worker ended it".to_owned()),
                Err(status) => return broken(&status),
            };
            if let Err(end) = self.take(&update, process).await {
                return end;
            }
        }
    }

    async fn take(&mut self, update: &v1::CacheUpdate, process: InstanceId) -> Result<(), End> {
        if instance(&update.instance_id) != Some(process) {
            return Err(End::Broken("another process answers at this address".to_owned()));
        }
        match self.next {
            Some(next) if update.sequence != next => return Err(End::Gap),
            None if !update.snapshot => return Err(End::Gap),
            _ => self.next = Some(update.sequence.wrapping_add(1)),
        }
        let (stored, removed) = (hashes(&update.stored)?, hashes(&update.removed)?);
        self.fleet.update_cache(self.index, update.snapshot, &stored, &removed).await;
        Ok(())
    }
}

fn broken(status: &tonic::Status) -> End {
    End::Broken(format!("{}: {}", status.code(), status.message().lines().next().unwrap_or_default()))
}

/// Hashes stand one after the other.
fn hashes(bytes: &[u8]) -> Result<Vec<BlockHash>, End> {
    let (hashes, rest) = bytes.as_chunks::<16>();
    if !rest.is_empty() {
        return Err(End::Broken(format!("{} bytes are no whole number of hashes", bytes.len())));
    }
    Ok(hashes.iter().map(|hash| BlockHash(*hash)).collect())
}
