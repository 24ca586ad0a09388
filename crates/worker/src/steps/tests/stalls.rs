//! What the loop tells of stalls, of boundaries in the past, and of what was avoided.

use baton_telemetry::StallCause;

use super::boundaries::Boundaries;
use super::stall::StallWatch;
use super::stats::RunBoard;
use super::*;

/// Of the first sequence, until its last token.
async fn stalls(sequence: &mut Sequence) -> Vec<Stall> {
    let mut stalls = Vec::new();
    loop {
        match next(sequence).await {
            SequenceEvent::Stall(stall) => stalls.push(stall),
            SequenceEvent::Token { finish: Some(_), .. } => return stalls,
            _ => {}
        }
    }
}

async fn first_tokens(sequence: &mut Sequence, num: u32) {
    while !matches!(next(sequence).await, SequenceEvent::Token { index, .. } if index + 1 == num) {}
}

fn of(request: u8, new: Submission) -> Submission {
    Submission { request: RequestId([request; 16]), ..new }
}

/// What a sequence alone in its group hears from its first token to its last.
#[derive(Default)]
struct Watched {
    /// When each token came.
    tokens: Vec<Duration>,
    stalls: Vec<Stall>,
}

impl Watched {
    async fn until_token(&mut self, sequence: &mut Sequence, num: usize) {
        while self.tokens.len() < num {
            let Stamped { at, event } = next_stamped(sequence).await;
            match event {
                SequenceEvent::Stall(stall) => self.stalls.push(stall),
                SequenceEvent::Token { .. } => self.tokens.push(at),
                _ => {}
            }
        }
    }

    /// The longest gap between tokens that none of these stalls is.
    fn longest_gap_beside(&self, stalls: &[Stall]) -> Duration {
        let gaps = self.tokens.windows(2).filter(|gap| !stalls.iter().any(|stall| stall.to == gap[1]));
        gaps.map(|gap| gap[1] - gap[0]).max().unwrap_or_default()
    }
}

/// Another program may take the core at any time and make any step longer. So a chunk takes far longer than a step that is disturbed, and bounds are
/// those that hold however long steps really took: decoding alone is expected to take no longer than the longest step that only decoded.
#[tokio::test]
async fn a_prompt_beside_decoding_stalls_it_and_is_named_and_every_second_is_counted() {
    const CHUNK: Duration = Duration::from_millis(31 * 8);
    let timing = (Duration::from_micros(100), Duration::from_millis(8));
    let bench = Bench::start_timed(timing, usize::MAX, None).await;
    let mut victim = bench.steps.submit(of(1, submission(Origin::Local, 1, 400))).await.unwrap();
    let (mut watched, mut beside) = (Watched::default(), Watched::default());
    watched.until_token(&mut victim, 20).await;
    // Two chunks of 31 more tokens each, beside the victim.
    let mut blocker = bench.steps.submit(of(2, submission(Origin::Local, 64, 3))).await.unwrap();
    watched.until_token(&mut victim, 400).await;
    beside.until_token(&mut blocker, 3).await;
    let stats = victim.stats(0);
    assert_eq!((stats.steps, stats.num_stalls as usize), (399, watched.stalls.len()));
    // A busy machine has slow steps of its own.
    let is_slow = |stall: &Stall| stall.cause == StallCause::SlowStep && stall.blocker.is_none();
    let of_prompts = |stall: &Stall| stall.cause == StallCause::LocalPrefill;
    let (stalls, slow): (Vec<Stall>, Vec<Stall>) = watched.stalls.iter().copied().partition(of_prompts);
    assert!(slow.iter().all(is_slow), "{slow:?}");
    assert!(beside.stalls.iter().all(is_slow), "its own prompt is no stall: {:?}", beside.stalls);
    let blockers: Vec<_> = stalls.iter().map(|stall| stall.blocker.map(|by| by.request)).collect();
    assert_eq!(blockers, [Some(RequestId([2; 16])); 2], "{stalls:?}, {stats:?}");
    assert_eq!(stats.batch_max, 2, "the blocker decoded beside it in the end");
    let longest = watched.longest_gap_beside(&stalls);
    for stall in &stalls {
        let gap = stall.to - stall.from;
        assert!(gap >= CHUNK && stall.blocked <= gap, "{stall:?}");
        assert!(stall.blocked + longest >= gap, "{stall:?}, and decoding took {longest:?} at most");
    }
    assert!(stats.itl_max >= stalls[0].blocked && stats.itl_p50 < CHUNK / 2, "{stats:?}");
    let blocked: Duration = stalls.iter().map(|stall| stall.blocked).sum();
    let counted = bench.metrics.blocked_seconds("local_prefill");
    assert!((counted - blocked.as_secs_f64()).abs() < 1e-3, "{counted} s against {blocked:?}");
    assert_eq!(bench.metrics.num_stalls("local_prefill"), 2);
    assert_eq!(blocker.stats(7), RunStats::default(), "there is no such sequence");
}

#[tokio::test]
async fn chunks_too_short_for_a_stall_are_counted_as_blocked_all_the_same() {
    let timing = (Duration::from_micros(100), Duration::from_micros(400));
    let bench = Bench::start_timed(timing, usize::MAX, None).await;
    let mut victim = bench.steps.submit(of(1, submission(Origin::Local, 1, 400))).await.unwrap();
    first_tokens(&mut victim, 20).await;
    tokens(&mut bench.steps.submit(of(2, submission(Origin::Local, 320, 1))).await.unwrap()).await;
    while !matches!(next(&mut victim).await, SequenceEvent::Token { finish: Some(_), .. }) {}
    let counted = bench.metrics.blocked_seconds("local_prefill");
    assert!(counted >= 0.06, "ten chunks of 12.4 ms: {counted} s");
}

#[tokio::test]
async fn who_gave_up_its_blocks_was_stalled_by_that_until_it_runs_again() {
    let bench = Bench::start(Duration::from_micros(50), usize::MAX).await;
    let mut older = bench.steps.submit(of(1, submission(Origin::Local, 16, 900))).await.unwrap();
    let mut younger = bench.steps.submit(of(2, submission(Origin::Local, 16, 700))).await.unwrap();
    tokens(&mut older).await;
    let stalls = stalls(&mut younger).await;
    let longest = stalls.iter().max_by_key(|stall| stall.blocked).expect("a stall");
    assert_eq!((longest.cause, longest.blocker), (StallCause::Preemption, None), "{stalls:?}");
    assert!(younger.stats(0).itl_max >= longest.blocked);
    assert!(bench.metrics.num_stalls("preemption") >= 1);
}

#[tokio::test]
async fn a_notice_of_the_past_is_answered_with_a_boundary_of_the_past() {
    let bench = Bench::start(Duration::from_millis(2), usize::MAX).await;
    let mut running = bench.submit(Origin::Local, 1, 200).await;
    let mut sequence = bench.submit(Origin::Remote, 40, 4).await;
    sequence.reserve().await;
    assert!(matches!(next(&mut sequence).await, SequenceEvent::Reserved { .. }));
    first_tokens(&mut running, 2).await;
    let past = bench.clock.now();
    first_tokens(&mut running, 20).await;
    sequence.notice(past).await;
    let Stamped { at, event: SequenceEvent::Boundary } = sequence.next().await.unwrap() else { panic!() };
    assert!(at >= past && at <= past + (bench.clock.now() - past) / 2, "{past:?}: {at:?}");
}

async fn hand_off(bench: &Bench, noticed: Duration, prefill_s: Option<f64>) -> Option<AvoidedStall> {
    let mut sequence = bench.steps.submit(of(9, submission(Origin::Remote, 40, 4))).await.unwrap();
    sequence.reserve().await;
    assert!(matches!(next(&mut sequence).await, SequenceEvent::Reserved { .. }));
    sequence.notice(noticed).await;
    assert!(matches!(next(&mut sequence).await, SequenceEvent::Boundary));
    sequence.commit(vec![FirstToken { token: 7, finished: false }], prefill_s).await;
    let SequenceEvent::Started { avoided, .. } = next(&mut sequence).await else { panic!("not started") };
    avoided
}

#[tokio::test]
async fn who_runs_when_room_is_reserved_for_a_prompt_is_spared_it() {
    let bench = Bench::start(Duration::from_micros(500), usize::MAX).await;
    // Nobody runs yet.
    let avoided = hand_off(&bench, bench.clock.now(), Some(0.25)).await;
    assert_eq!(avoided, Some(AvoidedStall { victims: 0, total_s: 0.0 }));
    let mut victims = Vec::new();
    for request in [1, 2] {
        victims.push(bench.steps.submit(of(request, submission(Origin::Local, 1, 500))).await.unwrap());
    }
    // Of the same request: nobody is spared by itself.
    victims.push(bench.steps.submit(of(9, submission(Origin::Local, 1, 500))).await.unwrap());
    for victim in &mut victims {
        first_tokens(victim, 2).await;
    }
    // When the prompt was done does not matter.
    let avoided = hand_off(&bench, Duration::ZERO, Some(0.25)).await;
    assert_eq!(avoided, Some(AvoidedStall { victims: 2, total_s: 0.5 }));
    let spared = |nth: usize| {
        let stats = victims[nth].stats(0);
        (stats.avoided_us, stats.avoided_prefills)
    };
    assert_eq!([spared(0), spared(1), spared(2)], [(250_000, 1), (250_000, 1), (0, 0)]);
    // What this one would have cost nobody knows.
    assert_eq!(hand_off(&bench, bench.clock.now(), None).await, None);
    assert_eq!([spared(0), spared(1), spared(2)], [(250_000, 1), (250_000, 1), (0, 0)]);
}

#[tokio::test]
async fn what_steps_cost_is_told_once_it_is_learnt() {
    let bench = Bench::start(Duration::from_micros(100), usize::MAX).await;
    assert_eq!(bench.steps.step_cost(), None);
    tokens(&mut bench.submit(Origin::Local, 1, 40).await).await;
    let (cost, residual) = bench.steps.step_cost().expect("32 steps ran");
    let step_s = cost.fixed_s + cost.per_token_s + cost.per_context_token_s * 20.0;
    assert!((0.8e-3..0.1).contains(&step_s) && (0.0..10.0).contains(&residual), "{cost:?} {residual}");
}

/// A step with eight rows takes milliseconds; following them is to take less than a hundredth of one.
#[test]
fn following_eight_sequences_costs_next_to_nothing() {
    const NUM_STEPS: u64 = 20_000;
    let boards: [RunBoard; 8] = Default::default();
    let (mut watch, mut boundaries) = (StallWatch::new(STALL_THRESHOLD), Boundaries::new());
    let mut seconds: Vec<f64> = Vec::new();
    for round in 0..5 {
        let started = Instant::now();
        for step in round * NUM_STEPS..(round + 1) * NUM_STEPS {
            let [from, to] = [step, step + 1].map(Duration::from_millis);
            boundaries.push(from);
            watch.begin(from);
            boards.iter().for_each(|_| watch.decodes());
            watch.expect(Some(Duration::from_millis(1)));
            watch.end(to, usize::from(step % 100 == 0));
            for board in &boards {
                let gap = watch.gap((from, to), 1, false);
                board.token(to - from, watch.num_decoding());
                assert!(!gap.is_stall);
            }
        }
        seconds.push(started.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    let step_us = seconds[2] / NUM_STEPS as f64 * 1e6;
    eprintln!("{step_us:.2} us a step of eight rows");
    assert!(step_us < 50.0, "{step_us} us");
}
