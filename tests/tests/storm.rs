//! Two hundred faults while clients ask and hang up: workers killed, stopped, drained, links damaged, cut, stalled. Whatever a client
//! hears is the beginning of what an undisturbed cluster says, and at the end nothing is left anywhere.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_tests::cluster::{greedy, strings, with};
use baton_tests::seed::Random;
use baton_tests::worker::Worker;
use baton_tests::{Cluster, ClusterConfig, Completion, EventStream, Turn, eventually};
use serde_json::{Value, json};
use tokio::task::JoinSet;

const NUM_FAULTS: usize = 200;
const NUM_CLIENTS: u64 = 8;

/// One request and what an undisturbed cluster answers.
struct Case {
    body: Value,
    wanted: Vec<Vec<u32>>,
}

/// What clients and the storm share.
struct Shared {
    http: SocketAddr,
    cases: Vec<Case>,
    over: AtomicBool,
    start: Instant,
    /// Microseconds from the start to the last fault.
    fault_at: AtomicU64,
    tally: Mutex<Tally>,
}

#[derive(Default)]
struct Tally {
    num_whole: usize,
    num_hung_up: usize,
    /// Ended with an error, by its code.
    errors: Vec<String>,
    /// From a fault to the next token of each stream that was being read.
    recoveries: Vec<Duration>,
    wrong: Vec<String>,
}

impl Shared {
    fn tally(&self, change: impl FnOnce(&mut Tally)) {
        change(&mut self.tally.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn fault(&self) {
        let now = u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.fault_at.store(now, Ordering::SeqCst);
    }

    /// A token came at `at` and the one before at `before`: if the last fault lies between, this is how long the stream took over it.
    fn token(&self, before: Instant, at: Instant) {
        let fault = self.start + Duration::from_micros(self.fault_at.load(Ordering::SeqCst));
        if before < fault && fault <= at {
            self.tally(|tally| tally.recoveries.push(at - fault));
        }
    }
}

async fn cases(cluster: &Cluster, random: &mut Random) -> Vec<Case> {
    let mut cases = Vec::new();
    for nth in 0..24 {
        let num_tokens = random.within(4..300);
        let length = random.within(1..1500);
        let more = match nth % 4 {
            0 => json!({"temperature": 1.0, "seed": nth, "n": 3}),
            1 => json!({"temperature": 0.8, "top_p": 0.9, "seed": nth}),
            _ => json!({"priority": nth % 3 - 1}),
        };
        let body = with(greedy(&random.tiny_prompt(length), num_tokens), more);
        let answer = cluster.post("/v1/completions", &body).await.expect(200);
        let wanted = Completion::choices(&answer).into_iter().map(|choice| choice.token_ids).collect();
        cases.push(Case { body: with(body, json!({"stream": true})), wanted });
    }
    cases
}

async fn client(shared: Arc<Shared>, mut random: Random) {
    while !shared.over.load(Ordering::SeqCst) {
        let case = &shared.cases[random.within(0..shared.cases.len())];
        let patience = match random.within(0..6) {
            0 => Duration::from_millis(random.within(0..500) as u64),
            _ => Duration::from_secs(600),
        };
        let ended = tokio::time::timeout(patience, ask(&shared, case)).await;
        let failed = matches!(ended, Ok(Err(_)));
        shared.tally(|tally| match ended {
            Err(_) => tally.num_hung_up += 1,
            Ok(Ok(())) => tally.num_whole += 1,
            Ok(Err(error)) => tally.errors.push(error),
        });
        if failed {
            // As a client that is told to come back later.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

/// Reads one answer, comparing each token as it comes.
async fn ask(shared: &Shared, case: &Case) -> Result<(), String> {
    let mut stream = EventStream::post(shared.http, "/v1/completions", &case.body).await?;
    let mut choices = vec![Completion::default(); case.wanted.len()];
    let mut last = None;
    let mut done = false;
    while let Some(event) = stream.next().await? {
        if event.data == "[DONE]" {
            done = true;
            continue;
        }
        let value: Value = serde_json::from_str(&event.data).map_err(|error| error.to_string())?;
        if !value["error"].is_null() {
            return Err(value["error"]["code"].as_str().unwrap_or("an error without a code").to_owned());
        }
        let before: usize = choices.iter().map(|choice| choice.token_ids.len()).sum();
        Completion::add_choices(&mut choices, &value);
        if choices.iter().map(|choice| choice.token_ids.len()).sum::<usize>() > before {
            if let Some(last) = last {
                shared.token(last, event.at);
            }
            last = Some(event.at);
        }
        for (choice, wanted) in choices.iter().zip(&case.wanted) {
            if !wanted.starts_with(&choice.token_ids) {
                shared.tally(|tally| {
                    tally.wrong.push(format!("{:?} is no beginning of {wanted:?}", choice.token_ids))
                });
                return Ok(());
            }
        }
    }
    if !stream.status.is_success() {
        return Err(stream.status.to_string());
    }
    let whole = choices.iter().zip(&case.wanted).all(|(choice, wanted)| choice.token_ids == *wanted);
    if !done || !whole {
        shared.tally(|tally| tally.wrong.push(format!("a stream ended early, [DONE] {done}: {}", case.body)));
    }
    Ok(())
}

/// What the storm does to the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Kill,
    Pause,
    Drain,
    Flip,
    Cut,
    Stall,
}

const FAULTS: [Fault; 6] = [Fault::Kill, Fault::Pause, Fault::Drain, Fault::Flip, Fault::Cut, Fault::Stall];

fn worker(cluster: &mut Cluster, decode: bool, nth: usize) -> &mut Worker {
    if decode { &mut cluster.decode[nth] } else { &mut cluster.prefill[nth] }
}

async fn strike(cluster: &mut Cluster, shared: &Shared, random: &mut Random, fault: Fault) {
    let dir = cluster.dir();
    let (decode, nth) = (random.within(0..2) == 0, random.within(0..2));
    shared.fault();
    match fault {
        Fault::Kill => {
            worker(cluster, decode, nth).restart(&dir);
            cluster.wait_ready().await;
        }
        Fault::Pause => {
            worker(cluster, decode, nth).process.signal(libc::SIGSTOP);
            tokio::time::sleep(Duration::from_millis(random.within(50..1800) as u64)).await;
            worker(cluster, decode, nth).process.signal(libc::SIGCONT);
        }
        Fault::Drain => {
            let worker = worker(cluster, decode, nth);
            worker.process.signal(libc::SIGTERM);
            let ended = eventually("the drained worker ends", Duration::from_secs(20), async || {
                worker.process.try_status().ok_or_else(|| worker.process.output())
            });
            assert_eq!(ended.await.code(), Some(0), "{} was told to drain", worker.process.name);
            worker.restart(&dir);
            cluster.wait_ready().await;
        }
        Fault::Flip => cluster.proxies[random.within(0..2)].flip(random.within(1..4)),
        Fault::Cut => cluster.proxies[random.within(0..2)].cut(random.within(1..4)),
        Fault::Stall => {
            let proxy = &cluster.proxies[random.within(0..2)];
            proxy.stall(true);
            tokio::time::sleep(Duration::from_millis(random.within(50..800) as u64)).await;
            proxy.stall(false);
        }
    }
    tokio::time::sleep(Duration::from_millis(random.within(0..250) as u64)).await;
}

fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    sorted
        .get((sorted.len() * percent / 100).min(sorted.len().saturating_sub(1)))
        .copied()
        .unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_faults_change_no_token_and_leave_nothing_behind() {
    let _turn = Turn::take();
    let mut random = Random::from_env("two_hundred_faults");
    let config = ClusterConfig {
        num_prefill: 2,
        num_decode: 2,
        proxied: true,
        prefix_cache: true,
        // Room for a few requests, so that some give way to others.
        kv_memory: "2M".into(),
        max_step_tokens: Some(256),
        worker_args: strings(&["--context", "4096", "--drain-timeout", "1"]),
        router_args: strings(&["--heartbeat-timeout", "1"]),
        ..ClusterConfig::default()
    };
    let mut cluster = Cluster::start(config).await;
    let shared = Arc::new(Shared {
        http: cluster.http,
        cases: cases(&cluster, &mut random).await,
        over: AtomicBool::new(false),
        start: Instant::now(),
        fault_at: AtomicU64::new(0),
        tally: Mutex::default(),
    });
    let mut clients = JoinSet::new();
    for _ in 0..NUM_CLIENTS {
        clients.spawn(client(Arc::clone(&shared), Random::new(random.next_u64())));
    }
    let mut counts = std::collections::BTreeMap::new();
    for nth in 0..NUM_FAULTS {
        let fault = FAULTS[(nth + random.within(0..2)) % FAULTS.len()];
        strike(&mut cluster, &shared, &mut random, fault).await;
        *counts.entry(fault).or_insert(0) += 1;
    }
    for proxy in &cluster.proxies {
        proxy.flip(0);
        proxy.cut(0);
    }
    shared.over.store(true, Ordering::SeqCst);
    while let Some(ended) = clients.join_next().await {
        ended.expect("no client failed");
    }
    let mut tally = std::mem::take(&mut *shared.tally.lock().unwrap_or_else(PoisonError::into_inner));
    tally.recoveries.sort();
    let (p50, worst) = (percentile(&tally.recoveries, 50), percentile(&tally.recoveries, 100));
    let Tally { num_whole, num_hung_up, errors, .. } = &tally;
    eprintln!("{counts:?} in {:?}: {num_whole} whole answers, {num_hung_up} hung up", shared.start.elapsed());
    eprintln!("{} errors: {errors:?}", errors.len());
    eprintln!("fault to next token: p50 {p50:?}, worst {worst:?}, of {}", tally.recoveries.len());
    assert!(tally.wrong.is_empty(), "{:#?}", tally.wrong);
    assert!(*num_whole > 200, "too few answers to show anything");
    // A request may be given up after it took two workers down; most must not be.
    assert!(errors.len() * 20 <= *num_whole, "too many errors");
    cluster.wait_ready().await;
    cluster.wait_baseline(Duration::from_secs(10)).await;
}
