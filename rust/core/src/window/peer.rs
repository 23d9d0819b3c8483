//! The memory of one rank, as another one has it, and the ways to it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::held::Held;
use crate::communicator::Communicator;
use crate::error::{Code, Error, Result};
use crate::heap::IsOver;
use crate::interrupts::SLICE;
use crate::locks::{Condvar, Mutex};
use crate::one_sided::{Port, RemoteRegion, Transfer};
use crate::transport::ends::End;
use crate::types::DataType;

/// A rank's memory.
pub(super) struct Peer {
    pub(super) bytes: usize,
    pub(super) dtype: DataType,
    /// For the doors: they know what it means.
    pub(super) note: Vec<u8>,
    /// Of a rank on this host.
    pub(super) near: Option<Near>,
    /// Of memory that is not mapped here.
    pub(super) far: Option<Far>,
    pub(super) turn: Turn,
}

/// A rank on this host.
pub(super) struct Near {
    pub(super) end: End,
    pub(super) is_gone: IsOver,
    /// Its memory, where it is mapped here: in the heap, or on a device; or why it is not.
    pub(super) held: Result<Held>,
}

/// Memory that is reached through a port.
pub(super) struct Far {
    invitation: Vec<u8>,
    pub(super) remote: RemoteRegion,
    /// Once it has been needed.
    pub(super) port: Mutex<Option<Arc<Port>>>,
    pub(super) under_way: Mutex<Vec<Transfer>>,
}

impl Far {
    pub(super) fn new(remote: RemoteRegion, invitation: Vec<u8>) -> Self {
        Self {
            invitation,
            remote,
            port: Mutex::new(None),
            under_way: Mutex::default(),
        }
    }

    /// The connection to it, which the first use makes. The memory is that of the rank at `place` of `comm`.
    pub(super) fn connect(&self, comm: &Communicator, place: usize) -> Result<Arc<Port>> {
        let mut port = self.port.lock();
        if let Some(port) = &*port {
            return Ok(Arc::clone(port));
        }
        let config = comm.config();
        let made = Port::new(config.clone())?;
        let until = Instant::now() + config.join_timeout.duration();
        let mut patience = FIRST_ATTEMPT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match made.connect(&self.invitation, patience.min(left)) {
                Ok(()) => return Ok(Arc::clone(port.insert(Arc::new(made)))),
                Err(error) if error.code == Code::InvalidArgument => return Err(error),
                Err(error) if left <= patience => return Err(unreachable(&error)),
                Err(_) => patience *= 2,
            }
            // A rank that is gone is not waited for: the group finds that out, over a link to it.
            let group = comm.group();
            group.check_alive()?;
            group.open_message_link(place)?;
            if let Some(error) = group.lost(|peer| peer == place) {
                return Err(error);
            }
        }
    }

    /// Keeps a transfer until it is [waited for](Self::wait).
    pub(super) fn keep(&self, transfer: &Transfer) {
        let mut under_way = self.under_way.lock();
        // The failure of one that has ended is to be told.
        under_way.retain(|transfer| !matches!(transfer.result(), Some(Ok(()))));
        under_way.push(transfer.clone());
    }

    /// The transfers under way: since when, and whether each writes.
    pub(super) fn under_way(&self) -> Vec<(Instant, bool)> {
        let under_way = self.under_way.lock();
        under_way.iter().filter_map(Transfer::under_way).collect()
    }

    /// Waits for all transfers to it, and tells the first failure.
    pub(super) fn wait(&self, until: Option<Instant>) -> Result<()> {
        // They stay in the list meanwhile: another thread that waits must find them.
        let awaited = self.under_way.lock().clone();
        let mut result = Ok(());
        for transfer in &awaited {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            result = result.and(transfer.wait(left));
        }
        let is_over = |transfer: &Transfer| {
            transfer.is_done() && awaited.iter().any(|awaited| awaited.is(transfer))
        };
        self.under_way.lock().retain(|transfer| !is_over(transfer));
        result
    }
}

/// The signals of one rank that this one has taken. One thread waits for them at a time.
#[derive(Default)]
pub(super) struct Turn {
    state: Mutex<Taken>,
    is_free: Condvar,
}

/// The count of a rank's signals.
#[derive(Clone, Copy, Default)]
struct Taken {
    is_awaited: bool,
    /// How many have been taken.
    count: u32,
    /// Messages of a rank that woke this one, and that have not been received.
    owed: u32,
    /// Since when this rank waits, part by part, and when the last part ended in vain.
    waits: Option<(Instant, Instant)>,
}

/// How long the first attempt to connect may take, before the next one, which may take twice as long.
const FIRST_ATTEMPT: Duration = Duration::from_secs(1);

/// A wait that goes on within this time is the same one: the doors wait in parts.
const SAME_WAIT: Duration = Duration::from_millis(500);

/// How long a thread takes at most from one part of a wait to the next, mostly.
const BETWEEN: Duration = Duration::from_millis(20);

/// The tag of messages that are signals, or wake a rank that sleeps until there is one.
pub(super) const SIGNALS: u64 = 0;

impl Peer {
    /// Takes a signal of this rank, which is number `place` of `comm`; waits for one, for about `patience`. Returns whether
    /// there was one.
    pub(super) fn take_signal(
        &self,
        comm: &Communicator,
        place: usize,
        patience: Duration,
    ) -> Result<bool> {
        let mut taken = self.turn.state.lock();
        while taken.is_awaited {
            if self.turn.is_free.wait_for(&mut taken, patience).timed_out() {
                return Ok(false);
            }
        }
        if let Some(near) = &self.near
            && near.end.is_signalled(taken.count)
        {
            taken.count = taken.count.wrapping_add(1);
            taken.waits = None;
            // There may be more signals, and a thread that waits for its turn.
            self.turn.is_free.notify_one();
            return Ok(true);
        }
        taken.is_awaited = true;
        let mut mine = *taken;
        drop(taken);
        let result = match &self.near {
            Some(near) => near.wait(comm, place, patience, &mut mine),
            None => receive(comm, place, patience),
        };
        mine.waits = match result {
            Ok(false) if !patience.is_zero() => Some(mine.in_vain(patience)),
            _ => None,
        };
        *self.turn.state.lock() = Taken {
            is_awaited: false,
            ..mine
        };
        self.turn.is_free.notify_one();
        result
    }

    /// Since when this rank waits for a signal of that one, if it does.
    pub(super) fn awaited_since(&self) -> Option<Instant> {
        let taken = *self.turn.state.lock();
        let now = Instant::now();
        let longest = match taken.is_awaited {
            true => SLICE + SAME_WAIT,
            false => BETWEEN,
        };
        match taken.waits {
            Some((since, last)) if now.saturating_duration_since(last) < longest => Some(since),
            // It begins, and has read no clock.
            _ => taken.is_awaited.then_some(now),
        }
    }
}

impl Taken {
    /// The wait that goes on when a part of it has ended in vain.
    fn in_vain(&self, part: Duration) -> (Instant, Instant) {
        let now = Instant::now();
        let begun = now.checked_sub(part).unwrap_or(now);
        match self.waits {
            Some((since, last)) if begun.saturating_duration_since(last) < SAME_WAIT => {
                (since, now)
            }
            _ => (begun, now),
        }
    }
}

impl Near {
    /// Waits for a signal, and takes it. The thread looks for a short while, and then sleeps until a message wakes it.
    fn wait(
        &self,
        comm: &Communicator,
        place: usize,
        patience: Duration,
        taken: &mut Taken,
    ) -> Result<bool> {
        let end = &self.end;
        let count = taken.count;
        let mut is_signalled = comm.group().look_until(|| end.is_signalled(count))?;
        while !is_signalled {
            end.arm();
            if end.is_signalled(count) {
                taken.owed += u32::from(!end.disarm());
                break;
            }
            let message = receive(comm, place, patience);
            // Another one may have come first that was owed from before.
            taken.owed += u32::from(!end.disarm());
            let has_come = message?;
            taken.owed = taken.owed.saturating_sub(u32::from(has_come));
            is_signalled = end.is_signalled(count);
            if !has_come && !is_signalled {
                return Ok(false);
            }
        }
        taken.count = count.wrapping_add(1);
        Ok(true)
    }
}

/// Receives a message of a signal, if one comes within that time.
fn receive(comm: &Communicator, place: usize, patience: Duration) -> Result<bool> {
    if comm.probe(Some(place), SIGNALS, Some(patience))?.is_none() {
        return Ok(false);
    }
    comm.receive_slice::<u8>(&mut [], Some(place), SIGNALS)?;
    Ok(true)
}

#[cold]
fn unreachable(error: &Error) -> Error {
    Error::new(
        Code::PeerLost,
        format!("it cannot be reached: {}", error.message),
    )
}

/// The error of memory that its owner has taken back.
#[cold]
pub(super) fn closed(name: &str) -> Error {
    let what = format!("{name} has closed its window");
    Error::new(Code::Aborted, what)
}
