//! What a worker says about itself, and how it starts.

mod pair;

use baton_proto::v1;
use baton_proto::v1::worker_client::WorkerClient;
use baton_worker::WorkerError;
use pair::{
    Call, Pair, channel, decode_config, decode_to_end, prefill_config, start_decode, start_prefill, within,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

async fn get(address: std::net::SocketAddr, path: &str) -> String {
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: worker\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    within(stream.read_to_string(&mut text)).await.unwrap();
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn metrics_are_served_over_http_on_the_grpc_port() {
    let running = start_decode(&[]).await;
    let mut client = v1::decode_client::DecodeClient::new(channel(&running).await);
    let stream = client.decode(Call::new(1, 40, 6).decode(true)).await.unwrap().into_inner();
    assert_eq!(decode_to_end(stream).await.tokens.unwrap().len(), 6);
    let text = get(running.address(), "/metrics").await;
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    // What Prometheus calls its text format, for who asks for nothing else.
    assert!(text.contains("text/plain; version=0.0.4") && !text.contains("# EOF"), "{text}");
    let total = running.core().loaded().unwrap().pool.counts().total;
    for line in [
        "baton_prompt_tokens_computed_total 40",
        "baton_generated_tokens_total 6",
        "baton_kv_received_bytes_total 0",
        &format!("baton_blocks_total_configured {total}"),
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
    }
    assert!(get(running.address(), "/nothing").await.starts_with("HTTP/1.1 "));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_worker_describes_itself_and_streams_its_status() {
    let running = start_prefill(&[]).await;
    let mut client = WorkerClient::new(channel(&running).await);
    let description = client.describe(v1::DescribeRequest {}).await.unwrap().into_inner();
    assert_eq!(description.instance_id, running.core().instance.0.to_vec());
    assert_eq!((description.role(), description.context), (v1::Role::Prefill, 4096));
    let layout = description.layout.unwrap();
    assert_eq!((layout.num_layers, layout.num_kv_heads, layout.block_size), (4, 2, 16));
    let mut stream = client.watch(v1::WatchRequest {}).await.unwrap().into_inner();
    for want in 1..4 {
        let status = within(stream.message()).await.unwrap().unwrap();
        assert_eq!(status.sequence, want);
        assert_eq!(status.state(), v1::worker_status::State::Ready);
        assert!(status.idle && status.total_blocks > 0 && status.free_blocks == status.total_blocks);
        assert_eq!((status.prefill_tokens_per_s, status.decode_step_ms, status.links.len()), (0.0, 0.0, 0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn rates_that_were_measured_are_in_the_status() {
    let mut pair = Pair::start(&[], &[]).await;
    pair.run(&Call::new(1, 640, 20)).await;
    let first = async |running: &baton_worker::Running| {
        let mut client = WorkerClient::new(channel(running).await);
        let mut stream = client.watch(v1::WatchRequest {}).await.unwrap().into_inner();
        within(stream.message()).await.unwrap().unwrap()
    };
    let (prefill, decode) = (first(&pair.prefill).await, first(&pair.decode).await);
    assert!(prefill.prefill_tokens_per_s > 0.0 && decode.decode_step_ms > 0.0, "{prefill:?} {decode:?}");
    assert!(decode.prefill_tokens_per_s == 0.0 && decode.links.is_empty());
    let link = &prefill.links[0];
    assert_eq!((prefill.links.len(), &link.decode_instance_id), (1, &decode.instance_id));
    assert!(link.bytes_per_s > 1e5 && link.bytes_per_s < 1e12, "{link:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn status_streams_are_bounded() {
    let running = start_prefill(&[]).await;
    let mut client = WorkerClient::new(channel(&running).await);
    let mut streams = Vec::new();
    for _ in 0..baton_worker::MAX_WATCHERS {
        streams.push(client.watch(v1::WatchRequest {}).await.unwrap().into_inner());
    }
    let error = client.watch(v1::WatchRequest {}).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::ResourceExhausted);
    drop(streams);
    for _ in 0..100 {
        if client.watch(v1::WatchRequest {}).await.is_ok() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    panic!("a dropped status stream never makes room");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_address_file_comes_before_the_model_and_calls_wait_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("address");
    let mut running =
        baton_decode_worker::start(decode_config(&["--address-file", file.to_str().unwrap()])).unwrap();
    let address = std::fs::read_to_string(&file).unwrap();
    assert_eq!(address.trim(), running.address().to_string());
    let mut health = HealthClient::new(channel(&running).await);
    running.ready().await.unwrap();
    let mut serving = false;
    for _ in 0..100 {
        let answer = health.check(HealthCheckRequest::default()).await.unwrap().into_inner();
        serving = answer.status() == tonic_health::pb::health_check_response::ServingStatus::Serving;
        if serving {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert!(serving);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_model_that_is_not_there_is_told_and_the_worker_is_not_healthy() {
    let mut running = baton_prefill_worker::start(prefill_config(&["--model=./no-such.gguf"])).unwrap();
    let error = running.ready().await.unwrap_err();
    assert!(matches!(error, WorkerError::Model(_)), "{error}");
    assert!(error.to_string().contains("no-such.gguf"), "{error}");
    let mut client = v1::prefill_client::PrefillClient::new(channel(&running).await);
    let error = client.prefill(Call::new(1, 10, 1).prefill(None)).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::Unavailable);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_port_in_use_is_named_with_the_option_that_changes_it() {
    let running = start_decode(&[]).await;
    let listen = format!("--listen={}", running.address());
    let error = baton_prefill_worker::start(prefill_config(&[&listen])).err().unwrap();
    assert!(matches!(error, WorkerError::Bind { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains(&running.address().to_string()) && text.contains("--listen"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn too_little_memory_says_what_fits() {
    let mut running = baton_decode_worker::start(decode_config(&["--kv-memory=64K"])).unwrap();
    let error = running.ready().await.unwrap_err();
    assert!(matches!(error, WorkerError::Memory(_)), "{error}");
    // 64 KiB hold 64 tokens of 1 KiB.
    assert!(error.to_string().contains("64 tokens") && error.to_string().contains("4096"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn run_ends_when_it_is_told_to() {
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let run = tokio::spawn(baton_prefill_worker::run(prefill_config(&[]), async {
        let _ = stopped.await;
    }));
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    stop.send(()).unwrap();
    within(run).await.unwrap().unwrap();
    let error = baton_decode_worker::run(decode_config(&["--context=200000"]), std::future::pending()).await;
    let text = error.unwrap_err().to_string();
    assert!(text.contains("--context") && text.contains("131072"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn threads_can_be_bound() {
    let first = baton_worker::CpuList::allowed().unwrap().as_slice()[0].to_string();
    let options = [format!("--cpus={first}"), format!("--io-cpus={first}"), "--threads=2".to_owned()];
    let running = start_decode(&options.each_ref().map(String::as_str)).await;
    let mut client = v1::decode_client::DecodeClient::new(channel(&running).await);
    let stream = client.decode(Call::new(1, 40, 6).decode(true)).await.unwrap().into_inner();
    assert_eq!(decode_to_end(stream).await.tokens.unwrap().len(), 6);
}
