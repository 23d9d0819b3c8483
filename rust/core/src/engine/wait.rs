//! Waiting: a caller leads the group until its operation has ended; the progress thread drives the rest.

use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use crate::error::{Code, Error, Result};

use super::group::{Core, Group};
use super::sleep::Next;
use super::work::WorkState;

impl Group {
    /// Waits for the end of an operation, leading the group meanwhile if nobody else does.
    pub(crate) fn wait(&self, work: &WorkState, timeout: Option<Duration>) -> Result<()> {
        if let Some(result) = work.result() {
            return result.clone();
        }
        super::forming::check_process()?;
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut core = self.core.lock();
        loop {
            if let Some(result) = work.result() {
                return result.clone();
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                let waits = self.describe_waits(&core);
                return Err(Error::new(
                    Code::Timeout,
                    format!(
                        "the wait ended after {:.3} s, before the operation: {waits}",
                        timeout.unwrap_or_default().as_secs_f64()
                    ),
                )
                .with_operation(work.name()));
            }
            if core.leader {
                core.followers += 1;
                match until {
                    Some(until) => {
                        let _ = self.turn.wait_until(&mut core, until);
                    }
                    None => self.turn.wait(&mut core),
                }
                core.followers -= 1;
                continue;
            }
            core.leader = true;
            self.lead(&mut core, work, until);
            core.leader = false;
            if core.followers > 0 {
                self.turn.notify_all();
            } else {
                self.hand_over(&mut core);
            }
        }
    }

    /// Steps the group until `work` has ended or the time is up.
    fn lead(&self, core: &mut MutexGuard<'_, Core>, work: &WorkState, until: Option<Instant>) {
        core.patience.reset();
        while work.result().is_none() {
            if self.step(core) {
                core.patience.reset();
                continue;
            }
            match core.patience.next() {
                Next::Spin => std::hint::spin_loop(),
                Next::Yield => MutexGuard::unlocked(core, std::thread::yield_now),
                Next::Sleep => {
                    let mut wake = until;
                    if !self.arm(core, &mut wake) {
                        core.sleeping = true;
                        MutexGuard::unlocked(core, || self.sleeper.sleep(wake));
                        core.sleeping = false;
                    }
                    self.disarm(core);
                    self.look_around(core);
                    core.patience.reset();
                }
            }
            if core.patience.is_time_to_look_around() {
                self.look_around(core);
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return;
            }
        }
    }

    /// One turn of the progress thread. Returns whether the group stays on its list.
    pub(crate) fn drive(&self, moved: &mut bool, look_around: bool) -> bool {
        let mut core = self.core.lock();
        if core.leader {
            core.watched = false;
            return false;
        }
        *moved |= self.step(&mut core);
        if look_around {
            self.look_around(&mut core);
        }
        core.watched = core.is_busy();
        core.watched
    }

    /// Announces on all links that the progress thread is about to sleep. Returns true when it must not.
    pub(crate) fn prepare_sleep(&self, until: &mut Option<Instant>) -> bool {
        let mut core = self.core.lock();
        self.arm(&mut core, until)
    }

    /// The progress thread is awake again.
    pub(crate) fn finish_sleep(&self) {
        let mut core = self.core.lock();
        self.disarm(&mut core);
        self.look_around(&mut core);
    }
}
