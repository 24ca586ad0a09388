//! Several sequences of one prompt: they share its blocks, and end one by one.

use super::*;

/// A group of `num` sequences, numbered from `first` on.
fn group(origin: Origin, prompt: usize, max_new_tokens: u32, first: u32, num: u32) -> Submission {
    Submission { num_sequences: num, first_sequence: first, ..submission(origin, prompt, max_new_tokens) }
}

fn first_tokens(tokens: &[(u32, bool)]) -> Vec<FirstToken> {
    tokens.iter().map(|&(token, finished)| FirstToken { token, finished }).collect()
}

/// Every token to the end of all, by sequence.
async fn to_end(sequence: &mut Sequence) -> Vec<Vec<u32>> {
    let mut tokens = vec![Vec::new(); 16];
    while let Some(stamped) = tokio::time::timeout(Duration::from_secs(10), sequence.next()).await.unwrap() {
        if let SequenceEvent::Token { sequence, token, .. } = stamped.event {
            tokens[sequence as usize].push(token);
        }
    }
    tokens
}

/// Waits for a token of this sequence.
async fn token_of(group: &mut Sequence, wanted: u32) {
    while !matches!(next(group).await, SequenceEvent::Token { sequence, .. } if sequence == wanted) {}
}

/// A remote group that was granted its blocks, and whose KV is here.
async fn reserved(bench: &Bench, new: Submission) -> Sequence {
    let mut sequence = bench.steps.submit(new).await.unwrap();
    sequence.reserve().await;
    let SequenceEvent::Reserved { lease, .. } = next(&mut sequence).await else { panic!("not reserved") };
    drop(lease);
    sequence
}

#[tokio::test]
async fn a_group_computes_its_prompt_once_and_every_sequence_to_its_end() {
    let bench = Bench::fast().await;
    let mut sequence = bench.steps.submit(group(Origin::Local, 40, 5, 2, 3)).await.unwrap();
    let tokens = to_end(&mut sequence).await;
    for number in 2..5 {
        let want: Vec<u32> = (40..45).map(|position| number * 1000 + position).collect();
        assert_eq!(tokens[number as usize], want);
    }
    assert!(tokens[0].is_empty() && tokens[1].is_empty() && tokens[5].is_empty());
    assert_eq!(bench.metrics.prompt_tokens_computed.get(), 40);
    assert_eq!((bench.metrics.forks.get(), bench.metrics.generated_tokens.get()), (2, 15));
    // The last block of the prompt is partly filled: all but the last to write copy it.
    assert_eq!(bench.metrics.block_copies.get(), 2);
    bench.all_blocks_return().await;
}

#[tokio::test]
async fn one_stopped_leaves_the_others_and_all_stopped_end_the_events() {
    let bench = Bench::start(Duration::from_micros(200), usize::MAX).await;
    let mut sequence = bench.steps.submit(group(Origin::Local, 40, 250, 0, 3)).await.unwrap();
    token_of(&mut sequence, 2).await;
    sequence.stop(0).await;
    sequence.stop(0).await;
    sequence.stop(7).await;
    let load = bench.steps.load().wait_for(|load| load.counts.running == 2).await.unwrap().counts;
    assert_eq!(load.running, 2);
    for _ in 0..20 {
        token_of(&mut sequence, 1).await;
        token_of(&mut sequence, 2).await;
    }
    sequence.stop(2).await;
    sequence.stop(1).await;
    to_end(&mut sequence).await;
    bench.all_blocks_return().await;
}

#[tokio::test]
async fn the_first_can_be_stopped_before_the_fork() {
    let bench = Bench::start(Duration::from_millis(2), usize::MAX).await;
    let mut sequence = bench.steps.submit(group(Origin::Local, 200, 4, 0, 3)).await.unwrap();
    while bench.layers_done.load(Ordering::SeqCst) < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    sequence.stop(0).await;
    sequence.stop(1).await;
    let tokens = to_end(&mut sequence).await;
    assert_eq!((tokens[0].len(), tokens[1].len(), tokens[2].len()), (0, 0, 4));
    bench.all_blocks_return().await;
    // All of them: nothing is computed to the end.
    let mut sequence = reserved(&bench, group(Origin::Remote, 40, 4, 0, 2)).await;
    sequence.stop(0).await;
    sequence.stop(1).await;
    assert!(sequence.next().await.is_none());
    bench.all_blocks_return().await;
}

#[tokio::test]
async fn a_committed_group_runs_without_those_whose_first_token_was_the_last() {
    let bench = Bench::fast().await;
    for (finished, want) in [([true, false, false], [0, 3, 3]), ([false, false, true], [3, 3, 0])] {
        let mut sequence = reserved(&bench, group(Origin::Remote, 40, 4, 0, 3)).await;
        let first = [7, 1007, 2007].into_iter().zip(finished).collect::<Vec<_>>();
        sequence.commit(first_tokens(&first), None).await;
        let tokens = to_end(&mut sequence).await;
        assert_eq!([0, 1, 2].map(|number| tokens[number].len()), want);
        bench.all_blocks_return().await;
    }
    let mut sequence = reserved(&bench, group(Origin::Remote, 40, 4, 0, 2)).await;
    sequence.commit(first_tokens(&[(7, true), (8, true)]), None).await;
    assert!(sequence.next().await.is_none());
    bench.all_blocks_return().await;
}

#[tokio::test]
async fn a_prefilled_group_is_held_until_dropped_whichever_first_token_ended_its_sequence() {
    let bench = Bench::fast().await;
    for stop_token in [20, 1020, 5] {
        let new = Submission { stop_tokens: vec![stop_token], ..group(Origin::Prefill, 20, 9, 0, 2) };
        let mut sequence = bench.steps.submit(new).await.unwrap();
        assert!(matches!(next(&mut sequence).await, SequenceEvent::NearHead));
        sequence.grant(0).await;
        let SequenceEvent::Opened { .. } = next(&mut sequence).await else { panic!("not opened") };
        let mut ended = Vec::new();
        while ended.len() < 2 {
            if let SequenceEvent::Token { token, finish, .. } = next(&mut sequence).await {
                assert_eq!(finish.is_some(), token == stop_token);
                ended.push(token);
            }
        }
        assert_eq!(ended, [20, 1020]);
        bench.steps.load().wait_for(|load| load.counts.held == 1).await.unwrap();
        drop(sequence);
        bench.all_blocks_return().await;
    }
}

#[tokio::test]
async fn dropping_the_handle_ends_all() {
    let bench = Bench::start(Duration::from_micros(200), usize::MAX).await;
    for wanted in [0, 3] {
        let mut sequence = bench.steps.submit(group(Origin::Local, 40, 200, 0, 4)).await.unwrap();
        token_of(&mut sequence, wanted).await;
        drop(sequence);
        bench.all_blocks_return().await;
        bench.steps.load().wait_for(|load| load.counts.running == 0).await.unwrap();
    }
}

#[tokio::test]
async fn preempted_remote_sequences_leave_and_local_ones_come_back() {
    // Slow enough that the second group comes while the first is young, however late this thread runs.
    let bench = Bench::start(Duration::from_micros(200), usize::MAX).await;
    // Twice two sequences of up to 20 blocks each, in a pool of 64.
    for origin in [Origin::Remote, Origin::Local] {
        let gone = origin == Origin::Remote;
        let before = (bench.metrics.preemptions.get(), bench.metrics.preempted_gone.get());
        let mut groups = Vec::new();
        for _ in 0..2 {
            let new = group(origin, 20, 300, 0, 2);
            groups.push(match gone {
                true => reserved(&bench, new).await,
                false => bench.steps.submit(new).await.unwrap(),
            });
        }
        if gone {
            for sequence in &groups {
                sequence.commit(first_tokens(&[(20, false), (1020, false)]), None).await;
            }
        }
        let (mut num_tokens, mut preempted) = ([0; 4], Vec::new());
        for (nth, group) in groups.iter_mut().enumerate() {
            while let Some(stamped) = group.next().await {
                match stamped.event {
                    SequenceEvent::Token { sequence, .. } => num_tokens[nth * 2 + sequence as usize] += 1,
                    SequenceEvent::Preempted { sequence, gone } => preempted.push((nth, sequence, gone)),
                    _ => {}
                }
            }
        }
        // The youngest makes room; one is enough.
        assert_eq!(preempted, [(1, 1, gone)]);
        let all = 300 - u32::from(gone);
        assert_eq!(num_tokens[..3], [all; 3]);
        assert_eq!(num_tokens[3] == all, !gone, "{num_tokens:?}");
        let after = (bench.metrics.preemptions.get(), bench.metrics.preempted_gone.get());
        assert_eq!(after, (before.0 + 1, before.1 + u64::from(gone)));
        bench.all_blocks_return().await;
    }
}

#[tokio::test]
async fn a_group_preempted_while_it_receives_is_told_once_and_over() {
    let bench = Bench::start(Duration::from_micros(20), usize::MAX).await;
    let mut older = bench.submit(Origin::Local, 16, 1000).await;
    token_of(&mut older, 0).await;
    // 32 blocks that are reserved and never written.
    let mut younger = reserved(&bench, group(Origin::Remote, 512, 4, 0, 3)).await;
    assert!(matches!(next(&mut younger).await, SequenceEvent::Preempted { sequence: 0, gone: true }));
    assert!(younger.next().await.is_none());
    assert_eq!(bench.metrics.preemptions.get(), 1);
    // A commit that comes too late changes nothing.
    younger.commit(first_tokens(&[(1, false), (2, false), (3, false)]), None).await;
    drop(older);
    bench.all_blocks_return().await;
}

#[tokio::test]
async fn rates_are_measured_from_steps_of_their_kind() {
    let bench = Bench::start(Duration::from_millis(1), usize::MAX).await;
    assert_eq!(
        (bench.steps.rates().prefill_tokens_per_s(), bench.steps.rates().decode_step_ms()),
        (0.0, 0.0)
    );
    tokens(&mut bench.submit(Origin::Local, 64, 5).await).await;
    let (prefill, decode) =
        (bench.steps.rates().prefill_tokens_per_s(), bench.steps.rates().decode_step_ms());
    // Eight layers of a millisecond, or a little more.
    assert!(decode >= LAYERS as f64 && decode < 80.0, "{decode}");
    assert!(prefill > 800.0 && prefill <= 8000.0, "{prefill}");
}
