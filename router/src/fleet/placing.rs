//! Choosing workers: what placement needs to know, and its answer as members of the fleet.

use std::sync::{Arc, MutexGuard, PoisonError};

use baton_dispatch::{CacheIndex, LinkView, Links, Mode, Need, PlaceError, Placed, Placer};
use baton_handoff::InstanceId;
use baton_kv::BlockHash;
use baton_proto::v1;

use super::{Fleet, Member, instance};

/// Requests waiting on a worker from which on it gets no more from here.
const MAX_WAITING: u32 = 256;

/// Changes of a prefix cache that are taken in under one lock: about a tenth of a millisecond.
const CHANGES_A_PIECE: usize = 1024;

/// What placement remembers. The lock on it is held for a piece of an update or one placement.
pub(super) struct Placing {
    pub(super) placer: Placer,
    pub(super) cache: CacheIndex,
    pub(super) links: Links,
}

/// What is to be placed.
pub(crate) struct Wanted<'a> {
    /// Forced tokens included.
    pub(crate) prompt_tokens: u32,
    /// For each sequence.
    pub(crate) max_new_tokens: u32,
    pub(crate) num_sequences: u32,
    /// Workers that failed this request.
    pub(crate) avoid: &'a [InstanceId],
    /// Of the prompt's full blocks, as far as they are of use.
    pub(crate) hashes: &'a [BlockHash],
}

/// Where an attempt runs.
pub(crate) struct Found {
    pub(crate) mode: Mode,
    pub(crate) reason: &'static str,
    /// The policy that chose.
    pub(crate) policy: &'static str,
    /// Leading tokens of the prompt that whoever computes it has cached.
    pub(crate) prefix_hit_tokens: u32,
    /// The processes that were chosen.
    pub(crate) placed: Placed,
    pub(crate) decode: Arc<Member>,
    pub(crate) prefill: Option<Arc<Member>>,
}

impl Fleet {
    pub(super) fn placing(&self) -> MutexGuard<'_, Placing> {
        self.placing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chooses the workers for one attempt.
    ///
    /// # Errors
    /// [`PlaceError`].
    pub(crate) fn place(&self, wanted: &Wanted<'_>) -> Result<Found, PlaceError> {
        let layout = self.layout();
        let size = |size: usize| u32::try_from(size).unwrap_or(u32::MAX);
        let need = Need {
            prompt_tokens: wanted.prompt_tokens,
            max_new_tokens: wanted.max_new_tokens,
            num_sequences: wanted.num_sequences,
            block_size: layout.as_ref().map_or(1, |layout| size(layout.block_size)),
            kv_bytes_per_token: layout.as_ref().map_or(0, |layout| layout.token_bytes() as u64),
            max_waiting: MAX_WAITING,
            avoid: wanted.avoid,
            hashes: wanted.hashes,
        };
        let mut placing = self.placing();
        let Placing { placer, cache, links } = &mut *placing;
        // Read under the lock, so that whoever places next sees what was placed before.
        let workers = self.views();
        let placement = placer.place(&baton_dispatch::Fleet { workers: &workers, cache, links }, &need)?;
        let chosen =
            |index: usize| Some((workers.get(index)?.instance, Arc::clone(self.members.get(index)?)));
        let (decode_id, decode) = chosen(placement.decode).ok_or(PlaceError::NoWorker)?;
        let prefill = placement.prefill.and_then(chosen);
        decode.begin();
        if let Some((_, prefill)) = &prefill {
            prefill.begin();
        }
        Ok(Found {
            mode: placement.mode,
            reason: placement.reason,
            policy: placer.policy().name(),
            prefix_hit_tokens: match prefill {
                Some(_) => placement.prefill_hit_tokens,
                None => placement.decode_hit_tokens,
            },
            placed: Placed { decode: decode_id, prefill: prefill.as_ref().map(|(id, _)| *id) },
            decode,
            prefill: prefill.map(|(_, member)| member),
        })
    }

    /// Hashes of a prompt's full blocks; empty while no worker says what it has cached. Costs about as much as hashing
    /// the prompt's bytes.
    pub(crate) fn hashes(&self, prompt: &[u32]) -> Vec<BlockHash> {
        if self.placing().cache.num_blocks() == 0 {
            return Vec::new();
        }
        let Some(layout) = self.layout() else { return Vec::new() };
        let mut hash = BlockHash::root(&layout.cache_salt());
        let blocks = prompt.chunks_exact(layout.block_size.max(1));
        blocks
            .map(|block| {
                hash = hash.next(block);
                hash
            })
            .collect()
    }

    /// Takes in what a worker says of its prefix cache, in pieces between which others may place.
    pub(super) async fn update_cache(
        &self,
        index: usize,
        snapshot: bool,
        stored: &[BlockHash],
        removed: &[BlockHash],
    ) {
        if snapshot {
            self.forget_cache(index);
        }
        // Before changes touch all of it at once.
        self.tidy_cache().await;
        for removed in removed.chunks(CHANGES_A_PIECE) {
            self.placing().cache.apply(index, &[], removed);
            tokio::task::yield_now().await;
        }
        for stored in stored.chunks(CHANGES_A_PIECE) {
            self.placing().cache.apply(index, stored, &[]);
            tokio::task::yield_now().await;
        }
    }

    /// Nothing is known of a worker's prefix cache any more; [`Fleet::tidy_cache`] takes out what was.
    pub(super) fn forget_cache(&self, index: usize) {
        self.placing().cache.forget(index);
    }

    /// Takes out what forgotten workers left, in pieces between which others may place.
    pub(super) async fn tidy_cache(&self) {
        while self.placing().cache.tidy() {
            tokio::task::yield_now().await;
        }
    }

    /// Takes in how fast KV moves from a prefill worker, as it measured.
    pub(super) fn set_links(&self, process: InstanceId, links: &[v1::LinkRate]) {
        let link = |link: &v1::LinkRate| {
            let decode = instance(&link.decode_instance_id)?;
            Some(LinkView { decode, bytes_per_s: link.bytes_per_s })
        };
        self.placing().links.set(process, links.iter().filter_map(link));
    }

    /// What this process measured is void.
    pub(super) fn forget_links(&self, process: InstanceId) {
        self.placing().links.forget(process);
    }
}
