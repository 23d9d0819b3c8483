//! A world before it begins: its ranks and hosts, the calls of each rank, and what goes wrong.

use std::time::Duration;

use super::masked::Numbers;
use super::program::{Step, Style};
use super::random::Random;
use crate::plan::Algorithm;
use crate::types::Rank;

/// The place of a rank in its world: all ranks of the first team, then those of the second.
pub(super) type Seat = usize;

/// How long an operation may take, in seconds.
pub(super) const TIMEOUT: u64 = 20;

/// Everything that a seed decides of a team before the first step.
#[derive(Debug)]
pub(super) struct Scenario {
    pub(super) world: usize,
    /// The process of each rank, by its rank in the group of all.
    pub(super) processes: Vec<Rank>,
    /// The host of each rank.
    pub(super) hosts: Vec<usize>,
    /// Names and values.
    pub(super) settings: Vec<(String, String)>,
    pub(super) steps: Vec<Step>,
    /// Whether a rank waits for the end of a step before it begins the next.
    pub(super) waits: Vec<bool>,
    pub(super) fault: Fault,
    /// The numbers of the ranks, where they are those of a larger group.
    pub(super) numbers: Option<Numbers>,
    /// The links that were asked for, where a seed does not decide. Nothing then happens that was not asked for.
    pub(super) asked: Option<Asked>,
}

/// The links between the hosts of a world that is asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) latency: Duration,
    /// Seconds for a byte out of a host.
    pub(super) byte: f64,
}

/// The one thing that goes wrong, if anything does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// The process ends; what it has sent arrives, or a part of it is lost.
    Death {
        rank: Rank,
        at: Duration,
        loses: bool,
    },
    /// Its host is cut off, without a sign.
    Dark {
        rank: Rank,
        at: Duration,
    },
    /// The connections between its host and others break, and are mended after a while.
    Outage {
        rank: Rank,
        at: Duration,
        lasts: Duration,
    },
    /// It does not run for a while.
    Pause {
        rank: Rank,
        at: Duration,
        lasts: Duration,
    },
    /// It aborts the group instead of a step.
    Abort {
        rank: Rank,
        step: usize,
    },
    /// It makes another call than the others.
    Mistake {
        rank: Rank,
        step: usize,
        how: u64,
    },
    /// It leaves out a step.
    Skip {
        rank: Rank,
        step: usize,
    },
    /// It closes its communicator before a step.
    Leave {
        rank: Rank,
        step: usize,
    },
    /// The header of a message that it sends to another host is not what it should be, in one bit.
    Lie {
        rank: Rank,
        at: Duration,
        how: u64,
    },
    /// It makes a call that is refused, before a step.
    Nonsense {
        rank: Rank,
        step: usize,
    },
}

impl Scenario {
    pub(super) fn new(random: &mut Random) -> Self {
        let world = 2 + random.below(4);
        let hosts = match random.below(4) {
            0 => vec![0; world],
            1 => (0..world).map(|_| random.below(2)).collect(),
            _ => (0..world).collect(),
        };
        let algorithm = match random.once_in(3) {
            true => random.pick(&Algorithm::ALL).name(),
            false => "auto",
        };
        let settings = [
            ("algorithm", algorithm.to_owned()),
            ("timeout", TIMEOUT.to_string()),
            (
                "eager_bytes",
                random.pick(&["0", "64", "1K", "64K"]).to_owned(),
            ),
            ("ring_bytes", random.pick(&["4K", "64K"]).to_owned()),
            // How fast this machine lends decides nothing here.
            ("lend_bytes", random.pick(&["none", "4K", "64K"]).to_owned()),
        ];
        let settings = settings.map(|(name, value)| (name.to_owned(), value));
        let (steps, waits) = program(random, world, &hosts);
        let fault = Fault::random(random, world, steps.len());
        Self {
            world,
            processes: (0..world).collect(),
            hosts,
            settings: settings.to_vec(),
            steps,
            waits,
            fault,
            numbers: random.once_in(4).then(|| Numbers::random(random, world)),
            asked: None,
        }
    }

    /// Whether the step after this one is the same call.
    pub(super) fn is_repeated(&self, step: usize) -> bool {
        let next = self.steps.get(step + 1);
        next.is_some_and(|next| next.is_like(&self.steps[step]))
    }

    /// A second team: some of the processes make a group of their own, beside that of all, with a program of its own. A fault
    /// of a process is one of both its ranks. A bad call is made in one of the two groups.
    pub(super) fn part(&mut self, random: &mut Random) -> Self {
        let mut processes: Vec<Rank> = (0..self.world).collect();
        while processes.len() > 2 && random.once_in(2) {
            processes.remove(random.below(processes.len()));
        }
        // Its ranks are not in the order of the whole.
        let first = random.below(processes.len());
        processes.rotate_left(first);
        let world = processes.len();
        let hosts: Vec<usize> = processes
            .iter()
            .map(|process| self.hosts[*process])
            .collect();
        let (steps, waits) = program(random, world, &hosts);
        let rank_of = |process| processes.iter().position(|other| *other == process);
        let fault = match self.fault.time() {
            Some((process, _)) => rank_of(process).map(|rank| self.fault.of(rank)),
            None if self.fault.place().is_some() && random.once_in(2) => {
                let place = (random.below(world), random.below(steps.len()));
                Some(std::mem::replace(&mut self.fault, Fault::None).at(place))
            }
            None => None,
        };
        Self {
            world,
            processes,
            hosts,
            settings: self.settings.clone(),
            steps,
            waits,
            // A lie is told to the group of all.
            fault: fault
                .filter(|it| !matches!(it, Fault::Lie { .. }))
                .unwrap_or(Fault::None),
            numbers: random.once_in(4).then(|| Numbers::random(random, world)),
            asked: None,
        }
    }
}

/// The steps of a team, and whether a rank waits for the end of each.
fn program(random: &mut Random, world: usize, hosts: &[usize]) -> (Vec<Step>, Vec<bool>) {
    let count = 1 + random.below(10);
    // Ranks of one host work in each other's memory where there is much to do.
    let is_near = hosts.iter().all(|host| *host == hosts[0]);
    let style = Style {
        long_once_in: if is_near { random.pick(&[2, 20]) } else { 20 },
        heap_once_in: random.pick(&[1, 3]),
    };
    let mut steps: Vec<Step> = Vec::with_capacity(count);
    for _ in 0..count {
        // As trainers do, some make the same call again.
        let last = steps.last().filter(|_| random.once_in(4));
        let again = last.and_then(|step| step.again(random));
        steps.push(again.unwrap_or_else(|| Step::random(random, world, style)));
    }
    let waits = (0..count).map(|_| random.below(3) > 0).collect();
    (steps, waits)
}

impl Fault {
    fn random(random: &mut Random, world: usize, steps: usize) -> Self {
        let rank = random.below(world);
        let step = random.below(steps);
        let at = Duration::from_nanos(random.length(20_000_000) as u64);
        match random.below(16) {
            0 | 1 => Self::Death {
                rank,
                at,
                loses: random.once_in(2),
            },
            2 => Self::Dark { rank, at },
            3 => {
                let lasts = Duration::from_millis(random.length(60_000) as u64);
                Self::Pause { rank, at, lasts }
            }
            4 => Self::Abort { rank, step },
            5 | 6 => Self::Mistake {
                rank,
                step,
                how: random.next(),
            },
            7 => Self::Skip { rank, step },
            8 => Self::Leave { rank, step },
            9 => Self::Lie {
                rank,
                at,
                how: random.next(),
            },
            10 => Self::Nonsense { rank, step },
            11 | 12 => {
                let lasts = Duration::from_millis(random.length(5_000) as u64);
                Self::Outage { rank, at, lasts }
            }
            _ => Self::None,
        }
    }

    /// The same, of another rank.
    fn of(mut self, other: Rank) -> Self {
        if let Self::Death { rank, .. }
        | Self::Dark { rank, .. }
        | Self::Outage { rank, .. }
        | Self::Pause { rank, .. }
        | Self::Lie { rank, .. } = &mut self
        {
            *rank = other;
        }
        self
    }

    /// The same, of another rank and in another step.
    fn at(mut self, place: (Rank, usize)) -> Self {
        if let Self::Abort { rank, step }
        | Self::Mistake { rank, step, .. }
        | Self::Skip { rank, step }
        | Self::Leave { rank, step }
        | Self::Nonsense { rank, step } = &mut self
        {
            (*rank, *step) = place;
        }
        self
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::None => "no fault",
            Self::Death { loses: false, .. } => "a death",
            Self::Death { loses: true, .. } => "a death that loses bytes",
            Self::Dark { .. } => "a dark host",
            Self::Outage { .. } => "an outage",
            Self::Pause { .. } => "a pause",
            Self::Abort { .. } => "an abort",
            Self::Mistake { .. } => "a mistake",
            Self::Skip { .. } => "a step left out",
            Self::Leave { .. } => "an early farewell",
            Self::Lie { .. } => "a lie",
            Self::Nonsense { .. } => "a call that is refused",
        }
    }

    /// The rank and the step in which it happens, if it has one.
    pub(super) fn place(&self) -> Option<(Rank, usize)> {
        match *self {
            Self::Abort { rank, step }
            | Self::Mistake { rank, step, .. }
            | Self::Skip { rank, step }
            | Self::Leave { rank, step }
            | Self::Nonsense { rank, step } => Some((rank, step)),
            _ => None,
        }
    }

    /// The rank and the time from which on it happens, if it has one.
    pub(super) fn time(&self) -> Option<(Rank, Duration)> {
        match *self {
            Self::Death { rank, at, .. }
            | Self::Dark { rank, at }
            | Self::Outage { rank, at, .. }
            | Self::Pause { rank, at, .. }
            | Self::Lie { rank, at, .. } => Some((rank, at)),
            _ => None,
        }
    }

    /// The rank at fault.
    pub(super) fn rank(&self) -> Option<Rank> {
        let placed = self.place().map(|(rank, _)| rank);
        placed.or_else(|| self.time().map(|(rank, _)| rank))
    }
}
