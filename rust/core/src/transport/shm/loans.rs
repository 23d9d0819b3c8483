//! Large messages that are lent instead of copied: the receiver reads them where they lie in the sender's memory.
//!
//! The sender posts a message that says where the payload lies ([`Run`]s) and keeps it as it is until the receiver has
//! *returned* it. There are two ways to read it: in place, through a mapping of the sender's heap, which the receiver
//! has confirmed; or with `process_vm_readv`, one copy in blocks that stay in the cache. Containers and hardened systems
//! may forbid the second; a receiver that cannot read *refuses* the loan, and gets the payload through the ring. So the
//! first loan of that kind is a trial: until it has come back the sender sends nothing after it ([`Ticket::proven`]),
//! and a refused payload is the next in the stream. A trial lies in private memory as a whole, so that it is refused
//! before anything of it has been delivered.
//!
//! What lies in the heap may also be *shared*: until it gives it back the receiver may write to it as well ([`Writer`]).
//!
//! A sender whose operation fails before its loans are back *revokes* them all, before its memory is used for anything
//! else. The receiver looks for that after each block it has read, so what it makes use of was read before; and before
//! it reads, since the sender's heap may be gone by then. Around what it writes it raises a flag before it looks, and the
//! sender looks for the flag after it has revoked: either it sees the flag, and waits, or the receiver sees that it must
//! not write.

use std::cell::RefCell;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::pace::{Choices, Clock, Filling, Offered, Paces, class};
use super::ring::{MAX_ALIGN, Word};
use crate::error::{Code, Error, Result};
use crate::heap::PeerHeap;
use crate::reduce::Streaming;
use crate::transport::{Loan, Ticket};

/// Payloads from this length on are lent from the heap: below it a copy that stays in the cache costs less than waiting
/// for the return.
pub(super) const LENT_IN_PLACE_FROM: usize = 16 << 10;

/// Payloads from this length on may be lent from memory that only `process_vm_readv` reaches: below it the system
/// call costs more than a second copy anywhere.
const LENT_FROM: usize = 64 << 10;

/// How much is read at once into memory between: it stays in the cache until it is folded.
const BLOCK: usize = 64 << 10;

/// How much is read at once into its place, so that a caller with several links comes round to all of them, and to what
/// it sends meanwhile.
const PIECE: usize = 256 << 10;

/// Bytes of a [`Run`] in a post.
const RUN: usize = 24;

/// How long memory that could be read before may be out of reach: so long a process with much memory takes to end, and
/// its end says more than an error of reading.
const PATIENCE: Duration = Duration::from_secs(10);

/// The words in which the two sides keep account of one direction's loans. All are zero at first.
pub(super) trait Ledger {
    type Word: Word;

    /// The number of loans that have come back, twice, and 1 more when the last of them was refused. Written by the
    /// receiver.
    fn returned(&self) -> &Self::Word;
    /// The number of the last loan that came back unread. Written by the receiver before it counts the loan as
    /// returned.
    fn declined(&self) -> &Self::Word;
    /// 1 once the sender has taken back what it lent. Written by the sender.
    fn revoked(&self) -> &Self::Word;
    /// 1 while the receiver writes to what is shared. Written by the receiver.
    fn writing(&self) -> &Self::Word;
    /// Nanoseconds that the sender has spent on the message it copies into the ring, written by the sender; and what
    /// messages of a class have taken lately ([`Paces`]), written by the receiver. Advice, which orders nothing.
    fn filling(&self) -> &Self::Word;
    fn paces(&self, class: usize) -> &Self::Word;
    /// The ring's flag.
    fn producer_asleep(&self) -> &Self::Word;
    /// A fence of that order.
    fn fence(&self, order: Ordering);
}

/// A piece of lent memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// 0: the sender's own memory; else a segment of its heap.
    pub(super) segment: u32,
    /// The address, or the offset in the segment.
    pub(super) at: u64,
    pub(super) bytes: u64,
    /// It may be written to.
    pub(super) shared: bool,
}

impl Run {
    /// Puts the run's form in a post at the beginning of `out`; how long that is.
    pub(super) fn write(&self, out: &mut [u8]) -> usize {
        let first = u64::from(self.segment) | u64::from(self.shared) << 32;
        let words = [first, self.at, self.bytes];
        for (out, word) in out.chunks_exact_mut(8).zip(words) {
            out.copy_from_slice(&word.to_le_bytes());
        }
        RUN
    }

    fn read(bytes: &[u8; RUN]) -> Option<Self> {
        let word = |at: usize| {
            u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight of the bytes"))
        };
        let run = Self {
            segment: word(0) as u32,
            shared: match word(0) >> 32 {
                0 => false,
                1 => true,
                _ => return None,
            },
            at: word(8),
            bytes: word(16),
        };
        run.at.checked_add(run.bytes)?;
        (run.bytes > 0 && (run.segment > 0 || !run.shared)).then_some(run)
    }
}

/// The most runs of a loan.
pub(super) const MOST_RUNS: usize = 22;

/// Bytes of the longest description of a loan.
pub(super) const DESCRIPTION: usize = MOST_RUNS * RUN;

/// The side that lends.
pub(super) struct Lender<L> {
    ledger: L,
    /// From which size on private memory may be lent.
    pub(super) private_from: usize,
    /// Whether that is the faster way; `None`: it does not matter.
    choices: Option<Choices>,
    filling: Filling,
    lent: u64,
    /// The first loan of private memory.
    trial: Option<u64>,
    reach: Reach,
}

/// Whether the peer can read private memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reach {
    Unknown,
    Proven,
    Refused,
}

impl<L: Ledger> Lender<L> {
    pub(super) fn new(ledger: L) -> Self {
        Self {
            ledger,
            private_from: LENT_FROM,
            choices: Some(Choices::default()),
            filling: Filling::default(),
            lent: 0,
            trial: None,
            reach: Reach::Unknown,
        }
    }

    /// Lends private memory from so many bytes on, whatever it costs.
    pub(super) fn lend_private_from(&mut self, bytes: usize) {
        (self.private_from, self.choices) = (bytes, None);
    }

    /// `bytes` are about to be copied into the ring, as far as there is room: now, if they are to be timed.
    #[inline]
    pub(super) fn begin_filling(&mut self, bytes: usize) -> Option<Instant> {
        match self.filling.begin(bytes) {
            Offered::Short => return None,
            Offered::Message => self.ledger.filling().store(0, Ordering::Relaxed),
            Offered::Rest => {}
        }
        Some(Instant::now())
    }

    /// `count` of them were copied since then; the receiver is told.
    pub(super) fn note_filling(&mut self, count: usize, started: Instant) {
        if count > 0 {
            let spent = self.filling.note(count, started);
            self.ledger.filling().store(spent, Ordering::Relaxed);
        }
    }

    /// Whether the peer is known to read private memory.
    pub(super) fn is_proven(&self) -> bool {
        self.reach == Reach::Proven
    }

    /// Whether `bytes`, of which some or (`whole`) all lie in private memory, are better lent than streamed, and the
    /// peer can read them as far as is known. `incoming`: what such messages take in the other direction.
    pub(super) fn lends_private(&mut self, bytes: usize, whole: bool, incoming: Paces) -> bool {
        let reached = match self.reach {
            // A payload of which the peer has read the part in the heap could not be refused any more.
            Reach::Unknown => whole,
            Reach::Proven => true,
            Reach::Refused => false,
        };
        if !reached || bytes < self.private_from {
            return false;
        }
        let told = self.ledger.paces(class(bytes)).load(Ordering::Relaxed);
        match &mut self.choices {
            Some(choices) => choices.prefer_loan(bytes, Paces::of(told), incoming),
            None => true,
        }
    }

    /// Counts a loan that has been posted; `private`: some of it is to be read with `process_vm_readv`.
    pub(super) fn lend(&mut self, private: bool) -> Ticket {
        self.lent += 1;
        let trial = private && self.reach == Reach::Unknown;
        if trial {
            debug_assert!(self.trial.is_none(), "sent something after a trial");
            self.trial = Some(self.lent);
        }
        Ticket {
            number: self.lent,
            proven: !trial,
        }
    }

    /// What has become of a loan. A sender asks again and again, and sends nothing else meanwhile unless the loan is
    /// proven.
    pub(super) fn look(&mut self, ticket: Ticket) -> Result<Loan> {
        // Acquire: the receiver has finished reading.
        let word = self.ledger.returned().load(Ordering::Acquire);
        let (returned, refused) = (word >> 1, word & 1 != 0);
        if returned > self.lent || (refused && self.trial != Some(returned)) {
            return Err(corrupt(format_args!(
                "{returned} of {} returned, the last refused: {refused}",
                self.lent
            )));
        }
        if returned < ticket.number {
            return Ok(Loan::Out);
        }
        if self.trial != Some(ticket.number) {
            // Ordered by the word above: of messages that may be declined one at a time is out.
            let declined = self.ledger.declined().load(Ordering::Relaxed);
            return Ok(if declined == ticket.number {
                Loan::Declined
            } else {
                Loan::Returned
            });
        }
        if self.reach == Reach::Unknown {
            self.reach = if refused {
                Reach::Refused
            } else {
                Reach::Proven
            };
        }
        Ok(match self.reach {
            Reach::Refused => Loan::Refused,
            _ => Loan::Returned,
        })
    }

    /// The account of what has come back: what a sleeper that waits for a loan looks at once more.
    pub(super) fn returned(&self) -> u64 {
        self.ledger.returned().load(Ordering::Acquire)
    }

    /// Takes back what is lent.
    pub(super) fn revoke(&mut self) {
        self.ledger.revoked().swap(1, Ordering::SeqCst);
        // What is written to the memory from here on is not seen without the word above.
        self.ledger.fence(Ordering::SeqCst);
    }

    /// Whether the receiver writes to what is shared. Never again, once false after [`Lender::revoke`].
    pub(super) fn is_written(&self) -> bool {
        // Acquire: what it wrote is there.
        self.ledger.writing().load(Ordering::Acquire) != 0
    }
}

/// The right to write to what is shared: the receiver's flag.
pub(super) struct Writer<L: Ledger> {
    ledger: L,
    raised: bool,
}

impl<L: Ledger> Writer<L> {
    pub(super) fn new(ledger: L) -> Self {
        Self {
            ledger,
            raised: false,
        }
    }

    /// Raises the flag. False, and it is lowered again, when the sender has taken back what it shared.
    pub(super) fn raise(&mut self) -> bool {
        self.ledger.writing().swap(1, Ordering::SeqCst);
        self.raised = true;
        // Who revokes after this has seen the flag.
        let allowed = self.ledger.revoked().load(Ordering::SeqCst) == 0;
        if !allowed {
            self.lower();
        }
        allowed
    }

    /// Lowers the flag: nothing is written from here on.
    pub(super) fn lower(&mut self) {
        if std::mem::take(&mut self.raised) {
            self.ledger.writing().store(0, Ordering::Release);
        }
    }

    pub(super) fn is_raised(&self) -> bool {
        self.raised
    }
}

impl<L: Ledger> Drop for Writer<L> {
    fn drop(&mut self) {
        self.lower();
    }
}

/// The receiver's account of loans.
pub(super) struct Account<L> {
    ledger: L,
    borrowed: u64,
}

impl<L: Ledger> Account<L> {
    pub(super) fn new(ledger: L) -> Self {
        Self {
            ledger,
            borrowed: 0,
        }
    }

    /// Counts a loan that was announced.
    pub(super) fn borrow(&mut self) {
        self.borrowed += 1;
    }

    /// Whether the sender has taken back what it lent. If not, what has been read until now counts.
    #[inline]
    pub(super) fn is_revoked(&self) -> bool {
        self.ledger.fence(Ordering::Acquire);
        self.ledger.revoked().load(Ordering::Relaxed) != 0
    }

    /// Returns the last loan unread. Says whether the sender sleeps.
    pub(super) fn decline(&mut self) -> Back {
        let declined = self.ledger.declined();
        declined.store(self.borrowed, Ordering::Relaxed);
        self.give_back(false)
    }

    /// Returns the last loan. Says whether the sender sleeps.
    pub(super) fn give_back(&mut self, refused: bool) -> Back {
        // Also releases: whoever sees the count may write to the memory.
        self.ledger
            .returned()
            .swap(self.borrowed << 1 | u64::from(refused), Ordering::SeqCst);
        let flag = self.ledger.producer_asleep();
        Back {
            wake: flag.load(Ordering::SeqCst) != 0 && flag.swap(0, Ordering::AcqRel) != 0,
        }
    }
}

/// Whether the sender sleeps and must be rung for, because a loan has gone back.
#[derive(Clone, Copy, Debug, Default)]
#[must_use]
pub(super) struct Back {
    pub(super) wake: bool,
}

/// The side that reads what is lent.
pub(super) struct Borrower<L> {
    account: Account<L>,
    clock: Clock,
    /// The peer's process, if it is one that can be named.
    pub(super) peer: Option<i32>,
    /// A loan of private memory has been announced.
    tried: bool,
    reading: bool,
    loan: Reading,
}

/// The loan being read.
#[derive(Default)]
struct Reading {
    runs: Vec<Run>,
    streaming: Streaming,
    /// All of it lies in private memory: how long it is, and when it was announced.
    timed: Option<(usize, Instant)>,
    /// The run being read, and how far.
    run: usize,
    within: u64,
    /// It may be refused: it is the trial, and nothing of it has been delivered.
    refusable: bool,
    /// The last attempt found nothing to read.
    stalled: bool,
    /// Since when private memory has been out of reach.
    unreachable_since: Option<Instant>,
}

/// How an attempt to read ended.
enum Attempt {
    Read,
    /// Not now, or never: the peer's state will tell.
    Nothing,
    Refused,
}

impl<L: Ledger + Clone> Borrower<L> {
    /// The right to write to what is shared.
    pub(super) fn writer(&self) -> Writer<L> {
        Writer::new(self.account.ledger.clone())
    }
}

impl<L: Ledger> Borrower<L> {
    pub(super) fn new(ledger: L, peer: Option<i32>) -> Self {
        Self {
            account: Account::new(ledger),
            clock: Clock::default(),
            peer,
            tried: false,
            reading: false,
            loan: Reading::default(),
        }
    }

    /// What messages as long as `bytes` have taken lately.
    pub(super) fn paces(&self, bytes: usize) -> Paces {
        self.clock.paces(bytes)
    }

    /// Whether what is taken out of the ring is to be timed.
    #[inline]
    pub(super) fn times(&self, most: usize) -> bool {
        self.clock.times(most)
    }

    /// Of `most` bytes, the rest of a message, `count` were taken out of the ring since `started`. The sender is told
    /// what the whole message took.
    pub(super) fn note_streamed(&mut self, most: usize, count: usize, started: Instant) {
        let filling = self.account.ledger.filling();
        let spent = || filling.load(Ordering::Relaxed);
        if let Some(class) = self.clock.note_streamed(most, count, started, spent) {
            self.tell(class);
        }
    }

    /// A loan of `bytes` was read to its end since `started`. The sender is told.
    pub(super) fn note_lent(&mut self, bytes: usize, started: Instant) {
        let class = self.clock.note_lent(bytes, started);
        self.tell(class);
    }

    fn tell(&self, class: usize) {
        let word = self.account.ledger.paces(class);
        word.store(self.clock.word(class), Ordering::Relaxed);
    }

    /// Whether a loan is being read.
    #[inline]
    pub(super) fn is_reading(&self) -> bool {
        self.reading
    }

    /// Gives back a loan of which nothing has been read.
    pub(super) fn decline(&mut self) -> Back {
        debug_assert!(self.reading && (self.loan.run, self.loan.within) == (0, 0));
        self.reading = false;
        self.account.decline()
    }

    /// The place that is shared with this side, of a loan of which nothing has been read.
    pub(super) fn shared(&self) -> Option<Run> {
        match self.loan.runs[..] {
            [run] if self.reading && run.shared => Some(run),
            _ => None,
        }
    }

    /// Gives back what was shared.
    pub(super) fn end_sharing(&mut self) -> Back {
        debug_assert!(self.shared().is_some());
        self.give_back(false)
    }

    /// Whether there may be more to read of it at once.
    pub(super) fn is_readable(&self) -> bool {
        self.reading && !self.loan.stalled
    }

    /// Begins to read what a post describes.
    pub(super) fn begin(&mut self, description: &[u8]) -> Result<()> {
        if self.reading {
            return Err(unfinished());
        }
        let (parts, rest) = description.as_chunks::<RUN>();
        let runs = &mut self.loan.runs;
        runs.clear();
        runs.extend(parts.iter().map_while(Run::read));
        if runs.is_empty() || runs.len() < parts.len() || !rest.is_empty() {
            return Err(corrupt(format_args!(
                "a description of {} bytes",
                description.len()
            )));
        }
        self.account.borrow();
        // Beside what is read and written here the peers do as much, at the least.
        let bytes = runs.iter().map(|run| run.bytes);
        let bytes = bytes.fold(0, u64::saturating_add);
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let private = runs.iter().any(|run| run.segment == 0);
        let whole = runs.iter().all(|run| run.segment == 0);
        self.loan = Reading {
            runs: std::mem::take(runs),
            streaming: Streaming::for_footprint(bytes.saturating_mul(4)),
            timed: whole.then(|| (bytes, Instant::now())),
            refusable: private && !self.tried,
            ..Reading::default()
        };
        self.tried |= private;
        self.reading = true;
        Ok(())
    }

    /// How to write to a place that what is lent is copied to.
    pub(super) fn streaming(&self) -> Streaming {
        self.loan.streaming
    }

    /// Reads into `bytes` what fits, with `copy` where it lies in memory: how much, and whether the sender must be woken.
    /// `Ok(0)` also when the loan has just been refused.
    pub(super) fn recv(
        &mut self,
        heap: Option<&PeerHeap>,
        bytes: &mut [u8],
        copy: &dyn Fn(&mut [u8], &[u8]),
    ) -> Result<(usize, Back)> {
        let limit = bytes.len().min(PIECE);
        let mut done = 0;
        while done < limit
            && let Some(count) = self.left_of_run(limit - done)
        {
            let target = &mut bytes[done..done + count];
            let attempt = match self.place(heap, count)? {
                Some(lent) => {
                    copy(target, lent);
                    self.verdict()
                }
                None => self.read(target)?,
            };
            match attempt {
                Attempt::Read => self.advance(count),
                Attempt::Nothing => break,
                Attempt::Refused => return Ok((0, self.give_back(true))),
            }
            done += count;
        }
        Ok((done, self.end_if_read()))
    }

    /// Lends consecutive runs of multiples of `align` bytes to `fold`, in total at most `max`: as [`Borrower::recv`].
    pub(super) fn fold(
        &mut self,
        heap: Option<&PeerHeap>,
        (max, align): (usize, usize),
        fold: &mut dyn FnMut(&[u8]),
    ) -> Result<(usize, Back)> {
        assert!((1..=MAX_ALIGN).contains(&align) && max.is_multiple_of(align));
        let limit = max.min(PIECE / align * align);
        let mut done = 0;
        while done < limit
            && let Some(count) = self.left_of_run(limit - done)
        {
            // Runs are whole elements; one that is not is the sender's fault and ends the link.
            let count = count / align * align;
            if count == 0 {
                return Err(corrupt(format_args!("a run that is no whole element")));
            }
            let (count, attempt) = match self.place(heap, count)? {
                Some(lent) => {
                    fold(lent);
                    (count, self.verdict())
                }
                None => self.fold_block(count.min(BLOCK / align * align), fold)?,
            };
            match attempt {
                Attempt::Read => self.advance(count),
                Attempt::Nothing => break,
                Attempt::Refused => return Ok((0, self.give_back(true))),
            }
            done += count;
        }
        Ok((done, self.end_if_read()))
    }

    /// Reads a block of private memory and lends it to `fold`.
    fn fold_block(
        &mut self,
        count: usize,
        fold: &mut dyn FnMut(&[u8]),
    ) -> Result<(usize, Attempt)> {
        thread_local! {
            static BETWEEN: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        BETWEEN.with_borrow_mut(|between| {
            between.resize(BLOCK, 0);
            let attempt = self.read(&mut between[..count])?;
            if matches!(attempt, Attempt::Read) {
                fold(&between[..count]);
            }
            Ok((count, attempt))
        })
    }

    /// The next `count` bytes where they lie, if that is in the peer's heap.
    fn place<'a>(&self, heap: Option<&'a PeerHeap>, count: usize) -> Result<Option<&'a [u8]>> {
        let run = self.loan.runs[self.loan.run];
        let Some(heap) = heap.filter(|_| run.segment != 0) else {
            return Ok(None);
        };
        // SAFETY: the peer lent these bytes and leaves them alone until they are given back, which is after the slice's
        // last use (`recv`, `fold`); they are used as numbers alone.
        unsafe { heap.slice(run.segment, run.at + self.loan.within, count) }
    }

    /// Whether what has just been read counts: the sender had not taken it back before.
    fn verdict(&mut self) -> Attempt {
        if self.account.is_revoked() {
            self.loan.stalled = true;
            return Attempt::Nothing;
        }
        Attempt::Read
    }

    /// Bytes left in the run being read, at most `most`. `None` when all has been read, and when the loan has been
    /// revoked.
    fn left_of_run(&mut self, most: usize) -> Option<usize> {
        let run = *self.loan.runs.get(self.loan.run)?;
        if matches!(self.verdict(), Attempt::Nothing) {
            return None;
        }
        let left = run.bytes - self.loan.within;
        Some(usize::try_from(left).map_or(most, |left| left.min(most)))
    }

    fn advance(&mut self, count: usize) {
        let loan = &mut self.loan;
        loan.refusable = false;
        loan.stalled = false;
        loan.unreachable_since = None;
        loan.within += count as u64;
        if loan.runs[loan.run].bytes == loan.within {
            loan.run += 1;
            loan.within = 0;
        }
    }

    /// Reads exactly `bytes` from where the loan has been read to.
    fn read(&mut self, bytes: &mut [u8]) -> Result<Attempt> {
        let run = self.loan.runs[self.loan.run];
        if run.segment != 0 {
            return Err(corrupt(format_args!("segment {}", run.segment)));
        }
        let result = match self.peer {
            Some(peer) => read_process(peer, run.at + self.loan.within, bytes),
            None => Err(Errno::SRCH),
        };
        match result {
            Ok(()) => Ok(self.verdict()),
            Err(_) if self.loan.refusable => Ok(Attempt::Refused),
            Err(errno) => {
                // A process that ends takes its memory with it before it says so; one that fails revokes it.
                let since = self.loan.unreachable_since.get_or_insert_with(Instant::now);
                let ends = matches!(errno, Errno::SRCH | Errno::FAULT);
                if (ends && since.elapsed() < PATIENCE) || self.account.is_revoked() {
                    self.loan.stalled = true;
                    return Ok(Attempt::Nothing);
                }
                let peer = self.peer.unwrap_or_default();
                Err(Error::system(
                    format_args!("read the memory of process {peer}"),
                    errno,
                ))
            }
        }
    }

    fn end_if_read(&mut self) -> Back {
        if self.loan.run == self.loan.runs.len() {
            if let Some((bytes, since)) = self.loan.timed {
                self.note_lent(bytes, since);
            }
            self.give_back(false)
        } else {
            Back::default()
        }
    }

    fn give_back(&mut self, refused: bool) -> Back {
        self.reading = false;
        self.account.give_back(refused)
    }
}

/// Fills `bytes` from `address` on of another process's memory.
pub(super) fn read_process(
    process: i32,
    address: u64,
    bytes: &mut [u8],
) -> std::result::Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        let local = libc::iovec {
            iov_base: bytes[done..].as_mut_ptr().cast(),
            iov_len: bytes.len() - done,
        };
        let remote = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(address as usize + done),
            iov_len: bytes.len() - done,
        };
        // SAFETY: the kernel writes to the local vector alone, which is the rest of an exclusive slice; the remote one
        // names memory of the other process, which the kernel checks.
        let count = unsafe { libc::process_vm_readv(process, &local, 1, &remote, 1, 0) };
        match count {
            -1 => match Errno::from_io_error(&std::io::Error::last_os_error()) {
                Some(Errno::INTR) => {}
                other => return Err(other.unwrap_or(Errno::IO)),
            },
            0 => return Err(Errno::FAULT),
            count => done += count as usize,
        }
    }
    Ok(())
}

/// The error of a message that is taken before the payload of the one before has been read to its end.
#[cold]
pub(super) fn unfinished() -> Error {
    corrupt(format_args!("it is longer than its message"))
}

#[cold]
fn corrupt(what: std::fmt::Arguments<'_>) -> Error {
    Error::new(
        Code::Untrusted,
        format!(
            "an impossible loan on a shared memory link ({what}): the peer's memory is damaged or its version of \
             unisono differs"
        ),
    )
}
