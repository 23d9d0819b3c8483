//! Finds counts that differ between two ranks where no other rank knows them.
//!
//! In an `all_to_all`, a `gather` or a `scatter` with counts of their own, ranks know no more than what they send and
//! receive themselves. Two that have nothing for each other exchange nothing, not even a link, so that an exchange with
//! a few neighbours costs what the neighbours cost. But a rank that has nothing for a peer would never learn that the
//! peer's counts differ. So the engine looks for that beside the messages, without waiting:
//!
//! - A rank that has waited for long tells the peers that it waits for how much it expects from them and has for them
//!   ([`crate::engine::group::deadlock`]). A peer that had nothing there knows then that the two differ.
//! - A message that is at the head of a link, and of an operation in which it is not expected, is a *stray*. The next
//!   receive from that peer finds it; until then the rank looks for strays now and then.
//!
//! A waiting rank looks for both. For a rank that does not wait the progress thread does
//! ([`crate::engine::drive::idle_groups`]).
//!
//! # Remembered operations
//!
//! For each peer the last such operation in which there was a message for it, and the last in which there was one from
//! it. That is enough to judge any operation before: say that the peer waits for a message of operation 7. If the
//! last message for it was of operation 5, there was none in operation 7. If it was of operation 9, the peer finds
//! that one where it waits for that of operation 7, and knows by itself, since messages come in the order of their
//! operations. The same holds the other way round.

use std::time::Instant;

use crate::engine::links::Direction;
use crate::types::Rank;

/// A record of a group's operations in which only the two ranks involved know the counts between them.
#[derive(Debug)]
pub(crate) struct Pairs {
    /// The last such operation.
    last: u64,
    /// By rank, the last one that had a message for it; 0 for none.
    pub(crate) sent: Vec<u64>,
    /// By rank, the last one that expected a message from it; 0 for none.
    pub(crate) expected: Vec<u64>,
    /// When to look for strays again.
    pub(crate) next_look: Option<Instant>,
    /// The progress thread looks after this group.
    pub(crate) is_ward: bool,
}

/// The state in which the progress thread finds a group that it looks after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outlook {
    /// It is closed or dead.
    Over,
    /// It works.
    Busy,
    /// It has done nothing since the last time, and its links ring when something comes.
    Quiet,
}

impl Pairs {
    pub(crate) fn new(world: usize) -> Self {
        Self {
            last: 0,
            sent: vec![0; world],
            expected: vec![0; world],
            next_look: None,
            is_ward: false,
        }
    }

    /// Operation `sequence` uses these directions of links.
    pub(crate) fn note(
        &mut self,
        sequence: u64,
        directions: impl Iterator<Item = (Rank, Direction)>,
    ) {
        self.last = sequence;
        for (peer, direction) in directions {
            match direction {
                Direction::Send => self.sent[peer] = sequence,
                Direction::Receive => self.expected[peer] = sequence,
                Direction::Meet => {}
            }
        }
    }

    /// Whether `peer` may have sent what this rank has not expected.
    pub(crate) fn may_stray(&self, peer: Rank) -> bool {
        self.expected[peer] < self.last
    }

    /// Whether there has been nothing for `peer`, or from it, in the last operation.
    pub(crate) fn is_silent(&self, peer: Rank) -> bool {
        self.may_stray(peer) || self.sent[peer] < self.last
    }
}
