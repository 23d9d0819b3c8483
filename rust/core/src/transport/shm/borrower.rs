//! The side that reads what is lent: in place where it lies in the peer's heap, by the system call where it does not, and
//! from where it was moved to if that does not do (see `loans`).
//!
//! The system call names a process by its number, and that may be another process's by then, or the process may have executed
//! another program. So each call reads the lender's mark with it (`mark`), without which nothing is delivered or folded.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::loans::{Account, Back, Ledger, RUN, Run, Writer, corrupt, unfinished};
use super::pace::{Clock, Paces};
use super::peer::{Fault, Peer};
use super::ring::MAX_ALIGN;
use crate::error::Result;
use crate::heap::PeerHeap;
use crate::processors;
use crate::reduce::{Streaming, Workers};
use crate::sync::Word;
use crate::transport::READ_BY_SEVERAL_FROM;

/// How much is read at once into memory between: it stays in the cache until it is folded.
const FOLDED_AT_ONCE: usize = 64 << 10;

/// How much is read at once into its place, so that a caller with several links comes round to all of them, and to what
/// it sends meanwhile.
const READ_AT_ONCE: usize = 256 << 10;

/// How much several threads read at once, some milliseconds long: each time they have to be woken.
const READ_TOGETHER: usize = 64 << 20;

/// How long a process that has not ended may seem to be gone: one with much memory takes that long to end. One whose first
/// thread alone has ended seems to be gone for good.
const LONGEST_ENDING: Duration = Duration::from_secs(10);

/// The side that reads what is lent.
pub(super) struct Borrower<L> {
    account: Account<L>,
    clock: Clock,
    /// The peer, if its process is one that can be named.
    pub(super) peer: Option<Peer>,
    /// Threads that may read with this one, and the cores that there are.
    workers: Option<(Arc<Workers>, usize)>,
    /// A loan of private memory has been announced.
    tried: bool,
    /// The peer's process ended while its memory was read, or executed another program.
    pub(super) has_ended: bool,
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
    /// Up to there, in this run, this thread reads alone: there was no core for another one.
    alone_until: u64,
    /// It may be refused: it is the trial, and nothing of it has been delivered.
    refusable: bool,
    /// The last attempt found nothing to read.
    stalled: bool,
    /// Since when the process seems to be gone.
    gone_since: Option<Instant>,
    /// It was reported as out of reach, and is read where it is moved to.
    reported: bool,
    /// Bytes of the runs before the one being read.
    before: u64,
}

/// Where the bytes are that are to be read next.
enum NextBytes<'a> {
    Here(&'a [u8]),
    InPrivate,
    /// They are being moved.
    Nowhere,
}

/// How an attempt to read ended.
enum Attempt {
    Read,
    /// Not now, or never: the peer's state will tell.
    Nothing,
    Refused,
    /// It is out of reach.
    Reported,
}

impl<L: Ledger + Clone> Borrower<L> {
    /// The right to write to what is shared.
    pub(super) fn writer(&self) -> Writer<L> {
        Writer::new(self.account.ledger.clone())
    }
}

impl<L: Ledger> Borrower<L> {
    pub(super) fn new(ledger: L, peer: Option<Peer>) -> Self {
        Self {
            account: Account::new(ledger),
            clock: Clock::default(),
            peer,
            workers: None,
            tried: false,
            has_ended: false,
            reading: false,
            loan: Reading::default(),
        }
    }

    /// These threads may read what lies in private memory, while there are cores for them.
    pub(super) fn share(&mut self, workers: &Arc<Workers>) {
        self.workers = Some((Arc::clone(workers), processors::cores()));
    }

    /// The recent paces of messages as long as `bytes`.
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

    /// Gives back a loan before anything of it has been read.
    pub(super) fn decline(&mut self) -> Back {
        debug_assert!(self.reading && (self.loan.run, self.loan.within) == (0, 0));
        self.reading = false;
        self.account.decline()
    }

    /// The place that is shared with this side, in a loan before anything of it has been read.
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
        let is_moved = || self.loan.reported && self.account.moved_to().is_some();
        self.reading && (!self.loan.stalled || is_moved())
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
        let workers = self.free_workers(bytes.len());
        let limit = bytes.len().min(match workers {
            Some(_) => READ_TOGETHER,
            None => READ_AT_ONCE,
        });
        let mut done = 0;
        while done < limit
            && let Some(count) = self.left_of_run(limit - done)
        {
            let target = &mut bytes[done..done + count];
            let attempt = match self.place(heap, count)? {
                NextBytes::Here(lent) => {
                    copy(target, lent);
                    self.verdict()
                }
                NextBytes::InPrivate => self.read(target, workers.as_deref())?,
                NextBytes::Nowhere => self.stall(),
            };
            match attempt {
                Attempt::Read => self.advance(count),
                Attempt::Nothing => break,
                Attempt::Refused => return Ok((0, self.give_back(true))),
                Attempt::Reported => return Ok((done, self.account.report())),
            }
            done += count;
        }
        Ok(self.end_if_read(done))
    }

    /// Lends consecutive runs of multiples of `align` bytes to `fold`, in total at most `max`: as [`Borrower::recv`].
    pub(super) fn fold(
        &mut self,
        heap: Option<&PeerHeap>,
        (max, align): (usize, usize),
        fold: &mut dyn FnMut(&[u8]),
    ) -> Result<(usize, Back)> {
        assert!((1..=MAX_ALIGN).contains(&align) && max.is_multiple_of(align));
        let limit = max.min(READ_AT_ONCE / align * align);
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
                NextBytes::Here(lent) => {
                    fold(lent);
                    (count, self.verdict())
                }
                NextBytes::InPrivate => {
                    self.fold_block(count.min(FOLDED_AT_ONCE / align * align), fold)?
                }
                NextBytes::Nowhere => (count, self.stall()),
            };
            match attempt {
                Attempt::Read => self.advance(count),
                Attempt::Nothing => break,
                Attempt::Refused => return Ok((0, self.give_back(true))),
                Attempt::Reported => return Ok((done, self.account.report())),
            }
            done += count;
        }
        Ok(self.end_if_read(done))
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
            between.resize(FOLDED_AT_ONCE, 0);
            let attempt = self.read(&mut between[..count], None)?;
            if matches!(attempt, Attempt::Read) {
                fold(&between[..count]);
            }
            Ok((count, attempt))
        })
    }

    /// Where the next `count` bytes are.
    fn place<'a>(&self, heap: Option<&'a PeerHeap>, count: usize) -> Result<NextBytes<'a>> {
        let run = self.loan.runs[self.loan.run];
        let (segment, at) = match self.loan.reported {
            // Also of what was in the heap before.
            true => match self.account.moved_to() {
                Some(segment) => (segment, self.loan.before + self.loan.within),
                None => return Ok(NextBytes::Nowhere),
            },
            false => (run.segment, run.at + self.loan.within),
        };
        let Some(heap) = heap.filter(|_| segment != 0) else {
            return Ok(NextBytes::InPrivate);
        };
        // SAFETY: the peer lent these bytes and leaves them alone until they are given back, which is after the slice's
        // last use (`recv`, `fold`); they are used as numbers alone.
        let lent = unsafe { heap.slice(segment, at, count) }?;
        Ok(lent.map_or(NextBytes::InPrivate, NextBytes::Here))
    }

    /// Whether what has just been read counts: the sender had not taken it back before.
    fn verdict(&mut self) -> Attempt {
        match self.account.is_revoked() {
            true => self.stall(),
            false => Attempt::Read,
        }
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
        loan.gone_since = None;
        loan.within += count as u64;
        if loan.runs[loan.run].bytes == loan.within {
            loan.before += loan.within;
            loan.run += 1;
            (loan.within, loan.alone_until) = (0, 0);
        }
    }

    /// The threads that read with this one, of the next `most` bytes, if these are many and lie in private memory. A program
    /// that computes keeps its core: there has to be one for each of them beside all other threads that run. The lender is no
    /// such program while it is awake, for it waits for the loan, and soon sleeps.
    fn free_workers(&mut self, most: usize) -> Option<Arc<Workers>> {
        let (workers, cores) = self.workers.as_ref()?;
        let loan = &mut self.loan;
        let run = loan.runs.get(loan.run)?;
        let left = (run.bytes - loan.within).min(most as u64);
        let is_long = left >= READ_BY_SEVERAL_FROM as u64;
        if run.segment != 0 || loan.reported || !is_long || loan.within < loan.alone_until {
            return None;
        }
        let is_awake = self
            .account
            .ledger
            .producer_asleep()
            .load(Ordering::Relaxed)
            == 0;
        let are_free = processors::are_free(*cores, workers.threads(), 1 + usize::from(is_awake));
        if !are_free {
            loan.alone_until = loan.within + READ_BY_SEVERAL_FROM as u64;
        }
        are_free.then(|| Arc::clone(workers))
    }

    /// Reads exactly `bytes` from where the loan has been read to, with these threads.
    fn read(&mut self, bytes: &mut [u8], workers: Option<&Workers>) -> Result<Attempt> {
        let run = self.loan.runs[self.loan.run];
        if run.segment != 0 {
            return Err(corrupt(format_args!("segment {}", run.segment)));
        }
        let result = match &self.peer {
            Some(peer) => match (run.at + self.loan.within, workers) {
                (address, Some(workers)) => peer.read_by(workers, address, bytes),
                (address, None) => peer.read(address, bytes),
            },
            None => Err(Fault::OutOfReach(Errno::SRCH)),
        };
        let errno = match result {
            Ok(()) => return Ok(self.verdict()),
            Err(_) if self.loan.refusable => return Ok(Attempt::Refused),
            Err(Fault::Gone) => {
                self.has_ended = true;
                return Ok(self.stall());
            }
            Err(Fault::OutOfReach(errno)) => errno,
        };
        if self.has_peer_ended() || self.account.is_revoked() {
            return Ok(self.stall());
        }
        // A process that ends takes its memory with it before it has ended.
        let since = *self.loan.gone_since.get_or_insert_with(Instant::now);
        if errno == Errno::SRCH && since.elapsed() < LONGEST_ENDING {
            return Ok(self.stall());
        }
        let number = self.peer.as_ref().map_or(0, |peer| peer.process().number());
        tracing::info!(
            "the memory of process {number} cannot be read ({errno}): it is to be moved"
        );
        (self.loan.reported, self.loan.stalled) = (true, true);
        Ok(Attempt::Reported)
    }

    /// Nothing can be read now.
    fn stall(&mut self) -> Attempt {
        self.loan.stalled = true;
        Attempt::Nothing
    }

    /// Whether the process whose memory is read has ended.
    fn has_peer_ended(&mut self) -> bool {
        self.has_ended |= self
            .peer
            .as_ref()
            .is_some_and(|peer| peer.process().has_ended());
        self.has_ended
    }

    /// Gives the loan back when all of it has been read.
    fn end_if_read(&mut self, done: usize) -> (usize, Back) {
        if self.loan.run < self.loan.runs.len() {
            return (done, Back::default());
        }
        if let Some((bytes, since)) = self.loan.timed {
            self.note_lent(bytes, since);
        }
        (done, self.give_back(false))
    }

    fn give_back(&mut self, refused: bool) -> Back {
        self.reading = false;
        self.account.give_back(refused)
    }
}
