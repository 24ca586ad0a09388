//! The gRPC face: the same tokens as over HTTP, statuses before the first message, health and reflection.

use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::generate_request::Input;
use baton_proto::v1::inference_client::InferenceClient;
use baton_tests::cluster::greedy;
use baton_tests::{Cluster, ClusterConfig, Turn, eventually};
use tonic::Code;
use tonic::transport::Channel;

async fn channel(cluster: &Cluster) -> Channel {
    let endpoint = Channel::from_shared(format!("http://{}", cluster.grpc)).expect("an address");
    endpoint.timeout(Duration::from_secs(60)).connect().await.expect("the router's gRPC port")
}

fn request(tokens: &[u32], max_tokens: u32) -> v1::GenerateRequest {
    v1::GenerateRequest {
        input: Some(Input::TokenIds(v1::TokenIds { ids: tokens.to_vec() })),
        max_tokens: Some(max_tokens),
        temperature: Some(0.0),
        ignore_eos: true,
        ..v1::GenerateRequest::default()
    }
}

async fn generate(
    client: &mut InferenceClient<Channel>,
    request: v1::GenerateRequest,
) -> Result<Vec<v1::GenerateResponse>, tonic::Status> {
    let mut stream = client.generate(request).await?.into_inner();
    let mut messages = Vec::new();
    while let Some(message) = stream.message().await? {
        messages.push(message);
    }
    Ok(messages)
}

#[tokio::test]
async fn both_faces_give_the_same_tokens() {
    let _turn = Turn::take();
    let cluster = Cluster::start(ClusterConfig::default()).await;
    let mut client = InferenceClient::new(channel(&cluster).await);
    let prompt: Vec<u32> = (0x30..0x60).collect();
    let over_http = cluster.completion(&greedy(&prompt, 20)).await;
    let messages = generate(&mut client, request(&prompt, 20)).await.expect("a whole stream");
    let tokens: Vec<u32> = messages.iter().flat_map(|message| message.token_ids.clone()).collect();
    let text: String = messages.iter().map(|message| message.text.as_str()).collect();
    assert_eq!((tokens, text), (over_http.token_ids, over_http.text));
    let (last, before) = messages.split_last().expect("messages");
    assert!(!messages[0].request_id.is_empty());
    assert!(before.iter().all(|message| message.finish_reason.is_empty() && message.usage.is_none()));
    assert_eq!(last.finish_reason, "length");
    let usage = last.usage.as_ref().expect("usage at the end");
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (48, 20));
    let moved = last.kv_transfer.as_ref().expect("KV moved");
    assert_eq!(moved.bytes, 48 * 512);
    assert!(moved.exposed_ms <= moved.total_ms, "{moved:?}");
    cluster.wait_baseline(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn what_is_wrong_is_a_status_before_the_first_message() {
    let _turn = Turn::take();
    let cluster = Cluster::start(ClusterConfig::default()).await;
    let mut client = InferenceClient::new(channel(&cluster).await);
    for (wrong, code, field) in [
        (v1::GenerateRequest { model: "gpt-4".into(), ..request(&[65], 1) }, Code::NotFound, "model"),
        (
            v1::GenerateRequest { temperature: Some(-1.0), ..request(&[65], 1) },
            Code::InvalidArgument,
            "temperature",
        ),
        (v1::GenerateRequest { top_p: Some(0.0), ..request(&[65], 1) }, Code::InvalidArgument, "top_p"),
        (
            v1::GenerateRequest { stop: vec![String::new()], ..request(&[65], 1) },
            Code::InvalidArgument,
            "stop",
        ),
        (v1::GenerateRequest { input: None, ..request(&[65], 1) }, Code::InvalidArgument, "input"),
        (request(&[], 1), Code::InvalidArgument, "token_ids"),
        (request(&[65, 100_000], 1), Code::InvalidArgument, "token_ids"),
        (request(&[65], 0), Code::InvalidArgument, "max_tokens"),
    ] {
        let status = client.generate(wrong.clone()).await.expect_err("refused");
        assert_eq!(status.code(), code, "{wrong:?}: {status}");
        assert!(status.message().contains(field), "{wrong:?}: {status}");
    }
}

#[tokio::test]
async fn a_dropped_stream_is_a_cancel() {
    let _turn = Turn::take();
    let cluster = Cluster::start(ClusterConfig::default()).await;
    let mut client = InferenceClient::new(channel(&cluster).await);
    let mut stream = client.generate(request(&[65, 66], 50_000)).await.expect("accepted").into_inner();
    assert!(stream.message().await.expect("no break").is_some());
    drop(stream);
    cluster.wait_baseline(Duration::from_secs(3)).await;
}

#[tokio::test]
async fn tokens_models_health_and_reflection() {
    let _turn = Turn::take();
    let cluster = Cluster::start(ClusterConfig::default()).await;
    let channel = channel(&cluster).await;
    let mut client = InferenceClient::new(channel.clone());
    let text = v1::tokenize_request::Input::Text("Hi".into());
    let tokens = client.tokenize(v1::TokenizeRequest { input: Some(text), ..Default::default() }).await;
    assert_eq!(tokens.expect("tokens").into_inner().token_ids, [72, 105]);
    let models = client.list_models(v1::ListModelsRequest {}).await.expect("models").into_inner().models;
    assert_eq!(models.len(), 1);
    assert_eq!(models[0].context, 131_072);

    let mut health = tonic_health::pb::health_client::HealthClient::new(channel.clone());
    eventually("serving", Duration::from_secs(10), async || {
        let check = tonic_health::pb::HealthCheckRequest { service: "baton.v1.Inference".into() };
        let status = health.check(check).await.map_err(|status| status.to_string())?.into_inner().status;
        if status == 1 { Ok(()) } else { Err(format!("status {status}")) }
    })
    .await;

    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    let list = tonic_reflection::pb::v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut reflection = ServerReflectionClient::new(channel);
    let mut answers =
        reflection.server_reflection_info(tokio_stream::iter([list])).await.expect("reflection").into_inner();
    let answer = answers.message().await.expect("no break").expect("an answer");
    let Some(MessageResponse::ListServicesResponse(services)) = answer.message_response else {
        panic!("{answer:?}")
    };
    let names: Vec<&str> = services.service.iter().map(|service| service.name.as_str()).collect();
    assert!(names.contains(&"baton.v1.Inference") && names.contains(&"grpc.health.v1.Health"), "{names:?}");
}
