//! How a thread waits: looks again at once for a while, then gives its core away, then sleeps until woken.
//!
//! With more ranks than cores the core is given away at once: another rank needs it to produce what this one waits
//! for, and spinning before that costs a time slice (2,000 spins turned 3.8 microseconds into 65 when measured).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};

use crate::error::{Error, Result};

/// What a waiting thread does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Spin,
    Yield,
    Sleep,
}

/// How often to look again before sleeping, by whether there is a core to spare.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    spins: u32,
    yields: u32,
    looked: u32,
}

impl Patience {
    /// For a host on which `ranks` of the group share `cores`.
    pub(crate) fn new(ranks: usize, cores: usize) -> Self {
        let spins = if ranks > cores { 0 } else { 400 };
        Self {
            spins,
            yields: 200,
            looked: 0,
        }
    }

    /// Something moved: start anew.
    pub(crate) fn reset(&mut self) {
        self.looked = 0;
    }

    /// Nothing moved.
    pub(crate) fn next(&mut self) -> Next {
        self.looked += 1;
        if self.looked <= self.spins {
            Next::Spin
        } else if self.looked <= self.spins + self.yields {
            Next::Yield
        } else {
            Next::Sleep
        }
    }

    /// Whether this is one of the rare moments to look at things off the hot path.
    pub(crate) fn is_time_to_look_around(&self) -> bool {
        self.looked % 64 == 63
    }
}

/// A set of descriptors to sleep on, and a bell that other threads ring.
#[derive(Debug)]
pub(crate) struct Sleeper {
    epoll: OwnedFd,
    bell: OwnedFd,
}

impl Sleeper {
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

    /// Watches `fd` for every change. A closed descriptor leaves the set by itself.
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>) -> Result<()> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&self.epoll, fd, EventData::new_u64(1), flags)
            .map_err(|error| Error::system("watch a link", error))
    }

    /// Watches another sleeper's set for as long as something in it has not been looked at.
    pub(crate) fn watch_set(&self, other: &Self) {
        let flags = EventFlags::IN | EventFlags::ET;
        // It may be there already; and without memory for the entry the caller's timed sleep still ends.
        let _ = epoll::add(&self.epoll, &other.epoll, EventData::new_u64(2), flags);
    }

    /// Watches another sleeper's set no more.
    pub(crate) fn forget_set(&self, other: &Self) {
        let _ = epoll::delete(&self.epoll, &other.epoll);
    }

    /// Wakes the sleeping thread, now or when it next sleeps.
    pub(crate) fn ring(&self) {
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// Sleeps until something changes, at most until `until` and never longer than a second, so that what nobody
    /// rings for is seen in the end.
    pub(crate) fn sleep(&self, until: Option<Instant>) {
        const LONGEST: Duration = Duration::from_secs(1);
        let left = until.map_or(LONGEST, |until| {
            until.saturating_duration_since(Instant::now())
        });
        self.wait(left.min(LONGEST));
    }

    /// Takes note of everything that changed, without sleeping.
    pub(crate) fn clear(&self) {
        self.wait(Duration::ZERO);
    }

    /// Sleeps until something changes.
    pub(crate) fn sleep_forever(&self) {
        self.collect(None);
    }

    fn wait(&self, time: Duration) {
        let time = Timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: i64::from(time.subsec_nanos()),
        };
        self.collect(Some(&time));
    }

    fn collect(&self, time: Option<&Timespec>) {
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 16];
        // Interrupted or not, the caller looks again.
        let _ = epoll::wait(self.epoll.as_fd(), &mut events, time);
    }
}
