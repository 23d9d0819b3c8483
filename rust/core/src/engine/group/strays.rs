//! Messages that a peer has sent and this rank does not expect, and those that it waits for and this rank does not have:
//! see [`crate::engine::collective::pair_counts`].

use std::time::{Duration, Instant};

use crate::error::Error;
use crate::transport::Interest;
use crate::transport::endpoint::Lane;
use crate::types::Rank;

use crate::engine::collective::header::{Fingerprint, Told};
use crate::engine::collective::pair_counts::{Outlook, Pairs};
use crate::engine::links::Direction;
use crate::engine::state::{Core, Group};

/// How long a rank that waits leaves the heads of its links alone, after it has looked for strays.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

impl Group {
    /// Takes note of an operation that begins, if two ranks alone know what goes between them.
    pub(crate) fn note_pairs(
        &self,
        core: &mut Core,
        fingerprint: &Fingerprint,
        directions: impl Iterator<Item = (Rank, Direction)>,
    ) {
        if !fingerprint.is_between_pairs() || self.world == 1 {
            return;
        }
        let pairs = core
            .pairs
            .get_or_insert_with(|| Box::new(Pairs::new(self.world)));
        pairs.note(fingerprint.sequence, directions);
        let is_silent = || (0..self.world).any(|peer| peer != self.rank && pairs.is_silent(peer));
        if !pairs.is_ward && is_silent() {
            pairs.is_ward = true;
            let group = self.this.clone();
            self.staff.progress.look_after(self.number, group);
        }
    }

    /// The error of a `peer` that waits for a message that this rank does not have for it, or has one for this rank
    /// that it does not expect.
    pub(crate) fn one_sided(&self, core: &Core, peer: Rank, told: &Told) -> Option<Error> {
        let theirs = &told.fingerprint;
        let pairs = core.pairs.as_ref()?;
        if !theirs.is_between_pairs() || theirs.sequence > core.sequence {
            return None;
        }
        let members = &self.membership.members;
        let (sent, expected) = (pairs.sent[peer], pairs.expected[peer]);
        let error = if told.expects > 0 && sent < theirs.sequence {
            theirs.one_sided((self.rank, 0), (peer, told.expects), members)
        } else if told.sends > 0 && expected < theirs.sequence {
            theirs.one_sided((peer, told.sends), (self.rank, 0), members)
        } else {
            return None;
        };
        Some(error.with_peer(peer).with_operation(theirs.name()))
    }

    /// As [`Group::stray`], unless it was looked for a moment ago.
    pub(crate) fn stray_now_and_then(&self, core: &mut Core, now: Instant) -> Option<Error> {
        let pairs = core.pairs.as_mut()?;
        if pairs.next_look.is_some_and(|due| now < due) {
            return None;
        }
        pairs.next_look = Some(now + LOOK_INTERVAL);
        self.stray(core)
    }

    /// The error of a message that has come and that no operation expects.
    fn stray(&self, core: &mut Core) -> Option<Error> {
        (0..self.world).find_map(|peer| self.stray_from(core, peer))
    }

    fn stray_from(&self, core: &mut Core, peer: Rank) -> Option<Error> {
        let pairs = core.pairs.as_ref()?;
        let expected = pairs.expected[peer];
        let direction = (peer, Direction::Receive);
        let has_left = core
            .operations
            .iter()
            .all(|operation| operation.run.has_left(direction));
        // An operation that still receives from the peer reads what comes next.
        if !pairs.may_stray(peer) || !has_left {
            return None;
        }
        let open = core.links.open(Lane::Collective, peer)?;
        if open.header_bytes > 0 {
            return None;
        }
        let theirs = match open.link.peek() {
            Ok(header) => Fingerprint::decode(&header?)?,
            Err(error) => return Some(error),
        };
        if theirs.sequence > core.sequence {
            return None;
        }
        let different = self.contradiction(core, peer, &theirs);
        different.or_else(|| {
            (theirs.is_between_pairs() && expected < theirs.sequence).then(|| {
                let sent = (peer, theirs.length);
                let error = theirs.one_sided(sent, (self.rank, 0), &self.membership.members);
                error.with_peer(peer).with_operation(theirs.name())
            })
        })
    }

    /// Looks at what comes from peers without being waited for, for a group that no thread drives. `seen` is how many
    /// operations there had been the last time.
    pub(crate) fn look_for_strays(&self, core: &mut Core, seen: &mut u64) -> Outlook {
        let count = core.sequence + core.messages;
        let is_new = std::mem::replace(seen, count) != count;
        if core.leader || core.is_busy() {
            // The thread that drives it does this.
            return Outlook::Busy;
        }
        // Everything that comes from here on wakes the thread.
        self.parker.clear();
        if self.has_mail() {
            self.read_mail(core);
        }
        let silent: Vec<Rank> = match &core.pairs {
            Some(pairs) => (0..self.world)
                .filter(|peer| pairs.is_silent(*peer))
                .collect(),
            None => Vec::new(),
        };
        for peer in &silent {
            let Some(open) = core.links.open(Lane::Collective, *peer) else {
                continue;
            };
            open.link.disarm();
            if let Some(notice) = open.look(self.clock.now()) {
                self.end_as(core, *peer, &notice);
                return Outlook::Over;
            }
        }
        let contradiction = self.contradiction_told(core);
        if let Some(error) = contradiction.or_else(|| self.stray(core)) {
            self.fail(core, error);
            return Outlook::Over;
        }
        if is_new {
            return Outlook::Busy;
        }
        for peer in silent {
            let Some(open) = core.links.open(Lane::Collective, peer) else {
                continue;
            };
            let reading = Interest {
                readable: true,
                writable: false,
            };
            if open.ended.is_none() && open.link.arm(reading) {
                // It came while this looked; or it is of an operation to come.
                open.link.disarm();
                if let Some(error) = self.stray_from(core, peer) {
                    self.fail(core, error);
                    return Outlook::Over;
                }
            }
        }
        Outlook::Quiet
    }
}
