//! With the prefix cache a prompt that begins like an earlier one is neither computed nor transferred again, and its tokens are the
//! same ones.

mod pair;

use std::time::Duration;

use baton_proto::v1::prefill_event::Event as PrefillEvent;
use baton_worker::Running;
use pair::{Call, Pair, Random, decode_to_end, prefill_to_end, start_decode};

const BLOCK: usize = 16;

/// Two workers with the cache, and one without it that says what the tokens must be.
struct Bench {
    pair: Pair,
    reference: Pair,
    num_calls: u64,
}

/// What a call brought, and what of its prompt was cached where.
struct Served {
    tokens: Vec<u32>,
    on_prefill: usize,
    on_decode: usize,
}

impl Bench {
    async fn start(options: &[&str]) -> Self {
        let with: Vec<&str> = options.iter().copied().chain(["--prefix-cache=on"]).collect();
        let pair = Pair::start(&with, &with).await;
        // Its prefill worker is not used.
        let reference = Pair::start(options, options).await;
        Self { pair, reference, num_calls: 1_000_000 }
    }

    /// The prompt under a key of its own.
    fn fresh(&mut self, call: &Call) -> Call {
        self.num_calls += 1;
        call.again(self.num_calls)
    }

    /// Both legs to their ends. Tokens must be those without the cache; what is computed, and what crosses the wire,
    /// exactly what was not cached.
    async fn serve(&mut self, call: &Call) -> Served {
        let call = self.fresh(call);
        let (prefill, decode) = (self.pair.prefill.core().clone(), self.pair.decode.core().clone());
        let before = (prefill.metrics.prompt_tokens_computed.get(), decode.metrics.kv_received_bytes.get());
        let sent_before = prefill.metrics.kv_sent_bytes.get();
        let served = self.serve_beside_others(&call).await;
        let length = call.prompt.len();
        let computed = prefill.metrics.prompt_tokens_computed.get() - before.0;
        assert_eq!(computed as usize, length - served.on_prefill, "prompt of {length}");
        let bytes = ((length - served.on_decode) * decode.loaded().unwrap().layout().token_bytes()) as u64;
        assert_eq!(decode.metrics.kv_received_bytes.get() - before.1, bytes, "prompt of {length}");
        assert_eq!(prefill.metrics.kv_sent_bytes.get() - sent_before, bytes, "prompt of {length}");
        served
    }

    async fn serve_beside_others(&mut self, call: &Call) -> Served {
        let decode = self.pair.decode(call).await.unwrap();
        let prefill = self.pair.prefill(call).await.unwrap();
        let (first, rest) = tokio::join!(prefill_to_end(prefill), decode_to_end(decode));
        assert!(matches!(first.end, Some(PrefillEvent::HandoffDone(_))), "{first:?} {rest:?}");
        let mut tokens = vec![first.first.unwrap()];
        tokens.extend(rest.tokens.unwrap());
        assert_eq!(tokens, self.expected(call).await, "prompt of {}", call.prompt.len());
        Served { tokens, on_prefill: first.cached_tokens as usize, on_decode: rest.cached_tokens as usize }
    }

    async fn expected(&mut self, call: &Call) -> Vec<u32> {
        let call = self.fresh(call);
        self.reference.run_locally(&call).await
    }

    /// Has the prefill worker compute a prompt that goes nowhere.
    async fn warm_prefill(&mut self, prompt: &[u32]) {
        let call = self.fresh(&Call { prompt: prompt.to_vec(), max_new_tokens: 1, ..Call::new(0, 1, 1) });
        let stream = self.pair.to_prefill.prefill(call.prefill(None)).await.unwrap().into_inner();
        assert!(prefill_to_end(stream).await.first.is_some());
    }

    /// Has the decode worker compute a prompt itself.
    async fn warm_decode(&mut self, prompt: &[u32]) {
        let call = self.fresh(&Call { prompt: prompt.to_vec(), max_new_tokens: 1, ..Call::new(0, 1, 1) });
        self.pair.run_locally(&call).await;
    }
}

/// Full blocks of a prompt's tokens but the last one, whose logits are needed.
const fn cacheable(length: usize) -> usize {
    (length - 1) / BLOCK * BLOCK
}

fn hit_tokens(running: &Running) -> u64 {
    running.core().metrics.prefix_hit_tokens.get()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_same_prompt_again_costs_only_its_uncached_tail() {
    let mut bench = Bench::start(&[]).await;
    let mut num_hits = 0;
    // Whole blocks among them: the last one is computed again.
    for (n, length) in [1, 15, 16, 17, 64, 65, 160, 700].into_iter().enumerate() {
        let mut call = Call::new(n as u64, length, 12);
        call.temperature = if n % 2 == 0 { 0.0 } else { 0.8 };
        let first = bench.serve(&call).await;
        assert_eq!((first.on_prefill, first.on_decode), (0, 0), "prompt of {length}");
        for _ in 0..2 {
            let again = bench.serve(&call).await;
            assert_eq!(again.tokens, first.tokens);
            let cached = cacheable(length);
            assert_eq!((again.on_prefill, again.on_decode), (cached, cached), "prompt of {length}");
            num_hits += cached as u64;
        }
    }
    assert_eq!((hit_tokens(&bench.pair.prefill), hit_tokens(&bench.pair.decode)), (num_hits, num_hits));
    bench.pair.settles().await;
    let text = bench.pair.prefill.core().metrics.encode();
    let cached = bench.pair.prefill.core().loaded().unwrap().pool.counts().cached;
    assert!(cached > 0 && text.contains(&format!("baton_blocks{{state=\"cached\"}} {cached}\n")), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn prompts_that_part_share_what_is_before() {
    let mut bench = Bench::start(&[]).await;
    let first = Call::new(1, 150, 10);
    bench.serve(&first).await;
    // Within a block, at its end, at the very first token, and one that only goes on.
    for (n, shared) in [100, 96, 0, 150].into_iter().enumerate() {
        let mut call = Call::new(50 + n as u64, 220, 10);
        call.prompt[..shared].copy_from_slice(&first.prompt[..shared]);
        // Random tokens may agree by chance.
        if shared < 150 {
            call.prompt[shared] = (first.prompt[shared] + 1) % 256;
        }
        let served = bench.serve(&call).await;
        let want = shared / BLOCK * BLOCK;
        assert_eq!(served.on_prefill, want, "{shared} tokens are shared");
        assert!(served.on_decode >= want, "{shared} tokens are shared");
    }
    bench.pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_two_caches_need_not_agree() {
    let mut bench = Bench::start(&[]).await;
    // The chunk is 64 tokens. Where each cache ends is told in tokens.
    let ends = [(0, 80), (80, 0), (48, 112), (112, 48), (208, 16), (16, 208), (0, 224), (224, 0), (64, 128)];
    for (n, (on_prefill, on_decode)) in ends.into_iter().enumerate() {
        for length in [240, 233] {
            let call = Call::new(100 + 2 * n as u64 + length as u64 % 2, length, 8);
            if on_prefill > 0 {
                bench.warm_prefill(&call.prompt[..on_prefill]).await;
            }
            if on_decode > 0 {
                bench.warm_decode(&call.prompt[..on_decode]).await;
            }
            let served = bench.serve(&call).await;
            assert_eq!((served.on_prefill, served.on_decode), (on_prefill, on_decode), "prompt of {length}");
        }
    }
    bench.pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_next_turn_finds_what_was_generated() {
    let mut bench = Bench::start(&[]).await;
    let mut turn = Call::new(1, 50, 40);
    let first = bench.serve(&turn).await;
    turn.prompt.extend(&first.tokens);
    turn.prompt.extend(&Call::new(2, 30, 1).prompt);
    let second = bench.serve(&turn).await;
    // The last token that was generated was never computed: 89 tokens, 5 whole blocks.
    assert_eq!((second.on_prefill, second.on_decode), (48, 80));
    turn.prompt.extend(&second.tokens);
    turn.prompt.extend(&Call::new(3, 5, 1).prompt);
    let third = bench.serve(&turn).await;
    assert_eq!((third.on_prefill, third.on_decode), (112, (120 + 39) / BLOCK * BLOCK));
    // A local run takes part.
    turn = bench.fresh(&turn);
    let local = bench.pair.to_decode.decode(turn.decode(true)).await.unwrap().into_inner();
    let local = decode_to_end(local).await;
    assert_eq!(local.cached_tokens as usize, cacheable(turn.prompt.len()));
    assert_eq!(local.tokens.unwrap(), third.tokens);
    bench.pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn equal_prompts_at_once_and_many_prompts_in_a_small_pool_stay_right() {
    let seed = 20_260_102;
    println!("seed {seed}");
    let mut random = Random(seed);
    // 48 blocks of 16 tokens, which is about three of these sequences.
    let mut bench = Bench::start(&["--context=512", "--kv-memory=768K"]).await;
    let stems: Vec<Call> = (0..5).map(|n| Call::new(200 + n, 160, 1)).collect();
    let mut num_cached = 0;
    for round in 0..30 {
        let stem = &stems[random.below(5) as usize];
        let mut call = Call::new(300 + round, 1 + random.below(120) as usize, 1 + random.below(50) as u32);
        call.max_new_tokens += 1;
        let shared = random.below(161) as usize;
        call.prompt.splice(0..0, stem.prompt[..shared].iter().copied());
        let expected = bench.expected(&call).await;
        // The same one several times at once, so that equal blocks are computed by several and one is kept.
        let mut legs = Vec::new();
        for _ in 0..1 + random.below(4) {
            let call = bench.fresh(&call);
            let decode = bench.pair.decode(&call).await.unwrap();
            let prefill = bench.pair.prefill(&call).await.unwrap();
            legs.push(tokio::spawn(
                async move { tokio::join!(prefill_to_end(prefill), decode_to_end(decode)) },
            ));
        }
        for leg in legs {
            let (first, rest) = leg.await.unwrap();
            num_cached += u64::from(first.cached_tokens);
            let mut tokens = vec![first.first.unwrap_or_else(|| panic!("{first:?} {rest:?}"))];
            tokens.extend(rest.tokens.unwrap_or_else(|| panic!("{:?}", rest.failed)));
            assert_eq!(tokens, expected, "round {round}");
        }
    }
    assert!(num_cached > 0);
    bench.pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn hanging_up_at_any_moment_loses_no_block() {
    let seed = 20_260_103;
    println!("seed {seed}");
    let mut random = Random(seed);
    let mut bench = Bench::start(&[]).await;
    let stem = Call::new(1, 800, 1);
    for round in 0..40 {
        let mut call = Call::new(1000 + round, 1 + random.below(300) as usize, 3000);
        call.prompt.splice(0..0, stem.prompt[..random.below(801) as usize].iter().copied());
        let decode = bench.pair.decode(&call).await.unwrap();
        let prefill = bench.pair.prefill(&call).await.unwrap();
        tokio::time::sleep(Duration::from_micros(random.below(40_000))).await;
        match random.below(3) {
            0 => drop((decode, prefill)),
            1 => {
                drop(decode);
                tokio::time::sleep(Duration::from_millis(random.below(10))).await;
                drop(prefill);
            }
            _ => {
                drop(prefill);
                tokio::time::sleep(Duration::from_millis(random.below(10))).await;
                drop(decode);
            }
        }
    }
    bench.pair.settles().await;
    // What hang-ups left in the caches is right.
    for length in [800, 333, 64] {
        let call = Call { prompt: stem.prompt[..length].to_vec(), ..Call::new(1, 1, 8) };
        bench.serve(&call).await;
    }
    bench.pair.settles().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn without_the_option_nothing_is_kept() {
    let running = start_decode(&[]).await;
    let mut client = baton_proto::v1::decode_client::DecodeClient::new(pair::channel(&running).await);
    let call = Call::new(1, 100, 4);
    for n in 0..2 {
        let stream = client.decode(call.again(n).decode(true)).await.unwrap().into_inner();
        assert_eq!(decode_to_end(stream).await.cached_tokens, 0);
    }
    pair::settles("decode", &running).await;
    assert_eq!(running.core().loaded().unwrap().pool.counts().cached, 0);
    assert_eq!((hit_tokens(&running), running.core().metrics.prompt_tokens_computed.get()), (0, 200));
}
