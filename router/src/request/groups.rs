//! The open legs of a request, by sequence group: one group at first, more once sequences are resumed apart.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::legs::{DecodeEvent, Leg, PrefillEvent};
use super::marks::Marks;
use crate::fleet::Member;

/// The streams of one attempt of a group.
pub(super) struct Attempt {
    pub(super) attempt: u32,
    pub(super) prefill: Option<Leg<PrefillEvent>>,
    /// Whether the prefill worker took the redirect that began this attempt; none once it did.
    pub(super) redirect: Option<Pin<Box<dyn Future<Output = bool> + Send>>>,
    pub(super) decode: Option<Leg<DecodeEvent>>,
    /// Whom the Prefill leg is with.
    pub(super) prefill_member: Option<Arc<Member>>,
    /// Whom the Decode leg is with.
    pub(super) decode_member: Arc<Member>,
    /// It goes on behind tokens of an earlier attempt.
    pub(super) resumes: bool,
    /// Only with tracing on.
    pub(super) marks: Option<Box<Marks>>,
}

/// The live attempt of each group; as many as there are sequences, and one more, at most.
#[derive(Default)]
pub(super) struct Groups {
    live: BTreeMap<u32, Attempt>,
    /// Asked first next time, so that no group speaks always before the others.
    turn: u32,
}

/// What a leg said; `None` when it was lost.
pub(super) enum Said {
    Prefill(Option<PrefillEvent>),
    NotRedirected,
    Decode(Option<DecodeEvent>),
}

/// What a leg said, and which.
pub(super) struct Heard {
    pub(super) group: u32,
    pub(super) attempt: u32,
    pub(super) said: Said,
}

impl Groups {
    /// Opens an attempt; one that is still open would be dropped.
    pub(super) fn open(&mut self, group: u32, attempt: Attempt) {
        self.live.insert(group, attempt);
    }

    /// Drops the streams of this attempt, if they are open; what was marked of it is left.
    pub(super) fn close(&mut self, group: u32, attempt: u32) -> Option<Box<Marks>> {
        self.get(group, attempt)?;
        self.live.remove(&group)?.marks
    }

    /// Drops the Decode stream of this attempt, if it is open.
    pub(super) fn close_decode(&mut self, group: u32, attempt: u32) {
        if let Some(live) = self.get(group, attempt) {
            live.decode = None;
        }
    }

    /// The group's open attempt, to go on in another.
    pub(super) fn take(&mut self, group: u32) -> Option<Attempt> {
        self.live.remove(&group)
    }

    /// Whom the open Prefill leg of the group is with.
    pub(super) fn prefill_member(&self, group: u32) -> Option<Arc<Member>> {
        self.live.get(&group)?.prefill_member.clone()
    }

    /// The open attempt, if it is this one.
    pub(super) fn get(&mut self, group: u32, attempt: u32) -> Option<&mut Attempt> {
        self.live.get_mut(&group).filter(|live| live.attempt == attempt)
    }

    /// The next thing that any leg says; never, without legs. Cancel-safe.
    pub(super) async fn next(&mut self) -> Heard {
        poll_fn(|context| self.poll(context).map_or(Poll::Pending, Poll::Ready)).await
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Option<Heard> {
        let turn = self.turn;
        let mut ask = |(group, live): (&u32, &mut Attempt)| {
            live.poll(context).map(|said| Heard { group: *group, attempt: live.attempt, said })
        };
        let heard = self.live.range_mut(turn..).find_map(&mut ask);
        let heard = heard.or_else(|| self.live.range_mut(..turn).find_map(ask))?;
        self.turn = heard.group.wrapping_add(1);
        Some(heard)
    }
}

impl Attempt {
    /// The Prefill leg first: its tokens come before all others.
    fn poll(&mut self, context: &mut Context<'_>) -> Option<Said> {
        if let Some(Poll::Ready(event)) = self.prefill.as_mut().map(|leg| leg.poll_next(context)) {
            return Some(Said::Prefill(event));
        }
        if let Some(Poll::Ready(taken)) =
            self.redirect.as_mut().map(|redirect| redirect.as_mut().poll(context))
        {
            self.redirect = None;
            if !taken {
                return Some(Said::NotRedirected);
            }
        }
        match self.decode.as_mut().map(|leg| leg.poll_next(context)) {
            Some(Poll::Ready(event)) => Some(Said::Decode(event)),
            _ => None,
        }
    }
}
