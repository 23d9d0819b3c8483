//! The services of a group for the operations on device memory that stand on it: its peers' state, its pages, its end.

use std::sync::Arc;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::transport::endpoint::Lane;
use crate::transport::{Page, PeerState};
use crate::types::Rank;

use crate::engine::collective::header::Fingerprint;
use crate::engine::links::{Slot, loss};
use crate::engine::reports::Print;
use crate::engine::state::Group;
use crate::engine::work::WorkState;

/// The name of a group in all its members, for as long as the job runs.
pub(crate) type GroupId = [u8; 16];

impl Group {
    pub(crate) fn identity(&self) -> GroupId {
        self.membership.key.id()
    }

    /// The page shared with `peer`, once the link to it for collectives is open and if it has one.
    pub(crate) fn page(&self, peer: Rank) -> Option<Page> {
        self.page_of(Lane::Collective, peer)
    }

    /// As [`Group::page`], of the link for messages.
    pub(crate) fn message_page(&self, peer: Rank) -> Option<Page> {
        self.page_of(Lane::PointToPoint, peer)
    }

    /// The error of this rank's operation and another one of `peer`'s in its place.
    pub(crate) fn mismatch(
        &self,
        (ours, theirs): (&Fingerprint, &Fingerprint),
        peer: Rank,
    ) -> Error {
        ours.mismatch(theirs, (self.rank, peer), &self.membership.members)
    }

    /// Has the link for messages to `peer` opened.
    ///
    /// # Errors
    /// Why it cannot be.
    pub(crate) fn open_message_link(&self, peer: Rank) -> Result<()> {
        let mut core = self.core.lock();
        self.read_mail(&mut core);
        self.ensure_link(&mut core, Lane::PointToPoint, peer);
        match core.links.slot(Lane::PointToPoint, peer) {
            Slot::Unreachable(error) => Err((**error).clone()),
            _ => Ok(()),
        }
    }

    /// Whether the link for messages to `peer` is open.
    pub(crate) fn has_message_link(&self, peer: Rank) -> bool {
        let mut core = self.core.lock();
        self.read_mail(&mut core);
        core.links.open(Lane::PointToPoint, peer).is_some()
    }

    fn page_of(&self, lane: Lane, peer: Rank) -> Option<Page> {
        let mut core = self.core.lock();
        self.read_mail(&mut core);
        let link = &mut core.links.open(lane, peer)?.link;
        link.neighbour().map(|neighbour| neighbour.page())
    }

    /// Why the operation that is under way cannot end: the first peer that is gone, or an abort that a peer has told of,
    /// or the group's own failure. Of the peers that have left in good order only those matter that it `needs`.
    ///
    /// The group looks after its own operations; this is for what goes past it, on a device.
    pub(crate) fn lost(&self, needs: impl Fn(Rank) -> bool) -> Option<Error> {
        if let Some(error) = self.error() {
            return Some(error);
        }
        let mut core = self.core.lock();
        self.read_mail(&mut core);
        let mut found = None;
        for (_, peer, open) in core.links.iter_open() {
            let state = match &open.ended {
                Some(state) => state.clone(),
                None => open.link.peer_state(),
            };
            match state {
                PeerState::Present => continue,
                // Left to the group as well, should it be waiting.
                PeerState::Aborted(_) => {}
                _ => open.end(state.clone(), self.clock.now()),
            }
            if state == PeerState::Left && !needs(peer) {
                continue;
            }
            let error = loss(&state, self.world, (peer, &self.name_of(peer)));
            // A peer's notice of the cause tells more than the loss of another peer.
            if found.is_none() || matches!(state, PeerState::Aborted(_)) {
                found = error;
            }
        }
        found
    }

    /// The group fails with `error`: so does every operation, and the other ranks get a notice. The first cause stays.
    pub(crate) fn fail_of(&self, error: Error) {
        if self.home.is_here() && self.error().is_none() && !self.is_closed() {
            self.fail(&mut self.core.lock(), error);
        }
    }

    /// Ends an operation that is not the engine's, and has its completion called.
    pub(crate) fn end(&self, work: &WorkState, result: Result<()>) {
        if let Some((completion, result)) = work.finish(result, self.clock.now()) {
            self.staff.completions.tell(completion, result);
        }
    }

    /// Keeps an operation that is not the engine's for reports.
    pub(crate) fn keep_record(&self, work: &Arc<WorkState>) {
        // Not worth waiting for: another thread may be in the middle of a long step.
        if let Some(mut core) = self.core.try_lock() {
            core.recorder.record(work, Print::Named);
        }
    }

    /// Whether all ranks are on one host.
    pub(crate) fn is_on_one_host(&self) -> bool {
        !self.membership.topology.spans_hosts()
    }

    /// The host of each rank, as numbers from 0 in the order of their first ranks.
    pub(crate) fn host_of(&self) -> &[usize] {
        &self.membership.topology.host_of
    }

    /// Whether no lower rank is on this one's host.
    pub(crate) fn is_first_of_host(&self) -> bool {
        let hosts = &self.membership.topology.host_of;
        !hosts[..self.rank].contains(&hosts[self.rank])
    }

    /// The settings it was made with.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }
}
