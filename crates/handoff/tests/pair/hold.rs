//! What follows a handoff that fails once the prompt is computed.

use baton_handoff::{
    Cause, Commit, DestinationMessage, HandoffKey, InstanceId, Source, SourceAction, SourceEnd, SourceFact,
    SourceMessage, Timers,
};

use crate::edges::{T0, computing, drain_source};
use crate::shell::first_tokens;
use crate::world::{PROMPT_TOKENS, key, source_config};

fn sampled() -> SourceFact {
    SourceFact::Sampled { first: first_tokens(1, |_| false), bytes: 10, frames: 1 }
}

/// All is computed, nothing is sent.
fn draining() -> Source {
    let mut source = computing(10);
    source.handle(T0, sampled());
    drain_source(&mut source);
    source
}

fn next_key() -> HandoffKey {
    HandoffKey { attempt: key().attempt + 1, ..key() }
}

const OTHER: InstanceId = InstanceId([3; 16]);

fn redirected() -> SourceFact {
    SourceFact::Redirected { key: next_key(), destination: OTHER }
}

fn offer() -> SourceAction {
    let (source, prompt_tokens) = (source_config().source, PROMPT_TOKENS);
    SourceAction::Send(SourceMessage::Offer { key: next_key(), source, destination: OTHER, prompt_tokens })
}

#[test]
fn computed_blocks_are_held_for_a_while_and_then_released() {
    let mut source = draining();
    source.handle(T0, SourceFact::ControlLost);
    assert_eq!(drain_source(&mut source), [SourceAction::Fence, SourceAction::Hold(Cause::PeerLost)]);
    let at = source.deadline().expect("not for ever");
    assert_eq!(at, Timers::default().hold);
    source.handle(at, SourceFact::Tick);
    let end = SourceAction::End(SourceEnd::Failed(Cause::PeerLost));
    assert_eq!(drain_source(&mut source), [SourceAction::Release, end]);
    source.handle(at, redirected());
    assert_eq!((drain_source(&mut source), source.ignored()), (vec![], 1), "nothing is held any more");
}

#[test]
fn a_redirect_hands_the_same_tokens_to_another_destination() {
    let mut source = draining();
    source.handle(T0, SourceFact::ControlLost);
    drain_source(&mut source);
    source.handle(T0, redirected());
    assert_eq!((drain_source(&mut source), source.key()), (vec![offer()], next_key()));
    let grant = DestinationMessage::Grant { skip_tokens: 16, credit: 10 };
    source.handle(T0, SourceFact::Received(grant));
    assert_eq!(drain_source(&mut source), [SourceAction::Compute { skip_tokens: 16 }]);
    source.handle(T0, sampled());
    let going = [SourceAction::Send(SourceMessage::Notice), SourceAction::Transmit { up_to: 10 }];
    assert_eq!(drain_source(&mut source), going);
    source.handle(T0, SourceFact::Sent { bytes: 10 });
    let commit = Commit { first_tokens: first_tokens(1, |_| false), bytes: 10, frames: 1 };
    assert_eq!(drain_source(&mut source), [SourceAction::Send(SourceMessage::Commit(commit))]);
    source.handle(T0, SourceFact::Received(DestinationMessage::Committed));
    let end = SourceAction::End(SourceEnd::Committed);
    assert_eq!(drain_source(&mut source), [SourceAction::Fence, SourceAction::Release, end]);
}

#[test]
fn a_router_that_is_first_to_know_redirects_a_handoff_under_way() {
    let mut source = draining();
    source.handle(T0, redirected());
    assert_eq!(drain_source(&mut source), [SourceAction::Fence, offer()]);
    // Refused there too: held as before, and the next offer is bounded like the first.
    source.handle(T0, SourceFact::Received(DestinationMessage::Busy { retry_after_ms: 1 }));
    assert_eq!(drain_source(&mut source), [SourceAction::Hold(Cause::Busy)]);
    source.handle(T0, redirected());
    assert_eq!(source.deadline(), Some(Timers::default().hold), "who holds blocks stands in no long line");
}

#[test]
fn before_the_prompt_is_computed_nothing_is_held() {
    let mut source = computing(10);
    assert!(!source.can_redirect());
    source.handle(T0, redirected());
    assert_eq!((drain_source(&mut source), source.ignored()), (vec![], 1));
    source.handle(T0, SourceFact::ControlLost);
    let end = SourceAction::End(SourceEnd::Failed(Cause::PeerLost));
    assert_eq!(drain_source(&mut source), [SourceAction::Fence, SourceAction::Release, end]);
}

#[test]
fn a_cancel_releases_what_is_held_in_whatever_stage() {
    let failed = SourceAction::End(SourceEnd::Failed(Cause::Cancelled));
    let mut source = draining();
    source.handle(T0, SourceFact::ControlLost);
    drain_source(&mut source);
    source.handle(T0, SourceFact::Cancelled(Cause::Cancelled));
    assert_eq!(drain_source(&mut source), [SourceAction::Release, failed.clone()]);

    // While the abort is not acknowledged.
    let mut source = draining();
    source.handle(T0, SourceFact::BulkLost);
    source.handle(T0, SourceFact::BulkLost);
    let actions = drain_source(&mut source);
    assert!(actions.contains(&SourceAction::Send(SourceMessage::Abort(Cause::PeerLost))), "{actions:?}");
    assert!(!actions.contains(&SourceAction::Release), "{actions:?}");
    source.handle(T0, SourceFact::Cancelled(Cause::Cancelled));
    assert_eq!(drain_source(&mut source), [SourceAction::Release]);
    source.handle(T0, SourceFact::Received(DestinationMessage::Aborted { committed: false }));
    assert_eq!(drain_source(&mut source), [failed]);
}

#[test]
fn a_commit_that_crosses_the_abort_releases_what_was_to_be_held() {
    let mut source = draining();
    source.handle(T0, SourceFact::BulkLost);
    source.handle(T0, SourceFact::BulkLost);
    drain_source(&mut source);
    source.handle(T0, SourceFact::Received(DestinationMessage::Aborted { committed: true }));
    let end = SourceAction::End(SourceEnd::Committed);
    assert_eq!(drain_source(&mut source), [SourceAction::Release, end]);
}

#[test]
fn what_every_destination_would_say_is_no_reason_to_hold() {
    for cause in Cause::ALL {
        let mut source = draining();
        source.handle(T0, SourceFact::Received(DestinationMessage::Gone(cause)));
        let actions = drain_source(&mut source);
        assert_eq!(actions.contains(&SourceAction::Hold(cause)), cause.is_of_destination(), "{cause:?}");
        assert_eq!(actions.contains(&SourceAction::Release), !cause.is_of_destination(), "{cause:?}");
        assert_eq!(source.can_redirect(), cause.is_of_destination(), "{cause:?}");
    }
}
