//! The positions that waiting ranks tell each other: the operation each one is in, and the bytes it waits for.
//!
//! Every message carries its operation's fingerprint, but ranks that all wait to receive send none: two ranks that
//! each take the other for the root of a `reduce`, say. So a rank that has waited for a while tells its operation to
//! the peers that it waits for, on the control channel, and repeats that at doubling intervals. The peer compares it
//! with its own operation of that number, also with one that has ended, and keeps what it was told until there is one.
//! The message also says how much the sender expects from the peer, or has for it: see
//! [`crate::engine::collective::pair_counts`].

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::error::{Code, Error};
use crate::transport::Notice;
use crate::transport::endpoint::Lane;
use crate::types::Rank;

use crate::engine::collective::header::{Fingerprint, Told};
use crate::engine::group::step::visit_waits;
use crate::engine::links::{Direction, as_told};
use crate::engine::state::{Core, Group};

/// How long an operation has been under way when its position is first told.
pub(crate) const TOLD_AFTER: Duration = Duration::from_millis(250);

impl Group {
    /// Tells the peers for which operations have waited a while what those operations are.
    pub(crate) fn tell_positions(&self, core: &mut Core, now: Instant) {
        if core.operations.iter().all(|operation| now < operation.tell) {
            return;
        }
        // Of several operations that wait for a peer, the peer would only hear of the last.
        let mut telling = FxHashMap::default();
        visit_waits(core, |operation, waiting| {
            if now < operation.tell {
                return;
            }
            let fingerprint = operation.run.fingerprint();
            let told = telling.entry(waiting.peer).or_insert(Told {
                fingerprint,
                expects: 0,
                sends: 0,
            });
            if told.fingerprint.sequence != fingerprint.sequence {
                return;
            }
            let bytes = waiting.of as u64;
            match waiting.direction {
                Direction::Receive if waiting.bytes == 0 => told.expects = told.expects.max(bytes),
                Direction::Send => told.sends = told.sends.max(bytes),
                Direction::Receive | Direction::Meet => {}
            }
        });
        for (peer, told) in telling {
            if let Some(open) = core.links.open(Lane::Collective, peer)
                && open.ended.is_none()
            {
                open.link.send_position(&told.encode());
            }
        }
        for operation in &mut core.operations {
            if now >= operation.tell {
                operation.tell = now + now.saturating_duration_since(operation.work.started);
            }
        }
    }

    /// Replaces an error by its cause, where that is known. A mismatch of two operations' numbers becomes the difference that
    /// led to it. An error about memory that a peer has withdrawn becomes the peer's notice that it has ended the group, which
    /// comes before and has not been read.
    pub(crate) fn explained(&self, core: &mut Core, error: Error) -> Error {
        if error.code == Code::Untrusted
            && let Some(peer) = error.peer
            && let Some(notice) = self.notice_from(core, peer)
        {
            let told = as_told(&notice, self.world, (peer, &self.name_of(peer)));
            return Error {
                operation: error.operation,
                ..told
            };
        }
        let (Code::Mismatch, Some(peer)) = (error.code, error.peer) else {
            return error;
        };
        let header = core
            .links
            .open(Lane::Collective, peer)
            .map(|open| open.header);
        let theirs = header.and_then(|header| Fingerprint::decode(&header));
        let first = theirs.and_then(|theirs| self.contradiction(core, peer, &theirs));
        match first {
            Some(first) => Error {
                operation: error.operation,
                ..first
            },
            None => error,
        }
    }

    /// The notice by which `peer` has ended the group, if it has.
    fn notice_from(&self, core: &mut Core, peer: Rank) -> Option<Notice> {
        let now = self.clock.now();
        let links = core.links.iter_open().filter(|(_, of, _)| *of == peer);
        links.filter_map(|(_, _, open)| open.look(now)).next()
    }

    /// The error of a `peer` whose operation differs from this rank's operation of the same number.
    pub(crate) fn contradiction(
        &self,
        core: &Core,
        peer: Rank,
        theirs: &Fingerprint,
    ) -> Option<Error> {
        let theirs = Fingerprint {
            length: 0,
            ..*theirs
        };
        let under_way = core
            .operations
            .iter()
            .map(|operation| operation.run.fingerprint())
            .find(|ours| ours.sequence == theirs.sequence);
        let ours = under_way.or_else(|| core.recorder.fingerprint(theirs.sequence))?;
        (ours != theirs)
            .then(|| ours.mismatch(&theirs, (self.rank, peer), &self.membership.members))
    }

    /// Compares the positions that peers have sent with what this rank does. A position in an operation that this rank
    /// has not begun is kept until it has.
    pub(crate) fn contradiction_told(&self, core: &mut Core) -> Option<Error> {
        let mut positions = Vec::new();
        for (lane, peer, open) in core.links.iter_open() {
            if lane == Lane::Collective
                && let Some(told) = open.told
                && told.fingerprint.sequence <= core.sequence
            {
                open.told = None;
                positions.push((peer, told));
            }
        }
        positions.into_iter().find_map(|(peer, told)| {
            let different = self.contradiction(core, peer, &told.fingerprint);
            different.or_else(|| self.one_sided(core, peer, &told))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::Communicator;
    use crate::config::Config;

    /// A peer that ends the group takes back its memory. A rank that was stopped meanwhile finds that first.
    #[test]
    fn memory_taken_back_after_an_abort_is_the_abort() {
        let ranks = Communicator::local(3, &Config::default()).unwrap();
        let group = ranks[0].group();
        let mut core = group.core.lock();
        group.read_mail(&mut core);
        let refused = |peer| Error::new(Code::Untrusted, "no such segment").with_peer(peer);
        ranks[1].abort("enough");
        let explained = group.explained(&mut core, refused(1));
        assert_eq!(explained.code, Code::Aborted, "{explained}");
        assert!(explained.message.contains("enough"), "{explained}");
        let other = group.explained(&mut core, refused(2));
        assert_eq!((other.code, other.peer), (Code::Untrusted, Some(2)));
    }
}
