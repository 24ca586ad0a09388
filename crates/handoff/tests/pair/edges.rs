//! Single decisions that random schedules would not show by name.

use std::time::Duration;

use baton_handoff::{
    Cause, Commit, Destination, DestinationAction, DestinationEnd, DestinationFact, DestinationMessage,
    InstanceId, MAX_SEQUENCES, Source, SourceAction, SourceEnd, SourceFact, SourceMessage, Time, Timers,
};

use crate::shell::first_tokens;
use crate::world::{PROMPT_TOKENS, destination_config, source_config};

pub(crate) const T0: Time = Time::ZERO;

pub(crate) fn drain_source(source: &mut Source) -> Vec<SourceAction> {
    std::iter::from_fn(|| source.poll()).collect()
}

fn drain(destination: &mut Destination) -> Vec<DestinationAction> {
    std::iter::from_fn(|| destination.poll()).collect()
}

fn feed(destination: &mut Destination, fact: DestinationFact) -> Vec<DestinationAction> {
    destination.handle(T0, fact);
    drain(destination)
}

fn offered() -> DestinationFact {
    DestinationFact::Offered {
        source: InstanceId([1; 16]),
        destination: InstanceId([2; 16]),
        prompt_tokens: PROMPT_TOKENS,
    }
}

fn commit(bytes: u64) -> Commit {
    Commit { first_tokens: first_tokens(1, |_| false), bytes, frames: 1 }
}

fn receiving(bytes: u64) -> Destination {
    let mut destination = Destination::new(destination_config());
    assert_eq!(feed(&mut destination, offered()), [DestinationAction::Reserve]);
    feed(&mut destination, DestinationFact::Reserved { skip_tokens: 0, bytes });
    destination
}

fn committing() -> Destination {
    let mut destination = receiving(10);
    feed(&mut destination, DestinationFact::Verified { bytes: 10 });
    let actions = feed(&mut destination, DestinationFact::Received(SourceMessage::Commit(commit(10))));
    assert_eq!(actions, [DestinationAction::Fence]);
    destination
}

#[test]
fn a_cancel_wins_over_a_commit_whose_writer_still_lives() {
    let mut destination = committing();
    let actions = feed(&mut destination, DestinationFact::Cancelled(Cause::Cancelled));
    assert_eq!(actions, [DestinationAction::Send(DestinationMessage::Gone(Cause::Cancelled))]);
    let actions = feed(&mut destination, DestinationFact::WriterEnded);
    let end = DestinationAction::End(DestinationEnd::Failed(Cause::Cancelled));
    assert_eq!(actions, [DestinationAction::Free, end]);
}

#[test]
fn an_abort_after_the_commit_is_told_so_and_changes_nothing() {
    let mut destination = committing();
    feed(&mut destination, DestinationFact::WriterEnded);
    let actions = feed(&mut destination, DestinationFact::Received(SourceMessage::Abort(Cause::Cancelled)));
    assert_eq!(actions, [DestinationAction::Send(DestinationMessage::Aborted { committed: true })]);
}

#[test]
fn a_source_lost_with_everything_delivered_does_not_matter() {
    let mut destination = committing();
    assert_eq!(feed(&mut destination, DestinationFact::ControlLost), []);
    let actions = feed(&mut destination, DestinationFact::WriterEnded);
    assert!(actions.contains(&DestinationAction::Run(commit(10))));
}

#[test]
fn the_commit_waits_for_the_last_byte_and_for_the_writer() {
    let mut destination = receiving(10);
    assert_eq!(feed(&mut destination, DestinationFact::Received(SourceMessage::Commit(commit(10)))), []);
    assert_eq!(feed(&mut destination, DestinationFact::Verified { bytes: 9 }), []);
    assert_eq!(feed(&mut destination, DestinationFact::Verified { bytes: 10 }), [DestinationAction::Fence]);
    let actions = feed(&mut destination, DestinationFact::WriterEnded);
    assert_eq!(actions.first(), Some(&DestinationAction::Run(commit(10))));
}

#[test]
fn a_frame_that_is_bad_twice_fails_the_attempt() {
    let mut destination = receiving(10);
    let actions = feed(&mut destination, DestinationFact::Corrupt { frame: 3 });
    assert_eq!(actions, [DestinationAction::Send(DestinationMessage::Resend(3))]);
    let actions = feed(&mut destination, DestinationFact::Corrupt { frame: 3 });
    let gone = DestinationAction::Send(DestinationMessage::Gone(Cause::Corrupt));
    assert_eq!(actions, [gone, DestinationAction::Fence]);
}

#[test]
fn what_contradicts_the_grant_is_a_protocol_violation() {
    let gone = DestinationAction::Send(DestinationMessage::Gone(Cause::Protocol));
    for fact in
        [DestinationFact::Verified { bytes: 11 }, DestinationFact::Received(SourceMessage::Commit(commit(9)))]
    {
        assert_eq!(feed(&mut receiving(10), fact), [gone.clone(), DestinationAction::Fence]);
    }
    let mut destination = Destination::new(destination_config());
    let source = InstanceId([1; 16]);
    let other = DestinationFact::Offered { source, destination: InstanceId([2; 16]), prompt_tokens: 1 };
    assert_eq!(feed(&mut destination, other).first(), Some(&gone));
    let mut destination = Destination::new(destination_config());
    let wrong =
        DestinationFact::Offered { source, destination: InstanceId([3; 16]), prompt_tokens: PROMPT_TOKENS };
    let gone = DestinationAction::Send(DestinationMessage::Gone(Cause::WrongInstance));
    assert_eq!(feed(&mut destination, wrong), [gone]);
}

#[test]
fn a_group_is_needed_at_the_destination_until_every_first_token_ends_its_sequence() {
    let sampled =
        |ends: fn(u32) -> bool| SourceFact::Sampled { first: first_tokens(3, ends), bytes: 10, frames: 1 };
    let mut source = computing(10);
    source.handle(T0, sampled(|nth| nth != 1));
    let going = [SourceAction::Send(SourceMessage::Notice), SourceAction::Transmit { up_to: 10 }];
    assert_eq!(drain_source(&mut source), going);
    source.handle(T0, SourceFact::Sent { bytes: 10 });
    let commit = Commit { first_tokens: first_tokens(3, |nth| nth != 1), bytes: 10, frames: 1 };
    assert_eq!(drain_source(&mut source), [SourceAction::Send(SourceMessage::Commit(commit.clone()))]);
    let mut destination = receiving(10);
    feed(&mut destination, DestinationFact::Verified { bytes: 10 });
    feed(&mut destination, DestinationFact::Received(SourceMessage::Commit(commit.clone())));
    let actions = feed(&mut destination, DestinationFact::WriterEnded);
    assert_eq!(actions.first(), Some(&DestinationAction::Run(commit)));

    let mut source = computing(10);
    source.handle(T0, sampled(|_| true));
    let abort = SourceAction::Send(SourceMessage::Abort(Cause::NotNeeded));
    assert_eq!(drain_source(&mut source), [SourceAction::Fence, SourceAction::Release, abort]);
    source.handle(T0, SourceFact::Received(DestinationMessage::Aborted { committed: false }));
    assert_eq!(drain_source(&mut source), [SourceAction::End(SourceEnd::NotNeeded)]);
}

#[test]
fn first_tokens_that_are_no_group_are_a_protocol_violation_on_both_sides() {
    let mut gap = first_tokens(3, |_| false);
    gap.remove(1);
    for first in [vec![], gap, first_tokens(MAX_SEQUENCES as u32 + 1, |_| false)] {
        let commit = Commit { first_tokens: first.clone(), bytes: 10, frames: 1 };
        let actions = feed(&mut receiving(10), DestinationFact::Received(SourceMessage::Commit(commit)));
        let gone = DestinationAction::Send(DestinationMessage::Gone(Cause::Protocol));
        assert_eq!(actions, [gone, DestinationAction::Fence]);
        let mut source = computing(10);
        source.handle(T0, SourceFact::Sampled { first, bytes: 10, frames: 1 });
        let abort = SourceAction::Send(SourceMessage::Abort(Cause::Protocol));
        assert!(drain_source(&mut source).contains(&abort));
    }
}

#[test]
fn a_preempted_reservation_is_told_to_the_source_by_its_own_cause() {
    let mut destination = receiving(10);
    let actions = feed(&mut destination, DestinationFact::Cancelled(Cause::Preempted));
    let gone = DestinationAction::Send(DestinationMessage::Gone(Cause::Preempted));
    assert_eq!(actions, [gone, DestinationAction::Fence]);
    let actions = feed(&mut destination, DestinationFact::WriterEnded);
    let end = DestinationAction::End(DestinationEnd::Failed(Cause::Preempted));
    assert_eq!(actions, [DestinationAction::Free, end]);
    let mut source = computing(10);
    source.handle(T0, SourceFact::Received(DestinationMessage::Gone(Cause::Preempted)));
    let end = SourceAction::End(SourceEnd::Failed(Cause::Preempted));
    assert_eq!(drain_source(&mut source), [SourceAction::Fence, SourceAction::Release, end]);
}

#[test]
fn an_unused_grant_expires_and_progress_has_its_own_bound() {
    let timers = Timers::default();
    let mut destination = receiving(10);
    assert_eq!(destination.deadline(), Some(timers.grant));
    destination.handle(Duration::from_secs(1), DestinationFact::Verified { bytes: 1 });
    assert_eq!(destination.deadline(), Some(Duration::from_secs(1) + timers.progress));
    destination.handle(Duration::from_secs(2), DestinationFact::Tick);
    assert_eq!(drain(&mut destination), []);
    destination.handle(Duration::from_secs(1) + timers.progress, DestinationFact::Tick);
    let gone = DestinationAction::Send(DestinationMessage::Gone(Cause::Expired));
    assert_eq!(drain(&mut destination), [gone, DestinationAction::Fence]);
}

pub(crate) fn computing(credit: u64) -> Source {
    let mut source = Source::new(source_config());
    source.handle(T0, SourceFact::NearHead);
    source.handle(T0, SourceFact::Received(DestinationMessage::Grant { skip_tokens: 0, credit }));
    assert!(drain_source(&mut source).contains(&SourceAction::Compute { skip_tokens: 0 }));
    source
}

#[test]
fn credit_is_absolute_and_repeating_it_changes_nothing() {
    let mut source = computing(10);
    source.handle(T0, SourceFact::Encoded { bytes: 100 });
    for offset in [30, 30, 20] {
        source.handle(T0, SourceFact::Received(DestinationMessage::Credit(offset)));
    }
    let transmits = [SourceAction::Transmit { up_to: 10 }, SourceAction::Transmit { up_to: 30 }];
    assert_eq!(drain_source(&mut source), transmits);
    assert_eq!(source.ignored(), 2);
}

#[test]
fn resends_go_one_after_the_other() {
    let mut source = computing(10);
    for frame in [4, 9, 4] {
        source.handle(T0, SourceFact::Received(DestinationMessage::Resend(frame)));
    }
    assert_eq!(drain_source(&mut source), [SourceAction::Resend { frame: 4 }]);
    source.handle(T0, SourceFact::Resent);
    assert_eq!(drain_source(&mut source), [SourceAction::Resend { frame: 9 }]);
    source.handle(T0, SourceFact::Resent);
    source.handle(T0, SourceFact::Resent);
    assert_eq!((drain_source(&mut source), source.ignored()), (vec![], 2));
}

#[test]
fn a_bulk_stream_is_reopened_once_where_the_destination_surely_is() {
    let mut source = computing(10);
    source.handle(T0, SourceFact::Encoded { bytes: 100 });
    source.handle(T0, SourceFact::Received(DestinationMessage::Credit(34)));
    drain_source(&mut source);
    source.handle(T0, SourceFact::BulkLost);
    let again = [SourceAction::Reopen { from: 24 }, SourceAction::Transmit { up_to: 34 }];
    assert_eq!(drain_source(&mut source), again);
    source.handle(T0, SourceFact::BulkLost);
    let abort = SourceAction::Send(SourceMessage::Abort(Cause::PeerLost));
    assert_eq!(drain_source(&mut source), [SourceAction::Fence, SourceAction::Release, abort]);
    source.handle(T0, SourceFact::Received(DestinationMessage::Aborted { committed: false }));
    assert_eq!(drain_source(&mut source), [SourceAction::End(SourceEnd::Failed(Cause::PeerLost))]);
}

#[test]
fn computing_for_long_is_no_stall_but_a_silent_destination_is() {
    let timers = Timers::default();
    let mut source = computing(10);
    assert_eq!(source.deadline(), None);
    source.handle(Duration::from_secs(500), SourceFact::Encoded { bytes: 5 });
    assert_eq!(source.deadline(), Some(Duration::from_secs(500) + timers.delivery));
    source.handle(Duration::from_secs(501), SourceFact::Sent { bytes: 5 });
    assert_eq!(source.deadline(), None);
    source.handle(Duration::from_secs(600), SourceFact::Encoded { bytes: 50 });
    source.handle(Duration::from_secs(601), SourceFact::Sent { bytes: 10 });
    let at = source.deadline().expect("credit is used up");
    source.handle(at, SourceFact::Tick);
    assert!(drain_source(&mut source).contains(&SourceAction::Send(SourceMessage::Abort(Cause::Expired))));
}
