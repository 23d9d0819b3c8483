//! An all_reduce in the shared heap, in one pass over memory.
//!
//! Where the buffers of all ranks lie in heaps that all of them have mapped, nothing has to be sent. Each rank sums up
//! its slice of all buffers, block by block, and stores each sum to all of them while the lines it was made of are
//! still in the cache: every line of every buffer is read once and written once, by one rank. No plan of messages comes
//! near that, since there each rank writes its own memory alone, and reads what others have written.
//!
//! ```text
//! buffers of    rank 0   rank 1   rank 2
//! slice 0       a0       b0       c0      rank 0: a0 = b0 = c0 = a0 + b0 + c0
//! slice 1       a1       b1       c1      rank 1: a1 = b1 = c1 = a1 + b1 + c1
//! slice 2       a2       b2       c2      rank 2: ...
//! ```
//!
//! # The vote
//!
//! Whether a buffer lies in the heap is known to its rank alone, but all must do the same. So every rank begins by
//! telling every other: either it shares the peer's slice with it, or it does not want to. It shares with all or with
//! none, so all ranks count the same votes. If all share, each works on its slice and gives back what it got; whoever
//! has got back all it shared has the result. If one does not, everybody declines what it was offered, and the
//! operation goes on by its plan.
//!
//! A vote is one message to and from each peer. That is little, but not nothing, to those whose buffers never lie in the
//! heap; so after votes that failed some operations of that size go without one ([`Votes`]).
//!
//! # Safety of the memory
//!
//! What a rank shares it leaves alone until it is back: slice `r` is used by rank `r` alone, and each rank's own slice
//! is shared with nobody. After a failure see [`Link::await_writer`](crate::transport::Link::await_writer).

#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use crate::plan::select::Topology;
use crate::plan::{Counts, Shape};
use crate::reduce::{Source, Streaming, copy_hinted};
use crate::transport::endpoint::Lane;
use crate::transport::{Lending, Loan, Shared, Ticket};
use crate::types::{Collective, Rank};

use super::executor::{Direction, Waiting};
use super::links::{LinkTable, OpenLink};
use super::task::{Task, difference, no_message};
use super::wire::{Fingerprint, HEADER};

/// Bytes of each slice from which on it is worth a vote.
const LEAST_SLICE: usize = 16 << 10;

/// The most ranks that do this: what they share is worked on all at once.
const MOST_RANKS: usize = 64;

/// Slices begin at multiples of so many bytes, which are whole elements of any type: two ranks never write to one cache
/// line of a buffer that begins with one. Far less than a slice, so that none is empty.
const LINE: usize = 64;

/// Bytes of the slice that are summed up before they are stored: with as many from every rank they stay in the cache.
const BLOCK: usize = 4 << 10;

/// Bytes of the slice between two looks at whether the peers still share.
const STRETCH: usize = 64 << 10;

/// Bytes of the slice between two turns of other operations.
const TURN: usize = 256 << 10;

/// How votes have ended: by sizes of operations, as far as 64 numbers tell them apart.
///
/// All ranks count the same votes in the same order, since an operation is taken up here when all before it have been
/// decided ([`OnePass::advance`]). So they agree on which operations go without a vote.
#[derive(Debug)]
pub(crate) struct Votes {
    records: [Record; 64],
    #[cfg(test)]
    agreed: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Record {
    /// Votes that failed, one after the other.
    failures: u32,
    /// Operations that go without a vote.
    skip: u32,
}

impl Votes {
    /// After how many failures there are no more operations left out than before.
    const MOST_FAILURES: u32 = 6;

    fn record(&mut self, count: usize) -> &mut Record {
        let mixed = (count as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &mut self.records[(mixed >> 58) as usize]
    }

    /// Whether an operation on so many elements is worth a vote.
    fn ask(&mut self, count: usize) -> bool {
        let record = self.record(count);
        let left_out = record.skip > 0;
        record.skip = record.skip.saturating_sub(1);
        !left_out
    }

    fn note(&mut self, count: usize, agreed: bool) {
        tracing::debug!(count, agreed, "voted on an all_reduce in one pass");
        #[cfg(test)]
        {
            self.agreed += u64::from(agreed);
        }
        let record = self.record(count);
        if agreed {
            *record = Record::default();
            return;
        }
        record.failures = (record.failures + 1).min(Self::MOST_FAILURES);
        record.skip = (1 << record.failures) - 1;
    }
}

impl Default for Votes {
    fn default() -> Self {
        Self {
            records: [Record::default(); 64],
            #[cfg(test)]
            agreed: 0,
        }
    }
}

/// Where an operation stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// It has not begun.
    New,
    /// Votes are out, or what was shared is.
    UnderWay,
    /// Everything shared is back, unused: it is to be done in another way.
    Declined,
    Done,
}

/// What is known of one peer.
#[derive(Debug, Default)]
struct Partner {
    /// Bytes of the vote that have been sent, where it is not shared memory.
    sent: usize,
    voted: bool,
    /// What this rank shares with it.
    ticket: Option<Ticket>,
    heard: bool,
    /// What it shares with this rank.
    shared: Option<Shared>,
}

/// One rank's part in such an operation.
#[derive(Debug)]
pub(super) struct OnePass {
    /// Elements of a buffer.
    count: usize,
    /// By rank; the own place is empty.
    partners: Vec<Partner>,
    /// Whether this rank shares; `None` until it has links to all.
    shares: Option<bool>,
    /// Whether all do.
    agreed: Option<bool>,
    /// Bytes of the own slice that are done.
    done: usize,
    state: State,
}

impl OnePass {
    /// For an operation that may be done so; the same on all ranks.
    pub(super) fn new(shape: &Shape, element_size: usize, topology: &Topology) -> Option<Self> {
        let Counts::Even(count) = shape.counts else {
            return None;
        };
        let is_large = count * element_size / shape.world >= LEAST_SLICE;
        let fits = shape.collective == Collective::AllReduce
            && (2..=MOST_RANKS).contains(&shape.world)
            && is_large
            && !topology.spans_hosts();
        fits.then(|| Self {
            count,
            partners: (0..shape.world).map(|_| Partner::default()).collect(),
            shares: None,
            agreed: None,
            done: 0,
            state: State::New,
        })
    }

    pub(super) fn state(&self) -> State {
        self.state
    }

    /// Whether it is known how the operation is done.
    pub(super) fn is_decided(&self) -> bool {
        self.agreed.is_some()
    }

    /// Moves it as far as that goes now. Returns whether anything moved. `turn`: how all operations before it are to be
    /// done is decided.
    pub(super) fn advance(
        &mut self,
        task: &Task,
        links: &mut LinkTable,
        free: &dyn Fn((Rank, Direction)) -> bool,
        (votes, turn): (&mut Votes, bool),
    ) -> Result<bool> {
        let mut moved = false;
        if self.state == State::New {
            if !turn {
                return Ok(false);
            }
            self.state = match votes.ask(self.count) {
                true => State::UnderWay,
                false => State::Declined,
            };
            if self.state == State::Declined {
                return Ok(true);
            }
        }
        match self.agreed {
            None => {
                moved |= self.vote(task, links, free)?;
                moved |= self.hear(task, links, free)?;
                if self
                    .others(task)
                    .all(|(_, partner)| partner.voted && partner.heard)
                {
                    let agreed = self.decide(task, links);
                    votes.note(self.count, agreed);
                    moved = true;
                }
            }
            Some(true) if self.done < self.slice(task, task.rank).1 => {
                let workers = task.workers.as_ref().map_or(1, |workers| workers.threads());
                return Ok(self.work(task, TURN * workers) && {
                    if self.done == self.slice(task, task.rank).1 {
                        self.give_back(task, links);
                    }
                    true
                });
            }
            Some(agreed) => {
                if self.is_back(task, links)? {
                    self.state = match agreed {
                        true => State::Done,
                        false => State::Declined,
                    };
                    moved = true;
                }
            }
        }
        Ok(moved)
    }

    /// Tells the peers whether this rank shares.
    fn vote(
        &mut self,
        task: &Task,
        links: &mut LinkTable,
        free: &dyn Fn((Rank, Direction)) -> bool,
    ) -> Result<bool> {
        let Some(shares) = self.shares.or_else(|| self.own_vote(task, links, free)) else {
            return Ok(false);
        };
        self.shares = Some(shares);
        let mut moved = false;
        for peer in peers(task) {
            if self.partners[peer].voted {
                continue;
            }
            let (start, bytes) = self.slice(task, peer);
            let partner = &mut self.partners[peer];
            let open = open(links, peer)?;
            let header = task.header(bytes);
            if shares {
                match open
                    .link
                    .try_share(&header, task.output.place(start, bytes))?
                {
                    Lending::Lent(ticket) => (partner.ticket, partner.voted) = (Some(ticket), true),
                    Lending::NotNow => {}
                    Lending::Unfit => {
                        return Err(Error::internal("memory that can be shared was not"));
                    }
                }
            } else if HEADER <= open.post_limit {
                partner.voted = open.link.try_post(&header, &[])?;
            } else {
                partner.sent += open.link.try_send(&header[partner.sent..])?;
                partner.voted = partner.sent == HEADER;
            }
            moved |= partner.voted;
        }
        Ok(moved)
    }

    /// Whether this rank shares; `None` while it is not its turn, some link is not open yet, or a peer has not said
    /// whether it reaches the memory. That is waited for, so that what happens does not depend on when it comes.
    fn own_vote(
        &self,
        task: &Task,
        links: &mut LinkTable,
        free: &dyn Fn((Rank, Direction)) -> bool,
    ) -> Option<bool> {
        let whole = task.output.place(0, task.output.len());
        let is_one = task.input.is_empty() && whole.1 == task.output.len();
        let mut can = Some(is_one);
        for peer in peers(task) {
            let is_free = free((peer, Direction::Send)) && free((peer, Direction::Receive));
            let open = links.open(Lane::Collective, peer).filter(|_| is_free)?;
            // All are asked at the same time.
            let here = if is_one {
                open.link.can_share(whole)
            } else {
                Some(false)
            };
            can = can.zip(here).map(|(can, here)| can && here);
        }
        can
    }

    /// Takes in the votes of the others.
    fn hear(
        &mut self,
        task: &Task,
        links: &mut LinkTable,
        free: &dyn Fn((Rank, Direction)) -> bool,
    ) -> Result<bool> {
        let bytes = self.slice(task, task.rank).1;
        let expected = task.header(bytes);
        let mut moved = false;
        for peer in peers(task) {
            if self.partners[peer].heard || !free((peer, Direction::Receive)) {
                continue;
            }
            let Some(open) = links.open(Lane::Collective, peer) else {
                continue;
            };
            let Some(shared) = take_vote(open, &expected, (task.rank, peer))? else {
                continue;
            };
            if shared
                .as_ref()
                .is_some_and(|shared| shared.bytes() != bytes)
            {
                return Err(no_message(peer));
            }
            let partner = &mut self.partners[peer];
            (partner.heard, partner.shared) = (true, shared);
            moved = true;
        }
        Ok(moved)
    }

    /// All votes have been cast and heard.
    fn decide(&mut self, task: &Task, links: &mut LinkTable) -> bool {
        let all = self.shares == Some(true)
            && self
                .others(task)
                .all(|(_, partner)| partner.shared.is_some());
        self.agreed = Some(all);
        if all {
            return true;
        }
        for (peer, partner) in self.partners.iter_mut().enumerate() {
            if partner.shared.take().is_some()
                && let Some(open) = links.open(Lane::Collective, peer)
            {
                open.link.decline();
            }
        }
        false
    }

    /// Sums up and stores about `most` bytes of the own slice. False when a peer has taken back what it shared: its end,
    /// or its abort, will be heard of.
    fn work(&mut self, task: &Task, most: usize) -> bool {
        let (start, bytes) = self.slice(task, task.rank);
        let end = bytes.min(self.done + most);
        let mut shared: Vec<(Rank, &mut Shared)> = Vec::with_capacity(task.world);
        let partners = self.partners.iter_mut().enumerate();
        shared.extend(partners.filter_map(|(peer, p)| Some((peer, p.shared.as_mut()?))));
        let (stretch, block) = match &task.workers {
            Some(_) => (most, most),
            None => (STRETCH, BLOCK),
        };
        while self.done < end {
            let stretch = stretch.min(end - self.done);
            let allowed = shared.iter_mut().all(|(_, shared)| shared.begin());
            if allowed {
                for at in (0..stretch).step_by(block) {
                    let (at, count) = (self.done + at, block.min(stretch - at));
                    let sum = task.output.write(start + at, count);
                    reduce(task, sum, at, &mut shared);
                }
                self.done += stretch;
            }
            shared.iter_mut().for_each(|(_, shared)| shared.end());
            if !allowed {
                return false;
            }
        }
        true
    }

    fn give_back(&mut self, task: &Task, links: &mut LinkTable) {
        for peer in peers(task) {
            self.partners[peer].shared = None;
            if let Some(open) = links.open(Lane::Collective, peer) {
                open.link.give_back();
            }
        }
    }

    /// Whether nothing is with the others any more.
    fn is_back(&mut self, task: &Task, links: &mut LinkTable) -> Result<bool> {
        let mut all = true;
        for peer in peers(task) {
            let partner = &mut self.partners[peer];
            let Some(ticket) = partner.ticket else {
                continue;
            };
            match open(links, peer)?.link.loan(ticket)? {
                Loan::Out => all = false,
                Loan::Returned if self.agreed == Some(true) => partner.ticket = None,
                Loan::Declined if self.agreed == Some(false) => partner.ticket = None,
                other => {
                    return Err(Error::internal(format!(
                        "rank {peer} has counted other votes: {other:?}"
                    )));
                }
            }
        }
        Ok(all)
    }

    /// What it waits for, in reports and to be woken for.
    pub(super) fn waiting(&self, task: &Task, mut visit: impl FnMut(Waiting)) {
        for (peer, partner) in self.others(task) {
            let mut wait = |direction, bytes: usize, of| {
                visit(Waiting {
                    peer,
                    direction,
                    bytes,
                    of,
                });
            };
            let theirs = self.slice(task, peer).1;
            // Until a peer has answered whether it reaches the memory there is nothing to send.
            if !partner.voted && self.shares.is_some() {
                wait(Direction::Send, 0, theirs);
            }
            if !partner.heard {
                wait(Direction::Receive, 0, self.slice(task, task.rank).1);
            } else if partner.voted && partner.ticket.is_some() {
                wait(Direction::Send, theirs, theirs);
            }
        }
    }

    fn others<'a>(&'a self, task: &Task) -> impl Iterator<Item = (Rank, &'a Partner)> {
        let rank = task.rank;
        let partners = self.partners.iter().enumerate();
        partners.filter(move |(peer, _)| *peer != rank)
    }

    /// The first byte and the length of a rank's slice of every buffer.
    fn slice(&self, task: &Task, rank: Rank) -> (usize, usize) {
        let bytes = task.output.len();
        let step = bytes.div_ceil(task.world).next_multiple_of(LINE);
        let start = bytes.min(step * rank);
        (start, step.min(bytes - start))
    }
}

/// `sum` and the same bytes of what is shared, which are `at` bytes from the beginning of the slice, become the sum of
/// all, in rank order.
fn reduce(task: &Task, sum: &mut [u8], at: usize, shared: &mut [(Rank, &mut Shared)]) {
    let kernel = task.reducer();
    let mut sources = [Source::Destination; MOST_RANKS];
    for (peer, shared) in &*shared {
        // Two numbers have one sum in either order, which is then made where the own one lies.
        let place = if task.world == 2 { 1 } else { *peer };
        sources[place] = Source::Element(shared.read(at, sum.len()));
    }
    let sources = &sources[..task.world];
    match &task.workers {
        Some(workers) => workers.reduce(kernel, sum, sources, task.world, Streaming::No),
        None => kernel.reduce(sum, sources, task.world, Streaming::No),
    }
    for (_, shared) in shared {
        let copy = shared.write(at, sum.len());
        match &task.workers {
            Some(workers) => workers.copy(copy, sum, Streaming::No),
            None => copy_hinted(copy, sum, Streaming::No),
        }
    }
}

/// The next message, if it is there: what the peer shares, or `None` if it does not.
fn take_vote(
    open: &mut OpenLink,
    expected: &[u8; HEADER],
    (rank, peer): (Rank, Rank),
) -> Result<Option<Option<Shared>>> {
    let OpenLink { link, header, .. } = open;
    let mut rest = None;
    let taken = open.header_bytes == 0
        && link.try_take(&mut |message| {
            if let Some((theirs, payload)) = message.split_first_chunk::<HEADER>() {
                (*header, rest) = (*theirs, Some(payload.len()));
            }
        })?;
    if !taken {
        if !open.read_header()? {
            return Ok(None);
        }
        (open.header_bytes, rest) = (0, Some(0));
    }
    if rest.is_some() && !Fingerprint::is_same(&open.header, expected) {
        return Err(difference(expected, &open.header, rank, peer));
    }
    if rest != Some(0) {
        return Err(no_message(peer));
    }
    match taken {
        true => open.link.shared().map(Some),
        false => Ok(Some(None)),
    }
}

fn peers(task: &Task) -> impl Iterator<Item = Rank> + use<> {
    let rank = task.rank;
    (0..task.world).filter(move |peer| *peer != rank)
}

fn open(links: &mut LinkTable, peer: Rank) -> Result<&mut OpenLink> {
    links
        .open(Lane::Collective, peer)
        .ok_or_else(|| Error::internal(format!("the link to rank {peer} is gone")))
}
