//! A member that says anything while ranks agree.

use std::collections::BTreeSet;

use super::agreement::{Action, Agreement, Event, Loss};
use super::message::Message;
use crate::types::Rank;

/// The ranks of the group.
const WORLD: usize = 5;

/// One rank's part in an agreement, to which the others send anything. The first byte is the rank; then follow events: the rank
/// that they come from, and a message, or a loss if the byte is higher. A message is read as what writes the same, and the rank
/// asks for no more than it may.
pub fn agreement(bytes: &[u8]) {
    let Some((rank, mut rest)) = bytes.split_first() else {
        return;
    };
    let rank = usize::from(*rank) % WORLD;
    let mut part = Agreement::new(rank, WORLD, BTreeSet::new(), 7);
    let mut ways = Ways::default();
    ways.check(part.begin(), rank);
    while let Some((kind, after)) = rest.split_first() {
        let from = usize::from(*kind) % WORLD;
        let event = match usize::from(*kind) / WORLD {
            0 => Event::Lost(Loss::Ended),
            1 => Event::Lost(Loss::Cut),
            2 => Event::Lost(Loss::Absent),
            _ => {
                let Some((written, after)) = after.split_at_checked(Message::length(WORLD)) else {
                    return;
                };
                rest = after;
                let Some(message) = Message::from_bytes(written, WORLD) else {
                    continue;
                };
                assert_eq!(message.to_bytes(WORLD), written);
                if from != rank {
                    ways.spoken.insert(from);
                    ways.check(part.handle(from, Event::Message(message)), rank);
                }
                continue;
            }
        };
        rest = after;
        if from != rank {
            ways.check(part.handle(from, event), rank);
        }
    }
}

/// The ways to other ranks.
#[derive(Default)]
struct Ways {
    /// Those that the rank has opened, and those over which messages have come.
    opened: BTreeSet<Rank>,
    spoken: BTreeSet<Rank>,
}

impl Ways {
    /// It opens each way once, and sends over those that are open alone.
    fn check(&mut self, actions: Vec<Action>, rank: Rank) {
        for action in actions {
            match action {
                Action::Open(peer) => assert!(peer != rank && self.opened.insert(peer)),
                Action::Send(to, _) => {
                    assert!(self.opened.contains(&to) || self.spoken.contains(&to));
                }
            }
        }
    }
}

/// Seeds: rounds of a leader and of a rank that follows.
#[cfg(test)]
pub(crate) fn seeds() -> Vec<(String, Vec<u8>)> {
    use super::message::{Ballot, Decision, Refusal};

    const SAYS: u8 = 3 * WORLD as u8;
    let ballot = |leader| Ballot { leader, round: 1 };
    let decision = || Decision {
        living: [0, 1, 3].into(),
        ended: 7,
    };
    let report = |accepted: Option<_>| Message::Report {
        excluded: BTreeSet::new(),
        ended: 7,
        is_decided: accepted.is_some(),
        accepted,
    };
    let event = |from: u8, message: Message| [vec![SAYS + from], message.to_bytes(WORLD)].concat();
    let leads = [
        vec![0, 2],
        event(1, report(None)),
        event(3, report(Some((ballot(0), decision())))),
        event(4, Message::Leave),
        event(1, Message::Accept(ballot(0))),
        event(3, Message::Accept(ballot(0))),
        event(1, Message::Heard),
        event(3, Message::Heard),
    ];
    let follows = [
        vec![3],
        event(0, Message::Propose(ballot(0), decision())),
        vec![0],
        event(1, Message::Propose(ballot(1), decision())),
        event(1, Message::Decide(decision())),
        event(1, Message::Over),
    ];
    let refused = [
        vec![2],
        event(0, Message::Refuse(Refusal::Minority([1, 4].into()))),
    ];
    [
        ("leads", leads.concat()),
        ("follows", follows.concat()),
        ("refused", refused.concat()),
    ]
    .map(|(name, bytes)| (name.to_owned(), bytes))
    .into()
}
