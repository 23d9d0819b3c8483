//! The services of a group for the windows that stand on it: the memory of its peers on this host, and short waits.

use std::sync::Weak;

use crate::engine::drive::blocking::Turn;
use crate::engine::state::Group;
use crate::engine::waits::OnGroup;
use crate::error::Result;
use crate::heap::{Held, IsOver, Place};
use crate::transport::endpoint::Lane;
use crate::transport::{Page, Shareable};
use crate::types::Rank;

impl Group {
    /// The status of the group tells of `window` from now on.
    pub(crate) fn tell_of(&self, window: Weak<dyn OnGroup>) {
        let _ = self.window.set(window);
    }

    /// Whether `peer` reaches `bytes` bytes from the address `start` on where they lie; `None` until it has said so. The link
    /// for messages to it is open.
    pub(crate) fn is_reached(&self, peer: Rank, (start, bytes): (usize, usize)) -> Option<bool> {
        let mut core = self.core.lock();
        match core.links.open(Lane::PointToPoint, peer) {
            Some(open) => open.link.can_share(Shareable::Span((start, bytes))),
            None => Some(false),
        }
    }

    /// The memory of `peer`, which [is reached](Group::is_reached) from here.
    ///
    /// # Errors
    /// `Untrusted` when `peer` has not said so.
    pub(crate) fn reach(&self, peer: Rank, place: Place, bytes: usize) -> Result<Option<Held>> {
        let mut core = self.core.lock();
        match core.links.open(Lane::PointToPoint, peer) {
            Some(open) => open.link.reach(place, bytes),
            None => Ok(None),
        }
    }

    /// The page shared with `peer`, where it is on this host, and whether its program is gone.
    pub(crate) fn page_and_end(&self, peer: Rank) -> Option<(Page, IsOver)> {
        let page = self.message_page(peer)?;
        let mut core = self.core.lock();
        let link = &mut core.links.open(Lane::PointToPoint, peer)?.link;
        let end = link.neighbour()?.end_of_program();
        Some((page, end))
    }

    /// Looks whether something `is_there`, as long as that takes no sleep. Returns whether it is.
    pub(crate) fn look_until(&self, is_there: impl Fn() -> bool) -> Result<bool> {
        let mut core = self.core.lock();
        if is_there() {
            core.backoff.reset();
            return Ok(true);
        }
        // A wait in parts has looked for long enough when it sleeps.
        if core.leader || core.backoff.is_asleep() {
            return Ok(false);
        }
        self.patiently(&mut core, |_| {
            Ok(match is_there() {
                true => Turn::Over(true),
                false => Turn::Idle,
            })
        })
    }
}
