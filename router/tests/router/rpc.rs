//! The gRPC face.

use baton_proto::v1;
use baton_proto::v1::generate_request::Input;
use baton_proto::v1::inference_client::InferenceClient;
use futures::StreamExt;
use tonic::transport::Channel;
use tonic::{Code, Request};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::fake::Script;
use crate::harness::{Cluster, ONE_PAIR, eventually};

async fn connect(cluster: &Cluster) -> InferenceClient<Channel> {
    InferenceClient::connect(format!("http://{}", cluster.router.grpc)).await.expect("connected")
}

fn prompt(text: &str) -> v1::GenerateRequest {
    v1::GenerateRequest { input: Some(Input::Prompt(text.to_owned())), ..v1::GenerateRequest::default() }
}

#[tokio::test]
async fn generate_streams_text_tokens_usage_and_cost() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("héllo"), &[]).await;
    let mut client = connect(&cluster).await;
    let mut request = Request::new(prompt("abc"));
    request.metadata_mut().insert("x-request-id", "mine".parse().expect("metadata"));
    let response = client.generate(request).await.expect("accepted");
    assert_eq!(response.metadata().get("x-baton-mode").expect("mode"), "disaggregated");
    assert_eq!(response.metadata().get("x-request-id").expect("label"), "mine");
    let messages: Vec<_> = response.into_inner().map(|message| message.expect("no error")).collect().await;
    let (last, before) = messages.split_last().expect("messages");
    assert_eq!(before[0].request_id.len(), 32);
    assert_eq!(messages.iter().map(|message| message.text.as_str()).collect::<String>(), "héllo");
    let ids: Vec<u32> = messages.iter().flat_map(|message| message.token_ids.clone()).collect();
    assert_eq!(ids, [&"héllo".bytes().map(u32::from).collect::<Vec<_>>()[..], &[257]].concat());
    assert!(before.iter().all(|message| message.finish_reason.is_empty() && message.usage.is_none()));
    assert_eq!(last.finish_reason, "stop");
    assert_eq!(last.usage, Some(v1::Usage { prompt_tokens: 3, completion_tokens: 7, cached_tokens: 0 }));
    let kv = last.kv_transfer.expect("KV moved");
    assert_eq!((kv.bytes, kv.total_ms, kv.exposed_ms), (4096, 2.5, 0.5));
}

#[tokio::test]
async fn bad_requests_have_codes_and_name_the_field() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("x"), &["--context", "32"]).await;
    let mut client = connect(&cluster).await;
    let ids = |ids: Vec<u32>| Some(Input::TokenIds(v1::TokenIds { ids }));
    let chat = |role: &str| {
        let messages = vec![v1::ChatMessage { role: role.to_owned(), content: "x".to_owned() }];
        Some(Input::Chat(v1::ChatMessages { messages }))
    };
    for (request, code, says) in [
        (v1::GenerateRequest::default(), Code::InvalidArgument, "input"),
        (prompt(""), Code::InvalidArgument, "prompt"),
        (v1::GenerateRequest { input: ids(vec![]), ..prompt("") }, Code::InvalidArgument, "token_ids"),
        (v1::GenerateRequest { input: ids(vec![1, 999]), ..prompt("") }, Code::InvalidArgument, "999"),
        (
            v1::GenerateRequest { input: chat("wizard"), ..prompt("") },
            Code::InvalidArgument,
            "chat.messages[0].role",
        ),
        (
            v1::GenerateRequest { temperature: Some(f32::NAN), ..prompt("a") },
            Code::InvalidArgument,
            "temperature",
        ),
        (v1::GenerateRequest { top_p: Some(0.0), ..prompt("a") }, Code::InvalidArgument, "top_p"),
        (v1::GenerateRequest { max_tokens: Some(0), ..prompt("a") }, Code::InvalidArgument, "max_tokens"),
        (v1::GenerateRequest { max_tokens: Some(32), ..prompt("a") }, Code::InvalidArgument, "32"),
        (v1::GenerateRequest { stop: vec![String::new()], ..prompt("a") }, Code::InvalidArgument, "stop"),
        (v1::GenerateRequest { model: "yours".to_owned(), ..prompt("a") }, Code::NotFound, "builtin:tiny"),
        (prompt(&"a".repeat(40)), Code::InvalidArgument, "40"),
    ] {
        let status = client.generate(request.clone()).await.expect_err("refused");
        assert_eq!(status.code(), code, "{request:?}: {status}");
        assert!(status.message().contains(says), "{request:?}: {status}");
    }
    assert_eq!(cluster.num_legs(), 0);
}

#[tokio::test]
async fn no_worker_is_unavailable_and_dropping_the_stream_cancels() {
    let script = Script { decode_hangs_after: Some(2), ..Script::says("hello") };
    let mut cluster = Cluster::start(ONE_PAIR, script, &[]).await;
    let mut client = connect(&cluster).await;
    let mut stream = client.generate(prompt("a")).await.expect("accepted").into_inner();
    while stream.message().await.expect("no error").expect("not the end").text != "l" {}
    drop(stream);
    cluster.until_no_leg_is_open().await;
    cluster.decode[0].kill();
    eventually("nobody serves", async || cluster.client.get("/health").await.status == 503).await;
    let status = client.generate(prompt("a")).await.expect_err("nobody serves");
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("decode worker"), "{status}");
    assert!(status.metadata().contains_key("retry-after"));
}

#[tokio::test]
async fn tokenize_and_list_models_compute_nothing() {
    let cluster = Cluster::start(ONE_PAIR, Script::says("x"), &[]).await;
    let mut client = connect(&cluster).await;
    let text = v1::TokenizeRequest {
        input: Some(v1::tokenize_request::Input::Text("abc".to_owned())),
        ..v1::TokenizeRequest::default()
    };
    assert_eq!(client.tokenize(text).await.expect("tokens").into_inner().token_ids, [97, 98, 99]);
    let messages = vec![v1::ChatMessage { role: "user".to_owned(), content: "hi".to_owned() }];
    let chat = v1::TokenizeRequest {
        input: Some(v1::tokenize_request::Input::Chat(v1::ChatMessages { messages })),
        ..v1::TokenizeRequest::default()
    };
    let ids = client.tokenize(chat).await.expect("tokens").into_inner().token_ids;
    assert_eq!((ids[0], ids.last().copied()), (258, Some(u32::from(b'\n'))));
    assert_eq!(
        client.tokenize(v1::TokenizeRequest::default()).await.expect_err("no input").code(),
        Code::InvalidArgument
    );
    let models = client.list_models(v1::ListModelsRequest {}).await.expect("models").into_inner().models;
    assert_eq!(models, [v1::Model { id: "builtin:tiny".to_owned(), context: 131_072 }]);
    assert_eq!(cluster.num_legs(), 0);
}

#[tokio::test]
async fn the_health_service_follows_and_reflection_lists_the_services() {
    let mut cluster = Cluster::start(ONE_PAIR, Script::says("x"), &[]).await;
    let channel =
        Channel::from_shared(format!("http://{}", cluster.router.grpc)).expect("address").connect_lazy();
    let mut health = HealthClient::new(channel.clone());
    for service in ["", "baton.v1.Inference"] {
        let mut is = async |wanted: ServingStatus| {
            let request = tonic_health::pb::HealthCheckRequest { service: service.to_owned() };
            health.check(request).await.is_ok_and(|answer| answer.into_inner().status() == wanted)
        };
        if service.is_empty() {
            eventually("it serves", async || is(ServingStatus::Serving).await).await;
            cluster.decode[0].kill();
        }
        eventually("it does not serve", async || is(ServingStatus::NotServing).await).await;
    }
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    use tonic_reflection::pb::v1::{ServerReflectionRequest, ServiceResponse};
    let ask = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let asked = futures::stream::iter([ask]);
    let mut answers = ServerReflectionClient::new(channel)
        .server_reflection_info(asked)
        .await
        .expect("reflection")
        .into_inner();
    let answer = answers.message().await.expect("no error").expect("an answer");
    let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else {
        panic!("{answer:?}")
    };
    let names: Vec<String> = list.service.into_iter().map(|ServiceResponse { name }| name).collect();
    assert!(names.contains(&"baton.v1.Inference".to_owned()), "{names:?}");
}
