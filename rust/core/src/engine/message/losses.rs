//! A peer that ends at any moment of a message of any kind, over any transport: the other side has its message, or learns
//! that the peer is lost.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::matching::Dependence;
use crate::buffer::Memory;
use crate::communicator::Communicator;
use crate::config::Config;
use crate::engine::links::LinkTable;
use crate::engine::state::Group;
use crate::engine::work::{PointToPoint, WorkState};
use crate::error::Code;
use crate::heap::Buffer;
use crate::transport::endpoint::Lane;
use crate::transport::suite::{Make, PAIRS};
use crate::types::{DataType, Rank};

/// Rank 0 lives on, and so does rank 2, which has nothing to do with it.
const VICTIM: Rank = 1;
const TAG: u64 = 3;
/// So much fits into a ring.
const RING: usize = 16 << 10;
/// No test takes as long.
const SOON: Duration = Duration::from_secs(10);

/// How the payload goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Unasked for.
    Eager,
    /// When it has been announced and the receiver is ready.
    Announced,
    /// The same, and the receiver reads it in the sender's memory: the first that is lent.
    Tried,
    /// Offered to be read in the sender's memory.
    Offered,
    /// The same, in the shared heap.
    Heap,
}

impl Way {
    /// Those of a transport; the payload never fits into a ring.
    fn all(transport: &str) -> &'static [(Self, usize)] {
        let all = &[
            (Self::Eager, 40_000),
            (Self::Announced, 200_000),
            (Self::Tried, 600_000),
            (Self::Offered, 600_000),
            (Self::Heap, 600_000),
        ];
        match transport {
            "shared memory" => all,
            _ => &all[..2],
        }
    }
}

/// Who does what, and when.
#[derive(Clone, Copy, Debug)]
struct Case {
    transport: &'static str,
    make: Make,
    way: Way,
    sender: Rank,
    /// The receive has been posted before the message comes.
    is_early: bool,
    from_any: bool,
    /// Turns that the two take before the victim ends.
    turns: usize,
}

/// How far the two were when one of them ended.
#[derive(Debug, PartialEq, Eq)]
enum Reached {
    /// In the midst of it.
    Midst,
    /// Nothing would have moved any more.
    End,
}

struct World {
    ranks: Vec<Communicator>,
    sent: Buffer<u8>,
    private: Vec<u8>,
    got: Vec<u8>,
}

impl World {
    fn new(case: &Case, length: usize) -> Self {
        let ranks = Communicator::local(3, &Config::default()).unwrap();
        let (a, b) = (case.make)(RING);
        for (rank, peer, mut link) in [(0, VICTIM, a), (VICTIM, 0, b)] {
            let lends_from = match case.way {
                Way::Eager | Way::Announced => usize::MAX,
                Way::Tried | Way::Offered | Way::Heap => 4096,
            };
            if let Some(neighbour) = link.neighbour() {
                neighbour.lend_private_from(lends_from);
            }
            let group = ranks[rank].group();
            let mut core = group.core.lock();
            group.read_mail(&mut core);
            let name = group.name_of(peer);
            core.links.establish(Lane::PointToPoint, peer, link, name);
        }
        let private: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
        Self {
            ranks,
            sent: Buffer::from_slice(&private),
            got: vec![0; length],
            private,
        }
    }

    fn group(&self, rank: Rank) -> &Group {
        self.ranks[rank].group()
    }

    fn receive(&mut self, case: &Case) -> Arc<WorkState> {
        // SAFETY: the world ends its groups before it goes.
        let memory = unsafe { Memory::of_mut(&mut self.got) };
        let from = (!case.from_any).then_some(case.sender);
        let group = self.group(1 - case.sender);
        let receive = group.receive(DataType::UInt8, memory, (from, TAG), blocking());
        receive.unwrap()
    }

    fn send(&self, case: &Case) -> Arc<WorkState> {
        // SAFETY: as above; nothing writes to it.
        let memory = unsafe {
            match case.way {
                Way::Heap => Memory::of(&self.sent),
                _ => Memory::of(&self.private),
            }
        };
        let group = self.group(case.sender);
        let place = (1 - case.sender, TAG);
        group
            .send(DataType::UInt8, memory, place, blocking())
            .unwrap()
    }

    fn step(&self, rank: Rank) -> bool {
        let group = self.group(rank);
        group.step(&mut group.core.lock())
    }

    /// A message from end to end, after which the lender knows that its memory can be read.
    fn warm_up(&mut self, case: &Case) {
        let works = [self.receive(case), self.send(case)];
        while works.iter().any(|work| work.result().is_none()) {
            self.step(0);
            self.step(VICTIM);
        }
        self.got.fill(0);
    }

    /// The victim's process ends, without a word.
    fn end_victim(&self) {
        let mut core = self.group(VICTIM).core.lock();
        core.links = LinkTable::new(3);
    }

    /// Rank 0 goes on until its message has ended.
    fn survive(&self, work: &WorkState, case: &Case) {
        let group = self.group(0);
        let until = Instant::now() + SOON;
        while work.result().is_none() {
            let mut core = group.core.lock();
            group.step(&mut core);
            group.look_around(&mut core);
            drop(core);
            assert!(
                Instant::now() < until,
                "over {} it waits for ever: {case:?}",
                case.transport
            );
            thread::yield_now();
        }
        match work.result().unwrap() {
            Ok(()) if case.sender == VICTIM => assert!(self.got == self.private, "{case:?}"),
            Ok(()) => {}
            Err(error) => {
                assert_eq!(error.code, Code::PeerLost, "{error}: {case:?}");
                assert_eq!(error.peer, Some(VICTIM), "{error}: {case:?}");
            }
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.ranks.iter().for_each(|rank| rank.abort("over"));
    }
}

fn blocking() -> PointToPoint {
    PointToPoint {
        blocking: true,
        ..PointToPoint::default()
    }
}

fn run(case: &Case, length: usize) -> Reached {
    let mut world = World::new(case, length);
    if case.way == Way::Offered {
        world.warm_up(case);
    }
    let early = case.is_early.then(|| world.receive(case));
    let sent = world.send(case);
    let mut idle = 0;
    for turn in 0..case.turns {
        idle = match world.step(turn % 2) {
            true => 0,
            false => idle + 1,
        };
    }
    let works = [Some(&sent), early.as_ref()];
    let under_way = |work: &&Arc<WorkState>| work.result().is_none();
    let own = works[usize::from(case.sender == VICTIM)];
    if let Some(own) = own.filter(under_way) {
        let core = world.group(0).core.lock();
        assert_ne!(core.matching.dependence(VICTIM), Dependence::No, "{case:?}");
        assert!(
            core.matching
                .under_way()
                .any(|it| Arc::ptr_eq(it.work, own))
        );
        assert!(core.is_busy());
    }
    world.end_victim();
    let own = match (case.sender, early) {
        (VICTIM, Some(early)) => early,
        (VICTIM, None) => world.receive(case),
        _ => sent,
    };
    world.survive(&own, case);
    // Sockets may be late.
    match idle > 3 {
        true => Reached::End,
        false => Reached::Midst,
    }
}

#[test]
fn no_message_outlives_its_peer() {
    for (transport, make) in PAIRS {
        let mut ends = 0;
        for (way, length) in Way::all(transport) {
            for (sender, is_early, from_any) in [
                (VICTIM, true, false),
                (VICTIM, true, true),
                (VICTIM, false, false),
                (VICTIM, false, true),
                (0, true, false),
                (0, false, false),
            ] {
                let case = |turns| Case {
                    transport,
                    make,
                    way: *way,
                    sender,
                    is_early,
                    from_any,
                    turns,
                };
                ends += (0..)
                    .take_while(|turns| run(&case(*turns), *length) == Reached::Midst)
                    .count();
            }
        }
        println!("{transport}: {ends} moments");
        assert!(ends > 20, "{transport}: {ends} moments alone");
    }
}
