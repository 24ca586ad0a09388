//! What a request says to its client: bounded, patient for a while, and with a place kept for the last word.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::sync::mpsc;

use super::{Output, RequestSpans, Summary};
use crate::api_error::ApiError;

/// The way to the client.
pub(super) struct Outbox {
    sender: mpsc::Sender<Output>,
    /// Room for the end, whatever else waits.
    last_word: Option<mpsc::OwnedPermit<Output>>,
    /// Said since the last flush; a handful, since every fact is followed by one.
    backlog: VecDeque<Output>,
    patience: Duration,
}

/// Why nothing more can be said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unheard {
    /// The client left.
    Gone,
    /// It did not read in time.
    Slow,
}

impl Outbox {
    /// Takes a channel that nothing was sent to.
    pub(super) fn new(sender: mpsc::Sender<Output>, patience: Duration) -> Self {
        let last_word = sender.clone().try_reserve_owned().ok();
        Self { sender, last_word, backlog: VecDeque::new(), patience }
    }

    /// Resolves when the client left.
    pub(super) async fn closed(&self) {
        self.sender.closed().await;
    }

    pub(super) fn say(&mut self, output: Output) {
        self.backlog.push_back(output);
    }

    /// Hands on what was said, waiting for room within bounds. A burst that finds the buffer full is no slow client yet.
    pub(super) async fn flush(&mut self) -> Result<(), Unheard> {
        while let Some(output) = self.backlog.pop_front() {
            let permit = match self.sender.try_reserve() {
                Ok(permit) => permit,
                Err(mpsc::error::TrySendError::Closed(())) => return Err(Unheard::Gone),
                Err(mpsc::error::TrySendError::Full(())) => {
                    match tokio::time::timeout(self.patience, self.sender.reserve()).await {
                        Ok(Ok(permit)) => permit,
                        Ok(Err(_)) => return Err(Unheard::Gone),
                        Err(_) => return Err(Unheard::Slow),
                    }
                }
            };
            permit.send(output);
        }
        Ok(())
    }

    /// The last word; a client that left does not mind.
    pub(super) fn end(&mut self, result: Result<Summary, ApiError>, spans: RequestSpans) {
        if let Some(permit) = self.last_word.take() {
            permit.send(Output::End { result, spans });
        }
    }
}
