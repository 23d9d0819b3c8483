//! The links of a group: opened when first needed, by whichever side needs them first.

use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::buffer::Memory;
use crate::error::{Code, Error, Result};
use crate::heap::{Held, Place};
use crate::transport::endpoint::Lane;
use crate::transport::{
    Interest, Lending, Link, Loan, MESSAGE_HEADER, Neighbour, Notice, PeerState, Shareable,
    SharedSpan, Terms, Ticket,
};
use crate::types::Rank;

use crate::engine::collective::header::{HEADER, Told};

/// Which way a step uses its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Direction {
    Send,
    Receive,
    /// Neither: the ranks meet in memory.
    Meet,
}

/// The wait of a step: its peer, direction and progress, for reports and for deciding what to wake for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub(crate) peer: Rank,
    pub(crate) direction: Direction,
    pub(crate) bytes: usize,
    pub(crate) of: usize,
}

/// Where the link to a peer stands.
pub(crate) enum Slot {
    /// Not needed yet.
    Closed,
    /// A connection is being made: by us, or by the peer, whose attempt ours gave way to at that time (`awaited`).
    Opening { awaited: Option<Instant> },
    /// Ready.
    Open(Box<OpenLink>),
    /// It could not be opened.
    Unreachable(Box<Error>),
}

/// A link in use.
pub(crate) struct OpenLink {
    pub(crate) link: PeerLink,
    /// The longest message, with its header, that the link carries whole.
    pub(crate) post_limit: usize,
    /// The header of the message now arriving, as far as it has come.
    pub(crate) header: [u8; HEADER],
    pub(crate) header_bytes: usize,
    /// The events to wake for; rebuilt before each sleep.
    pub(crate) interest: Interest,
    /// The peer's state when last looked at, while it was not `Present`.
    pub(crate) ended: Option<PeerState>,
    /// Since when.
    ended_since: Option<Instant>,
    /// The position that the peer has sent, if it has not been compared.
    pub(crate) told: Option<Told>,
    /// A thread stays with it until its connections, which the peer has made again, carry bytes.
    pub(crate) is_watched: bool,
    /// How often connections of it have broken and were made again.
    pub(crate) mended: u64,
}

impl OpenLink {
    fn new(link: PeerLink) -> Self {
        Self {
            post_limit: link.post_limit(),
            link,
            header: [0; HEADER],
            header_bytes: 0,
            interest: Interest::default(),
            ended: None,
            ended_since: None,
            told: None,
            is_watched: false,
            mended: 0,
        }
    }

    /// Looks at the peer's state and at the position that it has sent. Returns its notice if it has aborted the group.
    pub(crate) fn look(&mut self, now: Instant) -> Option<Notice> {
        if self.ended.is_some() {
            return None;
        }
        let state = self.link.peer_state();
        let position = self.link.take_position();
        self.told = position.and_then(|told| Told::decode(&told)).or(self.told);
        match state {
            PeerState::Present => None,
            PeerState::Aborted(notice) => Some(notice),
            state => {
                self.end(state, now);
                None
            }
        }
    }

    /// The peer's state is this and not `Present`, from now on and for good.
    pub(crate) fn end(&mut self, state: PeerState, now: Instant) {
        self.ended = Some(state);
        self.ended_since = Some(now);
    }

    /// When the peer, if it is lost, has been so for long enough for any link to arrive that it had opened before.
    fn long_lost_at(&self) -> Option<Instant> {
        const LONGEST_ARRIVAL: Duration = Duration::from_secs(2);
        let is_lost = matches!(self.ended, Some(PeerState::Lost(_)));
        Some(self.ended_since.filter(|_| is_lost)? + LONGEST_ARRIVAL)
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

/// A link that knows whose it is: what can fail names the peer. The rest is as [`Link`] has it.
pub(crate) struct PeerLink {
    link: Box<dyn Link>,
    peer: Rank,
    name: String,
}

/// Methods of [`Link`] that can fail, under their own names.
macro_rules! named {
    ($($method:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        impl PeerLink {
            $(
                #[inline]
                pub(crate) fn $method(&mut self, $($argument: $type),*) -> Result<$result> {
                    match self.link.$method($($argument),*) {
                        Ok(result) => Ok(result),
                        Err(error) => Err(self.blame(error)),
                    }
                }
            )*
        }
    };
}

named! {
    try_send(bytes: &[u8]) -> usize;
    try_send_message(header: &[u8], payload: &[u8]) -> usize;
    try_recv(bytes: &mut [u8]) -> usize;
    try_recv_by(copy: &dyn Fn(&mut [u8], &[u8]), bytes: &mut [u8]) -> usize;
    try_fold(max: usize, align: usize, fold: &mut dyn FnMut(&[u8])) -> usize;
    try_post(header: &[u8; MESSAGE_HEADER], payload: &[u8]) -> bool;
    try_stream(header: &[u8; MESSAGE_HEADER], payload: &[u8]) -> bool;
    try_take(take: &mut dyn FnMut(&[u8])) -> bool;
    is_streaming() -> bool;
    peek() -> Option<[u8; MESSAGE_HEADER]>;
}

/// Methods of [`Neighbour`] that can fail, and their result for a peer on another host.
macro_rules! named_of_neighbours {
    ($($method:ident($($argument:ident: $type:ty),*) -> $result:ty, or $absent:expr;)*) => {
        impl PeerLink {
            $(
                pub(crate) fn $method(&mut self, $($argument: $type),*) -> Result<$result> {
                    let Some(neighbour) = self.link.neighbour() else {
                        return Ok($absent);
                    };
                    match neighbour.$method($($argument),*) {
                        Ok(result) => Ok(result),
                        Err(error) => Err(self.blame(error)),
                    }
                }
            )*
        }
    };
}

named_of_neighbours! {
    try_lend(header: &[u8; MESSAGE_HEADER], runs: &[(usize, usize)], terms: Terms) -> Lending, or Lending::Unfit;
    try_share(header: &[u8; MESSAGE_HEADER], what: Shareable<'_>) -> Lending, or Lending::Unfit;
    shared() -> Option<SharedSpan>, or None;
    loan(ticket: Ticket) -> Loan, or Loan::Returned;
    reach(place: Place, bytes: usize) -> Option<Held>, or None;
}

impl PeerLink {
    /// The bounds of a payload that can be lent, if the peer is on this host: the least bytes, and the most pieces.
    pub(crate) fn lends(&mut self) -> Option<(usize, usize)> {
        let neighbour = self.link.neighbour()?;
        Some((neighbour.lends_from(), neighbour.most_lent_runs()))
    }

    /// As [`Neighbour::can_share`]. Nothing can be shared with a peer on another host.
    pub(crate) fn can_share(&mut self, what: Shareable<'_>) -> Option<bool> {
        match self.link.neighbour() {
            Some(neighbour) => neighbour.can_share(what),
            None => Some(false),
        }
    }

    /// Does this with the peer, if it is on this host.
    pub(crate) fn as_neighbour(&mut self, act: impl FnOnce(&mut dyn Neighbour)) {
        if let Some(neighbour) = self.link.neighbour() {
            act(neighbour);
        }
    }

    /// The error with its peer, in words too.
    #[cold]
    pub(crate) fn blame(&self, error: Error) -> Error {
        let (name, message) = (&self.name, &error.message);
        let message = format!("on the link to {name}: {message}");
        Error { message, ..error }.with_peer(self.peer)
    }
}

impl Deref for PeerLink {
    type Target = dyn Link;

    #[inline]
    fn deref(&self) -> &Self::Target {
        &*self.link
    }
}

impl DerefMut for PeerLink {
    #[inline]
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut *self.link
    }
}

/// All links of a group, by lane and peer. A peer without a link takes a few words: a group may be large, and a rank of it talk
/// to few. A small call looks its links up by one address.
pub(crate) struct LinkTable {
    slots: [Vec<Slot>; 2],
    /// How many are being opened, and when the last of them was needed first.
    opening: usize,
    opening_since: Option<Instant>,
}

/// For how long after a link was needed a rank expects it to come soon. A link that takes longer waits for a peer, which must
/// not make waits for others longer.
const LONGEST_OPENING: Duration = Duration::from_secs(1);

impl LinkTable {
    pub(crate) fn new(world: usize) -> Self {
        let row = || (0..world).map(|_| Slot::Closed).collect();
        Self {
            slots: [row(), row()],
            opening: 0,
            opening_since: None,
        }
    }

    /// Where the link to `peer` stands.
    #[inline]
    pub(crate) fn slot(&self, lane: Lane, peer: Rank) -> &Slot {
        &self.slots[lane as usize][peer]
    }

    /// Records where the link to `peer` stands.
    pub(crate) fn set(&mut self, lane: Lane, peer: Rank, slot: Slot) {
        let place = &mut self.slots[lane as usize][peer];
        let is_opening = |slot: &Slot| usize::from(matches!(slot, Slot::Opening { .. }));
        self.opening = self.opening + is_opening(&slot) - is_opening(place);
        *place = slot;
    }

    /// A link is needed for the first time.
    pub(crate) fn note_opening(&mut self, now: Instant) {
        self.opening_since = Some(now);
    }

    /// Whether links are on their way that should be there soon.
    pub(crate) fn are_opening(&self, now: impl FnOnce() -> Instant) -> bool {
        let is_recent = |since| now().saturating_duration_since(since) < LONGEST_OPENING;
        self.opening > 0 && self.opening_since.is_some_and(is_recent)
    }

    /// The open link to `peer`, if there is one.
    #[inline]
    pub(crate) fn open(&mut self, lane: Lane, peer: Rank) -> Option<&mut OpenLink> {
        match &mut self.slots[lane as usize][peer] {
            Slot::Open(open) => Some(open),
            _ => None,
        }
    }

    /// As [`LinkTable::open`], to look at.
    pub(crate) fn peek(&self, lane: Lane, peer: Rank) -> Option<&OpenLink> {
        match self.slot(lane, peer) {
            Slot::Open(open) => Some(open),
            _ => None,
        }
    }

    /// The links that are open, for `stats`; `known_as` numbers the ranks.
    pub(crate) fn record(&self, known_as: impl Fn(Rank) -> Rank) -> Vec<Value> {
        let lanes = [Lane::Collective, Lane::PointToPoint].into_iter();
        let open = lanes.flat_map(|lane| {
            let slots = self.slots[lane as usize].iter().enumerate();
            slots.filter_map(move |(peer, slot)| match slot {
                Slot::Open(open) => Some((lane, peer, open)),
                _ => None,
            })
        });
        let record = open.map(|(lane, peer, open)| {
            json!({
                "rank": known_as(peer),
                "for": match lane {
                    Lane::Collective => "collectives",
                    Lane::PointToPoint => "messages",
                },
                "by": open.link.describe(),
                "mended": open.mended,
            })
        });
        record.collect()
    }

    /// How `peer` was lost, where its link of the other lane has shown that for a while and the one of this lane is not there:
    /// the end of a process or host is that of all of its links.
    pub(crate) fn lost_elsewhere(
        &self,
        lane: Lane,
        peer: Rank,
        now: Instant,
    ) -> Option<&PeerState> {
        let other = match lane {
            Lane::Collective => Lane::PointToPoint,
            Lane::PointToPoint => Lane::Collective,
        };
        let open = self.peek(other, peer)?;
        let is_long_lost = open.long_lost_at().is_some_and(|at| now >= at);
        open.ended.as_ref().filter(|_| is_long_lost)
    }

    /// When [`LinkTable::lost_elsewhere`] tells next of a peer whose link is awaited: nothing rings then.
    pub(crate) fn next_loss(&self, now: Instant) -> Option<Instant> {
        let [first, second] = &self.slots;
        let pairs = first.iter().zip(second);
        let lost = pairs.filter_map(|pair| match pair {
            (Slot::Opening { .. }, Slot::Open(open)) | (Slot::Open(open), Slot::Opening { .. }) => {
                open.long_lost_at()
            }
            _ => None,
        });
        lost.filter(|at| *at > now).min()
    }

    /// Puts an established link in its place. `name`: the peer's, for errors.
    pub(crate) fn establish(&mut self, lane: Lane, peer: Rank, link: Box<dyn Link>, name: String) {
        let link = PeerLink { link, peer, name };
        self.set(lane, peer, Slot::Open(Box::new(OpenLink::new(link))));
    }

    /// The peers whose links of this lane have ended.
    pub(crate) fn ended(&self, lane: Lane) -> impl Iterator<Item = Rank> {
        let row = self.slots[lane as usize].iter().enumerate();
        row.filter_map(|(peer, slot)| match slot {
            Slot::Open(open) if open.ended.is_some() => Some(peer),
            _ => None,
        })
    }

    /// Every open link with its peer.
    pub(crate) fn iter_open(&mut self) -> impl Iterator<Item = (Lane, Rank, &mut OpenLink)> {
        let lanes = [Lane::Collective, Lane::PointToPoint];
        let rows = lanes.into_iter().zip(&mut self.slots);
        rows.flat_map(|(lane, row)| {
            let open = row.iter_mut().enumerate();
            open.filter_map(move |(peer, slot)| match slot {
                Slot::Open(open) => Some((lane, peer, &mut **open)),
                _ => None,
            })
        })
    }
}

/// The error of an operation that needs `peer`, which `name` names, after its link has ended, or `None` while it has not.
pub(crate) fn loss(state: &PeerState, world: usize, (peer, name): (Rank, &str)) -> Option<Error> {
    let error = match state {
        PeerState::Present => return None,
        PeerState::Left => Error::new(
            Code::PeerLost,
            format!(
                "{name} has left the group in good order while this operation still needs it; \
                 does every rank call the same operations before it closes its communicator?"
            ),
        ),
        PeerState::Lost(seen) => Error::new(
            Code::PeerLost,
            format!(
                "{name} is gone ({seen}): its process has ended or its host cannot be reached; \
                 look at that rank's own output for the cause"
            ),
        ),
        PeerState::Broken(seen) => Error::new(
            Code::Untrusted,
            format!("{name} sent what no rank of this version sends: {seen}"),
        ),
        PeerState::Aborted(notice) => return Some(as_told(notice, world, (peer, name))),
    };
    Some(error.with_peer(peer))
}

/// The error of a notice that `teller` has sent, of itself or of another rank. It may say whatever it likes, so the error says
/// who told it; a culprit that does not exist is a lie of the teller's.
pub(crate) fn as_told(notice: &Notice, world: usize, (teller, name): (Rank, &str)) -> Error {
    let culprit = notice.culprit.map(|rank| rank as Rank);
    if let Some(unknown) = culprit.filter(|rank| *rank >= world) {
        let what = format!("{name} blames rank {unknown}, which this group does not have");
        return Error::new(Code::Untrusted, what).with_peer(teller);
    }
    let mut error = Error::new(notice.code, format!("{} (told by {name})", notice.message));
    error.peer = culprit;
    error
}

/// The pieces of a payload that is lent.
#[derive(Default)]
pub(crate) struct Runs {
    runs: [(usize, usize); 24],
    count: usize,
}

impl Runs {
    /// Finds the pieces of `length` bytes from `offset` on. False when there are more than `most`.
    pub(crate) fn fill(
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

    pub(crate) fn as_slice(&self) -> &[(usize, usize)] {
        &self.runs[..self.count]
    }
}

#[cfg(test)]
pub(crate) mod faulty;
#[cfg(test)]
mod tests;
