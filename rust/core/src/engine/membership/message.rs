//! The messages of an [agreement](super::agreement), as they travel: all of a group have the same length.

use std::collections::BTreeSet;

use crate::types::Rank;

/// A proposal's number. A later one of the same leader is higher, and so is one of the next leader, whose rank is higher.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ballot {
    /// The rank that proposes.
    pub(crate) leader: u32,
    /// Counts its proposals, from 1.
    pub(crate) round: u32,
}

/// The ranks that go on, and how far all of them had come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Decision {
    /// Those that go on.
    pub(crate) living: BTreeSet<Rank>,
    /// The collectives up to this number have ended on each of them.
    pub(crate) ended: u64,
}

/// Why ranks do not go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// These cannot be reached and may live, and those that take part are not enough to go on without them.
    Minority(BTreeSet<Rank>),
    /// These live and do not take part.
    Absent(BTreeSet<Rank>),
}

/// A message between two ranks that agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// To the leader: the sender takes part.
    Report {
        /// The ranks that are to be left out.
        excluded: BTreeSet<Rank>,
        /// The collectives up to this number have ended on the sender.
        ended: u64,
        /// The last proposal that it has accepted.
        accepted: Option<(Ballot, Decision)>,
        /// Whether it knows that this was decided.
        is_decided: bool,
    },
    /// From the leader.
    Propose(Ballot, Decision),
    /// The answer to a proposal.
    Accept(Ballot),
    /// From the leader: all have accepted this.
    Decide(Decision),
    /// The answer to a decision.
    Heard,
    /// From the leader: all have heard the decision.
    Over,
    /// From the leader: there will be no decision.
    Refuse(Refusal),
    /// The sender takes part no more.
    Leave,
}

const REPORT: u8 = 1;
const PROPOSE: u8 = 2;
const ACCEPT: u8 = 3;
const DECIDE: u8 = 4;
const HEARD: u8 = 5;
const OVER: u8 = 6;
const MINORITY: u8 = 7;
const ABSENT: u8 = 8;
const LEAVE: u8 = 9;
/// Added to the kind of a report with an accepted proposal.
const ACCEPTED: u8 = 0x80;
/// Added besides where that was decided.
const DECIDED: u8 = 0x40;

/// Kind, leader, round, two numbers of collectives.
const HEAD: usize = 1 + 4 + 4 + 8 + 8;

/// All that messages have; what one does not have is 0.
#[derive(Default)]
struct Fields {
    kind: u8,
    ballot: Ballot,
    ended: u64,
    decision: Decision,
    others: BTreeSet<Rank>,
}

impl Message {
    /// The bytes of each message of a group of `world` ranks: a head, and two sets of ranks with a bit for each.
    pub(crate) fn length(world: usize) -> usize {
        HEAD + 2 * world.div_ceil(8)
    }

    pub(crate) fn to_bytes(&self, world: usize) -> Vec<u8> {
        let fields = self.fields();
        let mut bytes = Vec::with_capacity(Self::length(world));
        bytes.push(fields.kind);
        bytes.extend(fields.ballot.leader.to_le_bytes());
        bytes.extend(fields.ballot.round.to_le_bytes());
        bytes.extend(fields.ended.to_le_bytes());
        bytes.extend(fields.decision.ended.to_le_bytes());
        for set in [&fields.decision.living, &fields.others] {
            let start = bytes.len();
            bytes.resize(start + world.div_ceil(8), 0);
            set.iter()
                .for_each(|rank| bytes[start + rank / 8] |= 1 << (rank % 8));
        }
        bytes
    }

    /// The message that is written like that in a group of `world` ranks, if there is one.
    pub(crate) fn from_bytes(bytes: &[u8], world: usize) -> Option<Self> {
        if bytes.len() != Self::length(world) {
            return None;
        }
        let (head, sets) = bytes.split_first_chunk::<HEAD>()?;
        let (living, others) = sets.split_at(world.div_ceil(8));
        let set = |bits: &[u8]| {
            let has = |rank: &Rank| bits[rank / 8] & 1 << (rank % 8) != 0;
            (0..world).filter(has).collect()
        };
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| head[at + byte]));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let message = Self::of(Fields {
            kind: head[0],
            ballot: Ballot {
                leader: word(1),
                round: word(5),
            },
            ended: long(9),
            decision: Decision {
                living: set(living),
                ended: long(17),
            },
            others: set(others),
        })?;
        // Nothing is passed over.
        (message.to_bytes(world) == bytes).then_some(message)
    }

    fn fields(&self) -> Fields {
        let mut fields = Fields::default();
        match self.clone() {
            Self::Report {
                excluded,
                ended,
                accepted,
                is_decided,
            } => {
                fields.kind = REPORT | if is_decided { DECIDED } else { 0 };
                (fields.others, fields.ended) = (excluded, ended);
                if let Some((ballot, decision)) = accepted {
                    fields.kind |= ACCEPTED;
                    (fields.ballot, fields.decision) = (ballot, decision);
                }
            }
            Self::Propose(ballot, decision) => {
                fields.kind = PROPOSE;
                (fields.ballot, fields.decision) = (ballot, decision);
            }
            Self::Accept(ballot) => (fields.kind, fields.ballot) = (ACCEPT, ballot),
            Self::Decide(decision) => (fields.kind, fields.decision) = (DECIDE, decision),
            Self::Heard => fields.kind = HEARD,
            Self::Over => fields.kind = OVER,
            Self::Refuse(Refusal::Minority(ranks)) => {
                (fields.kind, fields.others) = (MINORITY, ranks);
            }
            Self::Refuse(Refusal::Absent(ranks)) => (fields.kind, fields.others) = (ABSENT, ranks),
            Self::Leave => fields.kind = LEAVE,
        }
        fields
    }

    fn of(fields: Fields) -> Option<Self> {
        let Fields {
            kind,
            ballot,
            ended,
            decision,
            others,
        } = fields;
        Some(match kind {
            REPORT => Self::Report {
                excluded: others,
                ended,
                accepted: None,
                is_decided: false,
            },
            kind if kind & !DECIDED == REPORT | ACCEPTED => Self::Report {
                excluded: others,
                ended,
                accepted: Some((ballot, decision)),
                is_decided: kind & DECIDED != 0,
            },
            PROPOSE => Self::Propose(ballot, decision),
            ACCEPT => Self::Accept(ballot),
            DECIDE => Self::Decide(decision),
            HEARD => Self::Heard,
            OVER => Self::Over,
            MINORITY => Self::Refuse(Refusal::Minority(others)),
            ABSENT => Self::Refuse(Refusal::Absent(others)),
            LEAVE => Self::Leave,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_read_as_it_was_written() {
        let ranks = |ranks: &[Rank]| ranks.iter().copied().collect::<BTreeSet<_>>();
        let ballot = Ballot {
            leader: 3,
            round: 1 << 20,
        };
        let decision = Decision {
            living: ranks(&[0, 7, 8, 10]),
            ended: u64::MAX - 3,
        };
        let report = |accepted, is_decided| Message::Report {
            excluded: ranks(&[2, 9]),
            ended: 1 << 40,
            accepted,
            is_decided,
        };
        for message in [
            report(None, false),
            report(Some((ballot, decision.clone())), false),
            report(Some((ballot, decision.clone())), true),
            Message::Propose(ballot, decision.clone()),
            Message::Accept(ballot),
            Message::Decide(decision),
            Message::Heard,
            Message::Over,
            Message::Refuse(Refusal::Minority(ranks(&[1, 10]))),
            Message::Refuse(Refusal::Absent(ranks(&[4]))),
            Message::Leave,
        ] {
            let bytes = message.to_bytes(11);
            assert_eq!(bytes.len(), Message::length(11));
            assert_eq!(Message::from_bytes(&bytes, 11), Some(message));
        }
    }

    #[test]
    fn nothing_else_is_read() {
        let bytes = Message::Heard.to_bytes(11);
        assert_eq!(Message::from_bytes(&bytes[1..], 11), None);
        // A field that it does not have, a rank that is not there, and no kind.
        for (at, value) in [(5, 1), (HEAD + 1, 1 << 3), (0, 0), (0, 99)] {
            let mut bytes = bytes.clone();
            bytes[at] = value;
            assert_eq!(Message::from_bytes(&bytes, 11), None, "{at}");
        }
    }
}
