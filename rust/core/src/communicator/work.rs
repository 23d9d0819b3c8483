//! An operation under way, and waiting for one or for the first of several.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::device::{self, DeviceGroup};
use crate::engine::{Group, Mask, Received, WorkState};
use crate::error::Result;
use crate::fork::Own;
use crate::types::Rank;

/// How long a wait for operations of several groups stays with one of them.
const TIME_WITH_ONE: Duration = Duration::from_micros(200);

/// An operation under way. Dropping it does not end the operation.
#[derive(Clone, Debug)]
pub struct Work {
    pub(super) group: Own<Arc<Group>>,
    /// Of an operation on device memory.
    pub(super) device: Option<Own<Arc<DeviceGroup>>>,
    /// The numbers of the communicator's ranks, where the group's are others.
    pub(super) mask: Option<Arc<Mask>>,
    pub(super) state: Arc<WorkState>,
}

impl Work {
    /// Whether the operation has ended, well or not. One on device memory ends when its stream has got past it.
    pub fn is_done(&self) -> bool {
        self.result().is_some()
    }

    /// The result, if it has ended.
    pub fn result(&self) -> Option<Result<()>> {
        if self.state.result().is_none()
            && let Some(device) = &self.device
            && device.is_here()
        {
            device.settle();
        }
        let result = self.state.result().cloned();
        match &self.mask {
            None => result,
            Some(mask) => Some(mask.here(result?)),
        }
    }

    /// When it was started.
    pub(crate) fn started(&self) -> Instant {
        self.state.started
    }

    /// Refuses to go on in a forked child of the process that started it, in which it does not end.
    ///
    /// # Errors
    /// `Aborted` there.
    pub fn check_process(&self) -> Result<()> {
        self.group.check()
    }

    /// Waits for the end, driving the group from this thread meanwhile.
    ///
    /// # Errors
    /// The operation's own; or `Timeout` when `timeout` runs out first, after which the operation goes on.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        match (&self.mask, &self.device) {
            (None, None) => self.group.wait(&self.state, timeout),
            (None, Some(device)) => device.wait(&self.state, timeout),
            (Some(mask), None) => mask.here(self.group.wait(&self.state, timeout)),
            (Some(mask), Some(device)) => mask.here(device.wait(&self.state, timeout)),
        }
    }

    /// Waits until one of `works` has ended, well or not, driving their groups from this thread meanwhile. Returns which
    /// one and how; `None` when `timeout` runs out first, or there are none.
    ///
    /// # Errors
    /// `Aborted` in a forked child, which cannot wait.
    pub fn wait_any(
        works: &[&Self],
        timeout: Option<Duration>,
    ) -> Result<Option<(usize, Result<()>)>> {
        let Some(first) = works.first() else {
            return Ok(None);
        };
        if works.iter().any(|work| work.device.is_some()) {
            return Self::wait_any_by_looking(works, timeout);
        }
        let of = |group: &Arc<Group>| -> Vec<&WorkState> {
            let same = works.iter().filter(|work| Arc::ptr_eq(&work.group, group));
            same.map(|work| &*work.state).collect()
        };
        let one_group = of(&first.group);
        if one_group.len() == works.len() {
            let ended = first.group.wait_any(&one_group, timeout)?;
            return Ok(ended.map(|(at, result)| match &works[at].mask {
                None => (at, result),
                Some(mask) => (at, mask.here(result)),
            }));
        }
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        // Their groups take turns; what happens in the others meanwhile is the progress thread's business.
        for work in works.iter().cycle() {
            let ended = |(at, work): (usize, &&Self)| Some((at, work.result()?));
            if let Some(ended) = works.iter().enumerate().find_map(ended) {
                return Ok(Some(ended));
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                break;
            }
            work.group.wait_any(&of(&work.group), Some(TIME_WITH_ONE))?;
        }
        Ok(None)
    }

    /// As [`Work::wait_any`], where streams are awaited: no thread drives those.
    fn wait_any_by_looking(
        works: &[&Self],
        timeout: Option<Duration>,
    ) -> Result<Option<(usize, Result<()>)>> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut looks = 0;
        loop {
            let ended = |(at, work): (usize, &&Self)| Some((at, work.result()?));
            if let Some(ended) = works.iter().enumerate().find_map(ended) {
                return Ok(Some(ended));
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(None);
            }
            for work in works.iter().filter(|work| work.device.is_none()) {
                work.group
                    .wait_any(&[&work.state], Some(device::LONGEST_LOOK_AROUND))?;
            }
            device::pause(&mut looks);
        }
    }

    /// A description of what the group waits for on this rank now, for reports of a wait that was given up.
    pub fn waits_for(&self) -> String {
        match &self.device {
            Some(device) => device.describe(),
            None => self.group.waits(),
        }
    }

    /// The message that a receive has got, once it has completed.
    pub fn received(&self) -> Option<Received> {
        let received = self.state.received()?;
        Some(match &self.mask {
            None => received,
            Some(mask) => mask.numbered(received),
        })
    }

    /// The rank a message came from, once a receive has completed.
    pub fn source(&self) -> Option<Rank> {
        self.received().map(|received| received.source)
    }

    /// The operation's number in its group.
    pub fn sequence(&self) -> u64 {
        self.state.sequence
    }

    /// How long it took, once it has ended.
    pub fn duration(&self) -> Option<Duration> {
        self.state.duration()
    }

    /// `all_reduce #17`.
    pub fn name(&self) -> String {
        self.state.name()
    }
}
