//! Submitting: from a request to an operation under way.

use std::sync::Arc;
use std::time::Duration;

use crate::buffer::Memory;
use crate::engine::work::PointToPoint;
use crate::error::{Error, Result};
use crate::plan::select::Choice;
use crate::plan::{self, Algorithm, Shape};
use crate::reduce::Streaming;
use crate::transport::endpoint::Lane;
use crate::types::{Collective, DataType, Rank, ReduceOp};

use crate::engine::collective::buffers::Buffers;
use crate::engine::collective::elements::Elements;
use crate::engine::collective::operands::{EncodedHeader, Operands};
use crate::engine::collective::plan_cache::PlanStore;
use crate::engine::collective::plan_key::PlanKey;
use crate::engine::collective::request::Request;
use crate::engine::collective::run::{CompiledPlan, PlanRun, ReuseKey};
use crate::engine::collective::shared::{Host, SharedRun};
use crate::engine::group::deadlock::TOLD_AFTER;
use crate::engine::message::frame::NOTE;
use crate::engine::message::meeting::Posted;
use crate::engine::reports::{MessagePrint, Print};
use crate::engine::state::{Core, Group, Membership, Operation, WAKES_THREAD_FROM};
use crate::engine::timeline::Begun;
use crate::engine::traffic::TrafficClass;
use crate::engine::work::{Completion, WorkState};

/// A send, a receive or a probe that is about to start.
#[derive(Clone, Copy)]
pub(crate) struct Message {
    pub(crate) collective: Collective,
    /// The other rank; `None`: any.
    pub(crate) peer: Option<Rank>,
    pub(crate) bytes: usize,
    pub(crate) role: Role,
}

/// Where a message counts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Everywhere, with its tag and the type of its elements.
    Tagged(u64, DataType),
    /// In all records but the trace, which has the message that it stands for.
    Note,
    /// Nowhere: a rank that polls would fill the records with its probes.
    Probe,
}

impl Message {
    /// Its description, as records have it.
    fn print(&self, sequence: u64) -> Print {
        let Role::Tagged(tag, dtype) = self.role else {
            return Print::Named;
        };
        Print::Message(MessagePrint {
            sequence,
            collective: self.collective,
            dtype,
            peer: self.peer.map(|peer| peer as u32),
            tag,
            bytes: self.bytes,
        })
    }
}

impl Group {
    /// Starts a collective. With `background` the progress thread drives it although no caller waits.
    pub(crate) fn submit(
        &self,
        mut request: Request,
        completion: Option<Completion>,
        background: bool,
    ) -> Result<Arc<WorkState>> {
        self.check_alive()?;
        let timeout = request.timeout.unwrap_or_else(|| self.timeout());
        let mut core = self.core.lock();
        self.check_alive()?;
        let run = self.begin(&mut core, &mut request)?;
        let work = self.keep(&mut core, run, timeout, completion);
        self.step(&mut core);
        let at_once = core.has_large();
        self.after_submit(&mut core, background.then_some(at_once));
        Ok(work)
    }

    /// Gives the request, which it empties, its number and its plan, or refuses what cannot be carried out.
    pub(crate) fn begin(&self, core: &mut Core, request: &mut Request) -> Result<Box<PlanRun>> {
        let sequence = core.sequence + 1;
        let reuse_key = ReuseKey::of(request);
        let alike = reuse_key.and_then(|reuse_key| core.take_reusable(&reuse_key, request));
        let run = match alike {
            Some(mut run) => {
                run.repeat(request, sequence);
                run
            }
            None => {
                request.check(self.rank, self.world)?;
                let request = std::mem::replace(request, Request::barrier());
                let mut run = self.compile(core, request, sequence)?;
                let print = run.fingerprint();
                // Each of those is taken note of.
                run.set_reuse_key(reuse_key.filter(|_| !print.is_between_pairs()));
                self.note_pairs(core, &print, run.directions());
                run
            }
        };
        core.sequence = sequence;
        core.traffic.count(run.traffic());
        for peer in run.peers() {
            if core.links.open(Lane::Collective, peer).is_none() {
                self.ensure_link(core, Lane::Collective, peer);
            }
        }
        Ok(run)
    }

    /// Makes it an operation that every step of the group moves.
    pub(crate) fn keep(
        &self,
        core: &mut Core,
        run: Box<PlanRun>,
        timeout: Duration,
        completion: Option<Completion>,
    ) -> Arc<WorkState> {
        let fingerprint = run.fingerprint();
        let work = WorkState::new(
            run.collective(),
            fingerprint.sequence,
            (self.clock.now(), timeout),
            completion,
        );
        let work = Arc::new(work.counted_at(run.traffic()));
        core.recorder.record(&work, Print::Collective(fingerprint));
        if let Some(timeline) = &mut core.timeline {
            let bytes = run.operands().buffers.longest();
            let begun = Begun::of(&fingerprint, bytes, run.algorithm());
            timeline.begin(&work, begun);
        }
        let after = core
            .operations
            .iter()
            .filter(|earlier| earlier.run.overlaps(&run))
            .map(|earlier| earlier.work.sequence)
            .collect();
        core.operations.push(Operation {
            tell: work.started + TOLD_AFTER,
            work: Arc::clone(&work),
            run,
            after,
        });
        work
    }

    /// The run of a request: of its plan of messages, or one on which the ranks are to agree first.
    fn compile(
        &self,
        core: &mut Core,
        mut request: Request,
        sequence: u64,
    ) -> Result<Box<PlanRun>> {
        let is_in_place = request.in_place();
        let mut buffers = Buffers::new(request.input.take(), request.output.take());
        let factor = match request.op {
            Some(ReduceOp::PremulSum(factor)) => buffers.multiply_beforehand().then_some(factor),
            _ => None,
        };
        let shape = Shape {
            in_place: is_in_place && factor.is_none(),
            ..request.shape(self.rank, self.world)
        };
        // Two ranks have one order.
        let order = request.in_rank_order && shape.world > 2;
        let sizes = (request.dtype.size(), request.partial().size());
        let key = PlanKey::of(&shape, sizes).map(|key| key.in_rank_order(order));
        let choose = |is_told| self.choose(&shape, request.dtype, order, is_told);
        let choice = core.plans.choice(key, choose);
        let workers = self.workers.clone();
        let elements = Elements::new(request.dtype, request.op, shape.contributors(), workers)?;
        let compiled = match choice.needs_agreement() {
            true => None,
            false => Some(self.compiled(&mut core.plans, (&shape, key), sizes, choice)?),
        };
        let fingerprint = request.fingerprint(sequence, choice.messages.number());
        let mut operands = Operands {
            collective: request.collective,
            buffers,
            elements,
            print: EncodedHeader::new(fingerprint),
            rank: self.rank,
            world: self.world,
            members: self.membership.members.clone(),
            bounce: None,
            streaming: Streaming::No,
        };
        let neighbours = self.membership.topology.ranks_beside(self.rank);
        let bytes = operands.buffers.input().len() + operands.buffers.output().len();
        let footprint = bytes.saturating_mul(neighbours);
        operands.streaming = Streaming::for_footprint(footprint);
        let prepared = compiled.map(|compiled| core.plans.prepare(compiled, &operands, neighbours));
        let nothing = core.plans.nothing();
        let mut run = match core.take_spare() {
            Some(mut spare) => {
                spare.renew(nothing, operands, factor);
                spare
            }
            None => PlanRun::new(nothing, operands, factor),
        };
        if let Some(prepared) = prepared {
            run.go_by_messages(prepared);
        } else if let Some(key) = key {
            let wanted = self.config.algorithm;
            let is_asked_for = wanted.is_some_and(Algorithm::needs_shared_memory);
            let host = Host {
                world: self.world,
                cores: self.membership.topology.cores_per_host,
            };
            let shared = SharedRun::new(key, choice, is_asked_for, host);
            run.share(Some(shared));
        }
        Ok(run)
    }

    /// The algorithms for a request that folds in rank order or in any, which are logged if `is_told`.
    fn choose(&self, shape: &Shape, dtype: DataType, in_rank_order: bool, is_told: bool) -> Choice {
        let wanted = self.config.algorithm;
        let choice = match in_rank_order {
            true => self.membership.choose_in_rank_order(shape, dtype),
            false => self.membership.choose(shape, dtype, wanted),
        };
        if is_told && tracing::enabled!(tracing::Level::DEBUG) {
            let prices = self.membership.prices(shape, dtype);
            tracing::debug!(
                rank = self.rank, collective = %shape.collective, counts = ?shape.counts, %dtype,
                messages = %choice.messages, windows = choice.windows, in_place = choice.in_place,
                asked_for = wanted.map(Algorithm::name), prices,
                "chose the algorithms for a collective of this size"
            );
        }
        choice
    }

    /// The plan of messages of a request, from the cache when it has been made before.
    fn compiled(
        &self,
        plans: &mut PlanStore,
        (shape, key): (&Shape, Option<PlanKey>),
        (element_size, partial_size): (usize, usize),
        choice: Choice,
    ) -> Result<Arc<CompiledPlan>> {
        plans.compiled(key, || {
            let algorithm = choice.messages;
            let Membership {
                topology, costs, ..
            } = &self.membership;
            let piece = plan::piece_length(algorithm, shape, element_size, topology, costs);
            let plan = plan::build_on(algorithm, shape, piece, topology).ok_or_else(|| {
                Error::internal(format!("no {algorithm} plan for {}", shape.collective))
            })?;
            Ok(CompiledPlan::new(plan, partial_size))
        })
    }

    /// Gives an operation its plan of messages where the ranks have decided to go by one. Returns whether they have.
    pub(crate) fn go_by_messages(&self, plans: &mut PlanStore, run: &mut PlanRun) -> Result<bool> {
        let Some(key) = run.declined() else {
            return Ok(false);
        };
        let shape = key.shape(self.rank, self.world);
        let dtype = run.operands().elements.dtype;
        let choice = plans.choice(Some(key), |is_told| {
            self.choose(&shape, dtype, key.in_rank_order, is_told)
        });
        let sizes = (key.element_size, key.partial_size);
        let compiled = self.compiled(plans, (&shape, Some(key)), sizes, choice)?;
        let neighbours = self.membership.topology.ranks_beside(self.rank);
        run.go_by_messages(plans.prepare(compiled, run.operands(), neighbours));
        Ok(true)
    }

    /// Starts a send.
    pub(crate) fn send(
        &self,
        dtype: DataType,
        memory: Memory,
        (to, tag): (Rank, u64),
        options: PointToPoint,
    ) -> Result<Arc<WorkState>> {
        self.check_rank(to, "send to")?;
        check_elements(dtype, &memory, "send")?;
        let bytes = memory.len();
        self.message(
            Message {
                collective: Collective::Send,
                peer: Some(to),
                bytes,
                role: Role::Tagged(tag, dtype),
            },
            options,
            |core, work| {
                let memory = (memory, None);
                core.matching
                    .send(dtype, memory, (to, tag), work, &mut core.finished)?;
                Ok(true)
            },
        )
    }

    /// Starts a receive.
    pub(crate) fn receive(
        &self,
        dtype: DataType,
        memory: Memory,
        (from, tag): (Option<Rank>, u64),
        options: PointToPoint,
    ) -> Result<Arc<WorkState>> {
        if let Some(from) = from {
            self.check_rank(from, "receive from")?;
        }
        check_elements(dtype, &memory, "recv")?;
        let (bytes, takes_shorter) = (memory.len(), options.takes_shorter);
        self.message(
            Message {
                collective: Collective::Recv,
                peer: from,
                bytes,
                role: Role::Tagged(tag, dtype),
            },
            options,
            |core, work| {
                let posted = Posted {
                    takes_shorter,
                    ..Posted::new((from, tag), (dtype, memory), work)
                };
                core.matching.receive(posted, &mut core.finished)
            },
        )
    }

    /// Starts to look for a message, which a receive may take afterwards. It has no timeout.
    pub(crate) fn probe(&self, from: Option<Rank>, tag: u64) -> Result<Arc<WorkState>> {
        if let Some(from) = from {
            self.check_rank(from, "probe for a message of")?;
        }
        let options = PointToPoint {
            timeout: Some(Duration::ZERO),
            blocking: true,
            ..PointToPoint::default()
        };
        let message = Message {
            collective: Collective::Recv,
            peer: from,
            bytes: 0,
            role: Role::Probe,
        };
        self.message(message, options, |core, work| {
            let probe = Posted {
                is_probe: true,
                ..Posted::new((from, tag), (DataType::UInt8, Memory::empty()), work)
            };
            core.matching.receive(probe, &mut core.finished)?;
            // One that polls wants what has come by now.
            Ok(true)
        })
    }

    /// Sends a note in the place of a message of `note_of` bytes of `dtype`: it meets a receive of such a note.
    pub(crate) fn send_note(
        &self,
        (dtype, note_of): (DataType, usize),
        note: Memory,
        (to, tag): (Rank, u64),
        options: PointToPoint,
    ) -> Result<Arc<WorkState>> {
        self.message(
            Message {
                collective: Collective::Send,
                peer: Some(to),
                bytes: NOTE,
                role: Role::Note,
            },
            options,
            |core, work| {
                let note = (note, Some(note_of));
                core.matching
                    .send(dtype, note, (to, tag), work, &mut core.finished)?;
                Ok(true)
            },
        )
    }

    /// Receives a note that stands for a message of `note_of` bytes of `dtype`. Reports name it as `operation`.
    pub(crate) fn receive_note(
        &self,
        (operation, dtype, note_of): (Collective, DataType, usize),
        note: Memory,
        (from, tag): (Option<Rank>, u64),
        options: PointToPoint,
    ) -> Result<Arc<WorkState>> {
        let message = Message {
            collective: operation,
            peer: from,
            bytes: NOTE,
            role: Role::Note,
        };
        self.message(message, options, |core, work| {
            let posted = Posted {
                note_of: Some(note_of),
                ..Posted::new((from, tag), (dtype, note), work)
            };
            core.matching.receive(posted, &mut core.finished)
        })
    }

    pub(crate) fn check_rank(&self, rank: Rank, what: &str) -> Result<()> {
        if rank >= self.world {
            return Err(Error::invalid(format!(
                "{what} rank {rank}: the group has {} ranks",
                self.world
            )));
        }
        Ok(())
    }

    fn message(
        &self,
        message: Message,
        options: PointToPoint,
        start: impl FnOnce(&mut Core, &Arc<WorkState>) -> Result<bool>,
    ) -> Result<Arc<WorkState>> {
        self.check_alive()?;
        let mut core = self.core.lock();
        self.check_alive()?;
        self.start_message(&mut core, message, options, start)
    }

    /// Makes a send or a receive known, which `start` begins. That returns whether there is something to move for it at once.
    pub(crate) fn start_message(
        &self,
        core: &mut Core,
        message: Message,
        options: PointToPoint,
        start: impl FnOnce(&mut Core, &Arc<WorkState>) -> Result<bool>,
    ) -> Result<Arc<WorkState>> {
        let Message {
            collective,
            peer,
            bytes,
            role,
        } = message;
        let timeout = options.timeout.unwrap_or_else(|| self.timeout());
        let sequence = core.messages + 1;
        let work = WorkState::new(
            collective,
            sequence,
            (self.clock.now(), timeout),
            options.completion,
        );
        let work = Arc::new(work.counted_at(TrafficClass::of(collective, bytes)));
        let started = self.guarded(core, |core| start(core, &work));
        let moves = match started.flatten() {
            Ok(moves) => moves,
            Err(error) => {
                if error.code.is_fatal() {
                    self.fail(core, error.clone());
                }
                return Err(error);
            }
        };
        core.messages = sequence;
        if role != Role::Probe {
            core.traffic.count(work.place);
            core.recorder.record(&work, message.print(sequence));
        }
        if let Some(timeline) = &mut core.timeline
            && let Role::Tagged(tag, _) = role
        {
            let begun = Begun {
                bytes,
                peer,
                tag: Some(tag),
                ..Begun::default()
            };
            timeline.begin(&work, begun);
        }
        match peer {
            Some(peer) => self.ensure_link(core, Lane::PointToPoint, peer),
            None => {
                (0..self.world).for_each(|peer| self.ensure_link(core, Lane::PointToPoint, peer))
            }
        }
        // A receive whose message has not come leaves reading to the wait, so that what is sent meanwhile does not come
        // after it.
        if moves {
            self.step(core);
        }
        self.after_submit(
            core,
            (!options.blocking).then_some(bytes >= WAKES_THREAD_FROM),
        );
        Ok(work)
    }

    /// Sees to it that a thread drives what was just submitted: soon, or `at_once`; `None` when the caller will.
    pub(crate) fn after_submit(&self, core: &mut Core, at_once: Option<bool>) {
        if core.sleeping {
            self.parker.unpark();
        }
        if let Some(at_once) = at_once {
            self.hand_over(core, at_once);
        }
    }

    /// Gives the group to the progress thread if it needs driving and no thread does it.
    pub(crate) fn hand_over(&self, core: &mut Core, at_once: bool) {
        if core.leader || !core.is_busy() {
            return;
        }
        core.handed_over = true;
        if core.watched {
            // Until it is awake: a leader that comes first may take the ring for its own.
            if core.dozing {
                self.parker.unpark();
            } else if at_once {
                self.staff.progress.wake();
            }
        } else if let Some(this) = self.this.upgrade() {
            core.watched = true;
            self.staff.progress.adopt(this, at_once);
        }
    }
}

pub(crate) fn check_elements(dtype: DataType, memory: &Memory, operation: &str) -> Result<()> {
    if !memory.len().is_multiple_of(dtype.size()) {
        return Err(Error::invalid(format!(
            "{operation}: {} bytes are not a whole number of {dtype} elements",
            memory.len()
        )));
    }
    Ok(())
}
