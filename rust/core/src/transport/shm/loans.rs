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
//! Memory may turn out to be out of reach later: a process takes itself out of the debugger's reach, or lends memory of a kind
//! that the call does not read. A receiver *reports* such a loan, and the sender *moves* it: it copies the payload to a
//! segment of its own, which the peer maps, and lends no private memory any more. Other messages may have been sent
//! meanwhile, so the ring would be the wrong place.
//!
//! Memory in the heap may also be *shared*: the receiver may write to it as well, until it gives it back ([`Writer`]).
//!
//! A sender whose operation fails before its loans are back *revokes* them all, before its memory is used for anything
//! else. The receiver looks for that after each block it has read, so what it makes use of was read before; and before
//! it reads, since the sender's heap may be gone by then. Around what it writes it raises a flag before it looks, and the
//! sender looks for the flag after it has revoked: either it sees the flag, and waits, or the receiver sees that it must
//! not write.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::pace::{Choices, Filling, Offered, Paces, class};
use crate::error::{Code, Error, Result};
use crate::plan::links::LENT_FROM;
use crate::sync::Word;
use crate::transport::{Loan, Ticket};

/// Bytes of a [`Run`] in a post.
pub(super) const RUN: usize = 24;

/// The words in which the two sides keep account of one direction's loans. All are zero at first.
pub(super) trait Ledger {
    type Word: Word<Value = u64>;

    /// The number of loans that have come back, twice, and 1 more when the last of them was the trial and was refused, or
    /// when the next one is reported as out of reach. Written by the receiver.
    fn returned(&self) -> &Self::Word;
    /// The number of the last loan that came back unread. Written by the receiver before it counts the loan as
    /// returned.
    fn declined(&self) -> &Self::Word;
    /// The number of the last loan that was moved, and the segment that it was moved to. Written by the sender, the number
    /// last.
    fn moved(&self) -> &Self::Word;
    fn moved_to(&self) -> &Self::Word;
    /// 1 once the sender has taken back what it lent. Written by the sender.
    fn revoked(&self) -> &Self::Word;
    /// 1 while the receiver writes to what is shared. Written by the receiver.
    fn writing(&self) -> &Self::Word;
    /// Nanoseconds that the sender has spent on the message it copies into the ring, written by the sender; and what
    /// messages of a class have taken lately ([`Paces`]), written by the receiver. Advice, which orders nothing.
    fn filling(&self) -> &Self::Word;
    fn paces(&self, class: usize) -> &Self::Word;
    /// The ring's flags.
    fn producer_asleep(&self) -> &Self::Word;
    fn consumer_asleep(&self) -> &Self::Word;
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

    pub(super) fn read(bytes: &[u8; RUN]) -> Option<Self> {
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
    /// A loan that the receiver has reported as out of reach.
    reported: Option<u64>,
    /// Some was: no private memory is lent any more.
    has_given_up: bool,
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
            reported: None,
            has_given_up: false,
        }
    }

    /// Lends private memory from `bytes` bytes on, whatever it costs.
    pub(super) fn lend_private_from(&mut self, bytes: usize) {
        (self.private_from, self.choices) = (bytes, None);
    }

    /// From now on several threads of the peer read what is as long as `bytes`.
    pub(super) fn read_by_several(&mut self, bytes: usize) {
        if let Some(choices) = &mut self.choices {
            choices.read_by_several(bytes);
        }
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

    /// Whether `bytes` are better lent than streamed, and the peer can read them as far as is known. Some or (`whole`) all of
    /// them lie in private memory. `incoming`: the paces of such messages in the other direction.
    pub(super) fn lends_private(&mut self, bytes: usize, whole: bool, incoming: Paces) -> bool {
        let reached = match self.reach {
            // Once the peer has read the part in the heap, it could not refuse the payload any more.
            Reach::Unknown => whole,
            Reach::Proven => true,
            Reach::Refused => false,
        };
        if !reached || self.has_given_up || bytes < self.private_from {
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

    /// The state of a loan. A sender asks again and again, and sends nothing else meanwhile unless the loan is proven.
    pub(super) fn look(&mut self, ticket: Ticket) -> Result<Loan> {
        // Acquire: the receiver has finished reading.
        let word = self.ledger.returned().load(Ordering::Acquire);
        let (returned, marked) = (word >> 1, word & 1 != 0);
        // Until the trial is seen to be back nothing is sent after it.
        let refused = marked && self.trial == Some(returned) && self.reach != Reach::Proven;
        let reported = marked && !refused;
        if returned > self.lent || (reported && returned == self.lent) {
            return Err(corrupt(format_args!(
                "{returned} of {} returned, and the next is out of reach: {reported}",
                self.lent
            )));
        }
        self.reported = reported.then_some(returned + 1);
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

    /// The loan that waits to be moved, as last [looked](Lender::look) at.
    #[inline]
    pub(super) fn reported(&self) -> Option<u64> {
        self.reported
    }

    /// No private memory is lent any more.
    pub(super) fn give_up_private(&mut self) {
        self.has_given_up = true;
    }

    /// Loan `number` lies in `segment` now, which the peer has mapped. Says whether the receiver sleeps.
    pub(super) fn tell_moved(&mut self, number: u64, segment: u32) -> Back {
        let to = self.ledger.moved_to();
        to.store(u64::from(segment), Ordering::Relaxed);
        // Also releases: a peer that sees the number sees the segment, and the payload in it.
        self.ledger.moved().swap(number, Ordering::SeqCst);
        let flag = self.ledger.consumer_asleep();
        Back {
            wake: flag.load(Ordering::SeqCst) != 0 && flag.swap(0, Ordering::AcqRel) != 0,
        }
    }

    /// The account of what has come back: what a sleeper that waits for a loan looks at once more.
    pub(super) fn returned(&self) -> u64 {
        self.ledger.returned().load(Ordering::Acquire)
    }

    /// Takes back what is lent.
    pub(super) fn revoke(&mut self) {
        self.ledger.revoked().swap(1, Ordering::SeqCst);
        // Writes to the memory from here on are not seen without the word above.
        self.ledger.fence(Ordering::SeqCst);
    }
}

impl<L: Ledger + Clone> Lender<L> {
    /// The flag that the receiver raises while it writes to what is shared.
    pub(super) fn flag_of_writer(&self) -> Flag<L> {
        Flag(self.ledger.clone())
    }
}

/// The flag of a receiver that writes to what is shared, as the sender sees it.
pub(super) struct Flag<L>(L);

impl<L: Ledger> Flag<L> {
    /// Whether the receiver writes. Never again, once false after [`Lender::revoke`].
    pub(super) fn is_raised(&self) -> bool {
        // Acquire: what it wrote is there.
        self.0.writing().load(Ordering::Acquire) != 0
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
        // A lender that revokes after this has seen the flag.
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
    pub(super) ledger: L,
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
        self.tell(self.borrowed, refused)
    }

    /// Says that the last loan is out of reach. Says whether the sender sleeps.
    pub(super) fn report(&mut self) -> Back {
        self.tell(self.borrowed - 1, true)
    }

    /// The segment that the last loan was moved to, if it was.
    pub(super) fn moved_to(&self) -> Option<u32> {
        // Acquire: the segment is there, and the payload in it.
        let number = self.ledger.moved().load(Ordering::Acquire);
        (number == self.borrowed).then(|| self.ledger.moved_to().load(Ordering::Relaxed) as u32)
    }

    fn tell(&mut self, returned: u64, marked: bool) -> Back {
        // Also releases: a rank that sees the count may write to the memory.
        self.ledger
            .returned()
            .swap(returned << 1 | u64::from(marked), Ordering::SeqCst);
        let flag = self.ledger.producer_asleep();
        Back {
            wake: flag.load(Ordering::SeqCst) != 0 && flag.swap(0, Ordering::AcqRel) != 0,
        }
    }
}

/// Whether the other side sleeps and must be rung for, because a loan has gone back or was moved.
#[derive(Clone, Copy, Debug, Default)]
#[must_use]
pub(super) struct Back {
    pub(super) wake: bool,
}

/// The error of a message that is taken before the payload of the one before has been read to its end.
#[cold]
pub(super) fn unfinished() -> Error {
    corrupt(format_args!("it is longer than its message"))
}

/// The error of a loan that is reported as out of reach although no private memory was lent in it.
#[cold]
pub(super) fn readable(number: u64) -> Error {
    corrupt(format_args!(
        "loan {number} is said to be out of reach, and lies in the heap"
    ))
}

#[cold]
pub(super) fn corrupt(what: std::fmt::Arguments<'_>) -> Error {
    Error::new(
        Code::Untrusted,
        format!(
            "an impossible loan on a shared memory link ({what}): the peer's memory is damaged or its version of \
             unisono differs"
        ),
    )
}
