//! The acts of a rank of a world: it takes turns, makes its calls and leaves.

use std::sync::Arc;
use std::time::Duration;

use super::player::{Player, Running, Sleep, Stage, What};
use super::program::{Call, Message, Share, Step, Store, share_of_chain};
use super::random::Random;
use super::scenario::{Fault, Seat};
use super::{IDLE_TURNS, World};
use crate::engine::group::end::{LINGER, Parting, are_delivered};
use crate::engine::work::{PointToPoint, WorkState};
use crate::error::{Code, Result};
use crate::types::{DataType, Rank};

/// Steps that a rank has begun and not waited for.
const OUTSTANDING: usize = 4;

/// How often a rank that leaves looks whether what it sent has arrived.
const LOOK: Duration = Duration::from_millis(1);

impl World {
    /// One turn of a rank that can move.
    pub(super) fn turn(&mut self, seat: Seat) {
        if let Stage::Leaving(..) = self.players[seat].stage {
            self.linger(seat);
            return;
        }
        let now = self.clock.now();
        let player = &mut self.players[seat];
        if player.sleep != Sleep::Awake {
            player.wake(now);
        }
        player.attend(now);
        self.note_ends(seat);
        if self.begins(seat) {
            return;
        }
        let looks = self.random.once_in(8);
        self.players[seat].drive(looks);
        self.note_ends(seat);
        let player = &self.players[seat];
        if player.idle_turns == IDLE_TURNS {
            let waits = player.group.waits();
            let what = format!("{} stays awake and does not move: {waits}", player.name());
            self.tell(seat, || what.clone());
            self.faults.push(what);
        }
    }

    /// Begins the next step, or leaves after the last. Returns whether the rank did something.
    fn begins(&mut self, seat: Seat) -> bool {
        let now = self.clock.now();
        let player = &self.players[seat];
        if player.computes_until.is_some_and(|until| now < until) {
            return false;
        }
        let is_over =
            player.group.error().is_some() || player.next == self.scenario(seat).steps.len();
        if is_over {
            if player.is_under_way() || self.owes(seat) {
                return false;
            }
            self.leave(seat);
            return true;
        }
        let under_way = player.running.iter().filter(|it| it.end.is_none());
        let awaited = under_way
            .clone()
            .any(|it| self.scenario(seat).waits[it.step]);
        if awaited || under_way.count() >= OUTSTANDING {
            return false;
        }
        let step = player.next;
        let player = &mut self.players[seat];
        player.next += 1;
        player.active = now;
        if player.leads {
            player.group.core.lock().matching.hold_offers(true);
        }
        if !self.misbehaves(seat, step) {
            self.begin(seat, step);
        }
        let computes = match self.random.below(6) {
            0 if !self.is_asked() => Duration::from_nanos(self.random.length(2_000_000_000) as u64),
            _ => Duration::ZERO,
        };
        self.players[seat].computes_until = Some(self.clock.now() + computes);
        true
    }

    /// Does what it should not instead of a step, if that is the fault of this world.
    fn misbehaves(&mut self, seat: Seat, step: usize) -> bool {
        let fault = self.scenario(seat).fault;
        if fault.place() != Some((self.players[seat].rank, step)) {
            return false;
        }
        match fault {
            Fault::Abort { .. } => {
                self.tell(seat, || "aborts".into());
                self.players[seat].group.abort("on purpose");
            }
            Fault::Leave { .. } => self.leave(seat),
            Fault::Skip { .. } => self.tell(seat, || format!("leaves out step {step}")),
            Fault::Nonsense { .. } => {
                let store = Store::new(&[0; 8], false);
                let group = &self.players[seat].group;
                let place = (self.scenario(seat).world, 0);
                let refused = group.send(DataType::UInt8, store.memory(), place, blocking());
                let code = refused.map(drop).map_err(|error| error.code);
                // A group that has failed says so first.
                if code != Err(Code::InvalidArgument) && group.error().is_none() {
                    self.faults.push(format!("a send to no rank: {code:?}"));
                }
                return false;
            }
            _ => return false,
        }
        true
    }

    fn begin(&mut self, seat: Seat, step: usize) {
        let rank = self.players[seat].rank;
        match self.scenario(seat).steps[step].clone() {
            Step::Collective(mut call) => {
                let fault = self.scenario(seat).fault;
                if let Fault::Mistake { how, .. } = fault
                    && fault.place() == Some((rank, step))
                    && let Some(other) =
                        call.mistaken(rank, self.scenario(seat).world, &mut Random::new(how))
                {
                    call = other;
                }
                self.tell(seat, || format!("begins step {step}: {}", call.collective));
                self.begin_collective(seat, step, &call);
            }
            Step::Chain(calls) => {
                self.tell(seat, || {
                    format!("begins step {step}: {} calls", calls.len())
                });
                self.begin_chain(seat, step, &calls);
            }
            Step::Messages(messages) => {
                self.tell(seat, || format!("begins step {step}: messages"));
                for message in messages {
                    if message.to == rank {
                        self.begin_receive(seat, step, &message);
                    }
                    if message.from == rank {
                        self.begin_send(seat, step, &message);
                    }
                }
            }
        }
    }

    fn begin_collective(&mut self, seat: Seat, step: usize, call: &Call) {
        let (rank, world) = self.place(seat);
        let share = call.share(rank, world);
        let share = match &self.scenario(seat).numbers {
            Some(numbers) => numbers.widen(call, rank, share),
            None => share,
        };
        let begun = self.call(seat, call, &share);
        self.note_begun(seat, step, begun, What::Collective(share));
    }

    /// Operations on one buffer; the last one has the result.
    fn begin_chain(&mut self, seat: Seat, step: usize, calls: &[Call]) {
        let (rank, world) = self.place(seat);
        let share = share_of_chain(calls, rank, world);
        let begun: Vec<_> = calls
            .iter()
            .map(|call| self.call(seat, call, &share))
            .collect();
        let mut whats: Vec<_> = begun.iter().map(|_| What::Part).collect();
        whats[calls.len() - 1] = What::Collective(share);
        for (begun, what) in begun.into_iter().zip(whats) {
            self.note_begun(seat, step, begun, what);
        }
    }

    fn call(&mut self, seat: Seat, call: &Call, share: &Share) -> Result<Arc<WorkState>> {
        let is_now = self.random.once_in(4);
        let Player { group, rank, .. } = &self.players[seat];
        let begin = |mut request| match is_now {
            true => group.begin_now(&mut request),
            false => group.submit(request, None, false),
        };
        match &self.scenario(seat).numbers {
            Some(numbers) => numbers.carry(call, (*rank, share), begin),
            None => begin(call.request(share, (call.root, call.sizes(*rank)))),
        }
    }

    fn begin_send(&mut self, seat: Seat, step: usize, message: &Message) {
        let store = Store::new(&message.payload(), self.random.once_in(3));
        let place = (self.peer(seat, message.to), message.tag_in(step));
        let group = &self.players[seat].group;
        let begun = group.send(DataType::UInt8, store.memory(), place, blocking());
        self.note_begun(seat, step, begun, What::Send(store));
    }

    fn begin_receive(&mut self, seat: Seat, step: usize, message: &Message) {
        let store = Store::new(&vec![0; message.bytes], self.random.once_in(3));
        let from = (!message.from_any).then(|| self.peer(seat, message.from));
        let place = (from, message.tag_in(step));
        let group = &self.players[seat].group;
        let begun = group.receive(DataType::UInt8, store.memory(), place, blocking());
        self.note_begun(seat, step, begun, What::Receive(store, message.payload()));
    }

    /// The rank of the group that a rank knows by the number of this one.
    fn peer(&self, seat: Seat, peer: Rank) -> Rank {
        let numbers = self.scenario(seat).numbers.as_ref();
        numbers.map_or(peer, |numbers| numbers.place(self.players[seat].rank, peer))
    }

    fn note_begun(&mut self, seat: Seat, step: usize, begun: Result<Arc<WorkState>>, what: What) {
        match begun {
            Ok(work) => {
                let begun = self.clock.now();
                self.players[seat].running.push(Running {
                    step,
                    work,
                    what,
                    begun,
                    end: None,
                });
            }
            Err(error) => {
                self.tell(seat, || format!("is refused: {error}"));
                // The group fails in this call, or has failed: its memory has been let go.
                if !error.code.is_fatal() {
                    let name = self.players[seat].name();
                    self.faults.push(format!("{name} is refused: {error}"));
                }
            }
        }
    }

    /// Takes note of operations that have ended.
    pub(super) fn note_ends(&mut self, seat: Seat) {
        let now = self.clock.now();
        let mut told = Vec::new();
        for running in &mut self.players[seat].running {
            if running.end.is_some() {
                continue;
            }
            let Some(result) = running.work.result() else {
                continue;
            };
            told.push((running.step, running.work.name(), result.clone()));
            let stores = running.what.stores().into_iter();
            running.end = Some((now, stores.map(|store| store.content().to_vec()).collect()));
        }
        for (step, name, result) in told {
            self.tell(seat, || match result {
                Ok(()) => format!("ends {name} of step {step}"),
                Err(error) => format!("ends {name} of step {step}: {error}"),
            });
        }
    }

    /// Whether it waits for its links before it leaves, as a group does that is closed.
    fn owes(&mut self, seat: Seat) -> bool {
        let now = self.clock.now();
        let player = &mut self.players[seat];
        let parting = player.parting.get_or_insert_with(|| Parting::begin(now));
        player.attends_at = player.attends_at.min(now + LOOK);
        player.computes_until = None;
        let group = &player.group;
        group.error().is_none() && group.owes(&mut group.core.lock(), parting, now)
    }

    fn leave(&mut self, seat: Seat) {
        self.tell(seat, || "leaves".into());
        let until = self.clock.now() + LINGER;
        let core = self.players[seat].group.core.lock();
        let reached = core.shared.reached().map(str::to_owned);
        self.reached.extend(reached);
        let ended = core.ended();
        drop(core);
        self.check_ended(seat, ended);
        let player = &mut self.players[seat];
        player.sleep = Sleep::Awake;
        player.stage = match player.group.leave() {
            Some(links) => Stage::Leaving(links, until),
            None => Stage::Gone,
        };
        // Those that come late to a rank that has failed hear of the failure.
        if player.group.error().is_none() {
            self.give_up_links(seat, false);
        }
        self.note_ends(seat);
    }

    /// The collectives up to this number have ended on the rank, as it will tell those that are left.
    fn check_ended(&mut self, seat: Seat, ended: u64) {
        let player = &self.players[seat];
        let collectives = player.running.iter();
        let collectives =
            collectives.filter(|it| matches!(it.what, What::Collective(_) | What::Part));
        let has_ended = collectives
            .take_while(|it| matches!(it.work.result(), Some(Ok(()))))
            .count();
        if ended != has_ended as u64 {
            let name = player.name();
            let what = format!("{name} says that {ended} collectives have ended, of {has_ended}");
            self.faults.push(what);
        }
    }

    /// Waits until what a rank that leaves has sent has arrived.
    fn linger(&mut self, seat: Seat) {
        let now = self.clock.now();
        let player = &mut self.players[seat];
        if let Stage::Leaving(links, until) = &mut player.stage
            && (are_delivered(links) || now >= *until)
        {
            player.stage = Stage::Gone;
        }
        player.sleep = Sleep::Idle;
        player.attends_at = now + LOOK;
    }
}

fn blocking() -> PointToPoint {
    PointToPoint {
        blocking: true,
        ..PointToPoint::default()
    }
}
