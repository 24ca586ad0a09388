mod pair;
use pair::{Call, Pair};
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn real() {
    let o = ["--model=default", "--kv-memory=400M", "--max-step-tokens=128", "--kv-dtype=f16"];
    let mut pair = Pair::start(&o, &o).await;
    for (n, len) in [(1u64, 100usize), (2, 512), (3, 1500)] {
        let call = Call::new(n, len, 32);
        let t = std::time::Instant::now();
        let (tokens, kv) = pair.run(&call).await;
        println!("{len} {:?} {kv:?}", t.elapsed());
        let t = std::time::Instant::now();
        assert_eq!(pair.run_locally(&call).await, tokens);
        println!("local {:?}", t.elapsed());
    }
    pair.settles().await;
}
