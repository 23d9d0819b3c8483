//! How long plans would take, on machines that one does not have.
//!
//! A discrete-event simulation of [`super::Plan`]s under the executor's own rule
//! ([`super::Step::must_follow`]), with a cost for messages, bytes and passes over memory. The costs are few,
//! so that their meaning stays clear:
//!
//! - A rank has one thread. Each message costs it a fixed time on either side, and bytes cost it time per
//!   byte when it copies, reduces, or receives from a rank of the same host.
//! - A host has one network interface with one lane out and one in. Bytes to other hosts occupy first the
//!   sender's, then, the latency later, the receiver's.
//! - When a host has more ranks than cores, what its threads do takes that much longer.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use super::cost::Costs;
use super::links::WINDOW;
use super::signals::Semaphore;
use super::topology::Topology;
use super::{Buffer, Order, Plan, Span, Step};
use crate::types::Rank;

/// The costs of reaching a peer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkCost {
    /// Seconds from the end of sending to the start of receiving.
    pub latency: f64,
    /// Seconds of either rank's time per message.
    pub per_message: f64,
    /// Seconds per byte: of the receiving rank's time on one host, of the network interfaces between hosts.
    pub per_byte: f64,
}

/// Where the ranks are and what things cost there.
#[derive(Clone, Debug, PartialEq)]
pub struct CostModel {
    /// Where the ranks are.
    pub topology: Topology,
    /// Bytes of an element.
    pub element_size: usize,
    /// Bytes of an element of the accumulation type.
    pub accumulator_size: usize,
    /// Between ranks of one host.
    pub inside: LinkCost,
    /// Between hosts.
    pub across: LinkCost,
    /// Seconds per byte that is copied, reduced or finished in memory.
    pub memory_per_byte: f64,
    /// Seconds per step.
    pub per_step: f64,
    /// Steps that the executor has in hand at once.
    pub window: usize,
}

impl CostModel {
    /// A machine of these days: [`Costs::TYPICAL`].
    pub fn typical(topology: Topology, element_size: usize, accumulator_size: usize) -> Self {
        Self::new(topology, &Costs::TYPICAL, element_size, accumulator_size)
    }

    /// A machine of such costs.
    pub fn new(
        topology: Topology,
        costs: &Costs,
        element_size: usize,
        accumulator_size: usize,
    ) -> Self {
        Self {
            topology,
            element_size,
            accumulator_size,
            inside: LinkCost {
                latency: costs.latency,
                per_message: costs.message,
                per_byte: costs.fold,
            },
            across: LinkCost {
                latency: costs.remote_latency,
                per_message: costs.remote_message,
                per_byte: costs.remote_byte,
            },
            memory_per_byte: costs.copy,
            per_step: 0.02e-6,
            window: WINDOW,
        }
    }

    fn bytes(&self, span: Span) -> f64 {
        let size = match span.buffer {
            Buffer::Scratch => self.accumulator_size,
            Buffer::Input | Buffer::Output | Buffer::Window { .. } => self.element_size,
        };
        (span.len * size) as f64
    }
}

/// Seconds from the start until the last rank has done its last step; infinite when the plans do not
/// complete.
pub fn simulate(plans: &[Plan], cost: &CostModel) -> f64 {
    let mut machine = Machine::new(plans, cost);
    for rank in 0..plans.len() {
        machine.activate(rank, 0.0);
    }
    let mut end = 0.0;
    while let Some(Reverse((Time(now), _, event))) = machine.events.pop() {
        match event {
            Event::Receive { rank, step, bytes } => machine.receive(rank, step, bytes, now),
            Event::Arrived { rank, step } => {
                let done = machine.work(rank, now, cost.across.per_message);
                machine.at(done, Event::Done { rank, step });
            }
            Event::Signalled { rank } => {
                if let Some(step) = machine.waits[rank] {
                    machine.wait(rank, step, now);
                }
            }
            Event::Done { rank, step } => {
                end = now;
                machine.progress[rank][step] = Progress::Done;
                machine.activate(rank, now);
            }
        }
    }
    let complete = machine
        .heads
        .iter()
        .zip(plans)
        .all(|(&head, plan)| head == plan.steps.len());
    if complete { end } else { f64::INFINITY }
}

/// A time that can be sorted.
#[derive(Clone, Copy, PartialEq)]
struct Time(f64);

impl Eq for Time {}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Time {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Event {
    /// A message has arrived and the step that wants it is active.
    Receive {
        rank: Rank,
        step: usize,
        bytes: f64,
    },
    /// The last byte of a message from another host is here.
    Arrived {
        rank: Rank,
        step: usize,
    },
    /// A signal has reached a rank.
    Signalled {
        rank: Rank,
    },
    Done {
        rank: Rank,
        step: usize,
    },
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// The number of an event orders those of one time, so their own order never matters.
impl Ord for Event {
    fn cmp(&self, _: &Self) -> std::cmp::Ordering {
        std::cmp::Ordering::Equal
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    Waiting,
    Active,
    Done,
}

/// The messages under way from one rank to another.
#[derive(Default)]
struct InFlight {
    /// When each message has arrived, and how long it is.
    arrived: VecDeque<(f64, f64)>,
    /// The step that waits for the next one.
    waiting: Option<usize>,
}

struct Machine<'a> {
    plans: &'a [Plan],
    cost: &'a CostModel,
    /// How much slower each rank's thread is because it shares its core.
    slowdown: Vec<f64>,
    heads: Vec<usize>,
    progress: Vec<Vec<Progress>>,
    /// For each step, those within a window before it that must have ended.
    must_follow: Vec<Vec<Vec<usize>>>,
    /// From when on each thread, and each host's interface, is free.
    thread_free: Vec<f64>,
    out_free: Vec<f64>,
    in_free: Vec<f64>,
    links: HashMap<(Rank, Rank), InFlight>,
    /// By setter, taker, half and semaphore: when the taker sees what was set and not taken yet.
    signals: HashMap<(Rank, Rank, usize, Semaphore), VecDeque<f64>>,
    /// The wait that each rank is in.
    waits: Vec<Option<usize>>,
    events: BinaryHeap<Reverse<(Time, usize, Event)>>,
    next_event: usize,
}

/// For each step of a plan, the steps of the window before it that it must follow.
fn must_follow(plan: &Plan, window: usize) -> Vec<Vec<usize>> {
    let steps = &plan.steps;
    let before = |step: usize| {
        let window = step.saturating_sub(window)..step;
        let follows = |earlier: &usize| steps[step].must_follow(&steps[*earlier]);
        window.filter(follows).collect()
    };
    (0..steps.len()).map(before).collect()
}

impl<'a> Machine<'a> {
    fn new(plans: &'a [Plan], cost: &'a CostModel) -> Self {
        let hosts = cost
            .topology
            .host_of
            .iter()
            .max()
            .map_or(0, |last| last + 1);
        let mut ranks_on = vec![0usize; hosts];
        for &host in &cost.topology.host_of {
            ranks_on[host] += 1;
        }
        let cores = cost.topology.cores_per_host.max(1) as f64;
        let crowding = |&host: &usize| (ranks_on[host] as f64 / cores).max(1.0);
        Self {
            plans,
            cost,
            slowdown: cost.topology.host_of.iter().map(crowding).collect(),
            heads: vec![0; plans.len()],
            progress: plans
                .iter()
                .map(|plan| vec![Progress::Waiting; plan.steps.len()])
                .collect(),
            must_follow: plans
                .iter()
                .map(|plan| must_follow(plan, cost.window))
                .collect(),
            thread_free: vec![0.0; plans.len()],
            out_free: vec![0.0; hosts],
            in_free: vec![0.0; hosts],
            links: HashMap::new(),
            signals: HashMap::new(),
            waits: vec![None; plans.len()],
            events: BinaryHeap::new(),
            next_event: 0,
        }
    }

    fn at(&mut self, time: f64, event: Event) {
        self.next_event += 1;
        self.events
            .push(Reverse((Time(time), self.next_event, event)));
    }

    /// Occupies the thread of `rank` for `seconds`, from `now` or when it is free; returns the end.
    fn work(&mut self, rank: Rank, now: f64, seconds: f64) -> f64 {
        let start = now.max(self.thread_free[rank]);
        self.thread_free[rank] = start + (seconds + self.cost.per_step) * self.slowdown[rank];
        self.thread_free[rank]
    }

    /// `None` when both are on one host.
    fn hosts(&self, from: Rank, to: Rank) -> Option<(usize, usize)> {
        let host_of = &self.cost.topology.host_of;
        (host_of[from] != host_of[to]).then(|| (host_of[from], host_of[to]))
    }

    fn activate(&mut self, rank: Rank, now: f64) {
        let steps = &self.plans[rank].steps;
        while self.progress[rank].get(self.heads[rank]) == Some(&Progress::Done) {
            self.heads[rank] += 1;
        }
        let head = self.heads[rank];
        let window = match self.plans[rank].order {
            Order::Overlapping => self.cost.window,
            Order::InOrder => 1,
        };
        for step in head..steps.len().min(head + window) {
            let progress = &self.progress[rank];
            let mut earlier = self.must_follow[rank][step].iter();
            let free = progress[step] == Progress::Waiting
                && earlier.all(|earlier| progress[*earlier] == Progress::Done);
            if free {
                self.progress[rank][step] = Progress::Active;
                self.start(rank, step, now);
            }
        }
    }

    fn start(&mut self, rank: Rank, step: usize, now: f64) {
        match self.plans[rank].steps[step] {
            Step::Send { to, src } => self.send(rank, to, step, self.cost.bytes(src), now),
            Step::Recv { from, .. } | Step::Fold { from, .. } => {
                let link = self.links.entry((from, rank)).or_default();
                match link.arrived.pop_front() {
                    Some((arrival, bytes)) => {
                        self.at(now.max(arrival), Event::Receive { rank, step, bytes });
                    }
                    None => link.waiting = Some(step),
                }
            }
            Step::Copy { src, .. } | Step::Reduce { src, .. } | Step::Finish { src, .. } => {
                let seconds = self.cost.bytes(src) * self.cost.memory_per_byte;
                let end = self.work(rank, now, seconds);
                self.at(end, Event::Done { rank, step });
            }
            Step::ReduceAll { dst, .. } => {
                // Every contribution is read once.
                let bytes = self.cost.bytes(dst) * self.plans.len() as f64;
                let end = self.work(rank, now, bytes * self.cost.inside.per_byte);
                self.at(end, Event::Done { rank, step });
            }
            Step::Signal { half, what, to } => {
                let end = self.work(rank, now, 0.0);
                self.at(end, Event::Done { rank, step });
                for peer in to.iter() {
                    let seen = end + self.cost.inside.latency;
                    let signals = self.signals.entry((rank, peer, half, what)).or_default();
                    signals.push_back(seen);
                    self.at(seen, Event::Signalled { rank: peer });
                }
            }
            Step::Wait { .. } => self.wait(rank, step, now),
        }
    }

    /// Ends a wait for which all signals are there; else the last of them will try again.
    fn wait(&mut self, rank: Rank, step: usize, now: f64) {
        let Step::Wait {
            half,
            what,
            from,
            take,
        } = self.plans[rank].steps[step]
        else {
            unreachable!("only waits wait");
        };
        let is_set = |peer| {
            let signals = self.signals.get(&(peer, rank, half, what));
            match signals {
                // All halves are empty at first.
                None => what == Semaphore::Empty,
                Some(signals) => signals.front().is_some_and(|seen| *seen <= now),
            }
        };
        self.waits[rank] = Some(step);
        if !from.iter().all(is_set) {
            return;
        }
        self.waits[rank] = None;
        for peer in take.iter() {
            let signals = self.signals.entry((peer, rank, half, what)).or_default();
            signals.pop_front();
        }
        let end = self.work(rank, now, 0.0);
        self.at(end, Event::Done { rank, step });
    }

    fn send(&mut self, from: Rank, to: Rank, step: usize, bytes: f64, now: f64) {
        let (sent, arrival) = match self.hosts(from, to) {
            None => {
                let sent = self.work(from, now, self.cost.inside.per_message);
                (sent, sent + self.cost.inside.latency)
            }
            Some((out, _)) => {
                let handed = self.work(from, now, self.cost.across.per_message);
                let sent = handed.max(self.out_free[out]) + bytes * self.cost.across.per_byte;
                self.out_free[out] = sent;
                // The first byte arrives a latency after it left; the receiving lane is counted on arrival.
                let first = sent - bytes * self.cost.across.per_byte;
                (sent, first + self.cost.across.latency)
            }
        };
        self.at(sent, Event::Done { rank: from, step });
        let link = self.links.entry((from, to)).or_default();
        match link.waiting.take() {
            Some(step) => self.at(
                arrival,
                Event::Receive {
                    rank: to,
                    step,
                    bytes,
                },
            ),
            None => link.arrived.push_back((arrival, bytes)),
        }
    }

    fn receive(&mut self, rank: Rank, step: usize, bytes: f64, now: f64) {
        let (Step::Recv { from, .. } | Step::Fold { from, .. }) = self.plans[rank].steps[step]
        else {
            unreachable!("only receives receive");
        };
        match self.hosts(from, rank) {
            None => {
                let cost = self.cost.inside;
                let end = self.work(rank, now, cost.per_message + bytes * cost.per_byte);
                self.at(end, Event::Done { rank, step });
            }
            Some((_, host)) => {
                let arrived = now.max(self.in_free[host]) + bytes * self.cost.across.per_byte;
                self.in_free[host] = arrived;
                self.at(arrived, Event::Arrived { rank, step });
            }
        }
    }
}
