//! A group: how it forms, and what it is asked and told besides its operations.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::time::Duration;

use unisono::config::{Config, DeviceFailure};
use unisono::error::{Code, Error, Result};
use unisono::fence::guard;
use unisono::locks::Mutex;
use unisono::rendezvous::launcher;
use unisono::{Candidate, Communicator};

use crate::interrupts::{self, outcome_of_wait, status_of_wait};
use crate::status::{ok, outcome, status};
use crate::store::TorchStore;
use crate::values::request;
use crate::{ffi, heap};

/// How long a group that is closed waits for what is under way on devices.
const FAREWELL: Duration = Duration::from_secs(3);

/// A group, whose members may change. It has none when joining failed, which the status beside it says, and when it is to be
/// reconfigured first.
pub(crate) struct Group {
    /// The last of `all`, or null.
    current: AtomicPtr<Communicator>,
    /// Calls that may be in one of them.
    calls: AtomicUsize,
    /// One after the other. Those before the last are closed, and go when no call can be in them.
    all: Mutex<Vec<Arc<Communicator>>>,
    /// By which it is reconfigured, once that was asked for.
    candidate: Mutex<Option<Candidate>>,
    /// The group of those that are left, where a call of `shrink` expected more of them.
    left: Mutex<Option<Communicator>>,
}

impl Group {
    fn new(communicator: Option<Communicator>, candidate: Option<Candidate>) -> Self {
        let group = Self {
            current: AtomicPtr::new(ptr::null_mut()),
            calls: AtomicUsize::new(0),
            all: Mutex::default(),
            candidate: Mutex::new(candidate),
            left: Mutex::default(),
        };
        if let Some(communicator) = communicator {
            group.replace(communicator);
        }
        group
    }

    /// Closes the communicator and goes on with another one.
    fn replace(&self, next: Communicator) {
        let next = Arc::new(next);
        let mut all = self.all.lock();
        let before = all.last().cloned();
        self.current
            .store(Arc::as_ptr(&next).cast_mut(), Ordering::SeqCst);
        all.push(next);
        // A call that begins after this look finds the new one.
        let earlier = all.len() - 1;
        let gone: Vec<_> = match self.calls.load(Ordering::SeqCst) {
            0 => all.drain(..earlier).collect(),
            _ => Vec::new(),
        };
        drop(all);
        if let Some(before) = before {
            before.close();
        }
        drop(gone);
    }
}

/// Joins the group that meets through the store. `numbers`: of its ranks in the whole job; none for the group of all.
pub(crate) fn join(
    store: &ffi::Store,
    rank: usize,
    world: usize,
    numbers: &[u64],
    settings: &[ffi::Setting],
) -> ffi::Joined {
    let joined = guard(|| {
        let config = configure(settings)?;
        let store = TorchStore { store, world };
        if numbers.len() != world {
            return Communicator::join(&store, rank, world, config);
        }
        let numbers: Vec<_> = numbers.iter().map(|number| *number as usize).collect();
        Communicator::join_part(&store, (rank, &numbers), config)
    });
    as_joined(joined.map(Some))
}

/// A group without members, to be reconfigured.
pub(crate) fn apart(settings: &[ffi::Setting]) -> ffi::Joined {
    let candidate = guard(|| candidate(configure(settings)?));
    let (status, candidate) = match candidate {
        Ok(candidate) => (ok(), Some(candidate)),
        Err(error) => (status_of_wait(&error), None),
    };
    ffi::Joined {
        status,
        group: Box::new(Group::new(None, candidate)),
    }
}

fn configure(settings: &[ffi::Setting]) -> Result<Config> {
    let mut config = Config::from_env()?;
    for setting in settings {
        config.set(&setting.name, &setting.value)?;
    }
    unisono_python::log::start(&config);
    Ok(config)
}

/// With the secret that the launcher gave to its ranks, if it did.
fn candidate(config: Config) -> Result<Candidate> {
    Candidate::new(config, launcher::secret(1))
}

/// The text by which the other members of a reconfigured group know this process.
pub(crate) fn reconfigure_handle(group: &Group) -> ffi::Handed {
    let handle = group.as_candidate(|candidate| Ok(candidate.handle().to_owned()));
    let (status, text) = match handle {
        Ok(text) => (ok(), text),
        Err(error) => (status(&error), String::new()),
    };
    ffi::Handed { status, text }
}

/// Makes it a group of the processes with these handles: their ranks are as their order, or as that of the texts.
pub(crate) fn reconfigure(
    group: &Group,
    mut handles: Vec<String>,
    is_ordered: bool,
    number: i64,
) -> ffi::Formed {
    if !is_ordered {
        handles.sort_unstable();
    }
    let formed = group.as_candidate(|candidate| {
        let communicator = candidate.form(&handles, number)?;
        let place = (communicator.rank(), communicator.world_size());
        group.replace(communicator);
        Ok(place)
    });
    let (status, (rank, size)) = match formed {
        Ok(place) => (ok(), place),
        Err(error) => (status(&error), (0, 0)),
    };
    ffi::Formed { status, rank, size }
}

fn as_joined(joined: Result<Option<Communicator>>) -> ffi::Joined {
    let (status, communicator) = match joined {
        Ok(communicator) => (ok(), communicator),
        Err(error) => (status_of_wait(&error), None),
    };
    ffi::Joined {
        status,
        group: Box::new(Group::new(communicator, None)),
    }
}

/// The group of some of the ranks; no group on the others.
pub(crate) fn subgroup(group: &Group, ranks: &[usize], label: &str) -> ffi::Joined {
    as_joined(group.guard(|communicator| communicator.subgroup(ranks, label.as_bytes())))
}

/// The group of all ranks but `excluded`, which the others call with the same ranks. If more are gone, the call fails on all
/// ranks and names them; called again with these excluded too, it succeeds.
pub(crate) fn shrink(group: &Group, excluded: &[usize]) -> ffi::Joined {
    as_joined(group.guard_wait(|communicator| {
        let mut left = group.left.lock();
        let shrunk = match left.take() {
            Some(before) => before,
            None => {
                let patience = communicator.config().join_timeout.duration();
                communicator.shrink(excluded, patience)?
            }
        };
        let living = shrunk.former_ranks().unwrap_or_default();
        let is_there = |rank: &usize| living.contains(rank);
        let gone: Vec<usize> = (0..communicator.world_size())
            .filter(|rank| !is_there(rank) && !excluded.contains(rank))
            .collect();
        if gone.is_empty() && !excluded.iter().any(is_there) {
            return Ok(Some(shrunk));
        }
        *left = Some(shrunk);
        Err(Error::new(
            Code::PeerLost,
            format!(
                "shrink: the ranks that are left have agreed on who they are, and they are not those that were asked for: {} gone, \
                 too; exclude exactly the ranks that are gone",
                names(&gone)
            ),
        ))
    }))
}

/// The group goes on as one of the ranks that are left, which keep their numbers.
pub(crate) fn mask(group: &Group, excluded: &[usize]) -> ffi::Left {
    let masked = group.guard_wait(|communicator| {
        let patience = communicator.config().join_timeout.duration();
        communicator.mask(excluded, patience)
    });
    let left = masked.map(|masked| {
        let living = masked.living();
        group.replace(masked);
        living
    });
    match left {
        Ok(living) => ffi::Left {
            status: ok(),
            living,
        },
        Err(error) => ffi::Left {
            status: status_of_wait(&error),
            living: Vec::new(),
        },
    }
}

fn names(ranks: &[usize]) -> String {
    let all = ranks.iter().map(usize::to_string).collect::<Vec<_>>();
    match &all[..] {
        [] => "no rank is".to_owned(),
        [one] => format!("rank {one} is"),
        all => format!("ranks {} are", all.join(", ")),
    }
}

/// Microseconds that a call would take, by simulation; 0 when the call would be refused.
///
/// # Safety
/// As for [`run`](crate::operation::run).
pub(crate) unsafe fn estimate(group: &Group, call: &ffi::Call<'_>) -> f64 {
    let estimate = group.guard(|communicator| {
        // SAFETY: the caller's promise is the one asked for here.
        communicator.estimate(unsafe { request(call)? })
    });
    estimate.map_or(0.0, microseconds)
}

pub(crate) fn estimate_message(group: &Group, peer: i64, bytes: usize) -> f64 {
    let estimate = group
        .guard(|communicator| Ok(communicator.estimate_message(usize::try_from(peer).ok(), bytes)));
    estimate.map_or(0.0, microseconds)
}

fn microseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

impl Group {
    pub(crate) fn guard<T>(&self, body: impl FnOnce(&Communicator) -> Result<T>) -> Result<T> {
        struct Call<'a>(&'a AtomicUsize);
        impl Drop for Call<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::Release);
            }
        }
        self.calls.fetch_add(1, Ordering::SeqCst);
        let _call = Call(&self.calls);
        let current = self.current.load(Ordering::SeqCst);
        // SAFETY: null, or one of `all`. It stays there while this call counts: one is taken out only if, after another one had
        // become the current one, no call counted.
        let communicator = unsafe { current.as_ref() }.ok_or_else(|| {
            Error::invalid("this group has no members yet: it is to be reconfigured first")
        })?;
        communicator.guard(body)
    }

    /// Does this with the candidate of this group, which is made when it is first needed.
    fn as_candidate<T>(&self, body: impl FnOnce(&Candidate) -> Result<T>) -> Result<T> {
        guard(|| {
            let mut made = self.candidate.lock();
            let candidate = match &*made {
                Some(candidate) => candidate,
                None => {
                    let config = self.guard(|communicator| Ok(communicator.config().clone()))?;
                    made.insert(candidate(config)?)
                }
            };
            body(candidate)
        })
    }

    /// As [`Group::guard`], for a body that waits. A wait that a signal has ended ends what is under way elsewhere in the
    /// communicator, too.
    pub(crate) fn guard_wait<T>(&self, body: impl FnOnce(&Communicator) -> Result<T>) -> Result<T> {
        self.guard(|communicator| {
            body(communicator).inspect_err(|_| {
                if interrupts::is_raised() {
                    communicator.abort("interrupted");
                }
            })
        })
    }

    pub(crate) fn monitored_barrier(&self, timeout_ms: u64, report_all: bool) -> ffi::Status {
        let timeout = Duration::from_millis(timeout_ms);
        outcome_of_wait(self.guard_wait(|communicator| {
            let result = communicator.monitored_barrier(timeout, report_all);
            let ranks = (communicator.living()[0], communicator.rank());
            result.map_err(|error| in_torchs_words(ranks, timeout, error))
        }))
    }

    pub(crate) fn all_reduce_int8(&self, values: &mut [f32], average: bool) -> ffi::Status {
        let all_reduce =
            |communicator: &Communicator| communicator.all_reduce_int8(values, average);
        outcome_of_wait(self.guard_wait(all_reduce))
    }

    pub(crate) fn set_timeout(&self, timeout_ms: u64) {
        self.quietly(|communicator| communicator.set_timeout(Duration::from_millis(timeout_ms)));
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.guard(|communicator| Ok(communicator.sequence()))
            .unwrap_or(0)
    }

    pub(crate) fn reads_devices_in_place(&self) -> bool {
        let reads = self.guard(|communicator| Ok(communicator.reads_devices_in_place()));
        reads.unwrap_or(false)
    }

    pub(crate) fn ends_on_device_failure(&self) -> bool {
        let setting = self.guard(|communicator| Ok(communicator.config().device_failure));
        setting.is_ok_and(|setting| setting == DeviceFailure::End)
    }

    pub(crate) fn error(&self) -> ffi::Status {
        outcome(self.guard(|communicator| communicator.error().map_or(Ok(()), Err)))
    }

    pub(crate) fn memory(&self) -> Vec<ffi::Usage> {
        let usage = self.guard(|communicator| Ok(communicator.memory()));
        let usage = usage.unwrap_or_default();
        let entry = |(name, amount): (&str, u64)| ffi::Usage {
            name: name.to_owned(),
            amount,
        };
        usage.into_iter().chain(heap::usage()).map(entry).collect()
    }

    /// For whom this rank has waited, as JSON; of a group that is closed nothing.
    pub(crate) fn stats(&self) -> String {
        let stats = self.guard(Communicator::stats);
        stats.unwrap_or_else(|_| "{}".to_owned())
    }

    pub(crate) fn abort(&self, reason: &str) {
        self.quietly(|communicator| communicator.abort(reason));
    }

    /// Messages on devices that the peer has read already may not have been noticed to be; others are given a while.
    pub(crate) fn close(&self) {
        self.quietly(|communicator| {
            let _ = interrupts::later(|| communicator.finish(Some(FAREWELL)));
            communicator.close();
        });
        drop(self.left.lock().take());
    }

    /// For what cannot fail but by a defect, which the group's next operation reports.
    fn quietly(&self, body: impl FnOnce(&Communicator)) {
        let _ = self.guard(|communicator| {
            body(communicator);
            Ok(())
        });
    }
}

/// The error of a monitored barrier, which the first rank leads, beginning with the sentence that users of torch look for.
fn in_torchs_words((first, rank): (usize, usize), timeout: Duration, mut error: Error) -> Error {
    let sentence = match error.peer {
        _ if rank != first => format!(
            "Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for \
             send/recv from rank {first}"
        ),
        _ if timeout.is_zero() => format!("Rank {rank} timed out in monitoredBarrier"),
        Some(peer) => format!("Rank {peer} failed to pass monitoredBarrier"),
        None => return error,
    };
    error.message = format!("{sentence}: {}", error.message);
    error
}
