//! What waiting ranks tell each other: the operation each one is in.
//!
//! Every message carries its operation's fingerprint, but ranks that all wait to receive send none: two ranks that
//! each take the other for the root of a `reduce`, say. So whoever has waited for a while tells those it waits for
//! what it is in, on the control channel, and goes on doing so at doubling intervals. Whoever hears it compares it
//! with its own operation of that number, also with one that has ended.

use std::time::{Duration, Instant};

use crate::error::{Code, Error};
use crate::transport::Position;
use crate::transport::endpoint::Lane;
use crate::types::Rank;

use super::group::{Core, Group};
use super::step::visit_waits;
use super::wire::Fingerprint;

/// How long an operation has been under way when its position is first told.
pub(super) const TOLD_AFTER: Duration = Duration::from_millis(250);

impl Group {
    /// Tells the peers of operations that have waited for a while what this rank is in.
    pub(super) fn tell_positions(&self, core: &mut Core) {
        let now = Instant::now();
        if core.operations.iter().all(|operation| now < operation.tell) {
            return;
        }
        let mut telling = Vec::new();
        visit_waits(core, |operation, waiting| {
            if now >= operation.tell {
                telling.push((waiting.peer, operation.execution.fingerprint()));
            }
        });
        for (peer, fingerprint) in telling {
            if let Some(open) = core.links.open(Lane::Collective, peer)
                && open.ended.is_none()
            {
                open.link.send_position(&fingerprint.encode());
            }
        }
        for operation in &mut core.operations {
            if now >= operation.tell {
                operation.tell = now + operation.work.started.elapsed();
            }
        }
    }

    /// A mismatch of the numbers of two operations, told as the difference that led to it where that is known still.
    pub(super) fn explained(&self, core: &mut Core, error: Error) -> Error {
        let (Code::Mismatch, Some(peer)) = (error.code, error.peer) else {
            return error;
        };
        let header = core
            .links
            .open(Lane::Collective, peer)
            .map(|open| open.header);
        let first = header.and_then(|header| self.contradiction(core, peer, &header));
        match first {
            Some(first) => Error {
                operation: error.operation,
                ..first
            },
            None => error,
        }
    }

    /// The error of a `peer` that is in `position`, if this rank's operation of that number is another one.
    pub(super) fn contradiction(
        &self,
        core: &Core,
        peer: Rank,
        position: &Position,
    ) -> Option<Error> {
        let theirs = Fingerprint {
            length: 0,
            ..Fingerprint::decode(position)?
        };
        let under_way = core
            .operations
            .iter()
            .map(|operation| operation.execution.fingerprint())
            .find(|ours| ours.sequence == theirs.sequence);
        let ours = under_way.or_else(|| core.recorder.fingerprint(theirs.sequence))?;
        (ours != theirs).then(|| ours.mismatch(&theirs, self.rank, peer))
    }
}
