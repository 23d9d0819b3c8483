//! Calls that block, in the calling thread.
//!
//! What can be had by looking a few times is had under the group's lock at once: nothing is allocated, no clock is
//! read and nobody else learns of the operation. It becomes one that others can drive as soon as it has to wait for
//! longer, and from the start where the group has other operations under way.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::buffer::Memory;
use crate::communicator::PointToPoint;
use crate::error::{Error, Result};
use crate::types::{Collective, DataType, Rank};

use super::company;
use super::executor::{Execution, Walked};
use super::group::{Core, Group};
use super::matching::{Look, Wanted};
use super::request::Request;
use super::sleep::Next;
use super::step::PANICKED;
use super::submit::check_elements;
use super::wire::Fingerprint;
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

    /// Sends in this thread.
    pub(crate) fn send_now(
        &self,
        dtype: DataType,
        memory: Memory,
        (to, tag): (Rank, u64),
        timeout: Option<Duration>,
    ) -> Result<()> {
        self.check_alive()?;
        self.check_rank(to, "send to")?;
        check_elements(dtype, &memory, "send")?;
        let mut core = self.core.lock();
        self.check_alive()?;
        if !core.leader {
            let Core {
                matching, links, ..
            } = &mut *core;
            match matching.send_at_once(links, dtype, &memory, (to, tag)) {
                Ok(true) => {
                    self.note_message(&mut core, Collective::Send);
                    return Ok(());
                }
                Ok(false) => {}
                Err(error) => {
                    self.fail(&mut core, error.clone());
                    return Err(error);
                }
            }
        }
        drop(core);
        let options = PointToPoint {
            timeout,
            blocking: true,
            ..PointToPoint::default()
        };
        let work = self.send(dtype, memory, (to, tag), options)?;
        self.wait(&work, None)
    }

    /// Receives in this thread. Returns the rank that the message came from.
    pub(crate) fn receive_now(
        &self,
        dtype: DataType,
        memory: Memory,
        (from, tag): (Option<Rank>, u64),
        timeout: Option<Duration>,
    ) -> Result<Rank> {
        self.check_alive()?;
        check_elements(dtype, &memory, "recv")?;
        if let Some(from) = from {
            self.check_rank(from, "receive from")?;
            let mut core = self.core.lock();
            self.check_alive()?;
            let wanted = Wanted {
                from,
                tag,
                dtype,
                memory: &memory,
            };
            let alone = !core.leader && !core.is_busy() && core.matching.may_look(from);
            if alone && self.look(&mut core, &wanted)? {
                self.note_message(&mut core, Collective::Recv);
                return Ok(from);
            }
        }
        let options = PointToPoint {
            timeout,
            blocking: true,
            ..PointToPoint::default()
        };
        let work = self.receive(dtype, memory, (from, tag), options)?;
        self.wait(&work, None)?;
        work.source()
            .ok_or_else(|| Error::internal("a message without a source"))
    }

    /// Sends and receives in this thread, at the same time. Returns the rank that the message came from.
    pub(crate) fn exchange_now(
        &self,
        outgoing: Outbound,
        incoming: Inbound,
        timeout: Option<Duration>,
    ) -> Result<Rank> {
        self.check_alive()?;
        self.check_rank(outgoing.to, "send to")?;
        check_elements(outgoing.dtype, &outgoing.memory, "send")?;
        check_elements(incoming.dtype, &incoming.memory, "recv")?;
        if let Some(from) = incoming.from {
            self.check_rank(from, "receive from")?;
        }
        let sent = self.send_first(&outgoing, &incoming)?;
        if let Some(from) = incoming.from.filter(|_| sent) {
            let mut core = self.core.lock();
            let wanted = Wanted {
                from,
                tag: incoming.tag,
                dtype: incoming.dtype,
                memory: &incoming.memory,
            };
            let alone = !core.leader && !core.is_busy() && core.matching.may_look(from);
            if alone && self.look(&mut core, &wanted)? {
                self.note_message(&mut core, Collective::Recv);
                return Ok(from);
            }
        }
        let options = || PointToPoint {
            timeout,
            blocking: true,
            ..PointToPoint::default()
        };
        let Inbound {
            dtype,
            memory,
            from,
            tag,
        } = incoming;
        let received = self.receive(dtype, memory, (from, tag), options())?;
        if !sent {
            let Outbound {
                dtype,
                memory,
                to,
                tag,
            } = outgoing;
            let sent = self
                .send(dtype, memory, (to, tag), options())
                .and_then(|work| self.wait(&work, None));
            if let Err(error) = sent {
                // The receive's memory is in use until it has ended.
                if !self.core.lock().matching.withdraw(&received) {
                    let _ = self.wait(&received, None);
                }
                return Err(error);
            }
        }
        self.wait(&received, None)?;
        received
            .source()
            .ok_or_else(|| Error::internal("a message without a source"))
    }

    /// Sends the short message of an exchange at once, where the receive may be looked for alike. Returns whether it
    /// has been sent.
    fn send_first(&self, outgoing: &Outbound, incoming: &Inbound) -> Result<bool> {
        let mut core = self.core.lock();
        self.check_alive()?;
        if core.leader || incoming.memory.len() > core.matching.eager_bytes() {
            return Ok(false);
        }
        let Core {
            matching, links, ..
        } = &mut *core;
        let place = (outgoing.to, outgoing.tag);
        match matching.send_at_once(links, outgoing.dtype, &outgoing.memory, place) {
            Ok(sent) => {
                if sent {
                    self.note_message(&mut core, Collective::Send);
                }
                Ok(sent)
            }
            Err(error) => {
                self.fail(&mut core, error.clone());
                Err(error)
            }
        }
    }

    /// Looks for a message as long as that takes no sleep. Returns whether it came.
    fn look(&self, core: &mut Core, wanted: &Wanted<'_>) -> Result<bool> {
        let found = self.patiently(core, |core| {
            let Core {
                matching,
                links,
                finished,
                ..
            } = core;
            Ok(match matching.look(links, wanted, finished)? {
                Look::Received => Turn::Over(true),
                Look::Nothing => Turn::Idle,
                Look::Otherwise => Turn::Over(false),
            })
        });
        if !core.finished.is_empty() {
            self.settle(core);
        }
        found.inspect_err(|error| self.fail(core, error.clone()))
    }

    fn note_message(&self, core: &mut Core, collective: Collective) {
        core.messages += 1;
        core.recorder.note(Fingerprint {
            sequence: core.messages,
            collective: collective as u8,
            ..Fingerprint::default()
        });
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
    fn patiently(
        &self,
        core: &mut Core,
        mut turn: impl FnMut(&mut Core) -> Result<Turn>,
    ) -> Result<bool> {
        let run = catch_unwind(AssertUnwindSafe(|| {
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
        }));
        run.unwrap_or_else(|_| Err(Error::internal(PANICKED)))
    }
}

/// The message that an exchange sends.
pub(crate) struct Outbound {
    pub(crate) dtype: DataType,
    pub(crate) memory: Memory,
    pub(crate) to: Rank,
    pub(crate) tag: u64,
}

/// The message that an exchange receives.
pub(crate) struct Inbound {
    pub(crate) dtype: DataType,
    pub(crate) memory: Memory,
    /// From whom; `None`: from any rank.
    pub(crate) from: Option<Rank>,
    pub(crate) tag: u64,
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
enum Turn {
    Over(bool),
    Moved,
    Idle,
}
