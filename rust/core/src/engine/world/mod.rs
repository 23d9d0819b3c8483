//! A world from a seed: all ranks of a group in one thread, over simulated links, on a clock that stands still until nothing
//! can move (TigerBeetle's simulator and quinn's tests are the models).
//!
//! A seed decides everything: the ranks and their hosts, the calls, the links' latencies, rates and buffers, which rank moves
//! next, and what goes wrong. The same seed makes the same world again. Ranks of one host have the links that they have in a
//! process ([`crate::transport::local`]), so lending and windows are the real ones; ranks of different hosts have links of a
//! [`Fabric`]. A rank moves while it can, announces that it sleeps, and is woken by a link or by the time that it asked for,
//! and by nothing else. So a wake-up that is forgotten is a wait for the timeout.
//!
//! In one world of five some of the processes have a second group beside that of all, with calls of its own at the same time.
//! A process that dies does so in both; a bad call in one must leave the other alone.
//! In one of four the ranks of a group have kept the numbers of a larger one, whose other ranks are gone.
//! A link that neither side has when one of them goes is not made: the other hears so when it asks for it, or hears nothing.
//!
//! These must hold, whatever the seed:
//!
//! - An operation that succeeds has the right bytes in its output.
//! - Where nothing goes wrong, every operation succeeds. Where something does, an error has the code of that and names the rank
//!   at fault.
//! - Every operation ends: soon after a death, an abort, a mistake or a farewell, else with its timeout. Connections that break
//!   and are mended end none of them.
//! - Every collective up to the number by which the ranks that are left of a group agree has ended there, and has not failed.
//! - No byte of a buffer changes after its operation has ended, and none behind it ever.
//! - No rank stays awake without moving.
//! - Every descriptor and every block of the heap has been given back in the end.
//!
//! `scenario`: a seed's decisions before the first step. `program`: calls, data and results, `masked`: those of ranks that
//! have kept their numbers. `fabric`: the links. `player`: one
//! rank, and `acts`: its turns and calls. `judge`: the oracles. `tests` says how to replay a seed.

mod acts;
mod fabric;
mod judge;
mod making;
mod masked;
mod player;
mod program;
pub(in crate::engine) mod random;
mod scenario;
pub mod simulate;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use rustix::net::{Shutdown, shutdown};

use self::fabric::Fabric;
use self::player::{Player, Stage};
use self::random::Random;
use self::scenario::{Fault, Scenario, Seat};
use crate::engine::clock::Clock;
use crate::engine::links::{LinkTable, Slot};
use crate::engine::state::Mail;
use crate::error::{Code, Error, Result};
use crate::heap;
use crate::transport::endpoint::Lane;
use crate::transport::{Link, local};
use crate::types::Rank;

/// Turns after which a world that still moves is taken to move for ever.
const TURNS: usize = 500_000;

/// The time of a rank's turn in a world that is asked for.
const TURN: Duration = Duration::from_nanos(500);

/// Turns in which a rank neither moves nor sleeps, one after the other: more are a wait that keeps a core busy.
const IDLE_TURNS: usize = 100;

/// Ends the connections of a link. To drop them is not enough: a program that another thread is about to start has copies.
fn cut(link: &dyn Link) {
    for fd in link.fds() {
        let _ = shutdown(fd, Shutdown::Both);
    }
}

/// Part of the names of files that the heap keeps.
const SEGMENT: &str = "memfd:unisono heap";

/// A world under way.
struct World {
    /// The group of all processes, and in some worlds a group of a part of them.
    teams: Vec<Scenario>,
    clock: Clock,
    start: Instant,
    random: Random,
    fabric: Arc<Fabric>,
    players: Vec<Player>,
    /// Links that are being made, and when they will have been.
    opening: Vec<(Instant, Seat, Mail)>,
    /// Links that are not made: the peer went before either side had its end.
    missing: Vec<Missing>,
    /// Faults that showed while it moved.
    faults: Vec<String>,
    /// Marks of what has been reached.
    reached: BTreeSet<String>,
    /// The events, for those who replay a seed.
    story: Option<String>,
}

/// The links of two ranks, by their numbers.
const LANES: [Lane; 2] = [Lane::Collective, Lane::PointToPoint];

/// A link that is not made, and the rank that may ask for it.
#[derive(Clone, Copy)]
struct Missing {
    seat: Seat,
    lane: Lane,
    peer: Rank,
    /// The peer has died, and not left.
    is_dead: bool,
}

fn is_link(mail: &Mail, (lane, peer): (Lane, Rank)) -> bool {
    matches!(mail, Mail::Established { lane: of, peer: to, .. } if (*of, *to) == (lane, peer))
}

/// The outcome of a seed.
#[derive(Debug, Default)]
struct Found {
    /// Everything that should not be.
    faults: Vec<String>,
    /// Marks of what has been reached.
    reached: BTreeSet<String>,
    story: String,
}

/// Makes the world of `seed`, and lets it run until all is quiet. The process does nothing else meanwhile.
fn run(seed: u64, is_told: bool) -> Found {
    let before = Holdings::now();
    let mut world = World::new(seed, is_told);
    world.run();
    let mut found = world.judge();
    let after = Holdings::now();
    if after != before {
        let fault = format!("keeps something: {before:?} before, {after:?} after");
        found.faults.push(fault);
    }
    found
}

/// The resources of this process that a world must give back.
#[derive(Debug, PartialEq, Eq)]
struct Holdings {
    /// The open files, sorted.
    files: Vec<PathBuf>,
    /// Bytes and blocks of the heap.
    heap: (usize, usize),
}

impl Holdings {
    fn now() -> Self {
        // The first link makes what a process keeps.
        static FIRST: Once = Once::new();
        FIRST.call_once(|| drop(local::pair(1 << 12)));
        let open = fs::read_dir("/proc/self/fd").expect("/proc");
        let paths = open.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        let is_kept = |path: &PathBuf| path.to_string_lossy().contains(SEGMENT);
        let mut files: Vec<_> = paths.filter(|path| !is_kept(path)).collect();
        files.sort();
        let heap = heap::statistics();
        Self {
            files,
            heap: (heap.in_use, heap.blocks),
        }
    }
}

impl World {
    fn new(seed: u64, is_told: bool) -> Self {
        let mut random = Random::new(seed);
        let mut whole = Scenario::new(&mut random);
        let part = random.once_in(5).then(|| whole.part(&mut random));
        let teams = [whole].into_iter().chain(part).collect();
        Self::of(teams, random, is_told).expect("descriptors")
    }

    fn of(teams: Vec<Scenario>, mut random: Random, is_told: bool) -> Result<Self> {
        let clock = Clock::simulated();
        let start = clock.now();
        let fabric = Fabric::new(clock.clone(), random.next());
        let (mut players, mut opening) = (Vec::new(), Vec::new());
        for (team, scenario) in teams.iter().enumerate() {
            let groups = making::groups(scenario, &clock)?;
            let seats = (&groups[..], players.len());
            let links = making::connect(seats, scenario, &fabric, (&mut random, start))?;
            opening.extend(links);
            let ranks = groups.into_iter().enumerate();
            players.extend(ranks.map(|(rank, group)| {
                let place = (team, rank, scenario.processes[rank]);
                let leads = scenario.asked.is_some() || random.once_in(2);
                Player::new(place, group, leads, start)
            }));
        }
        Ok(Self {
            players,
            // A world that is asked for needs no description.
            story: is_told.then(|| match teams[0].asked {
                Some(_) => String::new(),
                None => format!("{teams:#?}\n"),
            }),
            teams,
            clock,
            start,
            random,
            fabric,
            opening,
            missing: Vec::new(),
            faults: Vec::new(),
            reached: BTreeSet::new(),
        })
    }

    /// Whether nothing happens in it that was not asked for.
    fn is_asked(&self) -> bool {
        self.teams[0].asked.is_some()
    }

    /// The program of this seat's team.
    fn scenario(&self, seat: Seat) -> &Scenario {
        &self.teams[self.players[seat].team]
    }

    /// The rank and the world of this seat.
    fn place(&self, seat: Seat) -> (Rank, usize) {
        (self.players[seat].rank, self.scenario(seat).world)
    }

    fn tell(&mut self, seat: Seat, what: impl FnOnce() -> String) {
        let passed = self.clock.since(self.start).as_secs_f64();
        if let Some(story) = &mut self.story {
            let name = self.players[seat].name();
            let _ = writeln!(story, "{passed:>13.9} {name} {}", what());
        }
    }

    fn run(&mut self) {
        for _ in 0..TURNS {
            if !self.advance() {
                return;
            }
        }
        self.faults.push("it moves for ever".into());
    }

    /// One turn, or the way to the next moment at which something happens. False: all is quiet, or something does not hold.
    fn advance(&mut self) -> bool {
        self.strike();
        self.open();
        let now = self.clock.now();
        for seat in self.fabric.take_calls() {
            self.players[seat].wake(now);
        }
        let seats = self.players.iter().enumerate();
        let ready = seats.filter(|(_, player)| player.can_move(now));
        let ready: Vec<Seat> = ready.map(|(seat, _)| seat).collect();
        if ready.is_empty() {
            let next = self.next_moment();
            next.inspect(|moment| self.clock.advance(*moment));
            return next.is_some();
        }
        let seat = self.random.pick(&ready);
        self.turn(seat);
        self.refuse_links(seat);
        match self.is_asked() {
            // The others take their turns at the same time.
            true => self.players[seat].busy_until = Some(now + TURN),
            false => {
                let takes = Duration::from_nanos(self.random.below(2_000) as u64);
                self.clock.advance(now + takes);
            }
        }
        self.faults.is_empty()
    }

    /// When something happens next by itself.
    fn next_moment(&self) -> Option<Instant> {
        let players = self.players.iter();
        let own = players.filter_map(Player::next_moment);
        let opened = self.opening.iter().map(|(moment, ..)| *moment);
        let all = own.chain(self.fabric.next_call()).chain(self.fault_at());
        Some(all.chain(opened).min()?.max(self.clock.now()))
    }

    /// When the fault happens, if it is one that has a time and has not happened.
    fn fault_at(&self) -> Option<Instant> {
        let (process, at) = self.teams[0].fault.time()?;
        let mut players = self.players.iter().filter(|it| it.process == process);
        let is_alive = players.any(|player| matches!(player.stage, Stage::Alive));
        let moment = self.start + at;
        (is_alive && moment > self.clock.now()).then_some(moment)
    }

    /// Has the fault happen, if its time has come.
    fn strike(&mut self) {
        let passed = self.clock.since(self.start);
        let fault = self.teams[0].fault;
        let Some((process, _)) = fault.time().filter(|(_, at)| passed >= *at) else {
            return;
        };
        for seat in 0..self.players.len() {
            if self.players[seat].process != process {
                continue;
            }
            match fault {
                Fault::Death { loses, .. } => self.kill(seat, loses),
                Fault::Dark { .. } => self.darken(seat),
                Fault::Outage { at, lasts, .. } => {
                    self.fabric.interrupt(seat, self.start + at + lasts);
                }
                Fault::Pause { at, lasts, .. } => {
                    let player = &mut self.players[seat];
                    player.paused_until = player.paused_until.or(Some(self.start + at + lasts));
                }
                Fault::Lie { how, .. } if self.players[seat].team == 0 => {
                    self.fabric.lie(seat, how)
                }
                _ => {}
            }
        }
    }

    /// A world that was asked for loses the host, with all of its ranks.
    fn darken(&self, seat: Seat) {
        let host = |seat: Seat| self.scenario(seat).hosts[self.players[seat].rank];
        match self.is_asked() {
            true => {
                let all = 0..self.players.len();
                let there = all.filter(|other| host(*other) == host(seat));
                there.for_each(|other| self.fabric.darken(other));
            }
            false => self.fabric.darken(seat),
        }
    }

    fn kill(&mut self, seat: Seat, loses: bool) {
        if matches!(self.players[seat].stage, Stage::Gone) {
            return;
        }
        if loses {
            self.fabric.lose_sent(seat);
        }
        self.give_up_links(seat, true);
        // The other ends arrive, and show the death.
        for (_, _, mail) in self.opening.extract_if(.., |(_, to, _)| *to == seat) {
            if let Mail::Established { link, .. } = mail {
                cut(&*link);
            }
        }
        let world = self.scenario(seat).world;
        let player = &mut self.players[seat];
        player.stage = Stage::Gone;
        let mut core = player.group.core.lock();
        player.group.read_mail(&mut core);
        let open = core.links.iter_open();
        open.for_each(|(_, _, open)| cut(&*open.link));
        core.links = LinkTable::new(world);
        drop(core);
        self.tell(seat, || "dies".into());
    }

    /// The rank goes. A link to it is not made if neither side has its end.
    fn give_up_links(&mut self, seat: Seat, is_dead: bool) {
        let (own, world) = self.place(seat);
        for peer in 0..world {
            let other = seat - own + peer;
            for lane in LANES {
                let is_end = |(_, to, mail): &(Instant, Seat, Mail)| {
                    *to == seat && is_link(mail, (lane, peer))
                        || *to == other && is_link(mail, (lane, own))
                };
                if self.opening.iter().filter(|it| is_end(it)).count() == 2 {
                    self.opening.retain(|it| !is_end(it));
                    self.missing.push(Missing {
                        seat: other,
                        lane,
                        peer: own,
                        is_dead,
                    });
                }
            }
        }
    }

    /// Tells a rank that has asked for a link to one that went that there is none, and whether it left. Where a host went with
    /// its rank, nothing answers if the other link has shown that already.
    fn refuse_links(&mut self, seat: Seat) {
        if self.missing.is_empty() {
            return;
        }
        let group = Arc::clone(&self.players[seat].group);
        let core = group.core.lock();
        let beside = |it: &Missing| {
            let lane = LANES[1 - it.lane as usize];
            core.links.peek(lane, it.peer)
        };
        let is_asked = |it: &mut Missing| {
            it.seat == seat && matches!(core.links.slot(it.lane, it.peer), Slot::Opening { .. })
        };
        let asked: Vec<Missing> = self.missing.extract_if(.., is_asked).collect();
        for missing in asked {
            let Missing { lane, peer, .. } = missing;
            if missing.is_dead && beside(&missing).is_some() && self.random.once_in(2) {
                continue;
            }
            let error = match missing.is_dead {
                true => Error::new(Code::PeerLost, format!("rank {peer} is gone")),
                false => Error::new(Code::PeerLost, format!("rank {peer} has left the group"))
                    .of_one_that_left(),
            };
            let takes = Duration::from_nanos(self.random.length(50_000_000) as u64);
            let mail = Mail::Failed { lane, peer, error };
            self.opening.push((self.clock.now() + takes, seat, mail));
        }
    }

    /// Delivers the links that have been made.
    fn open(&mut self) {
        let now = self.clock.now();
        while let Some(next) = self.opening.iter().position(|(moment, ..)| *moment <= now) {
            let (_, seat, mail) = self.opening.remove(next);
            self.players[seat].group.post(mail);
            self.players[seat].wake(now);
        }
    }
}
