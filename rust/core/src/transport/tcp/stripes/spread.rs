//! Sending: blocks are dealt out to stripes.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::abreast::{self, Deal};
use super::{Connection, HERE, LONGEST_FRAME, head};
use crate::locks::Mutex;
use crate::reduce::Workers;
use crate::transport::tcp::kernel::unacknowledged;

/// Bytes of a payload from which on it is dealt out: the pieces that collectives are cut into are longer.
const DEALT_OUT_FROM: usize = 32 << 10;

/// Bytes of a block: all stripes have some of a payload, but a system call and a head are not made for a few bytes.
const SHORTEST_BLOCK: usize = 16 << 10;
const LONGEST_BLOCK: usize = 128 << 10;

/// Bytes of the longest element; the length of every other element is a divisor of it.
const LONGEST_ELEMENT: usize = 16;

/// The sending half of a link whose stream consists of frames.
#[derive(Debug, Default)]
pub(in crate::transport::tcp) struct Spread {
    stripes: Vec<Connection>,
    /// The number of the first of them.
    first: u8,
    /// Stripes that are used no more, until the peer's system has all that went over them: the kernel gives up what a closed
    /// socket still has to send when the peer does not read for some minutes.
    closing: Vec<Connection>,
    /// The number of stripes that are dealt blocks: the first ones.
    active: usize,
    /// Bytes on their way on each of them, as far as is known.
    loads: Vec<usize>,
    /// Heads that the first connection has not taken.
    heads: Vec<u8>,
    /// Bytes that a head has announced to follow it, and that have not.
    announced: usize,
    /// How many bytes of payloads that are dealt out count as sent.
    counted: usize,
    /// Blocks with bytes that do not count as sent yet, in order.
    blocks: VecDeque<Block>,
    /// The last call sent nothing, and its bytes are to go over stripes.
    waits_for_stripes: bool,
    /// Threads that send long payloads together.
    workers: Option<Arc<Workers>>,
}

/// A part of the bytes that are dealt out.
#[derive(Debug)]
struct Block {
    stripe: usize,
    end: usize,
    /// Up to where it has been sent.
    sent: usize,
}

impl Block {
    /// The range of its unsent bytes within the `length` bytes after the first `counted`.
    fn unsent(&self, counted: usize, length: usize) -> Range<usize> {
        self.sent.saturating_sub(counted)..length.min(self.end - counted)
    }
}

impl Spread {
    /// These threads send long payloads together.
    pub(in crate::transport::tcp) fn share(&mut self, workers: Arc<Workers>) {
        self.workers = Some(workers);
    }

    /// Adds the next stripe, which has this number.
    pub(in crate::transport::tcp) fn add(&mut self, number: u8, stripe: Connection) {
        if self.stripes.is_empty() {
            self.first = number;
        }
        self.stripes.push(stripe);
    }

    pub(in crate::transport::tcp) fn stripes(&self) -> &[Connection] {
        &self.stripes
    }

    /// Those that are there, by their numbers.
    pub(in crate::transport::tcp) fn numbered(
        &mut self,
    ) -> impl Iterator<Item = (u8, &mut Connection)> {
        (self.first..).zip(&mut self.stripes)
    }

    /// Those that are there and those that are used no more, with something on its way.
    pub(in crate::transport::tcp) fn all(&self) -> impl Iterator<Item = &Connection> {
        self.stripes.iter().chain(&self.closing)
    }

    /// This side sends no more.
    pub(in crate::transport::tcp) fn finish(&mut self) {
        self.stripes.iter_mut().for_each(Connection::finish);
    }

    /// The stripes that are dealt blocks.
    pub(in crate::transport::tcp) fn in_use(&self) -> &[Connection] {
        &self.stripes[..self.active]
    }

    /// Deals to the first `number` stripes from now on. The others are closed when nothing of theirs is left.
    pub(in crate::transport::tcp) fn use_only(&mut self, number: usize) {
        self.active = number.min(self.stripes.len());
        self.close_unused();
    }

    fn close_unused(&mut self) {
        let is_used = |block: &Block| block.stripe >= self.active;
        let mut unused = self.stripes[self.active..].iter();
        // One that has broken is made again first.
        let all_flow = unused.all(Connection::is_flowing);
        if self.stripes.len() > self.active && all_flow && !self.blocks.iter().any(is_used) {
            let mut unused = self.stripes.split_off(self.active);
            unused.iter_mut().for_each(Connection::finish);
            self.closing.extend(unused);
        }
    }

    /// Whether some bytes that went over stripes which are used no more may be lost.
    pub(in crate::transport::tcp) fn is_broken(&self) -> bool {
        let is_broken =
            |stripe: &Connection| stripe.ready(PollFlags::empty()).contains(PollFlags::ERR);
        let mut closing = self.closing.iter();
        closing.any(|stripe| is_broken(stripe) && unacknowledged(stripe) > 1)
    }

    /// Closes stripes that are used no more, once all of their bytes have arrived.
    pub(in crate::transport::tcp) fn close_delivered(&mut self) {
        // The end of the stream counts as one, and is acknowledged late.
        self.closing.retain(|stripe| unacknowledged(stripe) > 1);
    }

    /// Sends as much as goes now of `first` and then `rest`, a payload or part of one.
    ///
    /// # Errors
    /// `AGAIN` when nothing counts as sent.
    pub(in crate::transport::tcp) fn send(
        &mut self,
        main: &mut Connection,
        first: &[u8],
        rest: &[u8],
    ) -> Result<usize, Errno> {
        self.waits_for_stripes = false;
        let is_long = self.active > 0 && rest.len() >= DEALT_OUT_FROM;
        if !self.blocks.is_empty() && !first.is_empty() {
            // No payload goes on so, but a stream may.
            return self.deal(main, &[first, rest].concat());
        }
        if !self.blocks.is_empty() || (self.announced == 0 && first.is_empty() && is_long) {
            return self.deal(main, rest);
        }
        if self.announced == 0 {
            let with = if is_long { 0 } else { rest.len() };
            self.announced = LONGEST_FRAME.min(first.len() + with);
            self.heads.extend(head(HERE, self.announced));
        }
        let first = &first[..first.len().min(self.announced)];
        let rest = &rest[..rest.len().min(self.announced - first.len())];
        let sent = main.send_pieces(&[&self.heads, first, rest])?;
        let of_heads = sent.min(self.heads.len());
        self.heads.drain(..of_heads);
        self.announced -= sent - of_heads;
        match sent - of_heads {
            0 => Err(Errno::AGAIN),
            sent => Ok(sent),
        }
    }

    fn deal(&mut self, main: &mut Connection, bytes: &[u8]) -> Result<usize, Errno> {
        let end = self.counted + bytes.len();
        let share = bytes.len() / self.active.max(1);
        // Whole elements: the receiver would wait for the rest of one with the first part in hand.
        let block = share.clamp(SHORTEST_BLOCK, LONGEST_BLOCK) / LONGEST_ELEMENT * LONGEST_ELEMENT;
        match self.workers.clone() {
            Some(workers) if self.active > 1 && bytes.len() >= abreast::WAKES_THREADS_FROM => {
                self.deal_abreast(&workers, bytes, block)?;
            }
            _ => {
                let mut loads = std::mem::take(&mut self.loads);
                loads.clear();
                loads.extend(self.in_use().iter().map(unacknowledged));
                self.loads = loads;
                while self.push(bytes)? | self.deal_next(bytes, block)? {}
            }
        }
        while !self.heads.is_empty() {
            let sent = main.send(&self.heads)?;
            self.heads.drain(..sent);
        }
        match self.count(end) {
            0 => {
                self.waits_for_stripes = true;
                Err(Errno::AGAIN)
            }
            sent => Ok(sent),
        }
    }

    /// Deals a block of `most` bytes to the stripe with the fewest on their way of those that take any of it. Returns whether
    /// one does.
    fn deal_next(&mut self, bytes: &[u8], most: usize) -> Result<bool, Errno> {
        let dealt = self.dealt();
        let from = dealt - self.counted;
        let length = bytes.len().saturating_sub(from).min(most);
        while length > 0
            && let Some(stripe) = self.least_loaded()
        {
            let connection = &mut self.stripes[stripe];
            let sent = match connection.send(&bytes[from..from + length]) {
                Ok(sent) => sent,
                // It keeps a record of these bytes, and will take no others.
                Err(Errno::AGAIN) if connection.owes() => 0,
                Err(Errno::AGAIN | Errno::INTR) => {
                    self.loads[stripe] = usize::MAX;
                    continue;
                }
                Err(errno) => return Err(errno),
            };
            self.loads[stripe] = self.loads[stripe].saturating_add(length);
            self.heads.extend(head(self.first + stripe as u8, length));
            self.blocks.push_back(Block {
                stripe,
                end: dealt + length,
                sent: dealt + sent,
            });
            return Ok(true);
        }
        Ok(false)
    }

    /// The stripe in use with the fewest bytes on their way, of those that have taken all of their blocks and are not full.
    fn least_loaded(&self) -> Option<usize> {
        let is_free = |stripe: &usize| {
            let is_busy = |block: &Block| block.stripe == *stripe && block.sent < block.end;
            self.loads[*stripe] < usize::MAX && !self.blocks.iter().any(is_busy)
        };
        (0..self.loads.len())
            .filter(is_free)
            .min_by_key(|stripe| self.loads[*stripe])
    }

    /// Up to where blocks have been dealt.
    fn dealt(&self) -> usize {
        self.blocks.back().map_or(self.counted, |block| block.end)
    }

    /// Sends as much of their blocks as the stripes take; `bytes` are the bytes that do not count yet. Returns whether anything
    /// was sent.
    fn push(&mut self, bytes: &[u8]) -> Result<bool, Errno> {
        let mut moved = false;
        for block in &mut self.blocks {
            let part = block.unsent(self.counted, bytes.len());
            if part.is_empty() {
                continue;
            }
            match self.stripes[block.stripe].send(&bytes[part]) {
                Ok(sent) => {
                    block.sent += sent;
                    moved = true;
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(moved)
    }

    /// Several threads send, each over one stripe at a time: what waits there, and then blocks of at most `most` bytes that the
    /// stripe takes when it comes to them.
    fn deal_abreast(&mut self, workers: &Workers, bytes: &[u8], most: usize) -> Result<(), Errno> {
        let takes = |stripe: &usize| self.stripes[*stripe].may_send();
        let takers: Vec<usize> = (0..self.active).filter(takes).collect();
        // A stripe has one block at most that is not through.
        let mut waiting = vec![&bytes[..0]; self.stripes.len()];
        for block in &self.blocks {
            let part = block.unsent(self.counted, bytes.len());
            if !part.is_empty() {
                waiting[block.stripe] = &bytes[part];
            }
        }
        let mut dealt = self.dealt();
        let rest = &bytes[bytes.len().min(dealt - self.counted)..];
        let deal = Deal {
            bytes: rest,
            block: most,
            most: rest.len().div_ceil(takers.len().max(1)),
            takers: &takers,
            taken: Mutex::default(),
        };
        let sent = abreast::send_all(workers, &mut self.stripes, waiting, &deal)?;
        for block in &mut self.blocks {
            if !block.unsent(self.counted, bytes.len()).is_empty() {
                block.sent += sent[block.stripe];
            }
        }
        let mut taken = deal.taken.into_inner().blocks;
        // Blocks at the end may go over other stripes if no byte of them has gone, unless their stripe keeps a record of them.
        while let Some((stripe, _, 0)) = taken.last()
            && !self.stripes[*stripe].owes()
        {
            taken.pop();
        }
        for (stripe, length, sent) in taken {
            self.heads.extend(head(self.first + stripe as u8, length));
            let sent = dealt + sent;
            dealt += length;
            self.blocks.push_back(Block {
                stripe,
                end: dealt,
                sent,
            });
        }
        Ok(())
    }

    /// The number of bytes, up to `end`, that count as sent now and did not before.
    fn count(&mut self, end: usize) -> usize {
        let mut through = self.counted;
        for block in &self.blocks {
            through = block.sent;
            if block.sent < block.end {
                break;
            }
        }
        let before = std::mem::replace(&mut self.counted, through.min(end));
        while let Some(block) = self.blocks.front()
            && block.end <= self.counted
        {
            self.blocks.pop_front();
        }
        self.close_unused();
        self.counted - before
    }

    /// Whether bytes that the last call did not send may go now.
    pub(in crate::transport::tcp) fn may_send(&self, main: &Connection) -> bool {
        let takes = Connection::may_send;
        if !self.waits_for_stripes || !self.heads.is_empty() {
            return takes(main);
        }
        if self.blocks.is_empty() {
            return self.in_use().iter().any(takes);
        }
        let mut waiting = self.blocks.iter().filter(|block| block.sent < block.end);
        waiting.any(|block| takes(&self.stripes[block.stripe]))
    }

    pub(in crate::transport::tcp) fn memory(&self) -> usize {
        self.all().map(Connection::memory).sum()
    }
}
