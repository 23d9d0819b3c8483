//! The links of a group: opened when first needed, by whichever side needs them first.

use std::time::Instant;

use crate::buffer::Memory;
use crate::error::{Code, Error, Result};
use crate::transport::endpoint::Lane;
use crate::transport::{Interest, Link, PeerState};
use crate::types::Rank;

use super::wire::HEADER;

/// A link and what the engine knows of it.
pub(crate) enum Slot {
    /// Nobody has needed it yet.
    Closed,
    /// A connection is being made: by us, or by the peer, whose attempt ours gave way to at that time (`awaited`).
    Opening { awaited: Option<Instant> },
    /// Ready.
    Open(OpenLink),
    /// It could not be opened.
    Unreachable(Error),
}

/// A link in use.
pub(crate) struct OpenLink {
    pub(crate) link: Box<dyn Link>,
    /// The longest message, with its header, that the link carries whole.
    pub(crate) post_limit: usize,
    /// The header of the message now arriving, as far as it has come.
    pub(crate) header: [u8; HEADER],
    pub(crate) header_bytes: usize,
    /// What to wake for; rebuilt before each sleep.
    pub(crate) interest: Interest,
    /// The peer's state when last looked at, while it was not `Present`.
    pub(crate) ended: Option<PeerState>,
}

impl OpenLink {
    fn new(link: Box<dyn Link>) -> Self {
        Self {
            post_limit: link.post_limit(),
            link,
            header: [0; HEADER],
            header_bytes: 0,
            interest: Interest::default(),
            ended: None,
        }
    }

    /// Reads on until the header of a streamed message is complete.
    pub(crate) fn read_header(&mut self) -> Result<bool> {
        if self.header_bytes == 0 && !self.link.is_streaming()? {
            return Ok(false);
        }
        while self.header_bytes < HEADER {
            match self.link.try_recv(&mut self.header[self.header_bytes..])? {
                0 => return Ok(false),
                n => self.header_bytes += n,
            }
        }
        Ok(true)
    }
}

/// All links of a group, by lane and peer.
pub(crate) struct LinkTable {
    slots: [Vec<Slot>; 2],
}

impl LinkTable {
    pub(crate) fn new(world: usize) -> Self {
        let row = || (0..world).map(|_| Slot::Closed).collect();
        Self {
            slots: [row(), row()],
        }
    }

    pub(crate) fn slot(&mut self, lane: Lane, peer: Rank) -> &mut Slot {
        &mut self.slots[lane as usize][peer]
    }

    /// The open link to `peer`, if there is one.
    pub(crate) fn open(&mut self, lane: Lane, peer: Rank) -> Option<&mut OpenLink> {
        match self.slot(lane, peer) {
            Slot::Open(open) => Some(open),
            _ => None,
        }
    }

    /// Puts an established link in its place.
    pub(crate) fn establish(&mut self, lane: Lane, peer: Rank, link: Box<dyn Link>) {
        *self.slot(lane, peer) = Slot::Open(OpenLink::new(link));
    }

    /// Every open link with its peer.
    pub(crate) fn iter_open(&mut self) -> impl Iterator<Item = (Lane, Rank, &mut OpenLink)> {
        let [collective, point_to_point] = &mut self.slots;
        collective
            .iter_mut()
            .enumerate()
            .map(|(peer, slot)| (Lane::Collective, peer, slot))
            .chain(
                point_to_point
                    .iter_mut()
                    .enumerate()
                    .map(|(peer, slot)| (Lane::PointToPoint, peer, slot)),
            )
            .filter_map(|(lane, peer, slot)| match slot {
                Slot::Open(open) => Some((lane, peer, open)),
                _ => None,
            })
    }
}

/// The error of an operation that needs `peer` after its link has ended, or `None` while it has not.
pub(crate) fn loss(state: &PeerState, peer: Rank, label: &str) -> Option<Error> {
    let error = match state {
        PeerState::Present => return None,
        PeerState::Left => Error::new(
            Code::PeerLost,
            format!(
                "rank {peer} ({label}) has left the group in good order while this operation still needs it; \
                 does every rank call the same operations before it closes its communicator?"
            ),
        ),
        PeerState::Lost(seen) => Error::new(
            Code::PeerLost,
            format!(
                "rank {peer} ({label}) is gone ({seen}): its process has ended or its host cannot be reached; \
                 look at that rank's own output for the cause"
            ),
        ),
        PeerState::Aborted(notice) => {
            let culprit = notice.culprit.map(|rank| rank as Rank);
            let mut error = Error::new(notice.code, notice.message.clone());
            error.peer = culprit;
            return Some(error);
        }
    };
    Some(error.with_peer(peer))
}

/// The pieces of a payload that is lent.
#[derive(Default)]
pub(super) struct Runs {
    runs: [(usize, usize); 24],
    count: usize,
}

impl Runs {
    /// Finds the pieces of `length` bytes from `offset` on. False when there are more than `most`.
    pub(super) fn fill(
        &mut self,
        memory: &Memory,
        offset: usize,
        length: usize,
        most: usize,
    ) -> bool {
        let mut done = 0;
        while done < length {
            if self.count == most.min(self.runs.len()) {
                return false;
            }
            let run = memory.place(offset + done, length - done);
            self.runs[self.count] = run;
            self.count += 1;
            done += run.1;
        }
        true
    }

    pub(super) fn as_slice(&self) -> &[(usize, usize)] {
        &self.runs[..self.count]
    }
}
