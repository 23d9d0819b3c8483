//! Collectives that block, in the calling thread.
//!
//! A call that ends after a few looks takes place under the group's lock at once: nothing is allocated, no clock is
//! read and no other thread learns of the operation. It becomes one that others can drive as soon as it has to wait for
//! longer, and from the start where the group has other operations under way.

use std::sync::Arc;
use std::time::Duration;

use crate::buffer::{Element, Memory};
use crate::error::{Error, Result};
use crate::types::Collective;

use crate::engine::collective::request::Request;
use crate::engine::collective::run::{PlanRun, Walked};
use crate::engine::drive::backoff::Next;
use crate::engine::drive::contention;
use crate::engine::reports::Print;
use crate::engine::state::{Core, Group};
use crate::engine::timeline::Begun;
use crate::engine::work::WorkState;
use crate::fence::contained;

/// How often a call yields before it becomes an operation that other threads know of. The group stays locked meanwhile.
const YIELDS: u32 = 64;

impl Group {
    /// Carries a collective out in this thread, and empties the request. Returns its number.
    ///
    /// A call that ends after a few looks takes place under the lock at once: nothing is allocated, no clock is read and
    /// no other thread learns of the operation. It becomes one that others can drive as soon as it has to wait for longer,
    /// and from the start where the group has other operations under way.
    pub(crate) fn run(&self, request: &mut Request) -> Result<u64> {
        match self.carry_out(request)? {
            Carried::Out { sequence, .. } => Ok(sequence),
            Carried::On(work) => {
                self.wait(&work, None)?;
                Ok(work.sequence)
            }
        }
    }

    /// [`Group::run`] of a request that has no memory yet: it works on these slices.
    pub(crate) fn run_on<T: Element>(
        &self,
        mut request: Request,
        input: Option<&[T]>,
        output: Option<&mut [T]>,
    ) -> Result<u64> {
        debug_assert!(request.input.is_none() && request.dtype == T::DTYPE);
        // SAFETY: both are borrowed until `run` returns. By then the operation has ended, whether it did what it should or
        // failed, and has let go of its memory.
        unsafe {
            request.input = input.map(|input| Memory::of(input));
            request.output = output.map(|output| Memory::of_mut(output));
        }
        self.run(&mut request)
    }

    /// As [`Group::run`], for a caller who waits for the end piece by piece.
    pub(crate) fn begin_now(&self, request: &mut Request) -> Result<Arc<WorkState>> {
        Ok(match self.carry_out(request)? {
            Carried::Out {
                collective,
                sequence,
            } => {
                let now = self.clock.now();
                let work = WorkState::new(collective, sequence, (now, Duration::ZERO), None);
                work.finish(Ok(()), now);
                Arc::new(work)
            }
            Carried::On(work) => work,
        })
    }

    fn carry_out(&self, request: &mut Request) -> Result<Carried> {
        // A child of a fork may find the lock taken for ever.
        self.home.check()?;
        let timeout = request.timeout;
        let mut core = self.core.lock();
        self.check_alive()?;
        let alone = !core.leader && !core.is_busy();
        if let Some(timeline) = &mut core.timeline {
            timeline.call(&self.clock);
        }
        let mut run = self.begin(&mut core, request)?;
        if alone && self.run_at_once(&mut core, &mut run)? {
            let fingerprint = run.fingerprint();
            let collective = run.collective();
            core.recorder.note(Print::Collective(fingerprint));
            if core.timeline.is_some() {
                self.trace_at_once(&mut core, &run, None);
            }
            core.recycle(run);
            return Ok(Carried::Out {
                collective,
                sequence: fingerprint.sequence,
            });
        }
        let timeout = timeout.unwrap_or_else(|| self.timeout());
        let work = self.keep(&mut core, run, timeout, None);
        if let Some(timeline) = &mut core.timeline {
            timeline.goes_on(work.sequence);
        }
        if !alone {
            self.step(&mut core);
            self.after_submit(&mut core, None);
        }
        Ok(Carried::On(work))
    }

    /// Moves `run`, which is not among the group's operations, as long as that takes no sleep. Returns whether it
    /// has ended.
    fn run_at_once(&self, core: &mut Core, run: &mut PlanRun) -> Result<bool> {
        let ended = self.patiently(core, |core| {
            if run.is_short() {
                return Ok(match run.walk(&mut core.links)? {
                    Walked::ToTheEnd => Turn::Over(true),
                    Walked::On => Turn::Moved,
                    Walked::Nowhere => Turn::Idle,
                });
            }
            // It is the only one.
            let moved = run.advance(&mut core.links, &|_| true, (&mut core.shared, true))?;
            let moved = moved | self.go_by_messages(&mut core.plans, run)?;
            Ok(if run.is_done() {
                Turn::Over(true)
            } else if moved {
                Turn::Moved
            } else {
                Turn::Idle
            })
        });
        ended.map_err(|error| {
            let error = error.with_operation(run.name());
            let error = self.explained(core, error);
            core.ended_before_failure = Some(run.fingerprint().sequence - 1);
            self.trace_at_once(core, run, Some(&error));
            self.fail(core, error.clone());
            error
        })
    }

    /// Puts a collective that was carried out at once, or failed, into the trace.
    #[cold]
    #[inline(never)]
    fn trace_at_once(&self, core: &mut Core, run: &PlanRun, error: Option<&Error>) {
        if let Some(timeline) = &mut core.timeline {
            let print = run.fingerprint();
            let bytes = run.operands().buffers.longest();
            timeline.at_once(
                (run.collective(), print.sequence),
                Begun::of(&print, bytes, run.algorithm()),
                self.clock.now(),
                error.map(|error| error.message.clone()),
            );
        }
    }

    /// Takes turns until one is the last, or the next thing to do would be to sleep (false). A panic is a defect, as in
    /// a step.
    pub(crate) fn patiently(
        &self,
        core: &mut Core,
        mut turn: impl FnMut(&mut Core) -> Result<Turn>,
    ) -> Result<bool> {
        contained(|| {
            core.backoff.reset();
            let mut yields = 0;
            loop {
                match turn(core)? {
                    Turn::Over(done) => {
                        core.backoff.moved();
                        return Ok(done);
                    }
                    Turn::Moved => {
                        core.backoff.moved();
                        continue;
                    }
                    Turn::Idle => {}
                }
                match core.backoff.next() {
                    Next::Spin => std::hint::spin_loop(),
                    Next::Yield if yields < YIELDS => {
                        yields += 1;
                        let given = contention::now();
                        std::thread::yield_now();
                        core.backoff.note_yield(given);
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

/// The result of a turn.
pub(crate) enum Turn {
    Over(bool),
    Moved,
    Idle,
}
