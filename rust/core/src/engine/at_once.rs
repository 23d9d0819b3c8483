//! Collectives that block, in the calling thread.
//!
//! What can be had by looking a few times is had under the group's lock at once: nothing is allocated, no clock is
//! read and nobody else learns of the operation. It becomes one that others can drive as soon as it has to wait for
//! longer, and from the start where the group has other operations under way.

use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::types::Collective;

use super::company;
use super::defects::contained;
use super::executor::{Execution, Walked};
use super::group::{Core, Group};
use super::request::Request;
use super::sleep::Next;
use super::work::WorkState;

/// How often a call that nobody else knows of gives its core away before it becomes known. The group stays locked
/// meanwhile.
const YIELDS: u32 = 64;

impl Group {
    /// Carries a collective out in this thread. Returns its number.
    ///
    /// What can be had by looking a few times is had under the lock at once: nothing is allocated, no clock is read and
    /// nobody else learns of the operation. It becomes one that others can drive as soon as it has to wait for longer,
    /// and from the start where the group has other operations under way.
    pub(crate) fn run(&self, mut request: Request) -> Result<u64> {
        match self.carry_out(&mut request)? {
            Carried::Out { sequence, .. } => Ok(sequence),
            Carried::On(work) => {
                self.wait(&work, None)?;
                Ok(work.sequence)
            }
        }
    }

    /// As [`Group::run`], for a caller who waits for the end piece by piece.
    pub(crate) fn begin_now(&self, mut request: Request) -> Result<Arc<WorkState>> {
        Ok(match self.carry_out(&mut request)? {
            Carried::Out {
                collective,
                sequence,
            } => {
                let work = WorkState::new(collective, sequence, Duration::ZERO, None);
                work.finish(Ok(()));
                Arc::new(work)
            }
            Carried::On(work) => work,
        })
    }

    fn carry_out(&self, request: &mut Request) -> Result<Carried> {
        // A child of a fork may find the lock taken for ever.
        super::forming::check_process()?;
        let timeout = request.timeout;
        let mut core = self.core.lock();
        self.check_alive()?;
        let alone = !core.leader && !core.is_busy();
        let mut execution = self.begin(&mut core, request)?;
        if alone && self.run_at_once(&mut core, &mut execution)? {
            let fingerprint = execution.fingerprint();
            let collective = execution.collective();
            core.recorder.note(fingerprint);
            core.recycle(execution);
            return Ok(Carried::Out {
                collective,
                sequence: fingerprint.sequence,
            });
        }
        let timeout = timeout.unwrap_or_else(|| self.timeout());
        let work = self.keep(&mut core, execution, timeout, None);
        if !alone {
            self.step(&mut core);
            self.after_submit(&mut core, None);
        }
        Ok(Carried::On(work))
    }

    /// Moves `execution`, which is not among the group's operations, as long as that takes no sleep. Returns whether it
    /// has ended.
    fn run_at_once(&self, core: &mut Core, execution: &mut Execution) -> Result<bool> {
        let ended = self.patiently(core, |core| {
            if execution.is_short() {
                return Ok(match execution.walk(&mut core.links)? {
                    Walked::ToTheEnd => Turn::Over(true),
                    Walked::On => Turn::Moved,
                    Walked::Nowhere => Turn::Idle,
                });
            }
            // It is the only one.
            let commons = (&mut core.commons, true);
            let moved = execution.advance(&mut core.links, &|_| true, commons)?;
            Ok(if execution.is_done() {
                Turn::Over(true)
            } else if moved {
                Turn::Moved
            } else {
                Turn::Idle
            })
        });
        ended.map_err(|error| {
            let error = error.with_operation(execution.name());
            let error = self.explained(core, error);
            self.fail(core, error.clone());
            error
        })
    }

    /// Takes turns until one is the last, or the next thing to do would be to sleep (false). A panic is a defect, as in
    /// a step.
    pub(super) fn patiently(
        &self,
        core: &mut Core,
        mut turn: impl FnMut(&mut Core) -> Result<Turn>,
    ) -> Result<bool> {
        contained(|| {
            core.patience.reset();
            let mut yields = 0;
            loop {
                match turn(core)? {
                    Turn::Over(done) => {
                        core.patience.moved();
                        return Ok(done);
                    }
                    Turn::Moved => {
                        core.patience.moved();
                        continue;
                    }
                    Turn::Idle => {}
                }
                match core.patience.next() {
                    Next::Spin => std::hint::spin_loop(),
                    Next::Yield if yields < YIELDS => {
                        yields += 1;
                        let given = company::now();
                        std::thread::yield_now();
                        core.patience.note_yield(given);
                    }
                    Next::Yield | Next::Sleep => return Ok(false),
                }
            }
        })?
    }
}

/// How far a collective came at once.
enum Carried {
    Out {
        collective: Collective,
        sequence: u64,
    },
    /// It goes on, and the caller is to drive it.
    On(Arc<WorkState>),
}

/// What came of a turn.
pub(super) enum Turn {
    Over(bool),
    Moved,
    Idle,
}
