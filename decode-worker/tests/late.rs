//! Messages that come twice change nothing and are counted.

mod pair;

use baton_proto::v1;
use baton_proto::v1::destination_message::Message as Answer;
use baton_proto::v1::handoff_client::HandoffClient;
use baton_proto::v1::source_message::Message;
use pair::{Call, Pair, channel, within};
use tokio_stream::wrappers::ReceiverStream;

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_notice_that_comes_twice_is_counted() {
    let mut pair = Pair::start(&[], &[]).await;
    let call = Call::new(1, 200, 20);
    let decode = pair.decode(&call).await.unwrap();
    let offer = v1::Offer {
        key: Some(call.key.clone()),
        source_instance: vec![1; 16].into(),
        destination_instance: pair.destination().instance_id,
        prompt_tokens: 200,
    };
    let (sender, messages) = tokio::sync::mpsc::channel(4);
    let send = async |message| sender.send(v1::SourceMessage { message: Some(message) }).await.unwrap();
    send(Message::Offer(offer)).await;
    let mut handoff = HandoffClient::new(channel(&pair.decode).await);
    let mut answers = handoff.control(ReceiverStream::new(messages)).await.unwrap().into_inner();
    let granted = within(answers.message()).await.unwrap().unwrap().message;
    assert!(matches!(granted, Some(Answer::Grant(_))), "{granted:?}");
    for _ in 0..3 {
        send(Message::Notice(v1::Notice::default())).await;
    }
    // Answered in order, so that the notices were taken in.
    send(Message::Abort(v1::Abort { cause: v1::Cause::Cancelled.into(), ..v1::Abort::default() })).await;
    while within(answers.message()).await.is_ok_and(|answer| answer.is_some()) {}
    drop((decode, sender));
    pair.settles().await;
    let metrics = &pair.decode.core().metrics;
    for _ in 0..500 {
        if metrics.late_messages.num("destination") > 0 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert_eq!(metrics.late_messages.num("destination"), 2);
}
