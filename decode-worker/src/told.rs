//! What a source tells beside what the machine of the handoff needs.

use std::time::Duration;

use baton_handoff::Time;
use baton_proto::v1;
use baton_proto::v1::source_message::Message;
use baton_scheduler::StepCost;

/// Of one message.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Told {
    /// From sending the offer to sampling, on the source's clock.
    pub(crate) since_offer: Option<Duration>,
    /// What the source's steps cost.
    pub(crate) step_cost: Option<LearntCost>,
}

/// What steps cost, and how far that is off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LearntCost {
    pub(crate) cost: StepCost,
    /// Mean of |expected - measured| / measured.
    pub(crate) residual: f64,
}

impl Told {
    pub(crate) fn read(message: &v1::SourceMessage) -> Self {
        match &message.message {
            Some(Message::Notice(v1::Notice { since_offer_us: us @ 1.. })) => {
                Self { since_offer: Some(Duration::from_micros(*us)), ..Self::default() }
            }
            Some(Message::Commit(commit)) => {
                let read = |told: &v1::StepCost| LearntCost {
                    cost: StepCost {
                        fixed_s: told.fixed_s,
                        per_token_s: told.per_token_s,
                        per_context_token_s: told.per_context_token_s,
                    },
                    residual: told.residual,
                };
                Self { step_cost: commit.step_cost.as_ref().map(read), ..Self::default() }
            }
            _ => Self::default(),
        }
    }

    /// t_c, of a message that came `now`. It may have waited behind KV on a slow link, while the offer had the link to itself: what the
    /// source says passed between the two is added to when the offer came. Durations of two clocks, never their difference.
    pub(crate) fn done_at(&self, offered_at: Option<Time>, now: Time) -> Time {
        let done = offered_at.zip(self.since_offer).map(|(offered, since)| offered.saturating_add(since));
        done.map_or(now, |done| done.min(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_that_came_late_tells_when_the_prompt_was_done() {
        let ms = Duration::from_millis;
        let told = |since| Told { since_offer: since, ..Told::default() };
        assert_eq!(told(Some(ms(50))).done_at(Some(ms(100)), ms(900)), ms(150));
        // It can't be done after it was told.
        assert_eq!(told(Some(ms(50))).done_at(Some(ms(100)), ms(140)), ms(140));
        assert_eq!(told(Some(Duration::MAX)).done_at(Some(ms(100)), ms(140)), ms(140));
        assert_eq!(told(None).done_at(Some(ms(100)), ms(140)), ms(140));
        assert_eq!(told(Some(ms(50))).done_at(None, ms(140)), ms(140));
    }

    fn told(message: Message) -> Told {
        Told::read(&v1::SourceMessage { message: Some(message) })
    }

    #[test]
    fn a_time_and_a_cost_are_read_where_they_stand() {
        let since = |since_offer_us| told(Message::Notice(v1::Notice { since_offer_us })).since_offer;
        assert_eq!((since(0), since(1500)), (None, Some(Duration::from_micros(1500))));
        let commit = v1::Commit::default();
        assert_eq!(told(Message::Commit(commit.clone())), Told::default());
        let wire = v1::StepCost { fixed_s: 1.0, per_token_s: 2.0, per_context_token_s: 3.0, residual: 0.25 };
        let LearntCost { cost, residual } =
            told(Message::Commit(v1::Commit { step_cost: Some(wire), ..commit })).step_cost.unwrap();
        assert_eq!(
            (cost.fixed_s, cost.per_token_s, cost.per_context_token_s, residual),
            (1.0, 2.0, 3.0, 0.25)
        );
    }
}
