//! How a thread waits: it spins for a while, then yields its core, then sleeps until woken.
//!
//! With more ranks than cores a thread yields at once: another rank needs the core to produce what this one waits for, and
//! spinning before that costs a time slice (2,000 spins turned 3.8 microseconds into 65 when measured). How long it spins
//! and yields depends on what earlier waits have shown; changes are logged at debug.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use crate::engine::drive::contention::{self, Contention, Moment};
use crate::error::{Error, Result};
use crate::rarely::Rarely;

/// The next act of a waiting thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Spin,
    Yield,
    Sleep,
}

/// How long to spin and to yield before sleeping, learned from the waits before.
///
/// A spin during which something arrives doubles the time that the next one may take; one in vain halves it. So ranks with
/// cores of their own spin, and a rank whose peer waits for the same core soon yields at once.
///
/// A wait yields for long before it sleeps, unless yields turn out to cost time slices: see [`Contention`].
#[derive(Debug)]
pub(crate) struct Backoff {
    /// There are more ranks than cores.
    crowded: bool,
    /// There are at least as many ranks as cores, and two threads of a peer may read what is lent to it.
    makes_room: bool,
    contention: Contention,
    longest_spin: Duration,
    spin: Duration,
    yields: u32,
    yielding: Duration,
    looked: u32,
    yielded: u32,
    since: Option<Instant>,
    yielding_since: Option<Instant>,
    /// This wait has yielded for long enough: it only sleeps.
    is_asleep: bool,
    /// Spins have been in vain so often that they are as short as they get.
    is_spinning_in_vain: bool,
    log: Rarely,
}

/// How long a wait spins at most when there is a core for every rank: some tens of times what a message takes.
const SPIN: Duration = Duration::from_micros(30);

/// How often a wait yields before it sleeps, at the least.
const YIELDS: u32 = 1000;

/// For how long it does, at the least: some time slices of the scheduler.
const YIELDING: Duration = Duration::from_millis(10);

/// With up to this many ranks to a core, a rank that yields runs again within tens of microseconds. With more it yields less
/// often, so that it sleeps after about the same time.
const RANKS_PER_CORE: usize = 8;

/// How often a wait for work of other threads yields before it sleeps.
const YIELDS_TO_WORK: u32 = 32;

/// Yields between two readings of the clock.
const YIELDS_PER_READING: u32 = 64;

/// Looks between two readings of the clock.
const LOOKS_PER_READING: u32 = 16;

impl Backoff {
    /// For a host on which `ranks` of the group share `cores`; `spin` overrides how long to spin at most.
    pub(crate) fn new(ranks: usize, cores: usize, spin: Option<Duration>) -> Self {
        let usual = if ranks > cores { Duration::ZERO } else { SPIN };
        let spin = spin.unwrap_or(usual);
        let share = ranks.div_ceil(cores.max(1) * RANKS_PER_CORE).max(1);
        let yields = YIELDS / u32::try_from(share).unwrap_or(YIELDS);
        Self {
            crowded: ranks > cores,
            makes_room: false,
            contention: Contention::default(),
            longest_spin: spin,
            spin,
            yields: yields.max(YIELDS_TO_WORK),
            yielding: YIELDING,
            looked: 0,
            yielded: 0,
            since: None,
            yielding_since: None,
            is_asleep: false,
            is_spinning_in_vain: false,
            log: Rarely::new(4, Duration::from_secs(10)),
        }
    }

    /// For the progress thread, whose process has better uses for the core: it sleeps soon.
    pub(crate) fn of_background() -> Self {
        Self {
            yields: 10,
            yielding: Duration::ZERO,
            ..Self::new(1, 0, None)
        }
    }

    /// Whether the wait that goes on only sleeps.
    pub(crate) fn is_asleep(&self) -> bool {
        self.is_asleep
    }

    /// Two threads of a peer may read what this one of `ranks` lends, on `cores`.
    pub(crate) fn make_room(&mut self, ranks: usize, cores: usize) {
        self.makes_room = ranks >= cores;
    }

    /// Whether ranks of this host share cores.
    pub(crate) fn is_crowded(&self) -> bool {
        self.crowded
    }

    /// Something moved, after a wait or without one.
    #[inline(always)]
    pub(crate) fn moved(&mut self) {
        match self.yielded {
            0 => self.reset(),
            _ => self.moved_after_yields(),
        }
    }

    fn moved_after_yields(&mut self) {
        if let Some(found) = self.contention.end_wait(contention::now) {
            self.tell(found);
        }
        self.reset();
    }

    /// Logs how this thread waits from now on.
    #[cold]
    fn tell(&mut self, found: &str) {
        if let Some(suppressed) = self.log.line() {
            tracing::debug!(suppressed, "a rank that waits {found}");
        }
    }

    /// Start anew.
    #[inline]
    pub(crate) fn reset(&mut self) {
        if self.since.is_some() && self.yielded == 0 {
            self.spin = (self.spin * 2).min(self.longest_spin);
            if self.is_spinning_in_vain && self.spin == self.longest_spin {
                self.is_spinning_in_vain = false;
                self.tell("spins for long again: messages arrive meanwhile");
            }
        }
        (self.looked, self.yielded) = (0, 0);
        (self.since, self.yielding_since) = (None, None);
        self.is_asleep = false;
    }

    /// Nothing moved.
    pub(crate) fn next(&mut self) -> Next {
        self.looked += 1;
        if self.yielded == 0 && !self.longest_spin.is_zero() {
            if !self.looked.is_multiple_of(LOOKS_PER_READING) {
                return Next::Spin;
            }
            let since = *self.since.get_or_insert_with(Instant::now);
            if since.elapsed() < self.spin {
                return Next::Spin;
            }
            let shortest = self.longest_spin / 64;
            self.spin = (self.spin / 2).max(shortest);
            if self.spin == shortest && !self.is_spinning_in_vain {
                self.is_spinning_in_vain = true;
                self.tell("spins for a moment only, then yields: spins have been in vain");
            }
        }
        self.yielded += 1;
        let yields = self.contention.yields(self.yields, contention::now);
        if self.yielded <= yields || (yields == self.yields && self.is_yielding()) {
            Next::Yield
        } else {
            Next::Sleep
        }
    }

    /// The core was given away then, and has just come back.
    pub(crate) fn note_yield(&mut self, given: Moment) {
        self.contention.note(given, contention::now());
    }

    /// Nothing moved. `needs_others` tells whether the thread waits for the work of other threads: for peers to read the memory
    /// that is lent to them, or for links to be opened; `is_read_by_two`, whether for two threads of a peer.
    ///
    /// Then it sleeps soon where cores are few. To the scheduler a thread that yields is one that works, so that two
    /// readers may share one core while two ranks that wait for them share the other, and a hundred ranks that wait for
    /// links leave a hundredth of a core to each thread that opens one. A rank that is woken needs no luck to be back in time.
    pub(crate) fn next_unless(
        &mut self,
        needs_others: impl FnOnce() -> bool,
        is_read_by_two: impl FnOnce() -> bool,
    ) -> Next {
        match self.next() {
            Next::Yield
                if self.yielded.is_multiple_of(YIELDS_TO_WORK)
                    && (self.crowded && needs_others() || self.makes_room && is_read_by_two()) =>
            {
                Next::Sleep
            }
            next => next,
        }
    }

    /// Whether it has not yielded for long enough.
    fn is_yielding(&mut self) -> bool {
        if self.yielding.is_zero() || self.is_asleep {
            return false;
        }
        let since = *self.yielding_since.get_or_insert_with(Instant::now);
        self.is_asleep =
            self.yielded.is_multiple_of(YIELDS_PER_READING) && since.elapsed() >= self.yielding;
        !self.is_asleep
    }

    /// Whether this is one of the rare moments to look at things off the hot path.
    pub(crate) fn is_time_to_look_around(&self) -> bool {
        self.looked % 64 == 63
    }
}

/// A set of descriptors to sleep on, and a bell that other threads ring.
#[derive(Debug)]
pub(crate) struct Parker {
    epoll: OwnedFd,
    bell: OwnedFd,
}

impl Parker {
    /// Smaller keys stand for events that are not reported.
    pub(crate) const FIRST_KEY: u64 = 1 << 32;

    pub(crate) fn new() -> Result<Self> {
        let make = || -> rustix::io::Result<Self> {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            epoll::add(
                &epoll,
                &bell,
                EventData::new_u64(0),
                EventFlags::IN | EventFlags::ET,
            )?;
            Ok(Self { epoll, bell })
        };
        make().map_err(|error| Error::system("make a set of descriptors to wait on", error))
    }

    /// Watches `fd` for every change. A closed descriptor leaves the set by itself, but for the sign of a peer's life: other
    /// processes have that pipe too, and it rings once more when the peer ends. A descriptor that is in the set already stays,
    /// as that of a process to which several links lead.
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>) -> Result<()> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        match epoll::add(&self.epoll, fd, EventData::new_u64(1), flags) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(Error::system("watch a link", error)),
        }
    }

    /// Watches `fd` for what arrives there, which a sleep reports as `key`: see [`Parker::FIRST_KEY`].
    pub(crate) fn watch_as(&self, fd: BorrowedFd<'_>, key: u64) -> Result<()> {
        let flags = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&self.epoll, fd, EventData::new_u64(key), flags)
            .map_err(|error| Error::system("watch a link", error))
    }

    /// Watches another parker's set for as long as something in it has not been looked at.
    pub(crate) fn watch_set(&self, other: &Self) {
        let flags = EventFlags::IN | EventFlags::ET;
        // It may be there already; and without memory for the entry the caller's timed sleep still ends.
        let _ = epoll::add(&self.epoll, &other.epoll, EventData::new_u64(2), flags);
    }

    /// As [`Parker::watch_set`], for the group with this number, which a sleep reports as [`Parker::set_key`]. False
    /// when the system has no memory for it.
    pub(crate) fn watch_set_as(&self, other: &Self, number: u32) -> bool {
        self.watch_as(other.epoll.as_fd(), Self::set_key(number))
            .is_ok()
    }

    /// The key of all that a group sleeps on. No link has it.
    pub(crate) fn set_key(number: u32) -> u64 {
        (u64::from(number) << 32) | u64::from(u32::MAX)
    }

    /// Watches another parker's set no more.
    pub(crate) fn forget_set(&self, other: &Self) {
        let _ = epoll::delete(&self.epoll, &other.epoll);
    }

    /// Wakes the sleeping thread, now or when it next sleeps.
    pub(crate) fn unpark(&self) {
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// Waits for `time`, or for the bell alone.
    pub(crate) fn nap(&self, time: Duration) {
        let time = Timespec {
            tv_sec: 0,
            tv_nsec: i64::from(time.subsec_nanos()),
        };
        let mut bell = [PollFd::new(&self.bell, PollFlags::IN)];
        // Interrupted or not, the caller looks again.
        if let Ok(1..) = poll(&mut bell, Some(&time)) {
            let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        }
    }

    /// Sleeps until something changes, at most until `until` and never longer than a second, so that a
    /// change that rings no bell is seen in the end.
    ///
    /// Returns the keys of what has arrived.
    pub(crate) fn sleep(&self, until: Option<Instant>) -> Vec<u64> {
        self.wait(rest(until)).unwrap_or_default()
    }

    /// As [`Parker::sleep`]. Returns whether a signal has ended it.
    pub(crate) fn sleep_or_signal(&self, until: Option<Instant>) -> bool {
        self.wait(rest(until)) == Err(Errno::INTR)
    }

    /// Sleeps until something changes, at most until `until`. Returns the keys of what has arrived.
    pub(crate) fn sleep_long(&self, until: Option<Instant>) -> Vec<u64> {
        match until {
            Some(_) => self.sleep(until),
            None => self.collect(None).unwrap_or_default(),
        }
    }

    /// Takes note of everything that changed, without sleeping. Returns the keys of what has arrived.
    pub(crate) fn clear(&self) -> Vec<u64> {
        self.wait(Duration::ZERO).unwrap_or_default()
    }

    /// Whether something has changed, without taking note of it.
    #[cfg(any(test, feature = "simulate"))]
    pub(crate) fn is_rung(&self) -> bool {
        let mut epoll = [PollFd::new(&self.epoll, PollFlags::IN)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        matches!(poll(&mut epoll, Some(&now)), Ok(1..))
    }

    fn wait(&self, time: Duration) -> rustix::io::Result<Vec<u64>> {
        let time = Timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: i64::from(time.subsec_nanos()),
        };
        self.collect(Some(&time))
    }

    /// After an error, as after anything else, the caller looks again.
    fn collect(&self, time: Option<&Timespec>) -> rustix::io::Result<Vec<u64>> {
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 16];
        let (events, _) = epoll::wait(self.epoll.as_fd(), &mut events, time)?;
        let keys = events.iter().map(|event| event.data.u64());
        Ok(keys.filter(|key| *key >= Self::FIRST_KEY).collect())
    }
}

/// How long a sleep until then is.
fn rest(until: Option<Instant>) -> Duration {
    const LONGEST_SLEEP: Duration = Duration::from_secs(1);
    let left = until.map_or(LONGEST_SLEEP, |until| {
        until.saturating_duration_since(Instant::now())
    });
    left.min(LONGEST_SLEEP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_ranks_than_cores_never_spin() {
        let mut backoff = Backoff::new(3, 2, None);
        let started = Instant::now();
        let mut yields = 0;
        while backoff.next() == Next::Yield {
            yields += 1;
        }
        assert!(yields >= YIELDS && started.elapsed() >= YIELDING);
        assert_eq!(backoff.next(), Next::Sleep);
        backoff.reset();
        assert_eq!(backoff.next(), Next::Yield);
    }

    #[test]
    fn who_waits_for_the_work_of_others_sleeps_soon_where_cores_are_few() {
        for (ranks, soon) in [(3, true), (2, false)] {
            let mut backoff = Backoff::new(ranks, 2, None);
            let mut yields = 0;
            while backoff.next_unless(|| true, || true) != Next::Sleep {
                yields += 1;
            }
            assert_eq!(yields < YIELDS, soon);
            backoff.reset();
            let mut looks = 0..YIELDS;
            assert!(looks.all(|_| backoff.next_unless(|| false, || true) != Next::Sleep));
        }
    }

    #[test]
    fn a_lender_makes_room_for_the_second_of_two_readers_where_cores_are_few() {
        for (cores, soon) in [(2, true), (3, false)] {
            let mut backoff = Backoff::new(2, cores, None);
            backoff.make_room(2, cores);
            while backoff.next_unless(|| false, || true) != Next::Sleep {}
            assert_eq!(backoff.yielded < YIELDS, soon);
        }
    }

    #[test]
    fn many_ranks_to_a_core_yield_less_often() {
        let yields = |ranks, cores| Backoff::new(ranks, cores, None).yields;
        assert_eq!((yields(8, 2), yields(16, 2)), (YIELDS, YIELDS));
        assert_eq!((yields(64, 2), yields(512, 16)), (YIELDS / 4, YIELDS / 4));
        assert_eq!(yields(1 << 16, 2), YIELDS_TO_WORK);
    }

    #[test]
    fn a_spin_in_vain_makes_the_next_shorter() {
        let mut backoff = Backoff::new(2, 2, Some(Duration::from_millis(2)));
        let until_yield = |backoff: &mut Backoff| {
            while backoff.next() == Next::Spin {}
            backoff.reset();
            backoff.spin
        };
        let first = until_yield(&mut backoff);
        let second = until_yield(&mut backoff);
        assert!(second < first, "{second:?} after {first:?}");
        while backoff.since.is_none() {
            assert_eq!(backoff.next(), Next::Spin);
        }
        backoff.reset();
        assert_eq!(backoff.spin, first);
    }

    #[test]
    fn a_bell_rung_before_the_sleep_ends_it() {
        let parker = Parker::new().expect("descriptors");
        parker.unpark();
        let started = Instant::now();
        parker.sleep(None);
        assert!(started.elapsed() < Duration::from_millis(900));
    }
}
