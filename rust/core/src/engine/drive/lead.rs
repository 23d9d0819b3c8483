//! Waiting: a caller leads the group until its operation has ended.

use std::time::{Duration, Instant};

use crate::error::{Code, Error, Result};
use crate::locks::MutexGuard;

use crate::engine::drive::backoff::Next;
use crate::engine::drive::contention;
use crate::engine::state::{Core, Group};
use crate::engine::work::WorkState;
use crate::fence::contained;
use crate::interrupts::Checks;

/// Steps that moved something between two looks at deadlines and at the state of peers.
const STEPS_PER_LOOK: u32 = 1024;

impl Group {
    /// Waits for the end of an operation, leading the group meanwhile if no other thread does.
    pub(crate) fn wait(&self, work: &WorkState, timeout: Option<Duration>) -> Result<()> {
        let Some((_, result)) = self.wait_any(std::slice::from_ref(&work), timeout)? else {
            let waits = self.describe_waits(&self.core.lock());
            return Err(Error::new(
                Code::Timeout,
                format!(
                    "the wait ended after {:.3} s, before the operation: {waits}",
                    timeout.unwrap_or_default().as_secs_f64()
                ),
            )
            .with_operation(work.name()));
        };
        result
    }

    /// Waits for the end of one of several operations of this group: which, and how it ended. `None` when the time is
    /// up.
    ///
    /// A handler of a signal that raises meanwhile ends the group, and so the operations: other ranks may have this rank's
    /// part of them already, and nothing may touch their memory when this returns.
    pub(crate) fn wait_any(
        &self,
        works: &[&WorkState],
        timeout: Option<Duration>,
    ) -> Result<Option<(usize, Result<()>)>> {
        if let Some(ended) = first_ended(works) {
            return Ok(Some(ended));
        }
        self.home.check()?;
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut checks = Checks::default();
        let mut core = self.core.lock();
        loop {
            if let Some(ended) = first_ended(works) {
                self.stop_waiting(&mut core);
                return Ok(Some(ended));
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                self.stop_waiting(&mut core);
                return Ok(None);
            }
            if checks.are_due() {
                self.stop_waiting(&mut core);
                if let Err(reason) = MutexGuard::unlocked(&mut core, || checks.run()) {
                    let error = interrupted(&self.own_number(), works[0], &reason);
                    self.fail(&mut core, error.clone());
                    return Ok(Some((0, Err(error))));
                }
                continue;
            }
            if core.leader {
                core.followers += 1;
                match earlier(until, checks.next()) {
                    Some(until) => {
                        let _ = self.turn.wait_until(&mut core, until);
                    }
                    None => self.turn.wait(&mut core),
                }
                core.followers -= 1;
                continue;
            }
            core.leader = true;
            core.matching.hold_offers(true);
            if let Err(error) = contained(|| self.lead(&mut core, works, until, &mut checks)) {
                core.sleeping = false;
                self.fail(&mut core, error);
            }
            core.matching.hold_offers(false);
            // The next operation's wait begins anew. That of this one goes on from where it has come, be it in this call,
            // after a check for signals, or in the next: Python's waits are many short ones.
            if works.iter().any(|work| work.result().is_some()) {
                core.backoff.reset();
            }
            core.leader = false;
            if core.followers > 0 {
                self.turn.notify_all();
            }
        }
    }

    /// The last caller that waits leaves what is still under way to the progress thread.
    fn stop_waiting(&self, core: &mut Core) {
        if core.followers == 0 {
            let at_once = core.has_large();
            self.hand_over(core, at_once);
        }
    }

    /// Lets other threads have the core.
    fn give_way(&self, core: &mut MutexGuard<'_, Core>) {
        if core.waits.is_time_to_look() {
            self.note_wait(core);
        }
        let given = contention::now();
        MutexGuard::unlocked(core, std::thread::yield_now);
        core.backoff.note_yield(given);
    }

    /// Steps the group until one of `works` has ended, the time is up, or it is time to check for signals.
    fn lead(
        &self,
        core: &mut MutexGuard<'_, Core>,
        works: &[&WorkState],
        until: Option<Instant>,
        checks: &mut Checks,
    ) {
        let mut steps = 0_u32;
        let is_over = || until.is_some_and(|until| Instant::now() >= until);
        while works.iter().all(|work| work.result().is_none()) {
            if self.step(core) {
                core.backoff.moved();
                core.waits.moved(|| self.clock.now());
                steps = steps.wrapping_add(1);
                if steps.is_multiple_of(STEPS_PER_LOOK) {
                    // Others may move without a pause while this operation waits in vain.
                    self.look_around(core);
                    if is_over() || checks.are_due() {
                        return;
                    }
                    checks.next_but_for_signals();
                }
                // A thread that submits or aborts meanwhile gets its turn.
                MutexGuard::bump(core);
                continue;
            }
            let Core {
                backoff,
                matching,
                operations,
                links,
                ..
            } = &mut **core;
            let is_read = || operations.is_empty() && matching.is_being_read();
            let needs_others = || links.are_opening(|| self.clock.now()) || is_read();
            match backoff.next_unless(needs_others, || matching.is_read_by_several()) {
                Next::Spin => {
                    std::hint::spin_loop();
                    MutexGuard::bump(core);
                }
                Next::Yield => self.give_way(core),
                // The rank that sent it may wait for more than this receive.
                Next::Sleep if core.matching.release_offers() => continue,
                Next::Sleep => {
                    let mut wake = earlier(until, checks.next_but_for_signals());
                    if !self.arm(core, &mut wake) {
                        core.sleeping = true;
                        if MutexGuard::unlocked(core, || self.parker.sleep_or_signal(wake)) {
                            checks.hurry();
                        }
                        core.sleeping = false;
                    }
                    self.disarm(core);
                    // Nothing has moved yet: if nothing does, it sleeps again soon.
                    self.look_around(core);
                    if checks.are_due() {
                        return;
                    }
                }
            }
            if core.backoff.is_time_to_look_around() {
                self.look_around(core);
            }
            if is_over() {
                return;
            }
        }
    }
}

/// Why a group ends when a handler of a signal raises while this rank waits for `work`.
pub(crate) fn interrupted(rank: &str, work: &WorkState, reason: &str) -> Error {
    let name = work.name();
    Error::new(
        Code::Aborted,
        format!("{rank} aborted the group: interrupted in {name}: {reason}"),
    )
}

fn earlier(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    one.into_iter().chain(other).min()
}

/// The first of `works` that has ended, and how.
fn first_ended(works: &[&WorkState]) -> Option<(usize, Result<()>)> {
    let mut results = works.iter().map(|work| work.result());
    let at = results.position(|result| result.is_some())?;
    Some((at, works[at].result()?.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PointToPoint;
    use crate::buffer::Memory;
    use crate::communicator::Communicator;
    use crate::config::Config;
    use crate::types::DataType;

    /// Python waits in many short waits. A rank that yielded for long in each of them would keep a core busy.
    #[test]
    fn a_wait_in_parts_yields_once_and_then_sleeps() {
        let ranks = Communicator::local(2, &Config::default()).unwrap();
        let group = ranks[0].group();
        let place = Box::leak(Box::new([0_u8; 8]));
        // SAFETY: the memory lives for ever, and only this operation has it.
        let work = unsafe {
            let (dtype, memory) = (DataType::UInt8, Memory::of_mut(place));
            ranks[0].receive(dtype, memory, Some(1), 0, PointToPoint::default())
        };
        let work = work.unwrap();
        let sleeps = || {
            let waited = work.wait(Some(Duration::from_millis(20)));
            assert_eq!(waited.unwrap_err().code, Code::Timeout);
            group.core.lock().backoff.next() == Next::Sleep
        };
        assert!((0..500).any(|_| sleeps()));
    }
}
